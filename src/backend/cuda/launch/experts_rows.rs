//! Launchers of kernels/tiles_jobs.cuh and kernels/experts_rows.cu: several experts of a sweep at a time, each on its rows.
//! Never adds two experts to a row at once. Surprising fact: the rows of all of them are rounded and multiplied as one batch, because an
//! expert alone has too few for all multiprocessors.

use std::ops::Range;
use std::sync::Arc;

use super::matmul::{Codes, Rounded};
use super::tiles::Size;
use super::{Launch, THREADS, has_shared, move_rows, swiglu, tiles};
use crate::backend::BackendError;
use crate::backend::cpu::matmul::Arithmetic;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaBuf;
use crate::backend::cuda::{CudaBackend, CudaView};
use crate::backend::ops::{ExpertsRows, MoveRows, SweptExpert, SweptWork, SwiGlu};
use crate::quant::QuantType;

/// Matrices and experts of a launch, see kernels/tiles_jobs.cuh. An expert has two matrices in its first launch.
const JOBS_MAX: usize = 16;
const EXPERTS_MAX: usize = JOBS_MAX / 2;
/// Fewest rows of an expert, on average, for which its tiles are not mostly empty.
const ROWS_MIN: usize = 24;
/// From this many rows on the largest expert of a launch has tiles of 128 rows, else of 64.
const HIGH_FROM: usize = 400;

/// Kernels of a type by the height of their tiles: 64 and 128 activation rows.
fn kernels(ty: QuantType) -> Option<[&'static str; 2]> {
    Some(match ty {
        QuantType::Q2_K => ["tiles_jobs_q2_k_2", "tiles_jobs_q2_k_4"],
        QuantType::Q3_K => ["tiles_jobs_q3_k_2", "tiles_jobs_q3_k_4"],
        QuantType::Q4_K => ["tiles_jobs_q4_k_2", "tiles_jobs_q4_k_4"],
        QuantType::Q6_K => ["tiles_jobs_q6_k_2", "tiles_jobs_q6_k_4"],
        QuantType::IQ2_XXS => ["tiles_jobs_iq2_xxs_2", "tiles_jobs_iq2_xxs_4"],
        QuantType::Q8_0 => ["tiles_jobs_q8_0_2", "tiles_jobs_q8_0_4"],
        QuantType::MXFP4 => ["tiles_jobs_mxfp4_2", "tiles_jobs_mxfp4_4"],
        _ => return None,
    })
}

/// Whether there are kernels for `op`, and rows enough for them.
pub fn is_joined(device: &Device, arithmetic: Arithmetic, op: &ExpertsRows<'_, '_, CudaBackend>) -> bool {
    let Some(first) = op.experts.first() else { return false };
    let same = |e: &SweptExpert<'_, CudaBackend>| {
        e.gate.shape == first.gate.shape && e.up.shape == first.gate.shape && e.down.shape == first.down.shape
    };
    let rows: usize = op.experts.iter().map(|e| e.assigned.len()).sum();
    arithmetic == Arithmetic::Fast
        && has_shared(
            device,
            tiles::shared_bytes(first.gate.shape.ty, 1).max(tiles::shared_bytes(first.down.shape.ty, 1)),
        )
        && kernels(first.gate.shape.ty).is_some()
        && kernels(first.down.shape.ty).is_some()
        && rows >= ROWS_MIN * op.experts.len()
        && op.experts.iter().all(same)
}

/// A part of an expert's rows that fits the work memory.
struct Part<'e, 'w> {
    expert: &'e SweptExpert<'w, CudaBackend>,
    assigned: Range<usize>,
}

/// The parts of each batch: as many experts as there is room for, or a roomful of one.
fn batches<'e, 'w>(op: &ExpertsRows<'w, 'e, CudaBackend>) -> Vec<Vec<Part<'e, 'w>>> {
    let mut all: Vec<Vec<Part<'e, 'w>>> = Vec::new();
    let mut left = 0;
    for expert in op.experts {
        for first in expert.assigned.clone().step_by(op.room) {
            let assigned = first..expert.assigned.end.min(first + op.room);
            if assigned.len() > left || all.last().is_some_and(|batch| batch.len() == EXPERTS_MAX) {
                all.push(Vec::new());
                left = op.room;
            }
            left -= assigned.len();
            all.last_mut().expect("pushed above").push(Part { expert, assigned });
        }
    }
    all
}

