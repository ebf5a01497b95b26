//! Random choice among the oldest share of an LRU order. Owns the order, its border and a seeded generator.
//! Never draws from outside: the same seed and the same uses give the same victims.
//! Surprising fact: with a window of one key this is LRU. The window is a list beside the order, so a draw costs the same however
//! many slots there are.

use alloc::vec::Vec;

use crate::chain::Chains;
use crate::ids::ExpertKey;
use crate::policy::{Epoch, Policy};

/// The oldest keys, from which victims are drawn.
const OLD: usize = 1;
/// All newer ones.
const YOUNG: usize = 2;
/// Share of the slots that the draw is made from, in percent.
const WINDOW_PERCENT: usize = 8;
const SEED: u64 = 0x9E37_79B9_7F4A_7C15;

/// Evicts a random key of the oldest `window`.
pub struct WindowRandom {
    chains: Chains,
    window: usize,
    random: u64,
    /// The nodes of `OLD` in no order.
    drawable: Vec<u32>,
    /// Where a node of `OLD` stands in `drawable`, by node.
    places: Vec<u32>,
    candidates: Vec<u32>,
}

impl WindowRandom {
    /// An empty order for `slots` keys; victims come from the oldest 8 %.
    pub fn new(slots: usize) -> Self {
        Self::with_window(slots, slots * WINDOW_PERCENT / 100, SEED)
    }

    /// As `new`, with the number of keys to draw from (at least 1) and a seed (0 is taken as 1).
    pub fn with_window(slots: usize, window: usize, seed: u64) -> Self {
        Self {
            chains: Chains::new(slots, 2),
            window: window.max(1),
            random: seed.max(1),
            drawable: Vec::new(),
            places: Vec::new(),
            candidates: Vec::new(),
        }
    }

    /// Keys from the oldest to the newest; preloads that were never used are not among them.
    pub fn oldest_first(&self) -> Vec<ExpertKey> {
        let both = [OLD, YOUNG].into_iter().flat_map(|queue| self.chains.state(queue));
        both.map(|(key, _)| key).collect()
    }

    /// Takes `node`, wherever it stands, out of the window.
    fn leave_window(&mut self, node: u32) {
        if self.chains.queue(node) != OLD {
            return;
        }
        let place = self.places[node as usize];
        self.drawable.swap_remove(place as usize);
        if let Some(&moved) = self.drawable.get(place as usize) {
            self.places[moved as usize] = place;
        }
    }

    /// Moves the border until the window is full or nothing newer is left.
    fn fill_window(&mut self) {
        while self.drawable.len() < self.window {
            let Some(node) = self.chains.oldest(YOUNG) else { return };
            self.chains.move_to_newest(node, OLD);
            let at = node as usize;
            if self.places.len() <= at {
                self.places.resize(at + 1, 0);
            }
            // Fewer than 2^32 slots: nodes are numbered in 32 bits.
            self.places[at] = self.drawable.len() as u32;
            self.drawable.push(node);
        }
    }

    fn take(&mut self, node: u32) -> ExpertKey {
        self.leave_window(node);
        let key = self.chains.take(node);
        self.fill_window();
        key
    }

    /// xorshift64 (Marsaglia 2003).
    fn draw(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        ((u128::from(self.random) * below as u128) >> 64) as usize
    }
}

impl Policy for WindowRandom {
    fn name(&self) -> &'static str {
        "window-random"
    }

    fn len(&self) -> usize {
        self.chains.len()
    }

    fn contains(&self, key: ExpertKey) -> bool {
        self.chains.find(key).is_some()
    }

    fn touch(&mut self, key: ExpertKey, epoch: Epoch) {
        let node = self.chains.used(key, epoch);
        self.leave_window(node);
        self.chains.move_to_newest(node, YOUNG);
        self.fill_window();
    }

    fn insert(&mut self, key: ExpertKey, epoch: Epoch) {
        self.chains.insert(key, epoch, YOUNG);
        self.fill_window();
    }

    fn pin(&mut self, key: ExpertKey, until: Epoch) {
        let node = self.chains.find(key).expect("pin of an expert that is not cached");
        self.chains.pin(node, until);
    }

    fn victim(&mut self, now: Epoch, is_held: &mut dyn FnMut(ExpertKey) -> bool) -> Option<ExpertKey> {
        if let Some(node) = self.chains.cold(now, is_held) {
            return Some(self.take(node));
        }
        if !self.drawable.is_empty() {
            let drawn = self.draw(self.drawable.len());
            let node = self.drawable[drawn];
            if !self.chains.is_pinned(node, now) && !is_held(self.chains.key(node)) {
                return Some(self.take(node));
            }
        }
        // The drawn key must stay: draw among the oldest that need not.
        let chains = &self.chains;
        let nodes = chains.nodes_of(OLD).chain(chains.nodes_of(YOUNG));
        let free = nodes.filter(|&n| !chains.is_pinned(n, now) && !is_held(chains.key(n)));
        self.candidates.clear();
        self.candidates.extend(free.take(self.window));
        let node = match self.candidates.len() {
            0 => self.chains.any_unheld(is_held)?,
            n => {
                let drawn = self.draw(n);
                self.candidates[drawn]
            }
        };
        Some(self.take(node))
    }

    fn remove(&mut self, key: ExpertKey) -> bool {
        self.chains.find(key).map(|node| self.take(node)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After any use the window holds the oldest keys, each at the place it is said to have.
    #[test]
    fn the_window_is_the_oldest_keys() {
        let (slots, window) = (40, 7);
        let mut policy = WindowRandom::with_window(slots, window, 5);
        let mut state = 9u64;
        for step in 0..4000u64 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let key = ExpertKey::new(0, ((state >> 33) % 90) as u16);
            let epoch = Epoch(1 + step / 5);
            match (policy.contains(key), step % 17) {
                (true, 0) => assert!(policy.remove(key)),
                (true, _) => policy.touch(key, epoch),
                (false, n) => {
                    if policy.len() == slots {
                        policy.victim(epoch, &mut |k| k.expert.0 % 3 == 0).expect("not all are held");
                    }
                    policy.insert(key, if n == 1 { Epoch(0) } else { epoch });
                }
            }
            let old: Vec<u32> = policy.chains.nodes_of(OLD).collect();
            let ordered = old.len() + policy.chains.nodes_of(YOUNG).count();
            assert_eq!(old.len(), window.min(ordered), "step {step}");
            let mut listed = policy.drawable.clone();
            assert!((0..).zip(&listed).all(|(place, &n)| policy.places[n as usize] == place), "step {step}");
            listed.sort_unstable();
            let mut sorted = old;
            sorted.sort_unstable();
            assert_eq!(listed, sorted, "step {step}");
        }
    }
}
