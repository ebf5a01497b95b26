//! Runs tokens through the model: sweeps, n-gram reads ahead of use, commit of what is complete (spec 3.13, 4.6, 5.4).
//! Never leaves a trace of a failed sweep: the state advances only when all layers are done. Surprising fact: a single row has a path of
//! its own, because its experts are computed in the order in which they land; the bits are those of a sweep.

use std::sync::Arc;

use super::carry::{Carry, CarrySizes};
use super::config::{ARCH, Config, EngramConfig};
use super::kv::{KvState, kv_bytes};
use super::matrix_inputs::{matrix_inputs, products};
use super::pass::{Ctx, Pass};
use super::row_feed::RowFeed;
use super::snapshot;
use super::sweep::SweepRows;
use super::weights::{Weights, tensor_specs};
use super::workspace::{Sizes, Workspace};
use crate::backend::Backend;
use crate::models::blocks::grouping::Grouping;
use crate::models::blocks::moe::{self, MoeCarry};
use crate::models::blocks::suffix::Suffix;
use crate::models::blocks::sweep::Sweep;
use crate::models::metadata::MetadataView;
use crate::models::probe::{MatrixInput, Probe};
use crate::models::state::{StateError, StatePart, StateSink, StateSource};
use crate::models::supply::{ExpertSupply, RowSupply, RowTicket};
use crate::models::weights::{TensorSpec, WeightSource};
use crate::models::{
    LogitSink, Model, ModelConfig, ModelError, ModelRunner, PassCounters, Product, Progress, RunnerBytes,
    RunnerOptions, SweepCounts, Want,
};
use crate::obs::spans;
use crate::units::TokenId;

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
        self.engram.as_ref().map_or(0, |e| e.layers.len() * e.columns())
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
pub struct DeepSeek41<B: Backend> {
    config: Config,
    backend: Arc<B>,
    weights: Weights<B>,
    counters: PassCounters,
}

impl<B: Backend> DeepSeek41<B> {
    /// Reads the metadata and loads the resident weights.
    pub fn load(view: &dyn MetadataView, backend: Arc<B>, source: &dyn WeightSource) -> Result<Self, ModelError> {
        let config = Config::from_metadata(view)?;
        let weights = Weights::load(&config, &*backend, source)?;
        Ok(Self { config, backend, weights, counters: PassCounters::default() })
    }
}

impl<B: Backend> Model<B> for DeepSeek41<B> {
    fn runner(
        self: Arc<Self>,
        options: RunnerOptions,
        experts: Arc<dyn ExpertSupply<B>>,
        rows: Option<Arc<dyn RowSupply>>,
    ) -> Result<Box<dyn ModelRunner>, ModelError> {
        let needed = self.config.experts_per_token;
        if experts.lease_max() < needed {
            return Err(ModelError::LeaseTooSmall { found: experts.lease_max(), needed });
        }
        if let Some(engram) = &self.config.engram {
            let found = rows.as_ref().ok_or(ModelError::NoRows)?.row_bytes();
            if found != engram.row_bytes {
                return Err(ModelError::RowBytes { found, expected: engram.row_bytes });
            }
        }
        Ok(Box::new(Runner {
            state: KvState::new(&self.config, &options, &*self.backend)?,
            work: Workspace::new(Sizes::new(&self.config, &options), &*self.backend)?,
            carry: Carry::new(CarrySizes::new(&self.config, &options), &*self.backend)?,
            expert_carry: MoeCarry::new(moe::CarrySizes(self.config.moe_sizes(options.sweep_rows())), &*self.backend)?,
            host: Host::new(&self.config, &options),
            model: self,
            options,
            experts,
            rows,
            pending: None,
        }))
    }

    fn sweep_counts(&self) -> SweepCounts {
        self.counters.snapshot()
    }
}

/// Rows that are being read for the tokens at `first_pos`.
pub struct PendingRows {
    first_pos: usize,
    tokens: Vec<TokenId>,
    /// `[table][tokens * columns]`.
    pub rows: Vec<Vec<u64>>,
    pub ticket: Box<dyn RowTicket>,
}

/// Host memory that is kept from step to step, with room for the largest one.
pub struct Host {
    pub grouping: Grouping,
    /// `[rows, columns, row_bytes]` of one table.
    pub row_bytes: Vec<u8>,
    /// `[rows, columns, width]` of one table.
    pub row_values: Vec<f32>,
    /// `[vocab]` of one row.
    pub logits: Vec<f32>,
    /// Bytes of it all.
    bytes: u64,
}

impl Host {
    fn new(config: &Config, options: &RunnerOptions) -> Self {
        let [row_bytes, row_values, logits] = Self::lens(config, options);
        Self {
            grouping: Grouping::new(options.sweep_rows(), config.experts, config.experts_per_token),
            row_bytes: Vec::with_capacity(row_bytes),
            row_values: Vec::with_capacity(row_values),
            logits: Vec::with_capacity(logits),
            bytes: Self::bytes_for(config, options),
        }
    }

