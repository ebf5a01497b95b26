//! Frontiers of a timeline kept in memory: the places that it can go back to without computing them again.
//! Never holds more of them than it was told. Surprising fact: each is small, because rows that are only ever appended stay where they are;
//! an image is what a sequence overwrites as it moves on, and holds as long as the tokens before it do.

use serde::{Deserialize, Serialize};

use crate::models::ModelRunner;
use crate::models::state::{ROLLBACK_ROWS, StateError, StatePart, StateSink, StateSource};

/// A saved state in memory.
#[derive(Default, Clone, PartialEq, Debug)]
pub struct MemoryState {
    numbers: Vec<u64>,
    values: Vec<f32>,
    /// Name and count of each piece; whether it is one of numbers.
    pieces: Vec<(Box<str>, usize, bool)>,
}

impl MemoryState {
    fn clear(&mut self) {
        self.numbers.clear();
        self.values.clear();
        self.pieces.clear();
    }

    /// Bytes of its numbers and values.
    pub fn bytes(&self) -> u64 {
        (8 * self.numbers.len() + 4 * self.values.len()) as u64
    }

    /// Gives all pieces to `sink`.
    ///
    /// # Errors
    /// What the sink says.
    pub fn replay(&self, sink: &mut dyn StateSink) -> Result<(), StateError> {
        let (mut numbers, mut values) = (&self.numbers[..], &self.values[..]);
        for (name, count, is_numbers) in &self.pieces {
            if *is_numbers {
                sink.numbers(name, numbers.split_off(..*count).expect("counted when they came"))?;
            } else {
                sink.values(name, values.split_off(..*count).expect("counted when they came"))?;
            }
        }
        Ok(())
    }

    /// Reads it from the start.
    pub fn reader(&self) -> MemoryReader<'_> {
        MemoryReader { state: self, piece: 0, numbers: 0, values: 0 }
    }
}

impl StateSink for MemoryState {
    // Exactly, since the plan counts it.
    fn room(&mut self, numbers: usize, values: usize) {
        self.numbers.reserve_exact(numbers);
        self.values.reserve_exact(values);
    }

    fn numbers(&mut self, name: &str, numbers: &[u64]) -> Result<(), StateError> {
        self.numbers.extend_from_slice(numbers);
        self.pieces.push((name.into(), numbers.len(), true));
        Ok(())
    }

    fn values(&mut self, name: &str, values: &[f32]) -> Result<(), StateError> {
        self.values.extend_from_slice(values);
        self.pieces.push((name.into(), values.len(), false));
        Ok(())
    }
}

/// A place in a [`MemoryState`].
pub struct MemoryReader<'a> {
    state: &'a MemoryState,
    piece: usize,
    numbers: usize,
    values: usize,
}

impl MemoryReader<'_> {
    fn expect(&mut self, name: &'static str, count: usize, is_numbers: bool) -> Result<(), StateError> {
        let found = self.state.pieces.get(self.piece);
        self.piece += 1;
        if found.is_some_and(|found| (&*found.0, found.1, found.2) == (name, count, is_numbers)) {
            return Ok(());
        }
        let shown = found.map_or("nothing".into(), |(name, count, _)| format!("{count} of {name}"));
        Err(StateError::mismatch("a piece", shown, format!("{count} of {name}")))
    }
}

impl StateSource for MemoryReader<'_> {
    fn numbers(&mut self, name: &'static str, numbers: &mut [u64]) -> Result<(), StateError> {
        self.expect(name, numbers.len(), true)?;
        numbers.copy_from_slice(&self.state.numbers[self.numbers..][..numbers.len()]);
        self.numbers += numbers.len();
        Ok(())
    }

    fn values(&mut self, name: &'static str, values: &mut [f32]) -> Result<(), StateError> {
        self.expect(name, values.len(), false)?;
        values.copy_from_slice(&self.state.values[self.values..][..values.len()]);
        self.values += values.len();
        Ok(())
    }
}

/// What a kept frontier leads to, from shortest to longest, and the number of its pieces.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ImageMark {
    pub from: u64,
    pub to: u64,
    pub pieces: u64,
}

/// A frontier, and the lengths that it leads to.
struct Image {
    from: usize,
    to: usize,
    state: MemoryState,
}

/// The frontiers of one timeline, by rising length.
pub struct Images {
    most: usize,
    kept: Vec<Image>,
    /// Memory of those that were dropped.
    spare: Vec<MemoryState>,
}

impl Images {
    /// Room for `most`.
    pub fn new(most: usize) -> Self {
        Self { most, kept: Vec::with_capacity(most), spare: Vec::new() }
    }

    /// Number of frontiers that are kept.
    pub fn count(&self) -> usize {
        self.kept.len()
    }

    /// Most frontiers that are kept.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Keeps the present frontier of `runner`, unless one for this length is there.
    ///
    /// # Errors
    /// A state that cannot be saved.
    pub fn take(&mut self, runner: &mut dyn ModelRunner) -> Result<(), StateError> {
        let len = runner.len();
        if self.most == 0 || len == 0 || self.kept.last().is_some_and(|image| image.to == len) {
            return Ok(());
        }
        if self.kept.len() == self.most {
            self.drop_least();
        }
        let mut state = self.spare.pop().unwrap_or_default();
        state.clear();
        runner.save_state(StatePart::Frontier, &mut state)?;
        let back = (1..=ROLLBACK_ROWS.min(len)).take_while(|back| runner.reach(len - back) == len - back).count();
        self.kept.push(Image { from: len - back, to: len, state });
        Ok(())
    }

