//! Launcher of kernels/round_cache.cu: one thread a block of values.
//! Never rounds a partial block, except at the end of a row of heads.

use super::Launch;
use crate::backend::BackendError;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaBuf;
use crate::backend::ops::{CacheFormat, RoundCache};

pub fn round_cache(device: &Device, op: RoundCache, x: &mut CudaBuf) -> Result<(), BackendError> {
    let (block, format) = match op.format {
        CacheFormat::Fp8Block32 => (32, 0),
        CacheFormat::Fp4Block32 => (32, 1),
        CacheFormat::Fp4Block16 => (16, 2),
        CacheFormat::Fp8Heads { width, tail } => return round_heads(device, op.values, (width, tail), x),
    };
    assert!(op.values.is_multiple_of(block), "cache rows are whole blocks of {block}");
    let blocks = op.values / block;
    let launch = Launch::new(device, "round_cache", [blocks.div_ceil(64), 1, 1], 64);
    // SAFETY: the parameters of `round_cache`, one thread a block.
    unsafe { launch.buf(x, op.values).int(blocks).int(format).start() }
}

fn round_heads(
    device: &Device,
    values: usize,
    (width, tail): (usize, usize),
    x: &mut CudaBuf,
) -> Result<(), BackendError> {
    assert!(values.is_multiple_of(width), "cache rows are whole rows of {width}");
    let (rows, rounded) = (values / width, width - tail);
    let threads = rows * rounded.div_ceil(64);
    let launch = Launch::new(device, "round_heads", [threads.div_ceil(64), 1, 1], 64);
    // SAFETY: the parameters of `round_heads`, one thread a block of a row.
    unsafe { launch.buf(x, values).int(rows).int(width).int(rounded).start() }
}
