//! Q3_K: 16 sub-blocks of 16 values in -4..=3, each with a signed 6-bit scale under one F16 factor.
//! Never has a minimum. Surprising fact: the third bit of a code lives in a separate mask where a *set* bit means that
//! nothing is subtracted.

use super::q2_k::code_position;
use super::signed_fit::{self, Limits};
use super::superblock::{SuperBlock, TooLarge};
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

/// Encodes one block of finite values; `importance` weighs their squared errors.
pub(super) fn encode(
    values: &[f32; VALUES],
    importance: Option<&[f32; VALUES]>,
    out: &mut [u8; BYTES],
) -> Result<(), TooLarge> {
    const LIMITS: Limits = Limits { code_half: 4.0, scale_half: 32.0, targets: &[2.5, 2.9, 3.3, 3.7, 4.1, 4.5] };
    let fitted = signed_fit::fit(&SuperBlock::new(values, importance), LIMITS)?;
    out.fill(0);
    for (i, code) in fitted.codes.iter().enumerate() {
        let code = (code + 4) as u8;
        let (byte, shift) = code_position(i);
        out[32 + byte] |= (code & 3) << shift;
        out[i % 32] |= (code >> 2) << (i / 32);
    }
    out[96..108].copy_from_slice(&pack_scales(&fitted.scales));
    out[108..].copy_from_slice(&fitted.d.to_le_bytes());
    Ok(())
}
