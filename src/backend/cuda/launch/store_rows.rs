//! Launcher of kernels/store_rows.cu: one thread a value.
//! Never writes a row that a later one of the same call replaces.

use super::{Launch, THREADS, over_rows};
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaBuf;
use crate::backend::ops::StoreRows;

pub fn store_rows(device: &Device, op: StoreRows<'_, CudaBackend>, dst: &mut CudaBuf) -> Result<(), BackendError> {
    // A list may be shorter than it claims as long as no row goes beyond its end.
    let last = if op.first_slot + op.rows > op.slots { op.slots } else { op.first_slot + op.rows };
    let launch = Launch::new(device, "store_rows", over_rows(op.width, op.rows), THREADS);
    let launch = launch.buf(op.src, op.rows * op.width).buf(dst, last * op.width);
    // SAFETY: the parameters of `store_rows`; slots are taken modulo `slots`.
    unsafe { launch.int(op.rows).int(op.width).int(op.first_slot).int(op.slots).start() }
}
