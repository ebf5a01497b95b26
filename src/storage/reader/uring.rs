//! Workers that read through io_uring, one ring each. Owns the rings and the pieces the kernel is writing to; never spins.
//! Surprising fact: closing a ring does not wait for its reads, so a worker drains them first, and memory that it cannot
//! prove to be released is given up for good rather than reused under the kernel's hand.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use io_uring::{IoUring, Probe, opcode, types};

use crate::storage::reader::file::ModelFile;
use crate::storage::reader::piece::Piece;
use crate::storage::reader::pool::{Pool, WorkerGuard};
use crate::storage::reader::request::Lane;

/// Completion of the poll on the worker's bell; piece slots count from 0 and stay far below.
const BELL: u64 = u64::MAX;
/// Bytes of stack of a worker.
const STACK_BYTES: usize = 512 << 10;

/// Bounds of one ring.
#[derive(Clone, Copy)]
pub(super) struct RingLimits {
    /// Reads under way at most.
    pub depth: usize,
    /// Bytes under way at most (one piece is always allowed).
    pub bytes: usize,
}

/// One eventfd for each ring, to be handed to the pool that rings them.
pub(super) fn make_bells(rings: usize) -> io::Result<Vec<OwnedFd>> {
    use rustix::event::{EventfdFlags, eventfd};
    (0..rings).map(|_| Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)).collect()
}

/// Starts one worker for each bell. An error means that the system refuses rings; no thread is left then.
pub(super) fn start(pool: &Arc<Pool>, file: &Arc<ModelFile>, limits: RingLimits) -> io::Result<Vec<JoinHandle<()>>> {
    let mut threads = Vec::new();
    let mut refused = None;
    for index in 0..pool.bells().len() {
        let (guard, file) = (WorkerGuard(Arc::clone(pool)), Arc::clone(file));
        let (report, reported) = mpsc::channel();
        let builder = std::thread::Builder::new().name(format!("ds4-reader-{index}")).stack_size(STACK_BYTES);
        // The ring is made on the thread that uses it, which lets the kernel skip its locks.
        let spawned = builder.spawn(move || match Worker::new(&guard.0, file, index, limits) {
            Ok(mut worker) => {
                let _ = report.send(Ok(()));
                worker.serve();
            }
            Err(error) => drop(report.send(Err(error))),
        });
        match spawned {
            Ok(thread) => threads.push(thread),
            Err(error) => refused = Some(error),
        }
        if refused.is_none() {
            refused = reported.recv().unwrap_or_else(|_| Err(io::Error::other("a reader thread died"))).err();
        }
        if refused.is_some() {
            break;
        }
    }
    match refused {
        None => Ok(threads),
        Some(error) => {
            pool.close();
            threads.into_iter().for_each(|thread| drop(thread.join()));
            Err(error)
        }
    }
}

/// Pieces that the kernel may be writing to, by slot.
struct UnderWay<'a> {
    pool: &'a Pool,
    slots: Vec<Option<Piece>>,
    free: Vec<usize>,
    bytes: usize,
}

impl UnderWay<'_> {
    fn insert(&mut self, piece: Piece) -> usize {
        let slot = self.free.pop().expect("the depth bounds the pieces taken");
        self.bytes += piece.len();
        self.slots[slot] = Some(piece);
        slot
    }

    fn remove(&mut self, slot: usize) -> Piece {
        let piece = self.slots[slot].take().expect("the kernel completes a read once");
        self.bytes -= piece.len();
        self.free.push(slot);
        piece
    }

    fn is_empty(&self) -> bool {
        self.free.len() == self.slots.len()
    }

    /// Gives up all memory still lent to the kernel and fails its reads.
    fn lose_all(&mut self, errno: i32) {
        for slot in 0..self.slots.len() {
            if self.slots[slot].is_some() {
                let piece = self.remove(slot);
                self.pool.lose(piece, errno);
            }
        }
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        // Empty unless the ring failed or a sink panicked.
        self.lose_all(libc::EIO);
    }
}

// Field order matters: the ring goes before the pieces whose memory it may still write.
struct Worker<'a> {
    ring: IoUring,
    under_way: UnderWay<'a>,
    fresh: Vec<Piece>,
    pool: &'a Pool,
    file: Arc<ModelFile>,
    bell: BorrowedFd<'a>,
    limits: RingLimits,
    /// Reads name a registered file by its place in `LANES` instead of a descriptor.
    has_registered_files: bool,
}

impl<'a> Worker<'a> {
    fn new(pool: &'a Pool, file: Arc<ModelFile>, index: usize, limits: RingLimits) -> io::Result<Self> {
        use std::os::fd::AsFd;
        let depth = limits.depth.max(1);
        // One entry more than the reads: the bell.
        let ring = make_ring(depth as u32 + 1)?;
        check_opcodes(&ring)?;
        let under_way =
            UnderWay { pool, slots: (0..depth).map(|_| None).collect(), free: (0..depth).rev().collect(), bytes: 0 };
        let bell = pool.bells()[index].as_fd();
        let has_registered_files = register_files(&ring, &file);
        let fresh = Vec::with_capacity(depth);
        let mut worker = Self { ring, under_way, fresh, pool, file, bell, limits, has_registered_files };
        worker.listen_to_bell();
        worker.ring.submit()?;
        Ok(worker)
    }

    fn serve(&mut self) {
        loop {
            self.fill();
            if self.under_way.is_empty() && self.pool.is_closed() {
                return;
            }
            if let Err(error) = self.wait() {
                let errno = error.raw_os_error().unwrap_or(libc::EIO);
                tracing::error!("io_uring failed: {error}; this reader thread stops");
                self.under_way.lose_all(errno);
                return;
            }
            self.reap();
        }
    }

