//! The CUDA backend: one device, a stream of ops and two that bring weights, one kernel for each op, the CPU's order of sums.
//! Never answers differently from the CPU on purpose: kernels add in the same lanes, so most results have the same bits.
//! Surprising fact: ops return as soon as they are queued; only a download waits, so a kernel's failure shows there.

mod answer;
mod awaiting;
mod bus;
mod device;
mod faults;
mod gate_times;
mod host_memory;
mod kernel_names;
mod launch;
mod memory;
mod modules;
mod read_rate;
mod segments;
mod sides;
mod slot_table;
mod timeline;

use std::any::Any;
use std::sync::Arc;

pub use device::{Device, DeviceCounters, OpenError, Properties};
pub use faults::Version;
pub use gate_times::GateTimes;
pub use host_memory::{HostAccess, Registered};
pub use launch::matmul::scratch_bytes as product_bytes;
pub use memory::{CudaBuf, CudaIds, CudaMat, CudaView, MatShape, Upload};
pub use modules::LoadError;
pub use read_rate::{RATE_BYTES, ReadRates, read_rates};
pub use slot_table::{CHANGES_MAX, ExpertShape, NAMED_MAX, Room, SlotPass, SlotTable, Told};

use crate::backend::cpu::matmul::Arithmetic;
use crate::backend::ops::{self, Sums};
use crate::backend::{Backend, BackendError, SharedBytes};
use crate::quant::QuantType;
use answer::Answer;
use launch::attention_mma::Scores;
use launch::draw::DrawMemory;
use launch::matmul::Rounded;
use launch::meeting::Meeting;
use memory::{Bytes, Stager};
use sides::Side;

/// Ops on a GPU.
pub struct CudaBackend {
    // Dropped before the device that they are memory of.
    rounded: Rounded,
    /// Of ops that run beside others.
    rounded_beside: Rounded,
    scores: Scores,
    meeting: Meeting,
    draw_memory: DrawMemory,
    stager: Stager,
    answer: Answer,
    arithmetic: Arithmetic,
    sums: Sums,
    device: Arc<Device>,
}

/// Memory of a device for matrices that come and go: the slots of a cache of experts.
pub struct CudaSlab {
    bytes: Bytes,
}

impl CudaSlab {
    /// Bytes that it has.
    pub fn len(&self) -> usize {
        self.bytes.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.bytes.len == 0
    }
}

impl CudaBackend {
    /// A backend on `device`, which others may use as well.
    pub fn new(device: Arc<Device>, arithmetic: Arithmetic) -> Self {
        Self {
            rounded: Rounded::new(),
            rounded_beside: Rounded::new(),
            scores: Scores::new(),
            meeting: Meeting::new(),
            draw_memory: DrawMemory::new(),
            stager: Stager::new(),
            answer: Answer::new(),
            arithmetic,
            sums: Sums::Exact,
            device,
        }
    }

    /// The same with this order of sums; that of the processor otherwise.
    #[must_use]
    pub fn with_sums(self, sums: Sums) -> Self {
        Self { sums, ..self }
    }

    /// In which order sums are made where there is a choice.
    pub fn sums(&self) -> Sums {
        self.sums
    }

