//! Launchers of kernels/experts_rows.cu and kernels/tiles_jobs.cuh: several experts of a sweep at a time, each on its rows.
//! Never adds two experts to a row out of turn. Surprising fact: the rows of all of them are rounded and multiplied as one batch, because an
//! expert alone has too few for all multiprocessors.

use std::ops::Range;
use std::sync::Arc;

use super::eights::{self, EXPERTS_MAX, Jobs};
use super::matmul::{Codes, Rounded};
use super::tiles::Size;
use super::{Launch, THREADS, has_shared, move_rows, swiglu, tiles};
use crate::backend::BackendError;
use crate::backend::cpu::matmul::Arithmetic;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaBuf;
use crate::backend::cuda::{CudaBackend, CudaView, MatShape};
use crate::backend::ops::{ExpertsRows, MoveRows, SweptExpert, SweptWork, SwiGlu};
use crate::quant::QuantType;

/// Fewest rows of an expert, on average, from which tiles are faster than eights.
const TILES_FROM: usize = 48;
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

/// Whether there are kernels for `op`.
pub fn is_joined(device: &Device, arithmetic: Arithmetic, op: &ExpertsRows<'_, '_, CudaBackend>) -> bool {
    let Some(first) = op.experts.first() else { return false };
    let same = |e: &SweptExpert<'_, CudaBackend>| {
        e.gate.shape == first.gate.shape && e.up.shape == first.gate.shape && e.down.shape == first.down.shape
    };
    arithmetic == Arithmetic::Fast
        && eights::takes(device, first.gate.shape)
        && eights::takes(device, first.down.shape)
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

/// The matrices that `matrices` names, of each part.
fn jobs<'w, const N: usize>(
    parts: &[Part<'_, 'w>],
    matrices: [fn(&SweptExpert<'w, CudaBackend>) -> CudaView<'w>; N],
) -> Jobs {
    let mut jobs = Jobs::new(N);
    for part in parts {
        jobs.add(&matrices.map(|matrix| matrix(part.expert)), part.assigned.len());
    }
    jobs
}

/// Whether a batch goes through tiles.
fn is_tiled(device: &Device, parts: &[Part<'_, '_>]) -> bool {
    let (first, rows) = (parts[0].expert, parts.iter().map(|part| part.assigned.len()).sum::<usize>());
    let shared = |ty| tiles::shared_bytes(ty, 1);
    rows >= TILES_FROM * parts.len() && has_shared(device, shared(first.gate.shape.ty).max(shared(first.down.shape.ty)))
}

/// Rows of a batch, as tiles want them rounded.
fn size(rows: usize, cols: usize) -> Size {
    Size { rows, groups: 1, cols }
}

/// One product in tiles for each expert and each of its matrices, from activations that were rounded together.
fn products(device: &Device, jobs: &Jobs, shape: MatShape, at: Codes, outs: [&CudaBuf; 2]) -> Result<(), BackendError> {
    let is_high = jobs.most >= HIGH_FROM && has_shared(device, tiles::shared_bytes(shape.ty, 2));
    let height = 1 + usize::from(is_high);
    let kernel = kernels(shape.ty).expect("all types that eights have")[height - 1];
    let grid =
        [jobs.most.div_ceil(32 << height), shape.rows.div_ceil(tiles::WEIGHT_ROWS), jobs.experts * jobs.matrices];
    let launch = Launch::new(device, kernel, grid, 64 << height).shared(tiles::shared_bytes(shape.ty, height));
    let launch = launch.block(jobs.words()).pointer(at.codes).pointer(at.scales);
    let is_sorted = shape.ty.block_values() == 32;
    let launch = if is_sorted { launch } else { launch.pointer(at.sums) };
    let launch = launch.buf(outs[0], jobs.rows * shape.rows).buf(outs[1], jobs.rows * shape.rows);
    let launch = launch.int(shape.rows).int(shape.cols).int(jobs.matrices);
    let launch = if is_sorted { launch.int(size(jobs.rows, shape.cols).padded()) } else { launch };
    // SAFETY: the parameters of the jobs kernels; every expert's rows lie among those that were rounded.
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
        let range = parts[0].assigned.start..parts[parts.len() - 1].assigned.end;
        let rows = range.len();
        let (gate, down) = (parts[0].expert.gate.shape, parts[0].expert.down.shape);
        assert_eq!((gate.rows, gate.cols, down.rows, down.cols), (width, hidden, hidden, width), "shapes of experts");
        let (first, second) = (jobs(&parts, [|e| e.gate, |e| e.up]), jobs(&parts, [|e| e.down]));
        let gathered = MoveRows { src: op.x, indices: op.rows, range: range.clone(), width: hidden };
        if is_tiled(device, &parts) {
            move_rows::gather_rows(device, gathered, work.x)?;
            let x = tiles::round_rows(device, rounded, work.x, size(rows, hidden), gate.ty.block_values())?;
            products(device, &first, gate, x, [&*work.gate, &*work.up])?;
            swiglu::swiglu(device, SwiGlu { up: work.up, values: rows * width, limit: op.limit }, work.gate)?;
            let mid = tiles::round_rows(device, rounded, work.gate, size(rows, width), down.ty.block_values())?;
            products(device, &second, down, mid, [&*work.y, &*work.y])?;
        } else {
            let x = rounded.gather(device, gathered, gate.ty.block_values())?;
            eights::gate_up(device, &first, (gate, op.limit), x, work.gate)?;
            let mid = rounded.fill(device, work.gate, (rows, width), down.ty.block_values())?;
            eights::down(device, &second, down, mid, work.y)?;
        }
        let grid = [hidden.div_ceil(4 * THREADS), rows, 1];
        let launch = Launch::new(device, "add_experts", grid, THREADS).buf(work.y, rows * hidden).buf(op.weights, 0);
        let launch = launch.ids(op.places, range.end).ids(op.rows, range.end).buf(sums, 0);
        // SAFETY: the parameters of the kernel; rows and places are those of the sums and the weights by contract.
        unsafe { launch.int(range.start).int(rows).int(hidden).start()? };
    }
    Ok(())
}
