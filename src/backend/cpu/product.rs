//! Products with weight rows that are decoded one at a time.
//! Never decodes a whole matrix. Surprising fact: it is slow and obvious, and serves until the kernels take over.

use super::{CpuBackend, lanes, threads::Threads};
use crate::backend::{BackendError, ops::Matmul};
use crate::quant::dequantize_row;

pub fn matmul(threads: &Threads, op: Matmul<'_, '_, CpuBackend>, out: &mut [f32]) -> Result<(), BackendError> {
    let w = op.w;
    let per_group = w.rows / op.groups;
    let row_bytes = w.bytes.len() / w.rows;
    let mut by_weight = vec![0.0f32; w.rows * op.rows];
    threads.parts(&mut by_weight, op.rows, op.rows * w.cols, |o, out| {
        let mut weights = vec![0.0f32; w.cols];
        dequantize_row(w.ty, &w.bytes[o * row_bytes..][..row_bytes], &mut weights).expect("checked at load");
        for (r, out) in out.iter_mut().enumerate() {
            let at = (r * op.groups + o / per_group) * w.cols;
            *out = lanes::dot(&op.x[at..at + w.cols], &weights);
        }
    });
    for r in 0..op.rows {
        for o in 0..w.rows {
            out[r * w.rows + o] = by_weight[o * op.rows + r];
        }
    }
    Ok(())
}
