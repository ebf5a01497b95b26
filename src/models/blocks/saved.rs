//! Pieces of a saved state that every architecture has: rows of a ring by position, long lists, and the numbers that say how much there is.
//! Never rounds or packs: a piece holds the values as they are. Surprising fact: rings are saved by position and not by slot, so a state
//! saved under one chunk length, sweep width or device loads under any other.

use crate::backend::Backend;
use crate::models::state::{StateError, StateSink, StateSource};

/// Values of a long buffer that go at a time. Part of the format: pieces are cut here.
const PIECE_VALUES: usize = 1 << 18;

/// A number of a saved state, if it is at most `most`.
///
/// # Errors
/// It is not.
pub fn at_most(what: &'static str, found: u64, most: usize) -> Result<usize, StateError> {
    match usize::try_from(found) {
        Ok(number) if number <= most => Ok(number),
        _ => Err(StateError::mismatch(what, found, format!("at most {most}"))),
    }
}

/// Refuses a state whose numbers of the piece `name` are not those of `expected`: what two models must have in common for a state of one to
/// mean anything to the other.
///
/// # Errors
/// Other numbers.
pub fn expect_shape(name: &'static str, expected: &[u64], source: &mut dyn StateSource) -> Result<(), StateError> {
    let mut found = expected.to_vec();
    source.numbers(name, &mut found)?;
    if found != expected {
        return Err(StateError::mismatch("its shape", format!("{found:?}"), format!("{expected:?}")));
    }
    Ok(())
}

/// Parts of `first..end` that lie side by side in a ring of `slots`: first position, first slot, count.
pub fn ring_parts(first: usize, end: usize, slots: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    let mut at = first;
    std::iter::from_fn(move || {
        let count = (end - at).min(slots - at % slots);
        let part = (at, at % slots, count);
        at += count;
        (count > 0).then_some(part)
    })
}

/// Rows of a ring that a state holds: the last `count` before `end`, `width` values each.
#[derive(Clone, Copy)]
pub struct LastRows {
    /// Slots of the ring.
    pub slots: usize,
    pub width: usize,
    pub end: usize,
    pub count: usize,
}

impl LastRows {
    /// Gives the rows to `sink`, oldest first.
    ///
    /// # Errors
    /// Those of device and sink.
    pub fn save<B: Backend>(
        self,
        name: &str,
        ring: &B::Buf,
        backend: &B,
        sink: &mut dyn StateSink,
        host: &mut Vec<f32>,
    ) -> Result<(), StateError> {
        host.resize(self.count * self.width, 0.0);
        for (at, slot, rows) in self.parts() {
            backend.download(ring, slot * self.width, &mut host[at..at + rows])?;
        }
        sink.values(name, host)
    }

    /// Undoes [`LastRows::save`].
    ///
    /// # Errors
    /// Those of device and source.
    pub fn load<B: Backend>(
        self,
        name: &'static str,
        ring: &mut B::Buf,
        backend: &B,
        source: &mut dyn StateSource,
        host: &mut Vec<f32>,
    ) -> Result<(), StateError> {
        host.resize(self.count * self.width, 0.0);
        source.values(name, host)?;
        for (at, slot, rows) in self.parts() {
            backend.upload(&host[at..at + rows], ring, slot * self.width)?;
        }
        Ok(())
    }

    /// First value on the host, first slot, values.
    fn parts(self) -> impl Iterator<Item = (usize, usize, usize)> {
        let first = self.end - self.count;
        ring_parts(first, self.end, self.slots)
            .map(move |(at, slot, rows)| ((at - first) * self.width, slot, rows * self.width))
    }
}

/// Gives the first `values` of a list to `sink`, in pieces.
///
/// # Errors
/// Those of device and sink.
pub fn save_list<B: Backend>(
    name: &str,
    (list, values): (&B::Buf, usize),
    backend: &B,
    sink: &mut dyn StateSink,
    host: &mut Vec<f32>,
) -> Result<(), StateError> {
    for first in (0..values).step_by(PIECE_VALUES) {
        host.resize(PIECE_VALUES.min(values - first), 0.0);
        backend.download(list, first, host)?;
        sink.values(name, host)?;
    }
    Ok(())
}

/// Undoes [`save_list`].
///
/// # Errors
/// Those of device and source.
pub fn load_list<B: Backend>(
    name: &'static str,
    (list, values): (&mut B::Buf, usize),
    backend: &B,
    source: &mut dyn StateSource,
    host: &mut Vec<f32>,
) -> Result<(), StateError> {
    for first in (0..values).step_by(PIECE_VALUES) {
        host.resize(PIECE_VALUES.min(values - first), 0.0);
        source.values(name, host)?;
        backend.upload(host, list, first)?;
    }
    Ok(())
}

/// As [`LastRows::save`] for one row that is no ring.
///
/// # Errors
/// Those of device and sink.
pub fn save_row<B: Backend>(
    name: &str,
    (row, width): (&B::Buf, usize),
    backend: &B,
    sink: &mut dyn StateSink,
    host: &mut Vec<f32>,
) -> Result<(), StateError> {
    LastRows { slots: 1, width, end: 1, count: 1 }.save(name, row, backend, sink, host)
}

/// Undoes [`save_row`].
///
/// # Errors
/// Those of device and source.
pub fn load_row<B: Backend>(
    name: &'static str,
    (row, width): (&mut B::Buf, usize),
    backend: &B,
    source: &mut dyn StateSource,
    host: &mut Vec<f32>,
) -> Result<(), StateError> {
    LastRows { slots: 1, width, end: 1, count: 1 }.load(name, row, backend, source, host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_ring() {
        let parts = |first, end| ring_parts(first, end, 10).collect::<Vec<_>>();
        assert_eq!(parts(3, 7), [(3, 3, 4)]);
        assert_eq!(parts(8, 15), [(8, 8, 2), (10, 0, 5)]);
        assert_eq!(parts(20, 30), [(20, 0, 10)]);
        assert!(parts(5, 5).is_empty());
    }
}