    /// Attentions so far, and how many of them ran on tensor cores.
    pub fn attention_counts(&self) -> (u64, u64) {
        self.scores.counts()
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Where ops that are queued now round activations.
    fn rounded(&self) -> &Rounded {
        if self.device.is_beside() { &self.rounded_beside } else { &self.rounded }
    }

    /// How activations enter products.
    pub fn arithmetic(&self) -> Arithmetic {
        self.arithmetic
    }

    /// Makes host memory at address `start` known to the device, until the result is dropped: uploads from it are then as fast as the bus, and
    /// its bytes must not change before they have ended. `owner` keeps the memory mapped.
    ///
    /// # Errors
    /// When the system does not lock that much, or the device cannot do this.
    pub fn register(
        &self,
        start: usize,
        len: usize,
        owner: Arc<dyn Any + Send + Sync>,
        access: HostAccess,
    ) -> Result<Registered, BackendError> {
        Registered::new(&self.device, (start, len), owner, access)
    }

    /// From now on kernels read experts in registered memory themselves, where they reach it, instead of a copy made before.
    pub fn read_in_place(&self) {
        self.stager.read_in_place();
    }

    /// How fast kernels read `host`; see [`read_rates`].
    ///
    /// # Errors
    /// Failures of the device.
    pub fn read_rates(&self, host: &Registered) -> Result<Option<ReadRates>, BackendError> {
        read_rates(&self.device, host)
    }

    /// How fast kernels read the device's own memory, in 1e9 bytes a second; `None` where none is left to measure it.
    pub fn own_rate(&self) -> Option<f64> {
        read_rate::own_rate(&self.device, RATE_BYTES).ok()
    }

    /// What kernels read in `host`; see [`read_rate::words_of`].
    ///
    /// # Errors
    /// Failures of the device.
    pub fn words_of(&self, host: &Registered) -> Result<Option<u64>, BackendError> {
        read_rate::words_of(&self.device, host)
    }

    /// Memory for matrices that come and go.
    ///
    /// # Errors
    /// When the device has not that much.
    pub fn slab(&self, what: &'static str, bytes: usize) -> Result<CudaSlab, BackendError> {
        Ok(CudaSlab { bytes: Bytes::new(&self.device, what, bytes)? })
    }

    /// Writes a matrix, as it lies in a file, to `at` of `slab`, in order with the ops or beside them. `src` may be reused on return, unless it
    /// is registered: then after [`Device::wait_uploads`].
    ///
    /// # Errors
    /// Bytes that are not `shape`, and failures of the device.
    pub fn store(
        &self,
        slab: &CudaSlab,
        at: usize,
        shape: MatShape,
        src: &[u8],
        way: Upload,
    ) -> Result<(), BackendError> {
        self.check_bytes(shape, src.len())?;
        assert!(at.is_multiple_of(SLAB_ALIGN) && at + src.len() <= slab.len(), "a matrix inside the slab");
        self.stager.store(&self.device, shape, src, slab.bytes.at + at as u64, way)
    }

    /// As [`Self::store`] of each `(at, shape, src)`, by one upload where `src` lie together in one of `registered`.
    ///
    /// # Errors
    /// As for [`Self::store`].
    pub fn store_together(
        &self,
        slab: &CudaSlab,
        parts: [(usize, MatShape, &[u8]); 3],
        registered: &[Registered],
        way: Upload,
    ) -> Result<(), BackendError> {
        for (at, shape, src) in parts {
            self.check_bytes(shape, src.len())?;
            assert!(at.is_multiple_of(SLAB_ALIGN) && at + src.len() <= slab.len(), "a matrix inside the slab");
        }
        let placed = parts.map(|(at, shape, src)| (shape, src, slab.bytes.at + at as u64));
        if self.stager.store_together(&self.device, registered, &placed, way)? {
            return Ok(());
        }
        placed.into_iter().try_for_each(|(shape, src, to)| self.stager.store(&self.device, shape, src, to, way))
    }

    /// The matrix that [`Self::store`] wrote to `at`.
    pub fn stored<'a>(&self, slab: &'a CudaSlab, at: usize, shape: MatShape) -> CudaView<'a> {
        assert!(shape.bytes().is_some_and(|bytes| at + bytes <= slab.len()), "a matrix inside the slab");
        CudaView::new(shape, slab.bytes.at + at as u64)
    }

    fn check_bytes(&self, MatShape { ty, rows, cols }: MatShape, found: usize) -> Result<(), BackendError> {
        if (MatShape { ty, rows, cols }).bytes() != Some(found) {
            return Err(BackendError::MatrixBytes { backend: "cuda", ty, rows, cols, bytes: found });
        }
        Ok(())
    }
}

/// Matrices in a slab start at multiples of this.
pub const SLAB_ALIGN: usize = 256;

