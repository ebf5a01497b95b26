//! Launcher of kernels/pool_pairs.cu, and the copies that keep an open pair.
//! Never reads the open rows of a pair that lies whole in the chunk.

use super::{Launch, THREADS, over_rows};
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::ops::{PairsOut, PoolPairs};

pub fn pool_pairs(
    device: &Device,
    op: PoolPairs<'_, CudaBackend>,
    out: PairsOut<'_, CudaBackend>,
) -> Result<usize, BackendError> {
    let (rows, width) = (op.rows, op.width);
    // The second token of a pair has an odd position.
    let first_row = 1 - op.first_pos % 2;
    let pairs = (rows + 1).saturating_sub(first_row) / 2;
    let launch = Launch::new(device, "pool_pairs", over_rows(width, pairs), THREADS);
    let launch = launch.buf(op.values, rows * width).buf(op.gates, rows * width).buf(op.open_values, width);
    let launch = launch.buf(op.open_gates, width).buf(out.pooled, pairs * width).int(width).int(first_row);
    // SAFETY: the parameters of `pool_pairs`; row `first_row + 2 * (pairs - 1)` is below `rows`.
    unsafe { launch.start()? };
    if rows > 0 && (op.first_pos + rows) % 2 == 1 {
        let (row, bytes) = (((rows - 1) * width * 4) as u64, width * 4);
        assert!(out.open_values.len >= width && out.open_gates.len >= width, "room for an open row");
        device.copy(op.values.bytes.at + row, out.open_values.bytes.at, bytes)?;
        device.copy(op.gates.bytes.at + row, out.open_gates.bytes.at, bytes)?;
    }
    Ok(pairs)
}
