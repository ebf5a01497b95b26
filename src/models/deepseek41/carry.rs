//! What the rows of a sweep carry from one step of a layer to the next: residual streams, mixing weights, selections.
//! Owns the buffers of all rows; never computes. Surprising fact: outputs of single experts are not among them. They are added up as they
//! are made, which is what lets thousands of rows share one read of an expert.

use super::config::Config;
use super::workspace::mask_words;
use crate::backend::{Backend, BackendError};
use crate::models::RunnerOptions;
use crate::models::blocks::buffers;

/// Sizes that the buffers follow.
pub struct CarrySizes<'a> {
    c: &'a Config,
    rows: usize,
    words: usize,
}

impl<'a> CarrySizes<'a> {
    /// For the widest sweep of `options`.
    pub fn new(c: &'a Config, options: &RunnerOptions) -> Self {
        Self { c, rows: options.sweep_rows(), words: mask_words(c, options) }
    }
}

buffers! {
    /// Rows of a sweep.
    Carry, s: CarrySizes<'_>;
    bufs {
        /// `[rows, streams, hidden]`: the residual state.
        streams: s.rows * s.c.streams * s.c.hidden,
        /// `[rows, streams]`: collapse weights for the next sublayer.
        carried: s.rows * s.c.streams,
        /// `[rows, streams]`: collapse weights made by the expert sublayer under way.
        pre: s.rows * s.c.streams,
        /// `[rows, streams]`.
        post: s.rows * s.c.streams,
        /// `[rows, streams, streams]`.
        comb: s.rows * s.c.streams * s.c.streams,
    }
    ids {
        /// `[rows, index_top_k]`: latest selection.
        selected: s.rows * s.c.index_top_k,
        /// `[rows, words]`: candidate blocks.
        candidates: s.rows * s.words,
    }
    parts {}
    fields {
        /// Words of one row of `candidates`.
        words: usize = s.words,
    }
}
