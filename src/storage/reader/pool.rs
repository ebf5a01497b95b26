//! The queue that workers serve: bounded, by class, cut into pieces only as they are taken. Owns every request from `submit`
//! to its sink; never touches a descriptor. Lock order: queue, then one read's end; sinks run with neither held.
//! Surprising fact: a large read costs one queue entry, so a demand read can pass between two pieces of a lookahead read.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::obs::ReadCounters;
use crate::obs::spans::{self, Detail, Row};
use crate::storage::layout::Extent;
use crate::storage::reader::align::{Alignment, DestRegion};
use crate::storage::reader::piece::{BatchId, Op, OpEnd, Piece, Queued};
use crate::storage::reader::request::{
    CLASSES, FileChange, Landed, Lane, ReadAt, ReadClass, ReadError, ReadLabel, ReadRequest, ReadSink,
};

/// EINTR or EAGAIN in a row on one piece after which it counts as failed: far beyond any signal storm.
const RETRIES_MAX: u32 = 1000;
/// Short reads in a row that bring nothing new to a piece, after which the file counts as ended.
const STANDSTILLS_MAX: u32 = 64;
/// A queue for each class and lane.
const QUEUES: usize = 2 * CLASSES;

/// Position among the queues. Rows go before bulk reads of their class: they are small, and a sweep's worth of experts before them
/// would hold up the step for seconds.
fn queue_of(class: ReadClass, lane: Lane) -> usize {
    2 * class.index() + usize::from(lane == Lane::Bulk)
}

/// Largest piece: a kernel read moves less than 2 GiB.
const PIECE_BYTES_MAX: usize = 1 << 30;

/// Bounds of the queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolLimits {
    /// A larger read is cut into pieces of this many bytes (rounded up to what file and memory alignment both divide).
    pub piece_bytes: usize,
    /// Requests that may wait in the queue of each class.
    pub queue_requests_max: usize,
}

/// A request as an entry of the queue, or one that ends before it gets there: nothing to read, or an impossible range.
enum Prepared {
    Read(Queued),
    Ended(Queued, Option<ReadError>),
}

#[derive(Default)]
struct State {
    /// Most urgent first, see `queue_of`.
    queues: [VecDeque<Queued>; QUEUES],
    /// Bytes that the queues still have to read, for sharing pieces out among workers.
    queued_bytes: u64,
    pieces_under_way: usize,
    busy_since: Option<Instant>,
    closed: bool,
    workers: usize,
    submitters_waiting: usize,
}

/// The shared queue of one reader.
pub(super) struct Pool {
    path: Arc<Path>,
    alignment: Alignment,
    limits: PoolLimits,
    workers_at_start: usize,
    state: Mutex<State>,
    /// Blocking workers wait here.
    work: Condvar,
    /// Submitters wait here for room.
    room: Condvar,
    /// Workers that wait in a ring have an eventfd each.
    bells: Vec<OwnedFd>,
    batches: AtomicU64,
    check: Box<dyn Fn() -> Result<(), FileChange> + Send + Sync>,
    pub(super) counters: ReadCounters,
}

/// What a pool is built from.
pub(super) struct PoolParts {
    pub path: Arc<Path>,
    pub alignment: Alignment,
    pub limits: PoolLimits,
    pub workers: usize,
    pub bells: Vec<OwnedFd>,
    pub check: Box<dyn Fn() -> Result<(), FileChange> + Send + Sync>,
}

