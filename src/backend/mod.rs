//! What a device must be able to compute: the `Backend` trait here, one argument struct an op in `ops`.
//! Never learns what a file, a cache or a model is. Surprising fact: every op takes rows (tokens) as its outermost
//! dimension, so decode is the same call with one row, and results of a row never depend on its neighbours.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod ops;

use std::sync::Arc;

use crate::quant::QuantType;

/// Why a device could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// Memory of the device ran out.
    #[error("{backend}: cannot allocate {bytes} bytes for {what}; {}", less_memory(backend))]
    OutOfMemory { backend: &'static str, what: &'static str, bytes: u64 },
    /// The same, while something was done that takes memory by itself.
    #[error("{backend}: {what} failed: {reason}; {}", less_memory(backend))]
    Full { backend: &'static str, what: String, reason: String },
    /// A matrix was offered in a type that the op has no kernel for.
    #[error("{backend}: no {op} kernel for {ty} weights; convert the tensor with ds4-gguf quantize")]
    UnsupportedType { backend: &'static str, op: &'static str, ty: QuantType },
    /// A matrix whose bytes are not `rows` whole rows of its type.
    #[error("{backend}: {bytes} bytes are not {rows} rows of {cols} {ty} values; the model file is damaged")]
    MatrixBytes { backend: &'static str, ty: QuantType, rows: usize, cols: usize, bytes: usize },
    /// The worker threads could not be started.
    #[error("{backend}: cannot start {threads} threads: {reason}; use fewer --threads")]
    Threads { backend: &'static str, threads: usize, reason: String },
    /// The driver does not take memory of the host.
    #[error("{backend}: the driver does not make {bytes} bytes of host memory known to the GPU: {reason}")]
    HostMemory { backend: &'static str, bytes: usize, reason: String },
    /// The device failed; nothing that it computed since the last download can be trusted.
    #[error(
        "{backend}: {what} failed: {reason}; start again, with CUDA_LAUNCH_BLOCKING=1 to learn which kernel it was"
    )]
    Device { backend: &'static str, what: String, reason: String },
    /// The device failed in a way that lasts as long as the process.
    #[error(
        "{backend}: {reason}; this process can no longer use the GPU: start ds4 again, with CUDA_LAUNCH_BLOCKING=1 to learn which kernel it was"
    )]
    DeviceLost { backend: &'static str, reason: String },
}

/// What makes a run need less memory of `backend`.
fn less_memory(backend: &str) -> &'static str {
    match backend {
        "cuda" => "lower --gpu-cache, --ctx or --prefill-chunk, or end what else fills the GPU (nvidia-smi lists it)",
        _ => "lower --ctx or the cache budget",
    }
}

/// A part of memory that someone keeps alive: how weights reach a device without a copy where it can use host memory.
#[derive(Clone)]
pub struct SharedBytes {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    start: usize,
    len: usize,
}

impl SharedBytes {
    /// Bytes `start..start + len` of `owner`, or `None` if it is shorter.
    pub fn new(owner: Arc<dyn AsRef<[u8]> + Send + Sync>, start: usize, len: usize) -> Option<Self> {
        let end = start.checked_add(len)?;
        ((*owner).as_ref().len() >= end).then_some(Self { owner, start, len })
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.start..self.start + self.len]
    }
}

impl From<Vec<u8>> for SharedBytes {
    fn from(bytes: Vec<u8>) -> Self {
        let len = bytes.len();
        Self { owner: Arc::new(bytes), start: 0, len }
    }
}