fn part(len: usize, at: usize, count: usize) -> u64 {
    assert!(at.checked_add(count).is_some_and(|end| end <= len), "{count} values at {at} of {len}");
    at as u64 * 4
}

impl Backend for CudaBackend {
    type Buf = CudaBuf;
    type Ids = CudaIds;
    type Mat = CudaMat;
    type MatView<'a> = CudaView<'a>;

    fn name(&self) -> &'static str {
        "cuda"
    }

    fn alloc(&self, what: &'static str, len: usize) -> Result<CudaBuf, BackendError> {
        let bytes = Bytes::new(&self.device, what, len * 4)?;
        self.device.zero(bytes.at, len * 4)?;
        Ok(CudaBuf { bytes, len })
    }

    fn alloc_ids(&self, what: &'static str, len: usize) -> Result<CudaIds, BackendError> {
        let CudaBuf { bytes, len } = self.alloc(what, len)?;
        Ok(CudaIds { bytes, len })
    }

    fn len(&self, buf: &CudaBuf) -> usize {
        buf.len
    }

    fn len_ids(&self, ids: &CudaIds) -> usize {
        ids.len
    }

    fn load(&self, ty: QuantType, rows: usize, cols: usize, bytes: SharedBytes) -> Result<CudaMat, BackendError> {
        let (shape, src) = (MatShape { ty, rows, cols }, bytes.as_slice());
        self.check_bytes(shape, src.len())?;
        let bytes = Bytes::new(&self.device, "resident weights", src.len())?;
        self.stager.store(&self.device, shape, src, bytes.at, Upload::InOrder)?;
        Ok(CudaMat { shape, bytes })
    }

    fn view<'a>(&self, mat: &'a CudaMat) -> CudaView<'a> {
        CudaView::new(mat.shape, mat.bytes.at)
    }

    fn upload(&self, src: &[f32], dst: &mut CudaBuf, at: usize) -> Result<(), BackendError> {
        self.device.upload(bytemuck::cast_slice(src), dst.bytes.at + part(dst.len, at, src.len()))
    }

    fn upload_ids(&self, src: &[i32], dst: &mut CudaIds, at: usize) -> Result<(), BackendError> {
        self.device.upload(bytemuck::cast_slice(src), dst.bytes.at + part(dst.len, at, src.len()))
    }

    fn download(&self, src: &CudaBuf, at: usize, dst: &mut [f32]) -> Result<(), BackendError> {
        self.device.download(src.bytes.at + part(src.len, at, dst.len()), bytemuck::cast_slice_mut(dst))
    }

    fn download_ids(&self, src: &CudaIds, at: usize, dst: &mut [i32]) -> Result<(), BackendError> {
        self.device.download(src.bytes.at + part(src.len, at, dst.len()), bytemuck::cast_slice_mut(dst))
    }

    const IS_QUEUED: bool = true;

    fn ask_ids(&self, src: &CudaIds, len: usize) -> Result<(), BackendError> {
        part(src.len, 0, len);
        self.answer.ask(&self.device, src.bytes.at, len)
    }

    fn take_ids(&self, _src: &CudaIds, dst: &mut [i32]) -> Result<(), BackendError> {
        self.answer.take(&self.device, dst)
    }

    fn fork(&self) -> Result<(), BackendError> {
        self.device.fork(Side::Ops)
    }

    fn aside<E: From<BackendError>>(&self, f: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        self.device.beside(Side::Ops, f)
    }

    fn join(&self) -> Result<(), BackendError> {
        // The op behind a join is not set up before all have ended: coefficients, which are made by now, cost that once and not again at their use.
        self.device.join(Side::Ops)?;
        self.device.join(Side::Coefficients)
    }

    fn clear(&self, dst: &mut CudaBuf, at: usize, len: usize) -> Result<(), BackendError> {
        self.device.zero(dst.bytes.at + part(dst.len, at, len), 4 * len)
    }

    fn copy(
        &self,
        src: &CudaBuf,
        src_at: usize,
        dst: &mut CudaBuf,
        dst_at: usize,
        len: usize,
    ) -> Result<(), BackendError> {
        let (from, to) = (part(src.len, src_at, len), part(dst.len, dst_at, len));
        self.device.copy(src.bytes.at + from, dst.bytes.at + to, len * 4)
    }

    fn copy_ids(
        &self,
        src: &CudaIds,
        src_at: usize,
        dst: &mut CudaIds,
        dst_at: usize,
        len: usize,
    ) -> Result<(), BackendError> {
        let (from, to) = (part(src.len, src_at, len), part(dst.len, dst_at, len));
        self.device.copy(src.bytes.at + from, dst.bytes.at + to, len * 4)
    }

    fn embed(&self, op: ops::Embed<'_, Self>, out: &mut CudaBuf) -> Result<(), BackendError> {
        launch::embed::embed(&self.device, op, out)
    }

    fn matmul(&self, op: ops::Matmul<'_, '_, Self>, out: &mut CudaBuf) -> Result<(), BackendError> {
        launch::matmul::matmul(&self.device, self.rounded(), self.arithmetic, op, out)
    }

    fn matmul_pair(
        &self,
        op: ops::MatmulPair<'_, '_, Self>,
        out_a: &mut CudaBuf,
        out_b: &mut CudaBuf,
    ) -> Result<(), BackendError> {
        launch::matmul::matmul_pair(&self.device, self.rounded(), self.arithmetic, op, (out_a, out_b))
    }

    fn rms_norm(&self, op: ops::RmsNorm<'_, Self>, out: &mut CudaBuf) -> Result<(), BackendError> {
        launch::rms_norm::rms_norm(&self.device, op, out)
    }

    fn rope(&self, op: ops::Rope<'_, Self>, x: &mut CudaBuf) -> Result<(), BackendError> {
        launch::rope::rope(&self.device, op, x)
    }

    fn round_cache(&self, op: ops::RoundCache, x: &mut CudaBuf) -> Result<(), BackendError> {
        launch::round_cache::round_cache(&self.device, op, x)
    }

    fn store_rows(&self, op: ops::StoreRows<'_, Self>, dst: &mut CudaBuf) -> Result<(), BackendError> {
        launch::store_rows::store_rows(&self.device, op, dst)
    }

    fn pool_pairs(&self, op: ops::PoolPairs<'_, Self>, out: ops::PairsOut<'_, Self>) -> Result<usize, BackendError> {
        launch::pool_pairs::pool_pairs(&self.device, op, out)
    }

    fn pool_groups(&self, op: ops::PoolGroups<'_, Self>, out: &mut CudaBuf) -> Result<(), BackendError> {
        launch::pool_groups::pool_groups(&self.device, op, out)
    }

    fn hc_coefficients(
        &self,
        op: ops::HcCoefficients<'_, Self>,
        out: ops::HcOut<'_, Self>,
    ) -> Result<(), BackendError> {
        launch::hc_coefficients::hc_coefficients(&self.device, op, out)
    }

    fn hc_enter(&self, op: ops::HcEnter<'_, '_, Self>, out: ops::HcEntered<'_, Self>) -> Result<(), BackendError> {
        if launch::hc_enter::takes(&op) {
            return launch::hc_enter::hc_enter(&self.device, &self.meeting, op, out);
        }
        crate::backend::cpu::hc_enter::hc_enter(self, op, out)
    }

    fn hc_collapse(&self, op: ops::HcCollapse<'_, Self>, out: &mut CudaBuf) -> Result<(), BackendError> {
        launch::hc_collapse::hc_collapse(&self.device, op, out)
    }

    fn hc_expand(&self, op: ops::HcExpand<'_, Self>, streams: &mut CudaBuf) -> Result<(), BackendError> {
        launch::hc_expand::hc_expand(&self.device, op, streams)
    }

    fn index_scores(&self, op: ops::IndexScores<'_, Self>, scores: &mut CudaBuf) -> Result<(), BackendError> {
        launch::index_scores::index_scores(&self.device, op, scores)
    }

    fn candidate_blocks(&self, op: ops::CandidateBlocks<'_, Self>, mask: &mut CudaIds) -> Result<(), BackendError> {
        launch::candidate_blocks::candidate_blocks(&self.device, op, mask)
    }

    fn select_rows(&self, op: ops::SelectRows<'_, Self>, selected: &mut CudaIds) -> Result<(), BackendError> {
        launch::select_rows::select_rows(&self.device, op, selected)
    }

    fn attention(&self, op: ops::Attention<'_, Self>, out: &mut CudaBuf) -> Result<(), BackendError> {
        launch::attention::attention(&self.device, (self.sums, &self.scores), op, out)
    }

    fn route(&self, op: ops::Route<'_, Self>, ids: &mut CudaIds, weights: &mut CudaBuf) -> Result<(), BackendError> {
        launch::route::route(&self.device, op, ids, weights)
    }

    fn weigh_experts(&self, op: ops::WeighExperts<'_, Self>, weights: &mut CudaBuf) -> Result<(), BackendError> {
        launch::weigh_experts::weigh_experts(&self.device, op, weights)
    }

    fn gather_rows(&self, op: ops::MoveRows<'_, Self>, out: &mut CudaBuf) -> Result<(), BackendError> {
        launch::move_rows::gather_rows(&self.device, op, out)
    }

    fn scatter_rows(&self, op: ops::MoveRows<'_, Self>, dst: &mut CudaBuf) -> Result<(), BackendError> {
        launch::move_rows::scatter_rows(&self.device, op, dst)
    }

    fn swiglu(&self, op: ops::SwiGlu<'_, Self>, gate: &mut CudaBuf) -> Result<(), BackendError> {
        launch::swiglu::swiglu(&self.device, op, gate)
    }

    fn experts_row(
        &self,
        op: ops::ExpertsRow<'_, '_, Self>,
        out: ops::ExpertsOut<'_, Self>,
    ) -> Result<(), BackendError> {
        // Kernels exist where they pay: 8-bit activations on quantised experts.
        if launch::experts_row::is_fused(self.arithmetic, &op) {
            return launch::experts_row::experts_row(&self.device, self.rounded(), op, out);
        }
        crate::backend::cpu::experts_row::experts_row(self, op, out)
    }

    fn experts_rows(
        &self,
        op: ops::ExpertsRows<'_, '_, Self>,
        work: ops::SweptWork<'_, Self>,
        sums: &mut CudaBuf,
    ) -> Result<(), BackendError> {
        if launch::experts_rows::is_joined(&self.device, self.arithmetic, &op) {
            return launch::experts_rows::experts_rows(&self.device, &self.rounded, &op, work, sums);
        }
        crate::backend::cpu::experts_rows::experts_rows(self, &op, work, sums, |_, _, _| Ok(()))
    }

    fn combine_experts(&self, op: ops::CombineExperts<'_, Self>, out: &mut CudaBuf) -> Result<(), BackendError> {
        launch::combine_experts::combine_experts(&self.device, op, out)
    }

    fn best_of(&self, op: ops::BestOf<'_, Self>, best: &mut CudaIds) -> Result<(), BackendError> {
        self.device.count_choice();
        launch::best_of::best_of(&self.device, &self.meeting, op, best)
    }

    fn draw(&self, op: ops::Draw<'_, Self>, drawn: &mut CudaIds) -> Result<(), BackendError> {
        self.device.count_choice();
        launch::draw::draw(&self.device, (&self.meeting, &self.draw_memory), op, drawn)
    }

    fn decode_rows(&self, op: ops::DecodeRows<'_, Self>, out: &mut CudaBuf) -> Result<(), BackendError> {
        launch::decode_rows::decode_rows(&self.device, op, out)
    }

    fn engram_gate(
        &self,
        op: ops::EngramGate<'_, Self>,
        streams: &mut CudaBuf,
        gates: &mut CudaBuf,
    ) -> Result<(), BackendError> {
        launch::engram_gate::engram_gate(&self.device, op, streams, gates)
    }
}
