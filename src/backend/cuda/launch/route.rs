//! Launcher of kernels/route.cu: one block a row.
//! Never chooses more experts than there are.

use super::Launch;
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::{CudaBuf, CudaIds};
use crate::backend::ops::Route;

pub fn route(
    device: &Device,
    op: Route<'_, CudaBackend>,
    ids: &mut CudaIds,
    weights: &mut CudaBuf,
) -> Result<(), BackendError> {
    assert!(op.k <= op.experts, "{} of {} experts", op.k, op.experts);
    let launch = Launch::new(device, "route", [op.rows, 1, 1], 128).shared(op.experts * 12);
    let launch = launch.buf(op.logits, op.rows * op.experts).buf(op.bias, op.experts);
    let launch = launch.ids(ids, op.rows * op.k).buf(weights, op.rows * op.k).int(op.experts).int(op.k);
    // SAFETY: the parameters of `route`, with a shared word and a float for each expert.
    unsafe { launch.float(op.scale).int(usize::from(op.normalise)).start() }
}
