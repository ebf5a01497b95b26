//! Counters of the storage engine. Owns numbers only; never decides anything from them.
//! Surprising fact: `ReadCounters::busy_ns` is wall time with at least one read under way, so bytes over it is the drive's rate.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::Serialize;

use super::latency::{Latency, LatencySummary};

/// A number that only grows, added to from any thread.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`.
    pub fn add(&self, n: u64) {
        // Relaxed: a counter orders nothing, and a reader may be a moment late.
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// Adds one.
    pub fn increment(&self) {
        self.add(1);
    }

    /// Adds a duration in nanoseconds.
    pub fn add_ns(&self, duration: Duration) {
        self.add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX));
    }

    /// The value now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What a reader did.
#[derive(Debug, Default)]
pub struct ReadCounters {
    /// Calls of `submit`.
    pub submissions: Counter,
    /// Requests that ended well.
    pub reads: Counter,
    /// Wanted bytes of those.
    pub read_bytes: Counter,
    /// Pieces that went to the kernel.
    pub pieces: Counter,
    /// Pieces that have come back; the difference to `pieces` is under way.
    pub pieces_ended: Counter,
    /// Bytes that came from the kernel, with those read for alignment only.
    pub device_bytes: Counter,
    /// Requests that ended in an error other than a cancellation.
    pub failed: Counter,
    /// Requests that were cancelled before they began.
    pub cancelled: Counter,
    /// Lookahead requests refused because their queue was full.
    pub refused: Counter,
    /// Times a read came back short and was continued.
    pub short_reads: Counter,
    /// Times a read was tried again after EINTR or EAGAIN.
    pub retries: Counter,
    /// Times `submit` had to wait for room in a queue, and how long.
    pub queue_full_waits: Counter,
    pub queue_full_wait_ns: Counter,
    /// Wall time with at least one piece under way.
    pub busy_ns: Counter,
    /// From handing a piece to the kernel until it landed.
    pub latency: Latency,
}

/// `ReadCounters` at one moment.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct ReadSnapshot {
    pub submissions: u64,
    pub reads: u64,
    pub read_bytes: u64,
    pub pieces: u64,
    pub device_bytes: u64,
    pub failed: u64,
    pub cancelled: u64,
    pub refused: u64,
    pub short_reads: u64,
    pub retries: u64,
    pub queue_full_waits: u64,
    pub queue_full_wait_ms: f64,
    pub busy_ms: f64,
    /// Bytes from the kernel over the time with a read under way; 0 before the first read.
    pub gb_per_s: f64,
    pub latency: LatencySummary,
}

impl ReadCounters {
    /// Pieces under way.
    pub fn in_flight(&self) -> u64 {
        // Ended first: a piece that ends between the two looks is counted once more, never once too few.
        let ended = self.pieces_ended.get();
        self.pieces.get().saturating_sub(ended)
    }

    /// The values now.
    pub fn snapshot(&self) -> ReadSnapshot {
        let busy_ns = self.busy_ns.get();
        let device_bytes = self.device_bytes.get();
        ReadSnapshot {
            submissions: self.submissions.get(),
            reads: self.reads.get(),
            read_bytes: self.read_bytes.get(),
            pieces: self.pieces.get(),
            device_bytes,
            failed: self.failed.get(),
            cancelled: self.cancelled.get(),
            refused: self.refused.get(),
            short_reads: self.short_reads.get(),
            retries: self.retries.get(),
            queue_full_waits: self.queue_full_waits.get(),
            queue_full_wait_ms: self.queue_full_wait_ns.get() as f64 / 1e6,
            busy_ms: busy_ns as f64 / 1e6,
            // Bytes per nanosecond are GB per second.
            gb_per_s: if busy_ns == 0 { 0.0 } else { device_bytes as f64 / busy_ns as f64 },
            latency: self.latency.summary(),
        }
    }
}

/// What the row tables did.
#[derive(Debug, Default)]
pub struct RowCounters {
    /// Calls of `submit`: one a decode step or prefill chunk.
    pub submissions: Counter,
    /// Rows asked for, repeats included.
    pub rows_asked: Counter,
    /// Distinct rows that were read.
    pub rows_read: Counter,
    /// Distinct rows that the row cache had.
    pub rows_cached: Counter,
    /// Bytes of those rows.
    pub row_bytes: Counter,
    /// Reads they took (rows that lie in one block share one).
    pub row_reads: Counter,
    /// Time callers waited for rows.
    pub wait_ns: Counter,
    /// Waits that were long enough for a notice.
    pub stalls: Counter,
    /// Steps that failed for a row.
    pub failed: Counter,
}

/// `RowCounters` at one moment.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct RowSnapshot {
    pub submissions: u64,
    pub rows_asked: u64,
    pub rows_read: u64,
    pub rows_cached: u64,
    pub row_bytes: u64,
    pub row_reads: u64,
    pub wait_ms: f64,
    pub stalls: u64,
    pub failed: u64,
}

impl RowCounters {
    /// The values now.
    pub fn snapshot(&self) -> RowSnapshot {
        RowSnapshot {
            submissions: self.submissions.get(),
            rows_asked: self.rows_asked.get(),
            rows_read: self.rows_read.get(),
            rows_cached: self.rows_cached.get(),
            row_bytes: self.row_bytes.get(),
            row_reads: self.row_reads.get(),
            wait_ms: self.wait_ns.get() as f64 / 1e6,
            stalls: self.stalls.get(),
            failed: self.failed.get(),
        }
    }
}

/// What checksums found.
#[derive(Debug, Default)]
pub struct VerifyCounters {
    /// Reads that were compared with their checksums and fitted.
    pub reads: Counter,
    /// Bytes of those, whole row blocks included.
    pub bytes: Counter,
    /// Reads that no checksum covers.
    pub unchecked: Counter,
    /// Comparisons that failed.
    pub mismatches: Counter,
    /// Reads that fitted when they were repeated.
    pub repaired: Counter,
    /// Reads that were refused for good.
    pub failed: Counter,
    /// Time that reader threads spent comparing.
    pub hash_ns: Counter,
}

/// `VerifyCounters` at one moment.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct VerifySnapshot {
    pub reads: u64,
    pub bytes: u64,
    pub unchecked: u64,
    pub mismatches: u64,
    pub repaired: u64,
    pub failed: u64,
    pub hash_ms: f64,
}

impl VerifyCounters {
    /// The values now.
    pub fn snapshot(&self) -> VerifySnapshot {
        VerifySnapshot {
            reads: self.reads.get(),
            bytes: self.bytes.get(),
            unchecked: self.unchecked.get(),
            mismatches: self.mismatches.get(),
            repaired: self.repaired.get(),
            failed: self.failed.get(),
            hash_ms: self.hash_ns.get() as f64 / 1e6,
        }
    }
}
