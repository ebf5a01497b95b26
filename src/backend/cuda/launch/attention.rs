//! Launcher of kernels/attention.cu: one block a head of a row.
//! Never looks past the row's own position. Surprising fact: one warp more than needed is started; it adds up the softmax.

use super::Launch;
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaBuf;
use crate::backend::ops::Attention;

/// Threads that score keys and sum values, see the kernel.
const THREADS: usize = 512;

pub fn attention(device: &Device, op: Attention<'_, CudaBackend>, out: &mut CudaBuf) -> Result<(), BackendError> {
    assert!(op.width.is_multiple_of(4), "heads of {} values: not whole fours", op.width);
    let k = op.compressed.as_ref().map_or(0, |c| c.k);
    let keys_max = op.window_len + k;
    let values = op.rows * op.heads * op.width;
    let launch = Launch::new(device, "attention", [op.heads, op.rows, 1], THREADS + 32);
    let launch = launch.shared((op.width + 2 * keys_max).next_multiple_of(4) * 4);
    let launch = launch.buf(op.q, values).buf(op.window, op.window_slots * op.width);
    let launch = match &op.compressed {
        Some(c) => launch.buf(c.rows, 0).ids(c.selected, op.rows * k),
        None => launch.pointer(0).pointer(0),
    };
    let launch = launch.buf(op.sinks, op.heads).buf(out, values).int(op.heads).int(op.width);
    let launch = launch.int(op.window_slots).int(op.window_len).int(k).int(op.first_pos).float(op.scale);
    // SAFETY: the parameters of `attention`; selected rows are rows of `compressed` by contract.
    unsafe { launch.start() }
}