/// A device: memory, resident matrices and ops. Ops read and write device buffers only; `upload` and `download` are the
/// only doors to host memory. Every op is in order: it sees what the ops before it wrote, but for those that went [`Backend::aside`].
///
/// Contract of all ops: buffers are at least as long as the shapes in the argument struct say (a shorter one is a bug
/// of the caller and panics); sums run in a fixed order, so a row's bits depend neither on the number of rows nor on
/// the number of threads.
pub trait Backend: Sized + Send + Sync + 'static {
    /// F32 memory.
    type Buf: Send + Sync;
    /// I32 memory.
    type Ids: Send + Sync;
    /// A weight matrix that stays on the device.
    type Mat: Send + Sync;
    /// A matrix that someone lends: a resident one or a streamed expert's.
    type MatView<'a>: Copy + Send + Sync;

    /// Short name for messages and reports.
    fn name(&self) -> &'static str;

    /// Runs `f`, with many ops inside, where handing them to the device costs least.
    fn run<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        f()
    }

    /// Zeroed memory for `len` values.
    fn alloc(&self, what: &'static str, len: usize) -> Result<Self::Buf, BackendError>;
    /// Zeroed memory for `len` ids.
    fn alloc_ids(&self, what: &'static str, len: usize) -> Result<Self::Ids, BackendError>;
    /// Values that `buf` holds.
    fn len(&self, buf: &Self::Buf) -> usize;
    /// Ids that `ids` holds.
    fn len_ids(&self, ids: &Self::Ids) -> usize;
    /// Makes `rows` x `cols` weights of type `ty` resident.
    fn load(&self, ty: QuantType, rows: usize, cols: usize, bytes: SharedBytes) -> Result<Self::Mat, BackendError>;
    /// The matrix as ops take it.
    fn view<'a>(&self, mat: &'a Self::Mat) -> Self::MatView<'a>;

    /// Host to device, from value `at` of `dst` on.
    fn upload(&self, src: &[f32], dst: &mut Self::Buf, at: usize) -> Result<(), BackendError>;
    /// Host to device, ids.
    fn upload_ids(&self, src: &[i32], dst: &mut Self::Ids, at: usize) -> Result<(), BackendError>;
    /// Device to host, from value `at` of `src` on; waits for the ops before it.
    fn download(&self, src: &Self::Buf, at: usize, dst: &mut [f32]) -> Result<(), BackendError>;
    /// Device to host, ids; waits for the ops before it.
    fn download_ids(&self, src: &Self::Ids, at: usize, dst: &mut [i32]) -> Result<(), BackendError>;
    /// Whether ops return before they have run, so that work queued between [`Self::ask_ids`] and [`Self::take_ids`] hides the wait.
    const IS_QUEUED: bool = false;
    /// Asks for the first `len` ids of `src` as the ops so far leave them. One question at a time.
    fn ask_ids(&self, src: &Self::Ids, len: usize) -> Result<(), BackendError> {
        let _ = (src, len);
        Ok(())
    }
    /// The answer to [`Self::ask_ids`], whose `src` did not change since; waits for the ops before the question, not for later ones.
    fn take_ids(&self, src: &Self::Ids, dst: &mut [i32]) -> Result<(), BackendError> {
        self.download_ids(src, 0, dst)
    }
    /// Where what [`Self::aside`] queues next branches off: behind the ops so far.
    fn fork(&self) -> Result<(), BackendError> {
        Ok(())
    }
    /// Queues the ops of `f`, which need nothing of those since [`Self::fork`] and write nothing that these use: a device may run both at
    /// once.
    fn aside<E: From<BackendError>>(&self, f: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        f()
    }
    /// Ops from now on see what went aside.
    fn join(&self) -> Result<(), BackendError> {
        Ok(())
    }
    /// Writes `len` zeros from value `at` of `dst` on.
    fn clear(&self, dst: &mut Self::Buf, at: usize, len: usize) -> Result<(), BackendError>;
    /// Device to device: `len` values.
    fn copy(
        &self,
        src: &Self::Buf,
        src_at: usize,
        dst: &mut Self::Buf,
        dst_at: usize,
        len: usize,
    ) -> Result<(), BackendError>;

    /// Device to device, ids.
    fn copy_ids(
        &self,
        src: &Self::Ids,
        src_at: usize,
        dst: &mut Self::Ids,
        dst_at: usize,
        len: usize,
    ) -> Result<(), BackendError> {
        let mut host = vec![0; len];
        self.download_ids(src, src_at, &mut host)?;
        self.upload_ids(&host, dst, dst_at)
    }

    /// `out = [rows, copies, cols of table]`: table rows, each repeated.
    fn embed(&self, op: ops::Embed<'_, Self>, out: &mut Self::Buf) -> Result<(), BackendError>;
    /// `out = [rows, w.rows]`: products of each row with each weight row.
    fn matmul(&self, op: ops::Matmul<'_, '_, Self>, out: &mut Self::Buf) -> Result<(), BackendError>;
    /// `out_a = [rows, a.rows]`, `out_b = [rows, b.rows]`: as two products, for devices that prepare inputs once for both.
    fn matmul_pair(
        &self,
        op: ops::MatmulPair<'_, '_, Self>,
        out_a: &mut Self::Buf,
        out_b: &mut Self::Buf,
    ) -> Result<(), BackendError> {
        self.matmul(ops::Matmul { w: op.a, x: op.x, rows: op.rows, groups: 1 }, out_a)?;
        self.matmul(ops::Matmul { w: op.b, x: op.x, rows: op.rows, groups: 1 }, out_b)
    }
    /// `out = [rows, width]`.
    fn rms_norm(&self, op: ops::RmsNorm<'_, Self>, out: &mut Self::Buf) -> Result<(), BackendError>;
    /// Rotates `x = [rows, heads, width]` in place.
    fn rope(&self, op: ops::Rope<'_, Self>, x: &mut Self::Buf) -> Result<(), BackendError>;
    /// Rounds the first `values` of `x` to what a low-precision cache would hold.
    fn round_cache(&self, op: ops::RoundCache, x: &mut Self::Buf) -> Result<(), BackendError>;
    /// Writes rows into a ring or a list of rows.
    fn store_rows(&self, op: ops::StoreRows<'_, Self>, dst: &mut Self::Buf) -> Result<(), BackendError>;
    /// Gated pooling of neighbouring tokens; returns how many pairs closed (rows of `out`).
    fn pool_pairs(&self, op: ops::PoolPairs<'_, Self>, out: ops::PairsOut<'_, Self>) -> Result<usize, BackendError>;

    /// `out = [groups.len(), width]`: gated pooling of groups of tokens.
    fn pool_groups(&self, op: ops::PoolGroups<'_, Self>, out: &mut Self::Buf) -> Result<(), BackendError>;

    /// Hyper-connection coefficients from the raw mix.
    fn hc_coefficients(&self, op: ops::HcCoefficients<'_, Self>, out: ops::HcOut<'_, Self>)
    -> Result<(), BackendError>;
    /// Coefficients, weighted sum and norm: the same bits as the ops one by one.
    fn hc_enter(&self, op: ops::HcEnter<'_, '_, Self>, out: ops::HcEntered<'_, Self>) -> Result<(), BackendError> {
        cpu::hc_enter::hc_enter(self, op, out)
    }
    /// `out = [rows, hidden]`: weighted sum of the streams.
    fn hc_collapse(&self, op: ops::HcCollapse<'_, Self>, out: &mut Self::Buf) -> Result<(), BackendError>;
    /// Mixes the streams and adds a sublayer's output to each, in place.
    fn hc_expand(&self, op: ops::HcExpand<'_, Self>, streams: &mut Self::Buf) -> Result<(), BackendError>;

    /// `scores = [rows, stride]`: one score for each key that the row sees.
    fn index_scores(&self, op: ops::IndexScores<'_, Self>, scores: &mut Self::Buf) -> Result<(), BackendError>;
    /// `mask = [all rows, words]`: one bit a candidate block.
    fn candidate_blocks(&self, op: ops::CandidateBlocks<'_, Self>, mask: &mut Self::Ids) -> Result<(), BackendError>;
    /// `selected = [all rows, k]`: the best visible rows, ascending, -1 behind the last.
    fn select_rows(&self, op: ops::SelectRows<'_, Self>, selected: &mut Self::Ids) -> Result<(), BackendError>;
    /// `out = [rows, heads, width]`: attention over window rows and selected compressed rows.
    fn attention(&self, op: ops::Attention<'_, Self>, out: &mut Self::Buf) -> Result<(), BackendError>;

    /// `ids = weights = [rows, k]`: chosen experts by falling biased score.
    fn route(&self, op: ops::Route<'_, Self>, ids: &mut Self::Ids, weights: &mut Self::Buf)
    -> Result<(), BackendError>;
    /// `weights = [rows, k]` of experts that are known.
    fn weigh_experts(&self, op: ops::WeighExperts<'_, Self>, weights: &mut Self::Buf) -> Result<(), BackendError>;
    /// `out = [range.len(), width]`: the rows named by `indices[range]`.
    fn gather_rows(&self, op: ops::MoveRows<'_, Self>, out: &mut Self::Buf) -> Result<(), BackendError>;
    /// Row `i` of `src` goes to row `indices[range.start + i]` of `dst`.
    fn scatter_rows(&self, op: ops::MoveRows<'_, Self>, dst: &mut Self::Buf) -> Result<(), BackendError>;
    /// `gate = silu(min(gate, limit)) * clamp(up, -limit, limit)`, in place.
    fn swiglu(&self, op: ops::SwiGlu<'_, Self>, gate: &mut Self::Buf) -> Result<(), BackendError>;
    /// Outputs of some experts for one row, each to its place: the same bits as the ops one by one.
    fn experts_row(
        &self,
        op: ops::ExpertsRow<'_, '_, Self>,
        out: ops::ExpertsOut<'_, Self>,
    ) -> Result<(), BackendError>;
    /// Adds outputs of some experts to the sums of their rows (`[rows, hidden]`): the same bits as the ops one by one.
    fn experts_rows(
        &self,
        op: ops::ExpertsRows<'_, '_, Self>,
        work: ops::SweptWork<'_, Self>,
        sums: &mut Self::Buf,
    ) -> Result<(), BackendError>;
    /// `out = [rows, width]`: weighted expert outputs in the order given, then the shared expert's.
    fn combine_experts(&self, op: ops::CombineExperts<'_, Self>, out: &mut Self::Buf) -> Result<(), BackendError>;
    /// `best = [1]`: where the largest of `count` values is, the lowest place among equals; -1 if one of them is NaN or infinity, or none is
    /// above minus infinity.
    fn best_of(&self, op: ops::BestOf<'_, Self>, best: &mut Self::Ids) -> Result<(), BackendError>;
    /// `drawn = [1]`: a place among `count` values, drawn by the rule: the same for the same number on every device; -1 where `best_of` is.
    fn draw(&self, op: ops::Draw<'_, Self>, drawn: &mut Self::Ids) -> Result<(), BackendError>;

    /// `out = [rows, width]`: n-gram rows as numbers.
    fn decode_rows(&self, op: ops::DecodeRows<'_, Self>, out: &mut Self::Buf) -> Result<(), BackendError>;
    /// Adds gated n-gram memory to the streams, in place; `gates = [rows, streams]` is what was applied.
    fn engram_gate(
        &self,
        op: ops::EngramGate<'_, Self>,
        streams: &mut Self::Buf,
        gates: &mut Self::Buf,
    ) -> Result<(), BackendError>;
}
