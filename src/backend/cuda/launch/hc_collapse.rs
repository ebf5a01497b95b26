//! Launcher of kernels/hc_collapse.cu: one thread a value.
//! Never normalises.

use super::{Launch, THREADS, over_rows};
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaBuf;
use crate::backend::ops::HcCollapse;

pub fn hc_collapse(device: &Device, op: HcCollapse<'_, CudaBackend>, out: &mut CudaBuf) -> Result<(), BackendError> {
    let (n, values) = (op.stream_count, op.rows * op.hidden);
    let launch = Launch::new(device, "hc_collapse", over_rows(op.hidden, op.rows), THREADS);
    let launch = launch.buf(op.streams, n * values).buf(op.weights, op.rows * n).buf(out, values);
    // SAFETY: the parameters of `hc_collapse`.
    unsafe { launch.int(n).int(op.hidden).start() }
}
