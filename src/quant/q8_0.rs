//! Q8_0: 32 signed bytes and one F16 scale. Never uses the code -128 when encoding, though it decodes it.
//! Surprising fact: the block is 34 bytes, so blocks are only 2-byte aligned.

use super::minifloat::round_even_small;
use super::superblock::{TooLarge, factor_to_f16, limit};
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

/// Encodes one block of finite values: each to its nearest code, ties to even.
pub(super) fn encode(values: &[f32; VALUES], out: &mut [u8; BYTES]) -> Result<(), TooLarge> {
    let mut amax = values.iter().fold(0f32, |m, v| m.max(v.abs()));
    let mut d = factor_to_f16(amax / 127.0);
    if !d.is_finite() {
        return Err(TooLarge);
    }
    // Among subnormal factors the stored one may be so much larger than wanted that the largest code falls below 127
    // and a second encoding would choose a smaller factor. Take that one at once: encoding decoded values is exact.
    while d > f16::ZERO {
        let top = round_even_small(amax / d.to_f32()).min(127.0) * d.to_f32();
        let again = factor_to_f16(top / 127.0);
        if again >= d {
            break;
        }
        (amax, d) = (top, again);
    }
    out[..2].copy_from_slice(&d.to_le_bytes());
    // Divided, not multiplied by the inverse: whole multiples of the factor must give whole numbers.
    let step = if d > f16::ZERO { d.to_f32() } else { f32::INFINITY };
    for (q, x) in out[2..].iter_mut().zip(values) {
        *q = limit(round_even_small(x / step), -127.0, 127.0) as i8 as u8;
    }
    Ok(())
}
