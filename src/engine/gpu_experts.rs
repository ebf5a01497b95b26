//! Routed experts in GPU memory over a supply in host memory: the upper tier of the cache. Owns the memory of the slots.
//! Never reads a file. Surprising fact: a slot may be given away while kernels that read its old contents are still queued: what writes the
//! new ones is queued behind them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::backend::BackendError;
use crate::backend::cpu::CpuBackend;
use crate::backend::cpu::matmul::MatView;
use crate::backend::cuda::{CudaBackend, CudaSlab, CudaView, GateTimes, MatShape, Registered, SLAB_ALIGN, Upload};
use crate::engine::gpu_rows::RowTable;
use crate::engine::gpu_slots::{Table, TierCounts};
use crate::engine::routes::Routes;
use crate::models::supply::{ExpertLease, ExpertMats, ExpertSupply, Phase, RowExperts, SupplyError};
use crate::storage::layout::{ExpertTensor, LayerExperts};
use crate::units::{ExpertIdx, ExpertKey, LayerIdx};

/// Experts in slots of GPU memory, fetched from `inner`.
pub(super) struct GpuExperts {
    pub(super) backend: Arc<CudaBackend>,
    pub(super) inner: Arc<dyn ExpertSupply<CpuBackend>>,
    /// Memory of `inner` that the device reads by itself: it must not change before an upload has ended.
    registered: Vec<Registered>,
    pub(super) layers: Vec<LayerExperts>,
    /// Experts of the largest layer.
    stride: usize,
    slab: CudaSlab,
    slot_bytes: usize,
    pub(super) slots: usize,
    pub(super) table: Mutex<Table>,
    routes: Routes,
    /// Leases alive, for the trace.
    pub(super) leases: AtomicUsize,
    /// For passes whose experts the device finds by itself. Lock order: its turn, then `table`.
    rows: Option<RowTable>,
    /// Whether experts are uploaded ahead of the router.
    pub(super) guesses: bool,
}

pub(super) fn failed(error: impl std::error::Error + Send + Sync + 'static) -> SupplyError {
    SupplyError(Box::new(error))
}

/// Requests beyond what `lease_max` promised: a bug of the model, told as an error since a session must survive it.
#[derive(Debug, thiserror::Error)]
#[error("all {slots} expert slots of the GPU are held; use a larger --gpu-cache")]
struct NoSlot {
    slots: usize,
}

pub(super) fn parts(layer: &LayerExperts) -> [&ExpertTensor; 3] {
    [&layer.gate, &layer.up, &layer.down]
}

pub(super) fn shape(tensor: &ExpertTensor) -> MatShape {
    MatShape { ty: tensor.ty, rows: tensor.rows, cols: tensor.cols }
}

pub(super) fn room(tensor: &ExpertTensor) -> usize {
    (tensor.slice_bytes as usize).next_multiple_of(SLAB_ALIGN)
}

/// Bytes of a slot that holds an expert of any of `layers`.
pub(super) fn slot_bytes(layers: &[LayerExperts]) -> usize {
    layers.iter().map(|layer| parts(layer).into_iter().map(room).sum()).max().unwrap_or(0)
}

/// Experts of the largest of `layers`.
pub(super) fn most_experts(layers: &[LayerExperts]) -> usize {
    layers.iter().map(|layer| usize::from(layer.experts)).max().unwrap_or(0)
}

impl GpuExperts {
    /// `slots` slots over `inner`. All requests are told to `routes`, also those that never reach `inner`. With `rows`, the device finds the
    /// experts of single rows in them; with `guesses` some are brought before they are asked for.
    ///
    /// # Errors
    /// When the device has not the memory.
    pub(super) fn new(
        backend: Arc<CudaBackend>,
        (inner, registered): (Arc<dyn ExpertSupply<CpuBackend>>, Vec<Registered>),
        layers: Vec<LayerExperts>,
        slots: usize,
        routes: Routes,
        (rows, guesses): (Option<RowTable>, bool),
    ) -> Result<Self, BackendError> {
        let slot_bytes = slot_bytes(&layers);
        let stride = most_experts(&layers);
        let slab = backend.slab("the expert cache", slots * slot_bytes)?;
        let table = Mutex::new(Table::new(slots));
        Ok(Self {
            backend,
            inner,
            registered,
            layers,
            stride,
            slab,
            slot_bytes,
            slots,
            table,
            routes,
            leases: AtomicUsize::new(0),
            rows,
            guesses,
        })
    }

    /// Slots and bytes of the tier.
    pub(super) fn size(&self) -> (usize, usize) {
        (self.slots, self.slab.len())
    }

    /// Bytes of host memory that the device reads by itself.
    pub(super) fn registered_bytes(&self) -> usize {
        self.registered.iter().map(Registered::len).sum()
    }

    /// When the gates of the last timed pass were open; `None` where the host looks for experts.
    pub(super) fn gate_times(&self) -> Option<&GateTimes> {
        self.rows.as_ref().map(RowTable::gate_times)
    }

