//! Buffers of a forward pass that only this architecture has, and what its rows wait with in a sweep.
//! Never grows after the start. Surprising fact: the collapse weights of a chunk outlive the sublayer that made them, so they are carried
//! beside the streams.

use super::config::Config;
use super::sweep::{Carry, CarrySizes};
use crate::backend::{Backend, BackendError};
use crate::models::RunnerOptions;
use crate::models::blocks::buffers;
use crate::models::blocks::workspace::LOGIT_ROWS_MAX;

/// Words of one row's candidate mask.
pub fn mask_words(config: &Config, options: &RunnerOptions) -> usize {
    config.compressed_rows_max(options.ctx).div_ceil(config.candidate_block).div_ceil(32)
}

/// Sizes that the buffers follow.
pub struct OwnSizes<'a> {
    c: &'a Config,
    options: RunnerOptions,
    /// Rows of a chunk.
    rows: usize,
    /// Words of one row's candidate mask.
    words: usize,
    /// Values of one token's n-gram rows, and their bytes.
    engram: usize,
    engram_bytes: usize,
}

impl<'a> OwnSizes<'a> {
    /// For a chunk of `options`.
    pub fn new(c: &'a Config, options: &RunnerOptions) -> Self {
        let engram = c.engram.as_ref().map_or(0, |e| e.columns() * e.width);
        let engram_bytes = c.engram.as_ref().map_or(0, |e| e.columns() * e.row_bytes);
        Self { c, options: *options, rows: options.chunk, words: mask_words(c, options), engram, engram_bytes }
    }
}

buffers! {
    /// Buffers of a forward pass.
    Own, s: OwnSizes<'_>;
    bufs {
        /// `[rows, streams]`: collapse weights carried to the next sublayer.
        carried: s.rows * s.c.streams,
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
        /// `[rows, columns, width]`: decoded n-gram rows.
        engram_rows: s.rows * s.engram,
        /// `[rows, streams + 1, hidden]`.
        engram_kv: if s.engram == 0 { 0 } else { s.rows * (s.c.streams + 1) * s.c.hidden },
        /// `[rows, streams]`.
        engram_gates: if s.engram == 0 { 0 } else { s.rows * s.c.streams },
        /// `[logit rows, streams]`.
        head_carried: s.rows.min(LOGIT_ROWS_MAX) * s.c.streams,
    }
    ids {
        /// `[rows, words]`: candidate blocks, one bit each.
        candidates: s.rows * s.words,
        /// `[rows, columns, row_bytes]` in words of four bytes: n-gram rows as they are kept.
        engram_words: (s.rows * s.engram_bytes).div_ceil(4),
    }
    parts {
        /// Of the rows of a sweep.
        carry: Carry of CarrySizes::new(s.c, &s.options),
    }
    fields {
        /// Words of one row of `candidates`.
        words: usize = s.words,
    }
}
