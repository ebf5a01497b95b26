//! How many prompt rows are computed together when nobody says: what the processor has always taken, or as many as a GPU is fastest with.
//! Never changes a width that was asked for. Surprising fact: a wide chunk costs slots of experts, since its work memory is planned first,
//! so it has to be a small part of what weights leave.

use crate::engine::EngineError;
use crate::engine::device::Chosen;
use crate::engine::options::{CHUNK_DEFAULT, EngineOptions};
use crate::models::{ModelConfig, RunnerOptions};
use crate::units::Bytes;

/// Widths that a GPU takes, best first. On an H200 prefill of 8,192 rows was 1.12 times as fast in chunks of 2,048 as in chunks of 512: small
/// matrices have too few outputs to keep all multiprocessors busy with fewer rows.
const GPU_CHUNKS: [usize; 2] = [2048, 1024];
/// What a wider chunk takes is at most one part in this many of the memory.
const SHARE: u64 = 16;

/// The chunk for `ctx` positions: what was asked for, or the widest that `chosen` is fast with and has room for. `resident` bytes of weights go to a
/// GPU, `host` bytes are usable beside them.
///
/// # Errors
/// A GPU that does not say how much memory is free.
pub(super) fn chunk_rows(
    options: &EngineOptions,
    config: &dyn ModelConfig,
    (chosen, resident, host): (&Chosen, Bytes, Bytes),
    ctx: usize,
) -> Result<usize, EngineError> {
    let chunk = match (options.chunk, chosen.free_memory()?) {
        (Some(chunk), _) => chunk,
        (None, None) => CHUNK_DEFAULT,
        // Work memory is in both plans, whichever is the smaller counts.
        (None, Some(free)) => widest(Bytes(free.0.saturating_sub(resident.0).min(host.0)), |chunk| {
            let bytes = config.runner_bytes(&RunnerOptions::new(ctx, chunk.min(ctx)));
            // The rings of the state hold a chunk beyond their window.
            bytes.kv.saturating_add(bytes.scratch)
        }),
    };
    Ok(chunk.min(ctx))
}

/// The widest of [`GPU_CHUNKS`] whose `bytes` are within their share of `room`.
fn widest(room: Bytes, bytes: impl Fn(usize) -> u64) -> usize {
    let least = bytes(CHUNK_DEFAULT);
    let is_small = |chunk: &usize| bytes(*chunk).saturating_sub(least) <= room.0 / SHARE;
    GPU_CHUNKS.into_iter().find(is_small).unwrap_or(CHUNK_DEFAULT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_bounds_the_width() {
        // A megabyte a row: 2,048 rows take 1.5 GiB more than 512, 1,024 rows half a GiB.
        let bytes = |chunk: usize| (chunk as u64) << 20;
        assert_eq!(widest(Bytes::gib(24), bytes), 2048);
        assert_eq!(widest(Bytes(Bytes::gib(24).0 - 1), bytes), 1024);
        assert_eq!(widest(Bytes::gib(8), bytes), 1024);
        assert_eq!(widest(Bytes(Bytes::gib(8).0 - 1), bytes), CHUNK_DEFAULT);
        assert_eq!(widest(Bytes(0), bytes), CHUNK_DEFAULT);
    }
}
