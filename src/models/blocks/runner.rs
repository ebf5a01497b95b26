//! Runs tokens through a model: sweeps, what is fetched ahead of them, commit of what is complete.
//! Never leaves a trace of a failed sweep: the state advances only when all layers are done. Surprising fact: a single row has a path of
//! its own, because its experts are computed in the order in which they land; the bits are those of a sweep.

use std::sync::Arc;

use super::architecture::{Architecture, Feed, GraphConfig, Here, SavedState, SequenceState, Weights};
use super::backbone::Backbone;
use super::grouping::Grouping;
use super::moe::{self, MoeCarry};
use super::pass::{Ctx, Pass};
use super::suffix::{Piece, PieceKind, Suffix};
use super::sweep::Sweep;
use super::sweep_rows::SweepRows;
use super::workspace::{Carry, CarrySizes, Sizes, Workspace};
use crate::backend::Backend;
use crate::models::metadata::MetadataView;
use crate::models::probe::Probe;
use crate::models::state::{StateError, StatePart, StateSink, StateSource};
use crate::models::supply::{ExpertSupply, RowSupply};
use crate::models::weights::WeightSource;
use crate::models::{
    LogitSink, Model, ModelConfig, ModelError, ModelRunner, PassCounters, Progress, RunnerBytes, RunnerOptions,
    SweepCounts, Want,
};
use crate::obs::spans;
use crate::units::TokenId;

/// So many rows go one by one on a device that queues its ops: a sweep of them takes longer (docs/KERNELS.md).
const FEW_ROWS: usize = 2;

/// Configuration and resident weights on a device.
pub struct Loaded<B: Backend, A: Architecture<B>> {
    pub config: A::Config,
    pub weights: Weights<B, A>,
    backend: Arc<B>,
    counters: PassCounters,
    /// What a sweep of one row leaves out: nothing.
    one_row: Suffix,
}

impl<B: Backend, A: Architecture<B>> Loaded<B, A> {
    /// Reads the metadata and loads the resident weights.
    ///
    /// # Errors
    /// Metadata or tensors that are not those of the architecture.
    pub fn load(view: &dyn MetadataView, backend: Arc<B>, source: &dyn WeightSource) -> Result<Self, ModelError> {
        let config = A::config(view)?;
        let weights = A::weights(&config, &*backend, source)?;
        let one_row = Suffix::none(config.layer_count(), 1);
        Ok(Self { config, weights, backend, counters: PassCounters::default(), one_row })
    }
}

impl<B: Backend, A: Architecture<B>> Model<B> for Loaded<B, A> {
    fn runner(
        self: Arc<Self>,
        options: RunnerOptions,
        experts: Arc<dyn ExpertSupply<B>>,
        rows: Option<Arc<dyn RowSupply>>,
    ) -> Result<Box<dyn ModelRunner>, ModelError> {
        let (c, backend) = (&self.config, &*self.backend);
        let needed = c.experts_per_token;
        if experts.lease_max() < needed {
            return Err(ModelError::LeaseTooSmall { found: experts.lease_max(), needed });
        }
        Ok(Box::new(Runner::<B, A> {
            feed: A::Feed::new(c, &options, rows)?,
            state: A::State::new(c, &options, backend)?,
            work: Workspace::new(Sizes::new(c, &options), backend)?,
            own: A::own(c, &options, backend)?,
            carry: Carry::new(CarrySizes::new(c, &options), backend)?,
            expert_carry: MoeCarry::new(moe::CarrySizes(c.moe_sizes(options.sweep_rows())), backend)?,
            host: Host::new(c, &options),
            chosen: None,
            model: self,
            options,
            experts,
        }))
    }

    fn sweep_counts(&self) -> SweepCounts {
        self.counters.snapshot()
    }
}

/// Memory of a runner whose state takes `kv` bytes, and whatever only its architecture has `own`.
pub fn runner_bytes<C: GraphConfig>(c: &C, options: &RunnerOptions, kv: u64, own: u64) -> RunnerBytes {
    let experts = moe::CarrySizes(c.moe_sizes(options.sweep_rows()));
    let carry = CarrySizes::new(c, options).bytes() + experts.bytes();
    RunnerBytes { kv, scratch: Sizes::new(c, options).bytes() + carry + Host::bytes_for(c, options) + own }
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
    fn new(b: &Backbone, options: &RunnerOptions) -> Self {
        Self {
            grouping: Grouping::new(options.sweep_rows(), b.experts, b.experts_per_token),
            logits: Vec::with_capacity(b.vocab),
            bytes: Self::bytes_for(b, options),
        }
    }

    fn bytes_for(b: &Backbone, options: &RunnerOptions) -> u64 {
        4 * b.vocab as u64 + Grouping::bytes_for(options.sweep_rows(), b.experts, b.experts_per_token)
    }
}

