//! State of one sequence (spec 4.1): window rows, what compressors still need of the last tokens, compressed rows, index keys.
//! Never changes what is at or before `len` until a chunk is complete, so a failed chunk leaves no trace. Surprising fact: everything that
//! is forgotten lies in rings by position and everything else is append-only, so going back costs nothing as far as the rings reach, and a
//! pass may commit fewer rows than it computed.

use super::config::{Config, LayerPlan};
use crate::backend::{Backend, BackendError};
use crate::models::RunnerOptions;
use crate::models::blocks::architecture::SequenceState;
use crate::models::blocks::ring::{Ring, RingShape};
use crate::models::blocks::spans::Spans;
use crate::units::TokenId;

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
    pub(super) slack: usize,
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
    fn rings(&mut self) -> impl Iterator<Item = &mut Ring<B>> {
        self.layers.iter_mut().flat_map(|layer| {
            let kinds = layer.compressed.iter_mut().chain(&mut layer.keys);
            std::iter::once(&mut layer.window).chain(kinds.flat_map(|kind| [&mut kind.values, &mut kind.gates]))
        })
    }

    /// Whether the state can become that of its first `len` tokens.
    pub fn is_within_reach(&self, len: usize) -> bool {
        len == self.len || (len < self.len && self.written - len <= self.slack && self.spans.contains(len))
    }
}

impl<B: Backend> SequenceState<B, Config> for KvState<B> {
    fn new(c: &Config, options: &RunnerOptions, backend: &B) -> Result<Self, BackendError> {
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

    fn complete(&self) -> usize {
        self.len
    }

    fn reset(&mut self) {
        self.len = 0;
        self.written = 0;
        self.spans.clear();
    }

    fn begin(&mut self, _c: &Config, backend: &B, rows: usize) -> Result<(), BackendError> {
        let len = self.len;
        self.written = self.written.max(len + rows);
        self.rings().try_for_each(|ring| ring.save(backend, len, rows))
    }

    fn commit(&mut self, _c: &Config, tokens: &[TokenId], reach: usize) {
        self.len += tokens.len();
        self.spans.commit(self.len, tokens.len(), reach);
    }

    fn restore(&mut self, _c: &Config, backend: &B, rows: usize) -> Result<(), BackendError> {
        let len = self.len;
        self.rings().try_for_each(|ring| ring.restore(backend, len, rows))
    }

    fn allocated_bytes(&self, backend: &B) -> u64 {
        let kind = |kind: &CompressedState<B>| {
            let rings = kind.values.allocated_bytes(backend) + kind.gates.allocated_bytes(backend);
            rings + 4 * backend.len(&kind.rows) as u64
        };
        let layer = |layer: &LayerState<B>| {
            let kinds = layer.compressed.iter().chain(&layer.keys);
            layer.window.allocated_bytes(backend) + kinds.map(kind).sum::<u64>()
        };
        self.layers.iter().map(layer).sum()
    }
}
