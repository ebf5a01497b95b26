//! Least recently used. Owns the recency order of one size class.
//! Never counts. Surprising fact: the victim search stops at the first key of the current epoch, because all newer keys share it.

use alloc::vec::Vec;

use crate::chain::{COLD, Chains};
use crate::ids::ExpertKey;
use crate::policy::{Epoch, Policy};

const ORDER: usize = 1;

/// Evicts the key whose last use is longest ago.
pub struct Lru {
    chains: Chains,
}

impl Lru {
    /// An empty order for `slots` keys.
    pub fn new(slots: usize) -> Self {
        Self { chains: Chains::new(slots, 1) }
    }

    /// Keys from the first to leave to the last: unused preloads, then from the oldest use to the newest.
    pub fn oldest_first(&self) -> Vec<ExpertKey> {
        let (unused, used) = (self.chains.state(COLD), self.chains.state(ORDER));
        unused.into_iter().rev().chain(used).map(|(key, _)| key).collect()
    }

    /// The oldest key that may leave; else the oldest one that is only pinned.
    fn oldest(&self, now: Epoch, is_held: &mut dyn FnMut(ExpertKey) -> bool) -> Result<u32, Option<u32>> {
        let mut oldest_pinned = None;
        for node in self.chains.nodes_of(ORDER) {
            // Epochs rise with recency: from here on every key is pinned by its own use.
            if self.chains.is_used_in(node, now) && oldest_pinned.is_some() {
                break;
            }
            if is_held(self.chains.key(node)) {
                continue;
            }
            if !self.chains.is_pinned(node, now) {
                return Ok(node);
            }
            oldest_pinned = oldest_pinned.or(Some(node));
        }
        Err(oldest_pinned)
    }
}

impl Policy for Lru {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn len(&self) -> usize {
        self.chains.len()
    }

    fn contains(&self, key: ExpertKey) -> bool {
        self.chains.find(key).is_some()
    }

    fn touch(&mut self, key: ExpertKey, epoch: Epoch) {
        let node = self.chains.used(key, epoch);
        self.chains.move_to_newest(node, ORDER);
    }

    fn insert(&mut self, key: ExpertKey, epoch: Epoch) {
        self.chains.insert(key, epoch, ORDER);
    }

    fn pin(&mut self, key: ExpertKey, until: Epoch) {
        let node = self.chains.find(key).expect("pin of an expert that is not cached");
        self.chains.pin(node, until);
    }

    fn victim(&mut self, now: Epoch, is_held: &mut dyn FnMut(ExpertKey) -> bool) -> Option<ExpertKey> {
        let node = match self.chains.cold(now, is_held) {
            Some(node) => node,
            None => match self.oldest(now, is_held) {
                Ok(node) => node,
                // Everything that is not held is pinned: unused preloads still go first.
                Err(pinned) => self.chains.cold(Epoch(u64::MAX), is_held).or(pinned)?,
            },
        };
        Some(self.chains.take(node))
    }

    fn remove(&mut self, key: ExpertKey) -> bool {
        self.chains.find(key).map(|node| self.chains.take(node)).is_some()
    }
}
