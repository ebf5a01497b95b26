//! The architectures, one folder each, and what a graph asks of its surroundings (`supply`, `weights`, `metadata`).
//! Never imports `storage`: where weights came from is not a model's business. Surprising fact: a session sees every
//! architecture through the one trait here and owns nothing of a model but its tokens.

pub mod blocks;
pub mod deepseek4;
pub mod deepseek41;
pub mod metadata;
pub mod probe;
pub mod state;
pub mod supply;
pub mod weights;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use crate::backend::cpu::draw;
pub use crate::backend::ops::DrawRule;
use crate::backend::{Backend, BackendError};
use crate::units::TokenId;
use blocks::backbone::Backbone;
use blocks::matrices;
use blocks::workspace::LOGIT_ROWS_MAX;
use metadata::{ConfigError, MetaValue, MetadataView};
use probe::Probe;
use state::{StateError, StatePart, StateSink, StateSource};
use supply::{ExpertSupply, RowSupply, SupplyError};
use weights::{WeightSource, WeightsError};

/// Why a model could not be opened or a forward pass failed.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(transparent)]
    Backend(#[from] BackendError),
    #[error(transparent)]
    Supply(#[from] SupplyError),
    #[error("token id {token} is not below the vocabulary of {vocab}; the prompt belongs to another model")]
    Token { token: TokenId, vocab: usize },
    #[error("{len} tokens and {more} more do not fit a context of {ctx}; use a larger --ctx")]
    Context { len: usize, more: usize, ctx: usize },
    #[error("n-gram table of layer {layer}, row {row}: {what}; the model file is damaged, check its hash")]
    RowData { layer: usize, row: u64, what: String },
    #[error("the model needs n-gram rows, but none are supplied")]
    NoRows,
    #[error("rows of the n-gram tables have {found} bytes, expected {expected}; the file does not fit its metadata")]
    RowBytes { found: usize, expected: usize },
    #[error("the supply lends {found} experts at a time, but a token routes {needed}; use a larger cache budget")]
    LeaseTooSmall { found: usize, needed: usize },
    /// The caller's progress hook ended the pass.
    #[error("interrupted")]
    Interrupted,
}

/// For which rows of a forward pass logits are wanted.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Want {
    None,
    /// Of a single token, only the most likely next one ([`ModelRunner::chosen`]): its logits stay where they were computed. For runners that
    /// choose.
    Best,
    /// Likewise one that is drawn.
    Drawn(DrawRule),
    Last,
    All,
}

impl Want {
    /// How many of `rows` that is, counted from the last.
    pub fn rows(self, rows: usize) -> usize {
        match self {
            Self::None => 0,
            Self::Best | Self::Drawn(_) | Self::Last => rows.min(1),
            Self::All => rows,
        }
    }
}

/// Receives `(position, logits of the vocabulary)`, by rising position.
pub type LogitSink<'a> = dyn FnMut(usize, &[f32]) + Send + 'a;

/// Told how many rows' worth of a pass is done, layer by layer; `Break` gives the pass up.
pub type Progress<'a> = dyn FnMut(usize) -> ControlFlow<()> + Send + 'a;

/// One sequence of tokens running through one model. Object safe, so that a session need not know the architecture.
pub trait ModelRunner: Send {
    /// `general.architecture` of the file.
    fn arch(&self) -> &'static str;
    /// Length of a logits row.
    fn vocab(&self) -> usize;
    /// Most tokens that the state can hold.
    fn ctx(&self) -> usize;
    /// Most rows that are computed together.
    fn chunk(&self) -> usize;
    /// Most rows that go through one layer before the next one begins, at least a chunk; what completes or fails as a whole.
    fn sweep(&self) -> usize;
    /// Tokens in the state.
    fn len(&self) -> usize;
    /// Whether the state holds no token.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Memory that the buffers of this runner really take.
    fn bytes(&self) -> RunnerBytes;
    /// Forgets all tokens.
    fn reset(&mut self);
    /// The longest part of the first `len` tokens that `rewind` goes back to without computing anything; 0 where that is none.
    ///
    /// The last [`state::ROLLBACK_ROWS`] tokens of a `forward` are always within reach, so that of a batch only the first rows need be kept.
    fn reach(&self, len: usize) -> usize;
    /// Goes back to `kept`, the first tokens of the state. Returns how many of them the state still holds: all, if that is within reach,
    /// or none.
    fn rewind(&mut self, kept: &[TokenId]) -> usize;
    /// Writes a part of the state to `sink`, with values as they are.
    ///
    /// # Errors
    /// What the sink or the device says. The state is as before.
    fn save_state(&mut self, part: StatePart, sink: &mut dyn StateSink) -> Result<(), StateError>;
    /// Takes a saved part back. `kept` are the tokens that the state holds afterwards: all that it had when it was saved, or fewer, as far back
    /// as was within reach then. For a frontier the state must still hold `kept`, as when it was saved.
    ///
    /// # Errors
    /// A part of another shape, or one that cannot be read. The state is empty then.
    fn load_state(&mut self, part: StatePart, kept: &[TokenId], source: &mut dyn StateSource)
    -> Result<(), StateError>;

