//! Fills ahead of requests: what may begin, what may be taken back, which the reader knows by which number.
//! Owns no thread and no policy: the directory chooses victims. Surprising fact: a fill that a request has joined is never taken back,
//! and one that is being taken back is never joined, so a request cannot fail for a change of mind.

use cache_policy::Placement;

use super::{FillFor, NO_SLOT, Slot, SlotIdx, State, Table, index_in};
use crate::storage::expert_cache::fill::Batch;
use crate::storage::expert_cache::lease::LeaseParts;
use crate::storage::reader::BatchId;
use crate::units::ExpertKey;

impl Table {
    /// A token begins; cached ones of `keep` stay through it.
    pub fn begin_token(&mut self, keep: &[ExpertKey]) {
        self.directory.begin_token();
        for &key in keep {
            self.directory.expect(key);
        }
    }

    /// Keeps a cached expert through the running token.
    pub fn expect(&mut self, key: ExpertKey) {
        self.directory.expect(key);
    }

    /// Reads ahead under way.
    pub fn ahead_open(&mut self) -> usize {
        let slots = &self.slots;
        self.ahead.retain(|&(slot, serial)| {
            let at = &slots[slot as usize];
            at.serial == serial && matches!(at.state, State::Filling(_))
        });
        self.ahead.len()
    }

    /// Begins the fill of an absent `key`, unless that could make a request wait for a slot: `reserve` slots of its class stay clear
    /// of holds and reads. `None` when it is present or no slot may be taken.
    pub fn begin_ahead(&mut self, key: ExpertKey, reserve: usize) -> Option<Batch> {
        let class = self.directory.class_of(key.layer)?;
        let class = &self.classes[class];
        if self.index(key).is_none() || class.busy + 1 + reserve > class.total {
            return None;
        }
        let (slots, slot_of, layers) = (&self.slots, &self.slot_of, &self.layers);
        let mut is_held = |key: ExpertKey| {
            let slot = index_in(layers, key).map_or(NO_SLOT, |i| slot_of[i]);
            slots.get(slot as usize).is_some_and(Slot::is_busy)
        };
        let Placement::Fill { evict } = self.directory.prefetch(key, &mut is_held)? else { return None };
        let mut batch = Batch::default();
        let slot = self.free_slot(key, evict);
        self.begin_fill(slot, key, FillFor::Lookahead, &mut batch);
        self.ledger.issued(key, u64::MAX);
        self.ahead.extend(&batch.fills);
        Some(batch)
    }

    /// Holds `key` if it is in memory and `reserve` slots of its class stay clear of holds and reads all the same. That it was read ahead of a
    /// request has then been of use; nothing else is counted, and who decides what leaves next hears nothing.
    pub fn hold_present(&mut self, key: ExpertKey, reserve: usize, lease: &mut LeaseParts) -> bool {
        let Some(slot) = self.slot(key) else { return false };
        let at = &self.slots[slot as usize];
        let class = &self.classes[at.class as usize];
        let busy_then = class.busy + usize::from(!at.is_busy());
        if !matches!(at.state, State::Valid(_)) || busy_then + reserve > class.total {
            return false;
        }
        self.ledger.used(key, 0);
        self.hold(slot, lease);
        true
    }

    /// The reader calls the fills `fills` by `batch`. Returns whether a request waits for one of them already.
    pub fn note_batch(&mut self, fills: &[(SlotIdx, u64)], batch: BatchId) -> bool {
        let mut is_wanted = false;
        for &(slot, serial) in fills {
            let at = &mut self.slots[slot as usize];
            if let (State::Filling(fill), true) = (&mut at.state, at.serial == serial) {
                fill.batch = Some(batch);
                is_wanted |= fill.is_wanted;
            }
        }
        is_wanted
    }

    /// Marks reads ahead of stale experts as being taken back; returns the reader's numbers for them.
    pub fn cancel_ahead(&mut self, is_stale: &dyn Fn(ExpertKey) -> bool) -> Vec<BatchId> {
        if self.ahead_open() == 0 {
            return Vec::new();
        }
        let mut batches = Vec::new();
        for &(slot, _) in &self.ahead {
            let at = &mut self.slots[slot as usize];
            let State::Filling(fill) = &mut at.state else { continue };
            if at.holds == 0
                && !fill.is_wanted
                && !fill.is_cancelled
                && is_stale(at.key)
                && let Some(batch) = fill.batch
            {
                fill.is_cancelled = true;
                batches.push(batch);
            }
        }
        batches
    }
}
