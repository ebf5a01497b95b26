//! The CPU backend: plain ops that are the oracle of every other device, and SIMD twins of the hot ones.
//! Never lets the number of threads or rows change a bit: work is split over outputs, each summed in one fixed order.
//! Surprising fact: activations stay F32 throughout. The published code rounds many of them to BF16; the golden values,
//! computed in F64 without it, are what this backend is held to.

mod attention;
mod best_of;
mod candidate_blocks;
mod combine_experts;
mod decode_rows;
pub mod draw;
mod embed;
mod engram_gate;
pub mod experts_row;
pub mod experts_rows;
mod hc_coefficients;
mod hc_collapse;
pub mod hc_enter;
mod hc_expand;
mod index_scores;
mod lanes;
pub mod matmul;
pub mod memory_rate;
mod move_rows;
mod parts;
pub mod pool;
mod pool_groups;
mod pool_pairs;
mod ranking;
mod rms_norm;
mod rope;
mod round_cache;
mod route;
mod select_rows;
pub mod simd;
mod store_rows;
mod swiglu;
mod weigh_experts;

use super::{Backend, BackendError, SharedBytes, ops};
use crate::quant::QuantType;
use matmul::{Arithmetic, Kernels, MatView, ProductShape, Scratch};
use pool::Pool;
use simd::SimdLevel;

/// Ops on the processor's own memory.
pub struct CpuBackend {
    pool: Pool,
    kernels: Kernels,
    arithmetic: Arithmetic,
}

/// A matrix in host memory that its owner keeps alive.
pub struct CpuMat {
    ty: QuantType,
    rows: usize,
    cols: usize,
    bytes: SharedBytes,
}

impl CpuBackend {
    /// A backend with `threads` workers; `level` is lowered to what the machine has.
    pub fn new(threads: usize, arithmetic: Arithmetic, level: SimdLevel) -> Result<Self, BackendError> {
        let pool = Pool::new(threads).map_err(|e| BackendError::Threads {
            backend: "cpu",
            threads,
            reason: e.source.to_string(),
        })?;
        Ok(Self { pool, kernels: Kernels::new(level), arithmetic })
    }

    /// How activations enter products.
    pub fn arithmetic(&self) -> Arithmetic {
        self.arithmetic
    }

    /// Bytes that all threads together read a second of `bytes` in memory, in 1e9; `None` when there is too little to tell.
    pub fn memory_gb_per_s(&self, bytes: &[u8]) -> Option<f64> {
        memory_rate::read_gb_per_s(&self.pool, bytes)
    }

    /// Takes the memory of [`matmul::scratch_bytes`] now, so that `products` never grow it.
    pub fn reserve(&self, products: &[ProductShape]) {
        *self.pool.scratch.lock() = Scratch::for_products(self.arithmetic, products);
    }
}

/// Memory of which pages that nobody writes to take no room: state and work memory are planned for the longest text.
fn zeroed<T: bytemuck::Zeroable>(what: &'static str, len: usize) -> Result<Vec<T>, BackendError> {
    let bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
    bytemuck::allocation::try_zeroed_vec(len).map_err(|()| BackendError::OutOfMemory { backend: "cpu", what, bytes })
}

impl Backend for CpuBackend {
    type Buf = Vec<f32>;
    type Ids = Vec<i32>;
    type Mat = CpuMat;
    type MatView<'a> = MatView<'a>;

