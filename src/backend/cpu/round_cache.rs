//! Rounding of cache rows to the number format that they are kept in (spec 3.10).
//! Never changes what is already on the grid. Surprising fact: later stages read the rounded values, so this is part
//! of the model and not an approximation of it.

use super::{parts::parts, pool::Pool};
use crate::backend::ops::{CacheFormat, RoundCache};
use crate::quant::fake;

/// Values that share a scale in [`CacheFormat::Fp8Heads`].
const HEADS_BLOCK: usize = 64;

pub fn round_cache(pool: &Pool, op: RoundCache, x: &mut [f32]) {
    if let CacheFormat::Fp8Heads { width, tail } = op.format {
        assert!(op.values.is_multiple_of(width), "cache rows are whole rows of {width}");
        parts(pool, &mut x[..op.values], width, 20 * width, |_, row| {
            row[..width - tail].chunks_mut(HEADS_BLOCK).for_each(|block| _ = fake::fp8_span(block));
        });
        return;
    }
    let (block, round): (usize, fn(&mut [f32])) = match op.format {
        CacheFormat::Fp8Block32 => (fake::BLOCK, fake::fp8),
        CacheFormat::Fp4Block32 => (fake::BLOCK, fake::fp4_pow2),
        CacheFormat::Fp4Block16 => (fake::BLOCK_E4M3, fake::fp4_e4m3),
        CacheFormat::Fp8Heads { .. } => unreachable!("done above"),
    };
    assert!(op.values.is_multiple_of(block), "cache rows are whole blocks of {block}");
    parts(pool, &mut x[..op.values], block, 20 * block, |_, part| round(part));
}
