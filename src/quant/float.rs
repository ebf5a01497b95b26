//! Rows of plain floats: F32, F16, BF16, little endian. Never reads the machine's byte order.
//! Surprising fact: F16 stops at 65504, so a weight that BF16 holds easily may have no F16 value at all.

use super::minifloat::{bf16_bits, bf16_value};
use super::superblock::TooLarge;
use half::f16;

/// Decodes F32.
pub fn f32_decode(bytes: &[u8; 4], out: &mut [f32; 1]) {
    out[0] = f32::from_le_bytes(*bytes);
}

/// Decodes F16.
pub fn f16_decode(bytes: &[u8; 2], out: &mut [f32; 1]) {
    out[0] = f16::from_le_bytes(*bytes).to_f32();
}

/// Decodes BF16.
pub fn bf16_decode(bytes: &[u8; 2], out: &mut [f32; 1]) {
    out[0] = bf16_value(u16::from_le_bytes(*bytes));
}

/// Encodes F32: the same bits.
pub(super) fn f32_encode(value: &[f32; 1], out: &mut [u8; 4]) -> Result<(), TooLarge> {
    *out = value[0].to_le_bytes();
    Ok(())
}

/// Encodes F16: nearest, ties to even.
pub(super) fn f16_encode(value: &[f32; 1], out: &mut [u8; 2]) -> Result<(), TooLarge> {
    let rounded = f16::from_f32(value[0]);
    *out = rounded.to_le_bytes();
    if rounded.is_finite() { Ok(()) } else { Err(TooLarge) }
}

/// Encodes BF16: nearest, ties to even.
pub(super) fn bf16_encode(value: &[f32; 1], out: &mut [u8; 2]) -> Result<(), TooLarge> {
    let bits = bf16_bits(value[0]);
    *out = bits.to_le_bytes();
    if bf16_value(bits).is_finite() { Ok(()) } else { Err(TooLarge) }
}
