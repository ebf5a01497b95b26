//! The architecture as the shared parts see it: which types it has, and which file does which step.
//! Never computes by itself. Surprising fact: the order of a layer's steps (spec 3.3) and the sweeps (3.13, 7.4) are those of every
//! architecture: `models::blocks::{pass, sweep, runner}`.

use std::ops::Range;

use super::config::{ARCH, Config};
use super::kv::{KvState, kv_bytes};
use super::matrix_inputs::matrix_inputs;
use super::pass::{Ctx, Pass};
use super::row_feed::RowFeed;
use super::snapshot;
use super::weights::{self, LayerWeights, Weights, tensor_specs};
use super::workspace::{Own, OwnSizes};
use crate::backend::{Backend, BackendError};
use crate::models::blocks::architecture::{Architecture, GraphConfig, Wait};
use crate::models::blocks::backbone::Backbone;
use crate::models::blocks::hyper_connections::HcWeights;
use crate::models::blocks::moe::MoeRules;
use crate::models::blocks::runner::{Loaded, runner_bytes};
use crate::models::blocks::sweep::Rows;
use crate::models::metadata::{ConfigError, MetadataView};
use crate::models::probe::{MatrixInput, Point};
use crate::models::weights::{TensorSpec, WeightSource, WeightsError};
use crate::models::{ModelConfig, RunnerBytes, RunnerOptions};

/// Configuration and resident weights on a device.
pub type DeepSeek41<B> = Loaded<B, V41>;

/// The architecture.
pub struct V41;

impl ModelConfig for Config {
    fn arch(&self) -> &'static str {
        ARCH
    }

    fn backbone(&self) -> &Backbone {
        self
    }

    fn layer_count(&self) -> usize {
        self.layers.len()
    }

    fn rows_per_token(&self) -> usize {
        self.engram.as_ref().map_or(0, |e| e.layers.len() * e.columns())
    }

    fn runner_bytes(&self, options: &RunnerOptions) -> RunnerBytes {
        let own = OwnSizes::new(self, options).bytes() + RowFeed::bytes_for(self, options);
        runner_bytes(self, options, kv_bytes(self, options), own)
    }

    fn frontier_bytes(&self) -> u64 {
        snapshot::frontier_bytes(self)
    }

    fn tensor_specs(&self) -> Vec<TensorSpec> {
        tensor_specs(self)
    }

    fn matrix_inputs(&self) -> Vec<MatrixInput> {
        matrix_inputs(self)
    }
}

impl GraphConfig for Config {
    fn is_compressed(&self, layer: usize) -> bool {
        self.layers[layer].ratio > 0
    }

    fn makes_rows(&self) -> Vec<bool> {
        self.layers.iter().map(|plan| plan.makes_rows).collect()
    }

    fn moe_rules(&self, _layer: usize) -> MoeRules {
        let limit = self.swiglu_limit;
        MoeRules { scale: self.routed_scale, normalise: self.normalise_top_k, limit, shared_limit: limit }
    }

    fn scored_max(&self, ctx: usize) -> usize {
        self.compressed_rows_max(ctx)
    }

    fn selected_max(&self, _ctx: usize) -> usize {
        self.index_top_k
    }
}

impl<B: Backend> Architecture<B> for V41 {
    type Config = Config;
    type Layer = LayerWeights<B>;
    type More = ();
    type State = KvState<B>;
    type Own = Own<B>;
    type Feed = RowFeed;

    fn config(view: &dyn MetadataView) -> Result<Config, ConfigError> {
        Config::from_metadata(view)
    }

    fn weights(c: &Config, backend: &B, source: &dyn WeightSource) -> Result<Weights<B>, WeightsError> {
        weights::load(c, backend, source)
    }

    fn own(c: &Config, options: &RunnerOptions, backend: &B) -> Result<Own<B>, BackendError> {
        Own::new(OwnSizes::new(c, options), backend)
    }

    fn own_bytes(own: &Own<B>, backend: &B) -> u64 {
        own.allocated_bytes(backend)
    }

    fn start(pass: &mut Pass<'_, B>) -> Result<(), BackendError> {
        pass.start_carried()
    }

    fn enter(pass: &mut Pass<'_, B>, hc: &HcWeights<B>, norm: &B::Buf) -> Result<(), BackendError> {
        pass.enter(hc, norm)
    }

    fn attention(pass: &mut Pass<'_, B>, layer: usize) -> Result<(), BackendError> {
        pass.attention(layer)
    }

    fn expand(pass: &mut Pass<'_, B>) -> Result<(), BackendError> {
        pass.expand()
    }

    fn remember(pass: &mut Pass<'_, B>, layer: usize, has_window: bool) -> Result<(), BackendError> {
        pass.remember(layer, has_window)
    }

    fn show_end(pass: &mut Pass<'_, B>, layer: usize) -> Result<(), BackendError> {
        pass.show(Point::PreMix, layer, pass.ctx.config.streams, |_, own| &own.carried)
    }

    fn collapse_head(pass: &mut Pass<'_, B>, rows: Range<usize>) -> Result<(), BackendError> {
        pass.collapse_head(rows)
    }

    fn leave(pass: &mut Pass<'_, B>, rows: &Rows<'_, B>, wait: Wait) -> Result<(), BackendError> {
        pass.leave(rows, wait)
    }

    fn resume(pass: &mut Pass<'_, B>, rows: &Rows<'_, B>, wait: Wait) -> Result<(), BackendError> {
        pass.resume(rows, wait)
    }

    fn settle(ctx: &Ctx<'_, B>, state: &mut KvState<B>, layer: usize, pieces: usize) -> Result<(), BackendError> {
        let plan = ctx.config.layers[layer];
        match plan.owner {
            Some(owner) if plan.makes_rows => state.settle_open(owner, pieces, ctx.config.head_dim, ctx.backend),
            _ => Ok(()),
        }
    }
}
