//! S3-FIFO: a small queue on probation, a main queue, and a memory of who left the small one lately.
//! Never moves a key on a use. Surprising fact: the ghost memory is one number a key, the serial of its departure.
//! Rule: Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023); small = 10 %, ghosts = main.

use alloc::vec::Vec;

use crate::chain::{COLD, Chains};
use crate::ids::ExpertKey;
use crate::key_table::KeyTable;
use crate::policy::{Epoch, Policy};

const SMALL: usize = 1;
const MAIN: usize = 2;
/// Uses counted at most.
const USES_MAX: u8 = 3;

/// Evicts from probation first; keys used twice there, or wanted again soon after leaving it, reach the main queue.
pub struct S3Fifo {
    chains: Chains,
    small_slots: usize,
    ghosts_max: u64,
    /// Serial of the key's last departure from the small queue; 0 = never.
    left_at: KeyTable<u64>,
    departures: u64,
}

impl S3Fifo {
    /// Empty queues for `slots` keys together.
    pub fn new(slots: usize) -> Self {
        let small_slots = (slots / 10).max(1);
        Self {
            chains: Chains::new(slots, 2),
            small_slots,
            ghosts_max: slots.saturating_sub(small_slots) as u64,
            left_at: KeyTable::new(0),
            departures: 0,
        }
    }

    /// Keys on probation with their uses, oldest first.
    pub fn small(&self) -> Vec<(ExpertKey, u8)> {
        self.chains.state(SMALL)
    }

    /// Keys of the main queue with their uses, oldest first.
    pub fn main(&self) -> Vec<(ExpertKey, u8)> {
        self.chains.state(MAIN)
    }

    /// Whether `key` left the small queue lately.
    pub fn is_ghost(&self, key: ExpertKey) -> bool {
        let left = self.left_at.get(key);
        left > 0 && self.departures - left < self.ghosts_max
    }

    fn entry_queue(&self, key: ExpertKey) -> usize {
        if self.is_ghost(key) { MAIN } else { SMALL }
    }

    fn leave_small(&mut self, node: u32) -> ExpertKey {
        let key = self.chains.take(node);
        self.departures += 1;
        *self.left_at.at(key) = self.departures;
        key
    }

    /// Moves keys on until one may leave, or every key has been looked at as often as its uses can save it.
    fn turn(&mut self, now: Epoch, is_held: &mut dyn FnMut(ExpertKey) -> bool) -> Option<ExpertKey> {
        // Keys of a queue passed over in a row because they must stay.
        let mut passed = [0; MAIN + 1];
        loop {
            let open = |q: usize| passed[q] < self.chains.queue_len(q);
            let queue = match (open(SMALL), open(MAIN)) {
                (false, false) => return None,
                (true, false) => SMALL,
                (true, true) if self.chains.queue_len(SMALL) >= self.small_slots => SMALL,
                _ => MAIN,
            };
            let node = self.chains.oldest(queue)?;
            if self.chains.is_pinned(node, now) || is_held(self.chains.key(node)) {
                passed[queue] += 1;
                self.chains.move_to_newest(node, queue);
                continue;
            }
            let uses = *self.chains.mark(node);
            match queue {
                SMALL if uses > 1 => {
                    *self.chains.mark(node) = 0;
                    passed[MAIN] = 0;
                    self.chains.move_to_newest(node, MAIN);
                }
                SMALL => return Some(self.leave_small(node)),
                _ if uses > 0 => {
                    *self.chains.mark(node) -= 1;
                    passed[MAIN] = 0;
                    self.chains.move_to_newest(node, MAIN);
                }
                _ => return Some(self.chains.take(node)),
            }
        }
    }
}

impl Policy for S3Fifo {
    fn name(&self) -> &'static str {
        "s3-fifo"
    }

    fn len(&self) -> usize {
        self.chains.len()
    }

    fn contains(&self, key: ExpertKey) -> bool {
        self.chains.find(key).is_some()
    }

    fn touch(&mut self, key: ExpertKey, epoch: Epoch) {
        let node = self.chains.used(key, epoch);
        if self.chains.queue(node) == COLD {
            let queue = self.entry_queue(key);
            self.chains.move_to_newest(node, queue);
        } else {
            let mark = self.chains.mark(node);
            *mark = (*mark + 1).min(USES_MAX);
        }
    }

    fn insert(&mut self, key: ExpertKey, epoch: Epoch) {
        let queue = self.entry_queue(key);
        self.chains.insert(key, epoch, queue);
    }

    fn pin(&mut self, key: ExpertKey, until: Epoch) {
        let node = self.chains.find(key).expect("pin of an expert that is not cached");
        self.chains.pin(node, until);
    }

    fn victim(&mut self, now: Epoch, is_held: &mut dyn FnMut(ExpertKey) -> bool) -> Option<ExpertKey> {
        if let Some(node) = self.chains.cold(now, is_held) {
            return Some(self.chains.take(node));
        }
        if let Some(key) = self.turn(now, is_held) {
            return Some(key);
        }
        let node = self.chains.any_unheld(is_held)?;
        Some(self.chains.take(node))
    }

    fn remove(&mut self, key: ExpertKey) -> bool {
        self.chains.find(key).map(|node| self.chains.take(node)).is_some()
    }
}
