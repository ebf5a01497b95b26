//! The slot table: which slot holds which expert, who holds the slot, and what becomes of landed reads.
//! Owns all state of the cache under one lock; never blocks, never calls the reader.
//! Surprising fact: a slot whose fill failed stays listed under its expert until the reader has let go of its memory.

use std::sync::Arc;

use cache_policy::{Directory, Phase, Placement, RouteError, sim::Tally};

use super::RouteSink;
use super::classes::{LayoutError, slot_plan};
use super::fill::{Batch, PARTS, tag_of};
use super::lease::LeaseParts;
use super::stats::{CacheStats, PhaseStats};
use crate::storage::layout::LayerExperts;
use crate::storage::reader::{
    Alignment, DestRegion, ExpertPart, Landed, Lane, ReadError, ReadLabel, ReadRequest, ReadResult,
};
use crate::units::{ExpertIdx, ExpertKey, LayerIdx};

/// Position of a slot among all slots.
pub(super) type SlotIdx = u32;
const NO_SLOT: SlotIdx = SlotIdx::MAX;
/// Emptied lease buffers kept for the next requests.
const SPARE_LEASES_MAX: usize = 16;

const PART_NAMES: [ExpertPart; PARTS] = [ExpertPart::Gate, ExpertPart::Up, ExpertPart::Down];

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
    Preload,
}

/// A fill that the reader works on.
struct Fill {
    purpose: FillFor,
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
    /// The fill failed, and the reader still has a piece of the memory.
    Draining(DestRegion),
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
}

