//! Residents of a score-based policy and the choice of the lowest ranked one. Owns membership and pins.
//! Never computes a rank: the policy gives it. Surprising fact: while ranks only rise, a heap whose entries are allowed to be out of
//! date still finds the lowest: an entry that is too low comes to the top, is seen to be old, and goes back where it belongs.
//!
//! Ranks that may fall (a repetition ends) are computed for all residents once an epoch instead: within an epoch only used keys change
//! their rank, and used keys are pinned. Both ways choose the same victims.

use alloc::collections::BinaryHeap;
use alloc::vec::Vec;
use core::cmp::Reverse;

use crate::ids::ExpertKey;
use crate::key_table::KeyTable;
use crate::policy::Epoch;

/// Candidates kept by the first scan of an epoch; doubled when an epoch asks for more.
const CANDIDATES_MIN: usize = 64;

#[derive(Clone, Copy, Debug)]
struct Resident {
    key: ExpertKey,
    pinned_until: Epoch,
    /// Serial of a preload that was not used since.
    cold: Option<u64>,
}

/// Preloads first, then by rank, ties by key.
type Candidate = (IsUsed, u64, ExpertKey);
type IsUsed = bool;

/// How the ranks of unused keys move from epoch to epoch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Motion {
    /// Since this number was first named, no resident's rank has fallen.
    Rising(u64),
    /// Any rank may have changed since the last epoch.
    Free,
}

/// Lowest first, for ranks that only rise.
#[derive(Default)]
struct Rising {
    /// Has an entry of every resident that is not parked, with a rank at most its present one; and entries of keys that left.
    heap: BinaryHeap<Reverse<Candidate>>,
    /// Entries of keys that were found pinned in `parked_in`: they are looked at again in another epoch.
    parked: Vec<Candidate>,
    parked_in: Epoch,
    /// The motion that the heap was built for; `None` when it is out of use.
    built_for: Option<u64>,
}

/// Present keys of one size class.
pub(crate) struct Ranking {
    residents: Vec<Resident>,
    /// Index into `residents` plus one; 0 = absent.
    at: KeyTable<u32>,
    latest: Epoch,
    preloads: u64,
    /// Lowest ranks of `ranked_in`, best victim last.
    candidates: Vec<Candidate>,
    ranked_in: Option<Epoch>,
    /// Whether `candidates` began with every unpinned key.
    is_complete: bool,
    candidates_max: usize,
    rising: Rising,
    /// Entries put aside during one choice.
    aside: Vec<Candidate>,
}

