//! Runs tokens through the model: chunks, n-gram reads ahead of use, commit of what is complete (spec 3.13, 4.6, 5.4).
//! Never leaves a trace of a failed chunk: the state advances only when all layers are done. Surprising fact: decode is
//! a chunk of one row; there is no other path.

use std::sync::Arc;

use super::config::{ARCH, Config, EngramConfig};
use super::kv::{KvState, kv_bytes};
use super::matrix_inputs::{matrix_inputs, products};
use super::moe::Grouping;
use super::pass::{Ctx, Pass};
use super::weights::{Weights, tensor_specs};
use super::workspace::{Workspace, scratch_bytes};
use crate::backend::Backend;
use crate::models::metadata::MetadataView;
use crate::models::probe::{MatrixInput, Point, Probe};
use crate::models::supply::{ExpertSupply, RowSupply, RowTicket};
use crate::models::weights::{TensorSpec, WeightSource};
use crate::models::{
    LogitSink, Model, ModelConfig, ModelError, ModelRunner, Product, RunnerBytes, RunnerOptions, Want,
};
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
        let scratch = scratch_bytes(self, options) + Host::bytes_for(self, options);
        RunnerBytes { kv: kv_bytes(self, options), scratch }
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
}

impl<B: Backend> DeepSeek41<B> {
    /// Reads the metadata and loads the resident weights.
    pub fn load(view: &dyn MetadataView, backend: Arc<B>, source: &dyn WeightSource) -> Result<Self, ModelError> {
        let config = Config::from_metadata(view)?;
        let weights = Weights::load(&config, &*backend, source)?;
        Ok(Self { config, backend, weights })
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
            work: Workspace::new(&self.config, &options, &*self.backend)?,
            host: Host::new(&self.config, &options),
            model: self,
            options,
            experts,
            rows,
            pending: None,
        }))
    }
}

/// Rows that are being read for the tokens at `first_pos`.
struct PendingRows {
    first_pos: usize,
    tokens: Vec<TokenId>,
    /// `[table][tokens * columns]`.
    rows: Vec<Vec<u64>>,
    ticket: Box<dyn RowTicket>,
}

/// Host memory that is kept from step to step, with room for the largest one.
struct Host {
    grouping: Grouping,
    /// `[rows, columns, row_bytes]` of one table.
    row_bytes: Vec<u8>,
    /// `[rows, columns, width]` of one table.
    row_values: Vec<f32>,
    /// `[vocab]` of one row.
    logits: Vec<f32>,
    /// Bytes of it all.
    bytes: u64,
}

