//! Gather and scatter of rows by index: how rows are grouped by expert and how expert outputs go back.
//! Never adds: each output row has its own place, so landing order cannot matter.

use super::CpuBackend;
use crate::backend::ops::MoveRows;

pub fn gather_rows(op: MoveRows<'_, CpuBackend>, out: &mut [f32]) {
    for (out, index) in out.chunks_exact_mut(op.width).zip(&op.indices[op.range]) {
        out.copy_from_slice(&op.src[*index as usize * op.width..][..op.width]);
    }
}

pub fn scatter_rows(op: MoveRows<'_, CpuBackend>, dst: &mut [f32]) {
    for (src, index) in op.src.chunks_exact(op.width).zip(&op.indices[op.range]) {
        dst[*index as usize * op.width..][..op.width].copy_from_slice(src);
    }
}
