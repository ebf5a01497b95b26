//! A reader over bytes in memory, with faults on demand: delay, reorder, short reads, errors, an end that moves.
//! Never touches a file. Surprising fact: every fault is drawn from the seed and the offset, so a failing run repeats exactly.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::obs::ReadCounters;
use crate::storage::reader::align::Alignment;
use crate::storage::reader::open::{PoolReader, ReaderNotice};
use crate::storage::reader::piece::BatchId;
use crate::storage::reader::pool::{Pool, PoolLimits, PoolParts};
use crate::storage::reader::pread::{self, PieceSource};
use crate::storage::reader::request::{FileChange, Lane, ReadRequest, ReadSink};
use crate::storage::reader::{Reader, ReaderKind};

/// How the fake behaves.
#[derive(Clone, Debug)]
pub struct FakeOptions {
    /// Alignment that it demands; a read that breaks it fails with EINVAL as a real direct read does.
    pub alignment: Alignment,
    /// Every read takes this long.
    pub delay: Duration,
    /// And up to this much longer, which reorders reads.
    pub jitter: Duration,
    /// Of 256 reads so many come back short (at least one byte shorter, down to one byte).
    pub short_of_256: u8,
    pub seed: u64,
    /// Reads under way at most.
    pub depth: usize,
    pub limits: PoolLimits,
}

impl Default for FakeOptions {
    fn default() -> Self {
        Self {
            alignment: Alignment { offset: 512, memory: 512 },
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            short_of_256: 0,
            seed: 1,
            depth: 64,
            limits: PoolLimits { piece_bytes: 512 << 10, queue_requests_max: 8192 },
        }
    }
}

/// A fault at one byte of the image: reads that cover it fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FakeFault {
    pub offset: u64,
    pub errno: i32,
    /// How many reads it fails before it goes away; `u32::MAX` for ever.
    pub times: u32,
}

/// A byte of the image that reads bring with one bit wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FakeFlip {
    pub offset: u64,
    /// How many reads it spoils before it goes away; `u32::MAX` for ever.
    pub times: u32,
}

struct Image {
    bytes: Vec<u8>,
    /// The file ends here: at most the length of `bytes`.
    end: AtomicU64,
    options: FakeOptions,
    faults: Mutex<Vec<FakeFault>>,
    flips: Mutex<Vec<FakeFlip>>,
    reads: AtomicU64,
    held: Mutex<bool>,
    released: Condvar,
    replaced: AtomicBool,
}

impl Image {
    fn random(&self, offset: u64) -> u64 {
        // splitmix64 over seed, offset and the number of the read.
        let number = self.reads.fetch_add(1, Ordering::Relaxed);
        let mut z = self.options.seed ^ offset.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ number.wrapping_shl(40);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn fault(&self, from: u64, to: u64) -> Result<(), i32> {
        let mut faults = self.faults.lock();
        let Some(fault) = faults.iter_mut().find(|f| f.times > 0 && (from..to).contains(&f.offset)) else {
            return Ok(());
        };
        if fault.times != u32::MAX {
            fault.times -= 1;
        }
        Err(fault.errno)
    }
}

impl Image {
    fn flip(&self, landed: &mut [u8], offset: u64) {
        for flip in self.flips.lock().iter_mut().filter(|f| f.times > 0) {
            let Some(byte) = flip.offset.checked_sub(offset).and_then(|at| landed.get_mut(at as usize)) else {
                continue;
            };
            *byte ^= 0x10;
            if flip.times != u32::MAX {
                flip.times -= 1;
            }
        }
    }
}

impl PieceSource for Image {
    fn read_at(&self, _lane: Lane, buffer: &mut [u8], offset: u64) -> Result<usize, i32> {
        let mut held = self.held.lock();
        while *held {
            self.released.wait(&mut held);
        }
        drop(held);
        let random = self.random(offset);
        let jitter = self.options.jitter.mul_f64((random >> 40) as f64 / (1u64 << 24) as f64);
        let delay = self.options.delay + jitter;
        if !delay.is_zero() {
            std::thread::sleep(delay);
        }
        let Alignment { offset: align, memory } = self.options.alignment;
        let aligned = offset.is_multiple_of(u64::from(align))
            && buffer.len().is_multiple_of(align as usize)
            && buffer.as_ptr().addr().is_multiple_of(memory as usize);
        if !aligned {
            return Err(libc::EINVAL);
        }
        self.fault(offset, offset + buffer.len() as u64)?;
        let end = self.end.load(Ordering::Acquire);
        let mut count = usize::try_from(end.saturating_sub(offset)).unwrap_or(usize::MAX).min(buffer.len());
        if (random & 0xFF) < u64::from(self.options.short_of_256) && count > 1 {
            // Real short reads end on the alignment; an end inside a block means the end of the file.
            let shorter = 1 + (random >> 8) as usize % (count - 1);
            count = shorter.next_multiple_of(align as usize).min(count);
        }
        let from = offset.min(end) as usize;
        buffer[..count].copy_from_slice(&self.bytes[from..from + count]);
        self.flip(&mut buffer[..count], offset);
        Ok(count)
    }
}

/// The fake. Its faults can be changed while it is in use.
pub struct FakeReader {
    inner: PoolReader,
    image: Arc<Image>,
}

impl FakeReader {
    /// A reader of `bytes`.
    pub fn new(bytes: Vec<u8>, options: FakeOptions) -> Arc<Self> {
        let workers = options.depth.max(1);
        let image = Arc::new(Image {
            end: AtomicU64::new(bytes.len() as u64),
            bytes,
            faults: Mutex::new(Vec::new()),
            flips: Mutex::new(Vec::new()),
            reads: AtomicU64::new(0),
            held: Mutex::new(false),
            released: Condvar::new(),
            replaced: AtomicBool::new(false),
            options,
        });
        let checked = Arc::clone(&image);
        let pool = Pool::new(PoolParts {
            path: Path::new("fake.gguf").into(),
            alignment: image.options.alignment,
            limits: image.options.limits,
            workers,
            bells: Vec::new(),
            check: Box::new(move || check(&checked)),
        });
        let threads = pread::start(&pool, &image, workers).expect("threads of a test");
        let direct = image.options.alignment != Alignment::NONE;
        let inner = PoolReader { pool, threads, kind: ReaderKind::Fake, direct, notices: Vec::new() };
        Arc::new(Self { inner, image })
    }

