//! Lengths that a sequence can go back to: parts of the past whose every row of every ring was computed.
//! Never says whether the rows are still in the rings. Surprising fact: a sweep may leave out rows that nothing sees, so the past has gaps
//! that no state can be continued from.

use std::collections::VecDeque;

/// Parts that are remembered; older ones have left the rings long before, except in tiny sweeps.
const PARTS_MAX: usize = 16;

/// First and last lengths of parts of the past, oldest first.
pub struct Spans {
    parts: VecDeque<(usize, usize)>,
}

impl Default for Spans {
    fn default() -> Self {
        Self { parts: VecDeque::with_capacity(PARTS_MAX + 1) }
    }
}

impl Spans {
    /// Forgets all of them.
    pub fn clear(&mut self) {
        self.parts.clear();
    }

    /// Only this one.
    pub fn reset_to(&mut self, from: usize, to: usize) {
        self.parts.clear();
        self.parts.push_back((from, to));
    }

    /// Whether all rows around `len` were computed.
    pub fn contains(&self, len: usize) -> bool {
        self.parts.iter().any(|&(from, to)| (from..=to).contains(&len))
    }

    /// A sweep of `rows` rows ended at `len`; the last `reach` of them can be taken back.
    pub fn commit(&mut self, len: usize, rows: usize, reach: usize) {
        match self.parts.back_mut() {
            Some(part) if reach >= rows => part.1 = len,
            _ => self.parts.push_back((len - reach.min(rows), len)),
        }
        if self.parts.len() > PARTS_MAX {
            self.parts.pop_front();
        }
    }

    /// Forgets what is behind `len`.
    pub fn cut(&mut self, len: usize) {
        self.parts.retain(|&(from, _)| from <= len);
        if let Some(part) = self.parts.back_mut() {
            part.1 = part.1.min(len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_stay_gaps() {
        let mut spans = Spans::default();
        spans.commit(10, 10, 10);
        spans.commit(12, 2, 2);
        spans.commit(100, 88, 8);
        let reached = |spans: &Spans| (0..=101).filter(|len| spans.contains(*len)).collect::<Vec<_>>();
        assert_eq!(reached(&spans), (0..=12).chain(92..=100).collect::<Vec<_>>());
        spans.cut(95);
        assert_eq!(reached(&spans), (0..=12).chain(92..=95).collect::<Vec<_>>());
        spans.cut(5);
        assert_eq!(reached(&spans), (0..=5).collect::<Vec<_>>());
        spans.reset_to(3, 4);
        assert_eq!(reached(&spans), [3, 4]);
    }
}
