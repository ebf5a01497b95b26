//! Rotary position embedding of interleaved pairs on the last values of each head.
//! Never scales magnitudes (YaRN's factor is 1 here). Surprising fact: the angle is an F32 product, as in the
//! published implementations; sine and cosine of it are taken in F64 and rounded once.

use super::{CpuBackend, parts::parts, pool::Pool};
use crate::backend::ops::Rope;

pub fn rope(pool: &Pool, op: Rope<'_, CpuBackend>, x: &mut [f32]) {
    let row_len = op.heads * op.width;
    let pairs = op.rotary / 2;
    let freqs = &op.freqs[..pairs];
    // A sine and a cosine cost about as much as 40 multiplications each.
    let cost = 80 * pairs + 4 * op.heads * op.rotary;
    parts(pool, &mut x[..op.rows * row_len], row_len, cost, |r, row| {
        let pos = (op.first_pos + r * op.pos_step) as f32;
        for (i, freq) in freqs.iter().enumerate() {
            let (sin, cos) = f64::from(pos * freq).sin_cos();
            let (sin, cos) = (if op.inverse { -sin as f32 } else { sin as f32 }, cos as f32);
            for head in row.chunks_exact_mut(op.width) {
                let at = op.width - op.rotary + 2 * i;
                let (a, b) = (head[at], head[at + 1]);
                head[at] = a * cos - b * sin;
                head[at + 1] = a * sin + b * cos;
            }
        }
    });
}
