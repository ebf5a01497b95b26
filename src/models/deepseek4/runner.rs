//! Runs tokens through the model: sweeps, reads of experts that are known ahead, commit of what is complete (spec 2.6, 3.15, 4.3).
//! Never leaves a trace of a failed sweep: the state advances only when all layers are done. Surprising fact: a single row has a path of
//! its own, because its experts are computed in the order in which they land; the bits are those of a sweep.

use std::sync::Arc;

use super::config::{ARCH, Config};
use super::kv::{KvState, kv_bytes};
use super::matrix_inputs::{matrix_inputs, products};
use super::pass::{Ctx, Pass};
use super::snapshot;
use super::sweep::SweepRows;
use super::token_experts::TokenExperts;
use super::weights::{Weights, tensor_specs};
use super::workspace::{Carry, CarrySizes, Sizes, Workspace};
use crate::backend::Backend;
use crate::models::blocks::grouping::Grouping;
use crate::models::blocks::moe::{self, MoeCarry};
use crate::models::blocks::suffix::Suffix;
use crate::models::blocks::sweep::Sweep;
use crate::models::metadata::MetadataView;
use crate::models::probe::{MatrixInput, Probe};
use crate::models::state::{StateError, StatePart, StateSink, StateSource};
use crate::models::supply::{ExpertSupply, RowSupply};
use crate::models::weights::{TensorSpec, WeightSource};
use crate::models::{
    LogitSink, Model, ModelConfig, ModelError, ModelRunner, PassCounters, Product, Progress, RunnerBytes,
    RunnerOptions, SweepCounts, Want,
};
use crate::obs::spans;
use crate::units::{ExpertKey, TokenId};

impl ModelConfig for Config {
    fn arch(&self) -> &'static str {
        ARCH
    }

    fn positions_max(&self) -> usize {
        self.positions_max
    }

    fn expert_shape(&self) -> (usize, usize, usize) {
        (self.layers.len(), self.experts, self.experts_per_token)
    }

    fn rows_per_token(&self) -> usize {
        0
    }

    fn runner_bytes(&self, options: &RunnerOptions) -> RunnerBytes {
        let experts = moe::CarrySizes(self.moe_sizes(options.sweep_rows()));
        let carry = CarrySizes::new(self, options).bytes() + experts.bytes();
        let scratch = Sizes::new(self, options).bytes() + carry + Host::bytes_for(self, options);
        RunnerBytes { kv: kv_bytes(self, options), scratch }
    }

    fn frontier_bytes(&self) -> u64 {
        snapshot::frontier_bytes(self)
    }

    fn products(&self, options: &RunnerOptions) -> Vec<Product> {
        products(self, options)
    }

    fn tensor_specs(&self) -> Vec<TensorSpec> {
        tensor_specs(self)
    }

    fn matrix_inputs(&self) -> Vec<MatrixInput> {
        matrix_inputs(self)
    }
}

/// Configuration and resident weights on a device.
pub struct DeepSeek4<B: Backend> {
    config: Config,
    backend: Arc<B>,
    weights: Weights<B>,
    counters: PassCounters,
}

impl<B: Backend> DeepSeek4<B> {
    /// Reads the metadata and loads the resident weights.
    pub fn load(view: &dyn MetadataView, backend: Arc<B>, source: &dyn WeightSource) -> Result<Self, ModelError> {
        let config = Config::from_metadata(view)?;
        let weights = Weights::load(&config, &*backend, source)?;
        Ok(Self { config, backend, weights, counters: PassCounters::default() })
    }
}

impl<B: Backend> Model<B> for DeepSeek4<B> {
    fn runner(
        self: Arc<Self>,
        options: RunnerOptions,
        experts: Arc<dyn ExpertSupply<B>>,
        _rows: Option<Arc<dyn RowSupply>>,
    ) -> Result<Box<dyn ModelRunner>, ModelError> {
        let needed = self.config.experts_per_token;
        if experts.lease_max() < needed {
            return Err(ModelError::LeaseTooSmall { found: experts.lease_max(), needed });
        }
        let mut state = KvState::new(&self.config, &options, &*self.backend)?;
        let kv_bytes = state.allocated_bytes(&*self.backend);
        Ok(Box::new(Runner {
            state,
            kv_bytes,
            work: Workspace::new(Sizes::new(&self.config, &options), &*self.backend)?,
            carry: Carry::new(CarrySizes::new(&self.config, &options), &*self.backend)?,
            expert_carry: MoeCarry::new(moe::CarrySizes(self.config.moe_sizes(options.sweep_rows())), &*self.backend)?,
            host: Host::new(&self.config, &options),
            known: Vec::with_capacity(self.config.layers.len() * self.config.experts_per_token),
            announced: None,
            model: self,
            options,
            experts,
        }))
    }

    fn sweep_counts(&self) -> SweepCounts {
        self.counters.snapshot()
    }
}