impl Slot {
    /// Whether the slot can neither be given away nor evicted.
    fn is_busy(&self) -> bool {
        self.holds > 0 || matches!(self.state, State::Filling(_) | State::Draining(_))
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
    classes: Vec<ClassSlots>,
    draining: Vec<SlotIdx>,
    failures: Vec<Failure>,
    serial: u64,
    landings: u64,
    stats: CacheStats,
    placements: Vec<Placement>,
    spare_leases: Vec<LeaseParts>,
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
            }));
            // The first slot of the arena is taken first.
            let free = (first..slots.len()).rev().map(|s| s as SlotIdx).collect();
            classes.push(ClassSlots { total: slots.len() - first, free, busy: 0 });
        }
        assert!(slots.len() < NO_SLOT as usize, "more slots than slot numbers");
        let stats = CacheStats { slots: slots.len() as u64, ..CacheStats::default() };
        Ok(Self {
            slot_of: vec![NO_SLOT; base],
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
            room_waiters: 0,
            routes: None,
            preload: PreloadState::default(),
        })
    }

    pub fn all_keys(&self) -> Vec<ExpertKey> {
        let of_layer = |l: &Layer| {
            let layer = l.experts.layer;
            (0..l.experts.experts).map(move |e| ExpertKey { layer, expert: ExpertIdx(e) })
        };
        self.layers.iter().flatten().flat_map(of_layer).collect()
    }

    pub fn contains(&self, key: ExpertKey) -> bool {
        self.directory.contains(key)
    }

    pub fn stats(&self) -> CacheStats {
        let count = |is: fn(&Slot) -> bool| self.slots.iter().filter(|s| is(s)).count() as u64;
        CacheStats {
            slots_valid: count(|s| matches!(s.state, State::Valid(_))),
            slots_filling: count(|s| matches!(s.state, State::Filling(_))),
            slots_held: count(|s| s.holds > 0),
            ..self.stats
        }
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
            need.is_draining |= slot.is_some_and(|s| matches!(s.state, State::Draining(_)));
        }
        Ok(need)
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
        let served = self.directory.request(layer, ids, &mut is_held, &mut placements);
        if let (Ok(()), Some(routes)) = (&served, &mut self.routes) {
            routes.route(phase, layer, ids);
        }
        let mut batch = Batch::default();
        if served.is_ok() {
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
                let is_joined =
                    *placement == Placement::Hit && matches!(self.slots[slot as usize].state, State::Filling(_));
                self.stats.phase(phase).joined += u64::from(is_joined);
                self.hold(slot, lease);
            }
        }
        self.placements = placements;
        served.map(|()| batch)
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

    // ---- fills ----

    /// Takes a free slot for `key`, or the slot of `evict` with its memory made whole, and lists it under `key`.
    fn free_slot(&mut self, key: ExpertKey, evict: Option<ExpertKey>) -> SlotIdx {
        let slot = match evict {
            None => {
                let class = self.directory.class_of(key.layer).expect("the directory placed the expert");
                self.classes[class].free.pop().expect("the directory counts free slots as the table does")
            }
            Some(victim) => {
                let index = self.index(victim).expect("a victim belongs to the model");
                let slot = std::mem::replace(&mut self.slot_of[index], NO_SLOT);
                let at = &mut self.slots[slot as usize];
                assert!(at.holds == 0 && at.key == victim, "{victim} was evicted while held");
                let State::Valid(filled) = std::mem::replace(&mut at.state, State::Taken) else {
                    panic!("{victim} was evicted while its slot was not valid")
                };
                let filled = Arc::into_inner(filled).expect("leases drop the bytes before the hold");
                let Filled { parts, rest } = filled;
                drop(parts);
                at.state = State::Empty(rest.reunite().expect("all parts of a valid slot were at home"));
                slot
            }
        };
        let index = self.index(key).expect("the directory placed the expert");
        self.slot_of[index] = slot;
        slot
    }

    /// Cuts an empty slot's memory into the parts of `key` and adds their reads to `batch`.
    fn begin_fill(&mut self, slot: SlotIdx, key: ExpertKey, purpose: FillFor, batch: &mut Batch) {
        let layer = self.layers[usize::from(key.layer.0)].as_ref().expect("the directory placed the expert");
        let plan =
            slot_plan(&layer.experts, key.expert, self.alignment).expect("checked for every expert at the start");
        let extents = layer.experts.extents(key.expert);
        let at = &mut self.slots[slot as usize];
        let was_busy = at.is_busy();
        let State::Empty(mut tail) = std::mem::replace(&mut at.state, State::Taken) else {
            panic!("a slot that is filled for {key} is not empty")
        };
        for (part, (extent, stride)) in extents.into_iter().zip(plan.strides).enumerate() {
            let after = tail.split_off(stride);
            batch.requests.push(ReadRequest {
                extent,
                lane: Lane::Bulk,
                class: purpose.into(),
                label: ReadLabel::Expert { key, part: PART_NAMES[part] },
                region: std::mem::replace(&mut tail, after),
                tag: tag_of(slot, part),
            });
        }
        self.serial += 1;
        (at.key, at.serial) = (key, self.serial);
        let fill = Fill { purpose, parts: [const { None }; PARTS], ended: 0, rest: tail, error: None };
        at.state = State::Filling(Box::new(fill));
        batch.fills.push((slot, self.serial));
        self.recount(slot, was_busy);
    }

    /// Takes the end of one read.
    pub fn land(&mut self, slot: SlotIdx, part: usize, result: ReadResult) -> FillEnd {
        let State::Filling(fill) = &mut self.slots[slot as usize].state else {
            panic!("a read ended in slot {slot}, which is not being filled")
        };
        assert!(fill.ended & (1 << part) == 0, "part {part} of slot {slot} ended twice");
        fill.ended |= 1 << part;
        match result {
            Ok(landed) => fill.parts[part] = Some(landed),
            Err(error) => fill.error = fill.error.take().or(Some(error)),
        }
        if usize::from(fill.ended.count_ones() as u8) < PARTS { FillEnd::Pending } else { self.end_fill(slot) }
    }

    /// Ends the fill numbered `serial` if its reads were dropped without a result.
    pub fn abandon(&mut self, slot: SlotIdx, serial: u64) {
        let at = &mut self.slots[slot as usize];
        let State::Filling(fill) = &mut at.state else { return };
        if at.serial == serial {
            let label = ReadLabel::Expert { key: at.key, part: ExpertPart::Gate };
            fill.error = fill.error.take().or(Some(ReadError::Stopped(label)));
            self.end_fill(slot);
        }
    }

    fn end_fill(&mut self, slot: SlotIdx) -> FillEnd {
        let at = &mut self.slots[slot as usize];
        let was_busy = at.is_busy();
        let State::Filling(fill) = std::mem::replace(&mut at.state, State::Taken) else {
            unreachable!("callers have seen the fill")
        };
        let Fill { purpose, parts, rest, error, .. } = *fill;
        let end = match (parts, error) {
            ([Some(gate), Some(up), Some(down)], None) => {
                let bytes = (gate.len + up.len + down.len) as u64;
                self.landings += 1;
                at.landing = self.landings;
                at.state = State::Valid(Arc::new(Filled { parts: [gate, up, down], rest }));
                self.count_filled(purpose, bytes);
                FillEnd::Valid
            }
            (parts, error) => {
                let error = error.expect("a part is missing only after an error");
                drop(parts);
                let (serial, waiters) = (at.serial, std::mem::take(&mut at.holds));
                at.state = State::Draining(rest);
                self.draining.push(slot);
                self.count_failed(purpose, &error);
                if waiters > 0 {
                    self.failures.push(Failure { serial, waiters, error });
                }
                FillEnd::Failed
            }
        };
        if purpose == FillFor::Preload {
            self.preload.pending -= 1;
        }
        self.recount(slot, was_busy);
        if end == FillEnd::Failed {
            self.drain();
        }
        end
    }

    fn count_filled(&mut self, purpose: FillFor, bytes: u64) {
        match purpose {
            FillFor::Request(phase) => self.stats.phase(phase).read_bytes += bytes,
            FillFor::Preload => {
                self.stats.preloaded += 1;
                self.stats.preload_bytes += bytes;
            }
        }
    }

    fn count_failed(&mut self, purpose: FillFor, error: &ReadError) {
        match purpose {
            FillFor::Request(phase) => self.stats.phase(phase).failed += 1,
            FillFor::Preload => {
                // A preload that was cut short has not failed.
                self.stats.preload_failed += u64::from(!matches!(error, ReadError::Stopped(_)));
                self.preload.error.get_or_insert_with(|| error.clone());
            }
        }
    }

    /// Gives back the slots of failed fills whose memory is whole again.
    pub fn drain(&mut self) {
        for at in (0..self.draining.len()).rev() {
            let slot = self.draining[at];
            let entry = &mut self.slots[slot as usize];
            let State::Draining(rest) = std::mem::replace(&mut entry.state, State::Taken) else {
                unreachable!("only draining slots are listed")
            };
            match rest.reunite() {
                Ok(whole) => {
                    entry.state = State::Empty(whole);
                    let (key, class) = (entry.key, entry.class as usize);
                    self.draining.swap_remove(at);
                    self.recount(slot, true);
                    self.classes[class].free.push(slot);
                    self.directory.forget(key);
                    let index = self.index(key).expect("it was filled");
                    self.slot_of[index] = NO_SLOT;
                }
                Err(rest) => entry.state = State::Draining(rest),
            }
        }
    }

    pub fn is_draining(&self) -> bool {
        !self.draining.is_empty()
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

    // ---- preload ----

    /// Begins the fill of each of `keys` that is absent and for which a slot is free, the first keys first. Returns the
    /// reads in file order, in batches of at most `batch_experts`. The last keys are the first to leave the cache.
    pub fn begin_preload(&mut self, keys: &[ExpertKey], batch_experts: usize) -> Result<Vec<Batch>, RouteError> {
        for &key in keys {
            if self.directory.class_of(key.layer).is_none() {
                return Err(RouteError::UnknownLayer { layer: key.layer });
            }
            if self.index(key).is_none() {
                let experts = self.layers[usize::from(key.layer.0)].as_ref().map_or(0, |l| l.experts.experts);
                return Err(RouteError::UnknownExpert { key, experts });
            }
        }
        let mut chosen = Vec::new();
        for &key in keys {
            let class = self.directory.class_of(key.layer).expect("checked above");
            // Listing a chosen key at once makes a key that is named twice count once.
            if self.slot(key).is_none() && !self.classes[class].free.is_empty() {
                self.free_slot(key, None);
                chosen.push(key);
            }
        }
        // Policies order by insertion: what is wanted most comes last.
        for &key in chosen.iter().rev() {
            let added = self.directory.preload(key);
            assert!(added, "the directory counts free slots as the table does");
        }
        chosen.sort_unstable();
        self.preload = PreloadState { pending: chosen.len(), error: None };
        let mut batches = Vec::new();
        for keys in chosen.chunks(batch_experts) {
            let mut batch = Batch::default();
            for &key in keys {
                let slot = self.slot(key).expect("it was listed above");
                self.begin_fill(slot, key, FillFor::Preload, &mut batch);
            }
            batches.push(batch);
        }
        Ok(batches)
    }
}

/// Dense number of `key` among all experts.
fn index_in(layers: &[Option<Layer>], key: ExpertKey) -> Option<usize> {
    let layer = layers.get(usize::from(key.layer.0))?.as_ref()?;
    (key.expert.0 < layer.experts.experts).then(|| layer.base + usize::from(key.expert.0))
}
