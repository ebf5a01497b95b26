//! The slot table: which slot holds which expert, who holds the slot, and what becomes of landed reads.
//! Owns all state of the cache under one lock; never blocks, never calls the reader.
//! Surprising fact: a slot whose fill failed stays listed under its expert until the reader has let go of its memory.

mod ahead;
mod fills;

use std::sync::Arc;
use std::time::Instant;

use cache_policy::{Directory, Phase, Placement, PrefetchLedger, RouteError, sim::Tally};

use super::RouteSink;
use super::classes::{LayoutError, slot_plan};
use super::fill::{Batch, PARTS};
use super::lease::LeaseParts;
use super::stats::{CacheStats, PhaseStats};
use super::view::CacheView;
use crate::obs::snapshot::SlotStates;
use crate::storage::layout::LayerExperts;
use crate::storage::reader::{Alignment, BatchId, DestRegion, Landed, ReadError};
use crate::units::{ExpertIdx, ExpertKey, LayerIdx};

/// Position of a slot among all slots.
pub(super) type SlotIdx = u32;
const NO_SLOT: SlotIdx = SlotIdx::MAX;
/// Emptied lease buffers kept for the next requests.
const SPARE_LEASES_MAX: usize = 16;

/// The bytes of one expert in its slot.
pub(super) struct Filled {
    parts: [Landed; PARTS],
    /// The slot's memory behind the parts; the piece from which the slot is made whole again.
    rest: DestRegion,
}

impl Filled {
    /// Gate, up and down.
    pub fn slices(&self) -> [&[u8]; PARTS] {
        [self.parts[0].bytes(), self.parts[1].bytes(), self.parts[2].bytes()]
    }
}

/// Who asked for a fill.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FillFor {
    Request(Phase),
    Lookahead,
    Preload,
}

/// A fill that the reader works on.
struct Fill {
    purpose: FillFor,
    /// The reader's number for its batch, once that is known; only fills ahead of a request have one.
    batch: Option<BatchId>,
    /// A request has come to wait for it.
    is_wanted: bool,
    /// Its reads are being taken back: a request must not join it.
    is_cancelled: bool,
    parts: [Option<Landed>; PARTS],
    /// Bit by part: its read has ended.
    ended: u8,
    rest: DestRegion,
    error: Option<ReadError>,
}

enum State {
    /// The slot's memory, whole.
    Empty(DestRegion),
    Filling(Box<Fill>),
    Valid(Arc<Filled>),
    /// The fill failed at this time, and the reader still has a piece of the memory.
    Draining(DestRegion, Instant),
    /// The reader has given a piece of the memory up for good.
    Lost,
    /// In transition, within one call only.
    Taken,
}

struct Slot {
    state: State,
    key: ExpertKey,
    /// Leases on it.
    holds: u32,
    /// Number of the fill that the state belongs to.
    serial: u64,
    /// Landing order; meaningful when Valid.
    landing: u64,
    class: u32,
    came: Came,
}

/// What brought an expert into its slot, as far as somebody counts it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Came {
    Asked,
    /// By a preload, and nobody has used it yet.
    Preloaded,
    /// By a preload, and it has been used.
    PreloadedAndUsed,
}

impl Slot {
    /// Whether the slot can neither be given away nor evicted.
    fn is_busy(&self) -> bool {
        self.holds > 0 || matches!(self.state, State::Filling(_) | State::Draining(..))
    }
}

#[derive(Default)]
struct ClassSlots {
    total: usize,
    free: Vec<SlotIdx>,
    busy: usize,
}

/// A failed fill that leases have not heard of yet.
struct Failure {
    serial: u64,
    waiters: u32,
    error: ReadError,
}

/// What became of a slot when a read ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FillEnd {
    Pending,
    Valid,
    Failed,
}

/// What a waiting lease finds.
pub(super) enum Look {
    Pending,
    Ready { bytes: Arc<Filled>, landing: u64 },
    Failed(ReadError),
}

/// Slots that a request needs, against what there is.
pub(super) struct Need {
    pub slots_wanted: usize,
    pub slots_busy: usize,
    pub slots_total: usize,
    /// One of the experts is being cleared away after a failure.
    is_draining: bool,
}

impl Need {
    pub fn fits(&self) -> bool {
        !self.is_draining && self.slots_wanted <= self.slots_total - self.slots_busy
    }
}

/// How far the preload under way has come.
#[derive(Default)]
pub(super) struct PreloadState {
    pub pending: usize,
    pub error: Option<ReadError>,
}

