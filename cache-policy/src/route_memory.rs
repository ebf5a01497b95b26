//! Predicts the experts of every layer from the last token ids alone, before any layer has run. Owns a bounded history.
//! Never looks at hidden states. Surprising fact: how much a remembered route is worth is measured, not assumed: each
//! kind of evidence keeps its own score, by layer.

use alloc::vec::Vec;

use crate::ids::{ExpertIdx, ExpertKey, LayerIdx};
use crate::mix::mix;

/// Longest context, in tokens.
const ORDERS: usize = 3;
/// Past occurrences of the last token id that vote.
const VOTES: usize = 4;
const NONE: u64 = u64::MAX;
/// Kinds of evidence: last route after 3 tokens, after 2 tokens (each: no such context, silent, names the expert),
/// and v of n votes of the single token.
const KINDS: usize = 3 * 3 * (VOTES + 1) * (VOTES + 1);
/// Trials after which a kind's score is halved, so that it follows the text.
const TRIALS_MAX: u32 = 4096;
/// Trials of the prior: a kind is taken as useless until it has been seen to work.
const PRIOR_TRIALS: u32 = 8;

/// An expert that the running token will probably use.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Prediction {
    /// Which.
    pub key: ExpertKey,
    /// Measured share of such predictions that came true, 0 to 1.
    pub probability: f32,
}

#[derive(Clone, Copy, Default)]
struct Score {
    hits: u32,
    trials: u32,
}

impl Score {
    fn probability(self) -> f32 {
        self.hits as f32 / (self.trials + PRIOR_TRIALS) as f32
    }

    fn count(&mut self, is_hit: bool) {
        self.trials += 1;
        self.hits += u32::from(is_hit);
        if self.trials >= TRIALS_MAX {
            self.trials /= 2;
            self.hits /= 2;
        }
    }
}

#[derive(Clone, Copy)]
struct Candidate {
    key: ExpertKey,
    kind: u16,
}

/// Routes of the last tokens, found again by the 3, 2 or 1 token ids that led to them.
pub struct RouteMemory {
    layers: usize,
    top_k: usize,
    tokens_max: u64,
    /// Ring: `[tokens_max, layers, top_k]`, `NO_EXPERT` where a route was shorter.
    routes: Vec<u16>,
    /// Ring: the previous token with the same id.
    previous: Vec<u64>,
    /// Direct-mapped, by order: hash of the context and the last token after it.
    index: [Vec<(u64, u64)>; ORDERS],
    /// Tokens stored; also the serial of the running one.
    tokens: u64,
    /// Last token ids, newest first; sessions begin without any.
    ids: [Option<u32>; ORDERS],
    /// Hashes of the running token's contexts, by order.
    contexts: [Option<u64>; ORDERS],
    scores: Vec<Score>,
    candidates: Vec<Candidate>,
    /// Scratch by expert: evidence gathered for the layer at hand.
    evidence: Vec<Evidence>,
    touched: Vec<u16>,
    is_running: bool,
}

const NO_EXPERT: u16 = u16::MAX;

#[derive(Clone, Copy, Default)]
struct Evidence {
    three: bool,
    two: bool,
    votes: u8,
}

impl RouteMemory {
    /// Bytes that [`RouteMemory::new`] takes for the same numbers.
    pub fn bytes(layers: usize, top_k: usize, experts: usize, tokens_max: usize) -> u64 {
        let token = layers * top_k * size_of::<u16>() + size_of::<u64>() + ORDERS * size_of::<(u64, u64)>();
        let layer = KINDS * size_of::<Score>() + top_k * (VOTES + 2) * size_of::<Candidate>();
        let expert = size_of::<Evidence>() + size_of::<u16>();
        (tokens_max.max(1) * token + layers * layer + experts * expert) as u64
    }

    /// A memory of the last `tokens_max` tokens of a model with `layers` routed layers (numbered from 0 here), `top_k`
    /// experts a token and `experts` a layer. Takes `tokens_max x (layers x top_k x 2 + 56)` bytes.
    pub fn new(layers: usize, top_k: usize, experts: u16, tokens_max: usize) -> Self {
        let tokens_max = tokens_max.max(1);
        Self {
            layers,
            top_k,
            tokens_max: tokens_max as u64,
            routes: alloc::vec![NO_EXPERT; tokens_max * layers * top_k],
            previous: alloc::vec![NONE; tokens_max],
            index: core::array::from_fn(|_| alloc::vec![(0, NONE); tokens_max]),
            tokens: 0,
            ids: [None; ORDERS],
            contexts: [None; ORDERS],
            scores: alloc::vec![Score::default(); layers * KINDS],
            candidates: Vec::with_capacity(layers * top_k * (VOTES + 2)),
            evidence: alloc::vec![Evidence::default(); usize::from(experts)],
            touched: Vec::with_capacity(usize::from(experts)),
            is_running: false,
        }
    }

    /// Forgets the last token ids, not the routes: another session begins.
    pub fn begin_session(&mut self) {
        self.ids = [None; ORDERS];
    }