impl Host {
    fn new(config: &Config, options: &RunnerOptions) -> Self {
        let [row_bytes, row_values, logits] = Self::lens(config, options);
        Self {
            grouping: Grouping::new(options.chunk, config.experts, config.experts_per_token),
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

    /// Also counts the row numbers of [`PendingRows`], of which one is alive at a time.
    fn bytes_for(config: &Config, options: &RunnerOptions) -> u64 {
        let [row_bytes, row_values, logits] = Self::lens(config, options);
        let numbers = options.chunk * config.rows_per_token() * size_of::<u64>();
        let grouping = Grouping::bytes_for(options.chunk, config.experts, config.experts_per_token);
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
    pending: Option<PendingRows>,
    host: Host,
}

/// Starts the reads for `tokens`, which follow `tail` at `first_pos`; `None` if the model has no tables.
fn submit_rows(
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
    /// The reads for `tokens` at the end of the state: those under way if they are the same, else new ones.
    fn take_rows(&mut self, tokens: &[TokenId]) -> Result<Option<PendingRows>, ModelError> {
        let here = (self.state.len, &self.state.tail[..]);
        match self.pending.take() {
            Some(pending) if pending.first_pos == here.0 && pending.tokens == tokens => Ok(Some(pending)),
            _ => submit_rows(self.model.config.engram.as_ref(), self.rows.as_deref(), here, tokens),
        }
    }

    fn check_tokens(&self, tokens: &[TokenId]) -> Result<(), ModelError> {
        let vocab = self.model.config.vocab;
        match tokens.iter().find(|t| **t as usize >= vocab) {
            Some(token) => Err(ModelError::Token { token: *token, vocab }),
            None => Ok(()),
        }
    }

    /// All chunks of `tokens`.
    fn run_chunks(
        &mut self,
        tokens: &[TokenId],
        want: Want,
        sink: &mut LogitSink<'_>,
        mut probe: Option<&mut dyn Probe>,
    ) -> Result<(), ModelError> {
        let mut rest = tokens;
        while !rest.is_empty() {
            let (chunk, after) = rest.split_at(rest.len().min(self.options.chunk));
            let ahead = &after[..after.len().min(self.options.chunk)];
            let want = if want == Want::Last && !after.is_empty() { Want::None } else { want };
            let probe = probe.as_mut().map(|p| &mut **p as &mut dyn Probe);
            self.run_chunk(chunk, ahead, want, sink, probe)?;
            rest = after;
        }
        Ok(())
    }

    /// One chunk through all layers. `ahead` are the tokens of the next one.
    fn run_chunk(
        &mut self,
        tokens: &[TokenId],
        ahead: &[TokenId],
        want: Want,
        sink: &mut LogitSink<'_>,
        mut probe: Option<&mut dyn Probe>,
    ) -> Result<(), ModelError> {
        let mut rows = self.take_rows(tokens)?;
        let model = self.model.clone();
        let config = &model.config;
        let ctx = Ctx {
            config,
            backend: &*model.backend,
            weights: &model.weights,
            kv_exact: self.options.kv_exact,
            rows: tokens.len(),
            first_pos: self.state.len,
        };
        self.state.written = self.state.written.max(self.state.len + tokens.len());
        let probe_here = probe.as_mut().map(|p| &mut **p as &mut dyn Probe);
        let mut pass = Pass { ctx, state: &mut self.state, work: &mut self.work, probe: probe_here };
        pass.start(tokens)?;
        for layer in 0..config.layers.len() {
            if let (Some(table), Some(under_way)) = (config.layers[layer].table, &mut rows) {
                wait_and_add(&mut pass, (layer, table), under_way, &mut self.host)?;
                if table + 1 == under_way.rows.len() {
                    // Gives its memory back before the next rows take as much.
                    rows = None;
                    let tail = [&pass.state.tail, tokens].concat();
                    let next = (pass.ctx.first_pos + tokens.len(), &tail[..]);
                    self.pending = submit_rows(config.engram.as_ref(), self.rows.as_deref(), next, ahead)?;
                }
            }
            pass.attention_sublayer(layer)?;
            pass.enter_ffn(layer)?;
            pass.moe(layer, &*self.experts, &mut self.host.grouping)?;
            pass.leave_ffn(layer)?;
        }
        let wanted = match want {
            Want::None => tokens.len()..tokens.len(),
            Want::Last => tokens.len() - 1..tokens.len(),
            Want::All => 0..tokens.len(),
        };
        pass.head(wanted, &mut self.host.logits, sink)?;
        self.state.commit(tokens, config.engram.as_ref().map_or(0, |e| e.look_back()));
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
    if let Some(probe) = pass.probe.as_mut().filter(|p| p.wants(Point::EngramRows)) {
        let ids: Vec<i32> = rows.iter().map(|r| *r as i32).collect();
        probe.ids(Point::EngramRows, layer, pass.ctx.first_pos, engram.columns(), &ids);
    }
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

    fn len(&self) -> usize {
        self.state.len
    }

    fn bytes(&self) -> RunnerBytes {
        let backend = &*self.model.backend;
        let scratch = self.work.allocated_bytes(backend) + self.host.bytes;
        RunnerBytes { kv: self.state.allocated_bytes(backend), scratch }
    }

    fn reset(&mut self) {
        self.state.reset();
        self.pending = None;
    }

    fn rewind(&mut self, kept: &[TokenId]) -> usize {
        self.pending = None;
        let config = &self.model.config;
        let look_back = config.engram.as_ref().map_or(0, |e| e.look_back());
        if self.state.rewind(kept, (config.window, look_back)) {
            return kept.len();
        }
        self.reset();
        0
    }

    fn prefetch_rows(&mut self, tokens: &[TokenId]) -> Result<(), ModelError> {
        self.check_tokens(tokens)?;
        let tokens = &tokens[..tokens.len().min(self.options.chunk)];
        let here = (self.state.len, &self.state.tail[..]);
        self.pending = submit_rows(self.model.config.engram.as_ref(), self.rows.as_deref(), here, tokens)?;
        Ok(())
    }

    fn forward(
        &mut self,
        tokens: &[TokenId],
        want: Want,
        sink: &mut LogitSink<'_>,
        probe: Option<&mut dyn Probe>,
    ) -> Result<(), ModelError> {
        self.check_tokens(tokens)?;
        let (len, ctx) = (self.state.len, self.options.ctx);
        if tokens.len() > ctx - len {
            return Err(ModelError::Context { len, more: tokens.len(), ctx });
        }
        let backend = self.model.backend.clone();
        backend.run(|| self.run_chunks(tokens, want, sink, probe))
    }
}
