//! Misses of LRU at every cache size, in one pass. Owns the stack of recency of one size class.
//! Never holds more than a few words an expert, however long the trace.
//! Surprising fact: the depth at which a use finds its expert is the smallest cache that would have hit.

use alloc::vec::Vec;

const UNUSED: u32 = u32::MAX;

/// Counts of uses by stack distance.
pub struct MissCurve {
    /// Time of the last use of each expert; times are renumbered when they run out.
    last: Vec<u32>,
    /// Fenwick tree over times: 1 where some expert was last used.
    tree: Vec<u32>,
    now: usize,
    /// Uses found at depth d + 1.
    depths: Vec<u64>,
    /// First uses ever: misses at every size.
    first_uses: u64,
    used: usize,
    uses: u64,
}

impl MissCurve {
    /// A curve over experts numbered below `experts_total`.
    pub fn new(experts_total: usize) -> Self {
        Self {
            last: alloc::vec![UNUSED; experts_total],
            // Twice the experts: renumbering then costs less than one step a use.
            tree: alloc::vec![0; 2 * experts_total.max(1) + 1],
            now: 0,
            depths: alloc::vec![0; experts_total],
            first_uses: 0,
            used: 0,
            uses: 0,
        }
    }

    /// Records a use of expert `number`. Uses of one request count in request order.
    pub fn record(&mut self, number: usize) {
        self.pass(number, true);
    }

    /// As `record`, without counting the use: a first pass that only warms the cache.
    pub fn warm(&mut self, number: usize) {
        self.pass(number, false);
    }

    /// Records the uses of one request together: each is looked up before any of them counts as newer, as a cache does that
    /// serves the hits of a request first. A use that is not counted only warms.
    pub fn record_request(&mut self, numbers: impl Iterator<Item = usize> + Clone, is_counted: bool) {
        for number in numbers.clone() {
            self.look_up(number, is_counted);
        }
        numbers.for_each(|number| self.refresh(number));
    }

    fn pass(&mut self, number: usize, is_counted: bool) {
        self.look_up(number, is_counted);
        self.refresh(number);
    }

    /// Counts the depth at which `number` lies.
    fn look_up(&mut self, number: usize, is_counted: bool) {
        self.uses += u64::from(is_counted);
        let last = self.last[number];
        if last == UNUSED {
            self.first_uses += u64::from(is_counted);
        } else {
            let newer = self.used - self.used_up_to(last as usize);
            self.depths[newer] += u64::from(is_counted);
        }
    }

    /// Makes `number` the latest.
    fn refresh(&mut self, number: usize) {
        if self.now + 1 == self.tree.len() {
            self.renumber();
        }
        match self.last[number] {
            UNUSED => self.used += 1,
            last => self.add(last as usize, u32::MAX),
        }
        self.last[number] = self.now as u32;
        self.add(self.now, 1);
        self.now += 1;
    }

    /// Uses recorded.
    pub fn uses(&self) -> u64 {
        self.uses
    }

    /// Misses of an LRU cache of `slots` experts.
    pub fn misses(&self, slots: usize) -> u64 {
        self.first_uses + self.depths.iter().skip(slots).sum::<u64>()
    }

    /// Misses at every size from 0 to all experts: `[experts_total + 1]`, falling.
    pub fn all(&self) -> Vec<u64> {
        let mut misses: Vec<u64> = Vec::with_capacity(self.depths.len() + 1);
        misses.push(self.first_uses);
        for &uses in self.depths.iter().rev() {
            misses.push(misses[misses.len() - 1] + uses);
        }
        misses.reverse();
        misses
    }

    fn add(&mut self, time: usize, by: u32) {
        let mut i = time + 1;
        while i < self.tree.len() {
            self.tree[i] = self.tree[i].wrapping_add(by);
            i += i & i.wrapping_neg();
        }
    }

    /// Experts last used at or before `time`.
    fn used_up_to(&self, time: usize) -> usize {
        let (mut i, mut sum) = (time + 1, 0usize);
        while i > 0 {
            sum += self.tree[i] as usize;
            i &= i - 1;
        }
        sum
    }

    /// Gives the last uses the times 0, 1, 2, ... in their order.
    fn renumber(&mut self) {
        let mut order: Vec<u32> = (0..self.last.len() as u32).filter(|&n| self.last[n as usize] != UNUSED).collect();
        order.sort_unstable_by_key(|&n| self.last[n as usize]);
        self.tree.fill(0);
        for (time, number) in order.iter().enumerate() {
            self.last[*number as usize] = time as u32;
            self.add(time, 1);
        }
        self.now = order.len();
    }
}

/// The size after which more slots win less than the average slot between `from` and the end: the point of the curve
/// farthest below the line from (`from`, misses there) to its end. `misses` as `MissCurve::all` gives them, or sampled
/// at equal steps. `None` when fewer than three sizes remain or nothing falls.
pub fn knee(misses: &[u64], from: usize) -> Option<usize> {
    let tail = misses.get(from..).filter(|t| t.len() >= 3)?;
    let (first, last) = (tail[0], tail[tail.len() - 1]);
    let fall = i128::from(first) - i128::from(last);
    let steps = tail.len() as i128 - 1;
    // Depth below the line, times `steps`.
    let depth = |i: usize| (i128::from(first) - i128::from(tail[i])) * steps - fall * i as i128;
    let deepest = (1..tail.len() - 1).max_by_key(|&i| (depth(i), core::cmp::Reverse(i)))?;
    (depth(deepest) > 0).then_some(from + deepest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knee_is_where_the_fall_ends() {
        assert_eq!(knee(&[100, 60, 20, 10, 9, 8, 7], 0), Some(2));
        assert_eq!(knee(&[500, 100, 60, 20, 10, 9, 8, 7], 1), Some(3));
        assert_eq!(knee(&[100, 80, 60, 40, 20], 0), None, "a straight line has no knee");
        assert_eq!(knee(&[7, 7, 7, 7], 0), None);
        assert_eq!(knee(&[9, 1], 0), None);
        assert_eq!(knee(&[9, 1], 5), None);
    }
}
