//! Launchers of kernels/tiles_32.cuh and kernels/tiles_256.cuh: products of many activation rows on tensor cores.
//! Never changes a bit: whole numbers of a block are exact, and blocks join the same running sums as in the other kernels.
//! Surprising fact: blocks of 32 want their activations sorted by the running sum that a block joins, so they are rounded by a kernel of
//! their own.

use std::sync::Arc;

use super::matmul::{Codes, Rounded};
use super::{Launch, has_shared};
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaBuf;
use crate::backend::ops::Matmul;
use crate::quant::QuantType;

/// Fewest activation rows for which tiles are faster than eights, for blocks of 32 and of 256 (measured on an H200), and fewest with so many
/// outputs that tiles keep all multiprocessors busy.
const ROWS_MIN: [usize; 2] = [48, 128];
const ROWS_MIN_WIDE: usize = 16;
const OUTPUTS_WIDE: usize = 8192;
/// Weight rows of a tile.
pub(super) const WEIGHT_ROWS: usize = 64;
/// Tiles of 128 rows are used from this number of them on: eight for each of 132 multiprocessors, so that few idle at the end.
const TILES_ENOUGH: usize = 1056;
/// Rows of the scales from [`round`] come in multiples of this.
const ROWS_PADDED: usize = 4;

/// Kernels of a type by the height of their tiles: 32, 64 and 128 activation rows.
fn kernels(ty: QuantType) -> Option<[&'static str; 3]> {
    Some(match ty {
        QuantType::Q8_0 => ["tiles_q8_0_1", "tiles_q8_0_2", "tiles_q8_0_4"],
        QuantType::MXFP4 => ["tiles_mxfp4_1", "tiles_mxfp4_2", "tiles_mxfp4_4"],
        QuantType::Q2_K => ["tiles_q2_k_1", "tiles_q2_k_2", "tiles_q2_k_4"],
        QuantType::Q3_K => ["tiles_q3_k_1", "tiles_q3_k_2", "tiles_q3_k_4"],
        QuantType::Q4_K => ["tiles_q4_k_1", "tiles_q4_k_2", "tiles_q4_k_4"],
        QuantType::Q6_K => ["tiles_q6_k_1", "tiles_q6_k_2", "tiles_q6_k_4"],
        QuantType::IQ2_XXS => ["tiles_iq2_xxs_1", "tiles_iq2_xxs_2", "tiles_iq2_xxs_4"],
        _ => return None,
    })
}

/// Whether `op` goes through tiles.
pub(super) fn takes(op: &Matmul<'_, '_, CudaBackend>) -> bool {
    takes_shape(op.w.shape.ty, op.rows, op.w.shape.rows)
}

fn takes_shape(ty: QuantType, rows: usize, outputs: usize) -> bool {
    let rows_min = ROWS_MIN[usize::from(ty.block_values() == 256)];
    let rows_min = if outputs >= OUTPUTS_WIDE { ROWS_MIN_WIDE } else { rows_min };
    rows >= rows_min && kernels(ty).is_some()
}

/// Activation rows of a product, and how many groups each has.
#[derive(Clone, Copy)]
pub(super) struct Size {
    pub(super) rows: usize,
    pub(super) groups: usize,
    pub(super) cols: usize,
}

/// `rows` as scales come.
pub(super) fn padded_rows(rows: usize) -> usize {
    rows.next_multiple_of(ROWS_PADDED)
}

impl Size {
    pub(super) fn padded(self) -> usize {
        padded_rows(self.rows)
    }
}

fn size(op: &Matmul<'_, '_, CudaBackend>) -> Size {
    Size { rows: op.rows, groups: op.groups, cols: op.w.shape.cols }
}

/// Rounds the rows of `op` as its tiles want them.
pub(super) fn round(
    device: &Arc<Device>,
    rounded: &Rounded,
    op: &Matmul<'_, '_, CudaBackend>,
) -> Result<Codes, BackendError> {
    round_rows(device, rounded, op.x, size(op), op.w.shape.ty.block_values())
}

