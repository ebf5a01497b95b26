//! The expert cache: hands out routed experts by (layer, ids), reads what is missing, evicts by policy. Owns slots and holds.
//! Never grows after construction, never reads through mmap, and never calls the reader with its lock held.
//! Surprising fact: a slot's memory is an owned loan that travels to the reader and back, so no slot can be seen half filled.
//!
//! Lock order: one lock (`Shared::table`) and nothing under it but the reader's own locks when a batch is dropped unread.
//! States of a slot: Empty -> Filling -> Valid, with holds counted by leases; a failed fill goes back to Empty, through
//! Draining while the reader still has a piece of its memory.

mod classes;
mod fill;
mod lease;
mod lookahead;
mod preload;
mod stats;
mod table;
mod view;

use std::sync::Arc;
use std::time::{Duration, Instant};

use cache_policy::{Directory, Phase, Policy, RouteError};
use parking_lot::{Condvar, Mutex};

use crate::storage::layout::LayerExperts;
use crate::storage::reader::{DestRegion, ReadClass, ReadError, Reader};
use crate::units::{Bytes, ExpertIdx, ExpertKey, LayerIdx};

pub use classes::{LayoutError, SizeClass, size_classes};
pub use lease::Lease;
pub use preload::{PreloadProgress, PreloadReport};
pub use stats::{CacheStats, LookaheadCounts, PhaseStats};
pub use view::CacheView;

use fill::{Batch, FillGuard};
use table::Table;

/// Why experts cannot be had. The request has failed as a whole; the cache is as it was, and the next request works.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// The request does not fit the model or the cache.
    #[error(transparent)]
    Route(#[from] RouteError),
    /// A read failed; the error names file, offset, layer and expert.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// Other leases hold too many slots for too long.
    #[error(
        "{asked} slots for layer {} did not come free within {waited_ms} ms: {held} of {slots} are held; \
         run fewer sessions at once or raise --ssd-streaming-cache-experts", layer.0
    )]
    Crowded {
        /// Layer asked.
        layer: LayerIdx,
        /// Slots the request needs.
        asked: usize,
        /// Slots held or being filled.
        held: usize,
        /// Slots of the size class.
        slots: usize,
        /// How long the request waited.
        waited_ms: u64,
    },
    /// The layout cannot be cached.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The memory given does not fit the classes.
    #[error("the memory of size class {class} does not fit: {what}")]
    BadMemory {
        /// Position of the class.
        class: usize,
        /// What is wrong.
        what: &'static str,
    },
}

/// Told of every valid request, in the order in which the policy serves them.
///
/// Runs under the cache's lock: it must be short and must not call the cache.
pub trait RouteSink: Send {
    /// `ids` of `layer` were requested in `phase`, while `overlap` earlier requests held their experts.
    fn route(&mut self, phase: Phase, layer: LayerIdx, ids: &[ExpertIdx], overlap: usize);

    /// `ids` are what a prompt uses most of `layer`, best first.
    fn favour(&mut self, layer: LayerIdx, ids: &[ExpertIdx]) {
        let _ = (layer, ids);
    }

    /// `keys` were taken into the cache unasked, most wanted first.
    fn preload(&mut self, keys: &[ExpertKey]) {
        let _ = keys;
    }
}

/// What a cache is built from.
pub struct CacheParts<'a> {
    /// Reads the model file.
    pub reader: Arc<dyn Reader>,
    /// Routed experts by layer.
    pub layout: &'a [LayerExperts],
    /// What `size_classes` made of `layout` for the reader's alignment.
    pub classes: &'a [SizeClass],
    /// One region a slot, by class; each at least the class's `slot_bytes`.
    pub memory: Vec<Vec<DestRegion>>,
    /// Makes the policy of a class with so many slots.
    pub policy: &'a dyn Fn(usize) -> Box<dyn Policy>,
    /// How long a request waits for slots that other leases hold.
    pub hold_wait: Duration,
}

/// Patience with other leases: longer than a drive that stalls for 5 s, short enough to name a deadlock.
pub const HOLD_WAIT: Duration = Duration::from_secs(30);

/// What requests, sinks and leases share.
struct Shared {
    table: Mutex<Table>,
    /// A fill has ended.
    landed: Condvar,
    /// A slot may have come free; waited for by requests.
    room: Condvar,
}

/// Experts in memory, and the rest of them one read away.
pub struct ExpertCache {
    shared: Arc<Shared>,
    reader: Arc<dyn Reader>,
    slots: usize,
    arena: Bytes,
    hold_wait: Duration,
    /// One preload at a time.
    preloading: Mutex<()>,
}

