//! Launcher of kernels/weigh_experts.cu: one thread a row.
//! Never chooses an expert.

use super::{Launch, THREADS};
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaBuf;
use crate::backend::ops::WeighExperts;

pub fn weigh_experts(
    device: &Device,
    op: WeighExperts<'_, CudaBackend>,
    weights: &mut CudaBuf,
) -> Result<(), BackendError> {
    let launch = Launch::new(device, "weigh_experts", [op.rows.div_ceil(THREADS), 1, 1], THREADS);
    let launch = launch.buf(op.logits, op.rows * op.experts).ids(op.ids, op.rows * op.k).buf(weights, op.rows * op.k);
    // SAFETY: the parameters of `weigh_experts`, one thread a row; ids are below `experts`, as for the CPU op.
    unsafe { launch.int(op.rows).int(op.experts).int(op.k).float(op.scale).int(usize::from(op.normalise)).start() }
}
