//! Where experts lie in the device's memory, as the device itself looks it up: a table of slots, and one gate a layer.
//! Never lets a kernel wait for ever: a pass that is dropped before its end opens all of its gates. Surprising fact: the host learns of every
//! choice by reading memory that a kernel has written, so no call of the driver is made for it.

use std::borrow::Cow;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use cudarc::driver::CudaEvent;
use parking_lot::Mutex;

use super::device::{Device, Lane};
use super::gate_times::GateTimes;
use super::host_memory::HostBytes;
use super::launch::expert_gate::{self, Gate};
use super::launch::experts_row::{self, EXPERTS_MAX};
use super::memory::Bytes;
use super::segments::{Recorded, Segments};
use super::{CudaBackend, CudaBuf, CudaIds, CudaSlab};
use crate::backend::BackendError;
use crate::obs::spans;

pub use super::launch::expert_gate::CHANGES_MAX;
pub use super::launch::experts_row::ExpertShape;

/// Words of one layer's entry in host memory: the pass, whether all experts were there, their ids; then, on a line of their own, the pass and the
/// experts that were guessed for it. Whole cache lines.
const TOLD_WORDS: usize = 64;
/// Where the guess begins.
const GUESS_AT: usize = 32;
/// Experts of a guess.
pub const NAMED_MAX: usize = 4;

/// The table of one model's experts.
pub struct SlotTable {
    layers: usize,
    experts: usize,
    /// `[layers, experts]` addresses, 0 where an expert is not there.
    table: Bytes,
    /// `[layers + 1]` words: the last pass that a gate was opened for. Nobody waits at the last one.
    gates: Bytes,
    /// `[EXPERTS_MAX]` ids and addresses of the row under way.
    sorted: Bytes,
    slots: Bytes,
    /// What kernels tell, by layer; behind it the word that stops a pass.
    told: HostBytes,
    /// What the whole table is rewritten from.
    image: Mutex<HostBytes>,
    /// Number of the last pass.
    pass: AtomicU32,
    segments: Segments,
    /// Behind the last upload ahead, and behind the last change of the table.
    copied: CudaEvent,
    changed: CudaEvent,
    times: GateTimes,
    device: Arc<Device>,
}

/// What a layer's router chose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Told {
    /// In its order; the first `k` count.
    pub ids: [i32; EXPERTS_MAX],
    /// Whether the device found all of them, and went on.
    pub are_all: bool,
}

impl SlotTable {
    pub(super) fn new(device: &Arc<Device>, layers: usize, experts: usize) -> Result<Self, BackendError> {
        let bytes = |what, len| {
            let bytes = Bytes::new(device, what, len)?;
            device.zero(bytes.at, len)?;
            Ok(bytes)
        };
        let entries = 8 * layers * experts;
        let told = device.host_bytes(4 * TOLD_WORDS * (layers + 1))?;
        Ok(Self {
            layers,
            experts,
            table: bytes("the table of slots", entries)?,
            gates: bytes("gates of experts", 4 * (layers + 1))?,
            sorted: bytes("ids of a row", 4 * EXPERTS_MAX)?,
            slots: bytes("slots of a row", 8 * EXPERTS_MAX)?,
            told,
            image: Mutex::new(device.host_bytes(entries)?),
            pass: AtomicU32::new(0),
            segments: Segments::default(),
            copied: device.event()?,
            changed: device.event()?,
            times: GateTimes::new(device, layers)?,
            device: Arc::clone(device),
        })
    }

    /// Calls its layers by these numbers where they are drawn, else they count from 0.
    #[must_use]
    pub fn with_names(mut self, names: Vec<u16>) -> Self {
        self.times.set_names(names);
        self
    }

    /// Writes the whole table: `filled` are the experts that are there, by entry (`layer * experts + expert`), with their addresses. No pass is
    /// under way.
    ///
    /// # Errors
    /// Failures of the device.
    pub fn rewrite(&self, filled: impl Iterator<Item = (usize, u64)>) -> Result<(), BackendError> {
        if !self.device.has_ended()? {
            // An earlier rewriting may still read the image.
            self.device.wait()?;
        }
        let mut image = self.image.lock();
        let words: &mut [u64] = bytemuck::cast_slice_mut(image.write());
        words.fill(0);
        filled.for_each(|(entry, address)| words[entry] = address);
        self.device.upload_kept(&image, self.table.len, self.table.at)
    }

    /// A pass over one row begins on this thread.
    ///
    /// # Errors
    /// Failures of the device; memory that it has not.
    pub fn begin<'a>(&'a self, backend: &'a CudaBackend, room: Room) -> Result<SlotPass<'a>, BackendError> {
        let Room { hidden, width, k, is_registered } = room;
        backend.rounded.reserve(&self.device, (hidden.max(k * width), k * width))?;
        // Aside are products of a row of the model's width and of an expert's.
        backend.rounded_beside.reserve(&self.device, (hidden.max(width), 0))?;
        backend.stager.reserve(&self.device, is_registered)?;
        backend.scores.reserve(&self.device)?;
        self.device.begin_awaiting()?;
        self.times.begin(&self.device)?;
        // Relaxed: a pass runs on one thread.
        let number = self.pass.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let (chosen, looking) = (Cell::default(), Cell::default());
        Ok(SlotPass { table: self, backend, number, is_over: false, recorded: None, chosen, looking })
    }

