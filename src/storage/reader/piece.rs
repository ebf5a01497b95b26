//! A request on its way: what its pieces share, the entry it has in the queue, and one piece of it. Owns the lent memory until the end;
//! never reads by itself. Surprising fact: after a short direct read a piece goes back to the last aligned byte and reads some again.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use crate::storage::layout::Extent;
use crate::storage::reader::align::DestRegion;
use crate::storage::reader::request::{Lane, ReadClass, ReadError, ReadLabel, ReadSink};

/// Names one submitted batch.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BatchId(pub(super) u64);

/// One request under way; shared by its pieces.
pub(super) struct Op {
    pub(super) batch: BatchId,
    pub(super) tag: u64,
    pub(super) class: ReadClass,
    pub(super) lane: Lane,
    pub(super) label: ReadLabel,
    pub(super) extent: Extent,
    pub(super) skew: usize,
    /// Whether the region is a loan of its own that its last piece takes back.
    pub(super) sealed: bool,
    pub(super) sink: Arc<dyn ReadSink>,
    pub(super) end: Mutex<OpEnd>,
}

/// How far a request is from its end.
pub(super) struct OpEnd {
    /// Bytes of the region whose fate is not known yet.
    pub(super) bytes_left: usize,
    /// The piece that ended last. The others were dropped before it was put here, so the last one can reunite them all.
    pub(super) held: Option<DestRegion>,
    pub(super) error: Option<ReadError>,
}

/// A request in the queue, or what is left of it.
pub(super) struct Queued {
    pub(super) op: Arc<Op>,
    /// What is not taken yet, and behind it what the caller lent beyond the need.
    pub(super) rest: DestRegion,
    /// Bytes of `rest` that are to be read.
    pub(super) bytes: usize,
    /// File offset of `rest`'s first byte.
    pub(super) file_offset: u64,
}

/// A part of a request that a worker reads.
pub(super) struct Piece {
    pub(super) op: Arc<Op>,
    pub(super) region: DestRegion,
    /// Bytes of the region that are to be read.
    pub(super) bytes: usize,
    pub(super) file_offset: u64,
    /// Bytes from the start of the piece that hold file content.
    pub(super) landed: usize,
    pub(super) retries: u32,
    pub(super) begun: Instant,
    pub(super) align: usize,
}

impl Piece {
    pub(super) fn lane(&self) -> Lane {
        self.op.lane
    }

    pub(super) fn len(&self) -> usize {
        self.bytes
    }

    /// Bytes that are not read yet, and their file offset. After a short read it starts at the last aligned byte before the gap.
    pub(super) fn target(&mut self) -> (u64, &mut [u8]) {
        let from = self.resume_at();
        (self.file_offset + from as u64, &mut self.region.bytes_mut()[from..self.bytes])
    }

    pub(super) fn resume_at(&self) -> usize {
        self.landed - self.landed % self.align
    }

    /// Bytes that must land: the piece may stretch beyond the wanted data, and there beyond the end of the file.
    pub(super) fn needed(&self) -> usize {
        let wanted = self.op.extent.offset + self.op.extent.len - self.file_offset;
        usize::try_from(wanted).map_or(self.bytes, |wanted| wanted.min(self.bytes))
    }
}
