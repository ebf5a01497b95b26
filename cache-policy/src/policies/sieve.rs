//! SIEVE: one queue in order of arrival and a hand that walks from old to new, sparing used keys in place.
//! Never moves a key. Surprising fact: that is the whole difference to CLOCK, and it lets new keys leave early.
//! Rule: Zhang et al., "SIEVE is Simpler than LRU" (NSDI 2024).

use alloc::vec::Vec;

use crate::chain::Chains;
use crate::ids::ExpertKey;
use crate::policy::{Epoch, Policy};

const QUEUE: usize = 1;

/// Evicts the first unused key from the hand toward the newest.
pub struct Sieve {
    chains: Chains,
    /// Next node to look at; `None` = the oldest.
    hand: Option<u32>,
}

impl Sieve {
    /// An empty queue for `slots` keys.
    pub fn new(slots: usize) -> Self {
        Self { chains: Chains::new(slots, 1), hand: None }
    }

    /// Keys from the oldest to the newest with their marks (1 = used since the hand passed).
    pub fn oldest_first(&self) -> Vec<(ExpertKey, u8)> {
        self.chains.state(QUEUE)
    }

    /// Key that the hand looks at next; `None` = the oldest.
    pub fn hand(&self) -> Option<ExpertKey> {
        self.hand.map(|node| self.chains.key(node))
    }

    fn take(&mut self, node: u32) -> ExpertKey {
        if self.hand == Some(node) {
            self.hand = self.chains.newer(node);
        }
        self.chains.take(node)
    }
}

impl Policy for Sieve {
    fn name(&self) -> &'static str {
        "sieve"
    }

    fn len(&self) -> usize {
        self.chains.len()
    }

    fn contains(&self, key: ExpertKey) -> bool {
        self.chains.find(key).is_some()
    }

    fn touch(&mut self, key: ExpertKey, epoch: Epoch) {
        let node = self.chains.used(key, epoch);
        if self.chains.queue(node) == QUEUE {
            *self.chains.mark(node) = 1;
        } else {
            self.chains.move_to_newest(node, QUEUE);
        }
    }

    fn insert(&mut self, key: ExpertKey, epoch: Epoch) {
        self.chains.insert(key, epoch, QUEUE);
    }

    fn pin(&mut self, key: ExpertKey, until: Epoch) {
        let node = self.chains.find(key).expect("pin of an expert that is not cached");
        self.chains.pin(node, until);
    }

    fn victim(&mut self, now: Epoch, is_held: &mut dyn FnMut(ExpertKey) -> bool) -> Option<ExpertKey> {
        if let Some(node) = self.chains.cold(now, is_held) {
            return Some(self.take(node));
        }
        // Two rounds: the first clears every mark at worst.
        for _ in 0..2 * self.chains.queue_len(QUEUE) {
            let node = self.hand.or_else(|| self.chains.oldest(QUEUE))?;
            let stays = self.chains.is_pinned(node, now) || is_held(self.chains.key(node));
            if !stays && *self.chains.mark(node) == 0 {
                self.hand = Some(node);
                return Some(self.take(node));
            }
            if !stays {
                *self.chains.mark(node) = 0;
            }
            self.hand = self.chains.newer(node);
        }
        let node = self.chains.any_unheld(is_held)?;
        Some(self.take(node))
    }

    fn remove(&mut self, key: ExpertKey) -> bool {
        self.chains.find(key).map(|node| self.take(node)).is_some()
    }
}