    /// What the device's clock said of the last pass whose time was taken.
    pub fn times(&self) -> &GateTimes {
        &self.times
    }

    fn stop_word(&self) -> usize {
        TOLD_WORDS * self.layers
    }
}

/// What a pass must not have to allocate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Room {
    pub hidden: usize,
    /// Width of an expert.
    pub width: usize,
    /// Experts of a row.
    pub k: usize,
    /// Whether experts come from memory that the device knows.
    pub is_registered: bool,
}

/// One row on its way through layers whose experts the device finds; dropped before [`Self::end`] it is given up, and what it computed is
/// nothing.
pub struct SlotPass<'a> {
    table: &'a SlotTable,
    backend: &'a CudaBackend,
    number: u32,
    is_over: bool,
    /// Ops that were recorded and not started.
    recorded: Option<Recorded>,
    /// Layers whose choice was asked for, and those of them that the device was given.
    chosen: Cell<[usize; 2]>,
    /// When the host found for the first time that a choice was not told, if it has done nothing since but look again.
    looking: Cell<Option<Instant>>,
}

impl SlotPass<'_> {
    fn gate(&self, layer: usize) -> Gate {
        let t = self.table;
        assert!(layer < t.layers, "layer {layer} of {}", t.layers);
        Gate {
            word: t.gates.at + 4 * layer as u64,
            pass: self.number,
            table: t.table.at + (8 * layer * t.experts) as u64,
            sorted: t.sorted.at,
            times: t.times.layer(layer),
        }
    }

    /// Queues the question which experts of `layer` (counted among those with experts) are absent. `weights` go to `sorted` by rising id.
    ///
    /// # Errors
    /// Failures of the device.
    pub fn resolve(
        &self,
        layer: usize,
        k: usize,
        (ids, weights): (&CudaIds, &CudaBuf),
        sorted: &mut CudaBuf,
    ) -> Result<(), BackendError> {
        assert!(k <= EXPERTS_MAX, "{k} experts of a row");
        self.chosen.set([layer + 1, self.chosen.get()[1]]);
        self.looking.set(None);
        let told = self.table.told.address() + (4 * TOLD_WORDS * layer) as u64;
        expert_gate::resolve(&self.table.device, self.gate(layer), (ids, weights), sorted, told, k)
    }

    /// Queues the experts of `layer`, behind its gate: outputs by rising id. The second and third matrix lie `offsets` bytes into a slot.
    ///
    /// # Errors
    /// Failures of the device.
    pub fn experts(
        &self,
        layer: usize,
        (shape, offsets): (ExpertShape, [usize; 2]),
        (x, k): (&CudaBuf, usize),
        outputs: &mut CudaBuf,
    ) -> Result<(), BackendError> {
        let (t, gate) = (self.table, self.gate(layer));
        let stop = t.told.address() + 4 * t.stop_word() as u64;
        let wait = || expert_gate::wait(&t.device, gate, stop, t.slots.at, k);
        let at = (shape, t.slots.at, offsets);
        experts_row::experts_in_slots(&t.device, &self.backend.rounded, at, (x, k), outputs, wait)
    }

    /// What the router of `layer` chose, once it has.
    pub fn told(&self, layer: usize) -> Option<Told> {
        let word = |i: usize| self.table.told.word(TOLD_WORDS * layer + i);
        // Acquire: what the kernel wrote before this word is there with it.
        if word(0).load(Ordering::Acquire) != self.number {
            self.looking.set(self.looking.get().or_else(|| Some(Instant::now())));
            return None;
        }
        if let Some(since) = self.looking.take() {
            self.table.device.note_wait("waiting for a choice", since);
        }
        let ids = std::array::from_fn(|i| word(2 + i).load(Ordering::Relaxed) as i32);
        Some(Told { ids, are_all: word(1).load(Ordering::Relaxed) != 0 })
    }

    /// Queues the telling of `count` experts that `layer` will probably choose.
    ///
    /// # Errors
    /// Failures of the device.
    pub fn tell_guess(&self, layer: usize, ids: &CudaIds, count: usize) -> Result<(), BackendError> {
        let t = self.table;
        assert!(layer < t.layers && count <= NAMED_MAX, "{count} experts of layer {layer}");
        let told = t.told.address() + 4 * (TOLD_WORDS * layer + GUESS_AT) as u64;
        expert_gate::tell_guess(&t.device, ids, told, self.number, count)
    }

    /// What [`Self::tell_guess`] told of `layer`, once it has; only as many as were asked for count.
    pub fn guess(&self, layer: usize) -> Option<[i32; NAMED_MAX]> {
        let word = |i: usize| self.table.told.word(TOLD_WORDS * layer + GUESS_AT + i);
        // Acquire: as for `told`.
        let is_told = word(0).load(Ordering::Acquire) == self.number;
        is_told.then(|| std::array::from_fn(|i| word(1 + i).load(Ordering::Relaxed) as i32))
    }

    /// From now on ops are recorded, to be started together.
    ///
    /// # Errors
    /// Failures of the device.
    pub fn record(&self) -> Result<(), BackendError> {
        self.looking.set(None);
        self.table.device.begin_recording()
    }

    /// Starts what was recorded, if a recording like it was started at this `place` of an earlier pass; else [`Self::play_new`] has to.
    ///
    /// # Errors
    /// Failures of the device.
    pub fn play(&mut self, place: usize) -> Result<bool, BackendError> {
        let device = &self.table.device;
        let mut recorded = device.end_recording()?;
        let [next, first] = self.chosen.get();
        if device.is_timed() && spans::is_wanted() {
            recorded.what = Cow::Owned(self.table.times.name_of(first..next));
        }
        self.chosen.set([next; 2]);
        self.looking.set(None);
        if self.table.segments.play_known(device, place, &recorded)? {
            return Ok(true);
        }
        self.recorded = Some(recorded);
        Ok(false)
    }

    /// Starts what [`Self::play`] did not. The driver may wait for the device: no op that was started may be waiting for the host.
    ///
    /// # Errors
    /// Failures of the device.
    pub fn play_new(&mut self, place: usize) -> Result<(), BackendError> {
        let Some(recorded) = self.recorded.take() else { return Ok(()) };
        self.table.segments.play_new(&self.table.device, place, &recorded)
    }

    /// Whether what was started still runs: a device that failed, or has nothing to do, tells nothing more. Not while ops are recorded.
    ///
    /// # Errors
    /// Failures of the device.
    pub fn is_running(&self) -> Result<bool, BackendError> {
        Ok(!self.table.device.has_ended()?)
    }

    /// Answers the gate of `layer` behind the uploads so far: `changes` of the table as for [`SlotTable::rewrite`], 0 for who left.
    ///
    /// # Errors
    /// Failures of the device.
    pub fn open(&self, layer: usize, changes: &[(usize, u64)]) -> Result<(), BackendError> {
        let t = self.table;
        assert!(layer <= t.layers, "layer {layer} of {}", t.layers);
        assert!(changes.iter().all(|(entry, _)| *entry < t.layers * t.experts), "entries of the table");
        let word = t.gates.at + 4 * layer as u64;
        expert_gate::open(&t.device, (word, self.number), t.table.at, changes)
    }

    /// Changes entries of the table behind the uploads so far, as [`Self::open`] does, whatever the device is at: entries of layers that have
    /// chosen, or of experts that are not in the table yet.
    ///
    /// # Errors
    /// Failures of the device.
    pub fn change(&self, changes: &[(usize, u64)]) -> Result<(), BackendError> {
        self.open(self.table.layers, changes)
    }

    /// Marks the uploads so far, for [`Self::has_copied`].
    ///
    /// # Errors
    /// Failures of the device.
    pub fn mark_copy(&self) -> Result<(), BackendError> {
        self.table.device.mark_uploads(&self.table.copied)
    }

    /// Whether the uploads that were marked last have ended.
    ///
    /// # Errors
    /// Failures of the device.
    pub fn has_copied(&self) -> Result<bool, BackendError> {
        self.table.device.has_come(&self.table.copied)
    }

    /// All gates were answered, or need no answer. Ops from now on see all changes of the table and all that was uploaded.
    ///
    /// # Errors
    /// Failures of the device; the pass is given up then.
    pub fn end(mut self) -> Result<(), BackendError> {
        self.table.device.wait_for_lane(Lane::Arranging, &self.table.changed)?;
        self.is_over = true;
        // A device that failed says so to whoever asks it next.
        let _ = self.table.times.ask(&self.table.device);
        self.table.device.end_awaiting();
        Ok(())
    }
}

