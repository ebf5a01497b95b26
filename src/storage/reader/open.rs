//! Chooses workers and descriptors for a model file, and falls back where the system refuses, visibly. Owns `PoolReader`, the
//! `Reader` over any workers. Surprising fact: an explicit choice never falls back; only `auto` does, with a notice.

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::thread::JoinHandle;

use crate::obs::ReadCounters;
use crate::storage::reader::align::Alignment;
use crate::storage::reader::file::{ModelFile, OpenError};
use crate::storage::reader::piece::BatchId;
use crate::storage::reader::pool::{Pool, PoolLimits, PoolParts};
use crate::storage::reader::request::{FileChange, ReadRequest, ReadSink};
use crate::storage::reader::{Reader, ReaderKind, pread};

/// `--io`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ReaderChoice {
    /// io_uring, or pread with a notice where it is refused.
    #[default]
    Auto,
    Uring,
    Pread,
}

impl FromStr for ReaderChoice {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "uring" => Ok(Self::Uring),
            "pread" => Ok(Self::Pread),
            _ => Err(format!("'{text}' is not one of auto, uring, pread")),
        }
    }
}

/// `--direct`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DirectChoice {
    /// Past the page cache, or through it with a notice where direct reads are refused.
    #[default]
    Auto,
    On,
    Off,
}

impl FromStr for DirectChoice {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "on" => Ok(Self::On),
            "off" => Ok(Self::Off),
            _ => Err(format!("'{text}' is not one of auto, on, off")),
        }
    }
}

/// Something asked for by `auto` that the system refused: printed once by whoever opened the reader.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ReaderNotice {
    UringRefused { cause: String, threads: usize },
    DirectRefused { cause: String },
}

impl fmt::Display for ReaderNotice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UringRefused { cause, threads } => {
                write!(
                    f,
                    "io_uring is refused ({cause}): {threads} threads read by pread instead, at a higher processor cost"
                )
            }
            Self::DirectRefused { cause } => write!(
                f,
                "direct reads are refused ({cause}): reads go through the page cache instead, which costs a copy and competes for memory"
            ),
        }
    }
}

/// How to read. The defaults suit an NVMe drive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReaderOptions {
    pub io: ReaderChoice,
    pub direct: DirectChoice,
    /// Rings, one thread each.
    pub rings: usize,
    /// Reads under way at most, over all rings.
    pub depth: usize,
    /// Bytes under way at most, over all rings: beyond what saturates the drive, more only delays what comes after.
    pub bytes_under_way_max: usize,
    /// Threads, and so reads under way, of the pread workers.
    pub pread_threads: usize,
    pub limits: PoolLimits,
}

impl Default for ReaderOptions {
    fn default() -> Self {
        Self {
            io: ReaderChoice::Auto,
            direct: DirectChoice::Auto,
            rings: 2,
            depth: 128,
            bytes_under_way_max: 16 << 20,
            pread_threads: 24,
            limits: PoolLimits { piece_bytes: 512 << 10, queue_requests_max: 8192 },
        }
    }
}

/// Opens `path` for streaming reads.
pub fn open_reader(path: &Path, options: &ReaderOptions) -> Result<Arc<dyn Reader>, OpenError> {
    let mut notices = Vec::new();
    let file = match options.direct {
        DirectChoice::Off => ModelFile::open_buffered(path)?,
        DirectChoice::On => ModelFile::open_direct(path)?,
        DirectChoice::Auto => match ModelFile::open_direct(path) {
            Err(OpenError::DirectRefused { cause, .. }) => {
                notices.push(ReaderNotice::DirectRefused { cause });
                ModelFile::open_buffered(path)?
            }
            other => other?,
        },
    };
    let file = Arc::new(file);
    if options.io != ReaderChoice::Pread {
        match open_uring(&file, options) {
            Ok((pool, threads)) => {
                let direct = file.alignment != Alignment::NONE;
                return Ok(Arc::new(PoolReader { pool, threads, kind: ReaderKind::Uring, direct, notices }));
            }
            Err(cause) if options.io == ReaderChoice::Uring => return Err(OpenError::UringRefused { cause }),
            Err(cause) => notices.push(ReaderNotice::UringRefused { cause, threads: options.pread_threads.max(1) }),
        }
    }
    let workers = options.pread_threads.max(1);
    let pool = Pool::new(parts(&file, options.limits, workers));
    let threads = pread::start(&pool, &file, workers).map_err(|source| OpenError::Threads { source })?;
    let direct = file.alignment != Alignment::NONE;
    Ok(Arc::new(PoolReader { pool, threads, kind: ReaderKind::Pread, direct, notices }))
}

fn parts(file: &Arc<ModelFile>, limits: PoolLimits, workers: usize) -> PoolParts {
    let checked = Arc::clone(file);
    PoolParts {
        path: Arc::clone(&file.path),
        alignment: file.alignment,
        limits,
        workers,
        bells: Vec::new(),
        check: Box::new(move || checked.check()),
    }
}

#[cfg(target_os = "linux")]
fn open_uring(file: &Arc<ModelFile>, options: &ReaderOptions) -> Result<(Arc<Pool>, Vec<JoinHandle<()>>), String> {
    use crate::storage::reader::uring;
    let rings = options.rings.max(1);
    let limits = uring::RingLimits {
        depth: options.depth.div_ceil(rings).clamp(1, 4096),
        bytes: options.bytes_under_way_max.div_ceil(rings),
    };
    let open = || -> std::io::Result<_> {
        let bells = uring::make_bells(rings)?;
        let pool = Pool::new(PoolParts { bells, ..parts(file, options.limits, rings) });
        let threads = uring::start(&pool, file, limits)?;
        Ok((pool, threads))
    };
    open().map_err(|error| uring::refusal_cause(&error))
}

#[cfg(not(target_os = "linux"))]
fn open_uring(_: &Arc<ModelFile>, _: &ReaderOptions) -> Result<(Arc<Pool>, Vec<JoinHandle<()>>), String> {
    Err("it exists on Linux only".into())
}

/// A pool with its workers.
pub(super) struct PoolReader {
    pub(super) pool: Arc<Pool>,
    pub(super) threads: Vec<JoinHandle<()>>,
    pub(super) kind: ReaderKind,
    pub(super) direct: bool,
    pub(super) notices: Vec<ReaderNotice>,
}

impl Reader for PoolReader {
    fn submit(&self, batch: Vec<ReadRequest>, sink: Arc<dyn ReadSink>) -> BatchId {
        self.pool.submit(batch, &sink)
    }

    fn cancel(&self, batch: BatchId) -> usize {
        self.pool.cancel(batch)
    }

    fn promote(&self, batch: BatchId) -> usize {
        self.pool.promote(batch)
    }

    fn alignment(&self) -> Alignment {
        self.pool.alignment()
    }

    fn kind(&self) -> ReaderKind {
        self.kind
    }

    fn is_direct(&self) -> bool {
        self.direct
    }

    fn notices(&self) -> &[ReaderNotice] {
        &self.notices
    }

    fn counters(&self) -> &ReadCounters {
        &self.pool.counters
    }

    fn check_file(&self) -> Result<(), FileChange> {
        self.pool.check_file()
    }

    fn path(&self) -> &Path {
        self.pool.path()
    }
}

impl Drop for PoolReader {
    fn drop(&mut self) {
        self.pool.close();
        let own = std::thread::current().id();
        for thread in self.threads.drain(..) {
            // A sink that held the last handle would make a worker wait for itself; it ends right after this instead.
            if thread.thread().id() != own {
                let _ = thread.join();
            }
        }
    }
}
