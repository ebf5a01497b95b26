//! A reader that compares every expert and every row with its checksum before anybody uses it.
//! Owns the comparison and the one retry; never repairs a byte and never lets a wrong one pass. Surprising fact: a row is checked by
//! reading the whole 4 KiB block around it into memory of its own, since sums of single rows would be larger than memory.
//!
//! Experts are compared on threads of their own: a reader thread that sums up three megabytes would leave its ring empty meanwhile.
//! Rows are compared where they land.

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
use xxhash_rust::xxh3::xxh3_64;

use super::checksum::{BLOCK_BYTES, Checksums, block_extent, block_sum, table_blocks};
use super::layout::{Extent, LayerExperts, Layout, TableLayout};
use super::reader::{
    Alignment, BatchId, DestRegion, ExpertPart, FileChange, Landed, Lane, OpenError, ReadAt, ReadClass, ReadError,
    ReadLabel, ReadRequest, ReadResult, ReadSink, Reader, ReaderKind, ReaderNotice,
};
use crate::obs::{ReadCounters, VerifyCounters};
use crate::units::LayerIdx;

/// Regions for row blocks that are kept for the next reads: as many as a row table has under way.
const SPARE_REGIONS_MAX: usize = 2 * super::row_table::WINDOW_BLOCKS;

/// Threads that compare experts: they keep up with any drive, and on a smaller machine there is nothing to share.
const THREADS_MAX: usize = 4;

/// `inner` with checks.
pub struct VerifyingReader {
    inner: Arc<dyn Reader>,
    check: Arc<Check>,
    threads: Vec<JoinHandle<()>>,
}

/// What is known of the file, shared by all batches.
struct Check {
    sums: Arc<Checksums>,
    /// Place in the layout, by layer.
    layers: HashMap<LayerIdx, (usize, LayerExperts)>,
    tables: HashMap<LayerIdx, (usize, TableLayout)>,
    alignment: Alignment,
    path: Arc<Path>,
    /// Memory for row blocks.
    spare: Mutex<Vec<DestRegion>>,
    counters: Arc<VerifyCounters>,
    line: Mutex<Line>,
    bell: Condvar,
}

/// Experts that wait for their comparison; bounded by the regions that are lent to reads.
#[derive(Default)]
struct Line {
    waiting: VecDeque<Job>,
    is_closed: bool,
}

/// An expert's part that has landed.
struct Job {
    sink: Arc<CheckedSink>,
    entry: Entry,
    landed: Landed,
}

impl VerifyingReader {
    /// Checks what `inner` reads of the file of `layout` against `sums`.
    ///
    /// # Errors
    /// When the system gives no threads.
    pub fn new(inner: Arc<dyn Reader>, layout: &Layout, sums: Arc<Checksums>) -> Result<Self, OpenError> {
        let check = Check {
            sums,
            layers: layout.experts.iter().enumerate().map(|(i, l)| (l.layer, (i, *l))).collect(),
            tables: layout.tables.iter().enumerate().map(|(i, t)| (t.layer, (i, *t))).collect(),
            alignment: inner.alignment(),
            path: inner.path().into(),
            spare: Mutex::default(),
            counters: Arc::default(),
            line: Mutex::default(),
            bell: Condvar::new(),
        };
        let mut this = Self { inner, check: Arc::new(check), threads: Vec::new() };
        for number in 0..crate::sys::cpu_count().clamp(1, THREADS_MAX) {
            let (check, inner) = (Arc::clone(&this.check), Arc::clone(&this.inner));
            let builder = std::thread::Builder::new().name(format!("ds4-verify-{number}"));
            let thread = builder.spawn(move || check.work(inner.as_ref()));
            // Dropping what there is ends the threads before.
            this.threads.push(thread.map_err(|source| OpenError::Threads { source })?);
        }
        Ok(this)
    }