/// A layer's experts and the dense number of its expert 0.
#[derive(Clone)]
struct Layer {
    experts: LayerExperts,
    base: usize,
}

pub(super) struct Table {
    directory: Directory,
    /// By layer index.
    layers: Vec<Option<Layer>>,
    alignment: Alignment,
    slots: Vec<Slot>,
    /// By dense number of the expert.
    slot_of: Vec<SlotIdx>,
    /// By dense number of the expert: requests since the start.
    uses: Vec<u32>,
    classes: Vec<ClassSlots>,
    draining: Vec<SlotIdx>,
    failures: Vec<Failure>,
    serial: u64,
    landings: u64,
    stats: CacheStats,
    placements: Vec<Placement>,
    spare_leases: Vec<LeaseParts>,
    /// Leases that are open.
    pub leases: usize,
    /// What became of the reads ahead.
    pub ledger: PrefetchLedger,
    /// Reads ahead under way, by slot and serial; some have ended.
    ahead: Vec<(SlotIdx, u64)>,
    pub room_waiters: usize,
    pub routes: Option<Box<dyn RouteSink>>,
    pub preload: PreloadState,
}

impl Table {
    pub fn new(
        directory: Directory,
        layout: &[LayerExperts],
        alignment: Alignment,
        memory: Vec<Vec<DestRegion>>,
    ) -> Result<Self, LayoutError> {
        let layers_len = layout.iter().map(|l| usize::from(l.layer.0) + 1).max().unwrap_or(0);
        let mut layers = vec![None; layers_len];
        let mut base = 0;
        for layer in layout {
            layers[usize::from(layer.layer.0)] = Some(Layer { experts: *layer, base });
            base += usize::from(layer.experts);
            for expert in (0..layer.experts).map(ExpertIdx) {
                let key = ExpertKey { layer: layer.layer, expert };
                slot_plan(layer, expert, alignment).ok_or(LayoutError::Unreachable { key })?;
            }
        }
        let (mut slots, mut classes) = (Vec::new(), Vec::new());
        for (class, regions) in memory.into_iter().enumerate() {
            let first = slots.len();
            slots.extend(regions.into_iter().map(|region| Slot {
                state: State::Empty(region),
                key: ExpertKey::new(0, 0),
                holds: 0,
                serial: 0,
                landing: 0,
                class: class as u32,
                came: Came::Asked,
            }));
            // The first slot of the arena is taken first.
            let free = (first..slots.len()).rev().map(|s| s as SlotIdx).collect();
            classes.push(ClassSlots { total: slots.len() - first, free, busy: 0 });
        }
        assert!(slots.len() < NO_SLOT as usize, "more slots than slot numbers");
        let stats = CacheStats { slots: slots.len() as u64, ..CacheStats::default() };
        Ok(Self {
            slot_of: vec![NO_SLOT; base],
            uses: vec![0; base],
            directory,
            layers,
            alignment,
            slots,
            classes,
            draining: Vec::new(),
            failures: Vec::new(),
            serial: 0,
            landings: 0,
            stats,
            placements: Vec::new(),
            spare_leases: Vec::new(),
            leases: 0,
            ledger: PrefetchLedger::new(),
            ahead: Vec::new(),
            room_waiters: 0,
            routes: None,
            preload: PreloadState::default(),
        })
    }

    /// Most distinct experts that one request may name: the slots of the smallest class.
    pub fn lease_max(&self) -> usize {
        self.classes.iter().map(|c| c.total).min().unwrap_or(0)
    }

    /// As `Directory::slots_to_spare`, of the class that has fewest.
    pub fn slots_to_spare(&self) -> usize {
        (0..self.classes.len()).map(|class| self.directory.slots_to_spare(class)).min().unwrap_or(0)
    }

    pub fn all_keys(&self) -> Vec<ExpertKey> {
        let of_layer = |l: &Layer| {
            let layer = l.experts.layer;
            (0..l.experts.experts).map(move |e| ExpertKey { layer, expert: ExpertIdx(e) })
        };
        self.layers.iter().flatten().flat_map(of_layer).collect()
    }

    /// Layers in the order of the dense numbers, with their numbers of experts.
    pub fn shape(&self) -> Vec<(LayerIdx, u16)> {
        let mut layers: Vec<&Layer> = self.layers.iter().flatten().collect();
        layers.sort_unstable_by_key(|l| l.base);
        layers.iter().map(|l| (l.experts.layer, l.experts.experts)).collect()
    }

    pub fn contains(&self, key: ExpertKey) -> bool {
        self.directory.contains(key)
    }

