//! Scores of compressed rows for the selection (spec 3.7).
//! Never scores a key that the row does not see. Surprising fact: negative dots count as zero before the head weights,
//! which may themselves be negative.

use super::{CpuBackend, lanes, threads::Threads};
use crate::backend::ops::IndexScores;

/// Keys that one task scores: enough to outweigh waking a worker, few enough to balance a single row.
const KEYS_PER_TASK: usize = 256;

pub fn index_scores(threads: &Threads, op: IndexScores<'_, CpuBackend>, scores: &mut [f32]) {
    let (heads, width, stride) = (op.heads, op.width, op.stride);
    for (at, r) in op.rows.clone().enumerate() {
        let visible = op.visible.groups(r);
        let q = &op.q[r * heads * width..][..heads * width];
        let head_weights = &op.head_weights[r * heads..][..heads];
        let row = &mut scores[at * stride..][..visible];
        let score = |first: usize, out: &mut [f32]| {
            for (j, out) in out.iter_mut().enumerate() {
                let key = &op.keys[(first + j) * width..][..width];
                let mut sum = 0.0f32;
                for (head, weight) in q.chunks_exact(width).zip(head_weights) {
                    sum += weight * lanes::dot(head, key).max(0.0);
                }
                *out = sum * op.scale;
            }
        };
        let whole = visible / KEYS_PER_TASK * KEYS_PER_TASK;
        let (tasks, tail) = row.split_at_mut(whole);
        threads.parts(tasks, KEYS_PER_TASK, KEYS_PER_TASK * heads * width, |i, out| score(i * KEYS_PER_TASK, out));
        score(whole, tail);
    }
}
