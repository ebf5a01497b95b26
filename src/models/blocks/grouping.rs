//! Rows of a pass grouped by the experts that they use, on the host.
//! Never touches weights or activations. Surprising fact: experts pass by in rising order whatever their scores, because that is the order
//! in which they lie in the file and the order in which their outputs are added.

use std::ops::Range;

use super::guess::Guess;
use crate::units::ExpertIdx;

/// Assignments of rows to experts, sorted by expert; memory that is kept from layer to layer.
#[derive(Default)]
pub struct Grouping {
    /// `[rows, k]` as the router chose.
    pub ids: Vec<i32>,
    /// Distinct experts; see [`Grouping::group`].
    pub active: Vec<ExpertIdx>,
    /// By assignment (expert, then row): its row, counted from the first grouped one.
    pub rows: Vec<i32>,
    /// By assignment: its position in `ids`, where its weight is, too.
    pub places: Vec<i32>,
    /// First assignment of each expert, and the end of the last.
    starts: Vec<usize>,
    /// Where the next assignment of each expert goes, while sorting.
    next: Vec<usize>,
    pub guess: Guess,
}

impl Grouping {
    /// Room for `rows` rows with `k` experts each.
    pub fn new(rows: usize, experts: usize, k: usize) -> Self {
        Self {
            ids: Vec::with_capacity(rows * k),
            active: Vec::with_capacity(experts),
            rows: Vec::with_capacity(rows * k),
            places: Vec::with_capacity(rows * k),
            starts: Vec::with_capacity(experts + 1),
            next: Vec::with_capacity(experts + 1),
            guess: Guess::new(experts),
        }
    }

    /// Bytes that [`Grouping::new`] takes.
    pub fn bytes_for(rows: usize, experts: usize, k: usize) -> u64 {
        let by_expert = 2 * (experts + 1) * size_of::<usize>() + experts * size_of::<ExpertIdx>();
        (3 * rows * k * size_of::<i32>() + by_expert) as u64 + Guess::bytes_for(experts)
    }

    /// Sorts `ids` by expert; rows of one expert stay in rising order. `active` then holds the distinct experts: by rising id, but in
    /// router order for a single row, whose most important expert is asked for first.
    pub fn group(&mut self, experts: usize, k: usize) {
        self.starts.clear();
        self.starts.resize(experts + 1, 0);
        self.active.clear();
        for id in &self.ids {
            let expert = *id as usize;
            if self.starts[expert + 1] == 0 {
                self.active.push(ExpertIdx(expert as u16));
            }
            self.starts[expert + 1] += 1;
        }
        for expert in 0..experts {
            self.starts[expert + 1] += self.starts[expert];
        }
        if self.ids.len() > k {
            self.active.sort_unstable();
        }
        self.rows.resize(self.ids.len(), 0);
        self.places.resize(self.ids.len(), 0);
        self.next.clone_from(&self.starts);
        for (place, id) in self.ids.iter().enumerate() {
            let at = self.next[*id as usize];
            self.next[*id as usize] += 1;
            self.rows[at] = (place / k) as i32;
            self.places[at] = place as i32;
        }
    }

    /// The active experts by falling worth after these rows: how often they were chosen, each choice of the last rows counting seven times,
    /// since the text goes on from there (spec 7.4).
    pub fn ranked(&self, k: usize) -> Vec<ExpertIdx> {
        const LAST_ROWS: usize = 32;
        let first_late = (self.ids.len() / k.max(1)).saturating_sub(LAST_ROWS) as i32;
        let worth = |expert: &ExpertIdx| {
            let rows = &self.rows[self.range(*expert)];
            // Rows of an expert rise.
            rows.len() + 6 * (rows.len() - rows.partition_point(|row| *row < first_late))
        };
        let mut ranked: Vec<(usize, ExpertIdx)> = self.active.iter().map(|e| (worth(e), *e)).collect();
        ranked.sort_unstable_by_key(|(worth, expert)| (std::cmp::Reverse(*worth), *expert));
        ranked.into_iter().map(|(_, expert)| expert).collect()
    }

    /// Counts rows and places from `rows` rows earlier on.
    pub fn shift(&mut self, rows: usize, k: usize) {
        self.rows.iter_mut().for_each(|row| *row += rows as i32);
        self.places.iter_mut().for_each(|place| *place += (rows * k) as i32);
    }

    /// Assignments of `expert`.
    pub fn range(&self, expert: ExpertIdx) -> Range<usize> {
        self.starts[expert.0 as usize]..self.starts[expert.0 as usize + 1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assignments_are_sorted_by_expert_then_row() {
        let mut grouping = Grouping::new(3, 5, 2);
        grouping.ids.extend([4, 1, 1, 0, 3, 4]);
        grouping.group(5, 2);
        assert_eq!(grouping.active, [0, 1, 3, 4].map(ExpertIdx));
        assert_eq!([0, 1, 2, 3, 4].map(|e| grouping.range(ExpertIdx(e))), [0..1, 1..3, 3..3, 3..4, 4..6]);
        assert_eq!(grouping.rows, [1, 0, 1, 2, 0, 2]);
        assert_eq!(grouping.places, [3, 1, 2, 4, 0, 5]);
    }

    #[test]
    fn late_choices_count_most() {
        let mut grouping = Grouping::new(40, 4, 1);
        // Expert 0 in 7 early rows, 1 in the other 33 but 3 late ones, 2 in one late row, 3 in two.
        grouping.ids.extend((0..40).map(|row| if row < 7 { 0 } else { 1 }));
        grouping.ids[20] = 2;
        (grouping.ids[38], grouping.ids[39]) = (3, 3);
        grouping.group(4, 1);
        assert_eq!(grouping.ranked(1), [1, 3, 0, 2].map(ExpertIdx));
    }

    #[test]
    fn a_single_row_asks_in_router_order_and_adds_in_rising_order() {
        let mut grouping = Grouping::new(1, 5, 3);
        grouping.ids.extend([4, 0, 2]);
        grouping.group(5, 3);
        assert_eq!(grouping.active, [4, 0, 2].map(ExpertIdx));
        assert_eq!(grouping.places, [1, 2, 0]);
    }
}
