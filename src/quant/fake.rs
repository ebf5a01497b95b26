//! Fake quantisers: round cached rows to the values that a small format could hold, in place.
//! Never stores codes. Surprising fact: a scale is the smallest power of two that avoids clipping, so a largest
//! magnitude of exactly 448 (FP8) or 6 (FP4) keeps scale 1 and the next float above it doubles the scale.
//!
//! Source: spec deepseek-v41, section 3.10. A block that holds a NaN or an infinity becomes all NaN, so that a broken
//! value upstream is seen and not rounded away.

use super::minifloat::{E2M1, E2M1_MAX, E4M3, E4M3_MAX, e2m1_from_f32, e4m3_from_f32, exp2i, floor_log2};

/// Values that share a scale in [`fp8`] and [`fp4_pow2`].
pub const BLOCK: usize = 32;
/// Values that share a scale in [`fp4_e4m3`].
pub const BLOCK_E4M3: usize = 16;

/// E4M3 values with a power-of-two scale per 32, in place (window KV rows).
///
/// # Panics
/// If the length is not a multiple of 32.
pub fn fp8(values: &mut [f32]) {
    for block in blocks::<BLOCK>(values) {
        fp8_block(block);
    }
}

/// E2M1 values with a power-of-two scale per 32, in place (index keys and index queries).
///
/// # Panics
/// If the length is not a multiple of 32.
pub fn fp4_pow2(values: &mut [f32]) {
    for block in blocks::<BLOCK>(values) {
        fp4_pow2_block(block);
    }
}

/// E2M1 values with an E4M3 scale per 16, in place (compressed KV rows).
///
/// # Panics
/// If the length is not a multiple of 16.
pub fn fp4_e4m3(values: &mut [f32]) {
    for block in blocks::<BLOCK_E4M3>(values) {
        fp4_e4m3_block(block);
    }
}

/// One block of [`fp8`]; returns its scale.
pub fn fp8_block(block: &mut [f32; BLOCK]) -> f32 {
    fp8_span(block)
}

/// E4M3 values with one power-of-two scale for all of them, in place; returns the scale. Source, too: spec deepseek-v4, section 3.6.
pub fn fp8_span(block: &mut [f32]) -> f32 {
    let amax = amax(block).max(1e-4);
    // 448 = 1.75 * 2^8
    let scale = exp2i(ceil_ratio_log2(amax, 1.75, 8));
    let inverse = exp2i(-ceil_ratio_log2(amax, 1.75, 8));
    round_block(block, amax, |v| E4M3[usize::from(e4m3_from_f32((v * inverse).clamp(-E4M3_MAX, E4M3_MAX)))] * scale);
    scale
}

/// One block of [`fp4_pow2`]; returns its scale.
pub fn fp4_pow2_block(block: &mut [f32; BLOCK]) -> f32 {
    let amax = amax(block).max(E2M1_MAX * exp2i(-126));
    // 6 = 1.5 * 2^2
    let scale = exp2i(ceil_ratio_log2(amax, 1.5, 2));
    round_block(block, amax, |v| e2m1_rounded(v / scale) * scale);
    scale
}

/// One block of [`fp4_e4m3`]; returns its scale.
pub fn fp4_e4m3_block(block: &mut [f32; BLOCK_E4M3]) -> f32 {
    let amax = amax(block).max(E2M1_MAX * exp2i(-9));
    let scale = E4M3[usize::from(e4m3_from_f32(amax / E2M1_MAX))];
    round_block(block, amax, |v| e2m1_rounded(v / scale) * scale);
    scale
}

fn blocks<const N: usize>(values: &mut [f32]) -> &mut [[f32; N]] {
    let (blocks, rest) = values.as_chunks_mut::<N>();
    assert!(rest.is_empty(), "a row must be whole blocks of {N} values, {} are left over", rest.len());
    blocks
}

fn e2m1_rounded(v: f32) -> f32 {
    E2M1[usize::from(e2m1_from_f32(v))]
}

/// Largest magnitude; NaN if any value is NaN, which `f32::max` would skip.
fn amax(block: &[f32]) -> f32 {
    block.iter().fold(0.0, |m: f32, v| if v.abs() > m || v.is_nan() { v.abs() } else { m })
}

fn round_block(block: &mut [f32], amax: f32, round: impl Fn(f32) -> f32) {
    if amax.is_finite() && block.iter().all(|v| v.is_finite()) {
        block.iter_mut().for_each(|v| *v = round(*v));
    } else {
        block.fill(f32::NAN);
    }
}

