//! Random choice among the oldest share of an LRU order. Owns the order and a seeded generator.
//! Never draws from outside: the same seed and the same uses give the same victims.
//! Surprising fact: with a window of one key this is LRU.

use alloc::vec::Vec;

use crate::chain::Chains;
use crate::ids::ExpertKey;
use crate::policy::{Epoch, Policy};

const ORDER: usize = 1;
/// Share of the slots that the draw is made from, in percent.
const WINDOW_PERCENT: usize = 8;
const SEED: u64 = 0x9E37_79B9_7F4A_7C15;

/// Evicts a random key of the oldest `window`.
pub struct WindowRandom {
    chains: Chains,
    window: usize,
    random: u64,
    candidates: Vec<u32>,
}

impl WindowRandom {
    /// An empty order for `slots` keys; victims come from the oldest 8 %.
    pub fn new(slots: usize) -> Self {
        Self::with_window(slots, slots * WINDOW_PERCENT / 100, SEED)
    }

    /// As `new`, with the number of keys to draw from (at least 1) and a seed (0 is taken as 1).
    pub fn with_window(slots: usize, window: usize, seed: u64) -> Self {
        let window = window.max(1);
        Self { chains: Chains::new(slots, 1), window, random: seed.max(1), candidates: Vec::with_capacity(window) }
    }

    /// Keys from the oldest to the newest.
    pub fn oldest_first(&self) -> Vec<ExpertKey> {
        self.chains.state(ORDER).into_iter().map(|(key, _)| key).collect()
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
        if let Some(node) = self.chains.cold(now, is_held) {
            return Some(self.chains.take(node));
        }
        let chains = &self.chains;
        let free = chains.nodes_of(ORDER).filter(|&n| !chains.is_pinned(n, now) && !is_held(chains.key(n)));
        self.candidates.clear();
        self.candidates.extend(free.take(self.window));
        let node = match self.candidates.len() {
            0 => self.chains.any_unheld(is_held)?,
            n => {
                let drawn = self.draw(n);
                self.candidates[drawn]
            }
        };
        Some(self.chains.take(node))
    }

    fn remove(&mut self, key: ExpertKey) -> bool {
        self.chains.find(key).map(|node| self.chains.take(node)).is_some()
    }
}
