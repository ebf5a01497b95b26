//! The slots of GPU memory: who is where, who is held, who leaves next.
//! Never touches a device: whoever changes the table queues what follows from it. Surprising fact: a slot that nobody is in may still be read by
//! kernels under way, or be written to by an upload that came for nothing; what fills it next is queued behind both.

use lru::LruCache;

use crate::units::ExpertKey;

/// What the tier has done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct TierCounts {
    /// Requested experts that were in GPU memory.
    pub hits: u64,
    pub misses: u64,
    pub evictions: u64,
    /// Passes of one row whose experts the device found by itself.
    pub found_rows: u64,
    /// Experts that were uploaded before a router chose them, and their bytes; of these, those it chose and those it did not.
    pub guessed: u64,
    pub guessed_bytes: u64,
    pub guessed_used: u64,
    pub guessed_wasted: u64,
}

/// Changes that are kept one by one: those of one request, and a few more.
const CHANGES_KEPT: usize = 64;

/// Who is where. A slot is in `by_key`, in `free`, or held by a lease that fills it. One that a guess fills is in `by_key` from the start.
pub(super) struct Table {
    by_key: LruCache<ExpertKey, usize>,
    /// Leases that hold each slot.
    pins: Vec<u32>,
    free: Vec<usize>,
    pub(super) counts: TierCounts,
    /// Who left (`None`) and who came since [`Self::take_changes`], oldest first.
    changes: Vec<(ExpertKey, Option<usize>)>,
    /// Whether there were more.
    has_more: bool,
}

impl Table {
    pub(super) fn new(slots: usize) -> Self {
        let free = (0..slots).rev().collect();
        Self {
            by_key: LruCache::unbounded(),
            pins: vec![0; slots],
            free,
            counts: TierCounts::default(),
            changes: Vec::with_capacity(CHANGES_KEPT),
            // A copy that was never made lacks everything.
            has_more: true,
        }
    }

    fn note(&mut self, key: ExpertKey, slot: Option<usize>) {
        match self.changes.len() < CHANGES_KEPT {
            true => self.changes.push((key, slot)),
            false => self.has_more = true,
        }
    }

    /// Whether a copy is behind.
    pub(super) fn has_changed(&self) -> bool {
        self.has_more || !self.changes.is_empty()
    }

    /// Who left and who came, for a copy that knew the rest; `None` if they were too many to be kept.
    pub(super) fn take_changes(&mut self) -> Option<Vec<(ExpertKey, Option<usize>)>> {
        let changes = std::mem::take(&mut self.changes);
        (!std::mem::take(&mut self.has_more)).then_some(changes)
    }

    /// Everyone who is there, for a new copy.
    pub(super) fn all(&self) -> impl Iterator<Item = (ExpertKey, usize)> {
        self.by_key.iter().map(|(key, slot)| (*key, *slot))
    }

    /// The slot of `key`, pinned, if it is there.
    pub(super) fn find(&mut self, key: ExpertKey) -> Option<usize> {
        let slot = *self.by_key.get(&key)?;
        self.pins[slot] += 1;
        Some(slot)
    }

    /// Those of `keys` that are not there, in their order.
    pub(super) fn absent(&self, keys: &[ExpertKey]) -> Vec<ExpertKey> {
        keys.iter().copied().filter(|key| !self.by_key.contains(key)).collect()
    }

    /// A slot to fill, pinned: a free one, else that of the expert unused for longest.
    pub(super) fn take(&mut self) -> Option<usize> {
        let slot = self.free.pop().or_else(|| self.evict())?;
        self.pins[slot] = 1;
        Some(slot)
    }

    /// Sends the expert unused for longest away, if all are not held.
    fn evict(&mut self) -> Option<usize> {
        let pins = &self.pins;
        let (key, slot) = self.by_key.iter().rev().find(|(_, slot)| pins[**slot] == 0)?;
        let (key, slot) = (*key, *slot);
        self.by_key.pop(&key);
        self.note(key, None);
        self.counts.evictions += 1;
        Some(slot)
    }

    /// Makes sure that `count` slots are free, as far as experts may leave.
    pub(super) fn keep_free(&mut self, count: usize) {
        while self.free.len() < count {
            let Some(slot) = self.evict() else { return };
            self.free.push(slot);
        }
    }

    /// A free slot for `key` of so many bytes, which nobody has asked for, pinned; nobody leaves for it. Whoever takes it tells the device.
    pub(super) fn guess(&mut self, key: ExpertKey, bytes: u64) -> Option<usize> {
        if self.by_key.contains(&key) {
            return None;
        }
        let slot = self.free.pop()?;
        self.pins[slot] = 1;
        self.by_key.put(key, slot);
        self.counts.guessed += 1;
        self.counts.guessed_bytes += bytes;
        Some(slot)
    }

    /// The guess of `key` was right: what holds it from now on are leases.
    pub(super) fn confirm(&mut self, slot: usize) {
        self.counts.guessed_used += 1;
        self.release(slot, true);
    }

    /// The guess of `key` was wrong: its `slot` is free for whatever is queued behind it. Whoever calls tells the device.
    pub(super) fn forget(&mut self, key: ExpertKey, slot: usize) {
        assert_eq!(self.pins[slot], 1, "nobody else holds what nobody asked for");
        self.by_key.pop(&key);
        self.counts.guessed_wasted += 1;
        self.release(slot, false);
    }

    /// The copy on the device cannot be trusted any more.
    pub(super) fn distrust(&mut self) {
        self.has_more = true;
    }

