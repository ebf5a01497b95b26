//! Launcher of kernels/hc_expand.cu: one thread a column of all streams.
//! Never takes more streams than a thread can hold.

use super::{Launch, STREAMS_MAX, THREADS, over_rows};
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaBuf;
use crate::backend::cuda::sides::Side;
use crate::backend::ops::HcExpand;

pub fn hc_expand(device: &Device, op: HcExpand<'_, CudaBackend>, streams: &mut CudaBuf) -> Result<(), BackendError> {
    let n = op.stream_count;
    device.join(Side::Coefficients)?;
    assert!(n <= STREAMS_MAX, "at most {STREAMS_MAX} streams");
    let launch = Launch::new(device, "hc_expand", over_rows(op.hidden, op.rows), THREADS);
    let launch = launch.buf(op.y, op.rows * op.hidden).buf(op.post, op.rows * n).buf(op.comb, op.rows * n * n);
    // SAFETY: the parameters of `hc_expand`.
    unsafe { launch.buf(streams, op.rows * n * op.hidden).int(n).int(op.hidden).start() }
}
