//! Launchers of kernels/eights.cuh: products of few activation rows with one matrix, or with those of several experts.
//! Never lets the way change a bit: all kernels over codes sum in the same order.
//! Surprising fact: the list of experts travels as a kernel parameter of a kilobyte and a half, so nothing is uploaded for it.

use super::Launch;
use super::matmul::Codes;
use crate::backend::BackendError;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaBuf;
use crate::backend::cuda::{CudaView, MatShape};
use crate::quant::QuantType;

/// Experts and matrices of a launch, see `TileJobs` in kernels/tiles.cuh.
pub(super) const EXPERTS_MAX: usize = 64;
const MATRICES_MAX: usize = 2 * EXPERTS_MAX;
/// Outputs from which a matrix alone keeps all multiprocessors busy with sixteen rows at a time (measured on an H200).
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
}

impl Jobs {
    /// No expert yet, of `matrices` each.
    pub(super) fn new(matrices: usize) -> Self {
        Self { words: [0; MATRICES_MAX + EXPERTS_MAX], experts: 0, matrices, rows: 0, most: 0 }
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
    /// One matrix, by warps that have every fourth block each.
    spread: [&'static str; 2],
}

macro_rules! names {
    ($ty:literal) => {
        Names {
            pair: [concat!("eights_pair_", $ty, "_1"), concat!("eights_pair_", $ty, "_2")],
            single: [concat!("eights_", $ty, "_1"), concat!("eights_", $ty, "_2")],
            spread: [concat!("eights_spread_", $ty, "_1"), concat!("eights_spread_", $ty, "_2")],
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

/// Whether there are kernels for weights of `ty`.
pub(super) fn has_kernels(ty: QuantType) -> bool {
    kernels(ty).is_some()
}

/// Threads of a block: EIGHTS_THREADS of the kernels.
fn threads(ty: QuantType) -> usize {
    if ty == QuantType::IQ2_XXS { 256 } else { 128 }
}

/// Grid and block of a launch over `jobs`, of which `sharers` warps take one of `tiles`; sixteen rows at a time if it `is_wide`.
fn start<'d>(
    device: &'d Device,
    ty: QuantType,
    (names, is_wide): ([&'static str; 2], bool),
    jobs: &Jobs,
    (tiles, sharers): (usize, usize),
) -> Launch<'d> {
    let warps = threads(ty) / 32;
    let grid = [(tiles * sharers).div_ceil(warps), jobs.most.div_ceil(8 << usize::from(is_wide)), jobs.experts];
    Launch::new(device, names[usize::from(is_wide)], grid, threads(ty)).block(jobs.words())
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
    let names = kernels(shape.ty).expect("asked by `has_kernels`").pair;
    // Eight rows of each matrix.
    let launch = start(device, shape.ty, (names, jobs.most > 8), jobs, (shape.rows.div_ceil(WARP_ROWS / 2), 1));
    let launch = launch.pointer(x.codes).pointer(x.scales).pointer(x.sums).buf(mid, jobs.rows * shape.rows);
    // SAFETY: the parameters of the pair kernels; every expert's rows lie among those that were rounded.
    unsafe { launch.int(shape.rows).int(shape.cols).float(limit).start() }
}

/// `out = [rows, outputs]`: one matrix of each expert.
pub(super) fn down(device: &Device, jobs: &Jobs, shape: MatShape, x: Codes, out: &CudaBuf) -> Result<(), BackendError> {
    let names = kernels(shape.ty).expect("asked by `has_kernels`").single;
    let launch = start(device, shape.ty, (names, jobs.most > 8), jobs, (shape.rows.div_ceil(WARP_ROWS), 1));
    single(launch, jobs, (shape, 1), x, out)
}

/// The same of one matrix alone, in `groups` groups of outputs with activations of their own: four warps share its rows.
pub(super) fn spread(
    device: &Device,
    jobs: &Jobs,
    (shape, groups): (MatShape, usize),
    x: Codes,
    out: &CudaBuf,
) -> Result<(), BackendError> {
    let names = kernels(shape.ty).expect("asked by who rounded").spread;
    let tiles = groups * (shape.rows / groups).div_ceil(WARP_ROWS);
    let is_wide = jobs.most > 8 && shape.rows >= OUTPUTS_WIDE;
    single(start(device, shape.ty, (names, is_wide), jobs, (tiles, 4)), jobs, (shape, groups), x, out)
}

fn single(
    launch: Launch<'_>,
    jobs: &Jobs,
    (shape, groups): (MatShape, usize),
    x: Codes,
    out: &CudaBuf,
) -> Result<(), BackendError> {
    assert_eq!(jobs.matrices, 1, "one matrix of each");
    let launch = launch.pointer(x.codes).pointer(x.scales).pointer(x.sums).buf(out, jobs.rows * shape.rows);
    // SAFETY: the parameters of the kernels over one matrix; every expert's rows lie among those that were rounded.
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
            let Names { pair, single, spread } = kernels(ty).unwrap();
            for name in [pair, single, spread].concat() {
                assert!(defines(name), "{name}");
            }
        }
        assert!(!defines("eights_f16_1") && !has_kernels(QuantType::F16));
    }
}
