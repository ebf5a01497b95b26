//! What reading ahead was good for: each prefetched expert is useful, late or wasted, counted by layer.
//! Owns the open prefetches. Never decides to prefetch.
//! Surprising fact: late is not lost; the demand joins a read that is under way and waits for its rest only.

use alloc::vec::Vec;

use crate::ids::{ExpertKey, LayerIdx};
use crate::key_table::KeyTable;

/// What became of the prefetches of a layer. `issued` is the sum of the others and of those still open.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PrefetchScore {
    /// Reads begun ahead of demand.
    pub issued: u64,
    /// Used after their bytes had arrived.
    pub useful: u64,
    /// Used before their bytes had arrived.
    pub late: u64,
    /// Left the cache, or were cancelled, unused.
    pub wasted: u64,
}

impl PrefetchScore {
    /// Share of the settled prefetches that were used; `None` before any settled.
    pub fn precision(&self) -> Option<f64> {
        let used = self.useful + self.late;
        let settled = used + self.wasted;
        (settled > 0).then(|| used as f64 / settled as f64)
    }

    fn add(&mut self, other: &Self) {
        self.issued += other.issued;
        self.useful += other.useful;
        self.late += other.late;
        self.wasted += other.wasted;
    }
}

/// How a demanded expert relates to the prefetches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Foresight {
    /// No open prefetch.
    None,
    /// Its bytes had arrived.
    Useful,
    /// Its read was under way.
    Late,
}

/// Open prefetches and the scores of every layer.
pub struct PrefetchLedger {
    /// Step at which the bytes arrive, plus one; 0 = no open prefetch.
    lands: KeyTable<u64>,
    scores: Vec<PrefetchScore>,
}

impl Default for PrefetchLedger {
    fn default() -> Self {
        Self::new()
    }
}

impl PrefetchLedger {
    /// Nothing issued.
    pub fn new() -> Self {
        Self { lands: KeyTable::new(0), scores: Vec::new() }
    }

    /// A read of `key` begins; its bytes arrive at `step` (any rising count of the owner: layers computed, say). Live
    /// owners that do not know it pass `u64::MAX` and call `landed`.
    pub fn issued(&mut self, key: ExpertKey, step: u64) {
        debug_assert!(self.lands.get(key) == 0, "{key} is prefetched already");
        *self.lands.at(key) = step.saturating_add(1);
        self.score(key.layer).issued += 1;
    }

    /// The bytes of `key` have arrived.
    pub fn landed(&mut self, key: ExpertKey) {
        let lands = self.lands.at(key);
        *lands = (*lands).min(1);
    }

    /// `key` is demanded at `step`; settles its prefetch if one is open.
    pub fn used(&mut self, key: ExpertKey, step: u64) -> Foresight {
        match core::mem::take(self.lands.at(key)) {
            0 => Foresight::None,
            lands if lands - 1 <= step => {
                self.score(key.layer).useful += 1;
                Foresight::Useful
            }
            _ => {
                self.score(key.layer).late += 1;
                Foresight::Late
            }
        }
    }

    /// `key` left the cache or its read was cancelled; settles its prefetch as wasted if one is open.
    pub fn dropped(&mut self, key: ExpertKey) {
        if core::mem::take(self.lands.at(key)) != 0 {
            self.score(key.layer).wasted += 1;
        }
    }

    /// Score of one layer.
    pub fn layer(&self, layer: LayerIdx) -> PrefetchScore {
        self.scores.get(usize::from(layer.0)).copied().unwrap_or_default()
    }

    /// Score of all layers.
    pub fn total(&self) -> PrefetchScore {
        let mut total = PrefetchScore::default();
        self.scores.iter().for_each(|s| total.add(s));
        total
    }

    fn score(&mut self, layer: LayerIdx) -> &mut PrefetchScore {
        let at = usize::from(layer.0);
        if self.scores.len() <= at {
            self.scores.resize(at + 1, PrefetchScore::default());
        }
        &mut self.scores[at]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_prefetch_settles_once() {
        let mut ledger = PrefetchLedger::new();
        let key = |e| ExpertKey::new(2, e);
        for e in 0..5 {
            ledger.issued(key(e), 10);
        }
        assert_eq!(ledger.used(key(0), 9), Foresight::Late);
        assert_eq!(ledger.used(key(1), 10), Foresight::Useful);
        assert_eq!(ledger.used(key(1), 11), Foresight::None, "settled by the first use");
        ledger.dropped(key(2));
        ledger.dropped(key(2));
        ledger.landed(key(3));
        assert_eq!(ledger.used(key(3), 0), Foresight::Useful);
        assert_eq!(ledger.used(key(9), 0), Foresight::None);
        ledger.landed(key(9));
        assert_eq!(ledger.used(key(9), 5), Foresight::None, "a demand read is no prefetch");
        let expected = PrefetchScore { issued: 5, useful: 2, late: 1, wasted: 1 };
        assert_eq!((ledger.layer(LayerIdx(2)), ledger.total()), (expected, expected));
        assert_eq!(ledger.layer(LayerIdx(7)), PrefetchScore::default());
        assert_eq!(expected.precision(), Some(0.75));
        assert_eq!(PrefetchScore::default().precision(), None);
    }
}
