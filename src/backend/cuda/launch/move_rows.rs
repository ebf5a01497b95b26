//! Launchers of kernels/move_rows.cu: four values a thread.
//! Never checks the indices themselves: they are on the device. Whoever uploads them has.

use super::{Launch, THREADS, over_rows};
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaBuf;
use crate::backend::ops::MoveRows;

pub fn gather_rows(device: &Device, op: MoveRows<'_, CudaBackend>, out: &mut CudaBuf) -> Result<(), BackendError> {
    let count = op.range.len();
    let launch = Launch::new(device, "gather_rows", over_rows(op.width.div_ceil(4), count), THREADS);
    let launch = launch.buf(op.src, op.width).ids(op.indices, op.range.end).buf(out, count * op.width);
    // SAFETY: the parameters of `gather_rows`; indices are rows of `src` by contract.
    unsafe { launch.int(op.range.start).int(op.width).start() }
}

pub fn scatter_rows(device: &Device, op: MoveRows<'_, CudaBackend>, dst: &mut CudaBuf) -> Result<(), BackendError> {
    let count = op.range.len();
    let launch = Launch::new(device, "scatter_rows", over_rows(op.width.div_ceil(4), count), THREADS);
    let launch = launch.buf(op.src, count * op.width).ids(op.indices, op.range.end).buf(dst, op.width);
    // SAFETY: the parameters of `scatter_rows`; indices are rows of `dst` by contract.
    unsafe { launch.int(op.range.start).int(op.width).start() }
}
