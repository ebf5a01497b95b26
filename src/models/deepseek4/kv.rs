//! State of one sequence (spec 4.1): window rows, what compressors still need of the last tokens, compressed rows, index keys.
//! Never changes what is at or before `len` until a chunk is complete, so a failed chunk leaves no trace. Surprising fact: everything that
//! is forgotten lies in rings by position and everything else is append-only, so going back costs nothing as far as the rings reach, and a
//! pass may commit fewer rows than it computed.

use super::config::{Config, LayerPlan};
use crate::backend::{Backend, BackendError};
use crate::models::RunnerOptions;
use crate::models::blocks::ring::{Ring, RingShape};
use crate::models::blocks::spans::Spans;

/// One kind of compressed rows of a layer.
pub struct CompressedState<B: Backend> {
    /// `[slots, row]`: projections of the last tokens.
    pub values: Ring<B>,
    /// `[slots, row]`.
    pub gates: Ring<B>,
    /// `[ctx / ratio + 1, width]`: finished rows.
    pub rows: B::Buf,
}

/// State of one layer.
pub struct LayerState<B: Backend> {
    pub window: Ring<B>,
    /// Rows that are attended.
    pub compressed: Option<CompressedState<B>>,
    /// Index keys.
    pub keys: Option<CompressedState<B>>,
}

/// State of one sequence.
pub struct KvState<B: Backend> {
    pub layers: Vec<LayerState<B>>,
    /// Complete tokens.
    pub len: usize,
    /// End of all that was ever written to the rings, failed sweeps and dropped tokens included.
    pub written: usize,
    /// Rows that may be written behind an end without harm to it.
    slack: usize,
    /// Lengths around which every row was computed.
    pub(super) spans: Spans,
}

fn window_shape(c: &Config) -> RingShape {
    RingShape { width: c.head_dim, look_back: c.window - 1 }
}

/// Rings of a compressor whose rows have `width` values.
fn compressor_shape(plan: &LayerPlan, width: usize) -> RingShape {
    RingShape { width: plan.parts() * width, look_back: plan.parts() * plan.ratio - 1 }
}

/// Widths of the kinds that a layer has: compressed rows, index keys.
pub(super) fn kinds(c: &Config, plan: &LayerPlan) -> [Option<usize>; 2] {
    [(plan.ratio > 0).then_some(c.head_dim), plan.has_indexer().then_some(c.index_dim)]
}

/// Bytes of the state at these options.
pub fn kv_bytes(c: &Config, options: &RunnerOptions) -> u64 {
    let kind = |plan: &LayerPlan, width: usize| {
        let rows = 4 * (Config::compressed_rows(plan.ratio, options.ctx) * width) as u64;
        2 * compressor_shape(plan, width).bytes(options) + rows
    };
    let layer = |plan: &LayerPlan| -> u64 {
        let kinds = kinds(c, plan).into_iter().flatten().map(|width| kind(plan, width));
        window_shape(c).bytes(options) + kinds.sum::<u64>()
    };
    c.layers.iter().map(layer).sum()
}

impl<B: Backend> KvState<B> {
    /// An empty state for up to `ctx` tokens.
    pub fn new(c: &Config, options: &RunnerOptions, backend: &B) -> Result<Self, BackendError> {
        let kind = |plan: &LayerPlan, width: usize| -> Result<CompressedState<B>, BackendError> {
            let shape = compressor_shape(plan, width);
            Ok(CompressedState {
                values: Ring::new("compressor values", shape, options, backend)?,
                gates: Ring::new("compressor gates", shape, options, backend)?,
                rows: backend.alloc("compressed rows", Config::compressed_rows(plan.ratio, options.ctx) * width)?,
            })
        };
        let layer = |plan: &LayerPlan| -> Result<LayerState<B>, BackendError> {
            let [compressed, keys] = kinds(c, plan).map(|width| width.map(|width| kind(plan, width)).transpose());
            let window = Ring::new("window rows", window_shape(c), options, backend)?;
            Ok(LayerState { window, compressed: compressed?, keys: keys? })
        };
        let layers = c.layers.iter().map(layer).collect::<Result<_, _>>()?;
        let slack = RingShape::slack(options);
        Ok(Self { layers, len: 0, written: 0, slack, spans: Spans::default() })
    }

    fn rings(&mut self) -> impl Iterator<Item = &mut Ring<B>> {
        self.layers.iter_mut().flat_map(|layer| {
            let kinds = layer.compressed.iter_mut().chain(&mut layer.keys);
            std::iter::once(&mut layer.window).chain(kinds.flat_map(|kind| [&mut kind.values, &mut kind.gates]))
        })
    }

    /// Forgets all tokens. Buffers keep their bytes: nothing behind `len` is ever read.
    pub fn reset(&mut self) {
        self.len = 0;
        self.written = 0;
        self.spans.clear();
    }

    /// Whether the state can become that of its first `len` tokens.
    pub fn is_within_reach(&self, len: usize) -> bool {
        len == self.len || (len < self.len && self.written - len <= self.slack && self.spans.contains(len))
    }

    /// The largest length up to `len` that is within reach; 0 if there is none.
    pub fn reach(&self, len: usize) -> usize {
        let oldest = self.written.saturating_sub(self.slack).max(1);
        (oldest..=len.min(self.len)).rev().find(|len| self.is_within_reach(*len)).unwrap_or(0)
    }

    /// Goes back to the first `len` tokens, which are within reach.
    pub fn rewind(&mut self, len: usize) {
        assert!(self.is_within_reach(len), "a state of {} tokens cannot go back to {len}", self.len);
        self.len = len;
        self.spans.cut(len);
    }

    /// Accepts a sweep of `rows` rows that went through all layers; the last `reach` of them can be taken back.
    pub fn commit(&mut self, rows: usize, reach: usize) {
        self.len += rows;
        self.spans.commit(self.len, rows, reach);
    }

    /// `rows` rows are going to be written: keeps a copy of what a sweep may overwrite.
    pub fn begin(&mut self, backend: &B, rows: usize) -> Result<(), BackendError> {
        let len = self.len;
        self.written = self.written.max(len + rows);
        self.rings().try_for_each(|ring| ring.save(backend, len, rows))
    }

    /// Undoes a sweep of `rows` rows that failed.
    pub fn restore(&mut self, backend: &B, rows: usize) -> Result<(), BackendError> {
        let len = self.len;
        self.rings().try_for_each(|ring| ring.restore(backend, len, rows))
    }

    /// Bytes that the buffers really take.
    pub fn allocated_bytes(&mut self, backend: &B) -> u64 {
        let rings: u64 = self.rings().map(|ring| ring.allocated_bytes(backend)).sum();
        let kinds = self.layers.iter().flat_map(|layer| layer.compressed.iter().chain(&layer.keys));
        rings + kinds.map(|kind| 4 * backend.len(&kind.rows) as u64).sum::<u64>()
    }
}
