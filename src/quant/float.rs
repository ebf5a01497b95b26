//! Rows of plain floats: F32, F16, BF16, little endian. Never reads the machine's byte order.
//! Surprising fact: F16 stops at 65504, so a weight that BF16 holds easily may have no F16 value at all.

use super::minifloat::bf16_value;
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
