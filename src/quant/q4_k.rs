//! Q4_K: 8 sub-blocks of 32 values, each with a 6-bit scale and a 6-bit minimum under two F16 factors.
//! Never stores a negative minimum: values are `d * scale * q - dmin * min`.
//! Surprising fact: the upper two bits of the last four scales and minima hide in the bytes of the first four.

use super::affine_fit::{self, Limits};
use super::superblock::{SuperBlock, TooLarge};
use half::f16;

/// Values of a block.
pub const VALUES: usize = 256;
/// Bytes of a block: F16 d, F16 dmin, 12 bytes of scales, 128 bytes of codes.
pub const BYTES: usize = 144;
/// Sub-blocks with a scale of their own.
pub const SUBS: usize = 8;

/// The eight 6-bit scales and the eight 6-bit minima.
pub fn unpack_scales(packed: &[u8; 12]) -> ([u8; SUBS], [u8; SUBS]) {
    let (mut scales, mut mins) = ([0; SUBS], [0; SUBS]);
    for j in 0..4 {
        scales[j] = packed[j] & 63;
        mins[j] = packed[j + 4] & 63;
        scales[j + 4] = (packed[j + 8] & 15) | ((packed[j] >> 6) << 4);
        mins[j + 4] = (packed[j + 8] >> 4) | ((packed[j + 4] >> 6) << 4);
    }
    (scales, mins)
}

/// Inverse of [`unpack_scales`]; entries are below 64.
pub fn pack_scales(scales: &[u8; SUBS], mins: &[u8; SUBS]) -> [u8; 12] {
    let mut packed = [0; 12];
    for j in 0..4 {
        packed[j] = scales[j] | ((scales[j + 4] >> 4) << 6);
        packed[j + 4] = mins[j] | ((mins[j + 4] >> 4) << 6);
        packed[j + 8] = (scales[j + 4] & 15) | ((mins[j + 4] & 15) << 4);
    }
    packed
}

/// Decodes one block.
pub fn decode(block: &[u8; BYTES], out: &mut [f32; VALUES]) {
    let d = f16::from_le_bytes([block[0], block[1]]).to_f32();
    let dmin = f16::from_le_bytes([block[2], block[3]]).to_f32();
    let mut packed = [0; 12];
    packed.copy_from_slice(&block[4..16]);
    let (scales, mins) = unpack_scales(&packed);
    // 32 bytes of codes serve two sub-blocks: low nibbles the even one, high nibbles the odd one.
    for (pair, codes) in block[16..].chunks_exact(32).enumerate() {
        for half in 0..2 {
            let sub = 2 * pair + half;
            let scale = d * f32::from(scales[sub]);
            let min = dmin * f32::from(mins[sub]);
            for (y, byte) in out[32 * sub..][..32].iter_mut().zip(codes) {
                *y = scale * f32::from((byte >> (4 * half)) & 15) - min;
            }
        }
    }
}

/// Encodes one block of finite values; `importance` weighs their squared errors.
pub(super) fn encode(
    values: &[f32; VALUES],
    importance: Option<&[f32; VALUES]>,
    out: &mut [u8; BYTES],
) -> Result<(), TooLarge> {
    let fitted = affine_fit::fit::<32>(&SuperBlock::new(values, importance), Limits { code_max: 15, scale_max: 63 })?;
    out[..2].copy_from_slice(&fitted.d.to_le_bytes());
    out[2..4].copy_from_slice(&fitted.dmin.to_le_bytes());
    let ([scales, _], [mins, _]) = (fitted.scales.as_chunks().0, fitted.mins.as_chunks().0) else { unreachable!() };
    out[4..16].copy_from_slice(&pack_scales(scales, mins));
    for (bytes, codes) in out[16..].chunks_exact_mut(32).zip(fitted.codes.chunks_exact(64)) {
        for (i, byte) in bytes.iter_mut().enumerate() {
            *byte = codes[i] | codes[i + 32] << 4;
        }
    }
    Ok(())
}
