//! Decides which experts to read ahead of their request, from two predictors: the route memory (what the last tokens with these ids
//! used) and the router's guess (what the next layer's router makes of the hidden state now). Owns predictors, gates and their scores.
//! Never touches bytes and never changes a result: a wrong guess costs a read. Surprising fact: each layer and each rank of a guess
//! has to prove itself, so a predictor that does not fit the text falls silent by itself.

use std::collections::VecDeque;
use std::sync::Arc;

use cache_policy::RouteMemory;
use cache_policy::prefetch::PrefetchScore;
use cache_policy::route_memory::Prediction;
use parking_lot::Mutex;
use serde::Serialize;

use crate::engine::options::LookaheadMode;
use crate::storage::expert_cache::{ExpertCache, LookaheadCounts};
use crate::units::{ExpertIdx, ExpertKey, LayerIdx, Phase, TokenId};

/// Tokens that the route memory holds: 9 MiB for V4.1 Flash.
const MEMORY_TOKENS: usize = 16_384;
/// Least probability at which a cached expert is kept for the token (docs/CACHE_TUNING.md, "Reading ahead").
const KEEP_FROM: f32 = 0.2;
/// Least probability at which an absent expert is read; there too.
const READ_FROM: f32 = 0.4;
/// Reads ahead under way at a time, in routes of one layer: enough to keep a drive busy through a layer that hits, few enough that a
/// request waits for no more than their pieces under way.
const OPEN_ROUTES: usize = 2;
/// Ranks of the router's guess that are looked at.
const GUESS_MAX: usize = 4;
/// Tokens between two looks at a layer's score.
const WINDOW_TOKENS: u64 = 32;
/// Settled reads of a window below which it says nothing.
const SETTLED_MIN: u64 = 6;
/// A layer whose reads ahead are used less often than this is muted.
const PRECISION_MIN: f64 = 0.4;
/// First and longest time that a layer stays muted.
const MUTED_TOKENS: (u64, u64) = (128, 4096);

/// Bytes that the predictors of a model take, for the planner.
pub fn memory_bytes(mode: LookaheadMode, (layers, experts, top_k): (usize, usize, usize)) -> u64 {
    let memory = if mode.uses_memory() { RouteMemory::bytes(layers, top_k, experts, MEMORY_TOKENS) } else { 0 };
    memory + (layers * experts * 2) as u64
}

/// How often something came true, lately.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Share {
    hits: u32,
    trials: u32,
}

impl Share {
    pub(super) fn count(&mut self, is_hit: bool) {
        self.hits += u32::from(is_hit);
        self.trials += 1;
        if self.trials >= 512 {
            self.hits /= 2;
            self.trials /= 2;
        }
    }

    /// Nothing is known to fail before it was tried a few times.
    pub(super) fn may_work(&self) -> bool {
        self.trials < 16 || f64::from(self.hits) >= PRECISION_MIN * f64::from(self.trials)
    }
}

/// Whether a layer may read ahead.
#[derive(Clone, Copy, Default)]
struct Gate {
    looked_at: u64,
    seen: PrefetchScore,
    muted_until: u64,
    /// How long it was muted last.
    muted_tokens: u64,
}

impl Gate {
    fn is_open(&self, token: u64) -> bool {
        token >= self.muted_until
    }

    /// Looks at the score since the last look, once a window. Returns whether the layer was muted by it.
    fn look(&mut self, token: u64, score: PrefetchScore) -> bool {
        if token < self.looked_at + WINDOW_TOKENS || !self.is_open(token) {
            return false;
        }
        self.looked_at = token;
        let used = score.useful + score.late - self.seen.useful - self.seen.late;
        let settled = used + score.wasted - self.seen.wasted;
        if settled < SETTLED_MIN {
            return false;
        }
        self.seen = score;
        if used as f64 >= PRECISION_MIN * settled as f64 {
            self.muted_tokens = 0;
            return false;
        }
        self.muted_tokens = (2 * self.muted_tokens).clamp(MUTED_TOKENS.0, MUTED_TOKENS.1);
        self.muted_until = token + self.muted_tokens;
        true
    }
}

/// Recall of one predictor: uses that it had named, of all uses in steps for which it could speak.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Recall {
    /// Uses in steps of one token.
    pub uses: u64,
    /// Those that were named before.
    pub named: u64,
    /// Experts named.
    pub guesses: u64,
}

/// Counters of one layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct LayerLookahead {
    pub layer: u16,
    #[serde(flatten)]
    pub counts: LookaheadCounts,
    /// Times that the layer was muted because its reads ahead went unused.
    pub muted: u64,
}

/// What the lookahead did, for the report.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct LookaheadStats {
    /// "off", "memory", "router" or "both".
    pub mode: &'static str,
    pub total: LookaheadCounts,
    pub memory: Recall,
    pub router: Recall,
    pub layers: Vec<LayerLookahead>,
}

