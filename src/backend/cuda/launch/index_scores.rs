//! Launchers of kernels/index_scores.cu, four threads a key, and of kernels/index_tiles.cuh, whose threads share all heads and 64 keys.
//! Never scores a key that the row does not see, and never lets the choice change a bit. Surprising fact: blocks beyond the visible keys end
//! at once.

use super::{Launch, has_shared};
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaBuf;
use crate::backend::ops::{IndexScores, SCORE_STRIDE};

/// Keys of a block.
const KEYS: usize = 64;
/// Heads, their width, keys and threads of a block, and its shared memory in bytes: see kernels/index_tiles.cuh.
const TILE_HEADS: usize = 32;
const TILE_WIDTH: usize = 128;
const TILE_KEYS: usize = 8 * 64;
const TILE_THREADS: usize = 256;
const TILE_SHARED: usize = 4 * (TILE_HEADS * (TILE_WIDTH + 1) + 2 * 64 * 80 + 64 * (TILE_HEADS + 2));
/// From this many rows on tiles are faster; with fewer their blocks are too few.
const TILES_FROM: usize = 8;

pub fn index_scores(
    device: &Device,
    op: IndexScores<'_, CudaBackend>,
    scores: &mut CudaBuf,
) -> Result<(), BackendError> {
    assert!(op.stride.is_multiple_of(SCORE_STRIDE), "score rows are whole tasks of {SCORE_STRIDE} keys");
    assert!(op.width.is_multiple_of(4), "index keys of {} values: not whole fours", op.width);
    let (heads, rows) = (op.heads, op.rows.len());
    let most = op.rows.clone().next_back().map_or(0, |last| op.visible.groups(last));
    let is_tiled =
        rows >= TILES_FROM && (heads, op.width) == (TILE_HEADS, TILE_WIDTH) && has_shared(device, TILE_SHARED);
    let launch = if is_tiled {
        Launch::new(device, "index_tiles", [most.div_ceil(TILE_KEYS), rows, 1], TILE_THREADS).shared(TILE_SHARED)
    } else {
        let launch = Launch::new(device, "index_scores", [most.div_ceil(KEYS), rows, 1], 4 * KEYS);
        launch.shared((heads * (op.width + 1)).next_multiple_of(4) * 4)
    };
    let launch = launch.buf(op.q, op.rows.end * heads * op.width).buf(op.head_weights, op.rows.end * heads);
    let launch = launch.buf(op.keys, most * op.width).buf(scores, rows * op.stride).int(heads).int(op.width);
    let launch = launch.int(op.rows.start).int(op.visible.first_pos).int(op.visible.ratio).int(op.stride);
    // SAFETY: the parameters of both kernels; the last row sees the most keys.
    unsafe { launch.float(op.scale).start() }
}
