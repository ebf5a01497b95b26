//! Launcher of kernels/round_cache.cu: one thread a block of values.
//! Never rounds a partial block.

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
    };
    assert!(op.values.is_multiple_of(block), "cache rows are whole blocks of {block}");
    let blocks = op.values / block;
    let launch = Launch::new(device, "round_cache", [blocks.div_ceil(64), 1, 1], 64);
    // SAFETY: the parameters of `round_cache`, one thread a block.
    unsafe { launch.buf(x, op.values).int(blocks).int(format).start() }
}
