//! Scores of compressed rows for the selection (spec 3.7).
//! Never scores a key that the row does not see. Surprising fact: negative dots count as zero before the head weights,
//! which may themselves be negative.

use std::cell::RefCell;

use super::simd::Usable;
use super::simd::rows::RowList;
use super::{CpuBackend, parts::parts, pool::Pool};
use crate::backend::ops::{IndexScores, SCORE_STRIDE};

thread_local! {
    /// Row offsets and products of one task; kept so that decode does not allocate.
    static SCRATCH: RefCell<(Vec<usize>, Vec<f32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

pub fn index_scores(pool: &Pool, level: Usable, op: IndexScores<'_, CpuBackend>, scores: &mut [f32]) {
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
        SCRATCH.with_borrow_mut(|(offsets, dots)| {
            offsets.clear();
            offsets.extend((first..first + visible).map(|key| key * width));
            dots.clear();
            dots.resize(heads * visible, 0.0);
            level.row_dots(q, RowList { base: op.keys, offsets, width }, dots, visible);
            for (j, out) in out[..visible].iter_mut().enumerate() {
                let mut sum = 0.0f32;
                for (h, weight) in head_weights.iter().enumerate() {
                    sum += weight * dots[h * visible + j].max(0.0);
                }
                *out = sum * op.scale;
            }
        });
    });
}
