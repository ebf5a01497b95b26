//! Passes of one row whose experts the device finds by itself: the host follows what the routers chose and brings what is absent.
//! Never lets a pass leave a kernel waiting: an error, a panic or a drop opens every gate and the results are thrown away. Surprising fact: the
//! thread that queues the ops is the one that brings experts, between layers, so nothing is shared and no second thread has to be woken; it
//! stays a few layers ahead of the device, which has work while experts are being asked for.
//! Ops are recorded and handed over a few layers at a time, which takes less of the host's time and of the device's than starting each.

use std::sync::atomic::Ordering;
use std::thread;

use parking_lot::{Mutex, MutexGuard};

use crate::backend::cuda::{CHANGES_MAX, CudaBackend, ExpertShape, GateTimes, Room, SlotPass, SlotTable, Told};
use crate::engine::gpu_ahead::{Guesses, Worth};
use crate::engine::gpu_experts::{GpuExperts, GpuLease, failed, most_experts, parts, room, shape};
use crate::models::supply::{ExpertLease, Phase, RowChoice, RowExperts, RowGuess, RowProducts, SupplyError};
use crate::storage::layout::LayerExperts;
use crate::units::{ExpertIdx, ExpertKey};

/// Layers that may be queued behind one that has not told its choice: enough work for the device while the host brings experts, and few enough
/// that no call of the driver has to wait until there is room for it, on the thread that experts come from.
const AHEAD: usize = 12;
/// Layers whose ops are handed to the device together; the first one goes alone, so that the device begins early.
const SEGMENT: usize = 4;
/// Looks for a choice between two questions whether the device still runs.
const LOOKS: u32 = 4096;
/// Looks for a guess before reads of the drive are waited for without it: some milliseconds, of which it takes a few hundredths.
const GUESS_LOOKS: u32 = 1 << 18;

/// What a pass gets wrong only by a bug; told as an error since a session must survive it.
#[derive(Debug, thiserror::Error)]
enum Lost {
    #[error("layer {layer} has no expert {id}; the router's choice is broken")]
    Expert { layer: u16, id: i32 },
    #[error("the device found experts of layer {layer} that are not in its slots; use --no-graph")]
    Table { layer: u16 },
    #[error("the device has ended without a choice of experts in layer {layer}; use --no-graph")]
    Choice { layer: u16 },
}

/// The device's copy of the table of slots, and whose turn it is to move experts.
pub(super) struct RowTable {
    table: SlotTable,
    room: Room,
    turn: Mutex<Turn>,
}

/// Whoever holds it may move experts.
#[derive(Default)]
pub(super) struct Turn {
    /// Whether a row went through all layers: everything that a pass allocates at its first time is there.
    is_warm: bool,
    /// Whether experts should be named before they are chosen.
    worth: Worth,
}

impl Turn {
    /// A request was made, of the last layer if `is_last`.
    pub(super) fn note(&mut self, phase: Phase, is_last: bool) {
        self.is_warm |= is_last && phase == Phase::Decode;
    }
}

fn expert_shape(layer: &LayerExperts, limit: f32) -> ExpertShape {
    let [gate, _, down] = parts(layer).map(shape);
    ExpertShape { gate, down, hidden: gate.cols, width: gate.rows, limit }
}

impl RowTable {
    /// A table for `layers`, whose rows use `k` experts each; `None` where the device has no kernels for them.
    ///
    /// # Errors
    /// When the device has not the memory.
    pub(super) fn new(
        backend: &CudaBackend,
        layers: &[LayerExperts],
        (k, is_registered): (usize, bool),
    ) -> Result<Option<Self>, crate::backend::BackendError> {
        let fits = |layer: &LayerExperts| {
            let [gate, up, _] = parts(layer).map(shape);
            gate == up && backend.finds_experts(&expert_shape(layer, 0.0), k)
        };
        let stride = most_experts(layers);
        if stride == 0 || !layers.iter().all(fits) {
            return Ok(None);
        }
        let shapes = || layers.iter().map(|layer| expert_shape(layer, 0.0));
        let hidden = shapes().map(|s| s.hidden).max().unwrap_or(0);
        let width = shapes().map(|s| s.width).max().unwrap_or(0);
        let room = Room { hidden, width, k, is_registered };
        let table = backend.slot_table(layers.len(), stride)?;
        let table = table.with_names(layers.iter().map(|layer| layer.layer.0).collect());
        Ok(Some(Self { table, room, turn: Mutex::default() }))
    }

    /// When the gates of the last timed pass were open.
    pub(super) fn gate_times(&self) -> &GateTimes {
        self.table.times()
    }

