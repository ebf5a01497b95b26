//! Q2_K: 16 sub-blocks of 16 values, each with a 4-bit scale and a 4-bit minimum under two F16 factors.
//! Never stores a negative minimum: values are `d * scale * q - dmin * min`.
//! Surprising fact: the two factors stand at the end of the block, after scales and codes.

use super::affine_fit::{self, Limits};
use super::superblock::{SuperBlock, TooLarge};
use half::f16;

/// Values of a block.
pub const VALUES: usize = 256;
/// Bytes of a block: 16 bytes of scales, 64 bytes of codes, F16 d, F16 dmin.
pub const BYTES: usize = 84;
/// Sub-blocks with a scale of their own.
pub const SUBS: usize = 16;

/// Byte and shift of the 2-bit code of value `i`: each half of 128 values has 32 bytes, whose bit pairs hold four
/// runs of 32 values.
pub const fn code_position(i: usize) -> (usize, usize) {
    (i / 128 * 32 + i % 32, i % 128 / 32 * 2)
}

/// Decodes one block.
pub fn decode(block: &[u8; BYTES], out: &mut [f32; VALUES]) {
    let d = f16::from_le_bytes([block[80], block[81]]).to_f32();
    let dmin = f16::from_le_bytes([block[82], block[83]]).to_f32();
    for (sub, values) in out.chunks_exact_mut(16).enumerate() {
        // Low nibble: scale, high nibble: minimum.
        let scale = d * f32::from(block[sub] & 15);
        let min = dmin * f32::from(block[sub] >> 4);
        let (first, shift) = code_position(16 * sub);
        for (y, byte) in values.iter_mut().zip(&block[16 + first..]) {
            *y = scale * f32::from((byte >> shift) & 3) - min;
        }
    }
}

/// Encodes one block of finite values; `importance` weighs their squared errors.
pub(super) fn encode(
    values: &[f32; VALUES],
    importance: Option<&[f32; VALUES]>,
    out: &mut [u8; BYTES],
) -> Result<(), TooLarge> {
    let fitted = affine_fit::fit::<16>(&SuperBlock::new(values, importance), Limits { code_max: 3, scale_max: 15 })?;
    out.fill(0);
    for (byte, (scale, min)) in out.iter_mut().zip(fitted.scales.iter().zip(&fitted.mins)) {
        *byte = scale | min << 4;
    }
    for (i, code) in fitted.codes.iter().enumerate() {
        let (byte, shift) = code_position(i);
        out[16 + byte] |= code << shift;
    }
    out[80..82].copy_from_slice(&fitted.d.to_le_bytes());
    out[82..].copy_from_slice(&fitted.dmin.to_le_bytes());
    Ok(())
}
