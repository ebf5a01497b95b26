//! Q6_K: 16 sub-blocks of 16 values in -32..=31, each with a signed byte as scale under one F16 factor.
//! Never has a minimum. Surprising fact: the low nibbles of value `i` and of value `i + 64` share a byte, while the
//! high bit pairs of `i`, `i + 32`, `i + 64`, `i + 96` share one.

use super::signed_fit::{self, Limits};
use super::superblock::{SuperBlock, TooLarge};
use half::f16;

/// Values of a block.
pub const VALUES: usize = 256;
/// Bytes of a block: 128 bytes of low nibbles, 64 bytes of high pairs, 16 scales, F16 d.
pub const BYTES: usize = 210;
/// Sub-blocks with a scale of their own.
pub const SUBS: usize = 16;

/// Byte and shift of the low nibble of value `i`.
pub const fn low_position(i: usize) -> (usize, usize) {
    (i / 128 * 64 + i % 64, i % 128 / 64 * 4)
}

/// Byte (counted from the first high byte) and shift of the high bit pair of value `i`.
pub const fn high_position(i: usize) -> (usize, usize) {
    (i / 128 * 32 + i % 32, i % 128 / 32 * 2)
}

/// Decodes one block.
pub fn decode(block: &[u8; BYTES], out: &mut [f32; VALUES]) {
    let d = f16::from_le_bytes([block[208], block[209]]).to_f32();
    let (low, rest) = block.split_at(128);
    let (high, scales) = rest.split_at(64);
    for (sub, values) in out.chunks_exact_mut(16).enumerate() {
        let scale = d * f32::from(scales[sub] as i8);
        let (low_first, low_shift) = low_position(16 * sub);
        let (high_first, high_shift) = high_position(16 * sub);
        for (l, y) in values.iter_mut().enumerate() {
            let code = (low[low_first + l] >> low_shift) & 15 | ((high[high_first + l] >> high_shift) & 3) << 4;
            *y = scale * f32::from(code as i8 - 32);
        }
    }
}

/// Encodes one block of finite values; `importance` weighs their squared errors.
pub(super) fn encode(
    values: &[f32; VALUES],
    importance: Option<&[f32; VALUES]>,
    out: &mut [u8; BYTES],
) -> Result<(), TooLarge> {
    const LIMITS: Limits = Limits {
        code_half: 32.0,
        scale_half: 128.0,
        targets: &[26.5, 27.2, 27.9, 28.6, 29.3, 30.0, 30.7, 31.4, 32.1, 32.5],
    };
    let fitted = signed_fit::fit(&SuperBlock::new(values, importance), LIMITS)?;
    out.fill(0);
    for (i, code) in fitted.codes.iter().enumerate() {
        let code = (code + 32) as u8;
        let (low, low_shift) = low_position(i);
        let (high, high_shift) = high_position(i);
        out[low] |= (code & 15) << low_shift;
        out[128 + high] |= (code >> 4) << high_shift;
    }
    for (byte, scale) in out[192..208].iter_mut().zip(&fitted.scales) {
        *byte = *scale as u8;
    }
    out[208..].copy_from_slice(&fitted.d.to_le_bytes());
    Ok(())
}
