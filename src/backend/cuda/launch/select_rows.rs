//! Launcher of kernels/select_rows.cu: one block a row.
//! Never asks for scores where everything visible is kept.

use super::{Launch, SELECT_THREADS};
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaIds;
use crate::backend::ops::SelectRows;

pub fn select_rows(
    device: &Device,
    op: SelectRows<'_, CudaBackend>,
    selected: &mut CudaIds,
) -> Result<(), BackendError> {
    let rows = op.rows.len();
    let most = op.rows.clone().next_back().map_or(0, |last| op.visible.groups(last));
    assert!(op.scores.is_some() || most <= op.k, "scores are given when a row sees more keys than it keeps");
    let launch = Launch::new(device, "select_rows", [rows, 1, 1], SELECT_THREADS);
    let launch = match op.scores {
        Some(scores) => launch.buf(scores, rows * op.stride),
        None => launch.pointer(0),
    };
    let launch = match op.mask {
        Some(mask) => launch.ids(mask, op.rows.end * op.words),
        None => launch.pointer(0),
    };
    let launch = launch.ids(selected, op.rows.end * op.k).int(op.rows.start).int(op.visible.first_pos);
    let launch = launch.int(op.visible.ratio).int(op.stride).int(op.k).int(op.block.max(1)).int(op.words);
    // SAFETY: the parameters of `select_rows`; scores are read only where a row has more than `k` candidates.
    unsafe { launch.start() }
}