    /// Starts reading what `tokens` will need if they are the next ones. Costs nothing if the model has no tables.
    fn prefetch_rows(&mut self, tokens: &[TokenId]) -> Result<(), ModelError>;

    /// Whether passes of one token may want [`Want::Best`] and [`Want::Drawn`].
    fn chooses(&self) -> bool {
        false
    }
    /// The token that the last pass chose, if that was wanted: the most likely one, the lowest id among equals, or the one drawn; `None` where
    /// nothing can be chosen from the logits.
    fn chosen(&self) -> Option<TokenId> {
        None
    }
    /// Logits that the last pass left where they were computed, into `[vocab]`. Nothing was done with this runner since.
    ///
    /// # Errors
    /// What the device says.
    fn fetch_logits(&mut self, logits: &mut [f32]) -> Result<(), ModelError> {
        let _ = logits;
        Ok(())
    }

    /// Appends `tokens`. After an error the state holds the tokens of the sweeps that were completed (see `len`); the
    /// failing sweep left no trace, and the next call works.
    fn forward(
        &mut self,
        tokens: &[TokenId],
        want: Want,
        sink: &mut LogitSink<'_>,
        probe: Option<&mut dyn Probe>,
    ) -> Result<(), ModelError> {
        self.forward_watched(tokens, want, sink, probe, &mut |_| ControlFlow::Continue(()))
    }

    /// As `forward`, with a hook that is told how far the pass is and may end it (`ModelError::Interrupted`).
    fn forward_watched(
        &mut self,
        tokens: &[TokenId],
        want: Want,
        sink: &mut LogitSink<'_>,
        probe: Option<&mut dyn Probe>,
        progress: &mut Progress<'_>,
    ) -> Result<(), ModelError>;

    /// Whether the model has all `tokens`.
    ///
    /// # Errors
    /// The first that is beyond the vocabulary.
    fn check_tokens(&self, tokens: &[TokenId]) -> Result<(), ModelError> {
        let vocab = self.vocab();
        match tokens.iter().find(|t| **t as usize >= vocab) {
            Some(token) => Err(ModelError::Token { token: *token, vocab }),
            None => Ok(()),
        }
    }

    /// Whether `more` tokens fit behind those that are there.
    ///
    /// # Errors
    /// They do not.
    fn check_room(&self, more: usize) -> Result<(), ModelError> {
        let (len, ctx) = (self.len(), self.ctx());
        if more > ctx - len { Err(ModelError::Context { len, more, ctx }) } else { Ok(()) }
    }
}

/// Settings of a runner.
#[derive(Clone, Copy, Debug)]
pub struct RunnerOptions {
    /// Most tokens of the sequence.
    pub ctx: usize,
    /// Most rows that are computed together.
    pub chunk: usize,
    /// Most rows that go through one layer before the next one begins; less than a chunk counts as one.
    pub sweep: usize,
    /// Leave rows out of the layers behind the last compressed rows where nothing can see them. Never changes a bit.
    pub decoder_suffix: bool,
    /// Diagnostic: leave the rounding of cached rows out.
    pub kv_exact: bool,
}

impl RunnerOptions {
    /// Sweeps of one chunk.
    pub fn new(ctx: usize, chunk: usize) -> Self {
        Self { ctx, chunk, sweep: chunk, decoder_suffix: true, kv_exact: false }
    }

    /// Rows of the widest sweep.
    pub fn sweep_rows(&self) -> usize {
        self.sweep.min(self.ctx).max(self.chunk)
    }
}

/// What the passes of several rows computed and left out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize)]
pub struct SweepCounts {
    /// Sweeps of more than one row.
    pub sweeps: u64,
    /// Their rows.
    pub rows: u64,
    /// Rows times layers.
    pub layer_rows: u64,
    /// Those of them whose outputs nothing could see, so that they were not computed.
    pub layer_rows_skipped: u64,
}

/// Where a model counts its sweeps.
#[derive(Default)]
pub struct PassCounters {
    sweeps: AtomicU64,
    rows: AtomicU64,
    layer_rows: AtomicU64,
    skipped: AtomicU64,
}

impl PassCounters {
    /// A sweep of `rows` through `layers`, of which `skipped` rows times layers are left out.
    pub fn count(&self, rows: usize, layers: usize, skipped: u64) {
        // Relaxed: the numbers order nothing.
        self.sweeps.fetch_add(1, Ordering::Relaxed);
        self.rows.fetch_add(rows as u64, Ordering::Relaxed);
        self.layer_rows.fetch_add((rows * layers) as u64, Ordering::Relaxed);
        self.skipped.fetch_add(skipped, Ordering::Relaxed);
    }

