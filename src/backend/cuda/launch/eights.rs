//! Launchers of kernels/eights.cuh: products of few activation rows with one matrix, or with those of several experts.
//! Never lets the way change a bit: all kernels over codes sum in the same order.
//! Surprising fact: the list of experts travels as a kernel parameter of a kilobyte and a half, so nothing is uploaded for it.

use super::matmul::Codes;
use super::{Launch, has_shared};
use crate::backend::BackendError;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaBuf;
use crate::backend::cuda::{CudaView, MatShape};
use crate::quant::QuantType;

/// Experts and matrices of a launch, see `TileJobs` in kernels/tiles.cuh.
pub(super) const EXPERTS_MAX: usize = 64;
const MATRICES_MAX: usize = 2 * EXPERTS_MAX;
/// Outputs from which a matrix alone keeps all multiprocessors busy, so that rows beyond eight do not go side by side (measured on an H200).
const OUTPUTS_WIDE: usize = 8192;
/// Weight rows of a warp.
const WARP_ROWS: usize = 16;

/// Experts of a launch: their matrices, and their rows among the activations and outputs of the launch.
pub(super) struct Jobs {
    /// Pointers, then first row and number of rows.
    words: [u64; MATRICES_MAX + EXPERTS_MAX],
    pub(super) experts: usize,
    /// Matrices of an expert.
    pub(super) matrices: usize,
    /// Rows of all, and of the expert that has most.
    pub(super) rows: usize,
    pub(super) most: usize,
    /// Passes over the weights if each takes eight rows, or sixteen.
    passes: [usize; 2],
}

impl Jobs {
    /// No expert yet, of `matrices` each.
    pub(super) fn new(matrices: usize) -> Self {
        Self { words: [0; MATRICES_MAX + EXPERTS_MAX], experts: 0, matrices, rows: 0, most: 0, passes: [0; 2] }
    }