/// Rounds the rows `x` as tiles of weights in blocks of `block` want them.
pub(super) fn round_rows(
    device: &Arc<Device>,
    rounded: &Rounded,
    x: &CudaBuf,
    size: Size,
    block: usize,
) -> Result<Codes, BackendError> {
    let Size { rows, groups, cols } = size;
    if block == 256 {
        return rounded.fill(device, x, (rows * groups, cols), block);
    }
    let padded = size.padded();
    assert!(x.len >= rows * groups * cols, "{rows} rows of {groups} x {cols} in a buffer of {}", x.len);
    let at = rounded.room(device, padded * groups * cols)?;
    // Four warps a block, 256 values each.
    let launch = Launch::new(device, "quantise_tiles_32", [cols.div_ceil(4 * 256), padded * groups, 1], 128);
    let launch = launch.pointer(x.bytes.at).pointer(at.codes).pointer(at.scales);
    // SAFETY: the parameters of the kernel, with room for the scales of `padded` rows.
    unsafe { launch.int(cols).int(rows).int(groups).int(padded).start()? };
    Ok(at)
}

/// Which of the heights: the largest that has tiles enough and fits the device's shared memory. A height is 32 rows shifted by it.
fn height(device: &Device, op: &Matmul<'_, '_, CudaBackend>) -> usize {
    let outputs = op.groups * (op.w.shape.rows / op.groups).div_ceil(WEIGHT_ROWS);
    let ty = op.w.shape.ty;
    let is_high = op.rows.div_ceil(128) * outputs >= TILES_ENOUGH && has_shared(device, shared_bytes(ty, 2));
    if is_high { 2 } else { usize::from(op.rows > 32) }
}

/// Bytes of the two steps of a tile; an upper bound of `Step32` and `Step256` in the kernels.
pub(super) fn shared_bytes(ty: QuantType, height: usize) -> usize {
    let rows = 32 << height;
    let step = if ty.block_values() == 32 {
        (rows + WEIGHT_ROWS) * (128 + 4 * 4)
    } else {
        let runs = match ty {
            QuantType::Q6_K => 16,
            QuantType::Q4_K | QuantType::IQ2_XXS => 8,
            _ => 0,
        };
        let minima =
            if matches!(ty, QuantType::Q2_K | QuantType::Q4_K) { rows * 32 + WEIGHT_ROWS * (16 + 4) } else { 0 };
        // 16 for what empty parts take.
        (rows + WEIGHT_ROWS) * (256 + 4) + runs * WEIGHT_ROWS * 4 + minima + 16
    };
    2 * step
}

/// The product, over activations from [`round`].
pub(super) fn tiles(
    device: &Arc<Device>,
    op: &Matmul<'_, '_, CudaBackend>,
    at: Codes,
    out: &CudaBuf,
) -> Result<(), BackendError> {
    let (shape, Size { rows, groups, cols }) = (op.w.shape, size(op));
    if shape.rows == 0 {
        return Ok(());
    }
    let height = height(device, op);
    let kernel = kernels(shape.ty).expect("asked by `takes`")[height];
    let grid = [rows.div_ceil(32 << height), groups * (shape.rows / groups).div_ceil(WEIGHT_ROWS), 1];
    let launch = Launch::new(device, kernel, grid, 64 << height).shared(shared_bytes(shape.ty, height));
    let launch = launch.pointer(op.w.at).pointer(at.codes).pointer(at.scales);
    let is_sorted = shape.ty.block_values() == 32;
    let launch = if is_sorted { launch } else { launch.pointer(at.sums) };
    let launch = launch.buf(out, rows * shape.rows).int(shape.rows).int(cols).int(rows).int(groups);
    let launch = if is_sorted { launch.int(size(op).padded()) } else { launch };
    // SAFETY: the parameters of the kernels over tiles; the view says how large the matrix is.
    unsafe { launch.start() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_fit_a_multiprocessor() {
        let types = [
            QuantType::Q8_0,
            QuantType::MXFP4,
            QuantType::Q2_K,
            QuantType::Q3_K,
            QuantType::Q4_K,
            QuantType::Q6_K,
            QuantType::IQ2_XXS,
        ];
        for ty in types {
            let least = if ty.block_values() == 32 { 48 } else { 128 };
            assert!(takes_shape(ty, least, 64) && !takes_shape(ty, least - 1, 64));
            assert!(takes_shape(ty, ROWS_MIN_WIDE, OUTPUTS_WIDE));
            // Two blocks of 228 KiB, each with the kilobyte that the system takes and the tables that one type has.
            let tables = if ty == QuantType::IQ2_XXS { 1536 } else { 0 };
            assert!(2 * (shared_bytes(ty, 2) + 1024 + tables) <= 228 << 10, "{ty}");
        }
        assert!(!takes_shape(QuantType::F32, 1000, OUTPUTS_WIDE));
    }
}
