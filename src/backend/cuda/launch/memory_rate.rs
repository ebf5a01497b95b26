//! Launcher of kernels/memory_rate.cu: enough blocks to keep all multiprocessors busy with loads.
//! Never waits. Surprising fact: the memory may be the host's, at the address by which the device knows it.

use super::{Launch, THREADS};
use crate::backend::BackendError;
use crate::backend::cuda::device::Device;

/// Blocks a multiprocessor.
const BLOCKS_EACH: usize = 8;

/// Reads the whole lines of 64 bytes among `bytes` at `at`, which the caller keeps, and adds their words to the one at `out` by exclusive or.
pub fn memory_rate(device: &Device, at: u64, bytes: usize, out: u64) -> Result<(), BackendError> {
    let words = bytes / 64 * 4;
    let blocks = words.div_ceil(THREADS).min(BLOCKS_EACH * device.properties().multiprocessors);
    let launch = Launch::new(device, "memory_rate", [blocks, 1, 1], THREADS);
    // SAFETY: the parameters of `memory_rate`.
    unsafe { launch.pointer(at).long(words).pointer(out).start() }
}