impl Ranking {
    pub(crate) fn new(slots: usize) -> Self {
        Self {
            residents: Vec::with_capacity(slots),
            at: KeyTable::new(0),
            latest: Epoch(0),
            preloads: 0,
            candidates: Vec::with_capacity(slots),
            ranked_in: None,
            is_complete: false,
            candidates_max: CANDIDATES_MIN,
            rising: Rising { heap: BinaryHeap::with_capacity(2 * slots + CANDIDATES_MIN), ..Rising::default() },
            aside: Vec::new(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.residents.len()
    }

    pub(crate) fn contains(&self, key: ExpertKey) -> bool {
        self.at.get(key) != 0
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = ExpertKey> + '_ {
        self.residents.iter().map(|r| r.key)
    }

    fn resident(&mut self, key: ExpertKey) -> &mut Resident {
        let at = self.at.get(key) as usize;
        assert!(at != 0, "use of {key}, which is not cached");
        &mut self.residents[at - 1]
    }

    pub(crate) fn touch(&mut self, key: ExpertKey, epoch: Epoch) {
        self.notice(epoch);
        let resident = self.resident(key);
        resident.pinned_until = resident.pinned_until.max(epoch);
        resident.cold = None;
    }

    pub(crate) fn pin(&mut self, key: ExpertKey, until: Epoch) {
        let resident = self.resident(key);
        resident.pinned_until = resident.pinned_until.max(until);
    }

    /// Adds an absent key; returns whether the insert was a use (its epoch is neither in the past nor zero).
    pub(crate) fn insert(&mut self, key: ExpertKey, epoch: Epoch) -> bool {
        assert!(!self.contains(key), "insert of {key}, which is present");
        let is_preload = epoch < self.latest || epoch == Epoch(0);
        self.notice(epoch);
        self.preloads += u64::from(is_preload);
        self.residents.push(Resident { key, pinned_until: epoch, cold: is_preload.then_some(self.preloads) });
        *self.at.at(key) = u32::try_from(self.residents.len()).expect("fewer than 2^32 slots");
        if self.rising.built_for.is_some() {
            // The lowest rank there is: the policy gives the right one when the entry comes to the top.
            self.rising.heap.push(Reverse((false, 0, key)));
        }
        !is_preload
    }

    /// A use or preload of an earlier epoch does not pin for this one: the candidates do not know it.
    fn notice(&mut self, epoch: Epoch) {
        self.latest = self.latest.max(epoch);
        if self.ranked_in.is_some_and(|ranked| epoch < ranked) {
            self.ranked_in = None;
        }
    }

    pub(crate) fn remove(&mut self, key: ExpertKey) -> bool {
        let at = self.at.get(key) as usize;
        if at == 0 {
            return false;
        }
        *self.at.at(key) = 0;
        self.residents.swap_remove(at - 1);
        if let Some(moved) = self.residents.get(at - 1) {
            *self.at.at(moved.key) = at as u32;
        }
        true
    }

    /// Takes out the unheld, unpinned key of the lowest `rank`, ties by key; else the lowest unheld pinned one.
    pub(crate) fn victim(
        &mut self,
        now: Epoch,
        motion: Motion,
        is_held: &mut dyn FnMut(ExpertKey) -> bool,
        rank: &dyn Fn(ExpertKey) -> u64,
    ) -> Option<ExpertKey> {
        let chosen = match motion {
            Motion::Rising(since) => match self.lowest_rising(now, since, is_held, rank) {
                Some(key) => key,
                None => self.lowest_pinned(is_held, rank)?,
            },
            Motion::Free => {
                self.rising.built_for = None;
                return self.victim_of_scan(now, is_held, rank);
            }
        };
        self.ranked_in = None;
        self.remove(chosen);
        Some(chosen)
    }

    /// What a resident is ordered by now. Of the preloads the last leaves first: they come by falling popularity.
    fn entry(resident: &Resident, rank: &dyn Fn(ExpertKey) -> u64) -> Candidate {
        match resident.cold {
            Some(serial) => (false, u64::MAX - serial, resident.key),
            None => (true, rank(resident.key), resident.key),
        }
    }

    fn lowest_rising(
        &mut self,
        now: Epoch,
        since: u64,
        is_held: &mut dyn FnMut(ExpertKey) -> bool,
        rank: &dyn Fn(ExpertKey) -> u64,
    ) -> Option<ExpertKey> {
        let rising = &mut self.rising;
        // Keys that left without being chosen leave entries behind.
        let is_bloated = rising.heap.len() + rising.parked.len() > 2 * self.residents.len() + CANDIDATES_MIN;
        if rising.built_for != Some(since) || is_bloated {
            rising.built_for = Some(since);
            rising.parked.clear();
            rising.heap.clear();
            rising.heap.extend(self.residents.iter().map(|r| Reverse(Self::entry(r, rank))));
        }
        if rising.parked_in != now {
            rising.parked_in = now;
            rising.heap.extend(rising.parked.drain(..).map(Reverse));
        }
        let mut chosen = None;
        while let Some(Reverse(seen)) = rising.heap.pop() {
            let at = self.at.get(seen.2) as usize;
            if at == 0 {
                continue;
            }
            let resident = &self.residents[at - 1];
            if resident.pinned_until >= now {
                rising.parked.push(seen);
                continue;
            }
            let present = Self::entry(resident, rank);
            if present != seen {
                rising.heap.push(Reverse(present));
            } else if is_held(seen.2) {
                // It may be free at the next call.
                self.aside.push(seen);
            } else {
                chosen = Some(seen.2);
                break;
            }
        }
        rising.heap.extend(self.aside.drain(..).map(Reverse));
        chosen
    }

    fn victim_of_scan(
        &mut self,
        now: Epoch,
        is_held: &mut dyn FnMut(ExpertKey) -> bool,
        rank: &dyn Fn(ExpertKey) -> u64,
    ) -> Option<ExpertKey> {
        if self.ranked_in != Some(now) {
            self.candidates_max = CANDIDATES_MIN;
            self.rank_all(now, rank);
        }
        let chosen = loop {
            if let Some(key) = self.next_candidate(now, is_held) {
                break key;
            }
            if self.is_complete {
                break self.lowest_pinned(is_held, rank)?;
            }
            self.candidates_max *= 2;
            self.rank_all(now, rank);
        };
        self.remove(chosen);
        Some(chosen)
    }

    fn next_candidate(&mut self, now: Epoch, is_held: &mut dyn FnMut(ExpertKey) -> bool) -> Option<ExpertKey> {
        for i in (0..self.candidates.len()).rev() {
            let key = self.candidates[i].2;
            let at = self.at.get(key) as usize;
            if at == 0 || self.residents[at - 1].pinned_until >= now {
                self.candidates.remove(i);
            } else if !is_held(key) {
                self.candidates.remove(i);
                return Some(key);
            }
            // A held key stays a candidate: it may be free at the next call.
        }
        None
    }

    fn rank_all(&mut self, now: Epoch, rank: &dyn Fn(ExpertKey) -> u64) {
        self.ranked_in = Some(now);
        self.candidates.clear();
        let free = self.residents.iter().filter(|r| r.pinned_until < now);
        self.candidates.extend(free.map(|r| Self::entry(r, rank)));
        self.is_complete = self.candidates.len() <= self.candidates_max;
        if !self.is_complete {
            self.candidates.select_nth_unstable(self.candidates_max);
            self.candidates.truncate(self.candidates_max);
        }
        self.candidates.sort_unstable_by(|a, b| b.cmp(a));
    }

    fn lowest_pinned(
        &self,
        is_held: &mut dyn FnMut(ExpertKey) -> bool,
        rank: &dyn Fn(ExpertKey) -> u64,
    ) -> Option<ExpertKey> {
        self.keys().filter(|&k| !is_held(k)).min_by_key(|&k| (rank(k), k))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both ways over the same uses, pins, holds, removals and preloads choose the same victims.
    #[test]
    fn a_heap_of_old_ranks_chooses_as_a_scan_does() {
        for (slots, keys, seed) in [(3, 9, 1u64), (40, 160, 2), (40, 60, 3), (300, 900, 4)] {
            let mut state = seed;
            let mut random = move |below: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) % below
            };
            let (mut heap, mut scan) = (Ranking::new(slots), Ranking::new(slots));
            let mut counts: Vec<u64> = alloc::vec![0; keys];
            let (mut since, mut chosen) = (0, 0);
            for step in 1..6000u64 {
                let epoch = Epoch(1 + step / 7);
                let number = random(keys as u64) as usize;
                let key = ExpertKey::new(0, number as u16);
                let held = ExpertKey::new(0, random(keys as u64) as u16);
                counts[number] += 1;
                if heap.contains(key) {
                    match random(20) {
                        0 => assert_eq!(heap.remove(key), scan.remove(key)),
                        1 => [&mut heap, &mut scan].into_iter().for_each(|r| r.pin(key, Epoch(epoch.0 + 2))),
                        _ => [&mut heap, &mut scan].into_iter().for_each(|r| r.touch(key, epoch)),
                    }
                    continue;
                }
                // A change of measure, which policies make between epochs: every rank may fall.
                if step % 7 == 0 && random(70) == 0 {
                    counts.iter_mut().for_each(|c| *c /= 2);
                    since += 1;
                }
                if heap.len() == slots {
                    let rank = |key: ExpertKey| counts[usize::from(key.expert.0)];
                    let mut is_held = |key| key == held;
                    let found = heap.victim(epoch, Motion::Rising(since), &mut is_held, &rank);
                    assert_eq!(
                        found,
                        scan.victim(epoch, Motion::Free, &mut is_held, &rank),
                        "step {step}, {slots} slots"
                    );
                    chosen += 1;
                }
                let epoch = if random(10) == 0 { Epoch(0) } else { epoch };
                assert_eq!(heap.insert(key, epoch), scan.insert(key, epoch));
            }
            assert!(chosen > 500, "{chosen} victims of {slots} slots");
            assert!(heap.rising.heap.len() <= 2 * slots + 2 * CANDIDATES_MIN);
        }
    }
}