    /// Live counters.
    pub fn verify_counters(&self) -> Arc<VerifyCounters> {
        Arc::clone(&self.check.counters)
    }

    /// Most memory for row blocks, beside the sums themselves.
    pub fn memory_bytes_max(&self) -> u64 {
        let rows = self.check.tables.values().map(|(_, t)| self.check.row_region_bytes(u64::from(t.row_bytes)));
        rows.max().unwrap_or(0) * SPARE_REGIONS_MAX as u64
    }
}

impl Drop for VerifyingReader {
    fn drop(&mut self) {
        // Whatever lands later is compared where it lands.
        self.check.line.lock().is_closed = true;
        self.check.bell.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// How the bytes of a read are to be checked.
#[derive(Clone, Copy)]
enum Rule {
    /// Against one sum.
    Whole(u64),
    /// Block by block of the table at this place in the layout.
    Blocks { table: usize, layout: TableLayout },
    /// Nothing is known of it.
    None,
}

/// A read under way.
struct Entry {
    /// The request as it came.
    tag: u64,
    extent: Extent,
    label: ReadLabel,
    rule: Rule,
    /// The caller's region, while the bytes land in one of ours.
    lent: Option<DestRegion>,
    is_second_try: bool,
}

impl Check {
    /// A comparing thread, until the reader goes.
    fn work(&self, inner: &dyn Reader) {
        loop {
            let mut line = self.line.lock();
            let job = loop {
                match line.waiting.pop_front() {
                    Some(job) => break job,
                    None if line.is_closed => return,
                    None => self.bell.wait(&mut line),
                }
            };
            drop(line);
            let Job { sink, entry, landed } = job;
            if let Some(next) = sink.compare(entry, landed) {
                inner.submit(vec![next], sink);
            }
        }
    }

    fn rule(&self, extent: Extent, label: &ReadLabel) -> Rule {
        match label {
            ReadLabel::Expert { key, part } => {
                let part = match part {
                    ExpertPart::Gate => 0,
                    ExpertPart::Up => 1,
                    ExpertPart::Down => 2,
                };
                match self.layers.get(&key.layer) {
                    Some((at, layer)) if layer.extents(key.expert)[part] == extent => {
                        Rule::Whole(self.sums.expert(*at, key.expert, part))
                    }
                    _ => Rule::None,
                }
            }
            ReadLabel::Row { layer, .. } => match self.tables.get(layer) {
                Some((table, layout)) if is_inside(layout, extent) => Rule::Blocks { table: *table, layout: *layout },
                _ => Rule::None,
            },
            ReadLabel::Tensor(_) => Rule::None,
        }
    }

    /// Bytes of a region for the blocks around `bytes` bytes at any offset.
    fn row_region_bytes(&self, bytes: u64) -> u64 {
        let align = u64::from(self.alignment.offset).max(BLOCK_BYTES);
        (bytes + BLOCK_BYTES - 1).next_multiple_of(align) + align
    }

    /// A region of `bytes` at least.
    fn region(&self, bytes: u64) -> std::io::Result<DestRegion> {
        let mut spare = self.spare.lock();
        if let Some(at) = spare.iter().rposition(|r| r.len() as u64 >= bytes) {
            return Ok(spare.swap_remove(at));
        }
        drop(spare);
        DestRegion::anonymous(bytes as usize)
    }

    fn keep(&self, region: DestRegion) {
        let mut spare = self.spare.lock();
        if spare.len() < SPARE_REGIONS_MAX {
            spare.push(region);
        }
    }

    /// The first sum that does not fit: where, what was expected, what was found.
    fn mismatch(&self, rule: Rule, read: Extent, bytes: &[u8]) -> Option<(Extent, u64, u64)> {
        match rule {
            Rule::None => None,
            Rule::Whole(expected) => {
                let found = xxh3_64(bytes);
                (found != expected).then_some((read, expected, found))
            }
            Rule::Blocks { table, layout } => {
                let first = table_blocks(&layout).start;
                blocks_of(read).find_map(|block| {
                    let extent = block_extent(&layout, block);
                    let at = (extent.offset - read.offset) as usize;
                    let found = block_sum(&bytes[at..at + extent.len as usize]);
                    let expected = self.sums.table(table, (block - first) as usize);
                    (found != expected).then_some((extent, u64::from(expected), u64::from(found)))
                })
            }
        }
    }
}

fn is_inside(table: &TableLayout, extent: Extent) -> bool {
    let end = table.offset + table.rows * u64::from(table.row_bytes);
    extent.len > 0 && extent.offset >= table.offset && extent.offset + extent.len <= end
}

fn blocks_of(extent: Extent) -> std::ops::Range<u64> {
    extent.offset / BLOCK_BYTES..(extent.offset + extent.len).div_ceil(BLOCK_BYTES)
}

/// The range that is really read for `extent`: whole blocks, as far as the table goes.
fn widened(layout: &TableLayout, extent: Extent) -> Extent {
    let blocks = blocks_of(extent);
    let (first, last) = (block_extent(layout, blocks.start), block_extent(layout, blocks.end - 1));
    Extent { offset: first.offset, len: last.offset + last.len - first.offset }
}

/// Stands between the reader and the sink of one batch.
struct CheckedSink {
    me: Weak<CheckedSink>,
    check: Arc<Check>,
    sink: Arc<dyn ReadSink>,
    /// By the tag that the inner reader sees.
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    all: Vec<Option<Entry>>,
    free: Vec<usize>,
}

impl Entries {
    fn put(&mut self, entry: Entry) -> u64 {
        let at = self.free.pop().unwrap_or(self.all.len());
        if at == self.all.len() {
            self.all.push(None);
        }
        self.all[at] = Some(entry);
        at as u64
    }

    fn take(&mut self, tag: u64) -> Entry {
        self.free.push(tag as usize);
        self.all[tag as usize].take().expect("every read ends once")
    }
}

impl CheckedSink {
    /// The request to make for `request`; `Err` with the error of one for which there is no memory.
    fn admit(&self, request: ReadRequest) -> Result<ReadRequest, (u64, ReadError)> {
        let ReadRequest { extent, lane, class, label, region, tag } = request;
        let rule = self.check.rule(extent, &label);
        let mut entry = Entry { tag, extent, label: label.clone(), rule, lent: None, is_second_try: false };
        let (extent, region) = match rule {
            Rule::Blocks { layout, .. } => {
                let wide = widened(&layout, extent);
                let ours = self.check.region(self.check.row_region_bytes(extent.len)).map_err(|_| {
                    let at = self.at(&entry, extent);
                    (tag, ReadError::Io { at, errno: libc::ENOMEM })
                })?;
                entry.lent = Some(region);
                (wide, ours)
            }
            _ => (extent, region),
        };
        let tag = self.entries.lock().put(entry);
        Ok(ReadRequest { extent, lane, class, label, region, tag })
    }

    fn at(&self, entry: &Entry, extent: Extent) -> ReadAt {
        let (path, label) = (Arc::clone(&self.check.path), entry.label.clone());
        ReadAt { path, offset: extent.offset, len: extent.len, label }
    }

    /// What the caller is told of good bytes.
    fn deliver(&self, entry: &mut Entry, read: Extent, mut landed: Landed) -> Landed {
        let Some(mut lent) = entry.lent.take() else { return landed };
        let placement = self.check.alignment.place(entry.extent.offset, entry.extent.len);
        let skew = placement.expect("the wider range was placed").skew;
        let len = entry.extent.len as usize;
        let from = (entry.extent.offset - read.offset) as usize;
        lent.bytes_mut()[skew..skew + len].copy_from_slice(&landed.bytes()[from..from + len]);
        std::mem::swap(&mut landed.region, &mut lent);
        self.check.keep(lent);
        Landed { region: landed.region, skew, len }
    }
}

impl ReadSink for CheckedSink {
    fn landed(&self, tag: u64, result: ReadResult) -> Option<ReadRequest> {
        let entry = self.entries.lock().take(tag);
        let landed = match result {
            Ok(landed) => landed,
            Err(error) => return self.hand_on(entry.tag, Err(error)),
        };
        let (Rule::Whole(_), Some(sink)) = (entry.rule, self.me.upgrade()) else { return self.compare(entry, landed) };
        let mut line = self.check.line.lock();
        if line.is_closed {
            drop(line);
            return self.compare(entry, landed);
        }
        line.waiting.push_back(Job { sink, entry, landed });
        drop(line);
        self.check.bell.notify_one();
        None
    }
}

impl CheckedSink {
    /// Compares what has landed and tells the caller, or asks for the same read once more.
    fn compare(&self, mut entry: Entry, landed: Landed) -> Option<ReadRequest> {
        let counters = &self.check.counters;
        let read = match entry.rule {
            Rule::Blocks { layout, .. } => widened(&layout, entry.extent),
            _ => entry.extent,
        };
        let since = Instant::now();
        let mismatch = self.check.mismatch(entry.rule, read, landed.bytes());
        counters.hash_ns.add_ns(since.elapsed());
        let Some((extent, expected, found)) = mismatch else {
            let is_checked = !matches!(entry.rule, Rule::None);
            let counter = if is_checked { &counters.reads } else { &counters.unchecked };
            counter.increment();
            counters.bytes.add(if is_checked { read.len } else { 0 });
            counters.repaired.add(u64::from(entry.is_second_try));
            let landed = self.deliver(&mut entry, read, landed);
            return self.hand_on(entry.tag, Ok(landed));
        };
        counters.mismatches.increment();
        if !entry.is_second_try {
            entry.is_second_try = true;
            return Some(self.again(entry, read, landed.region));
        }
        counters.failed.increment();
        if entry.lent.is_some() {
            self.check.keep(landed.region);
        }
        let at = self.at(&entry, extent);
        self.hand_on(entry.tag, Err(ReadError::Corrupt { at, expected, found }))
    }

    /// Tells the caller how a read ended, and takes the next one that it may ask for.
    fn hand_on(&self, tag: u64, result: ReadResult) -> Option<ReadRequest> {
        let mut next = self.sink.landed(tag, result);
        loop {
            match self.admit(next?) {
                Ok(request) => return Some(request),
                Err((tag, error)) => next = self.sink.landed(tag, Err(error)),
            }
        }
    }

    /// The same read once more, in the same memory.
    fn again(&self, entry: Entry, read: Extent, region: DestRegion) -> ReadRequest {
        let lane = if matches!(entry.label, ReadLabel::Row { .. }) { Lane::Rows } else { Lane::Bulk };
        let label = entry.label.clone();
        let tag = self.entries.lock().put(entry);
        // Somebody waited for it already, whatever class it had.
        ReadRequest { extent: read, lane, class: ReadClass::Demand, label, region, tag }
    }
}

impl Reader for VerifyingReader {
    fn submit(&self, batch: Vec<ReadRequest>, sink: Arc<dyn ReadSink>) -> BatchId {
        let checked = Arc::new_cyclic(|me| CheckedSink {
            me: me.clone(),
            check: Arc::clone(&self.check),
            sink: Arc::clone(&sink),
            entries: Mutex::default(),
        });
        let mut admitted = Vec::with_capacity(batch.len());
        let mut refused = Vec::new();
        for request in batch {
            match checked.admit(request) {
                Ok(request) => admitted.push(request),
                Err(error) => refused.push(error),
            }
        }
        let id = self.inner.submit(admitted, checked);
        for (tag, error) in refused {
            let next = sink.landed(tag, Err(error));
            assert!(next.is_none(), "no read follows a failed one");
        }
        id
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