impl Drop for SlotPass<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            if self.table.device.is_recording() {
                drop(self.table.device.end_recording());
            }
            self.table.told.word(self.table.stop_word()).store(self.number, Ordering::Release);
            self.table.device.settle();
            self.table.device.end_awaiting();
        }
    }
}

impl CudaBackend {
    /// A table for `layers` with `experts` each, all absent.
    ///
    /// # Errors
    /// When the device has not the memory.
    pub fn slot_table(&self, layers: usize, experts: usize) -> Result<SlotTable, BackendError> {
        SlotTable::new(&self.device, layers, experts)
    }

    /// Whether the device can find up to `k` experts of this shape by itself.
    pub fn finds_experts(&self, shape: &ExpertShape, k: usize) -> bool {
        k <= EXPERTS_MAX && experts_row::has_kernels(self.arithmetic, shape.gate.ty, shape.down.ty)
    }

    /// The address of byte `at` of `slab`, for a table.
    pub fn address(&self, slab: &CudaSlab, at: usize) -> u64 {
        assert!(at < slab.len(), "byte {at} of {}", slab.len());
        slab.bytes.at + at as u64
    }

    /// Whether uploads beside the ops have ended.
    ///
    /// # Errors
    /// Failures of the device.
    pub fn has_uploaded(&self) -> Result<bool, BackendError> {
        self.device.has_uploaded()
    }
}
