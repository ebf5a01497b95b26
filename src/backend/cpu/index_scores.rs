//! Scores of compressed rows for the selection (spec 3.7).
//! Never scores a key that the row does not see. Surprising fact: negative dots count as zero before the head weights,
//! which may themselves be negative.

use super::{CpuBackend, lanes, parts::parts, pool::Pool};
use crate::backend::ops::{IndexScores, SCORE_STRIDE};

pub fn index_scores(pool: &Pool, op: IndexScores<'_, CpuBackend>, scores: &mut [f32]) {
    let (heads, width) = (op.heads, op.width);
    assert!(op.stride.is_multiple_of(SCORE_STRIDE), "score rows are whole tasks of {SCORE_STRIDE} keys");
    let tasks_per_row = op.stride / SCORE_STRIDE;
    let scores = &mut scores[..op.rows.len() * op.stride];
    parts(pool, scores, SCORE_STRIDE, SCORE_STRIDE * heads * width, |task, out| {
        let r = op.rows.start + task / tasks_per_row;
        let first = task % tasks_per_row * SCORE_STRIDE;
        let visible = op.visible.groups(r).saturating_sub(first).min(SCORE_STRIDE);
        let q = &op.q[r * heads * width..][..heads * width];
        let head_weights = &op.head_weights[r * heads..][..heads];
        for (j, out) in out[..visible].iter_mut().enumerate() {
            let key = &op.keys[(first + j) * width..][..width];
            let mut sum = 0.0f32;
            for (head, weight) in q.chunks_exact(width).zip(head_weights) {
                sum += weight * lanes::dot(head, key).max(0.0);
            }
            *out = sum * op.scale;
        }
    });
}