#[derive(Default)]
struct LayerState {
    gate: Gate,
    muted: u64,
    ranks: [Share; GUESS_MAX],
    /// What the router's guess named for the running token.
    guess: Vec<ExpertIdx>,
}

struct State {
    memory: Option<RouteMemory>,
    /// Session and length of the sequence for which the running token was announced.
    announced: Option<(u32, usize, TokenId)>,
    /// Where the memory's context ends: session and next position.
    context: Option<(u32, usize)>,
    tokens: u64,
    predictions: Vec<Prediction>,
    keep: Vec<ExpertKey>,
    /// To be read ahead, nearest layer first.
    queue: VecDeque<ExpertKey>,
    batch: Vec<ExpertKey>,
    layers: Vec<LayerState>,
    recall: [Recall; 2],
}

const MEMORY: usize = 0;
const ROUTER: usize = 1;

/// The predictors of one engine. Lock order: this, then cache, then reader.
pub struct Lookahead {
    mode: LookaheadMode,
    cache: Arc<ExpertCache>,
    /// Routed layers, rising.
    layers: Vec<LayerIdx>,
    top_k: usize,
    state: Mutex<State>,
}

impl Lookahead {
    /// Predictors over `cache` for a model with these routed layers, `experts` each and `top_k` a token.
    pub fn new(
        mode: LookaheadMode,
        cache: Arc<ExpertCache>,
        layers: Vec<LayerIdx>,
        (experts, top_k): (usize, usize),
    ) -> Self {
        let memory = mode
            .uses_memory()
            .then(|| RouteMemory::new(layers.len(), top_k, u16::try_from(experts).unwrap_or(u16::MAX), MEMORY_TOKENS));
        let state = State {
            memory,
            announced: None,
            context: None,
            tokens: 0,
            predictions: Vec::new(),
            keep: Vec::new(),
            queue: VecDeque::new(),
            batch: Vec::new(),
            layers: layers.iter().map(|_| LayerState::default()).collect(),
            recall: [Recall::default(); 2],
        };
        Self { mode, cache, layers, top_k, state: Mutex::new(state) }
    }

    /// Experts of the next layer that the router should name; 0 when its guess is not wanted.
    pub fn guesses_wanted(&self) -> usize {
        if self.mode.uses_router() { GUESS_MAX.min(self.top_k) } else { 0 }
    }

    /// Token `id` will be computed next in `session`, whose sequence has `len` tokens. May be told twice.
    pub fn begin_token(&self, session: u32, len: usize, id: TokenId) {
        let state = &mut *self.state.lock();
        if state.announced == Some((session, len, id)) {
            return;
        }
        state.announced = Some((session, len, id));
        state.tokens += 1;
        state.queue.clear();
        // Whatever the token before has not begun to read was for layers that are over.
        self.cache.cancel_ahead(&|_| true);
        state.predictions.clear();
        state.keep.clear();
        for layer in &mut state.layers {
            layer.guess.clear();
        }
        if let Some(memory) = &mut state.memory {
            if state.context != Some((session, len)) {
                memory.begin_session();
            }
            memory.begin_token(id, &mut state.predictions);
        }
        state.context = Some((session, len + 1));
        for p in &mut state.predictions {
            // The memory numbers routed layers from 0.
            p.key.layer = self.layers[usize::from(p.key.layer.0)];
            if p.probability >= KEEP_FROM {
                state.keep.push(p.key);
            }
        }
        self.cache.begin_token(&state.keep);
        let token = state.tokens;
        for (at, layer) in self.layers.iter().enumerate() {
            let score = self.cache.lookahead_score(*layer);
            let of_layer = &mut state.layers[at];
            of_layer.muted += u64::from(of_layer.gate.look(token, score));
        }
        for p in state.predictions.iter().filter(|p| p.probability >= READ_FROM) {
            if state.layers[self.row(p.key.layer).unwrap_or(0)].gate.is_open(token) {
                state.queue.push_back(p.key);
            }
        }
        self.advance(state);
    }

    /// A prompt was computed: `tokens` from position `first` on. Its last ids are context for the next token.
    pub fn pass_over(&self, session: u32, first: usize, tokens: &[TokenId]) {
        let state = &mut *self.state.lock();
        state.queue.clear();
        state.announced = None;
        let Some(memory) = &mut state.memory else { return };
        if state.context != Some((session, first)) {
            memory.begin_session();
        }
        // Two ids and the next one make the longest context.
        for &id in &tokens[tokens.len().saturating_sub(2)..] {
            memory.pass_over(id);
        }
        state.context = Some((session, first + tokens.len()));
    }

