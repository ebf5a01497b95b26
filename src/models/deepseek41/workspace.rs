//! Work memory of a forward pass: every buffer, allocated once, sized for one chunk.
//! Never grows after the start. Surprising fact: buffers that follow the context (index scores, masks) are kept for few rows only.

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

/// Words of one row's candidate mask.
pub fn mask_words(config: &Config, options: &RunnerOptions) -> usize {
    config.compressed_rows_max(options.ctx).div_ceil(config.candidate_block).div_ceil(32)
}

/// Sizes that the buffers follow.
pub struct Sizes<'a> {
    c: &'a Config,
    /// Rows of a chunk.
    rows: usize,
    /// Values of one row of index scores.
    stride: usize,
    /// Words of one row's candidate mask.
    words: usize,
    /// Values of one token's n-gram rows.
    engram: usize,
}

impl<'a> Sizes<'a> {
    /// For a chunk of `options`.
    pub fn new(c: &'a Config, options: &RunnerOptions) -> Self {
        let compressed = c.compressed_rows_max(options.ctx);
        Self {
            c,
            rows: options.chunk,
            stride: compressed.next_multiple_of(SCORE_STRIDE),
            words: mask_words(c, options),
            engram: c.engram.as_ref().map_or(0, |e| e.columns() * e.width),
        }
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
        /// `[rows, streams]`: collapse weights carried to the next sublayer.
        carried: s.rows * s.c.streams,
        /// `[rows, streams]`: collapse weights made by the sublayer under way.
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
        /// `[rows, heads, head_dim]`: attention output.
        heads_out: s.rows * s.c.q_width(),
        /// `[rows, groups, o_rank]`.
        groups_out: s.rows * s.c.o_groups * s.c.o_rank,
        /// `[rows, head_dim]`: compressor projection.
        pair_values: s.rows * s.c.head_dim,
        /// `[rows, head_dim]`: compressor gates.
        pair_gates: s.rows * s.c.head_dim,
        /// `[rows, head_dim]`: pooled, before its norm.
        pooled: s.rows * s.c.head_dim,
        /// `[rows, head_dim]`: compressed rows of this chunk.
        latent: s.rows * s.c.head_dim,
        /// `[rows, index_dim]`: before its norm.
        key_raw: s.rows * s.c.index_dim,
        /// `[rows, index_dim]`: index keys of this chunk.
        key: s.rows * s.c.index_dim,
        /// `[rows, index_heads, index_dim]`.
        index_q: s.rows * s.c.index_heads * s.c.index_dim,
        /// `[rows, index_heads]`.
        index_weights: s.rows * s.c.index_heads,
        /// `[score rows, score_stride]`.
        scores: s.rows.min(SCORE_ROWS_MAX) * s.stride,
        /// `[rows, columns, width]`: decoded n-gram rows.
        engram_rows: s.rows * s.engram,
        /// `[rows, streams + 1, hidden]`.
        engram_kv: if s.engram == 0 { 0 } else { s.rows * (s.c.streams + 1) * s.c.hidden },
        /// `[rows, streams]`.
        engram_gates: if s.engram == 0 { 0 } else { s.rows * s.c.streams },
        /// `[logit rows, streams, hidden]`.
        head_streams: s.rows.min(LOGIT_ROWS_MAX) * s.c.streams * s.c.hidden,
        /// `[logit rows, streams]`.
        head_carried: s.rows.min(LOGIT_ROWS_MAX) * s.c.streams,
        /// `[logit rows, vocab]`.
        logits: s.rows.min(LOGIT_ROWS_MAX) * s.c.vocab,
    }
    ids {
        /// `[rows]`.
        tokens: s.rows,
        /// `[rows, index_top_k]`: latest selection.
        selected: s.rows * s.c.index_top_k,
        /// `[rows, words]`: candidate blocks, one bit each.
        candidates: s.rows * s.words,
    }
    parts {
        /// Of the expert half.
        moe: MoeWork of s.c.moe_sizes(s.rows),
    }
    fields {
        /// Values of one row of `scores`.
        score_stride: usize = s.stride,
        /// Words of one row of `candidates`.
        words: usize = s.words,
    }
}