    fn lens(config: &Config, options: &RunnerOptions) -> [usize; 3] {
        let (bytes, values) = config.engram.as_ref().map_or((0, 0), |e| (e.row_bytes, e.width));
        let rows = options.chunk * config.engram.as_ref().map_or(0, |e| e.columns());
        [rows * bytes, rows * values, config.vocab.max(config.hidden)]
    }

    /// Also counts the row numbers of what is read ahead, of which there is a chunk of all tables at a time.
    fn bytes_for(config: &Config, options: &RunnerOptions) -> u64 {
        let [row_bytes, row_values, logits] = Self::lens(config, options);
        let numbers = options.chunk * config.rows_per_token() * size_of::<u64>();
        let grouping = Grouping::bytes_for(options.sweep_rows(), config.experts, config.experts_per_token);
        (row_bytes + 4 * (row_values + logits) + numbers) as u64 + grouping
    }
}

/// One sequence.
struct Runner<B: Backend> {
    model: Arc<DeepSeek41<B>>,
    options: RunnerOptions,
    experts: Arc<dyn ExpertSupply<B>>,
    rows: Option<Arc<dyn RowSupply>>,
    state: KvState<B>,
    work: Workspace<B>,
    carry: Carry<B>,
    expert_carry: MoeCarry<B>,
    pending: Option<PendingRows>,
    host: Host,
}

/// Starts the reads for `tokens`, which follow `tail` at `first_pos`; `None` if the model has no tables.
pub fn submit_rows(
    engram: Option<&EngramConfig>,
    supply: Option<&dyn RowSupply>,
    (first_pos, tail): (usize, &[TokenId]),
    tokens: &[TokenId],
) -> Result<Option<PendingRows>, ModelError> {
    let (Some(engram), Some(supply), false) = (engram, supply, tokens.is_empty()) else {
        return Ok(None);
    };
    let rows = engram.rows(tail, tokens);
    let ticket = supply.submit(&rows)?;
    Ok(Some(PendingRows { first_pos, tokens: tokens.to_vec(), rows, ticket }))
}

