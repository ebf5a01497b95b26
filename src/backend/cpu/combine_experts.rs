//! Sum of a row's expert outputs in the order given, then the shared expert's (spec 3.9, step 6).
//! Never sums in landing order: that is what makes a streamed run equal a resident one bit for bit.

use super::{CpuBackend, lanes, parts::parts, pool::Pool};
use crate::backend::ops::CombineExperts;

pub fn combine_experts(pool: &Pool, op: CombineExperts<'_, CpuBackend>, out: &mut [f32]) {
    let (k, width) = (op.k, op.width);
    parts(pool, &mut out[..op.rows * width], width, (k + 1) * width, |r, out| {
        out.fill(0.0);
        let outputs = op.outputs[r * k * width..][..k * width].chunks_exact(width);
        for (output, weight) in outputs.zip(&op.weights[r * k..][..k]) {
            lanes::add_scaled(*weight, output, out);
        }
        for (out, shared) in out.iter_mut().zip(&op.shared[r * width..][..width]) {
            *out += shared;
        }
    });
}
