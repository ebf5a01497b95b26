//! Gated pooling of token pairs (spec 3.6, ratio 2).
//! Never overlaps pairs. Surprising fact: the pair that a chunk border cuts is carried as two F32 rows, so an odd
//! border changes no bit.

use super::{CpuBackend, lanes};
use crate::backend::ops::{PairsOut, PoolPairs};

pub fn pool_pairs(op: PoolPairs<'_, CpuBackend>, out: PairsOut<'_, CpuBackend>) -> usize {
    let width = op.width;
    let row = |buf: &'_ [f32], r: usize| -> std::ops::Range<usize> {
        debug_assert!(buf.len() >= (r + 1) * width);
        r * width..(r + 1) * width
    };
    let mut pairs = 0;
    for r in 0..op.rows {
        if (op.first_pos + r).is_multiple_of(2) {
            continue;
        }
        let second = (&op.values[row(op.values, r)], &op.gates[row(op.gates, r)]);
        let first = match r.checked_sub(1) {
            Some(before) => (&op.values[row(op.values, before)], &op.gates[row(op.gates, before)]),
            None => (&op.open_values[..width], &op.open_gates[..width]),
        };
        let pooled = &mut out.pooled[pairs * width..][..width];
        for (i, pooled) in pooled.iter_mut().enumerate() {
            let max = first.1[i].max(second.1[i]);
            let (a, b) = (lanes::exp(first.1[i] - max), lanes::exp(second.1[i] - max));
            *pooled = (a * first.0[i] + b * second.0[i]) / (a + b);
        }
        pairs += 1;
    }
    if (op.first_pos + op.rows) % 2 == 1 {
        let last = op.rows - 1;
        out.open_values[..width].copy_from_slice(&op.values[row(op.values, last)]);
        out.open_gates[..width].copy_from_slice(&op.gates[row(op.gates, last)]);
    }
    pairs
}
