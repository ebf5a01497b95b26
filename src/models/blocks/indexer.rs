//! Scores of compressed rows by their index keys. Never chooses: architectures differ in what is chosen from.
//! Surprising fact: scores are held for few rows at a time, since a row of them is as long as the context has compressed rows.

use std::ops::Range;

use super::architecture::Architecture;
use super::pass::Ctx;
use super::workspace::Workspace;
use crate::backend::ops::{self, Visibility};
use crate::backend::{Backend, BackendError};

impl<B: Backend, A: Architecture<B>> Ctx<'_, B, A> {
    /// `scores = [rows, score_stride]` of the index queries of `rows` with all `keys` that they see.
    pub fn score(
        &self,
        w: &mut Workspace<B>,
        keys: &B::Buf,
        rows: Range<usize>,
        visible: Visibility,
    ) -> Result<(), BackendError> {
        let c = self.config;
        let op = ops::IndexScores {
            q: &w.index_q,
            head_weights: &w.index_weights,
            keys,
            rows,
            heads: c.index_heads,
            width: c.index_dim,
            visible,
            scale: 1.0 / ((c.index_dim * c.index_heads) as f32).sqrt(),
            stride: w.score_stride,
        };
        self.backend.index_scores(op, &mut w.scores)
    }
}
