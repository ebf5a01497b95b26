//! Decayed LFU whose half-life follows measured misses, and which recognises repeated text. The default policy.
//! Owns counts of all keys under every half-life. Never needs a setting.
//! Surprising fact: when routes repeat an earlier stretch, victims are chosen as the optimum would choose them, because
//! the next use of every expert is then known.

use crate::echo::Echo;
use crate::ids::ExpertKey;
use crate::key_table::KeyTable;
use crate::policy::{Epoch, Policy};
use crate::ranking::{Motion, Ranking};
use crate::shadow::{self, Counts, FIRST, HALF_LIVES, Shadows, Weights};

/// Evicts what is expected last, judged by a repetition if there is one, else by the decayed use count.
pub struct Adaptive {
    ranking: Ranking,
    counts: KeyTable<Counts>,
    weights: Weights,
    shadows: Shadows,
    echo: Echo,
    epoch: Epoch,
    /// How often ranks may have fallen: counts scaled down, or another half-life chosen.
    falls: u64,
    half_life: usize,
}

impl Adaptive {
    /// An empty policy for `slots` keys.
    pub fn new(slots: usize) -> Self {
        Self {
            ranking: Ranking::new(slots),
            counts: KeyTable::new([0.0; HALF_LIVES.len()]),
            weights: Weights::new(),
            shadows: Shadows::new(slots),
            echo: Echo::new(),
            epoch: Epoch(0),
            falls: 0,
            half_life: FIRST,
        }
    }

    /// Half-life in use, in epochs.
    pub fn half_life_epochs(&self) -> u32 {
        HALF_LIVES[self.shadows.best()]
    }

    /// Ends the running token when `epoch` is a later one.
    fn advance(&mut self, epoch: Epoch) {
        if epoch <= self.epoch {
            return;
        }
        self.epoch = epoch;
        self.echo.close_token();
        let factors = self.weights.advance(epoch);
        if let Some(factors) = &factors {
            self.counts.values_mut().for_each(|c| shadow::scale(c, factors));
        }
        self.shadows.advance(epoch, factors.as_ref());
        if factors.is_some() || self.half_life != self.shadows.best() {
            self.falls += 1;
            self.half_life = self.shadows.best();
        }
    }

    fn used(&mut self, key: ExpertKey, epoch: Epoch) {
        self.advance(epoch);
        shadow::add(self.counts.at(key), &self.weights.now);
        self.shadows.record(key, epoch, &self.weights.now);
        self.echo.record(key);
    }
}

/// Rank of a key that is due after `wait_tokens`: above every count, the sooner the higher, by layer within a token.
fn rank_of_due(wait_tokens: u64, key: ExpertKey) -> u64 {
    u64::MAX - (wait_tokens.min(u64::MAX >> 18) << 16 | u64::from(key.layer.0))
}

impl Policy for Adaptive {
    fn name(&self) -> &'static str {
        "adaptive"
    }

    fn len(&self) -> usize {
        self.ranking.len()
    }

    fn contains(&self, key: ExpertKey) -> bool {
        self.ranking.contains(key)
    }

    fn touch(&mut self, key: ExpertKey, epoch: Epoch) {
        self.ranking.touch(key, epoch);
        self.used(key, epoch);
    }

    fn insert(&mut self, key: ExpertKey, epoch: Epoch) {
        if self.ranking.insert(key, epoch) {
            self.used(key, epoch);
        }
    }

    fn pin(&mut self, key: ExpertKey, until: Epoch) {
        self.ranking.pin(key, until);
    }

    fn victim(&mut self, now: Epoch, is_held: &mut dyn FnMut(ExpertKey) -> bool) -> Option<ExpertKey> {
        self.advance(now);
        let (counts, echo, half_life) = (&self.counts, &self.echo, self.half_life);
        // An expectation that comes to nothing lets a rank fall.
        let motion = if echo.is_active() { Motion::Free } else { Motion::Rising(self.falls) };
        self.ranking.victim(now, motion, is_held, &|key| match echo.wait_tokens(key) {
            Some(wait) => rank_of_due(wait, key),
            // Counts are never negative: their bits order as they do and leave the top bit free.
            None => u64::from(counts.get(key)[half_life].to_bits()) << 16,
        })
    }

    fn remove(&mut self, key: ExpertKey) -> bool {
        self.ranking.remove(key)
    }
}