    /// Takes queued pieces up to the bounds and hands them to the kernel.
    fn fill(&mut self) {
        loop {
            let free = self.under_way.free.len();
            let bytes = match self.under_way.is_empty() {
                true => self.limits.bytes.max(1),
                false => self.limits.bytes.saturating_sub(self.under_way.bytes),
            };
            if free == 0 || bytes == 0 {
                return;
            }
            let more = self.pool.take(free, bytes, &mut self.fresh);
            if self.fresh.is_empty() {
                return;
            }
            let mut fresh = std::mem::take(&mut self.fresh);
            for piece in fresh.drain(..) {
                let slot = self.under_way.insert(piece);
                self.start_read(slot);
            }
            self.fresh = fresh;
            // Without more to take, waiting submits as well. An error here shows again there.
            if !more || self.ring.submit().is_err() {
                return;
            }
        }
    }

    fn start_read(&mut self, slot: usize) {
        let piece = self.under_way.slots[slot].as_mut().expect("just inserted");
        let lane = piece.lane();
        let place = LANES.iter().position(|l| *l == lane).expect("every lane has a place") as u32;
        let descriptor = types::Fd(self.file.descriptor(lane).as_raw_fd());
        let (offset, buffer) = piece.target();
        // A piece is at most 1 GiB, so its length fits.
        let (memory, len) = (buffer.as_mut_ptr(), buffer.len() as u32);
        let read = match self.has_registered_files {
            true => opcode::Read::new(types::Fixed(place), memory, len),
            false => opcode::Read::new(descriptor, memory, len),
        };
        let entry = read.offset(offset).build().user_data(slot as u64);
        // SAFETY: the buffer belongs to the piece in `under_way`, which is only dropped after its completion was seen
        // (or its memory is never freed, see `lose_all`); the descriptor lives in `self.file`, which outlives the ring.
        unsafe { self.ring.submission().push(&entry) }.expect("the ring holds the depth and the bell");
    }

    fn listen_to_bell(&mut self) {
        let entry = opcode::PollAdd::new(types::Fd(self.bell.as_raw_fd()), libc::POLLIN as u32).build().user_data(BELL);
        // SAFETY: a poll touches no memory of ours, and the descriptor lives in the pool, which outlives the ring.
        unsafe { self.ring.submission().push(&entry) }.expect("the ring holds the depth and the bell");
    }

    /// Sleeps until at least one completion is there.
    fn wait(&mut self) -> io::Result<()> {
        match self.ring.submit_and_wait(1) {
            Ok(_) => Ok(()),
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR) => Ok(()),
                Some(libc::EAGAIN | libc::EBUSY) => {
                    // The kernel is short of memory or of completion space; reaping frees the latter.
                    std::thread::sleep(Duration::from_micros(100));
                    Ok(())
                }
                _ => Err(error),
            },
        }
    }

    fn reap(&mut self) {
        while let Some(completion) = self.next_completion() {
            let (data, result) = completion;
            if data == BELL {
                let mut count = [0u8; 8];
                let _ = rustix::io::read(self.bell, &mut count);
                self.listen_to_bell();
                continue;
            }
            let piece = self.under_way.remove(data as usize);
            let outcome = usize::try_from(result).map_err(|_| -result);
            if let Some(again) = self.pool.settle(piece, outcome) {
                let slot = self.under_way.insert(again);
                self.start_read(slot);
            }
        }
    }

    fn next_completion(&mut self) -> Option<(u64, i32)> {
        self.ring.completion().next().map(|entry| (entry.user_data(), entry.result()))
    }
}

/// A ring with the cheapest completion mode that this kernel has.
fn make_ring(entries: u32) -> io::Result<IoUring> {
    let tuned = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(entries);
    match tuned {
        // Kernels before 6.1 do not know the flags.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => IoUring::new(entries),
        other => other,
    }
}

/// Registered files, in this order.
const LANES: [Lane; 2] = [Lane::Bulk, Lane::Rows];

/// Spares the kernel a look at the descriptor for every read. A refusal costs about a tenth of a microsecond a read.
fn register_files(ring: &IoUring, file: &ModelFile) -> bool {
    let descriptors = LANES.map(|lane| file.descriptor(lane).as_raw_fd());
    match ring.submitter().register_files(&descriptors) {
        Ok(()) => true,
        Err(error) => {
            tracing::warn!("io_uring registers no files ({error}): each read costs a little more");
            false
        }
    }
}

fn check_opcodes(ring: &IoUring) -> io::Result<()> {
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let known = probe.is_supported(opcode::Read::CODE) && probe.is_supported(opcode::PollAdd::CODE);
    if known { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)) }
}

/// The likely reason why rings are refused, for the notice.
pub(super) fn refusal_cause(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::ENOSYS) => "this kernel has no io_uring, or a container's seccomp filter hides it".into(),
        Some(libc::EPERM | libc::EACCES) => match std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled") {
            Ok(value) if value.trim() != "0" => format!("sysctl kernel.io_uring_disabled is {}", value.trim()),
            _ => "a seccomp filter forbids it (container runtimes do by default)".into(),
        },
        Some(libc::ENOMEM) => "the memlock limit is too small for its rings (ulimit -l)".into(),
        Some(libc::EMFILE | libc::ENFILE) => "too many open files (ulimit -n)".into(),
        Some(libc::EOPNOTSUPP | libc::EINVAL) => "this kernel's io_uring is too old (5.6 or later is needed)".into(),
        _ => error.to_string(),
    }
}
