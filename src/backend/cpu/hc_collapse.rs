//! Weighted sum of the residual streams: the input of a sublayer.
//! Never normalises. Surprising fact: the weights were made by the sublayer before (spec 3.3).

use super::{CpuBackend, lanes, parts::parts, pool::Pool};
use crate::backend::ops::HcCollapse;

pub fn hc_collapse(pool: &Pool, op: HcCollapse<'_, CpuBackend>, out: &mut [f32]) {
    let n = op.stream_count;
    parts(pool, &mut out[..op.rows * op.hidden], op.hidden, n * op.hidden, |r, out| {
        let streams = &op.streams[r * n * op.hidden..][..n * op.hidden];
        out.fill(0.0);
        for (stream, weight) in streams.chunks_exact(op.hidden).zip(&op.weights[r * n..][..n]) {
            lanes::add_scaled(*weight, stream, out);
        }
    });
}
