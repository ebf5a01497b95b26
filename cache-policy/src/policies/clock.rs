//! CLOCK (second chance): a key used since the hand last passed survives one more round. Owns the ring.
//! Never moves a key on a use: a use only sets its mark.
//! Surprising fact: the ring is a queue; the hand passing a key is the key moving to the back.

use alloc::vec::Vec;

use crate::chain::Chains;
use crate::ids::ExpertKey;
use crate::policy::{Epoch, Policy};

const RING: usize = 1;

/// Evicts the first key under the hand that was not used since the hand passed it.
pub struct Clock {
    chains: Chains,
}

impl Clock {
    /// An empty ring for `slots` keys.
    pub fn new(slots: usize) -> Self {
        Self { chains: Chains::new(slots, 1) }
    }

    /// Keys from the hand onward with their marks (1 = used since the hand passed).
    pub fn from_hand(&self) -> Vec<(ExpertKey, u8)> {
        self.chains.state(RING)
    }
}

impl Policy for Clock {
    fn name(&self) -> &'static str {
        "clock"
    }

    fn len(&self) -> usize {
        self.chains.len()
    }

    fn contains(&self, key: ExpertKey) -> bool {
        self.chains.find(key).is_some()
    }

    fn touch(&mut self, key: ExpertKey, epoch: Epoch) {
        let node = self.chains.used(key, epoch);
        if self.chains.queue(node) == RING {
            *self.chains.mark(node) = 1;
        } else {
            self.chains.move_to_newest(node, RING);
        }
    }

    fn insert(&mut self, key: ExpertKey, epoch: Epoch) {
        self.chains.insert(key, epoch, RING);
    }

    fn pin(&mut self, key: ExpertKey, until: Epoch) {
        let node = self.chains.find(key).expect("pin of an expert that is not cached");
        self.chains.pin(node, until);
    }

    fn victim(&mut self, now: Epoch, is_held: &mut dyn FnMut(ExpertKey) -> bool) -> Option<ExpertKey> {
        if let Some(node) = self.chains.cold(now, is_held) {
            return Some(self.chains.take(node));
        }
        // Two rounds: the first clears every mark at worst.
        for _ in 0..2 * self.chains.queue_len(RING) {
            let node = self.chains.oldest(RING)?;
            let stays = self.chains.is_pinned(node, now) || is_held(self.chains.key(node));
            if !stays && *self.chains.mark(node) == 0 {
                return Some(self.chains.take(node));
            }
            if !stays {
                *self.chains.mark(node) = 0;
            }
            self.chains.move_to_newest(node, RING);
        }
        let node = self.chains.any_unheld(is_held)?;
        Some(self.chains.take(node))
    }

    fn remove(&mut self, key: ExpertKey) -> bool {
        self.chains.find(key).map(|node| self.chains.take(node)).is_some()
    }
}
