//! Rows of the last tokens, position `p` in slot `p mod slots`. Never moves a row.
//! Surprising fact: a ring is longer than what is looked back on by one chunk. A whole chunk is written before it is read, and what it
//! overwrites is older than anything that the rows at the end still see, so a chunk that fails leaves no trace. A sweep of several chunks
//! overwrites more, so it begins with a copy.

use super::saved::LastRows;
use crate::backend::{Backend, BackendError, ops};
use crate::models::RunnerOptions;
use crate::models::state::ROLLBACK_ROWS;

/// Shape of a ring.
#[derive(Clone, Copy)]
pub struct RingShape {
    /// Values of a row.
    pub width: usize,
    /// Rows before the current one that are looked at, at most.
    pub look_back: usize,
}

impl RingShape {
    /// Rows that may be written behind an end without harm to it: a chunk, or what may be taken back.
    pub fn slack(options: &RunnerOptions) -> usize {
        options.chunk.max(ROLLBACK_ROWS)
    }

    /// Slots of the ring.
    pub fn slots(self, options: &RunnerOptions) -> usize {
        self.look_back + 1 + Self::slack(options)
    }

    /// Values that a sweep of several chunks may overwrite.
    fn saved(self, options: &RunnerOptions) -> usize {
        if options.sweep_rows() > options.chunk { self.look_back * self.width } else { 0 }
    }

    /// Bytes of the ring and its copy.
    pub fn bytes(self, options: &RunnerOptions) -> u64 {
        4 * (self.slots(options) * self.width + self.saved(options)) as u64
    }
}

/// A ring of rows.
pub struct Ring<B: Backend> {
    pub rows: B::Buf,
    pub slots: usize,
    shape: RingShape,
    /// `[look_back, width]` as of the last `save`.
    saved: Option<B::Buf>,
}

impl<B: Backend> Ring<B> {
    /// An empty ring.
    pub fn new(
        what: &'static str,
        shape: RingShape,
        options: &RunnerOptions,
        backend: &B,
    ) -> Result<Self, BackendError> {
        let (slots, saved) = (shape.slots(options), shape.saved(options));
        let saved = (saved > 0).then(|| backend.alloc(what, saved)).transpose()?;
        Ok(Self { rows: backend.alloc(what, slots * shape.width)?, slots, shape, saved })
    }

    /// The last `count` rows before position `end`, as a saved state holds them.
    pub fn last(&self, end: usize, count: usize) -> LastRows {
        LastRows { slots: self.slots, width: self.shape.width, end, count }
    }

    /// Values of a row.
    pub fn width(&self) -> usize {
        self.shape.width
    }

    /// Writes `[rows, width]` from position `first_pos` on.
    pub fn store(&mut self, backend: &B, src: &B::Buf, rows: usize, first_pos: usize) -> Result<(), BackendError> {
        let (width, slots) = (self.shape.width, self.slots);
        let op = ops::StoreRows { src, rows, width, first_slot: first_pos % slots, slots };
        backend.store_rows(op, &mut self.rows)
    }

    /// Keeps a copy of what a sweep of `rows` rows behind `len` tokens may overwrite.
    pub fn save(&mut self, backend: &B, len: usize, rows: usize) -> Result<(), BackendError> {
        self.copy_saved(backend, len, rows, true)
    }

    /// Brings back what `save` kept.
    pub fn restore(&mut self, backend: &B, len: usize, rows: usize) -> Result<(), BackendError> {
        self.copy_saved(backend, len, rows, false)
    }

    fn copy_saved(&mut self, backend: &B, len: usize, rows: usize, is_save: bool) -> Result<(), BackendError> {
        let seen = len.min(self.shape.look_back);
        let (Some(saved), true) = (&mut self.saved, rows + seen > self.slots) else {
            return Ok(());
        };
        let (width, first) = (self.shape.width, (len - seen) % self.slots);
        // The ring wraps once at most.
        let before_end = seen.min(self.slots - first);
        for (ring_at, saved_at, count) in [(first, 0, before_end), (0, before_end, seen - before_end)] {
            let (ring_at, saved_at, count) = (ring_at * width, saved_at * width, count * width);
            match is_save {
                true => backend.copy(&self.rows, ring_at, saved, saved_at, count)?,
                false => backend.copy(saved, saved_at, &mut self.rows, ring_at, count)?,
            }
        }
        Ok(())
    }

    /// Bytes that the buffers really take.
    pub fn allocated_bytes(&self, backend: &B) -> u64 {
        4 * (backend.len(&self.rows) + self.saved.as_ref().map_or(0, |s| backend.len(s))) as u64
    }
}