    /// The frontiers, as a file knows them.
    pub fn marks(&self) -> Vec<ImageMark> {
        let mark = |image: &Image| ImageMark {
            from: image.from as u64,
            to: image.to as u64,
            pieces: image.state.pieces.len() as u64,
        };
        self.kept.iter().map(mark).collect()
    }

    /// Gives all frontiers to `sink`, in the order of their marks.
    ///
    /// # Errors
    /// What the sink says.
    pub fn save_to(&self, sink: &mut dyn StateSink) -> Result<(), StateError> {
        self.kept.iter().try_for_each(|image| image.state.replay(sink))
    }

    /// Takes a frontier that was saved, longer than all that are kept; drops another one if there is no room.
    pub fn adopt(&mut self, (from, to): (usize, usize), state: MemoryState) {
        if self.most == 0 {
            return;
        }
        if self.kept.len() == self.most {
            self.drop_least();
            self.spare.pop();
        }
        self.kept.push(Image { from, to, state });
    }

    /// Drops the frontier that leaves the smallest gap.
    fn drop_least(&mut self) {
        let lengths: Vec<usize> = self.kept.iter().map(|image| image.to).collect();
        let image = self.kept.remove(least(&lengths));
        self.spare.push(image.state);
    }

    /// The frontier from which the most of the first `len` tokens can be had, and how many these are.
    pub fn best(&self, len: usize) -> Option<(usize, &MemoryState)> {
        let usable = self.kept.iter().filter(|image| image.from <= len);
        usable.map(|image| (image.to.min(len), &image.state)).max_by_key(|(len, _)| *len)
    }

    /// The timeline went back to `len` tokens: what was seen behind them no longer counts.
    pub fn cut(&mut self, len: usize) {
        while self.kept.last().is_some_and(|image| image.from > len || len == 0) {
            self.spare.extend(self.kept.pop().map(|image| image.state));
        }
        self.kept.iter_mut().for_each(|image| image.to = image.to.min(len));
        // Of two that lead to the same length now, the earlier one reaches further back.
        self.kept.dedup_by_key(|image| image.to);
    }
}

/// Place of the length whose neighbours (0 before the first one) are nearest to each other; never the last, which a timeline is likeliest to
/// go back to, unless it is the only one.
fn least(lengths: &[usize]) -> usize {
    let before = |at: usize| if at == 0 { 0 } else { lengths[at - 1] };
    (0..lengths.len().saturating_sub(1)).min_by_key(|&at| lengths[at + 1] - before(at)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_gap_goes() {
        assert_eq!(least(&[100]), 0);
        assert_eq!(least(&[100, 110, 500]), 0);
        assert_eq!(least(&[300, 310, 320, 900]), 1);
        assert_eq!(least(&[10, 1000, 2000, 3000]), 0);
    }

    #[test]
    fn cutting_keeps_what_leads_there() {
        let image = |from, to| Image { from, to, state: MemoryState::default() };
        let kept = vec![image(92, 100), image(192, 200), image(292, 300)];
        let mut images = Images { most: 4, kept, spare: Vec::new() };
        assert_eq!(images.best(250).map(|(len, _)| len), Some(200));
        assert_eq!(images.best(199).map(|(len, _)| len), Some(199));
        assert_eq!(images.best(191).map(|(len, _)| len), Some(100));
        assert_eq!(images.best(91).map(|(len, _)| len), None);
        images.cut(195);
        assert_eq!((images.count(), images.best(1000).map(|(len, _)| len)), (2, Some(195)));
        images.cut(0);
        assert_eq!((images.count(), images.spare.len()), (0, 3));
        let kept = vec![image(192, 200), image(196, 204)];
        let mut images = Images { most: 4, kept, spare: Vec::new() };
        images.cut(198);
        assert_eq!((images.count(), images.best(1000).map(|(len, _)| len)), (1, Some(198)));
        assert_eq!(images.best(192).map(|(len, _)| len), Some(192));
    }

    #[test]
    fn pieces_come_back_in_their_order_or_not_at_all() {
        let mut state = MemoryState::default();
        state.numbers("n", &[7, 8]).unwrap();
        state.values("v", &[1.5, -0.0]).unwrap();
        let (mut numbers, mut values) = ([0; 2], [0.0; 2]);
        let mut reader = state.reader();
        reader.numbers("n", &mut numbers).unwrap();
        reader.values("v", &mut values).unwrap();
        assert_eq!((numbers, values.map(f32::to_bits)), ([7, 8], [1.5f32, -0.0].map(f32::to_bits)));
        assert!(reader.values("v", &mut values).is_err());
        assert!(state.reader().values("n", &mut values).is_err());
        assert!(state.reader().numbers("n", &mut [0; 3]).is_err());
        assert_eq!(state.bytes(), 24);
        let mut copy = MemoryState::default();
        state.replay(&mut copy).unwrap();
        assert_eq!(copy, state);
    }
}
