//! Launcher of kernels/combine_experts.cu: one thread a value, experts in the order given.
//! Never sums in landing order.

use super::{Launch, THREADS, over_rows};
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaBuf;
use crate::backend::ops::CombineExperts;

pub fn combine_experts(
    device: &Device,
    op: CombineExperts<'_, CudaBackend>,
    out: &mut CudaBuf,
) -> Result<(), BackendError> {
    let values = op.rows * op.width;
    let launch = Launch::new(device, "combine_experts", over_rows(op.width, op.rows), THREADS);
    let launch = launch.buf(op.outputs, op.k * values).buf(op.weights, op.rows * op.k);
    // SAFETY: the parameters of `combine_experts`.
    unsafe { launch.buf(op.shared, values).buf(out, values).int(op.k).int(op.width).start() }
}