    /// Waits for a pass that finds experts by itself.
    pub(super) fn turn(&self) -> MutexGuard<'_, Turn> {
        self.turn.lock()
    }

    /// A pass over the experts of `owner`, unless something speaks against it: a request or a pass that is under way, or that it is the first
    /// one.
    pub(super) fn begin<'a>(
        &'a self,
        owner: &'a GpuExperts,
    ) -> Result<Option<Box<dyn RowExperts<CudaBackend> + 'a>>, SupplyError> {
        let Some(mut turn) = self.turn.try_lock().filter(|turn| turn.is_warm) else { return Ok(None) };
        if owner.leases.load(Ordering::Relaxed) > 0 {
            return Ok(None);
        }
        let mut table = owner.table.lock();
        if table.has_changed() {
            let filled = table.all().map(|(key, slot)| (owner.entry(key), owner.address(slot)));
            self.table.rewrite(filled).map_err(failed)?;
            table.take_changes();
        }
        table.counts.found_rows += 1;
        drop(table);
        let pass = self.table.begin(&owner.backend, self.room).map_err(failed)?;
        pass.record().map_err(failed)?;
        let (asked, handed, served, segments) = (0, 0, 0, 0);
        let (held, rows) = (None, self);
        let guesses = Guesses::new(owner, &mut turn.worth, self.room.k);
        Ok(Some(Box::new(RowPass { pass, guesses, held, rows, owner, asked, handed, served, segments, turn })))
    }
}

/// A row under way.
struct RowPass<'a> {
    // Dropped in this order: the device lets go before anything that it reads is given back.
    pass: SlotPass<'a>,
    /// Experts on their way before they are chosen.
    guesses: Guesses<'a>,
    /// Experts of the last layer that lacked some: the lower tier keeps them until they are uploaded.
    held: Option<GpuLease<'a>>,
    rows: &'a RowTable,
    owner: &'a GpuExperts,
    /// Layers whose choice was asked for, those of them that the device was given, and those that got what they lacked.
    asked: usize,
    handed: usize,
    served: usize,
    /// Segments that the device was given.
    segments: usize,
    turn: MutexGuard<'a, Turn>,
}

