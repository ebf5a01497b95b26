//! Root-mean-square norm with a weight a channel.
//! Never subtracts a mean. Surprising fact: V4.1 uses an epsilon of 1e-20, so rows of tiny values are scaled up in full.

use super::{CpuBackend, lanes, parts::parts, pool::Pool};
use crate::backend::ops::RmsNorm;

pub fn rms_norm(pool: &Pool, op: RmsNorm<'_, CpuBackend>, out: &mut [f32]) {
    let (x, weight) = (&op.x[..op.rows * op.width], &op.weight[..op.width]);
    parts(pool, &mut out[..op.rows * op.width], op.width, 4 * op.width, |r, out| {
        let row = &x[r * op.width..][..op.width];
        let factor = lanes::rms_factor(row, op.eps);
        for ((out, x), w) in out.iter_mut().zip(row).zip(weight) {
            *out = x * factor * w;
        }
    });
}
