//! Reads under way into slots: the batch that goes to the reader and the guard that every read of it ends at.
//! Owns the duty that no slot stays in Filling: what the reader drops without a word is undone when the guard goes.
//! Surprising fact: the guard holds the table but not the reader, so a reader thread may drop the last guard.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::Shared;
use super::table::{FillEnd, SlotIdx};
use crate::storage::reader::request::ReadSink;
use crate::storage::reader::{BatchId, ReadRequest, ReadResult};

/// Reads of all parts of some fills.
#[derive(Default)]
pub(super) struct Batch {
    pub requests: Vec<ReadRequest>,
    /// The fills with their serial numbers.
    pub fills: Vec<(SlotIdx, u64)>,
    /// Batches under way that a request has come to wait for.
    pub promote: Vec<BatchId>,
}

impl Batch {
    pub fn is_empty(&self) -> bool {
        self.fills.is_empty()
    }
}

/// Parts of an expert: gate, up, down.
pub(super) const PARTS: usize = 3;

pub(super) fn tag_of(slot: SlotIdx, part: usize) -> u64 {
    u64::from(slot) * PARTS as u64 + part as u64
}

/// Takes the results of one batch to the table.
pub(super) struct FillGuard {
    shared: Arc<Shared>,
    fills: Vec<(SlotIdx, u64)>,
    reads_left: AtomicUsize,
}

impl FillGuard {
    pub fn new(shared: Arc<Shared>, batch: &Batch) -> Self {
        Self { shared, fills: batch.fills.clone(), reads_left: AtomicUsize::new(batch.requests.len()) }
    }

    /// Slots of the batch with their serials.
    pub fn fills(&self) -> &[(SlotIdx, u64)] {
        &self.fills
    }

    /// Experts of the batch.
    pub fn experts(&self) -> usize {
        self.fills.len()
    }

    fn announce(&self, end: FillEnd, has_room_waiters: bool) {
        if end == FillEnd::Pending {
            return;
        }
        self.shared.landed.notify_all();
        if has_room_waiters {
            self.shared.room.notify_all();
        }
    }
}

impl ReadSink for FillGuard {
    fn landed(&self, tag: u64, result: ReadResult) -> Option<ReadRequest> {
        let slot = (tag / PARTS as u64) as SlotIdx;
        let part = (tag % PARTS as u64) as usize;
        let mut table = self.shared.table.lock();
        let end = table.land(slot, part, result);
        let has_room_waiters = table.room_waiters > 0;
        drop(table);
        self.reads_left.fetch_sub(1, Ordering::Relaxed);
        self.announce(end, has_room_waiters);
        None
    }
}

impl Drop for FillGuard {
    fn drop(&mut self) {
        if *self.reads_left.get_mut() == 0 {
            return;
        }
        let mut table = self.shared.table.lock();
        for &(slot, serial) in &self.fills {
            table.abandon(slot, serial);
        }
        drop(table);
        self.announce(FillEnd::Failed, true);
    }
}
