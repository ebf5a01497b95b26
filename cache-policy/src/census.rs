//! What a trace contains, whatever cache replays it: tokens, requests, uses and first uses by phase, uses by expert.
//! Never holds more than a few words an expert. Surprising fact: first uses are the misses that no policy can avoid, so
//! cold misses need no replay.

use alloc::vec::Vec;

use crate::ids::{Bytes, ExpertIdx, LayerIdx, Phase};
use crate::trace::{Event, TraceHeader};

/// Counts of one phase.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PhaseCensus {
    /// Tokens computed.
    pub tokens: u64,
    /// Requests with at least one expert.
    pub requests: u64,
    /// Expert uses.
    pub uses: u64,
    /// Bytes of these uses.
    pub use_bytes: u64,
    /// Uses of experts that no request had named before.
    pub first_uses: u64,
}

/// The contents of a trace, counted event by event.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Census {
    /// Prompt.
    pub prefill: PhaseCensus,
    /// Generation.
    pub decode: PhaseCensus,
    /// Sessions begun.
    pub sessions: u64,
    /// Experts that the recorded run had in its cache before its first request.
    pub preloaded: u64,
    /// By layer index: dense number of expert 0, bytes of an expert.
    layers: Vec<Option<(usize, Bytes)>>,
    /// Uses by dense number.
    uses: Vec<u64>,
    phase: Phase,
    last_layer: Option<LayerIdx>,
    /// Whether the trace names its tokens; without that, steps of decode count.
    has_tokens: bool,
    /// Tokens named since the last route.
    tokens_named: u64,
}

impl Census {
    /// Nothing counted yet. A trace that names no phase is taken for decode.
    pub fn new(header: &TraceHeader) -> Self {
        let (mut layers, mut total) = (Vec::new(), 0);
        for l in &header.layers {
            layers.resize(usize::from(l.layer.0), None);
            layers.push(Some((total, l.expert_bytes)));
            total += usize::from(l.experts);
        }
        Self {
            prefill: PhaseCensus::default(),
            decode: PhaseCensus::default(),
            sessions: 0,
            preloaded: 0,
            layers,
            uses: alloc::vec![0; total],
            phase: Phase::Decode,
            last_layer: None,
            has_tokens: false,
            tokens_named: 0,
        }
    }

    /// Counts one event of a trace with the header that `new` was given.
    pub fn count(&mut self, event: &Event<'_>) {
        match *event {
            Event::Session(_) => self.sessions += 1,
            Event::Phase(phase) => self.phase = phase,
            Event::Token { .. } => {
                if !core::mem::replace(&mut self.has_tokens, true) {
                    (self.prefill.tokens, self.decode.tokens) = (0, 0);
                }
                // A recorder names the tokens of a pass before it says what the pass is for.
                self.tokens_named += 1;
            }
            Event::Route { layer, experts } => self.route(layer, experts),
            Event::Preload(_) => self.preloaded += 1,
            Event::Overlap(_) | Event::Favour { .. } => {}
        }
    }

    fn route(&mut self, layer: LayerIdx, experts: &[ExpertIdx]) {
        let Some((base, bytes)) = self.layers.get(usize::from(layer.0)).copied().flatten() else { return };
        let is_step = self.last_layer.is_none_or(|last| layer <= last) && !self.has_tokens;
        self.last_layer = Some(layer);
        let mut first_uses = 0;
        for expert in experts {
            let uses = &mut self.uses[base + usize::from(expert.0)];
            first_uses += u64::from(*uses == 0);
            *uses += 1;
        }
        let tokens = u64::from(is_step) + core::mem::take(&mut self.tokens_named);
        let now = self.now();
        now.tokens += tokens;
        now.requests += u64::from(!experts.is_empty());
        now.uses += experts.len() as u64;
        now.use_bytes += experts.len() as u64 * bytes.0;
        now.first_uses += first_uses;
    }

    fn now(&mut self) -> &mut PhaseCensus {
        match self.phase {
            Phase::Prefill => &mut self.prefill,
            Phase::Decode => &mut self.decode,
        }
    }

    /// Phase of what comes next.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Counts of `phase`.
    pub fn of(&self, phase: Phase) -> &PhaseCensus {
        match phase {
            Phase::Prefill => &self.prefill,
            Phase::Decode => &self.decode,
        }
    }

    /// Uses of both phases.
    pub fn uses_total(&self) -> u64 {
        self.prefill.uses + self.decode.uses
    }

    /// Whether the trace names its tokens. Without that `tokens` counts steps, and a prompt's waves are such.
    pub fn has_tokens(&self) -> bool {
        self.has_tokens
    }

    /// Uses of every expert: all experts of the first layer, then of the next.
    pub fn expert_uses(&self) -> &[u64] {
        &self.uses
    }

    /// Experts named at least once.
    pub fn experts_used(&self) -> usize {
        self.uses.iter().filter(|&&uses| uses > 0).count()
    }

    /// Dense number of an expert, as in `expert_uses`; `None` for a layer that the trace does not have.
    pub fn number(&self, layer: LayerIdx, expert: ExpertIdx) -> Option<usize> {
        let (base, _) = self.layers.get(usize::from(layer.0)).copied().flatten()?;
        Some(base + usize::from(expert.0))
    }

    /// Bytes of one expert of `layer`; zero for a layer that the trace does not have.
    pub fn expert_bytes(&self, layer: LayerIdx) -> Bytes {
        self.layers.get(usize::from(layer.0)).copied().flatten().map_or(Bytes(0), |l| l.1)
    }
}
