//! Work memory of a forward pass: every buffer, allocated once, sized for one chunk.
//! Never grows after the start. Surprising fact: the list of buffers is written once, in `workspace!`; the planner's
//! number and the allocation both come from it.

use super::config::Config;
use crate::backend::ops::SCORE_STRIDE;
use crate::backend::{Backend, BackendError};
use crate::models::RunnerOptions;

/// Rows whose index scores are held at a time.
pub const SCORE_ROWS_MAX: usize = 16;
/// Rows that go through the output head at a time.
pub const LOGIT_ROWS_MAX: usize = 16;
/// Rows that are cleared at a time.
pub const ZERO_ROWS: usize = 16;

/// Words of one row's candidate mask.
pub fn mask_words(config: &Config, options: &RunnerOptions) -> usize {
    config.compressed_rows_max(options.ctx).div_ceil(config.candidate_block).div_ceil(32)
}

/// Sizes that the buffers follow.
struct Sizes<'a> {
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
    fn new(c: &'a Config, options: &RunnerOptions) -> Self {
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

/// Declares the workspace: each buffer with its shape, in values or ids.
macro_rules! workspace {
    ($sizes:ident; bufs { $($(#[$doc:meta])* $buf:ident: $len:expr,)* } ids { $($(#[$id_doc:meta])* $ids:ident: $id_len:expr,)* }) => {
        /// Buffers of a forward pass.
        pub struct Workspace<B: Backend> {
            $($(#[$doc])* pub $buf: B::Buf,)*
            $($(#[$id_doc])* pub $ids: B::Ids,)*
            /// Values of one row of `scores`.
            pub score_stride: usize,
            /// Words of one row of `candidates`.
            pub words: usize,
        }

        impl<B: Backend> Workspace<B> {
            /// Allocates all buffers.
            pub fn new(config: &Config, options: &RunnerOptions, backend: &B) -> Result<Self, BackendError> {
                let $sizes = Sizes::new(config, options);
                let mut work = Self {
                    $($buf: backend.alloc(stringify!($buf), $len)?,)*
                    $($ids: backend.alloc_ids(stringify!($ids), $id_len)?,)*
                    score_stride: $sizes.stride,
                    words: $sizes.words,
                };
                backend.upload(&vec![1.0; $sizes.rows], &mut work.ones, 0)?;
                Ok(work)
            }

            /// Bytes that the buffers really take.
            pub fn allocated_bytes(&self, backend: &B) -> u64 {
                let values = 0 $(+ backend.len(&self.$buf))* $(+ backend.len_ids(&self.$ids))*;
                4 * values as u64
            }
        }

        /// Bytes of work memory at these options.
        pub fn scratch_bytes(config: &Config, options: &RunnerOptions) -> u64 {
            let $sizes = Sizes::new(config, options);
            let values: usize = 0 $(+ $len)* $(+ $id_len)*;
            4 * values as u64
        }
    };
}

workspace! {
    s;
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
        /// `[rows, experts]`.
        router_logits: s.rows * s.c.experts,
        /// `[rows, k]`.
        router_weights: s.rows * s.c.experts_per_token,
        /// `[rows, hidden]`: rows of one expert.
        expert_x: s.rows * s.c.hidden,
        /// `[rows, expert_width]`: gate, then the product of both, of one expert or the shared one.
        expert_gate: s.rows * s.c.expert_width,
        /// `[rows, expert_width]`.
        expert_up: s.rows * s.c.expert_width,
        /// `[rows, hidden]`: output of one expert.
        expert_y: s.rows * s.c.hidden,
        /// `[k, hidden]`: outputs of the experts of a single row, by rising expert.
        expert_out: s.c.experts_per_token * s.c.hidden,
        /// `[rows]` or `[k]`: weights of the outputs that are being added.
        expert_weights: s.rows.max(s.c.experts_per_token),
        /// `[rows, hidden]`: sums that outputs are being added to.
        sums: s.rows * s.c.hidden,
        /// `[zero rows, hidden]`: zeros.
        zeros: ZERO_ROWS * s.c.hidden,
        /// `[rows]`: ones.
        ones: s.rows,
        /// `[rows, hidden]`: output of the shared expert.
        shared_out: s.rows * s.c.hidden,
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
        /// `[rows, k]`.
        router_ids: s.rows * s.c.experts_per_token,
        /// `[k]`: places of a single row's weights, by rising expert.
        places: s.c.experts_per_token,
    }
}