/// Host memory that is kept from step to step, with room for the largest one.
struct Host {
    grouping: Grouping,
    /// `[vocab]` of one row.
    logits: Vec<f32>,
    /// Bytes of it all.
    bytes: u64,
}

impl Host {
    fn new(config: &Config, options: &RunnerOptions) -> Self {
        Self {
            grouping: Grouping::new(options.sweep_rows(), config.experts, config.experts_per_token),
            logits: Vec::with_capacity(config.vocab),
            bytes: Self::bytes_for(config, options),
        }
    }

    fn bytes_for(config: &Config, options: &RunnerOptions) -> u64 {
        let grouping = Grouping::bytes_for(options.sweep_rows(), config.experts, config.experts_per_token);
        // The model's tables belong to all sequences; there is one in most runs.
        let tables = config.layers.iter().filter(|layer| layer.is_hashed).count() as u64;
        let table = TokenExperts::bytes_for(config.vocab, config.experts_per_token);
        4 * config.vocab as u64 + grouping + tables * table
    }
}

/// One sequence.
struct Runner<B: Backend> {
    model: Arc<DeepSeek4<B>>,
    options: RunnerOptions,
    experts: Arc<dyn ExpertSupply<B>>,
    state: KvState<B>,
    kv_bytes: u64,
    work: Workspace<B>,
    carry: Carry<B>,
    expert_carry: MoeCarry<B>,
    host: Host,
    /// Experts of the announced token.
    known: Vec<ExpertKey>,
    /// Position and id of the token whose experts the supply was told.
    announced: Option<(usize, TokenId)>,
}

impl<B: Backend> Runner<B> {
    /// Tells the supply which experts `token` will use in layers with a table, once.
    fn announce(&mut self, token: TokenId) {
        if self.announced == Some((self.state.len, token)) {
            return;
        }
        self.announced = Some((self.state.len, token));
        self.known.clear();
        for (layer, weights) in self.model.weights.layers.iter().enumerate() {
            if let Some(table) = &weights.token_experts {
                let key = |id: i32| ExpertKey::new(layer as u16, id as u16);
                self.known.extend(table.of(&[token]).into_iter().map(key));
            }
        }
        if !self.known.is_empty() {
            self.experts.announce(&self.known);
        }
    }

    /// All sweeps of `tokens`.
    fn run_sweeps(
        &mut self,
        tokens: &[TokenId],
        want: Want,
        sink: &mut LogitSink<'_>,
        mut probe: Option<&mut dyn Probe>,
        progress: &mut Progress<'_>,
    ) -> Result<(), ModelError> {
        let mut rest = tokens;
        while !rest.is_empty() {
            let (now, after) = rest.split_at(rest.len().min(self.options.sweep_rows()));
            let want = if want == Want::Last && !after.is_empty() { Want::None } else { want };
            let probe = probe.as_mut().map(|p| &mut **p as &mut dyn Probe);
            let done = tokens.len() - rest.len();
            let backend = Arc::clone(&self.model.backend);
            self.state.begin(&*backend, now.len())?;
            let told = &mut |rows| progress(done + rows);
            if let &[token] = now {
                self.announce(token);
            }
            let result = match now {
                [token] => self.run_row(*token, want, sink, probe).map(|()| 1),
                _ => self.run_sweep(now, want, sink, probe, told),
            };
            match result {
                Ok(reach) => self.state.commit(now.len(), reach),
                Err(error) => {
                    self.state.restore(&*backend, now.len())?;
                    return Err(error);
                }
            }
            rest = after;
        }
        Ok(())
    }

    /// One sweep of several rows; returns how many of them can be taken back.
    fn run_sweep(
        &mut self,
        tokens: &[TokenId],
        want: Want,
        sink: &mut LogitSink<'_>,
        mut probe: Option<&mut dyn Probe>,
        progress: &mut Progress<'_>,
    ) -> Result<usize, ModelError> {
        let rows = tokens.len();
        let model = Arc::clone(&self.model);
        let config = &model.config;
        let seen = want.rows(rows);
        // A probe looks at all rows.
        let suffix = match self.options.decoder_suffix && probe.is_none() {
            true => Suffix::exact(&config.makes_rows(), config.window, rows, seen),
            false => Suffix::none(config.layers.len(), rows),
        };
        model.counters.count(rows, config.layers.len(), suffix.skipped());
        let layers = SweepRows {
            ctx: ctx(&model, &self.options, (self.state.len, rows)),
            state: &mut self.state,
            work: &mut self.work,
            carry: &mut self.carry,
            logits: &mut self.host.logits,
            probe: probe.as_mut().map(|p| &mut **p as &mut dyn Probe),
            tokens,
        };
        let mut sweep = Sweep {
            backend: &*model.backend,
            layers,
            layer_count: config.layers.len(),
            sizes: config.moe_sizes(rows),
            carry: &mut self.expert_carry,
            grouping: &mut self.host.grouping,
            experts: &*self.experts,
            suffix: &suffix,
            rows,
            chunk: self.options.chunk,
            progress,
        };
        sweep.run()?;
        sweep.logits(seen, sink)?;
        Ok(suffix.reach())
    }

