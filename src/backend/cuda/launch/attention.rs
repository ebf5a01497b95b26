//! Launchers of kernels/attention.cu, one block a head of a row, and of kernels/attention_tiles.cuh, one block 32 heads of a row: the
//! processor's sums. Never looks past the row's own position, and never lets the choice change a bit; that of tensor cores is the user's and the
//! op's. Surprising fact: the first starts one warp more than it needs; it adds up the softmax.

use std::sync::Arc;

use super::attention_mma::{Scores, attention_mma, takes};
use super::{Launch, has_shared};
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaBuf;
use crate::backend::ops::{Attention, Sums};

/// Threads that score keys and sum values, see kernels/attention.cu.
const THREADS: usize = 512;
/// Heads and threads of a block, the width of a head, and words of shared memory besides those for each key: see kernels/attention_tiles.cuh.
const TILE_HEADS: usize = 32;
const TILE_THREADS: usize = 256;
const TILE_WIDTH: usize = 512;
const TILE_WORK: usize = TILE_HEADS * TILE_WIDTH + 2 * 64 * 80;
/// From this many heads of all rows on tiles are faster, though a block of them takes as long as six rows of 64 heads otherwise.
const TILES_FROM: usize = 1024;

pub fn attention(
    device: &Arc<Device>,
    (sums, scores): (Sums, &Scores),
    op: Attention<'_, CudaBackend>,
    out: &mut CudaBuf,
) -> Result<(), BackendError> {
    let is_fast = sums == Sums::Fast && takes(device, &op);
    scores.count(is_fast);
    if is_fast { attention_mma(device, scores, &op, out) } else { as_processor(device, &op, out) }
}

/// With the processor's bits.
fn as_processor(device: &Device, op: &Attention<'_, CudaBackend>, out: &mut CudaBuf) -> Result<(), BackendError> {
    assert!(op.width.is_multiple_of(4), "heads of {} values: not whole fours", op.width);
    let k = op.compressed.as_ref().map_or(0, |c| c.k);
    let keys_max = op.window_len + k;
    let values = op.rows * op.heads * op.width;
    let tile_shared = (TILE_WORK + (TILE_HEADS + 1) * keys_max).next_multiple_of(4) * 4;
    let is_tiled = op.rows * op.heads >= TILES_FROM
        && (op.width, op.heads % TILE_HEADS) == (TILE_WIDTH, 0)
        && has_shared(device, tile_shared);
    let launch = if is_tiled {
        let grid = [op.heads / TILE_HEADS, op.rows, 1];
        Launch::new(device, "attention_tiles", grid, TILE_THREADS).shared(tile_shared)
    } else {
        let shared = (op.width + 2 * keys_max).next_multiple_of(4) * 4;
        Launch::new(device, "attention", [op.heads, op.rows, 1], THREADS + 32).shared(shared)
    };
    let launch = launch.buf(op.q, values).buf(op.window, op.window_slots * op.width);
    let launch = match &op.compressed {
        Some(c) => launch.buf(c.rows, 0).ids(c.selected, op.rows * k),
        None => launch.pointer(0).pointer(0),
    };
    let launch = launch.buf(op.sinks, op.heads).buf(out, values).int(op.heads).int(op.width);
    let launch = launch.int(op.window_slots).int(op.window_len).int(k).int(op.first_pos).float(op.scale);
    // SAFETY: the parameters of both kernels; selected rows are rows of `compressed` by contract.
    unsafe { launch.start() }
}
