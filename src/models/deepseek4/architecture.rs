//! The architecture as the shared parts see it: which types it has, and which file does which step.
//! Never computes by itself. Surprising fact: the order of a layer's steps (spec 3.14) and the sweeps (3.15) are those of every architecture:
//! `models::blocks::{pass, sweep, runner}`.

use std::ops::Range;

use super::config::{ARCH, Config, LayerPlan};
use super::kv::{KvState, kv_bytes};
use super::matrix_inputs::matrix_inputs;
use super::pass::Pass;
use super::snapshot;
use super::token_experts::KnownExperts;
use super::weights::{self, LayerWeights, More, Weights, tensor_specs};
use super::workspace::{Own, OwnSizes};
use crate::backend::{Backend, BackendError};
use crate::models::blocks::architecture::{Architecture, GraphConfig};
use crate::models::blocks::backbone::Backbone;
use crate::models::blocks::hyper_connections::HcWeights;
use crate::models::blocks::moe::MoeRules;
use crate::models::blocks::runner::{Loaded, runner_bytes};
use crate::models::metadata::{ConfigError, MetadataView};
use crate::models::probe::MatrixInput;
use crate::models::weights::{TensorSpec, WeightSource, WeightsError};
use crate::models::{ModelConfig, RunnerBytes, RunnerOptions};
use crate::units::TokenId;

/// Configuration and resident weights on a device.
pub type DeepSeek4<B> = Loaded<B, V4>;

/// The architecture.
pub struct V4;

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

    fn runner_bytes(&self, options: &RunnerOptions) -> RunnerBytes {
        let own = OwnSizes::new(self, options).bytes() + KnownExperts::bytes_for(self);
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
        self.layers.iter().map(|plan| plan.ratio > 0).collect()
    }

    fn moe_rules(&self, layer: usize) -> MoeRules {
        let LayerPlan { limit, shared_limit, .. } = self.layers[layer];
        MoeRules { scale: self.routed_scale, normalise: self.normalise_top_k, limit, shared_limit }
    }

    fn scored_max(&self, ctx: usize) -> usize {
        Config::scored_max(self, ctx)
    }

    fn selected_max(&self, ctx: usize) -> usize {
        Config::selected_max(self, ctx)
    }
}

impl<B: Backend> Architecture<B> for V4 {
    type Config = Config;
    type Layer = LayerWeights<B>;
    type More = More<B>;
    type State = KvState<B>;
    type Own = Own<B>;
    type Feed = KnownExperts;

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

    fn known_experts(weights: &LayerWeights<B>, tokens: &[TokenId]) -> Option<Vec<i32>> {
        weights.token_experts.as_ref().map(|table| table.of(tokens))
    }

    fn collapse_head(pass: &mut Pass<'_, B>, rows: Range<usize>) -> Result<(), BackendError> {
        pass.collapse_head(rows)
    }
}