/// Rows of a batch, as tiles want them rounded.
fn size(rows: usize, cols: usize) -> Size {
    Size { rows, groups: 1, cols }
}

/// One product for each part and each of its matrices, from activations that were rounded together.
fn products<'w>(
    device: &Device,
    (parts, first): (&[Part<'_, 'w>], usize),
    matrices: &[fn(&SweptExpert<'w, CudaBackend>) -> CudaView<'w>],
    at: Codes,
    outs: [&CudaBuf; 2],
) -> Result<(), BackendError> {
    let shape = matrices[0](parts[0].expert).shape;
    // Pointers, then first row and number of rows.
    let mut jobs = [0u64; 2 * JOBS_MAX];
    for (i, part) in parts.iter().enumerate() {
        for (j, matrix) in matrices.iter().enumerate() {
            jobs[i * matrices.len() + j] = matrix(part.expert).at;
        }
        jobs[JOBS_MAX + i] = (part.assigned.start - first) as u64 | (part.assigned.len() as u64) << 32;
    }
    let most = parts.iter().map(|part| part.assigned.len()).max().unwrap_or(0);
    let rows: usize = parts.iter().map(|part| part.assigned.len()).sum();
    let is_high = most >= HIGH_FROM && has_shared(device, tiles::shared_bytes(shape.ty, 2));
    let height = 1 + usize::from(is_high);
    let kernel = kernels(shape.ty).expect("asked by `is_joined`")[height - 1];
    let grid = [most.div_ceil(32 << height), shape.rows.div_ceil(tiles::WEIGHT_ROWS), parts.len() * matrices.len()];
    let launch = Launch::new(device, kernel, grid, 64 << height).shared(tiles::shared_bytes(shape.ty, height));
    let launch = launch.block(&jobs).pointer(at.codes).pointer(at.scales);
    let is_sorted = shape.ty.block_values() == 32;
    let launch = if is_sorted { launch } else { launch.pointer(at.sums) };
    let launch = launch.buf(outs[0], rows * shape.rows).buf(outs[1], rows * shape.rows);
    let launch = launch.int(shape.rows).int(shape.cols).int(matrices.len());
    let launch = if is_sorted { launch.int(size(rows, shape.cols).padded()) } else { launch };
    // SAFETY: the parameters of the jobs kernels; every part lies among the `rows` rounded rows.
    unsafe { launch.start() }
}

pub fn experts_rows(
    device: &Arc<Device>,
    rounded: &Rounded,
    op: &ExpertsRows<'_, '_, CudaBackend>,
    work: SweptWork<'_, CudaBackend>,
    sums: &mut CudaBuf,
) -> Result<(), BackendError> {
    let (hidden, width) = (op.hidden, op.width);
    for parts in batches(op) {
        let (first, end) = (parts[0].assigned.start, parts[parts.len() - 1].assigned.end);
        let rows = end - first;
        let gathered = MoveRows { src: op.x, indices: op.rows, range: first..end, width: hidden };
        move_rows::gather_rows(device, gathered, work.x)?;
        let (gate, down) = (parts[0].expert.gate.shape, parts[0].expert.down.shape);
        assert_eq!((gate.rows, gate.cols, down.rows, down.cols), (width, hidden, hidden, width), "shapes of experts");
        let x = tiles::round_rows(device, rounded, work.x, size(rows, hidden), gate.ty.block_values())?;
        products(device, (&parts, first), &[|e| e.gate, |e| e.up], x, [&*work.gate, &*work.up])?;
        swiglu::swiglu(device, SwiGlu { up: work.up, values: rows * width, limit: op.limit }, work.gate)?;
        let mid = tiles::round_rows(device, rounded, work.gate, size(rows, width), down.ty.block_values())?;
        products(device, (&parts, first), &[|e| e.down], mid, [&*work.y, &*work.y])?;
        for part in &parts {
            let grid = [hidden.div_ceil(4 * THREADS), part.assigned.len(), 1];
            let launch = Launch::new(device, "add_expert_rows", grid, THREADS);
            let y = work.y.bytes.at + (4 * (part.assigned.start - first) * hidden) as u64;
            let launch = launch.pointer(y).buf(op.weights, 0).ids(op.places, end).ids(op.rows, end).buf(sums, 0);
            // SAFETY: the parameters of the kernel; rows and places are those of the sums and the weights by contract.
            unsafe { launch.int(part.assigned.start).int(hidden).start()? };
        }
    }
    Ok(())
}