/// Smallest `k` with `a` <= `mantissa` * 2^(`exponent` + k), from the bits of `a` (normal and positive).
fn ceil_ratio_log2(a: f32, mantissa: f32, exponent: i32) -> i32 {
    let floor = floor_log2(a);
    let fraction = f32::from_bits((a.to_bits() & 0x007f_ffff) | 0x3f80_0000);
    floor - exponent + i32::from(fraction > mantissa)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Self-test of spec deepseek-v4, section 3.6.
    #[test]
    fn the_block_of_the_v4_specification() {
        let value = |i: usize| ((1.7 * i as f64 + 0.3).sin() * (1 + i % 5) as f64) as f32;
        let mut block: Vec<f32> = (0..64).map(value).collect();
        assert_eq!(fp8_span(&mut block), exp2i(-6));
        assert_eq!(block[..8], [0.28125, 1.875, -1.625, -3.0, 3.75, 0.5625, -1.75, -1.125]);
        let mut narrow: Vec<f32> = (0..32).map(value).collect();
        fp4_pow2(&mut narrow);
        assert_eq!(narrow[..8], [0.5, 2.0, -1.5, -3.0, 4.0, 0.5, -2.0, -1.0]);
    }

    fn scales(largest: f32) -> (f32, f32, f32) {
        let mut wide = [0.0; 32];
        wide[7] = -largest;
        let mut narrow = [0.0; 16];
        narrow[3] = largest;
        (fp8_block(&mut wide.clone()), fp4_pow2_block(&mut wide), fp4_e4m3_block(&mut narrow))
    }

    #[test]
    fn scales_of_the_specification() {
        assert_eq!(scales(1.0), (exp2i(-8), 0.25, 0.171875));
        assert_eq!(scales(448.0).0, 1.0);
        assert_eq!(scales(f32::from_bits(448f32.to_bits() + 1)).0, 2.0);
        assert_eq!(scales(6.0).1, 1.0);
        assert_eq!(scales(6.0000005).1, 2.0);
        assert_eq!(scales(0.0), (exp2i(-22), exp2i(-126), exp2i(-9)));
    }

    #[test]
    fn zero_blocks_stay_zero() {
        let mut row = [0.0; 64];
        fp8(&mut row);
        fp4_pow2(&mut row);
        fp4_e4m3(&mut row);
        assert_eq!(row, [0.0; 64]);
    }

    #[test]
    fn rounding_of_the_specification() {
        // 6 pins the power-of-two scale to 1.
        let cases = [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)];
        let more = [(5.01, 6.0), (-5.0, -4.0), (6.0, 6.0), (-6.0, -6.0), (-0.3, -0.5)];
        let mut pow2 = [0.0; 32];
        let mut e4m3 = [0.0; 16];
        for (i, (x, _)) in cases.iter().chain(&more).enumerate() {
            pow2[i] = *x;
            e4m3[i] = *x;
        }
        assert_eq!(fp4_pow2_block(&mut pow2), 1.0);
        assert_eq!(fp4_e4m3_block(&mut e4m3), 1.0);
        for (i, (x, y)) in cases.iter().chain(&more).enumerate() {
            assert_eq!((pow2[i], e4m3[i]), (*y, *y), "{x}");
        }
    }

    #[test]
    fn results_are_fixed_points_and_bf16_values() {
        let mut row: Vec<f32> = (0..512).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.013 * exp2i(i / 64)).collect();
        for quantise in [fp8, fp4_pow2, fp4_e4m3] {
            let mut once = row.clone();
            quantise(&mut once);
            assert!(once.iter().all(|v| super::super::minifloat::bf16_round(*v) == *v));
            // Worst case: 5 times the scale, a tie that falls to 4.
            for (found, block) in once.chunks(32).zip(row.chunks(32)) {
                let limit = amax(block) / 5.0;
                assert!(found.iter().zip(block).all(|(a, b)| (a - b).abs() <= limit));
            }
        }
        fp8(&mut row);
        let once = row.clone();
        fp8(&mut row);
        assert_eq!(once, row);
    }

    #[test]
    fn broken_values_are_not_hidden() {
        for broken in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for quantise in [fp8, fp4_pow2, fp4_e4m3] {
                let mut row = [1.0; 64];
                row[5] = broken;
                quantise(&mut row);
                assert!(row[0].is_nan() && row[5].is_nan() && (row[63] - 1.0).abs() < 0.05);
            }
        }
    }

    #[test]
    fn extreme_magnitudes_stay_finite() {
        for x in [1e38, 1e30, 1e-40, f32::from_bits(1)] {
            for quantise in [fp8, fp4_pow2, fp4_e4m3] {
                let mut row = [x; 32];
                quantise(&mut row);
                assert!(row.iter().all(|v| v.is_finite()), "{x}");
            }
        }
    }
}