    /// Adds a fault.
    pub fn add_fault(&self, fault: FakeFault) {
        self.image.faults.lock().push(fault);
    }

    /// Adds a wrong bit.
    pub fn add_flip(&self, flip: FakeFlip) {
        self.image.flips.lock().push(flip);
    }

    /// Takes all faults and wrong bits away.
    pub fn clear_faults(&self) {
        self.image.faults.lock().clear();
        self.image.flips.lock().clear();
    }

    /// Ends the file at `end`; a later call may lengthen it again up to its first length.
    pub fn truncate(&self, end: u64) {
        self.image.end.store(end.min(self.image.bytes.len() as u64), Ordering::Release);
    }

    /// Makes `check_file` find another file under the name (or the right one again).
    pub fn set_replaced(&self, replaced: bool) {
        self.image.replaced.store(replaced, Ordering::Release);
    }

    /// Keeps every read that begins from now on waiting until `release`.
    pub fn hold(&self) {
        *self.image.held.lock() = true;
    }

    /// Lets held reads go on.
    pub fn release(&self) {
        *self.image.held.lock() = false;
        self.image.released.notify_all();
    }

    /// Reads (pieces and continuations) that have begun so far, held ones not counted.
    pub fn reads_begun(&self) -> u64 {
        self.image.reads.load(Ordering::Relaxed)
    }
}

fn check(image: &Image) -> Result<(), FileChange> {
    let (was, now) = (image.bytes.len() as u64, image.end.load(Ordering::Acquire));
    if image.replaced.load(Ordering::Acquire) {
        Err(FileChange::Replaced)
    } else if now < was {
        Err(FileChange::Shortened { was, now })
    } else {
        Ok(())
    }
}

impl Reader for FakeReader {
    fn submit(&self, batch: Vec<ReadRequest>, sink: Arc<dyn ReadSink>) -> BatchId {
        self.inner.submit(batch, sink)
    }
    fn cancel(&self, batch: BatchId) -> usize {
        self.inner.cancel(batch)
    }
    fn promote(&self, batch: BatchId) -> usize {
        self.inner.promote(batch)
    }
    fn alignment(&self) -> Alignment {
        self.inner.alignment()
    }
    fn kind(&self) -> ReaderKind {
        self.inner.kind()
    }
    fn is_direct(&self) -> bool {
        self.inner.is_direct()
    }
    fn notices(&self) -> &[ReaderNotice] {
        self.inner.notices()
    }
    fn counters(&self) -> &ReadCounters {
        self.inner.counters()
    }
    fn check_file(&self) -> Result<(), FileChange> {
        self.inner.check_file()
    }
    fn path(&self) -> &Path {
        self.inner.path()
    }
}

impl Drop for FakeReader {
    fn drop(&mut self) {
        // Held workers could never be joined.
        self.release();
    }
}
