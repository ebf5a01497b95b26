//! Rounding of cache rows to the number format that they are kept in (spec 3.10).
//! Never changes what is already on the grid. Surprising fact: later stages read the rounded values, so this is part
//! of the model and not an approximation of it.

use super::{parts::parts, pool::Pool};
use crate::backend::ops::{CacheFormat, RoundCache};
use crate::quant::fake;

pub fn round_cache(pool: &Pool, op: RoundCache, x: &mut [f32]) {
    let (block, round): (usize, fn(&mut [f32])) = match op.format {
        CacheFormat::Fp8Block32 => (fake::BLOCK, fake::fp8),
        CacheFormat::Fp4Block32 => (fake::BLOCK, fake::fp4_pow2),
        CacheFormat::Fp4Block16 => (fake::BLOCK_E4M3, fake::fp4_e4m3),
    };
    assert!(op.values.is_multiple_of(block), "cache rows are whole blocks of {block}");
    parts(pool, &mut x[..op.values], block, 20 * block, |_, part| round(part));
}
