//! What a read asks for and how its end is told: request, label, landed bytes, errors, and `Gather` to wait for them.
//! Owns no thread and no file. Surprising fact: the sink runs on a reader thread, and may hand that thread one next read.

use std::collections::VecDeque;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::storage::layout::Extent;
use crate::storage::reader::align::DestRegion;
use crate::units::{ExpertKey, LayerIdx};

/// Who waits for a read. Higher classes are always taken from the queue first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum ReadClass {
    /// The current step waits for it.
    Demand,
    /// A later layer or token will probably want it; may be cancelled or refused when the queue is full.
    Lookahead,
    /// Filling the cache at start.
    Preload,
}

/// Number of classes: the length of every per-class table.
pub const CLASSES: usize = 3;

impl ReadClass {
    /// Position in per-class tables, most urgent first.
    pub fn index(self) -> usize {
        match self {
            Self::Demand => 0,
            Self::Lookahead => 1,
            Self::Preload => 2,
        }
    }
}

/// Which descriptor of the model file serves a read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lane {
    /// Large reads: experts and tensors.
    Bulk,
    /// Small random reads of row tables; read-ahead is off on this descriptor.
    Rows,
}

/// One of the three matrices of an expert.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExpertPart {
    Gate,
    Up,
    Down,
}

/// What a read is for, as an error names it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ReadLabel {
    Expert { key: ExpertKey, part: ExpertPart },
    Row { layer: LayerIdx, row: u64 },
    Tensor(Arc<str>),
}

impl fmt::Display for ReadLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Expert { key, part } => {
                let part = match part {
                    ExpertPart::Gate => "gate",
                    ExpertPart::Up => "up",
                    ExpertPart::Down => "down",
                };
                write!(f, "{key} ({part})")
            }
            Self::Row { layer, row } => write!(f, "row {row} of the table of layer {}", layer.0),
            Self::Tensor(name) => write!(f, "tensor {name}"),
        }
    }
}

/// One read of a contiguous range into one region.
#[derive(Debug)]
pub struct ReadRequest {
    /// The bytes wanted.
    pub extent: Extent,
    pub lane: Lane,
    pub class: ReadClass,
    pub label: ReadLabel,
    /// Holds at least `Reader::alignment().place(extent)` bytes at an address of its memory alignment.
    pub region: DestRegion,
    /// Handed back with the result; free for the caller.
    pub tag: u64,
}

/// A finished read: the region comes back to the caller.
#[derive(Debug)]
pub struct Landed {
    pub region: DestRegion,
    /// Byte of the region at which the wanted data begins.
    pub skew: usize,
    /// Bytes of wanted data.
    pub len: usize,
}

impl Landed {
    /// The wanted data.
    pub fn bytes(&self) -> &[u8] {
        &self.region.bytes()[self.skew..self.skew + self.len]
    }
}

/// Where and for whom a read failed.
#[derive(Clone, Debug)]
pub struct ReadAt {
    pub path: Arc<Path>,
    pub offset: u64,
    pub len: u64,
    pub label: ReadLabel,
}

impl fmt::Display for ReadAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} bytes at offset {} of {})", self.label, self.len, self.offset, self.path.display())
    }
}

/// How the model file differs from the one that was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FileChange {
    #[error("it was shortened from {was} to {now} bytes")]
    Shortened { was: u64, now: u64 },
    #[error("it grew from {was} to {now} bytes")]
    Grew { was: u64, now: u64 },
    #[error("another file has taken its name")]
    Replaced,
    #[error("it was deleted")]
    Deleted,
    #[error("it was written to")]
    Modified,
}

/// Why a read gave no bytes. It concerns this request only; later requests are served.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ReadError {
    #[error("cannot read {at}: {}; check the drive and its cable (dmesg), then try again", std::io::Error::from_raw_os_error(*errno))]
    Io { at: ReadAt, errno: i32 },
    #[error(
        "cannot read {at}: the file ends at byte {end}; it was shortened or is incomplete, fetch it again and restart"
    )]
    EndOfFile { at: ReadAt, end: u64 },
    #[error("cannot read {at}: the file changed while in use: {change}; restart with the file in place")]
    Changed { at: ReadAt, change: FileChange },
    #[error(
        "cannot use {at}: its checksum is {found:016x}, expected {expected:016x}, in two reads; the file or the drive is damaged, \
         fetch the file again"
    )]
    Corrupt { at: ReadAt, expected: u64, found: u64 },
    #[error("the read of {0} was cancelled")]
    Cancelled(ReadLabel),
    #[error("the read ahead of {0} was dropped: its queue is full")]
    QueueFull(ReadLabel),
    #[error("the read of {0} was not done: the reader has stopped; restart")]
    Stopped(ReadLabel),
}

/// Result of one read.
pub type ReadResult = Result<Landed, ReadError>;

/// Told of each finished read of a batch.
///
/// Runs on a reader thread (or inside `submit` / `cancel` for reads that end there) with no lock of the reader held.
/// It must be short and must not call the reader. Therefore never call `submit` or `cancel` with a lock held that the
/// sink takes. A sink must not own the last handle of the reader.
pub trait ReadSink: Send + Sync {
    /// `tag` is the request's. A returned request takes the place of the one that ended, with the same sink; it is
    /// never refused for a full queue. Return `None` after an error.
    fn landed(&self, tag: u64, result: ReadResult) -> Option<ReadRequest>;
}

/// Collects results and lets one or more threads wait for them: the ready-made sink.
#[derive(Default)]
pub struct Gather {
    state: Mutex<VecDeque<(u64, ReadResult)>>,
    arrived: Condvar,
}

impl Gather {
    /// An empty collection, to be passed to `Reader::submit`.
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// The next result in landing order; blocks. The caller knows how many are still due: waiting for more never ends.
    pub fn next(&self) -> (u64, ReadResult) {
        let mut state = self.state.lock();
        loop {
            match state.pop_front() {
                Some(result) => return result,
                None => self.arrived.wait(&mut state),
            }
        }
    }
}

impl ReadSink for Gather {
    fn landed(&self, tag: u64, result: ReadResult) -> Option<ReadRequest> {
        self.state.lock().push_back((tag, result));
        self.arrived.notify_one();
        None
    }
}
