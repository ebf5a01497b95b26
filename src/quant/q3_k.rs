//! Q3_K: 16 sub-blocks of 16 values in -4..=3, each with a signed 6-bit scale under one F16 factor.
//! Never has a minimum. Surprising fact: the third bit of a code lives in a separate mask where a *set* bit means that
//! nothing is subtracted.

use super::q2_k::code_position;
use half::f16;

/// Values of a block.
pub const VALUES: usize = 256;
/// Bytes of a block: 32 bytes of high bits, 64 bytes of low bits, 12 bytes of scales, F16 d.
pub const BYTES: usize = 110;
/// Sub-blocks with a scale of their own.
pub const SUBS: usize = 16;

/// The sixteen scales, -32..=31.
pub fn unpack_scales(packed: &[u8; 12]) -> [i8; SUBS] {
    std::array::from_fn(|j| {
        let low = (packed[j % 8] >> (j / 8 * 4)) & 15;
        let high = (packed[8 + j % 4] >> (j / 4 * 2)) & 3;
        (low | (high << 4)) as i8 - 32
    })
}

/// Inverse of [`unpack_scales`].
pub fn pack_scales(scales: &[i8; SUBS]) -> [u8; 12] {
    let mut packed = [0; 12];
    for (j, scale) in scales.iter().enumerate() {
        let code = (scale + 32) as u8;
        packed[j % 8] |= (code & 15) << (j / 8 * 4);
        packed[8 + j % 4] |= (code >> 4) << (j / 4 * 2);
    }
    packed
}

/// Decodes one block.
pub fn decode(block: &[u8; BYTES], out: &mut [f32; VALUES]) {
    let d = f16::from_le_bytes([block[108], block[109]]).to_f32();
    let mut packed = [0; 12];
    packed.copy_from_slice(&block[96..108]);
    let scales = unpack_scales(&packed);
    let (high, low) = block[..96].split_at(32);
    for (sub, values) in out.chunks_exact_mut(16).enumerate() {
        let scale = d * f32::from(scales[sub]);
        let (first, shift) = code_position(16 * sub);
        let bit = sub / 2;
        for (l, y) in values.iter_mut().enumerate() {
            let code = (low[first + l] >> shift) & 3 | ((high[first % 32 + l] >> bit) & 1) << 2;
            *y = scale * f32::from(code as i8 - 4);
        }
    }
}
