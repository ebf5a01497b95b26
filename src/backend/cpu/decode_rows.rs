//! Decoding of n-gram rows (spec 4.4).
//! Never meets a code that is no number: whoever brings rows has looked. Surprising fact: the product is rounded to BF16, since the model was
//! trained with such rows.

use super::CpuBackend;
use crate::backend::ops::DecodeRows;
use crate::quant::minifloat::scaled_e4m3;

pub fn decode_rows(op: DecodeRows<'_, CpuBackend>, out: &mut [f32]) {
    let row_bytes = op.width + op.width / 32;
    let bytes: &[u8] = bytemuck::cast_slice(op.bytes);
    for (row, out) in bytes.chunks_exact(row_bytes).zip(out[..op.rows * op.width].chunks_exact_mut(op.width)) {
        let (codes, scales) = row.split_at(op.width);
        for ((codes, out), scale) in codes.chunks_exact(32).zip(out.chunks_exact_mut(32)).zip(scales) {
            for (code, out) in codes.iter().zip(out) {
                *out = scaled_e4m3(*code, *scale);
            }
        }
    }
}
