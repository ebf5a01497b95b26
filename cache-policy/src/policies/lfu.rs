//! Least frequently used with forgetting: each use counts 1 and halves every half-life. Owns the counts of all keys.
//! Never forgets a count when its key leaves. Surprising fact: those kept counts are what beats LRU on new text.

use crate::decay::Inflation;
use crate::ids::ExpertKey;
use crate::key_table::KeyTable;
use crate::policy::{Epoch, Policy};
use crate::ranking::{Motion, Ranking};

/// Half-life in epochs (decoded tokens): the best single value on recorded routes of new text.
pub const HALF_LIFE_EPOCHS: u32 = 64;

/// Evicts the key with the lowest decayed count; among equals the one used longest ago, then the lower key.
pub struct Lfu {
    ranking: Ranking,
    counts: KeyTable<Count>,
    inflation: Inflation,
    /// How often all counts were scaled down.
    scalings: u64,
}

#[derive(Clone, Copy)]
struct Count {
    uses: f32,
    last: u32,
}

impl Lfu {
    /// An empty policy for `slots` keys with the default half-life.
    pub fn new(slots: usize) -> Self {
        Self::with_half_life(slots, HALF_LIFE_EPOCHS)
    }

    /// As `new`; `half_life_epochs` is at least 1.
    pub fn with_half_life(slots: usize, half_life_epochs: u32) -> Self {
        Self {
            ranking: Ranking::new(slots),
            counts: KeyTable::new(Count { uses: 0.0, last: 0 }),
            inflation: Inflation::new(half_life_epochs),
            scalings: 0,
        }
    }

    /// Decayed uses of `key` up to the latest epoch, cached or not.
    pub fn uses(&self, key: ExpertKey) -> f32 {
        self.counts.get(key).uses / self.inflation.weight()
    }

    fn count(&mut self, key: ExpertKey, epoch: Epoch) {
        if let Some(factor) = self.inflation.advance(epoch) {
            self.counts.values_mut().for_each(|c| c.uses *= factor);
            self.scalings += 1;
        }
        let count = self.counts.at(key);
        count.uses += self.inflation.weight();
        // Wraps after 2^32 tokens, and then only breaks ties.
        count.last = epoch.0 as u32;
    }
}

impl Policy for Lfu {
    fn name(&self) -> &'static str {
        "lfu"
    }

    fn len(&self) -> usize {
        self.ranking.len()
    }

    fn contains(&self, key: ExpertKey) -> bool {
        self.ranking.contains(key)
    }

    fn touch(&mut self, key: ExpertKey, epoch: Epoch) {
        self.ranking.touch(key, epoch);
        self.count(key, epoch);
    }

    fn insert(&mut self, key: ExpertKey, epoch: Epoch) {
        if self.ranking.insert(key, epoch) {
            self.count(key, epoch);
        }
    }

    fn pin(&mut self, key: ExpertKey, until: Epoch) {
        self.ranking.pin(key, until);
    }

    fn victim(&mut self, now: Epoch, is_held: &mut dyn FnMut(ExpertKey) -> bool) -> Option<ExpertKey> {
        let counts = &self.counts;
        self.ranking.victim(now, Motion::Rising(self.scalings), is_held, &|key| {
            let count = counts.get(key);
            // Counts are never negative, so their bits order as they do.
            u64::from(count.uses.to_bits()) << 32 | u64::from(count.last)
        })
    }

    fn remove(&mut self, key: ExpertKey) -> bool {
        self.ranking.remove(key)
    }
}
