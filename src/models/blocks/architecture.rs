//! What an architecture is to the parts that all share: its types, and the steps of a pass that are its own.
//! Never has a step that is the same everywhere: those are in `pass`, `attention`, `indexer`, `head`, `sweep_rows` and `runner`. Surprising
//! fact: an architecture is a type without a value. What it knows of one model is in its configuration and weights.

use std::ops::{Deref, Range};
use std::sync::Arc;

use super::backbone::Backbone;
use super::hyper_connections::HcWeights;
use super::layer_tensors::{Halves, Trunk};
use super::moe::MoeRules;
use super::pass::{Ctx, Pass};
use super::runner::Loaded;
use super::suffix::{Piece, Suffix};
use super::sweep::Rows;
use crate::backend::{Backend, BackendError};
use crate::models::metadata::{ConfigError, MetadataView};
use crate::models::state::{StateError, StatePart, StateSink, StateSource};
use crate::models::supply::{ExpertSupply, RowSupply};
use crate::models::weights::{WeightSource, WeightsError};
use crate::models::{ModelConfig, ModelError, RunnerOptions};
use crate::units::TokenId;

/// Hyperparameters as the shared parts ask for them.
pub trait GraphConfig: ModelConfig + Deref<Target = Backbone> + Sized + 'static {
    /// Whether the tokens of `layer` attend compressed rows, so that its positions are those of YaRN.
    fn is_compressed(&self, layer: usize) -> bool;
    /// Which layers make compressed rows.
    fn makes_rows(&self) -> Vec<bool>;
    /// Constants of the expert half of `layer`.
    fn moe_rules(&self, layer: usize) -> MoeRules;
    /// Most rows that an indexer scores for a token at a context of `ctx` tokens.
    fn scored_max(&self, ctx: usize) -> usize;
    /// Most compressed rows that a token attends in any layer at a context of `ctx` tokens.
    fn selected_max(&self, ctx: usize) -> usize;
}

/// Where the rows of a sweep wait for each other, so that what a later step reads of an earlier one has to travel with them.
#[derive(Clone, Copy)]
pub enum Wait {
    /// Between the halves of the layers: the residual streams.
    Streams,
    /// Between the choice of experts and their sum: how the output joins the streams.
    Mix,
    /// Between the attention of this layer and that of other layers.
    Attention(usize),
}

/// All resident tensors of a model.
pub type Weights<B, A> = Trunk<B, <A as Architecture<B>>::Layer, <A as Architecture<B>>::More>;

