//! Small caches that live beside the real one, one a half-life, on a sample of the keys: they measure which half-life
//! would miss least. Owns their contents. Never holds bytes.
//! Surprising fact: a sixteenth of the keys is enough to tell them apart, because all shadows see the same sample.

use alloc::vec::Vec;

use crate::decay::Inflation;
use crate::ids::ExpertKey;
use crate::key_table::KeyTable;
use crate::mix::mix;
use crate::policy::Epoch;

/// Half-lives tried, in epochs (decoded tokens).
pub(crate) const HALF_LIVES: [u32; 5] = [32, 64, 128, 256, 1024];
/// Half-life used until the shadows know better: best on new text.
pub(crate) const FIRST: usize = 1;
/// Shadows hold between half of this and all of it.
const SHADOW_SLOTS_MAX: usize = 256;
/// Epochs after which a miss counts half.
const MEMORY_EPOCHS: u32 = 512;
/// A challenger must miss this share less.
const MARGIN: f32 = 0.97;
/// Misses that a challenger must be ahead by, in misses of today.
const LEAD: f32 = 4.0;

/// Decayed use counts, one a half-life.
pub(crate) type Counts = [f32; HALF_LIVES.len()];

/// Weights of a use now, one a half-life.
pub(crate) struct Weights {
    inflations: [Inflation; HALF_LIVES.len()],
    pub(crate) now: Counts,
}

impl Weights {
    pub(crate) fn new() -> Self {
        Self { inflations: HALF_LIVES.map(Inflation::new), now: [1.0; HALF_LIVES.len()] }
    }

    /// Moves to `epoch`. Returned factors must be multiplied into every count.
    pub(crate) fn advance(&mut self, epoch: Epoch) -> Option<Counts> {
        let mut factors = [1.0; HALF_LIVES.len()];
        let mut any = false;
        for (i, inflation) in self.inflations.iter_mut().enumerate() {
            if let Some(factor) = inflation.advance(epoch) {
                (factors[i], any) = (factor, true);
            }
            self.now[i] = inflation.weight();
        }
        any.then_some(factors)
    }
}

pub(crate) fn scale(counts: &mut Counts, factors: &Counts) {
    counts.iter_mut().zip(factors).for_each(|(c, f)| *c *= f);
}

pub(crate) fn add(counts: &mut Counts, weights: &Counts) {
    counts.iter_mut().zip(weights).for_each(|(c, w)| *c += w);
}

#[derive(Clone, Copy)]
struct Sampled {
    counts: Counts,
    last: Epoch,
    /// Bit per half-life: whether its shadow holds the key.
    held_by: u8,
}

/// The shadow caches and their verdict.
pub(crate) struct Shadows {
    /// A key is sampled when these bits of its hash are zero.
    mask: u32,
    slots: usize,
    ids: KeyTable<u32>,
    sampled: Vec<Sampled>,
    /// Ids held by each shadow.
    held: [Vec<u32>; HALF_LIVES.len()],
    misses: Counts,
    memory: Inflation,
    best: usize,
}

impl Shadows {
    pub(crate) fn new(slots: usize) -> Self {
        let one_in = slots.div_ceil(SHADOW_SLOTS_MAX).max(1).next_power_of_two();
        Self {
            mask: u32::try_from(one_in - 1).unwrap_or(u32::MAX),
            slots: (slots / one_in).max(1),
            ids: KeyTable::new(0),
            sampled: Vec::new(),
            held: Default::default(),
            misses: [0.0; HALF_LIVES.len()],
            memory: Inflation::new(MEMORY_EPOCHS),
            best: FIRST,
        }
    }

    /// Index into `HALF_LIVES` of the one to use.
    pub(crate) fn best(&self) -> usize {
        self.best
    }

    /// Moves to a new epoch; `factors` as `Weights::advance` gave them.
    pub(crate) fn advance(&mut self, epoch: Epoch, factors: Option<&Counts>) {
        if let Some(factors) = factors {
            self.sampled.iter_mut().for_each(|s| scale(&mut s.counts, factors));
        }
        if let Some(factor) = self.memory.advance(epoch) {
            self.misses.iter_mut().for_each(|m| *m *= factor);
        }
        let current = self.misses[self.best];
        let limit = (current * MARGIN).min(current - LEAD * self.memory.weight());
        for (i, &misses) in self.misses.iter().enumerate() {
            if misses < limit && misses < self.misses[self.best] {
                self.best = i;
            }
        }
    }

    /// Records a use.
    #[inline]
    pub(crate) fn record(&mut self, key: ExpertKey, epoch: Epoch, weights: &Counts) {
        if hash(key) & self.mask == 0 {
            self.record_sampled(key, epoch, weights);
        }
    }

    fn record_sampled(&mut self, key: ExpertKey, epoch: Epoch, weights: &Counts) {
        let id = self.ids.at(key);
        if *id == 0 {
            self.sampled.push(Sampled { counts: [0.0; HALF_LIVES.len()], last: epoch, held_by: 0 });
            *id = u32::try_from(self.sampled.len()).expect("fewer than 2^32 keys");
        }
        let at = *id as usize - 1;
        let sampled = &mut self.sampled[at];
        add(&mut sampled.counts, weights);
        sampled.last = epoch;
        let missing = !sampled.held_by;
        for shadow in (0..HALF_LIVES.len()).filter(|s| missing >> s & 1 == 1) {
            self.misses[shadow] += self.memory.weight();
            if self.held[shadow].len() < self.slots {
                self.held[shadow].push(at as u32);
            } else if let Some(place) = self.lowest(shadow, epoch) {
                let left = core::mem::replace(&mut self.held[shadow][place], at as u32);
                self.sampled[left as usize].held_by &= !(1 << shadow);
            } else {
                continue;
            }
            self.sampled[at].held_by |= 1 << shadow;
        }
    }

    /// Place of the lowest count that this epoch has not used; the lower id among equals.
    fn lowest(&self, shadow: usize, epoch: Epoch) -> Option<usize> {
        let held = self.held[shadow].iter().enumerate().map(|(place, &id)| (place, id, &self.sampled[id as usize]));
        let free = held.filter(|(.., s)| s.last < epoch);
        // Counts are never negative: their bits order as they do.
        free.min_by_key(|(_, id, s)| (s.counts[shadow].to_bits(), *id)).map(|(place, ..)| place)
    }
}

/// Spreads neighbouring keys over all bits.
fn hash(key: ExpertKey) -> u32 {
    mix(u64::from(key.layer.0) << 16 | u64::from(key.expert.0)) as u32
}