    /// The numbers now.
    pub fn snapshot(&self) -> SweepCounts {
        SweepCounts {
            sweeps: self.sweeps.load(Ordering::Relaxed),
            rows: self.rows.load(Ordering::Relaxed),
            layer_rows: self.layer_rows.load(Ordering::Relaxed),
            layer_rows_skipped: self.skipped.load(Ordering::Relaxed),
        }
    }
}

/// Memory of one runner, for the planner. Allocations equal it exactly.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RunnerBytes {
    /// State that lives as long as the sequence.
    pub kv: u64,
    /// Work memory of a forward pass.
    pub scratch: u64,
}

/// A matrix product of a pass, for the planner of a device's memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Product {
    /// Name of the matrix in the file.
    pub tensor: String,
    /// Most rows that go through at once.
    pub rows: usize,
    /// Slices of a row that each run through their own part of the outputs; 1 for a plain product.
    pub groups: usize,
    /// Columns of the matrix.
    pub cols: usize,
    /// Outputs of one row.
    pub outputs: usize,
}

/// What a file of some architecture needs, before anything of it is loaded.
pub trait ModelConfig: Send + Sync {
    /// `general.architecture` of the file.
    fn arch(&self) -> &'static str;
    /// Sizes and constants that every architecture has.
    fn backbone(&self) -> &Backbone;
    /// Layers, all with routed experts.
    fn layer_count(&self) -> usize;

    /// Length that the model was trained for.
    fn positions_max(&self) -> usize {
        self.backbone().positions_max
    }

    /// Layers with routed experts, experts of each, experts a token uses.
    fn expert_shape(&self) -> (usize, usize, usize) {
        (self.layer_count(), self.backbone().experts, self.backbone().experts_per_token)
    }

    /// Rows of all n-gram tables that one token asks for; 0 without tables.
    fn rows_per_token(&self) -> usize {
        0
    }

    /// Memory of a runner.
    fn runner_bytes(&self, options: &RunnerOptions) -> RunnerBytes;
    /// Memory of a frontier ([`StatePart::Frontier`]) on the host, at most.
    fn frontier_bytes(&self) -> u64;
    /// The matrix products of a pass under `options`: those of `matrix_inputs` and the routers.
    fn products(&self, options: &RunnerOptions) -> Vec<Product> {
        let rows = (options.chunk, options.chunk.min(LOGIT_ROWS_MAX));
        matrices::products(&self.tensor_specs(), self.matrix_inputs(), self.layer_count(), rows)
    }

    /// All tensors that the file must have.
    fn tensor_specs(&self) -> Vec<weights::TensorSpec>;
    /// What every matrix but the embedding is multiplied with.
    fn matrix_inputs(&self) -> Vec<probe::MatrixInput>;
}

/// A model on a device: makes runners that share its weights.
pub trait Model<B: Backend>: Send + Sync {
    /// A sequence of its own. `rows` is needed if the model has n-gram tables.
    fn runner(
        self: Arc<Self>,
        options: RunnerOptions,
        experts: Arc<dyn ExpertSupply<B>>,
        rows: Option<Arc<dyn RowSupply>>,
    ) -> Result<Box<dyn ModelRunner>, ModelError>;

    /// What the sweeps of all its runners did.
    fn sweep_counts(&self) -> SweepCounts;
}

/// Architectures that this build runs.
pub const ARCHITECTURES: &[&str] = &[deepseek41::ARCH, deepseek4::ARCH];

/// `general.architecture`, if this build runs it.
fn architecture(view: &dyn MetadataView) -> Result<&'static str, ConfigError> {
    const KEY: &str = "general.architecture";
    match view.get(KEY) {
        Some(MetaValue::Text(arch)) => ARCHITECTURES
            .iter()
            .copied()
            .find(|known| *known == arch)
            .ok_or_else(|| ConfigError::Architecture { arch: arch.into(), supported: ARCHITECTURES.join(", ") }),
        _ => Err(ConfigError::Missing { key: KEY.into() }),
    }
}

/// Reads the configuration of a file of any supported architecture.
pub fn config(view: &dyn MetadataView) -> Result<Box<dyn ModelConfig>, ConfigError> {
    match architecture(view)? {
        deepseek41::ARCH => Ok(Box::new(deepseek41::Config::from_metadata(view)?)),
        deepseek4::ARCH => Ok(Box::new(deepseek4::Config::from_metadata(view)?)),
        other => unreachable!("{other} is listed but has no reader"),
    }
}

/// Loads the resident weights of a file of any supported architecture.
pub fn load<B: Backend>(
    view: &dyn MetadataView,
    backend: Arc<B>,
    source: &dyn WeightSource,
) -> Result<Arc<dyn Model<B>>, ModelError> {
    match architecture(view)? {
        deepseek41::ARCH => Ok(Arc::new(deepseek41::DeepSeek41::load(view, backend, source)?)),
        deepseek4::ARCH => Ok(Arc::new(deepseek4::DeepSeek4::load(view, backend, source)?)),
        other => unreachable!("{other} is listed but has no loader"),
    }
}