    pub fn stats(&self) -> CacheStats {
        let count = |is: fn(&Slot) -> bool| self.slots.iter().filter(|s| is(s)).count() as u64;
        CacheStats {
            slots_valid: count(|s| matches!(s.state, State::Valid(_))),
            slots_filling: count(|s| matches!(s.state, State::Filling(_) | State::Draining(..))),
            slots_held: count(|s| s.holds > 0),
            slots_lost: count(|s| matches!(s.state, State::Lost)),
            lookahead: self.ledger.total().into(),
            ..self.stats
        }
    }

    /// Slots by state and experts by layer. Short enough to run under the lock: one pass over slots and one over experts.
    pub fn view(&self, view: &mut CacheView) {
        let mut slots = SlotStates { total: self.slots.len() as u64, ..SlotStates::default() };
        for slot in &self.slots {
            match &slot.state {
                State::Empty(_) | State::Taken => slots.empty += 1,
                State::Filling(_) | State::Draining(..) => slots.filling += 1,
                State::Lost => slots.total -= 1,
                State::Valid(_) if slot.holds > 0 => slots.leased += 1,
                State::Valid(_) => slots.valid += 1,
            }
        }
        (view.slots, view.phases) = (slots, self.stats);
        view.uses.clone_from(&self.uses);
        view.is_cached.clear();
        let is_valid = |slot: SlotIdx| slot != NO_SLOT && matches!(self.slots[slot as usize].state, State::Valid(_));
        view.is_cached.extend(self.slot_of.iter().map(|&slot| is_valid(slot)));
    }

    pub fn stats_of(&mut self, phase: Phase) -> &mut PhaseStats {
        self.stats.phase(phase)
    }

    // ---- requests ----

    /// Checks a request and counts the slots it needs.
    pub fn need(&mut self, layer: LayerIdx, ids: &[ExpertIdx]) -> Result<Need, RouteError> {
        self.directory.check(layer, ids)?;
        let class = self.directory.class_of(layer).ok_or(RouteError::UnknownLayer { layer })?;
        let class = &self.classes[class];
        let mut need = Need { slots_wanted: 0, slots_busy: class.busy, slots_total: class.total, is_draining: false };
        for &expert in ids {
            let slot = self.slot(ExpertKey { layer, expert }).map(|s| &self.slots[s as usize]);
            need.slots_wanted += usize::from(slot.is_none_or(|s| !s.is_busy()));
            need.is_draining |= slot.is_some_and(|s| match &s.state {
                State::Draining(..) => true,
                State::Filling(fill) => fill.is_cancelled,
                _ => false,
            });
        }
        Ok(need)
    }

    /// Tells the directory, and whoever records, what a prompt uses most.
    pub fn favour(&mut self, layer: LayerIdx, ids: &[ExpertIdx]) {
        self.directory.favour(layer, ids);
        if let Some(routes) = &mut self.routes {
            routes.favour(layer, ids);
        }
    }

    /// Serves a request whose need fits: holds every expert, writes one lease entry an id, returns the reads to submit.
    pub fn serve(
        &mut self,
        layer: LayerIdx,
        ids: &[ExpertIdx],
        phase: Phase,
        lease: &mut LeaseParts,
    ) -> Result<Batch, RouteError> {
        let mut placements = std::mem::take(&mut self.placements);
        let (slots, slot_of, layers) = (&self.slots, &self.slot_of, &self.layers);
        let mut is_held = |key: ExpertKey| {
            let slot = index_in(layers, key).map_or(NO_SLOT, |i| slot_of[i]);
            slots.get(slot as usize).is_some_and(Slot::is_busy)
        };
        let served = self.directory.request_in(phase, layer, ids, &mut is_held, &mut placements);
        if let (Ok(()), Some(routes)) = (&served, &mut self.routes) {
            routes.route(phase, layer, ids, self.leases);
        }
        let mut batch = Batch::default();
        if served.is_ok() {
            self.leases += 1;
            let mut tally = Tally::default();
            tally.count(&placements);
            self.stats.phase(phase).add_tally(&tally);
            for (&expert, placement) in ids.iter().zip(&placements) {
                let key = ExpertKey { layer, expert };
                let slot = match *placement {
                    Placement::Hit => self.slot(key).expect("a present expert has a slot"),
                    Placement::Fill { evict } => {
                        let slot = self.free_slot(key, evict);
                        self.begin_fill(slot, key, FillFor::Request(phase), &mut batch);
                        slot
                    }
                };
                if *placement == Placement::Hit {
                    self.count_hit(slot, key, phase, &mut batch);
                }
                let index = self.index(key).expect("the directory has served the expert");
                self.uses[index] = self.uses[index].saturating_add(1);
                self.hold(slot, lease);
            }
        }
        self.placements = placements;
        served.map(|()| batch)
    }

