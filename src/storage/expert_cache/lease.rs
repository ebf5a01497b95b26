//! A hold on requested experts. Owns the order in which they are handed out; never evicts, never reads.
//! Surprising fact: dropping a lease early leaves its reads running: they fill the cache for whoever comes next.

use std::collections::VecDeque;
use std::sync::Arc;

use cache_policy::Phase;

use super::fill::PARTS;
use super::table::{Filled, Look, SlotIdx};
use super::{CacheError, Shared};
use crate::obs::stall::Patience;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Its read is under way.
    Pending,
    /// In memory, not handed out.
    Present,
    /// Handed out.
    Given,
    /// Its read failed; there is no hold.
    Failed,
}

struct Entry {
    slot: SlotIdx,
    /// The fill that is waited for or held.
    serial: u64,
    stage: Stage,
    bytes: Option<Arc<Filled>>,
}

/// The buffers of a lease, reused from one request to the next.
#[derive(Default)]
pub(super) struct LeaseParts {
    /// By position in the request.
    entries: Vec<Entry>,
    /// Positions in memory and not handed out.
    ready: VecDeque<usize>,
    /// Scratch: positions that have landed, by landing order.
    landed: Vec<(u64, usize)>,
    pending: usize,
}

impl LeaseParts {
    /// Adds the next requested expert; `bytes` is `None` while its read is under way.
    pub fn push(&mut self, slot: SlotIdx, serial: u64, bytes: Option<Arc<Filled>>) {
        let stage = if bytes.is_some() { Stage::Present } else { Stage::Pending };
        match stage {
            Stage::Present => self.ready.push_back(self.entries.len()),
            _ => self.pending += 1,
        }
        self.entries.push(Entry { slot, serial, stage, bytes });
    }
}

/// Requested experts, held until this is dropped.
pub struct Lease<'a> {
    shared: &'a Shared,
    phase: Phase,
    parts: LeaseParts,
    /// Whether it answers a request: others overlap with none.
    is_request: bool,
}

impl<'a> Lease<'a> {
    pub(super) fn new(shared: &'a Shared, phase: Phase, parts: LeaseParts) -> Self {
        Self { shared, phase, parts, is_request: true }
    }

    /// A hold on what is in memory, for a copy that nobody has requested.
    pub(super) fn of_copy(shared: &'a Shared, parts: LeaseParts) -> Self {
        Self { shared, phase: Phase::Decode, parts, is_request: false }
    }

    /// Experts requested.
    pub fn len(&self) -> usize {
        self.parts.entries.len()
    }

    /// Whether no expert was requested.
    pub fn is_empty(&self) -> bool {
        self.parts.entries.is_empty()
    }

    /// Experts whose reads are not known to have ended.
    pub fn pending(&self) -> usize {
        self.parts.pending
    }

    /// Position in the requested ids of an expert that is in memory and was not handed out before: those present at the
    /// request first, in the order of the request, then each in landing order (blocks). `None` when all were handed out.
    ///
    /// # Errors
    /// The first read that failed, once an expert; the other experts of the lease stay usable.
    pub fn next_ready(&mut self) -> Result<Option<usize>, CacheError> {
        loop {
            if let Some(position) = self.parts.ready.pop_front() {
                self.parts.entries[position].stage = Stage::Given;
                return Ok(Some(position));
            }
            if self.parts.pending == 0 {
                return Ok(None);
            }
            self.wait_for_landing()?;
        }
    }

    /// Gate, up and down bytes of the expert at `position`, exactly as they lie in the file. `next_ready` must have handed
    /// it out.
    pub fn slices(&self, position: usize) -> [&[u8]; PARTS] {
        let bytes = self.parts.entries[position].bytes.as_ref();
        bytes.expect("slices of an expert that next_ready has not handed out").slices()
    }

    /// Waits until at least one pending expert has landed, and queues all that have.
    fn wait_for_landing(&mut self) -> Result<(), CacheError> {
        let LeaseParts { entries, ready, landed, pending } = &mut self.parts;
        let mut table = self.shared.table.lock();
        let mut patience: Option<Patience> = None;
        loop {
            let mut failure = None;
            for (position, entry) in entries.iter_mut().enumerate().filter(|(_, e)| e.stage == Stage::Pending) {
                match table.look(entry.slot, entry.serial) {
                    Look::Pending => {}
                    Look::Ready { bytes, landing } => {
                        (entry.stage, entry.bytes) = (Stage::Present, Some(bytes));
                        landed.push((landing, position));
                    }
                    Look::Failed(error) => {
                        entry.stage = Stage::Failed;
                        failure = Some(error);
                        *pending -= 1;
                        break;
                    }
                }
            }
            *pending -= landed.len();
            landed.sort_unstable();
            let has_landed = !landed.is_empty();
            ready.extend(landed.drain(..).map(|(_, position)| position));
            if has_landed || failure.is_some() {
                if let Some(patience) = patience {
                    let stats = table.stats_of(self.phase);
                    stats.waits += 1;
                    stats.wait_ns += patience.end().as_nanos() as u64;
                }
                return failure.map_or(Ok(()), |error| Err(CacheError::Read(error)));
            }
            let patience = patience.get_or_insert_with(|| Patience::new("experts"));
            self.shared.landed.wait_for(&mut table, patience.step());
            table.stats_of(self.phase).stalls += u64::from(patience.look());
        }
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        let mut parts = std::mem::take(&mut self.parts);
        // The bytes go before the holds: an unheld slot must have no other reader.
        for entry in &mut parts.entries {
            entry.bytes = None;
        }
        let mut table = self.shared.table.lock();
        for entry in parts.entries.drain(..).filter(|e| e.stage != Stage::Failed) {
            table.unhold(entry.slot, entry.serial);
        }
        parts.ready.clear();
        parts.pending = 0;
        table.keep_lease_parts(parts);
        table.leases -= usize::from(self.is_request);
        let has_room_waiters = table.room_waiters > 0;
        drop(table);
        if has_room_waiters {
            self.shared.room.notify_all();
        }
    }
}
