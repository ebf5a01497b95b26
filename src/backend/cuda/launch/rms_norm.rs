//! Launcher of kernels/rms_norm.cu: one block a row.
//! Never allocates. The order of the sum is that of the CPU op.

use super::{Launch, SUM_THREADS};
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaBuf;
use crate::backend::ops::RmsNorm;

pub fn rms_norm(device: &Device, op: RmsNorm<'_, CudaBackend>, out: &mut CudaBuf) -> Result<(), BackendError> {
    let values = op.rows * op.width;
    let launch = Launch::new(device, "rms_norm", [op.rows, 1, 1], SUM_THREADS);
    let launch = launch.buf(op.x, values).buf(op.weight, op.width).buf(out, values).int(op.width).float(op.eps);
    // SAFETY: the parameters of `rms_norm`, for `rows` blocks.
    unsafe { launch.start() }
}
