//! Residents of a score-based policy and the choice of the lowest ranked one. Owns membership and pins.
//! Never computes a rank: the policy gives it. Surprising fact: ranks are computed once an epoch, since within an epoch
//! only used keys change their rank, and used keys are pinned.

use alloc::vec::Vec;

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
        // Of the preloads the last leaves first: they come by falling popularity.
        self.candidates.extend(free.map(|r| match r.cold {
            Some(serial) => (false, u64::MAX - serial, r.key),
            None => (true, rank(r.key), r.key),
        }));
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
