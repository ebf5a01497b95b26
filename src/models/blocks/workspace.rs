//! Buffers that every architecture needs: those of a pass, sized for one chunk, and those in which the rows of a sweep wait.
//! Never grows after the start. Surprising fact: buffers that follow the context or the vocabulary (index scores, logits) are kept for few
//! rows only.

use std::ops::Range;

use super::architecture::GraphConfig;
use super::backbone::Backbone;
use super::buffers;
use super::moe::MoeWork;
use crate::backend::ops::SCORE_STRIDE;
use crate::backend::{Backend, BackendError};
use crate::models::RunnerOptions;

/// Rows whose index scores are held at a time, and as many in a chunk of more than [`CHUNK_NARROW`] rows: these are a GPU's, on which a row is one
/// block of a selection (two for each of 132 multiprocessors).
const SCORE_ROWS: usize = 16;
const SCORE_ROWS_WIDE: usize = 264;
const CHUNK_NARROW: usize = 512;
/// Most memory of index scores beyond those of [`SCORE_ROWS`] rows: long contexts have long rows.
const SCORE_BYTES_MAX: usize = 64 << 20;
/// Rows that go through the output head at a time.
pub const LOGIT_ROWS_MAX: usize = 16;

/// `rows` in parts of at most `most`.
pub fn tiles(rows: Range<usize>, most: usize) -> impl Iterator<Item = Range<usize>> {
    let end = rows.end;
    rows.step_by(most).map(move |first| first..end.min(first + most))
}

/// Rows of a chunk of `rows` whose index scores, `stride` each, are held at a time.
fn score_rows(rows: usize, stride: usize) -> usize {
    let most = if rows > CHUNK_NARROW { SCORE_ROWS_WIDE } else { SCORE_ROWS };
    most.min((SCORE_BYTES_MAX / (4 * stride.max(1))).max(SCORE_ROWS)).min(rows)
}

/// Sizes that the buffers of a pass follow.
pub struct Sizes<'a> {
    b: &'a Backbone,
    /// Rows of a chunk.
    rows: usize,
    /// Values of one row of index scores.
    stride: usize,
    /// Selected compressed rows of one token, at most.
    selected: usize,
}

impl<'a> Sizes<'a> {
    /// For a chunk of `options`.
    pub fn new<C: GraphConfig>(c: &'a C, options: &RunnerOptions) -> Self {
        let stride = c.scored_max(options.ctx).next_multiple_of(SCORE_STRIDE);
        Self { b: c, rows: options.chunk, stride, selected: c.selected_max(options.ctx) }
    }
}

buffers! {
    /// Buffers of a forward pass.
    Workspace, s: Sizes<'_>;
    bufs {
        /// `[rows, streams, hidden]`: the residual state.
        streams: s.rows * s.b.streams * s.b.hidden,
        /// `[rows, streams * (streams + 2)]`: raw hyper-connection mix.
        mix: s.rows * s.b.mix_width(),
        /// `[rows, streams]`: collapse weights made by the sublayer under way.
        pre: s.rows * s.b.streams,
        /// `[rows, streams]`.
        post: s.rows * s.b.streams,
        /// `[rows, streams, streams]`.
        comb: s.rows * s.b.streams * s.b.streams,
        /// `[rows, hidden]`: collapsed streams.
        collapsed: s.rows * s.b.hidden,
        /// `[rows, hidden]`: normalised input of a sublayer.
        x: s.rows * s.b.hidden,
        /// `[rows, hidden]`: output of a sublayer.
        y: s.rows * s.b.hidden,
        /// `[rows, q_rank]`: before its norm.
        q_raw: s.rows * s.b.q_rank,
        /// `[rows, q_rank]`: kept for the indexer.
        q_latent: s.rows * s.b.q_rank,
        /// `[rows, heads, head_dim]`.
        q: s.rows * s.b.q_width(),
        /// `[rows, head_dim]`: before its norm.
        kv_raw: s.rows * s.b.head_dim,
        /// `[rows, head_dim]`.
        kv: s.rows * s.b.head_dim,
        /// `[rows, heads, head_dim]`: attention output; free before it.
        heads_out: s.rows * s.b.q_width(),
        /// `[rows, groups, o_rank]`.
        groups_out: s.rows * s.b.o_width(),
        /// `[rows, index_heads, index_dim]`.
        index_q: s.rows * s.b.index_heads * s.b.index_dim,
        /// `[rows, index_heads]`.
        index_weights: s.rows * s.b.index_heads,
        /// `[score rows, score_stride]`.
        scores: score_rows(s.rows, s.stride) * s.stride,
        /// `[logit rows, streams, hidden]`.
        head_streams: s.rows.min(LOGIT_ROWS_MAX) * s.b.streams * s.b.hidden,
        /// `[logit rows, vocab]`.
        logits: s.rows.min(LOGIT_ROWS_MAX) * s.b.vocab,
    }
    ids {
        /// `[rows]`.
        tokens: s.rows,
        /// `[rows, k]`: the latest selection, `k` by layer.
        selected: s.rows * s.selected,
        /// `[1]`: the next token.
        chosen: 1,
    }
    parts {
        /// Of the expert half.
        moe: MoeWork of s.b.moe_sizes(s.rows),
    }
    fields {
        /// Values of one row of `scores`.
        score_stride: usize = s.stride,
        /// Rows that `scores` holds.
        score_rows: usize = score_rows(s.rows, s.stride),
    }
}

/// Sizes that the rows of a sweep follow.
pub struct CarrySizes<'a> {
    b: &'a Backbone,
    rows: usize,
}

impl<'a> CarrySizes<'a> {
    /// For the widest sweep of `options`.
    pub fn new(b: &'a Backbone, options: &RunnerOptions) -> Self {
        Self { b, rows: options.sweep_rows() }
    }
}

buffers! {
    /// Where the rows of a sweep wait for each other.
    Carry, s: CarrySizes<'_>;
    bufs {
        /// `[rows, streams, hidden]`: the residual state.
        streams: s.rows * s.b.streams * s.b.hidden,
        /// `[rows, streams]`: of the expert sublayer under way.
        post: s.rows * s.b.streams,
        /// `[rows, streams, streams]`, likewise.
        comb: s.rows * s.b.streams * s.b.streams,
    }
    ids {}
    parts {}
    fields {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_are_of_few_rows_where_rows_are_long() {
        assert_eq!(score_rows(512, 1 << 10), 16);
        assert_eq!(score_rows(7, 1 << 10), 7);
        assert_eq!(score_rows(2048, 16 << 10), 264);
        // A context of a million tokens: two megabytes a row.
        assert_eq!(score_rows(2048, 512 << 10), 32);
        assert_eq!(score_rows(2048, 4 << 20), 16);
    }
}
