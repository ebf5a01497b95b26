//! Q8_0: 32 signed bytes and one F16 scale. Never uses the code -128 when encoding, though it decodes it.
//! Surprising fact: the block is 34 bytes, so blocks are only 2-byte aligned.

use half::f16;

/// Values of a block.
pub const VALUES: usize = 32;
/// Bytes of a block: F16 scale, 32 codes.
pub const BYTES: usize = 34;

/// Decodes one block.
pub fn decode(block: &[u8; BYTES], out: &mut [f32; VALUES]) {
    let d = f16::from_le_bytes([block[0], block[1]]).to_f32();
    for (y, q) in out.iter_mut().zip(&block[2..]) {
        *y = f32::from(*q as i8) * d;
    }
}