    /// `ids` of `layer` were requested. What was meant for this layer or an earlier one is stale.
    pub fn requested(&self, layer: LayerIdx, ids: &[ExpertIdx], phase: Phase) {
        let state = &mut *self.state.lock();
        let Some(row) = self.row(layer) else { return };
        if phase == Phase::Prefill {
            if !state.queue.is_empty() {
                state.queue.clear();
                self.cache.cancel_ahead(&|_| true);
            }
            return;
        }
        if state.memory.is_some() && state.announced.is_some() {
            let begin = state.predictions.partition_point(|p| p.key.layer < layer);
            let named = state.predictions[begin..].iter().take_while(|p| p.key.layer == layer);
            let named = named.filter(|p| p.probability >= READ_FROM);
            let (mut guesses, mut right) = (0, 0);
            for p in named {
                guesses += 1;
                right += u64::from(ids.contains(&p.key.expert));
            }
            state.recall[MEMORY].count(ids.len(), guesses, right);
        }
        if let Some(memory) = &mut state.memory {
            memory.record(LayerIdx(row as u16), ids);
        }
        let of_layer = &mut state.layers[row];
        if !of_layer.guess.is_empty() {
            let mut right = 0;
            for (expert, share) in of_layer.guess.iter().zip(&mut of_layer.ranks) {
                let is_right = ids.contains(expert);
                share.count(is_right);
                right += u64::from(is_right);
            }
            state.recall[ROUTER].count(ids.len(), of_layer.guess.len() as u64, right);
            of_layer.guess.clear();
        }
        let before = state.queue.len();
        state.queue.retain(|key| key.layer > layer);
        if state.queue.len() < before || self.mode.uses_router() {
            self.cache.cancel_ahead(&|key| key.layer <= layer);
        }
        self.advance(state);
    }

    /// The router's guess for `layer`, best first, made while the layer before it is computed.
    pub fn guessed(&self, layer: LayerIdx, ids: &[ExpertIdx]) {
        let state = &mut *self.state.lock();
        let Some(row) = self.row(layer) else { return };
        let (is_open, of_layer) = (state.layers[row].gate.is_open(state.tokens), &mut state.layers[row]);
        of_layer.guess.clear();
        of_layer.guess.extend_from_slice(&ids[..ids.len().min(GUESS_MAX)]);
        if is_open {
            // The nearest layer's reads go before those of the memory, which has spoken for later ones.
            for (expert, share) in of_layer.guess.iter().zip(&of_layer.ranks).rev() {
                let key = ExpertKey { layer, expert: *expert };
                if share.may_work() && !state.queue.contains(&key) {
                    state.queue.push_front(key);
                }
            }
        }
        self.advance(state);
    }

    /// Begins as many of the queued reads as may be under way.
    fn advance(&self, state: &mut State) {
        if state.queue.is_empty() {
            return;
        }
        let open_max = OPEN_ROUTES * self.top_k;
        state.batch.clear();
        // What is present costs no read, so more than the free places are looked at.
        state.batch.extend(state.queue.iter().take(4 * open_max));
        let taken = self.cache.read_ahead(&state.batch, open_max, 2 * self.top_k);
        state.queue.drain(..taken);
    }

    fn row(&self, layer: LayerIdx) -> Option<usize> {
        self.layers.binary_search(&layer).ok()
    }

    /// The counters now.
    pub fn stats(&self) -> LookaheadStats {
        let state = self.state.lock();
        let layers = self.layers.iter().zip(&state.layers);
        let layers = layers
            .map(|(layer, state)| LayerLookahead {
                layer: layer.0,
                counts: self.cache.lookahead_score(*layer).into(),
                muted: state.muted,
            })
            .collect();
        LookaheadStats {
            mode: self.mode.name(),
            total: self.cache.stats().lookahead,
            memory: state.recall[MEMORY],
            router: state.recall[ROUTER],
            layers,
        }
    }
}

impl Recall {
    fn count(&mut self, uses: usize, guesses: u64, right: u64) {
        self.uses += uses as u64;
        self.guesses += guesses;
        self.named += right;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn score(useful: u64, wasted: u64) -> PrefetchScore {
        PrefetchScore { issued: useful + wasted, useful, late: 0, wasted }
    }

    #[test]
    fn a_layer_that_wastes_its_reads_is_muted_for_longer_and_longer() {
        let mut gate = Gate::default();
        assert!(!gate.look(31, score(0, 50)), "the window is not over");
        assert!(gate.look(32, score(0, 50)));
        assert!(!gate.is_open(32 + 127) && gate.is_open(32 + 128));
        assert!(!gate.look(200, score(1, 54)), "five settled reads say nothing");
        assert!(gate.look(240, score(1, 60)));
        assert_eq!(gate.muted_until, 240 + 256);
        assert!(!gate.look(600, score(9, 60)), "eight of eight were used");
        assert!(gate.look(700, score(9, 80)));
        assert_eq!(gate.muted_until, 700 + 128, "a good window forgives");
    }

    #[test]
    fn a_rank_is_tried_before_it_is_judged() {
        let mut share = Share::default();
        for _ in 0..15 {
            share.count(false);
            assert!(share.may_work());
        }
        share.count(false);
        assert!(!share.may_work());
        (0..60).for_each(|_| share.count(true));
        assert!(share.may_work());
    }
}