impl<B: Backend> Runner<B> {
    /// The reads that are under way, if they are for `tokens` at the end of the state.
    fn take_pending(&mut self, tokens: &[TokenId]) -> Option<PendingRows> {
        self.pending.take().filter(|p| p.first_pos == self.state.len && p.tokens == tokens)
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
            self.state.begin(now.len());
            let reach = match now {
                [token] => {
                    self.run_row(*token, want, sink, probe)?;
                    1
                }
                _ => {
                    let saved = self.state.save(&self.model.config, &*self.model.backend, now.len());
                    let told = &mut |rows| progress(done + rows);
                    let swept =
                        saved.map_err(Into::into).and_then(|()| self.run_sweep((now, after), want, sink, probe, told));
                    match swept {
                        Ok(reach) => reach,
                        Err(error) => {
                            self.state.restore(&self.model.config, &*self.model.backend, now.len())?;
                            return Err(error);
                        }
                    }
                }
            };
            self.state.commit(now, self.model.config.look_back(), reach);
            rest = after;
        }
        Ok(())
    }

    /// One sweep of several rows; `after` are the tokens behind it. Returns how many of its rows can be taken back.
    fn run_sweep(
        &mut self,
        (tokens, after): (&[TokenId], &[TokenId]),
        want: Want,
        sink: &mut LogitSink<'_>,
        mut probe: Option<&mut dyn Probe>,
        progress: &mut Progress<'_>,
    ) -> Result<usize, ModelError> {
        let (rows, chunk) = (tokens.len(), self.options.chunk);
        let pending = self.take_pending(tokens);
        let model = self.model.clone();
        let config = &model.config;
        let seen = want.rows(rows);
        // A probe looks at all rows.
        let suffix = match self.options.decoder_suffix && probe.is_none() {
            true => Suffix::exact(&config.makes_rows(), config.window, rows, seen),
            false => Suffix::none(config.layers.len(), rows),
        };
        model.counters.count(rows, config.layers.len(), suffix.skipped());
        let reach = suffix.reach();
        let mut feed = match (&config.engram, self.rows.as_deref()) {
            (Some(engram), Some(supply)) => {
                Some(RowFeed::start((engram, supply), (&self.state.tail, tokens), (&suffix, chunk), pending)?)
            }
            _ => None,
        };
        let ctx = Ctx {
            config,
            backend: &*model.backend,
            weights: &model.weights,
            kv_exact: self.options.kv_exact,
            rows,
            first_pos: self.state.len,
            piece: 0,
        };
        let Host { grouping, row_bytes, row_values, logits, .. } = &mut self.host;
        let layers = SweepRows {
            ctx,
            state: &mut self.state,
            work: &mut self.work,
            carry: &mut self.carry,
            rows_host: (row_bytes, row_values),
            logits,
            probe: probe.as_mut().map(|p| &mut **p as &mut dyn Probe),
            feed: feed.as_mut(),
            tokens,
        };
        let mut sweep = Sweep {
            backend: &*model.backend,
            layers,
            layer_count: config.layers.len(),
            sizes: config.moe_sizes(rows),
            carry: &mut self.expert_carry,
            grouping,
            experts: &*self.experts,
            suffix: &suffix,
            rows,
            chunk,
            progress,
        };
        sweep.run()?;
        sweep.logits(seen, sink)?;
        if let Some(feed) = feed {
            let ahead = &after[..after.len().min(self.options.sweep_rows())];
            self.pending = feed.ask_ahead(self.state.len + rows, ahead, chunk)?;
        }
        Ok(reach)
    }

    /// One token through all layers.
    fn run_row(
        &mut self,
        token: TokenId,
        want: Want,
        sink: &mut LogitSink<'_>,
        mut probe: Option<&mut dyn Probe>,
    ) -> Result<(), ModelError> {
        let model = self.model.clone();
        let config = &model.config;
        let pending = self.take_pending(&[token]);
        let here = (self.state.len, &self.state.tail[..]);
        let mut rows = match pending {
            Some(pending) => Some(pending),
            None => submit_rows(config.engram.as_ref(), self.rows.as_deref(), here, &[token])?,
        };
        let ctx = Ctx {
            config,
            backend: &*model.backend,
            weights: &model.weights,
            kv_exact: self.options.kv_exact,
            rows: 1,
            first_pos: self.state.len,
            piece: 0,
        };
        let probe = probe.as_mut().map(|p| &mut **p as &mut dyn Probe);
        let mut pass = Pass { ctx, state: &mut self.state, work: &mut self.work, probe };
        pass.start(&[token])?;
        // A probe wants to see what the host has to hear of then.
        let mut found = if pass.probe.is_none() { self.experts.begin_row()? } else { None };
        for layer in 0..config.layers.len() {
            let begun = spans::begin();
            if let (Some(table), Some(under_way)) = (config.layers[layer].table, &mut rows) {
                wait_and_add(&mut pass, (layer, table), under_way, &mut self.host)?;
            }
            pass.attention_sublayer(layer)?;
            pass.enter_ffn(layer)?;
            pass.moe(layer).route(None)?;
            spans::end_half("attention", layer, 1, begun);
            let begun = spans::begin();
            let next = model.weights.layers.get(layer + 1).map(|next| &next.moe);
            match &mut found {
                Some(found) => pass.moe(layer).row_found(&mut **found)?,
                None => pass.moe(layer).row(&*self.experts, &mut self.host.grouping, None, next)?,
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

/// Waits for the rows of one table and adds them to the streams.
fn wait_and_add<B: Backend>(
    pass: &mut Pass<'_, B>,
    (layer, table): (usize, usize),
    pending: &mut PendingRows,
    host: &mut Host,
) -> Result<(), ModelError> {
    let engram = pass.ctx.config.engram.as_ref().expect("a layer with a table has a configuration");
    let rows = &pending.rows[table];
    host.row_bytes.resize(rows.len() * engram.row_bytes, 0);
    pending.ticket.wait(table, &mut host.row_bytes)?;
    pass.engram(layer, rows, &host.row_bytes, &mut host.row_values)
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
        RunnerBytes { kv: self.state.allocated_bytes(backend), scratch }
    }

    fn reset(&mut self) {
        self.state.reset();
        self.pending = None;
    }

    fn reach(&self, len: usize) -> usize {
        self.state.reach(len, self.model.config.window)
    }

    fn rewind(&mut self, kept: &[TokenId]) -> usize {
        self.pending = None;
        let model = self.model.clone();
        match self.state.rewind(kept, &model.config, &*model.backend) {
            Ok(true) => kept.len(),
            // A copy that the device refused: whatever is computed next will say so.
            Ok(false) | Err(_) => {
                self.reset();
                0
            }
        }
    }

    fn save_state(&mut self, part: StatePart, sink: &mut dyn StateSink) -> Result<(), StateError> {
        let model = &self.model;
        self.state.save_to(part, &model.config, &*model.backend, sink)
    }

    fn load_state(
        &mut self,
        part: StatePart,
        kept: &[TokenId],
        source: &mut dyn StateSource,
    ) -> Result<(), StateError> {
        self.pending = None;
        let model = &self.model;
        let ctx = self.options.ctx;
        let loaded = self.state.load_from((part, kept, ctx), &model.config, &*model.backend, source);
        if loaded.is_err() {
            self.state.reset();
        }
        loaded
    }

    fn prefetch_rows(&mut self, tokens: &[TokenId]) -> Result<(), ModelError> {
        self.check_tokens(tokens)?;
        let tokens = &tokens[..tokens.len().min(self.options.chunk)];
        let here = (self.state.len, &self.state.tail[..]);
        self.pending = submit_rows(self.model.config.engram.as_ref(), self.rows.as_deref(), here, tokens)?;
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
        let backend = self.model.backend.clone();
        backend.run(|| self.run_sweeps(tokens, want, sink, probe, progress))
    }
}