    /// Counts a hit on `slot`; a read that runs ahead of requests is one that somebody waits for from now on.
    fn count_hit(&mut self, slot: SlotIdx, key: ExpertKey, phase: Phase, batch: &mut Batch) {
        self.ledger.used(key, 0);
        let at = &mut self.slots[slot as usize];
        if at.came == Came::Preloaded {
            at.came = Came::PreloadedAndUsed;
            self.stats.preload_used += 1;
        }
        self.stats.preload_hits += u64::from(at.came == Came::PreloadedAndUsed);
        if let State::Filling(fill) = &mut at.state {
            self.stats.phase(phase).joined += 1;
            let is_ahead = !matches!(fill.purpose, FillFor::Request(_));
            if is_ahead && !std::mem::replace(&mut fill.is_wanted, true) {
                batch.promote.extend(fill.batch);
            }
        }
    }

    /// Adds a hold and the lease entry that answers for it.
    fn hold(&mut self, slot: SlotIdx, lease: &mut LeaseParts) {
        let at = &mut self.slots[slot as usize];
        let was_busy = at.is_busy();
        at.holds += 1;
        let bytes = match &at.state {
            State::Valid(filled) => Some(Arc::clone(filled)),
            _ => None,
        };
        lease.push(slot, at.serial, bytes);
        self.recount(slot, was_busy);
    }

    /// Keeps the class's count of busy slots right after a change of `slot`.
    fn recount(&mut self, slot: SlotIdx, was_busy: bool) {
        let at = &self.slots[slot as usize];
        let class = &mut self.classes[at.class as usize];
        match (was_busy, at.is_busy()) {
            (false, true) => class.busy += 1,
            (true, false) => class.busy -= 1,
            _ => {}
        }
    }

    fn index(&self, key: ExpertKey) -> Option<usize> {
        index_in(&self.layers, key)
    }

    /// The slot listed under `key`.
    fn slot(&self, key: ExpertKey) -> Option<SlotIdx> {
        self.index(key).map(|i| self.slot_of[i]).filter(|&s| s != NO_SLOT)
    }

    // ---- leases ----

    pub fn take_lease_parts(&mut self) -> LeaseParts {
        self.spare_leases.pop().unwrap_or_default()
    }

    pub fn keep_lease_parts(&mut self, parts: LeaseParts) {
        if self.spare_leases.len() < SPARE_LEASES_MAX {
            self.spare_leases.push(parts);
        }
    }

    /// What became of fill `serial` in `slot`, on which the caller has a hold. A failure takes the hold away.
    pub fn look(&mut self, slot: SlotIdx, serial: u64) -> Look {
        let at = &self.slots[slot as usize];
        match &at.state {
            State::Valid(filled) if at.serial == serial => {
                Look::Ready { bytes: Arc::clone(filled), landing: at.landing }
            }
            State::Filling(_) if at.serial == serial => Look::Pending,
            _ => Look::Failed(self.take_failure(serial)),
        }
    }

    /// Ends a hold on fill `serial` in `slot`.
    pub fn unhold(&mut self, slot: SlotIdx, serial: u64) {
        let at = &mut self.slots[slot as usize];
        if at.serial == serial && matches!(at.state, State::Valid(_) | State::Filling(_)) {
            let was_busy = at.is_busy();
            at.holds -= 1;
            self.recount(slot, was_busy);
        } else {
            self.take_failure(serial);
        }
    }

    /// The error of a failed fill, for one of its waiters.
    fn take_failure(&mut self, serial: u64) -> ReadError {
        let found = self.failures.iter().position(|f| f.serial == serial);
        let at = found.expect("a hold ends with its slot valid, or with a failure kept for it");
        let failure = &mut self.failures[at];
        failure.waiters -= 1;
        if failure.waiters == 0 { self.failures.swap_remove(at).error } else { failure.error.clone() }
    }
}

/// Dense number of `key` among all experts.
fn index_in(layers: &[Option<Layer>], key: ExpertKey) -> Option<usize> {
    let layer = layers.get(usize::from(key.layer.0))?.as_ref()?;
    (key.expert.0 < layer.experts.experts).then(|| layer.base + usize::from(key.expert.0))
}