    /// One more, whose `count` rows begin behind those of the others.
    pub(super) fn add(&mut self, matrices: &[CudaView<'_>], count: usize) {
        assert!(matrices.len() == self.matrices && self.experts < EXPERTS_MAX, "{} matrices", matrices.len());
        for (i, matrix) in matrices.iter().enumerate() {
            self.words[self.experts * self.matrices + i] = matrix.at;
        }
        self.words[MATRICES_MAX + self.experts] = self.rows as u64 | (count as u64) << 32;
        self.experts += 1;
        self.rows += count;
        self.most = self.most.max(count);
        self.passes[0] += count.div_ceil(8);
        self.passes[1] += count.div_ceil(16);
    }

    /// The struct of the kernels.
    pub(super) fn words(&self) -> &[u64] {
        &self.words
    }
}

/// Kernels of a type, each for up to eight rows at a time and for up to sixteen.
struct Names {
    /// Both first matrices with the SwiGLU.
    pair: [&'static str; 2],
    single: [&'static str; 2],
    /// One matrix alone, by warps that have every fourth block each.
    alone: [&'static str; 2],
}

macro_rules! names {
    ($ty:literal) => {
        Names {
            pair: [concat!("eights_pair_", $ty, "_1"), concat!("eights_pair_", $ty, "_2")],
            single: [concat!("eights_", $ty, "_1"), concat!("eights_", $ty, "_2")],
            alone: [concat!("eights_alone_", $ty, "_1"), concat!("eights_alone_", $ty, "_2")],
        }
    };
}

fn kernels(ty: QuantType) -> Option<Names> {
    Some(match ty {
        QuantType::Q8_0 => names!("q8_0"),
        QuantType::Q2_K => names!("q2_k"),
        QuantType::Q3_K => names!("q3_k"),
        QuantType::Q4_K => names!("q4_k"),
        QuantType::Q6_K => names!("q6_k"),
        QuantType::IQ2_XXS => names!("iq2_xxs"),
        QuantType::MXFP4 => names!("mxfp4"),
        QuantType::F32 | QuantType::F16 | QuantType::BF16 | QuantType::I8 | QuantType::I32 => return None,
    })
}

/// Whether there are kernels for experts of `shape` on `device`.
pub(super) fn takes(device: &Device, shape: MatShape) -> bool {
    kernels(shape.ty).is_some() && has_shared(device, shared_bytes(shape, 1))
}

/// Warps of a block by eights of rows: EXPERT_WARPS and ALONE_WARPS of the kernels; blocks of a multiprocessor: EXPERT_BLOCKS.
const EXPERT_WARPS: [usize; 2] = [8, 12];
const EXPERT_BLOCKS: [usize; 2] = [2, 1];

fn alone_warps(ty: QuantType) -> usize {
    if ty == QuantType::IQ2_XXS { 8 } else { 4 }
}

/// Dynamic shared memory of a block over experts: tables and `StagedRows` of the kernels.
fn shared_bytes(shape: MatShape, eights: usize) -> usize {
    let (ty, cols) = (shape.ty, shape.cols);
    let offset = match ty {
        QuantType::Q2_K | QuantType::Q3_K => 64,
        QuantType::IQ2_XXS | QuantType::Q6_K => 16,
        _ => 32,
    };
    let has_minima = matches!(ty, QuantType::Q2_K | QuantType::Q4_K);
    let sums = if has_minima { (cols / 8).next_multiple_of(128) + 32 } else { 0 };
    let tables = if ty == QuantType::IQ2_XXS { (256 + 128) * 32 * 4 } else { 0 };
    tables + 8 * eights * (cols.next_multiple_of(128) + offset + sums + cols / ty.block_values() * 4)
}

/// How often a block takes what its warps take at once, of `tiles` for each of `passes`: so often that the last blocks do not leave most of the `resident`
/// ones idle. What a block does first takes about a quarter of a round.
fn rounds(tiles: usize, passes: usize, resident: usize) -> usize {
    let time = |rounds: &usize| (tiles.div_ceil(*rounds) * passes).div_ceil(resident) * (4 * rounds + 1);
    (1..=8).min_by_key(time).expect("eight numbers")
}

/// A launch over experts, whose warps take `warp_rows` outputs each, up to the outputs' size.
fn over_experts<'d>(
    device: &'d Device,
    names: [&'static str; 2],
    jobs: &Jobs,
    (shape, warp_rows): (MatShape, usize),
    (x, out): (Codes, &CudaBuf),
) -> Launch<'d> {
    // Sixteen rows at a time make a pass longer by less than a fourth.
    let is_wide = 5 * jobs.passes[0] > 6 * jobs.passes[1] && has_shared(device, shared_bytes(shape, 2));
    let (wide, eights) = (usize::from(is_wide), 1 + usize::from(is_wide));
    let shared = shared_bytes(shape, eights);
    let properties = device.properties();
    let resident = properties.multiprocessors * EXPERT_BLOCKS[wide].min(properties.shared_max / shared).max(1);
    let tiles = shape.rows.div_ceil(warp_rows * EXPERT_WARPS[wide]);
    let rounds = rounds(tiles, jobs.passes[wide], resident);
    let grid = [tiles.div_ceil(rounds), jobs.most.div_ceil(8 * eights), jobs.experts];
    let launch = Launch::new(device, names[wide], grid, 32 * EXPERT_WARPS[wide]).shared(shared).block(jobs.words());
    let launch = launch.pointer(x.codes).pointer(x.scales).pointer(x.sums).buf(out, jobs.rows * shape.rows);
    launch.int(shape.rows).int(shape.cols).int(rounds)
}

/// `mid = [rows, width]`: SwiGLU of the first two matrices of each expert.
pub(super) fn gate_up(
    device: &Device,
    jobs: &Jobs,
    (shape, limit): (MatShape, f32),
    x: Codes,
    mid: &CudaBuf,
) -> Result<(), BackendError> {
    assert_eq!(jobs.matrices, 2, "gate and up");
    let names = kernels(shape.ty).expect("asked by `takes`").pair;
    // Eight rows of each matrix.
    let launch = over_experts(device, names, jobs, (shape, WARP_ROWS / 2), (x, mid));
    // SAFETY: the parameters of the pair kernels; every expert's rows lie among those that were rounded.
    unsafe { launch.float(limit).start() }
}

/// `out = [rows, outputs]`: one matrix of each expert.
pub(super) fn down(device: &Device, jobs: &Jobs, shape: MatShape, x: Codes, out: &CudaBuf) -> Result<(), BackendError> {
    assert_eq!(jobs.matrices, 1, "one matrix of each");
    let names = kernels(shape.ty).expect("asked by `takes`").single;
    let launch = over_experts(device, names, jobs, (shape, WARP_ROWS), (x, out));
    // SAFETY: the parameters of the kernels over one matrix of each expert, whose rows lie among those that were rounded.
    unsafe { launch.start() }
}

/// `out = [rows, outputs]`: some rows with one matrix, in `groups` groups of outputs with activations of their own; four warps share its rows.
pub(super) fn alone(
    device: &Device,
    (w, rows, groups): (CudaView<'_>, usize, usize),
    x: Codes,
    out: &CudaBuf,
) -> Result<(), BackendError> {
    let (shape, mut jobs) = (w.shape, Jobs::new(1));
    jobs.add(&[w], rows);
    let warps = alone_warps(shape.ty);
    let wide = usize::from(rows > 16 || (rows > 8 && shape.rows >= OUTPUTS_WIDE));
    let name = kernels(shape.ty).expect("asked by who rounded").alone[wide];
    let tiles = groups * (shape.rows / groups).div_ceil(WARP_ROWS);
    let grid = [(tiles * 4).div_ceil(warps), rows.div_ceil(8 << wide), 1];
    let launch = Launch::new(device, name, grid, 32 * warps).block(jobs.words());
    let launch = launch.pointer(x.codes).pointer(x.scales).pointer(x.sums).buf(out, rows * shape.rows);
    // SAFETY: the parameters of the kernels over one matrix; all rows were rounded.
    unsafe { launch.int(shape.rows).int(shape.cols).int(groups).start() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cuda::modules::defines;

    #[test]
    fn every_type_has_its_kernels() {
        let types = [
            QuantType::Q8_0,
            QuantType::Q2_K,
            QuantType::Q3_K,
            QuantType::Q4_K,
            QuantType::Q6_K,
            QuantType::IQ2_XXS,
            QuantType::MXFP4,
        ];
        for ty in types {
            let Names { pair, single, alone } = kernels(ty).unwrap();
            for name in [pair, single, alone].concat() {
                assert!(defines(name), "{name}");
            }
            // Two blocks of 228 KiB, each with the kilobyte that the system takes; one of a device that gives a block 99 KiB.
            let shape = MatShape { ty, rows: 2304, cols: 5120 };
            assert!(
                2 * (shared_bytes(shape, 1) + 1024) <= 228 << 10 && shared_bytes(shape, 1) + 4096 <= 99 << 10,
                "{ty}"
            );
            assert!(shared_bytes(shape, 2) + 4096 <= 227 << 10, "{ty}");
        }
        assert!(!defines("eights_f16_1") && kernels(QuantType::F16).is_none());
    }

    #[test]
    fn blocks_take_what_ends_together() {
        // 64 experts of 2,304 outputs in blocks of 64; a few experts; one.
        assert_eq!(
            [(36, 64), (36, 12), (36, 1), (1, 1)].map(|(tiles, passes)| rounds(tiles, passes, 264)),
            [3, 2, 1, 1]
        );
    }
}
