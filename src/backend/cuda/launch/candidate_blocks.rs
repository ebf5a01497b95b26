//! Launcher of kernels/candidate_blocks.cu: one block a row.
//! Never asks for scores where every block is kept.

use super::{Launch, SELECT_THREADS};
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaIds;
use crate::backend::ops::CandidateBlocks;

pub fn candidate_blocks(
    device: &Device,
    op: CandidateBlocks<'_, CudaBackend>,
    mask: &mut CudaIds,
) -> Result<(), BackendError> {
    let rows = op.rows.len();
    let most = op.rows.clone().next_back().map_or(0, |last| op.visible.groups(last));
    assert!(op.scores.is_some() || most.div_ceil(op.block) <= op.blocks_max, "scores where a row drops blocks");
    assert!(most.div_ceil(op.block) <= op.words * 32, "a mask with a bit for each block");
    let launch = Launch::new(device, "candidate_blocks", [rows, 1, 1], SELECT_THREADS);
    let launch = match op.scores {
        Some(scores) => launch.buf(scores, rows * op.stride),
        None => launch.pointer(0),
    };
    let launch = launch.ids(mask, op.rows.end * op.words).int(op.rows.start);
    let launch = launch.int(op.visible.first_pos).int(op.visible.ratio).int(op.stride);
    // SAFETY: the parameters of `candidate_blocks`; scores are read only where a row sees more than `blocks_max` blocks.
    unsafe { launch.int(op.block).int(op.blocks_max).int(op.words).start() }
}