/// One sequence.
struct Runner<B: Backend, A: Architecture<B>> {
    model: Arc<Loaded<B, A>>,
    options: RunnerOptions,
    experts: Arc<dyn ExpertSupply<B>>,
    feed: A::Feed,
    state: A::State,
    work: Workspace<B>,
    own: A::Own,
    carry: Carry<B>,
    expert_carry: MoeCarry<B>,
    host: Host,
    /// What the last pass chose, if that was wanted.
    chosen: Option<TokenId>,
}

impl<B: Backend, A: Architecture<B>> Runner<B, A> {
    /// All sweeps of `tokens`.
    fn run_sweeps(
        &mut self,
        tokens: &[TokenId],
        want: Want,
        sink: &mut LogitSink<'_>,
        mut probe: Option<&mut dyn Probe>,
        progress: &mut Progress<'_>,
    ) -> Result<(), ModelError> {
        let model = Arc::clone(&self.model);
        let mut rest = tokens;
        while !rest.is_empty() {
            let is_few = B::IS_QUEUED && tokens.len() <= FEW_ROWS && want != Want::All && probe.is_none();
            let width = if is_few { 1 } else { self.options.sweep_rows() };
            let (now, after) = rest.split_at(rest.len().min(width));
            let want = if want != Want::All && !after.is_empty() { Want::None } else { want };
            let probe = probe.as_mut().map(|p| &mut **p as &mut dyn Probe);
            let done = tokens.len() - rest.len();
            // A single row tells nobody how far it is.
            if is_few && progress(done).is_break() {
                return Err(ModelError::Interrupted);
            }
            let told = &mut |rows| progress(done + rows);
            self.state.begin(&model.config, &*model.backend, now.len())?;
            match self.run_sweep(&model, (now, after), want, sink, probe, told) {
                Ok(reach) => self.state.commit(&model.config, now, reach),
                Err(error) => {
                    self.feed.abandon();
                    self.state.restore(&model.config, &*model.backend, now.len())?;
                    return Err(error);
                }
            }
            rest = after;
        }
        Ok(())
    }

    /// One sweep; `after` are the tokens behind it. Returns how many of its rows can be taken back.
    fn run_sweep(
        &mut self,
        model: &Loaded<B, A>,
        (tokens, after): (&[TokenId], &[TokenId]),
        want: Want,
        sink: &mut LogitSink<'_>,
        probe: Option<&mut dyn Probe>,
        progress: &mut Progress<'_>,
    ) -> Result<usize, ModelError> {
        let here = |state| Here { model, options: &self.options, state, experts: &*self.experts };
        let reach = if let &[token] = tokens {
            self.feed.begin(here(&self.state), tokens, &model.one_row)?;
            self.run_row(model, token, want, sink, probe)?;
            model.one_row.reach()
        } else {
            let (rows, c) = (tokens.len(), &model.config);
            // A probe looks at all rows.
            let suffix = match self.options.decoder_suffix && probe.is_none() {
                true => Suffix::exact(&c.makes_rows(), c.window, rows, want.rows(rows)),
                false => Suffix::none(c.layer_count(), rows),
            };
            model.counters.count(rows, c.layer_count(), suffix.skipped());
            self.feed.begin(here(&self.state), tokens, &suffix)?;
            self.run_rows(model, (tokens, &suffix), want, sink, probe, progress)?;
            suffix.reach()
        };
        let here = Here { model, options: &self.options, state: &self.state, experts: &*self.experts };
        self.feed.end(here, after)?;
        Ok(reach)
    }

    /// Several rows through all layers, less what `suffix` leaves out.
    fn run_rows(
        &mut self,
        model: &Loaded<B, A>,
        (tokens, suffix): (&[TokenId], &Suffix),
        want: Want,
        sink: &mut LogitSink<'_>,
        mut probe: Option<&mut dyn Probe>,
        progress: &mut Progress<'_>,
    ) -> Result<(), ModelError> {
        let (rows, options) = (tokens.len(), self.options);
        let ctx = ctx(model, &options, (self.state.complete(), rows));
        let probe = probe.as_mut().map(|p| &mut **p as &mut dyn Probe);
        let layers = SweepRows {
            pass: Pass { ctx, state: &mut self.state, work: &mut self.work, own: &mut self.own, probe },
            carry: &mut self.carry,
            feed: &mut self.feed,
            logits: &mut self.host.logits,
            tokens,
        };
        let mut sweep = Sweep {
            backend: &*model.backend,
            layers,
            layer_count: model.config.layer_count(),
            sizes: model.config.moe_sizes(rows),
            carry: &mut self.expert_carry,
            grouping: &mut self.host.grouping,
            experts: &*self.experts,
            suffix,
            rows,
            chunk: options.chunk,
            progress,
        };
        sweep.run()?;
        sweep.logits(want.rows(rows), sink)
    }