    /// `slot` now holds `key`. Returns the slot to use: another lease may have brought the same expert meanwhile.
    pub(super) fn fill(&mut self, key: ExpertKey, slot: usize) -> usize {
        match self.find(key) {
            Some(other) => {
                self.pins[slot] = 0;
                self.free.push(slot);
                other
            }
            None => {
                self.by_key.put(key, slot);
                self.note(key, Some(slot));
                slot
            }
        }
    }

    /// Ends a hold; a slot that was never filled becomes free.
    pub(super) fn release(&mut self, slot: usize, is_filled: bool) {
        self.pins[slot] -= 1;
        if !is_filled {
            self.free.push(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(expert: u16) -> ExpertKey {
        ExpertKey::new(0, expert)
    }

    #[test]
    fn the_longest_unused_leaves_and_held_ones_stay() {
        let mut table = Table::new(2);
        for expert in [1, 2] {
            let slot = table.take().unwrap();
            assert_eq!(table.fill(key(expert), slot), slot);
        }
        assert_eq!(table.take(), None, "both are held");
        let one = table.find(key(1)).unwrap();
        // Two holds on expert 1, one on expert 2.
        table.release(one, true);
        table.release(1, true);
        assert_eq!(table.take(), Some(1), "expert 2 is not held");
        assert_eq!(table.find(key(2)), None);
        assert_eq!(table.counts.evictions, 1);
    }

    #[test]
    fn what_is_absent_is_told_and_nothing_is_used_by_asking() {
        let mut table = Table::new(2);
        for expert in [1, 2] {
            let slot = table.take().unwrap();
            table.fill(key(expert), slot);
            table.release(slot, true);
        }
        assert_eq!(table.absent(&[key(3), key(1), key(0), key(2)]), [key(3), key(0)]);
        table.take().unwrap();
        assert_eq!(table.absent(&[key(1), key(2)]), [key(1)], "the question did not make expert 1 the last used");
    }

    /// A copy that starts from all and then only hears of changes, at random moments.
    #[test]
    fn a_copy_follows_by_changes() {
        let mut table = Table::new(5);
        assert!(table.has_changed() && table.take_changes().is_none(), "a copy that was never made");
        let (mut copy, mut seed) = (std::collections::BTreeMap::new(), 7u32);
        for step in 0..2000 {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let wanted = key((seed >> 16) as u16 % 12);
            let slot = table.find(wanted).unwrap_or_else(|| {
                let slot = table.take().unwrap();
                table.fill(wanted, slot)
            });
            table.release(slot, true);
            // Now and then more have changed than are kept.
            if step % 7 == 0 && !(500..700).contains(&step) {
                match table.take_changes() {
                    None => copy = table.all().collect(),
                    Some(changes) => changes.into_iter().for_each(|(key, slot)| {
                        match slot {
                            Some(slot) => copy.insert(key, slot),
                            None => copy.remove(&key),
                        };
                    }),
                }
                assert_eq!(copy, table.all().collect(), "step {step}");
                assert!(!table.has_changed());
            }
        }
        assert_eq!(copy.len(), 5);
    }

    #[test]
    fn guesses_take_free_slots_only_and_leave_them_free() {
        let mut table = Table::new(4);
        for expert in 0..3 {
            let slot = table.take().unwrap();
            table.fill(key(expert), slot);
            table.release(slot, true);
        }
        table.take_changes();
        assert_eq!(table.guess(key(1), 10), None, "it is there");
        let slot = table.guess(key(7), 10).unwrap();
        assert_eq!(table.guess(key(8), 10), None, "nobody leaves for a guess");
        // It is there for whoever asks, and stays until it is known to be wrong or right.
        assert!(table.absent(&[key(7)]).is_empty());
        assert_eq!(table.find(key(7)), Some(slot));
        table.confirm(slot);
        table.release(slot, true);
        assert_eq!(table.counts.evictions, 0);
        assert!(!table.has_changed(), "the device hears of guesses from whoever makes them");

        table.keep_free(2);
        assert_eq!((table.free.len(), table.counts.evictions), (2, 2), "experts 0 and 1 were unused for longest");
        assert_eq!(table.take_changes().unwrap(), [(key(0), None), (key(1), None)]);
        let slot = table.guess(key(8), 10).unwrap();
        table.forget(key(8), slot);
        assert_eq!((table.absent(&[key(8)]), table.free.len()), (vec![key(8)], 2));
        assert_eq!(table.counts.guessed_bytes, 20);
        assert_eq!((table.counts.guessed, table.counts.guessed_used, table.counts.guessed_wasted), (2, 1, 1));
        table.distrust();
        assert!(table.has_changed() && table.take_changes().is_none());
    }

    #[test]
    fn held_experts_make_no_room() {
        let mut table = Table::new(2);
        let (a, b) = (table.take().unwrap(), table.take().unwrap());
        table.fill(key(1), a);
        table.keep_free(1);
        assert!(table.free.is_empty());
        table.release(a, true);
        table.keep_free(2);
        assert_eq!(table.free, [a]);
        table.release(b, false);
    }

    #[test]
    fn slots_that_were_not_filled_or_came_twice_are_free_again() {
        let mut table = Table::new(2);
        let (a, b) = (table.take().unwrap(), table.take().unwrap());
        table.release(a, false);
        assert_eq!(table.take(), Some(a));
        assert_eq!(table.fill(key(5), b), b);
        assert_eq!(table.fill(key(5), a), b, "the second copy is dropped");
        assert_eq!((table.pins[b], table.free.len()), (2, 1));
    }
}