impl Pool {
    pub(super) fn new(parts: PoolParts) -> Arc<Self> {
        let align = parts.alignment.step() as usize;
        let piece_bytes = parts.limits.piece_bytes.clamp(1, PIECE_BYTES_MAX).next_multiple_of(align);
        let queue_requests_max = parts.limits.queue_requests_max.max(1);
        Arc::new(Self {
            path: parts.path,
            alignment: parts.alignment,
            limits: PoolLimits { piece_bytes, queue_requests_max },
            workers_at_start: parts.workers.max(1),
            state: Mutex::new(State { workers: parts.workers, ..State::default() }),
            work: Condvar::new(),
            room: Condvar::new(),
            bells: parts.bells,
            batches: AtomicU64::new(0),
            check: parts.check,
            counters: ReadCounters::default(),
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn bells(&self) -> &[OwnedFd] {
        &self.bells
    }

    pub(super) fn alignment(&self) -> Alignment {
        self.alignment
    }

    pub(super) fn check_file(&self) -> Result<(), FileChange> {
        (self.check)()
    }

    // ---- the submitting side ----

    pub(super) fn submit(&self, batch: Vec<ReadRequest>, sink: &Arc<dyn ReadSink>) -> BatchId {
        self.counters.submissions.increment();
        let id = BatchId(self.batches.fetch_add(1, Ordering::Relaxed));
        let mut ended = Vec::new();
        let mut prepared = Vec::with_capacity(batch.len());
        for request in batch {
            match self.prepare(request, id, Arc::clone(sink)) {
                Prepared::Read(queued) => prepared.push(queued),
                Prepared::Ended(queued, error) => ended.push((queued, error)),
            }
        }
        let mut state = self.state.lock();
        let mut pushed = 0;
        for queued in prepared {
            let queue = queue_of(queued.op.class, queued.op.lane);
            if state.queues[queue].len() >= self.limits.queue_requests_max && !state.closed {
                if queued.op.class == ReadClass::Lookahead {
                    self.counters.refused.increment();
                    let error = ReadError::QueueFull(queued.op.label.clone());
                    ended.push((queued, Some(error)));
                    continue;
                }
                self.wake(std::mem::take(&mut pushed));
                self.wait_for_room(&mut state, queue);
            }
            if state.closed {
                let error = ReadError::Stopped(queued.op.label.clone());
                ended.push((queued, Some(error)));
            } else {
                pushed += queued.bytes.div_ceil(self.limits.piece_bytes);
                state.push(queued);
            }
        }
        drop(state);
        self.wake(pushed);
        for (queued, error) in ended {
            self.end_rest(queued, error);
        }
        id
    }

    fn wait_for_room(&self, state: &mut MutexGuard<'_, State>, queue: usize) {
        let since = Instant::now();
        state.submitters_waiting += 1;
        while state.queues[queue].len() >= self.limits.queue_requests_max && !state.closed {
            self.room.wait(state);
        }
        state.submitters_waiting -= 1;
        self.counters.queue_full_waits.increment();
        self.counters.queue_full_wait_ns.add_ns(since.elapsed());
    }

    fn prepare(&self, request: ReadRequest, batch: BatchId, sink: Arc<dyn ReadSink>) -> Prepared {
        let ReadRequest { extent, lane, class, label, mut region, tag } = request;
        let placement = self.alignment.place(extent.offset, extent.len);
        let (file_offset, skew, bytes) = placement.map_or((0, 0, 0), |p| (p.file_offset, p.skew, p.region_bytes));
        assert!(region.len() >= bytes, "region of {} bytes for a read of {bytes} ({label})", region.len());
        assert!(region.is_aligned_to(self.alignment.memory), "region of {label} not aligned");
        // The pieces of a cut read must reunite to this region, though the caller may have cut it from a larger loan.
        let sealed = bytes > self.limits.piece_bytes;
        if sealed {
            region = region.seal();
        }
        let end = Mutex::new(OpEnd { bytes_left: bytes, held: None, error: None });
        let op = Arc::new(Op { batch, tag, class, lane, label, extent, skew, sealed, sink, end });
        let queued = Queued { op, rest: region, bytes, file_offset };
        match placement {
            None => {
                let at = self.at(&queued.op);
                Prepared::Ended(queued, Some(ReadError::Io { at, errno: libc::EOVERFLOW }))
            }
            Some(_) if extent.len == 0 => Prepared::Ended(queued, None),
            Some(_) => Prepared::Read(queued),
        }
    }

    pub(super) fn cancel(&self, batch: BatchId) -> usize {
        let mut state = self.state.lock();
        let removed = state.remove(batch, 0..QUEUES);
        self.unlock(state, Vec::new());
        let count = removed.len();
        for queued in removed {
            let error = ReadError::Cancelled(queued.op.label.clone());
            self.end_rest(queued, Some(error));
        }
        count
    }

    pub(super) fn promote(&self, batch: BatchId) -> usize {
        let mut state = self.state.lock();
        let removed = state.remove(batch, 2..QUEUES);
        let count = removed.len();
        for queued in removed {
            let queue = queue_of(ReadClass::Demand, queued.op.lane);
            state.queued_bytes += queued.bytes as u64;
            state.queues[queue].push_back(queued);
        }
        self.unlock(state, Vec::new());
        count
    }

    /// Refuses new reads and ends those still in the queue. Reads under way are the workers' to finish.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        state.queued_bytes = 0;
        let removed: Vec<Queued> = state.queues.iter_mut().flat_map(std::mem::take).collect();
        drop(state);
        self.work.notify_all();
        self.room.notify_all();
        self.wake(usize::MAX);
        for queued in removed {
            let error = ReadError::Stopped(queued.op.label.clone());
            self.end_rest(queued, Some(error));
        }
    }

    /// Wakes as many workers as `pieces` can keep busy.
    fn wake(&self, pieces: usize) {
        if pieces == 0 {
            return;
        }
        if self.bells.is_empty() {
            match pieces {
                1 => drop(self.work.notify_one()),
                _ => drop(self.work.notify_all()),
            }
            return;
        }
        // All of them, even for one piece: any single worker may be at its bound.
        for bell in &self.bells {
            // A full counter means that the worker has a ring of the bell pending already.
            let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
        }
    }

    // ---- the workers' side ----

    /// Moves up to `pieces_max` pieces of at most `bytes_max` bytes (but at least one) into `out` without waiting; takes no more
    /// than a fair share, so that another worker finds some. Returns whether more are queued.
    pub(super) fn take(&self, pieces_max: usize, bytes_max: usize, out: &mut Vec<Piece>) -> bool {
        /// Below this many pieces sharing costs more system calls than it gains.
        const SHARE_MIN: usize = 8;
        let mut failed = Vec::new();
        let mut state = self.state.lock();
        let waiting = state.queued_entries().max((state.queued_bytes / self.limits.piece_bytes as u64) as usize);
        let share = pieces_max.min(waiting.div_ceil(self.workers_at_start).max(SHARE_MIN));
        let mut bytes = 0;
        while out.len() < share && bytes < bytes_max {
            let Some(piece) = self.pop(&mut state, &mut failed) else { break };
            bytes += piece.len();
            out.push(piece);
        }
        let more = state.queued_entries() > 0;
        self.unlock(state, failed);
        more
    }

    /// Waits for a piece. `None` when the pool is closed.
    pub(super) fn take_waiting(&self) -> Option<Piece> {
        let mut state = self.state.lock();
        loop {
            let mut failed = Vec::new();
            let piece = self.pop(&mut state, &mut failed);
            if piece.is_some() || !failed.is_empty() {
                self.unlock(state, failed);
                if piece.is_some() {
                    return piece;
                }
                state = self.state.lock();
                continue;
            }
            if state.closed {
                return None;
            }
            self.work.wait(&mut state);
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.state.lock().closed
    }

    /// The next piece by class, then age. Reads that failed already are moved to `failed` instead of being read on.
    fn pop(&self, state: &mut State, failed: &mut Vec<Queued>) -> Option<Piece> {
        loop {
            let queue = state.queues.iter_mut().find(|queue| !queue.is_empty())?;
            let front = queue.front_mut().expect("found not empty");
            if front.op.end.lock().error.is_some() {
                state.queued_bytes -= front.bytes as u64;
                failed.extend(queue.pop_front());
                continue;
            }
            let (op, file_offset, region, bytes) = if front.bytes <= self.limits.piece_bytes {
                let Queued { op, rest, bytes, file_offset } = queue.pop_front().expect("found not empty");
                (op, file_offset, rest, bytes)
            } else {
                let tail = front.rest.split_off(self.limits.piece_bytes);
                let region = std::mem::replace(&mut front.rest, tail);
                let file_offset = front.file_offset;
                let bytes = region.len();
                front.bytes -= bytes;
                front.file_offset += bytes as u64;
                (Arc::clone(&front.op), file_offset, region, bytes)
            };
            state.queued_bytes -= bytes as u64;
            let begun = Instant::now();
            if state.pieces_under_way == 0 {
                state.busy_since = Some(begun);
            }
            state.pieces_under_way += 1;
            self.counters.pieces.increment();
            let align = self.alignment.step() as usize;
            return Some(Piece { op, region, bytes, file_offset, landed: 0, retries: 0, begun, align });
        }
    }

    /// Lets submitters in where there is room now, and ends reads found to have failed.
    fn unlock(&self, state: MutexGuard<'_, State>, failed: Vec<Queued>) {
        let wake_submitters = state.submitters_waiting > 0;
        drop(state);
        if wake_submitters {
            self.room.notify_all();
        }
        for queued in failed {
            self.end_rest(queued, None);
        }
    }

    /// Takes the outcome of one kernel read of `piece.target()`: bytes or errno. Gives the piece back when it must be read on.
    pub(super) fn settle(&self, mut piece: Piece, outcome: Result<usize, i32>) -> Option<Piece> {
        match outcome {
            Ok(bytes) => {
                self.counters.device_bytes.add(bytes as u64);
                let landed = piece.resume_at() + bytes;
                if landed >= piece.needed() {
                    self.counters.latency.record(piece.begun.elapsed());
                    draw(&piece);
                    self.end_piece(piece, None);
                    None
                } else if landed > piece.landed {
                    piece.landed = landed;
                    piece.retries = 0;
                    self.counters.short_reads.increment();
                    Some(piece)
                } else if bytes > 0 && piece.retries < STANDSTILLS_MAX {
                    // As short as what is read twice: it tells nothing about the end of the file.
                    piece.retries += 1;
                    self.counters.short_reads.increment();
                    Some(piece)
                } else {
                    let error = self.end_of_file(&piece);
                    self.end_piece(piece, Some(error));
                    None
                }
            }
            Err(libc::EINTR | libc::EAGAIN) if piece.retries < RETRIES_MAX => {
                piece.retries += 1;
                self.counters.retries.increment();
                Some(piece)
            }
            Err(errno) => {
                let error = self.io_error(&piece, errno);
                self.end_piece(piece, Some(error));
                None
            }
        }
    }

    /// Ends a piece whose memory the kernel may still write: the memory is given up for good, never reused.
    #[cfg(target_os = "linux")]
    pub(super) fn lose(&self, piece: Piece, errno: i32) {
        let error = self.io_error(&piece, errno);
        let Piece { op, region, bytes, .. } = piece;
        std::mem::forget(region);
        self.landed_pieces(1);
        // A read that failed has no successor.
        let _ = self.end_part(&op, bytes, None, Some(error));
    }

    fn at(&self, op: &Op) -> ReadAt {
        let Extent { offset, len } = op.extent;
        ReadAt { path: Arc::clone(&self.path), offset, len, label: op.label.clone() }
    }

    fn io_error(&self, piece: &Piece, errno: i32) -> ReadError {
        let at = self.at(&piece.op);
        match self.check_file() {
            Err(change) => ReadError::Changed { at, change },
            Ok(()) => ReadError::Io { at, errno },
        }
    }

    fn end_of_file(&self, piece: &Piece) -> ReadError {
        let at = self.at(&piece.op);
        let end = piece.file_offset + piece.landed as u64;
        match self.check_file() {
            Err(change) => ReadError::Changed { at, change },
            Ok(()) => ReadError::EndOfFile { at, end },
        }
    }

    // ---- ends ----

    fn end_piece(&self, piece: Piece, error: Option<ReadError>) {
        let Piece { op, region, bytes, .. } = piece;
        self.landed_pieces(1);
        if let Some(next) = self.end_part(&op, bytes, Some(region), error) {
            // This worker takes one piece itself as soon as it is back from the sink.
            self.follow_up(next, &op, 1);
        }
    }

    fn end_rest(&self, queued: Queued, error: Option<ReadError>) {
        let Queued { op, rest, bytes, .. } = queued;
        if let Some(next) = self.end_part(&op, bytes, Some(rest), error) {
            self.follow_up(next, &op, 0);
        }
    }

    fn landed_pieces(&self, count: usize) {
        self.counters.pieces_ended.add(count as u64);
        let mut state = self.state.lock();
        state.pieces_under_way -= count;
        if state.pieces_under_way == 0 {
            let since = state.busy_since.take().expect("set with the first piece under way");
            self.counters.busy_ns.add_ns(since.elapsed());
        }
    }

    /// Accounts for `bytes` of the read; tells its sink when these were the last, and returns the read that the sink wants next.
    fn end_part(
        &self,
        op: &Arc<Op>,
        bytes: usize,
        region: Option<DestRegion>,
        error: Option<ReadError>,
    ) -> Option<ReadRequest> {
        let mut end = op.end.lock();
        if end.error.is_none() {
            end.error = error;
        }
        end.held = region;
        end.bytes_left -= bytes;
        if end.bytes_left > 0 {
            return None;
        }
        let (held, error) = (end.held.take(), end.error.take());
        drop(end);
        let result = match error {
            None => {
                let mut region = held.expect("only a lost piece has no region, and it has an error");
                if op.sealed {
                    region = region.reunite().expect("every other piece was dropped");
                }
                self.counters.reads.increment();
                self.counters.read_bytes.add(op.extent.len);
                Ok(Landed { region, skew: op.skew, len: op.extent.len as usize })
            }
            Some(error) => {
                match error {
                    ReadError::Cancelled(_) => self.counters.cancelled.increment(),
                    ReadError::QueueFull(_) => {}
                    _ => self.counters.failed.increment(),
                }
                Err(error)
            }
        };
        let landed_well = result.is_ok();
        op.sink.landed(op.tag, result).filter(|_| landed_well)
    }

    /// Queues what a sink handed back, past the bound: it takes the place of a read that has just left.
    fn follow_up(&self, request: ReadRequest, before: &Op, workers_awake: usize) {
        match self.prepare(request, before.batch, Arc::clone(&before.sink)) {
            Prepared::Ended(queued, error) => self.end_rest(queued, error),
            Prepared::Read(queued) => {
                let mut state = self.state.lock();
                if state.closed {
                    drop(state);
                    let error = ReadError::Stopped(queued.op.label.clone());
                    return self.end_rest(queued, Some(error));
                }
                let pieces = queued.bytes.div_ceil(self.limits.piece_bytes);
                state.push(queued);
                drop(state);
                self.wake(pieces - workers_awake);
            }
        }
    }

    /// A worker is leaving. The last one to go closes the pool, so that nobody waits for reads that no one will do.
    fn worker_left(&self) {
        let mut state = self.state.lock();
        state.workers -= 1;
        let last = state.workers == 0;
        drop(state);
        if last {
            self.close();
        }
    }
}

impl State {
    fn push(&mut self, queued: Queued) {
        self.queued_bytes += queued.bytes as u64;
        self.queues[queue_of(queued.op.class, queued.op.lane)].push_back(queued);
    }

    /// Takes out what the given queues hold of a batch.
    fn remove(&mut self, batch: BatchId, queues: std::ops::Range<usize>) -> Vec<Queued> {
        let mut removed = Vec::new();
        for queue in &mut self.queues[queues] {
            let (gone, kept): (VecDeque<_>, VecDeque<_>) =
                std::mem::take(queue).into_iter().partition(|queued| queued.op.batch == batch);
            *queue = kept;
            removed.extend(gone);
        }
        self.queued_bytes -= removed.iter().map(|queued| queued.bytes as u64).sum::<u64>();
        removed
    }

    fn queued_entries(&self) -> usize {
        self.queues.iter().map(VecDeque::len).sum()
    }
}

/// Held by each worker thread; reports its end, also by panic.
pub(super) struct WorkerGuard(pub(super) Arc<Pool>);

impl Drop for WorkerGuard {
    fn drop(&mut self) {
        self.0.worker_left();
    }
}

/// Shows a read that ended well to whoever draws.
fn draw(piece: &Piece) {
    if spans::is_wanted() {
        let bytes = piece.bytes as u64;
        let (what, detail) = match &piece.op.label {
            ReadLabel::Expert { key, .. } => {
                ("expert", Detail { layer: Some(key.layer.0), expert: Some(key.expert.0), bytes, rows: 0 })
            }
            ReadLabel::Row { layer, .. } => ("row", Detail { layer: Some(layer.0), bytes, ..Detail::default() }),
            ReadLabel::Tensor(_) => ("tensor", Detail { bytes, ..Detail::default() }),
        };
        spans::end(Row::Reads, what, piece.begun, detail);
    }
}