    /// What uploads from the lower tier reach while no expert is on its way, in 1e9 bytes a second; `None` where that cannot be told.
    pub(super) fn bus_gb_per_s(&self) -> Option<f64> {
        let source = self.registered.first()?;
        self.backend.device().bus_gb_per_s(source, &self.slab).ok().flatten()
    }

    pub(super) fn counts(&self) -> TierCounts {
        self.table.lock().counts
    }

    /// The matrices of an expert of `layer` in `slot`.
    fn views(&self, layer: &LayerExperts, slot: usize) -> [CudaView<'_>; 3] {
        let mut at = slot * self.slot_bytes;
        parts(layer).map(|tensor| {
            let view = self.backend.stored(&self.slab, at, shape(tensor));
            at += room(tensor);
            view
        })
    }

    /// The address of `slot` on the device.
    pub(super) fn address(&self, slot: usize) -> u64 {
        self.backend.address(&self.slab, slot * self.slot_bytes)
    }

    /// The place of `layer` among those with experts, or where it would be.
    pub(super) fn row(&self, layer: LayerIdx) -> usize {
        self.layers.partition_point(|l| l.layer < layer)
    }

    /// Where `key` is in the device's table.
    pub(super) fn entry(&self, key: ExpertKey) -> usize {
        self.row(key.layer) * self.stride + usize::from(key.expert.0)
    }

    /// How uploads go while ops may wait for them.
    pub(super) fn aside(&self) -> Upload {
        Upload::Aside { is_registered: self.is_registered() }
    }

    pub(super) fn is_registered(&self) -> bool {
        !self.registered.is_empty()
    }

    /// Queues the upload of an expert of `layer` into `slot`.
    pub(super) fn upload(
        &self,
        layer: &LayerExperts,
        slot: usize,
        mats: [MatView<'_>; 3],
        way: Upload,
    ) -> Result<(), BackendError> {
        let mut at = slot * self.slot_bytes;
        let [gate, up, down] = parts(layer);
        let placed = [(gate, mats[0]), (up, mats[1]), (down, mats[2])].map(|(tensor, mat)| {
            let place = (at, shape(tensor), mat.bytes);
            at += room(tensor);
            place
        });
        self.backend.store_together(&self.slab, placed, &self.registered, way)
    }
}

/// Requested experts: those found come first, the others as the lower tier delivers them.
pub(super) struct GpuLease<'a> {
    owner: &'a GpuExperts,
    layer: &'a LayerExperts,
    ids: Vec<ExpertIdx>,
    /// Slot of each position, and whether it holds the expert.
    slots: Vec<(usize, bool)>,
    found: VecDeque<usize>,
    /// The hold on the lower tier, until all of it was uploaded; positions of its experts.
    below: Option<Box<dyn ExpertLease<CpuBackend> + 'a>>,
    pub(super) missing: Vec<usize>,
    way: Upload,
    /// Whether what was uploaded is known to have arrived.
    has_arrived: bool,
}

impl ExpertSupply<CudaBackend> for GpuExperts {
    fn lease_max(&self) -> usize {
        self.slots.min(self.inner.lease_max())
    }

    fn sweep_max(&self) -> usize {
        self.slots.min(self.inner.sweep_max())
    }

    fn favour(&self, layer: LayerIdx, ids: &[ExpertIdx]) {
        self.inner.favour(layer, ids);
    }

    fn request(
        &self,
        layer: LayerIdx,
        ids: &[ExpertIdx],
        phase: Phase,
    ) -> Result<Box<dyn ExpertLease<CudaBackend> + '_>, SupplyError> {
        let Some(rows) = &self.rows else { return Ok(Box::new(self.lease(layer, ids, phase, Upload::InOrder)?)) };
        // While a pass looks for experts by itself nobody else moves them.
        let mut turn = rows.turn();
        let lease = self.lease(layer, ids, phase, Upload::InOrder)?;
        turn.note(phase, self.layers.last().is_some_and(|last| last.layer == layer));
        Ok(Box::new(lease))
    }

    /// Those in GPU memory are not asked of the lower tier, as long as they stay.
    fn announce(&self, experts: &[ExpertKey]) {
        let missing = self.table.lock().absent(experts);
        self.inner.announce(&missing);
    }

    fn guesses_wanted(&self) -> usize {
        self.inner.guesses_wanted()
    }

    fn guess(&self, layer: LayerIdx, ids: &[ExpertIdx]) {
        let keys: Vec<ExpertKey> = ids.iter().map(|id| ExpertKey::new(layer.0, id.0)).collect();
        let missing: Vec<ExpertIdx> = self.table.lock().absent(&keys).into_iter().map(|key| key.expert).collect();
        if !missing.is_empty() {
            self.inner.guess(layer, &missing);
        }
    }

    fn begin_row(&self) -> Result<Option<Box<dyn RowExperts<CudaBackend> + '_>>, SupplyError> {
        match &self.rows {
            Some(rows) => rows.begin(self),
            None => Ok(None),
        }
    }
}