    /// One token through all layers.
    fn run_row(
        &mut self,
        token: TokenId,
        want: Want,
        sink: &mut LogitSink<'_>,
        mut probe: Option<&mut dyn Probe>,
    ) -> Result<(), ModelError> {
        let model = Arc::clone(&self.model);
        let ctx = ctx(&model, &self.options, (self.state.len, 1));
        let probe = probe.as_mut().map(|p| &mut **p as &mut dyn Probe);
        let mut pass = Pass { ctx, state: &mut self.state, work: &mut self.work, probe };
        pass.start(&[token])?;
        // A probe wants to see what the host has to hear of then.
        let mut found = if pass.probe.is_none() { self.experts.begin_row()? } else { None };
        for layer in 0..model.config.layers.len() {
            let begun = spans::begin();
            pass.attention_sublayer(layer)?;
            let known = pass.enter_ffn(layer, &[token])?;
            spans::end_half("attention", layer, 1, begun);
            let begun = spans::begin();
            // A next layer with a table has nothing to guess.
            let next = model.weights.layers.get(layer + 1).map(|next| &next.moe);
            match &mut found {
                Some(found) => pass.moe(layer).row_found(&mut **found)?,
                None => pass.moe(layer).row(&*self.experts, &mut self.host.grouping, known.as_deref(), next)?,
            }
            pass.leave_ffn(layer)?;
            spans::end_half("experts", layer, 1, begun);
        }
        found.map_or(Ok(()), |found| found.finish())?;
        if want != Want::None {
            pass.head(0..1, &mut self.host.logits, sink)?;
        }
        Ok(())
    }
}

fn ctx<'a, B: Backend>(
    model: &'a DeepSeek4<B>,
    options: &RunnerOptions,
    (first_pos, rows): (usize, usize),
) -> Ctx<'a, B> {
    let (config, backend, weights) = (&model.config, &*model.backend, &model.weights);
    Ctx { config, backend, weights, kv_exact: options.kv_exact, ctx: options.ctx, rows, first_pos }
}

impl<B: Backend> ModelRunner for Runner<B> {
    fn arch(&self) -> &'static str {
        ARCH
    }

    fn vocab(&self) -> usize {
        self.model.config.vocab
    }

    fn ctx(&self) -> usize {
        self.options.ctx
    }

    fn chunk(&self) -> usize {
        self.options.chunk
    }

    fn sweep(&self) -> usize {
        self.options.sweep_rows()
    }

    fn len(&self) -> usize {
        self.state.len
    }

    fn bytes(&self) -> RunnerBytes {
        let backend = &*self.model.backend;
        let carry = self.carry.allocated_bytes(backend) + self.expert_carry.allocated_bytes(backend);
        let scratch = self.work.allocated_bytes(backend) + carry + self.host.bytes;
        RunnerBytes { kv: self.kv_bytes, scratch }
    }

    fn reset(&mut self) {
        self.state.reset();
        self.announced = None;
    }

    fn reach(&self, len: usize) -> usize {
        self.state.reach(len)
    }

    fn rewind(&mut self, kept: &[TokenId]) -> usize {
        self.announced = None;
        if self.state.is_within_reach(kept.len()) {
            self.state.rewind(kept.len());
            return kept.len();
        }
        self.reset();
        0
    }

    fn save_state(&mut self, part: StatePart, sink: &mut dyn StateSink) -> Result<(), StateError> {
        self.state.save_to(part, &self.model.config, &*self.model.backend, sink)
    }

    fn load_state(
        &mut self,
        part: StatePart,
        kept: &[TokenId],
        source: &mut dyn StateSource,
    ) -> Result<(), StateError> {
        self.announced = None;
        let (model, ctx) = (&self.model, self.options.ctx);
        let loaded = self.state.load_from((part, kept.len(), ctx), &model.config, &*model.backend, source);
        if loaded.is_err() {
            self.state.reset();
        }
        loaded
    }

    /// Spec 2.6: the experts of hash-routed layers are known with the token. More than one token's may not fit the cache beside each other,
    /// and a sweep asks for each layer's in time.
    fn prefetch_rows(&mut self, tokens: &[TokenId]) -> Result<(), ModelError> {
        self.check_tokens(tokens)?;
        if let &[token] = tokens {
            self.announce(token);
        }
        Ok(())
    }

    fn forward_watched(
        &mut self,
        tokens: &[TokenId],
        want: Want,
        sink: &mut LogitSink<'_>,
        probe: Option<&mut dyn Probe>,
        progress: &mut Progress<'_>,
    ) -> Result<(), ModelError> {
        self.check_tokens(tokens)?;
        self.check_room(tokens.len())?;
        let backend = Arc::clone(&self.model.backend);
        backend.run(|| self.run_sweeps(tokens, want, sink, probe, progress))
    }
}