impl RowPass<'_> {
    /// Serves what was told. Returns whether there was something.
    fn serve_told(&mut self) -> Result<bool, SupplyError> {
        let before = self.served;
        while self.served < self.handed {
            let Some(told) = self.pass.told(self.served) else { break };
            self.serve(self.served, &told)?;
            self.served += 1;
        }
        self.guesses.take(self.served, &self.pass);
        self.guesses.advance(&self.turn.worth, &self.pass).map_err(failed)?;
        Ok(self.served > before)
    }

    /// Does for one layer what a request does: counts, pins, makes room, uploads; then answers the gate, if it is closed.
    fn serve(&mut self, row: usize, told: &Told) -> Result<(), SupplyError> {
        let layer = &self.owner.layers[row];
        let known = |id: &i32| u16::try_from(*id).ok().filter(|id| *id < layer.experts);
        let ids = told.ids[..self.rows.room.k].iter();
        let ids = ids.map(|id| known(id).map(ExpertIdx).ok_or(Lost::Expert { layer: layer.layer.0, id: *id }));
        let ids = ids.collect::<Result<Vec<_>, _>>().map_err(failed)?;
        // Its uploads have ended, since the device is beyond its gate.
        if let Some(mut held) = self.held.take() {
            held.note_arrival();
        }
        self.guesses.let_go(&self.pass).map_err(failed)?;
        self.guesses.take(row, &self.pass);
        self.guesses.settle(&mut self.turn.worth, row, &ids);
        let mut lease = self.owner.lease(layer.layer, &ids, Phase::Decode, self.owner.aside())?;
        self.guesses.confirm(lease.missing.len());
        if told.are_all {
            return match lease.missing.is_empty() {
                true => Ok(()),
                false => Err(failed(Lost::Table { layer: layer.layer.0 })),
            };
        }
        self.await_names(row + 1, lease.missing.len());
        for _ in &ids {
            lease.next_ready()?;
        }
        self.open(row, &ids, &lease)?;
        self.held = Some(lease);
        Ok(())
    }

    /// Lets the lower tier hear of the experts of `row` that will probably be chosen, if it wants to, before reads are waited for.
    fn await_names(&mut self, row: usize, missing: usize) {
        if missing == 0 || !self.guesses.awaits_names(row) {
            return;
        }
        for _ in 0..GUESS_LOOKS {
            self.guesses.take(row, &self.pass);
            if !self.guesses.awaits_names(row) {
                return;
            }
            std::hint::spin_loop();
        }
    }

    /// Opens the gate of `row`, whose experts `ids` are on their way to the slots of `lease`, behind them and all changes of the table.
    fn open(&mut self, row: usize, ids: &[ExpertIdx], lease: &GpuLease<'_>) -> Result<(), SupplyError> {
        let (owner, layer) = (self.owner, self.owner.layers[row].layer);
        let stale = self.guesses.make_room();
        let changes = owner.table.lock().take_changes().ok_or_else(|| failed(Lost::Table { layer: layer.0 }))?;
        let left = changes.iter().filter(|(_, slot)| slot.is_none()).map(|(key, _)| (owner.entry(*key), 0));
        let here = ids.iter().map(|id| owner.entry(ExpertKey { layer, expert: *id }));
        let here = here.zip(lease.slots().map(|slot| owner.address(slot)));
        let mut changes: Vec<_> = stale.into_iter().map(|entry| (entry, 0)).chain(left).chain(here).collect();
        // Nobody looks at them before the gate is open.
        while changes.len() > CHANGES_MAX {
            let first: Vec<_> = changes.drain(..CHANGES_MAX).collect();
            self.pass.change(&first).map_err(failed)?;
        }
        self.pass.open(row, &changes).map_err(failed)
    }

    /// Gives the device what was recorded.
    fn hand_over(&mut self) -> Result<(), SupplyError> {
        if !self.pass.play(self.segments).map_err(failed)? {
            // Then the driver may wait for the device, which must not be waiting for this thread.
            self.follow(0)?;
            self.pass.play_new(self.segments).map_err(failed)?;
        }
        self.segments += 1;
        self.handed = self.asked;
        Ok(())
    }

    /// Serves until at most `behind` of the layers that the device was given have not told their choice. Nothing is being recorded.
    fn follow(&mut self, behind: usize) -> Result<(), SupplyError> {
        let mut looks = 0;
        loop {
            let any = self.serve_told()?;
            if self.handed - self.served <= behind {
                return Ok(());
            }
            looks = if any { 0 } else { looks + 1 };
            if looks % LOOKS == LOOKS - 1 && !self.pass.is_running().map_err(failed)? && !self.serve_told()? {
                return Err(failed(Lost::Choice { layer: self.owner.layers[self.served].layer.0 }));
            }
            // The device answers within microseconds when it does; other threads may want the processor meanwhile.
            if looks % 64 == 63 {
                thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
    }
}

impl RowExperts<CudaBackend> for RowPass<'_> {
    fn chosen(&mut self, choice: RowChoice<'_, CudaBackend>) -> Result<(), SupplyError> {
        let row = self.owner.row(choice.layer);
        assert_eq!((row, choice.k), (self.asked, self.rows.room.k), "layers come in order");
        self.pass.resolve(row, choice.k, (choice.ids, choice.weights), choice.sorted).map_err(failed)?;
        self.asked += 1;
        self.serve_told().map(|_| ())
    }

    fn guesses_wanted(&self) -> usize {
        self.guesses.wanted()
    }

    fn guessed(&mut self, guess: RowGuess<'_, CudaBackend>) -> Result<(), SupplyError> {
        let row = self.owner.row(guess.layer);
        self.pass.tell_guess(row, guess.ids, guess.count).map_err(failed)?;
        self.guesses.note_named(row);
        Ok(())
    }

    fn products(&mut self, products: RowProducts<'_, CudaBackend>) -> Result<(), SupplyError> {
        let row = self.owner.row(products.layer);
        let layer = &self.owner.layers[row];
        let [gate, up, _] = parts(layer).map(room);
        let at = (expert_shape(layer, products.limit), [gate, gate + up]);
        self.pass.experts(row, at, (products.x, products.k), products.outputs).map_err(failed)?;
        if !row.is_multiple_of(SEGMENT) {
            return self.serve_told().map(|_| ());
        }
        self.hand_over()?;
        self.follow(AHEAD)?;
        self.pass.record().map_err(failed)
    }

    fn finish(mut self: Box<Self>) -> Result<(), SupplyError> {
        self.hand_over()?;
        self.follow(0)?;
        // All gates are open or opened by what is under way.
        let Self { pass, mut guesses, held, mut turn, .. } = *self;
        // A pass that fails here is dropped, and has waited for the device, before what it holds is.
        let ended = guesses.finish(&mut turn.worth, &pass).and_then(move |()| pass.end().map_err(failed));
        drop(held);
        ended
    }
}
