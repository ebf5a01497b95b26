//! Launcher of kernels/pool_groups.cu: one thread a channel of a group.
//! Never pools a group that the ring does not hold whole.

use super::{Launch, THREADS, over_rows};
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaBuf;
use crate::backend::ops::PoolGroups;

pub fn pool_groups(device: &Device, op: PoolGroups<'_, CudaBackend>, out: &mut CudaBuf) -> Result<(), BackendError> {
    let row = if op.overlaps { 2 * op.width } else { op.width };
    let launch = Launch::new(device, "pool_groups", over_rows(op.width, op.groups.len()), THREADS);
    let launch = launch.buf(op.values, op.slots * row).buf(op.gates, op.slots * row).buf(op.bias, op.ratio * row);
    let launch = launch.buf(out, op.groups.len() * op.width).int(op.slots).int(op.width).int(op.ratio);
    // SAFETY: the parameters of `pool_groups`, one row of blocks a group.
    unsafe { launch.int(usize::from(op.overlaps)).long(op.groups.start).start() }
}