    /// One token through all layers.
    fn run_row(
        &mut self,
        model: &Loaded<B, A>,
        token: TokenId,
        want: Want,
        sink: &mut LogitSink<'_>,
        mut probe: Option<&mut dyn Probe>,
    ) -> Result<(), ModelError> {
        let options = self.options;
        let ctx = ctx(model, &options, (self.state.complete(), 1));
        let probe = probe.as_mut().map(|p| &mut **p as &mut dyn Probe);
        let mut pass = Pass { ctx, state: &mut self.state, work: &mut self.work, own: &mut self.own, probe };
        pass.start(&[token])?;
        // A probe wants to see what the host has to hear of then.
        let mut found = if pass.probe.is_none() { self.experts.begin_row()? } else { None };
        for layer in 0..model.config.layer_count() {
            let begun = spans::begin();
            self.feed.add(&mut pass, layer, Piece { first: 0, end: 1, kind: PieceKind::Whole })?;
            pass.attention_half(layer)?;
            let known = pass.enter_experts(layer, &[token])?;
            spans::end_half("attention", layer, 1, begun);
            let begun = spans::begin();
            // A next layer whose experts follow from the token has nothing to guess.
            let next = model.weights.layers.get(layer + 1).map(|next| &next.moe);
            match &mut found {
                Some(found) => pass.moe(layer).row_found(&mut **found, next)?,
                None => pass.moe(layer).row(&*self.experts, &mut self.host.grouping, known.as_deref(), next)?,
            }
            pass.leave_experts(layer)?;
            spans::end_half("experts", layer, 1, begun);
        }
        found.map_or(Ok(()), |found| found.finish())?;
        match want {
            Want::None => {}
            Want::Best => self.chosen = pass.choose(None)?,
            Want::Drawn(rule) => self.chosen = pass.choose(Some(rule))?,
            Want::Last | Want::All => pass.head(0..1, &mut self.host.logits, sink)?,
        }
        Ok(())
    }
}

fn ctx<'a, B: Backend, A: Architecture<B>>(
    model: &'a Loaded<B, A>,
    options: &'a RunnerOptions,
    (first_pos, rows): (usize, usize),
) -> Ctx<'a, B, A> {
    let (config, backend, weights) = (&model.config, &*model.backend, &model.weights);
    Ctx { config, backend, weights, options, rows, first_pos, piece: 0 }
}

impl<B: Backend, A: Architecture<B>> ModelRunner for Runner<B, A> {
    fn arch(&self) -> &'static str {
        self.model.config.arch()
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
        self.state.complete()
    }

    fn bytes(&self) -> RunnerBytes {
        let backend = &*self.model.backend;
        let carry = self.carry.allocated_bytes(backend) + self.expert_carry.allocated_bytes(backend);
        let own = A::own_bytes(&self.own, backend) + self.feed.bytes();
        let scratch = self.work.allocated_bytes(backend) + carry + self.host.bytes + own;
        RunnerBytes { kv: self.state.allocated_bytes(backend), scratch }
    }

    fn reset(&mut self) {
        self.state.reset();
        self.feed.forget();
    }

    fn reach(&self, len: usize) -> usize {
        self.state.reach(&self.model.config, len)
    }

    fn rewind(&mut self, kept: &[TokenId]) -> usize {
        self.feed.forget();
        match self.state.rewind(&self.model.config, &*self.model.backend, kept) {
            Ok(true) => kept.len(),
            // A copy that the device refused: whatever is computed next will say so.
            Ok(false) | Err(_) => {
                self.reset();
                0
            }
        }
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
        self.feed.forget();
        let (model, to) = (&self.model, (part, kept, self.options.ctx));
        let loaded = self.state.load_from(to, &model.config, &*model.backend, source);
        if loaded.is_err() {
            self.state.reset();
        }
        loaded
    }

    fn prefetch_rows(&mut self, tokens: &[TokenId]) -> Result<(), ModelError> {
        self.check_tokens(tokens)?;
        let (options, experts) = (&self.options, &*self.experts);
        self.feed.prefetch(Here { model: &*self.model, options, state: &self.state, experts }, tokens)
    }

    /// Where ops run while the host goes on: to wait for one id is shorter than for the logits of a vocabulary.
    fn chooses(&self) -> bool {
        B::IS_QUEUED
    }

    fn chosen(&self) -> Option<TokenId> {
        self.chosen
    }

    fn fetch_logits(&mut self, logits: &mut [f32]) -> Result<(), ModelError> {
        Ok(self.model.backend.download(&self.work.logits, 0, logits)?)
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
        self.chosen = None;
        backend.run(|| self.run_sweeps(tokens, want, sink, probe, progress))
    }
}
