//! Reads of the model file on named threads: bounded queues, priorities, direct I/O, errors that name what was wanted.
//! Owns the descriptors and the threads; never decides what is kept, and never spins while it waits.
//! Surprising fact: with direct I/O the data begins `skew` bytes into its region, so that nothing is copied to align it.
//!
//! One request queue (`pool`) is served by either of two kinds of workers: `uring` (a ring per thread) or `pread` (a blocking call
//! per thread, which also drives the in-memory `fake`). `tests/reader_contract.rs` runs the same tests on all three.

pub mod align;
pub mod fake;
pub mod file;
mod open;
mod piece;
mod pool;
mod pread;
pub mod request;
#[cfg(target_os = "linux")]
mod uring;

pub use align::{Alignment, DestRegion, Placement};
pub use file::{FileIdentity, OpenError};
pub use open::{DirectChoice, ReaderChoice, ReaderNotice, ReaderOptions, open_reader};
pub use piece::BatchId;
pub use pool::PoolLimits;
pub use request::{
    ExpertPart, FileChange, Gather, Landed, Lane, ReadAt, ReadClass, ReadError, ReadLabel, ReadRequest, ReadResult,
    ReadSink,
};

use std::sync::Arc;

use crate::obs::ReadCounters;

/// How reads reach the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReaderKind {
    Uring,
    Pread,
    /// In memory, for tests.
    Fake,
}

/// Reads of one open model file.
///
/// Contract: short reads continue; EINTR and EAGAIN are tried again; any other error is final for its request and for no
/// other; the end of the file before the end of the data is an error. Each request ends exactly once at its sink, also
/// when the reader is dropped (`ReadError::Stopped`), and its region stays lent until then whatever the caller does.
pub trait Reader: Send + Sync {
    /// Puts a batch in the queue as one submission. Blocks only while its class's queue is full (lookahead is refused
    /// with `QueueFull` instead). Panics when a region is too small or misaligned for its extent.
    fn submit(&self, batch: Vec<ReadRequest>, sink: Arc<dyn ReadSink>) -> BatchId;

    /// Takes what is still in the queue of the batch out of it and ends it with `Cancelled`: on this thread, or when the pieces
    /// already under way have landed. Returns how many requests were in the queue, wholly or in part.
    fn cancel(&self, batch: BatchId) -> usize;

    /// Gives what is still in the queue of a lookahead or preload batch the demand class, when a step comes to wait for it.
    /// Returns how many requests that were.
    fn promote(&self, batch: BatchId) -> usize;

    /// What regions must satisfy.
    fn alignment(&self) -> Alignment;

    /// Which workers serve the queue.
    fn kind(&self) -> ReaderKind;

    /// Whether reads bypass the page cache.
    fn is_direct(&self) -> bool;

    /// What was asked for and not given, to be printed once.
    fn notices(&self) -> &[ReaderNotice];

    /// Live counters.
    fn counters(&self) -> &ReadCounters;

    /// Cheap check (two system calls) that the file is still the one that was opened.
    fn check_file(&self) -> Result<(), FileChange>;

    /// The file, as errors name it.
    fn path(&self) -> &std::path::Path;
}
