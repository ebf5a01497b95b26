//! Launcher of kernels/rope.cu: blocks of rows and groups of heads, one thread a pair.
//! Never touches values before the last `rotary` of a head.

use super::{Launch, THREADS};
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaBuf;
use crate::backend::ops::Rope;

/// From this many rows on a block has a row to itself: there are blocks enough.
const FEW_ROWS: usize = 64;

pub fn rope(device: &Device, op: Rope<'_, CudaBackend>, x: &mut CudaBuf) -> Result<(), BackendError> {
    let pairs = op.rotary / 2;
    if pairs == 0 {
        return Ok(());
    }
    // Whole heads at a time; at least one.
    let block = pairs * (THREADS / pairs).clamp(1, op.heads);
    let groups = if op.rows < FEW_ROWS { op.heads.div_ceil(block / pairs) } else { 1 };
    let launch = Launch::new(device, "rope", [op.rows, groups, 1], block);
    let launch = launch.buf(op.freqs, pairs).buf(x, op.rows * op.heads * op.width);
    let launch = launch.int(op.heads).int(op.width).int(op.rotary).int(op.first_pos).int(op.pos_step);
    // SAFETY: the parameters of `rope`, for rows and groups of heads in blocks of a multiple of `pairs` threads.
    unsafe { launch.int(usize::from(op.inverse)).start() }
}
