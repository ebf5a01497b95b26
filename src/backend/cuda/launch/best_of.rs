//! Launcher of kernels/best_of.cu: some blocks that share the row.
//! Never leaves more on the host's side to do than to read one id.

use std::sync::Arc;

use super::Launch;
use super::meeting::Meeting;
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaIds;
use crate::backend::ops::BestOf;

/// Threads of a block, see the kernel.
const THREADS: usize = 512;
/// Blocks of a long row: each thread of them has a few values of a vocabulary.
const BLOCKS_MAX: usize = 64;

pub fn best_of(
    device: &Arc<Device>,
    meeting: &Meeting,
    op: BestOf<'_, CudaBackend>,
    best: &mut CudaIds,
) -> Result<(), BackendError> {
    let blocks = op.count.div_ceil(THREADS).clamp(1, BLOCKS_MAX);
    let launch = Launch::new(device, "best_of", [blocks, 1, 1], THREADS).buf(op.values, op.count).int(op.count);
    // SAFETY: the parameters of `best_of`.
    unsafe { launch.pointer(meeting.found(device)?).ids(best, 1).start() }
}