impl ExpertCache {
    /// An empty cache over `parts.memory`, which is all the memory it will ever use for experts.
    ///
    /// # Errors
    /// `BadMemory` when regions are missing, too small or misaligned; `Layout` when an extent cannot be read.
    pub fn new(parts: CacheParts<'_>) -> Result<Self, CacheError> {
        let CacheParts { reader, layout, classes, memory, policy, hold_wait } = parts;
        let alignment = reader.alignment();
        if memory.len() != classes.len() {
            return Err(CacheError::BadMemory { class: memory.len(), what: "a class has no memory" });
        }
        for (at, (class, slots)) in classes.iter().zip(&memory).enumerate() {
            let bad = |what| Err(CacheError::BadMemory { class: at, what });
            if slots.is_empty() {
                return bad("it has no slot");
            }
            if slots.iter().any(|s| (s.len() as u64) < class.slot_bytes.0) {
                return bad("a slot is smaller than an expert with its padding");
            }
            if slots.iter().any(|s| !s.is_aligned_to(alignment.memory)) {
                return bad("a slot is not aligned for direct reads");
            }
        }
        let slots = memory.iter().map(Vec::len).sum();
        let arena = Bytes(memory.iter().flatten().map(|s| s.len() as u64).sum());
        let shapes: Vec<_> = classes.iter().zip(&memory).map(|(c, m)| c.shape(m.len())).collect();
        let table = Table::new(Directory::new(&shapes, policy), layout, alignment, memory)?;
        let shared = Shared { table: Mutex::new(table), landed: Condvar::new(), room: Condvar::new() };
        Ok(Self { shared: Arc::new(shared), reader, slots, arena, hold_wait, preloading: Mutex::new(()) })
    }

    /// Most distinct experts that one lease may hold: the slots of the smallest class.
    pub fn lease_max(&self) -> usize {
        self.shared.table.lock().lease_max()
    }

    /// Slots of all classes.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Bytes of all slots: what the plan calls the expert cache.
    pub fn arena(&self) -> Bytes {
        self.arena
    }

    /// Counters since the start.
    pub fn stats(&self) -> CacheStats {
        let mut table = self.shared.table.lock();
        table.drain();
        table.stats()
    }

    /// Whether `key` is in memory or on its way.
    pub fn contains(&self, key: ExpertKey) -> bool {
        self.shared.table.lock().contains(key)
    }

    /// Sends every route to `sink` from now on; `None` ends it. Returns the sink before.
    pub fn set_route_sink(&self, sink: Option<Box<dyn RouteSink>>) -> Option<Box<dyn RouteSink>> {
        std::mem::replace(&mut self.shared.table.lock().routes, sink)
    }

    /// Holds `ids` (distinct) of `layer` and starts, or joins, the reads of those not in memory. Blocks only while other
    /// leases hold the slots it needs: whoever asks while holding a lease must leave room for both (a request of
    /// `lease_max / 2` always fits beside one of the same size, if nobody else holds any).
    ///
    /// # Errors
    /// `Route` when the request fits no cache of this model, `Crowded` when slots did not come free in time. Read errors
    /// come from the lease.
    pub fn request(&self, layer: LayerIdx, ids: &[ExpertIdx], phase: Phase) -> Result<Lease<'_>, CacheError> {
        let mut table = self.shared.table.lock();
        let mut since: Option<Instant> = None;
        loop {
            table.drain();
            let need = table.need(layer, ids)?;
            if need.fits() {
                break;
            }
            let waited = since.get_or_insert_with(Instant::now).elapsed();
            if waited >= self.hold_wait {
                let waited_ms = u64::try_from(waited.as_millis()).unwrap_or(u64::MAX);
                return Err(CacheError::Crowded {
                    layer,
                    asked: need.slots_wanted,
                    held: need.slots_busy,
                    slots: need.slots_total,
                    waited_ms,
                });
            }
            // Nobody announces that the reader has let go of a failed read's memory; it does so within microseconds.
            let patience = if table.is_draining() { DRAIN_POLL } else { self.hold_wait - waited };
            table.room_waiters += 1;
            self.shared.room.wait_for(&mut table, patience);
            table.room_waiters -= 1;
        }
        if let Some(since) = since {
            table.stats_of(phase).room_wait_ns += since.elapsed().as_nanos() as u64;
        }
        let mut parts = table.take_lease_parts();
        let mut batch = table.serve(layer, ids, phase, &mut parts)?;
        drop(table);
        let lease = Lease::new(&self.shared, phase, parts);
        for waited_for in batch.promote.drain(..) {
            self.reader.promote(waited_for);
        }
        if !batch.is_empty() {
            self.submit(batch);
        }
        Ok(lease)
    }

    /// Says what a prompt uses most of `layer`, best first, before it is requested: that stays, the rest of the prompt's experts leave first.
    pub fn favour(&self, layer: LayerIdx, ids: &[ExpertIdx]) {
        self.shared.table.lock().favour(layer, ids);
    }

    /// Fewest slots of a class that hold nothing worth keeping: a sweep may take them without anybody's loss.
    pub fn slots_to_spare(&self) -> usize {
        self.shared.table.lock().slots_to_spare()
    }

    /// Hands a batch to the reader. From here on every read ends at the guard, one way or another.
    fn submit(&self, batch: Batch) {
        let guard = FillGuard::new(Arc::clone(&self.shared), &batch);
        self.reader.submit(batch.requests, Arc::new(guard));
    }
}

const DRAIN_POLL: Duration = Duration::from_millis(1);

impl From<table::FillFor> for ReadClass {
    fn from(purpose: table::FillFor) -> Self {
        match purpose {
            table::FillFor::Request(_) => Self::Demand,
            table::FillFor::Lookahead => Self::Lookahead,
            table::FillFor::Preload => Self::Preload,
        }
    }
}
