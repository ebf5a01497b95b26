//! Experts that are known before their layer: a token's id names them, so their reads begin as soon as the token is chosen.
//! Never guesses; works with `--lookahead off`, since nothing is read that is not used. Surprising fact: these reads are in the class below
//! demand until a request joins them, so they never stand in the way of the layer that is computed now.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use serde::Serialize;

use crate::storage::expert_cache::ExpertCache;
use crate::units::{ExpertIdx, ExpertKey, LayerIdx, Phase};

/// Counters of experts that were known ahead.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct KnownStats {
    /// Tokens whose experts were told.
    pub tokens: u64,
    /// Uses of told experts by single tokens.
    pub uses: u64,
    /// Of them, those neither in memory nor on their way at the request: demand misses.
    pub misses: u64,
}

/// Reads what is known, and counts.
pub struct KnownExperts {
    cache: Arc<ExpertCache>,
    /// Whether someone else begins the cache's tokens.
    has_lookahead: bool,
    /// What the running token was said to use, by rising layer.
    told: Mutex<Vec<ExpertKey>>,
    tokens: AtomicU64,
    uses: AtomicU64,
    misses: AtomicU64,
}

impl KnownExperts {
    /// Over `cache`.
    pub fn new(cache: Arc<ExpertCache>, has_lookahead: bool) -> Self {
        let (tokens, uses, misses) = Default::default();
        Self { cache, has_lookahead, told: Mutex::default(), tokens, uses, misses }
    }

    /// The next token uses `experts`, by rising layer: begins to read what is absent.
    pub fn announce(&self, experts: &[ExpertKey]) {
        let mut told = self.told.lock();
        told.clear();
        told.extend_from_slice(experts);
        if !self.has_lookahead {
            // Reads for a token that never came are of no more use.
            self.cache.cancel_ahead(&|key| !experts.contains(&key));
            self.cache.begin_token(&[]);
        }
        // As many slots stay clear as the widest of these layers needs at once.
        let widest = experts.chunk_by(|a, b| a.layer == b.layer).map(<[_]>::len).max().unwrap_or(0);
        self.cache.read_ahead(experts, experts.len(), widest);
        // Relaxed: the numbers order nothing.
        self.tokens.fetch_add(1, Ordering::Relaxed);
    }

    /// `ids` of `layer` are about to be requested.
    pub fn requested(&self, layer: LayerIdx, ids: &[ExpertIdx], phase: Phase) {
        if phase == Phase::Prefill {
            return;
        }
        let told = self.told.lock();
        let is_told = |id: &&ExpertIdx| told.contains(&ExpertKey { layer, expert: **id });
        let keys: Vec<ExpertKey> = ids.iter().filter(is_told).map(|id| ExpertKey { layer, expert: *id }).collect();
        if !keys.is_empty() {
            let absent = self.cache.absent(&keys) as u64;
            self.uses.fetch_add(keys.len() as u64, Ordering::Relaxed);
            self.misses.fetch_add(absent, Ordering::Relaxed);
        }
    }

    /// The counters now; `None` before anything was told.
    pub fn stats(&self) -> Option<KnownStats> {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let stats = KnownStats { tokens: read(&self.tokens), uses: read(&self.uses), misses: read(&self.misses) };
        (stats.tokens > 0).then_some(stats)
    }
}