/// An architecture on a device.
pub trait Architecture<B: Backend>: Sized + 'static {
    /// Hyperparameters.
    type Config: GraphConfig;
    /// Resident tensors of one layer.
    type Layer: Deref<Target = Halves<B>> + Send + Sync;
    /// Resident tensors outside of layers that no other architecture has.
    type More: Send + Sync;
    /// State of one sequence.
    type State: SequenceState<B, Self::Config> + SavedState<B, Self::Config>;
    /// Buffers of a pass and of the rows of a sweep that no other architecture has.
    type Own: Send;
    /// What follows from token ids alone.
    type Feed: Feed<B, Self>;

    /// Reads and checks the metadata of a file.
    fn config(view: &dyn MetadataView) -> Result<Self::Config, ConfigError>;
    /// Checks all tensors of a file, then loads the resident ones.
    fn weights(c: &Self::Config, backend: &B, source: &dyn WeightSource) -> Result<Weights<B, Self>, WeightsError>;
    /// Allocates the buffers.
    fn own(c: &Self::Config, options: &RunnerOptions, backend: &B) -> Result<Self::Own, BackendError>;
    /// Bytes that the buffers really take.
    fn own_bytes(own: &Self::Own, backend: &B) -> u64;

    /// What else than the streams there is before the first layer.
    fn start(pass: &mut Pass<'_, B, Self>) -> Result<(), BackendError> {
        let _ = pass;
        Ok(())
    }

    /// `x`: the normalised input of a sublayer from the streams, and how its output will join them.
    fn enter(pass: &mut Pass<'_, B, Self>, hc: &HcWeights<B>, norm: &B::Buf) -> Result<(), BackendError>;
    /// `y = attention(x)`.
    fn attention(pass: &mut Pass<'_, B, Self>, layer: usize) -> Result<(), BackendError>;
    /// The output `y` of a sublayer joins the streams.
    fn expand(pass: &mut Pass<'_, B, Self>) -> Result<(), BackendError>;

    /// The part of the attention sublayer that later tokens depend on, for rows whose own outputs nobody needs: compressed rows, index
    /// keys, and window rows where `has_window`.
    fn remember(pass: &mut Pass<'_, B, Self>, layer: usize, has_window: bool) -> Result<(), BackendError>;

    /// The experts of `tokens` (`[rows, k]`) where they follow from the ids.
    fn known_experts(weights: &Self::Layer, tokens: &[TokenId]) -> Option<Vec<i32>> {
        let _ = (weights, tokens);
        None
    }

    /// Shows what the layer leaves besides the streams to a probe that wants it.
    fn show_end(pass: &mut Pass<'_, B, Self>, layer: usize) -> Result<(), BackendError> {
        let _ = (pass, layer);
        Ok(())
    }

    /// `collapsed` of the first rows of `head_streams`, which are the streams of `rows` of the chunk.
    fn collapse_head(pass: &mut Pass<'_, B, Self>, rows: Range<usize>) -> Result<(), BackendError>;

    /// A piece of a sweep waits: what it needs afterwards besides the shared buffers leaves those of the pass.
    fn leave(pass: &mut Pass<'_, B, Self>, rows: &Rows<'_, B>, wait: Wait) -> Result<(), BackendError> {
        let _ = (pass, rows, wait);
        Ok(())
    }

    /// A piece of a sweep goes on: undoes [`Architecture::leave`].
    fn resume(pass: &mut Pass<'_, B, Self>, rows: &Rows<'_, B>, wait: Wait) -> Result<(), BackendError> {
        let _ = (pass, rows, wait);
        Ok(())
    }

    /// All `pieces` of a layer of a sweep have been attended.
    fn settle(
        ctx: &Ctx<'_, B, Self>,
        state: &mut Self::State,
        layer: usize,
        pieces: usize,
    ) -> Result<(), BackendError> {
        let _ = (ctx, state, layer, pieces);
        Ok(())
    }
}

/// State of one sequence as a runner moves it on.
pub trait SequenceState<B: Backend, C>: Sized + Send {
    /// An empty state.
    fn new(c: &C, options: &RunnerOptions, backend: &B) -> Result<Self, BackendError>;
    /// Tokens that went through all layers.
    fn complete(&self) -> usize;
    /// Forgets all tokens. Buffers keep their bytes: nothing behind the end is ever read.
    fn reset(&mut self);
    /// A sweep of `rows` rows is going to write, whether it ends well or not: keeps a copy of what it may overwrite.
    fn begin(&mut self, c: &C, backend: &B, rows: usize) -> Result<(), BackendError>;
    /// Accepts the sweep of `tokens`, which went through all layers; its last `reach` rows can be taken back.
    fn commit(&mut self, c: &C, tokens: &[TokenId], reach: usize);
    /// Undoes a sweep of `rows` rows that failed.
    fn restore(&mut self, c: &C, backend: &B, rows: usize) -> Result<(), BackendError>;
    /// Bytes that the buffers really take.
    fn allocated_bytes(&self, backend: &B) -> u64;
}

/// State of one sequence as it goes back, leaves and comes back.
pub trait SavedState<B: Backend, C> {
    /// The largest length up to `len` that is within reach; 0 if there is none.
    fn reach(&self, c: &C, len: usize) -> usize;
    /// Goes back to `kept`, the first tokens; says whether that was possible.
    fn rewind(&mut self, c: &C, backend: &B, kept: &[TokenId]) -> Result<bool, BackendError>;
    /// Writes a part of the state to `sink`.
    fn save_to(&self, part: StatePart, c: &C, backend: &B, sink: &mut dyn StateSink) -> Result<(), StateError>;
    /// Takes a saved part back, up to its first tokens `kept`, in a context of `ctx`. After an error the state is of no use.
    fn load_from(
        &mut self,
        to: (StatePart, &[TokenId], usize),
        c: &C,
        backend: &B,
        source: &mut dyn StateSource,
    ) -> Result<(), StateError>;
}

/// Where a sequence stands, for its feed.
pub struct Here<'a, B: Backend, A: Architecture<B>> {
    pub model: &'a Loaded<B, A>,
    pub options: &'a RunnerOptions,
    pub state: &'a A::State,
    pub experts: &'a dyn ExpertSupply<B>,
}

/// What follows from token ids alone, and is fetched ahead of the layers that need it.
pub trait Feed<B: Backend, A: Architecture<B>>: Sized + Send {
    /// Nothing fetched yet; `rows` are the model's n-gram tables, where there are any.
    fn new(c: &A::Config, options: &RunnerOptions, rows: Option<Arc<dyn RowSupply>>) -> Result<Self, ModelError>;
    /// `tokens` are probably the next ones.
    fn prefetch(&mut self, here: Here<'_, B, A>, tokens: &[TokenId]) -> Result<(), ModelError>;
    /// The sequence goes on from elsewhere.
    fn forget(&mut self);
    /// Bytes that it takes on the host.
    fn bytes(&self) -> u64;
    /// A sweep of `tokens` begins, less what `suffix` leaves out.
    fn begin(&mut self, here: Here<'_, B, A>, tokens: &[TokenId], suffix: &Suffix) -> Result<(), ModelError>;

    /// Adds to the streams of a piece what `layer` takes from the feed.
    fn add(&mut self, pass: &mut Pass<'_, B, A>, layer: usize, piece: Piece) -> Result<(), ModelError> {
        let _ = (pass, layer, piece);
        Ok(())
    }

    /// The sweep that began has failed.
    fn abandon(&mut self) {}

    /// The sweep that began is through the layers; `after` are the tokens behind it.
    fn end(&mut self, here: Here<'_, B, A>, after: &[TokenId]) -> Result<(), ModelError> {
        let _ = (here, after);
        Ok(())
    }
}
