//! Launcher of kernels/index_scores.cu: four threads a key.
//! Never scores a key that the row does not see; blocks beyond the visible keys end at once.

use super::Launch;
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaBuf;
use crate::backend::ops::{IndexScores, SCORE_STRIDE};

/// Keys of a block.
const KEYS: usize = 64;

pub fn index_scores(
    device: &Device,
    op: IndexScores<'_, CudaBackend>,
    scores: &mut CudaBuf,
) -> Result<(), BackendError> {
    assert!(op.stride.is_multiple_of(SCORE_STRIDE), "score rows are whole tasks of {SCORE_STRIDE} keys");
    assert!(op.width.is_multiple_of(4), "index keys of {} values: not whole fours", op.width);
    let (heads, rows) = (op.heads, op.rows.len());
    let most = op.rows.clone().next_back().map_or(0, |last| op.visible.groups(last));
    let launch = Launch::new(device, "index_scores", [most.div_ceil(KEYS), rows, 1], 4 * KEYS);
    let launch = launch.shared((heads * (op.width + 1)).next_multiple_of(4) * 4);
    let launch = launch.buf(op.q, op.rows.end * heads * op.width).buf(op.head_weights, op.rows.end * heads);
    let launch = launch.buf(op.keys, most * op.width).buf(scores, rows * op.stride).int(heads).int(op.width);
    let launch = launch.int(op.rows.start).int(op.visible.first_pos).int(op.visible.ratio).int(op.stride);
    // SAFETY: the parameters of `index_scores`; the last row sees the most keys.
    unsafe { launch.float(op.scale).start() }
}