impl GpuExperts {
    /// Pins `ids` of `layer`; those that are absent come `way` as the lease hands them out.
    pub(super) fn lease(
        &self,
        layer: LayerIdx,
        ids: &[ExpertIdx],
        phase: Phase,
        way: Upload,
    ) -> Result<GpuLease<'_>, SupplyError> {
        self.routes.request(phase, layer, ids, self.leases.load(Ordering::Relaxed));
        let at = self.row(layer);
        // The lower tier words the error about a layer without experts.
        let found_layer = match self.layers.get(at).filter(|l| l.layer == layer) {
            Some(found) => found,
            None => return Err(self.inner.request(layer, ids, phase).err().unwrap_or(failed(NoSlot { slots: 0 }))),
        };
        self.leases.fetch_add(1, Ordering::Relaxed);
        let mut lease = GpuLease {
            owner: self,
            layer: found_layer,
            ids: ids.to_vec(),
            slots: Vec::with_capacity(ids.len()),
            found: VecDeque::with_capacity(ids.len()),
            below: None,
            missing: Vec::new(),
            way,
            has_arrived: false,
        };
        {
            let mut table = self.table.lock();
            // Those that are there are pinned before any slot is taken from them.
            let known: Vec<Option<usize>> = ids.iter().map(|id| table.find(ExpertKey::new(layer.0, id.0))).collect();
            let mut enough = true;
            for (position, slot) in known.into_iter().enumerate() {
                match slot {
                    Some(slot) => {
                        lease.slots.push((slot, true));
                        lease.found.push_back(position);
                    }
                    None => match table.take() {
                        Some(slot) => {
                            lease.slots.push((slot, false));
                            lease.missing.push(position);
                        }
                        // Pinned ones that follow are given back with the rest of the lease.
                        None => {
                            lease.slots.push((usize::MAX, true));
                            enough = false;
                        }
                    },
                }
            }
            table.counts.hits += lease.found.len() as u64;
            table.counts.misses += lease.missing.len() as u64;
            if !enough {
                drop(table);
                return Err(failed(NoSlot { slots: self.slots }));
            }
        }
        if !lease.missing.is_empty() {
            let wanted: Vec<ExpertIdx> = lease.missing.iter().map(|position| ids[*position]).collect();
            lease.below = Some(self.inner.request(layer, &wanted, phase)?);
        }
        Ok(lease)
    }
}

impl GpuLease<'_> {
    /// The slot of each position.
    pub(super) fn slots(&self) -> impl Iterator<Item = usize> {
        self.slots.iter().map(|(slot, _)| *slot)
    }

    /// All uploads of this lease have ended: the device went on behind its gate.
    pub(super) fn note_arrival(&mut self) {
        self.has_arrived = true;
    }

    /// Ends the hold on the lower tier, once the device has read what was uploaded from it.
    fn let_go(&mut self) -> Result<(), SupplyError> {
        let Some(below) = self.below.take() else { return Ok(()) };
        let (owner, backend) = (self.owner, &self.owner.backend);
        let is_read = self.has_arrived || !owner.is_registered() || backend.has_uploaded().unwrap_or(false);
        let read = match is_read {
            true => Ok(()),
            false => backend.device().wait_uploads(),
        };
        drop(below);
        read.map_err(failed)
    }
}

impl ExpertLease<CudaBackend> for GpuLease<'_> {
    fn next_ready(&mut self) -> Result<Option<usize>, SupplyError> {
        if let Some(position) = self.found.pop_front() {
            return Ok(Some(position));
        }
        let Some(below) = &mut self.below else { return Ok(None) };
        let Some(index) = below.next_ready()? else {
            self.let_go()?;
            return Ok(None);
        };
        let (position, mats) = (self.missing[index], below.mats(index));
        let slot = self.slots[position].0;
        self.owner.backend.device().name_upload(self.layer.layer.0, self.ids[position].0);
        self.owner.upload(self.layer, slot, [mats.gate, mats.up, mats.down], self.way).map_err(failed)?;
        let key = ExpertKey::new(self.layer.layer.0, self.ids[position].0);
        self.slots[position] = (self.owner.table.lock().fill(key, slot), true);
        Ok(Some(position))
    }

    fn next_batch(&mut self, ready: &mut Vec<usize>) -> Result<(), SupplyError> {
        if self.found.is_empty() {
            ready.extend(self.next_ready()?);
        }
        ready.extend(self.found.drain(..));
        Ok(())
    }

    fn mats(&self, index: usize) -> ExpertMats<'_, CudaBackend> {
        let [gate, up, down] = self.owner.views(self.layer, self.slots[index].0);
        ExpertMats { gate, up, down }
    }
}

impl Drop for GpuLease<'_> {
    fn drop(&mut self) {
        // A device that failed reads nothing more; whoever computes next is told.
        let _ = self.let_go();
        let mut table = self.owner.table.lock();
        for (slot, is_filled) in self.slots.drain(..).filter(|(slot, _)| *slot != usize::MAX) {
            table.release(slot, is_filled);
        }
        self.owner.leases.fetch_sub(1, Ordering::Relaxed);
    }
}
