//! Work memory of a forward pass and of the rows of a sweep, sized by the configuration.
//! Never grows after the start. Surprising fact: query heads are made in the buffer of the attention output, which is free until then.

use super::config::Config;
use crate::backend::ops::SCORE_STRIDE;
use crate::backend::{Backend, BackendError};
use crate::models::RunnerOptions;
use crate::models::blocks::buffers;
use crate::models::blocks::moe::MoeWork;

/// Rows whose index scores are held at a time.
pub const SCORE_ROWS_MAX: usize = 16;
/// Rows that go through the output head at a time.
pub const LOGIT_ROWS_MAX: usize = 16;

/// Sizes that the buffers of a pass follow.
pub struct Sizes<'a> {
    c: &'a Config,
    /// Rows of a chunk.
    rows: usize,
    /// Values of one row of index scores.
    stride: usize,
    /// Selected compressed rows of one token, at most.
    selected: usize,
}

impl<'a> Sizes<'a> {
    /// For a chunk of `options`.
    pub fn new(c: &'a Config, options: &RunnerOptions) -> Self {
        let stride = c.scored_max(options.ctx).next_multiple_of(SCORE_STRIDE);
        Self { c, rows: options.chunk, stride, selected: c.selected_max(options.ctx) }
    }

    /// Values of one token's row in the widest compressor.
    fn compressor_row(&self) -> usize {
        2 * self.c.head_dim.max(self.c.index_dim)
    }
}

buffers! {
    /// Buffers of a forward pass.
    Workspace, s: Sizes<'_>;
    bufs {
        /// `[rows, streams, hidden]`: the residual state.
        streams: s.rows * s.c.streams * s.c.hidden,
        /// `[rows, streams * (streams + 2)]`: raw hyper-connection mix.
        mix: s.rows * s.c.mix_width(),
        /// `[rows, streams]`: collapse weights of the sublayer under way.
        pre: s.rows * s.c.streams,
        /// `[rows, streams]`.
        post: s.rows * s.c.streams,
        /// `[rows, streams, streams]`.
        comb: s.rows * s.c.streams * s.c.streams,
        /// `[rows, hidden]`: collapsed streams.
        collapsed: s.rows * s.c.hidden,
        /// `[rows, hidden]`: normalised input of a sublayer.
        x: s.rows * s.c.hidden,
        /// `[rows, hidden]`: output of a sublayer.
        y: s.rows * s.c.hidden,
        /// `[rows, q_rank]`: before its norm.
        q_raw: s.rows * s.c.q_rank,
        /// `[rows, q_rank]`: kept for the indexer.
        q_latent: s.rows * s.c.q_rank,
        /// `[rows, heads, head_dim]`.
        q: s.rows * s.c.q_width(),
        /// `[rows, head_dim]`: before its norm.
        kv_raw: s.rows * s.c.head_dim,
        /// `[rows, head_dim]`.
        kv: s.rows * s.c.head_dim,
        /// `[rows, heads, head_dim]`: query heads before their norm, then the attention output.
        heads_out: s.rows * s.c.q_width(),
        /// `[rows, groups, o_rank]`.
        groups_out: s.rows * s.c.o_groups * s.c.o_rank,
        /// `[rows, row]`: values or gates of a compressor.
        compressor_row: s.rows * s.compressor_row(),
        /// `[groups, width]`: pooled, before its norm.
        pooled: s.rows * s.c.head_dim.max(s.c.index_dim),
        /// `[groups, width]`: new compressed rows or index keys.
        compressed: s.rows * s.c.head_dim.max(s.c.index_dim),
        /// `[groups, index_dim]`: index keys, transformed.
        keys: s.rows * s.c.index_dim,
        /// `[rows, index_heads, index_dim]`: before the transform.
        index_q_raw: s.rows * s.c.index_heads * s.c.index_dim,
        /// `[rows, index_heads, index_dim]`.
        index_q: s.rows * s.c.index_heads * s.c.index_dim,
        /// `[rows, index_heads]`.
        index_weights: s.rows * s.c.index_heads,
        /// `[score rows, score_stride]`.
        scores: s.rows.min(SCORE_ROWS_MAX) * s.stride,
        /// `[logit rows, streams, hidden]`.
        head_streams: s.rows.min(LOGIT_ROWS_MAX) * s.c.streams * s.c.hidden,
        /// `[logit rows, vocab]`.
        logits: s.rows.min(LOGIT_ROWS_MAX) * s.c.vocab,
    }
    ids {
        /// `[rows]`.
        tokens: s.rows,
        /// `[rows, k]`: the selection, `k` by layer.
        selected: s.rows * s.selected,
    }
    parts {
        /// Of the expert half.
        moe: MoeWork of s.c.moe_sizes(s.rows),
    }
    fields {
        /// Values of one row of `scores`.
        score_stride: usize = s.stride,
    }
}

/// Sizes that the rows of a sweep follow.
pub struct CarrySizes<'a> {
    c: &'a Config,
    rows: usize,
}

impl<'a> CarrySizes<'a> {
    /// For the widest sweep of `options`.
    pub fn new(c: &'a Config, options: &RunnerOptions) -> Self {
        Self { c, rows: options.sweep_rows() }
    }
}

buffers! {
    /// What the rows of a sweep carry from one step of a layer to the next.
    Carry, s: CarrySizes<'_>;
    bufs {
        /// `[rows, streams, hidden]`: the residual state.
        streams: s.rows * s.c.streams * s.c.hidden,
        /// `[rows, streams]`: of the expert sublayer under way.
        post: s.rows * s.c.streams,
        /// `[rows, streams, streams]`, likewise.
        comb: s.rows * s.c.streams * s.c.streams,
    }
    ids {}
    parts {}
    fields {}
}
