//! LRU that knows the order of layers: what a token has just passed cannot be wanted before the next token.
//! Owns the layer last used. Never counts how often. Surprising fact: age is measured in chances missed, so an expert of
//! a layer still ahead in this token is one chance younger than one just passed over.

use alloc::vec::Vec;

use crate::chain::{COLD, Chains};
use crate::ids::{ExpertKey, LayerIdx};
use crate::key_table::KeyTable;
use crate::policy::{Epoch, Policy};

/// Evicts the key that let most chances pass; among equals the one whose next chance is farthest away.
pub struct LayerAware {
    /// Recency within each layer: queue of layer l is l + 1.
    chains: Chains,
    last_use: KeyTable<Epoch>,
    /// Position of the running token: its epoch and the layer it uses.
    epoch: Epoch,
    layer: LayerIdx,
}

impl LayerAware {
    /// An empty policy for `slots` keys.
    pub fn new(slots: usize) -> Self {
        Self { chains: Chains::new(slots, 1), last_use: KeyTable::new(Epoch(0)), epoch: Epoch(0), layer: LayerIdx(0) }
    }

    /// Keys of `layer` from the oldest use to the newest.
    pub fn oldest_first(&self, layer: LayerIdx) -> Vec<ExpertKey> {
        let queue = queue_of(layer);
        if queue >= self.chains.queues() {
            return Vec::new();
        }
        self.chains.state(queue).into_iter().map(|(key, _)| key).collect()
    }

    fn used(&mut self, key: ExpertKey, epoch: Epoch) {
        *self.last_use.at(key) = epoch;
        (self.epoch, self.layer) = (epoch, key.layer);
    }

    /// The lowest ranked of the oldest keys of all layers that may leave.
    fn lowest(&self, now: Epoch, is_held: &mut dyn FnMut(ExpertKey) -> bool) -> Option<u32> {
        // A token asks for its first victim before its first use is recorded, at its first layer.
        let at = if now > self.epoch { LayerIdx(0) } else { self.layer };
        let layers = self.chains.queues() as u64 - 1;
        let oldest = (COLD + 1..self.chains.queues()).filter_map(|queue| {
            self.chains.nodes_of(queue).find(|&n| !self.chains.is_pinned(n, now) && !is_held(self.chains.key(n)))
        });
        oldest.min_by_key(|&node| {
            let key = self.chains.key(node);
            rank(self.last_use.get(key), key.layer, now, at, layers)
        })
    }
}

fn queue_of(layer: LayerIdx) -> usize {
    usize::from(layer.0) + 1
}

/// Rank of a key of `layer` used last in `last`, seen from layer `at` of the token `now`: lower leaves first.
fn rank(last: Epoch, layer: LayerIdx, now: Epoch, at: LayerIdx, layers: u64) -> u64 {
    let is_ahead = layer > at;
    let missed = now.0.saturating_sub(last.0).saturating_sub(u64::from(is_ahead));
    let (layer, at) = (u64::from(layer.0), u64::from(at.0));
    let wait = if is_ahead { layer - at } else { layers + layer - at };
    // Chances outweigh layers: a wait is at most 2^17 layers.
    u64::MAX - (missed.min(u64::MAX >> 18) << 17 | wait)
}

impl Policy for LayerAware {
    fn name(&self) -> &'static str {
        "layer-aware"
    }

    fn len(&self) -> usize {
        self.chains.len()
    }

    fn contains(&self, key: ExpertKey) -> bool {
        self.chains.find(key).is_some()
    }

    fn touch(&mut self, key: ExpertKey, epoch: Epoch) {
        let node = self.chains.used(key, epoch);
        self.chains.grow(queue_of(key.layer));
        self.chains.move_to_newest(node, queue_of(key.layer));
        self.used(key, epoch);
    }

    fn insert(&mut self, key: ExpertKey, epoch: Epoch) {
        self.chains.grow(queue_of(key.layer));
        let node = self.chains.insert(key, epoch, queue_of(key.layer));
        if self.chains.queue(node) != COLD {
            self.used(key, epoch);
        }
    }

    fn pin(&mut self, key: ExpertKey, until: Epoch) {
        let node = self.chains.find(key).expect("pin of an expert that is not cached");
        self.chains.pin(node, until);
    }

    fn victim(&mut self, now: Epoch, is_held: &mut dyn FnMut(ExpertKey) -> bool) -> Option<ExpertKey> {
        let cold = self.chains.cold(now, is_held);
        let chosen = cold.or_else(|| self.lowest(now, is_held));
        let node = chosen.or_else(|| self.chains.any_unheld(is_held))?;
        Some(self.chains.take(node))
    }

    fn remove(&mut self, key: ExpertKey) -> bool {
        self.chains.find(key).map(|node| self.chains.take(node)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chances_come_before_waits() {
        let seen = |last, layer| rank(Epoch(last), LayerIdx(layer), Epoch(10), LayerIdx(4), 8);
        // From first to leave to last: two chances missed (far, near), one missed, none missed (still ahead).
        let order = [seen(8, 4), seen(8, 0), seen(9, 3), seen(8, 7), seen(8, 5), seen(9, 7), seen(9, 5)];
        assert!(order.is_sorted(), "{order:?}");
        // Layer 7 of the token before last has missed one chance, as has layer 4 of the last token.
        assert_eq!(seen(8, 7) >> 17, seen(9, 4) >> 17);
    }
}