    fn name(&self) -> &'static str {
        "cpu"
    }

    fn run<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        self.pool.run(f)
    }

    fn alloc(&self, what: &'static str, len: usize) -> Result<Vec<f32>, BackendError> {
        zeroed(what, len)
    }

    fn alloc_ids(&self, what: &'static str, len: usize) -> Result<Vec<i32>, BackendError> {
        zeroed(what, len)
    }

    fn len(&self, buf: &Vec<f32>) -> usize {
        buf.len()
    }

    fn len_ids(&self, ids: &Vec<i32>) -> usize {
        ids.len()
    }

    fn load(&self, ty: QuantType, rows: usize, cols: usize, bytes: SharedBytes) -> Result<CpuMat, BackendError> {
        let found = bytes.as_slice().len();
        let wanted = ty.row_bytes(cols as u64).and_then(|row| row.checked_mul(rows as u64));
        if wanted != Some(found as u64) {
            return Err(BackendError::MatrixBytes { backend: "cpu", ty, rows, cols, bytes: found });
        }
        Ok(CpuMat { ty, rows, cols, bytes })
    }

    fn view<'a>(&self, mat: &'a CpuMat) -> MatView<'a> {
        MatView { ty: mat.ty, rows: mat.rows, cols: mat.cols, bytes: mat.bytes.as_slice() }
    }

    fn upload(&self, src: &[f32], dst: &mut Vec<f32>, at: usize) -> Result<(), BackendError> {
        dst[at..at + src.len()].copy_from_slice(src);
        Ok(())
    }

    fn upload_ids(&self, src: &[i32], dst: &mut Vec<i32>, at: usize) -> Result<(), BackendError> {
        dst[at..at + src.len()].copy_from_slice(src);
        Ok(())
    }

    fn download(&self, src: &Vec<f32>, at: usize, dst: &mut [f32]) -> Result<(), BackendError> {
        dst.copy_from_slice(&src[at..at + dst.len()]);
        Ok(())
    }

    fn download_ids(&self, src: &Vec<i32>, at: usize, dst: &mut [i32]) -> Result<(), BackendError> {
        dst.copy_from_slice(&src[at..at + dst.len()]);
        Ok(())
    }

    fn clear(&self, dst: &mut Vec<f32>, at: usize, len: usize) -> Result<(), BackendError> {
        dst[at..at + len].fill(0.0);
        Ok(())
    }

    fn copy(
        &self,
        src: &Vec<f32>,
        src_at: usize,
        dst: &mut Vec<f32>,
        dst_at: usize,
        len: usize,
    ) -> Result<(), BackendError> {
        dst[dst_at..dst_at + len].copy_from_slice(&src[src_at..src_at + len]);
        Ok(())
    }

    fn copy_ids(
        &self,
        src: &Vec<i32>,
        src_at: usize,
        dst: &mut Vec<i32>,
        dst_at: usize,
        len: usize,
    ) -> Result<(), BackendError> {
        dst[dst_at..dst_at + len].copy_from_slice(&src[src_at..src_at + len]);
        Ok(())
    }

    fn embed(&self, op: ops::Embed<'_, Self>, out: &mut Vec<f32>) -> Result<(), BackendError> {
        embed::embed(op, out)
    }

    fn matmul(&self, op: ops::Matmul<'_, '_, Self>, out: &mut Vec<f32>) -> Result<(), BackendError> {
        let w = op.w;
        let x = &op.x[..op.rows * op.groups * w.cols];
        let out = &mut out[..op.rows * w.rows];
        if op.groups == 1 {
            matmul::matmul(&self.pool, &self.kernels, self.arithmetic, w, x, op.rows, out);
        } else {
            matmul::matmul_grouped(&self.pool, &self.kernels, self.arithmetic, w, x, op.rows, op.groups, out);
        }
        Ok(())
    }

    fn matmul_pair(
        &self,
        op: ops::MatmulPair<'_, '_, Self>,
        out_a: &mut Vec<f32>,
        out_b: &mut Vec<f32>,
    ) -> Result<(), BackendError> {
        let x = &op.x[..op.rows * op.a.cols];
        let (out_a, out_b) = (&mut out_a[..op.rows * op.a.rows], &mut out_b[..op.rows * op.b.rows]);
        matmul::matmul_pair(&self.pool, &self.kernels, self.arithmetic, (op.a, op.b), (x, op.rows), (out_a, out_b));
        Ok(())
    }

    fn rms_norm(&self, op: ops::RmsNorm<'_, Self>, out: &mut Vec<f32>) -> Result<(), BackendError> {
        rms_norm::rms_norm(&self.pool, op, out);
        Ok(())
    }

    fn rope(&self, op: ops::Rope<'_, Self>, x: &mut Vec<f32>) -> Result<(), BackendError> {
        rope::rope(&self.pool, op, x);
        Ok(())
    }

    fn round_cache(&self, op: ops::RoundCache, x: &mut Vec<f32>) -> Result<(), BackendError> {
        round_cache::round_cache(&self.pool, op, x);
        Ok(())
    }

    fn store_rows(&self, op: ops::StoreRows<'_, Self>, dst: &mut Vec<f32>) -> Result<(), BackendError> {
        store_rows::store_rows(op, dst);
        Ok(())
    }

    fn pool_pairs(&self, op: ops::PoolPairs<'_, Self>, out: ops::PairsOut<'_, Self>) -> Result<usize, BackendError> {
        Ok(pool_pairs::pool_pairs(op, out))
    }

    fn pool_groups(&self, op: ops::PoolGroups<'_, Self>, out: &mut Vec<f32>) -> Result<(), BackendError> {
        pool_groups::pool_groups(&self.pool, op, out);
        Ok(())
    }

    fn hc_coefficients(
        &self,
        op: ops::HcCoefficients<'_, Self>,
        out: ops::HcOut<'_, Self>,
    ) -> Result<(), BackendError> {
        hc_coefficients::hc_coefficients(&self.pool, op, out);
        Ok(())
    }

    fn hc_collapse(&self, op: ops::HcCollapse<'_, Self>, out: &mut Vec<f32>) -> Result<(), BackendError> {
        hc_collapse::hc_collapse(&self.pool, op, out);
        Ok(())
    }

    fn hc_expand(&self, op: ops::HcExpand<'_, Self>, streams: &mut Vec<f32>) -> Result<(), BackendError> {
        hc_expand::hc_expand(&self.pool, op, streams);
        Ok(())
    }

    fn index_scores(&self, op: ops::IndexScores<'_, Self>, scores: &mut Vec<f32>) -> Result<(), BackendError> {
        index_scores::index_scores(&self.pool, self.kernels.usable(), op, scores);
        Ok(())
    }

    fn candidate_blocks(&self, op: ops::CandidateBlocks<'_, Self>, mask: &mut Vec<i32>) -> Result<(), BackendError> {
        candidate_blocks::candidate_blocks(&self.pool, op, mask);
        Ok(())
    }

    fn select_rows(&self, op: ops::SelectRows<'_, Self>, selected: &mut Vec<i32>) -> Result<(), BackendError> {
        select_rows::select_rows(&self.pool, op, selected);
        Ok(())
    }

    fn attention(&self, op: ops::Attention<'_, Self>, out: &mut Vec<f32>) -> Result<(), BackendError> {
        attention::attention(&self.pool, self.kernels.usable(), op, out);
        Ok(())
    }

    fn route(&self, op: ops::Route<'_, Self>, ids: &mut Vec<i32>, weights: &mut Vec<f32>) -> Result<(), BackendError> {
        route::route(&self.pool, op, ids, weights);
        Ok(())
    }

    fn weigh_experts(&self, op: ops::WeighExperts<'_, Self>, weights: &mut Vec<f32>) -> Result<(), BackendError> {
        weigh_experts::weigh_experts(op, weights);
        Ok(())
    }

    fn gather_rows(&self, op: ops::MoveRows<'_, Self>, out: &mut Vec<f32>) -> Result<(), BackendError> {
        move_rows::gather_rows(op, out);
        Ok(())
    }

    fn scatter_rows(&self, op: ops::MoveRows<'_, Self>, dst: &mut Vec<f32>) -> Result<(), BackendError> {
        move_rows::scatter_rows(op, dst);
        Ok(())
    }

    fn swiglu(&self, op: ops::SwiGlu<'_, Self>, gate: &mut Vec<f32>) -> Result<(), BackendError> {
        swiglu::swiglu(&self.pool, op, gate);
        Ok(())
    }

    fn experts_row(
        &self,
        op: ops::ExpertsRow<'_, '_, Self>,
        out: ops::ExpertsOut<'_, Self>,
    ) -> Result<(), BackendError> {
        experts_row::experts_row(self, op, out)
    }

    fn experts_rows(
        &self,
        op: ops::ExpertsRows<'_, '_, Self>,
        work: ops::SweptWork<'_, Self>,
        sums: &mut Vec<f32>,
    ) -> Result<(), BackendError> {
        experts_rows::experts_rows(self, &op, work, sums, |_, _, _| Ok(()))
    }

    fn combine_experts(&self, op: ops::CombineExperts<'_, Self>, out: &mut Vec<f32>) -> Result<(), BackendError> {
        combine_experts::combine_experts(&self.pool, op, out);
        Ok(())
    }

    fn best_of(&self, op: ops::BestOf<'_, Self>, best: &mut Vec<i32>) -> Result<(), BackendError> {
        best[0] = best_of::best_of(op);
        Ok(())
    }

    fn draw(&self, op: ops::Draw<'_, Self>, drawn: &mut Vec<i32>) -> Result<(), BackendError> {
        drawn[0] = draw::draw(op);
        Ok(())
    }

    fn decode_rows(&self, op: ops::DecodeRows<'_, Self>, out: &mut Vec<f32>) -> Result<(), BackendError> {
        decode_rows::decode_rows(op, out);
        Ok(())
    }

    fn engram_gate(
        &self,
        op: ops::EngramGate<'_, Self>,
        streams: &mut Vec<f32>,
        gates: &mut Vec<f32>,
    ) -> Result<(), BackendError> {
        engram_gate::engram_gate(&self.pool, op, streams, gates);
        Ok(())
    }
}
