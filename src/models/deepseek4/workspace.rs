//! Buffers of a forward pass that only this architecture has: its compressors' and, before their transform, its index rows.
//! Never grows after the start. Surprising fact: query heads have none here; they are made in the buffer of the attention output, which is
//! free until then.

use super::config::Config;
use crate::backend::{Backend, BackendError};
use crate::models::RunnerOptions;
use crate::models::blocks::buffers;

/// Sizes that the buffers follow.
pub struct OwnSizes<'a> {
    c: &'a Config,
    /// Rows of a chunk.
    rows: usize,
}

impl<'a> OwnSizes<'a> {
    /// For a chunk of `options`.
    pub fn new(c: &'a Config, options: &RunnerOptions) -> Self {
        Self { c, rows: options.chunk }
    }

    /// Values of the widest compressed row.
    fn width(&self) -> usize {
        self.c.head_dim.max(self.c.index_dim)
    }
}

buffers! {
    /// Buffers of a forward pass.
    Own, s: OwnSizes<'_>;
    bufs {
        /// `[rows, row]`: values or gates of a compressor.
        compressor_row: s.rows * 2 * s.width(),
        /// `[groups, width]`: pooled, before its norm.
        pooled: s.rows * s.width(),
        /// `[groups, width]`: new compressed rows or index keys.
        compressed: s.rows * s.width(),
        /// `[groups, index_dim]`: index keys, transformed.
        keys: s.rows * s.c.index_dim,
        /// `[rows, index_heads, index_dim]`: before the transform.
        index_q_raw: s.rows * s.c.index_heads * s.c.index_dim,
    }
    ids {}
    parts {}
    fields {}
}