    /// Starts the token `id` and writes what it will probably use to `out` (cleared first), layer by layer.
    pub fn begin_token(&mut self, id: u32, out: &mut Vec<Prediction>) {
        out.clear();
        self.end_token();
        self.ids = [Some(id), self.ids[0], self.ids[1]];
        let mut hash = 0;
        for (order, id) in self.ids.iter().enumerate() {
            hash = mix(hash ^ (id.unwrap_or(0) as u64 + 1));
            self.contexts[order] = id.map(|_| hash);
        }
        self.is_running = true;
        self.gather();
        for c in &self.candidates {
            let probability = self.scores[usize::from(c.key.layer.0) * KINDS + usize::from(c.kind)].probability();
            out.push(Prediction { key: c.key, probability });
        }
        let row = self.row(self.tokens);
        self.routes[row].fill(NO_EXPERT);
    }

    /// Notes a token whose routes nobody will record, such as one of a prompt: it is context for those after it.
    pub fn pass_over(&mut self, id: u32) {
        self.end_token();
        self.ids = [Some(id), self.ids[0], self.ids[1]];
    }

    /// Records the route of the running token in `layer`, and scores the prediction. Layers and experts past the
    /// shape, and experts past `top_k`, are ignored.
    pub fn record(&mut self, layer: LayerIdx, experts: &[ExpertIdx]) {
        let at = usize::from(layer.0);
        if !self.is_running || at >= self.layers {
            return;
        }
        let row = self.row(self.tokens).start + at * self.top_k;
        for (slot, expert) in self.routes[row..row + self.top_k].iter_mut().zip(experts) {
            *slot = expert.0;
        }
        let begin = self.candidates.partition_point(|c| c.key.layer < layer);
        for c in self.candidates[begin..].iter().take_while(|c| c.key.layer == layer) {
            self.scores[at * KINDS + usize::from(c.kind)].count(experts.contains(&c.key.expert));
        }
    }

    /// Files the running token under its contexts.
    fn end_token(&mut self) {
        if !core::mem::take(&mut self.is_running) {
            return;
        }
        let before = self.find(0);
        self.previous[(self.tokens % self.tokens_max) as usize] = before.unwrap_or(NONE);
        for order in 0..ORDERS {
            if let Some(context) = self.contexts[order] {
                self.index[order][(context % self.tokens_max) as usize] = (context, self.tokens);
            }
        }
        self.tokens += 1;
    }

    /// Last token that ended the running context of `order + 1` ids.
    fn find(&self, order: usize) -> Option<u64> {
        let context = self.contexts[order]?;
        let (hash, token) = self.index[order][(context % self.tokens_max) as usize];
        (hash == context).then_some(token).filter(|&t| self.is_kept(t))
    }

    /// The running token overwrites the oldest.
    fn is_kept(&self, token: u64) -> bool {
        token != NONE && self.tokens - token < self.tokens_max
    }

    fn row(&self, token: u64) -> core::ops::Range<usize> {
        let width = self.layers * self.top_k;
        let start = (token % self.tokens_max) as usize * width;
        start..start + width
    }

    /// Collects the evidence of all contexts into `candidates`, by layer.
    fn gather(&mut self) {
        self.candidates.clear();
        let (three, two) = (self.find(2), self.find(1));
        let mut voters = [NONE; VOTES];
        let mut voters_count = 0;
        let mut voter = self.find(0);
        while let Some(token) = voter.filter(|_| voters_count < VOTES) {
            voters[voters_count] = token;
            voters_count += 1;
            let before = self.previous[(token % self.tokens_max) as usize];
            voter = Some(before).filter(|&b| b < token && self.is_kept(b));
        }
        for layer in 0..self.layers {
            self.collect(layer, three, |e| e.three = true);
            self.collect(layer, two, |e| e.two = true);
            for &voter in &voters[..voters_count] {
                self.collect(layer, Some(voter), |e| e.votes += 1);
            }
            let state = |context: Option<u64>, names: bool| match context {
                None => 0,
                Some(_) => 1 + usize::from(names),
            };
            for expert in self.touched.drain(..) {
                let e = core::mem::take(&mut self.evidence[usize::from(expert)]);
                let contexts = state(three, e.three) * 3 + state(two, e.two);
                let kind = (contexts * (VOTES + 1) + voters_count) * (VOTES + 1) + usize::from(e.votes);
                self.candidates.push(Candidate { key: ExpertKey::new(layer as u16, expert), kind: kind as u16 });
            }
        }
    }

    /// Notes the evidence of one past token for the experts of `layer`.
    fn collect(&mut self, layer: usize, token: Option<u64>, note: impl Fn(&mut Evidence)) {
        let Some(token) = token else { return };
        let row = self.row(token).start + layer * self.top_k;
        for &expert in &self.routes[row..row + self.top_k] {
            let Some(evidence) = self.evidence.get_mut(usize::from(expert)) else { continue };
            if !evidence.three && !evidence.two && evidence.votes == 0 {
                self.touched.push(expert);
            }
            note(evidence);
        }
    }
}
