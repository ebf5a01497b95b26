//! Several query heads against many cached rows of F32: scores, and weighted sums of the rows.
//! Never reorders a sum: every level adds as `lanes` does. Surprising fact: what is gained is loads. A row that is in a register is used
//! by eight heads, and products and additions stay apart (no fused multiply-add), which every level can do alike.

use super::{SimdLevel, Usable};
use crate::backend::cpu::lanes;

/// Rows of `width` values that begin at `offsets` of `base`.
#[derive(Clone, Copy)]
pub(in crate::backend::cpu) struct RowList<'a> {
    pub base: &'a [f32],
    pub offsets: &'a [usize],
    pub width: usize,
}

impl<'a> RowList<'a> {
    pub(super) fn row(&self, index: usize) -> &'a [f32] {
        &self.base[self.offsets[index]..][..self.width]
    }

    /// Whether `len` values hold one for each row in each of `heads` runs of `stride`; the last run may end with its rows.
    fn is_in(&self, len: usize, heads: usize, stride: usize) -> bool {
        self.offsets.len() <= stride && heads.checked_sub(1).is_none_or(|h| h * stride + self.offsets.len() <= len)
    }
}

impl Usable {
    /// The level whose code below is used for rows of `width` values; remainders are left to the plain code.
    fn for_width(self, width: usize) -> SimdLevel {
        if width.is_multiple_of(16) { self.level() } else { SimdLevel::Scalar }
    }

    /// `out[h * stride + i] = head h of q * row i`; `q` holds whole heads of the rows' width.
    pub(in crate::backend::cpu) fn row_dots(self, q: &[f32], rows: RowList, out: &mut [f32], stride: usize) {
        assert!(rows.is_in(out.len(), q.len() / rows.width, stride), "room for the scores");
        match self.for_width(rows.width) {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `at_most` found the features of the level, which is this one or includes it.
            level if level >= SimdLevel::Avx512 => unsafe { super::avx512::rows::dots(q, rows, out, stride) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `at_most` found the features of the level, which is this one or includes it.
            level if level >= SimdLevel::Avx2 => unsafe { dots_avx2(q, rows, out, stride) },
            _ => dots(q, rows, out, stride),
        }
    }

    /// `head h of out += weights[h * stride + i] * row i`, rows in order; `out` holds whole heads of the rows' width.
    pub(in crate::backend::cpu) fn add_rows(self, weights: &[f32], stride: usize, rows: RowList, out: &mut [f32]) {
        assert!(rows.is_in(weights.len(), out.len() / rows.width, stride), "a weight a row");
        match self.for_width(rows.width) {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `at_most` found the features of the level, which is this one or includes it.
            level if level >= SimdLevel::Avx512 => unsafe { super::avx512::rows::add(weights, stride, rows, out) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `at_most` found the features of the level, which is this one or includes it.
            level if level >= SimdLevel::Avx2 => unsafe { add_avx2(weights, stride, rows, out) },
            _ => add(weights, stride, rows, out),
        }
    }
}

/// The twin of `row_dots`.
#[inline(always)]
fn dots(q: &[f32], rows: RowList, out: &mut [f32], stride: usize) {
    for (q, out) in q.chunks_exact(rows.width).zip(out.chunks_mut(stride.max(1))) {
        for (i, out) in out[..rows.offsets.len()].iter_mut().enumerate() {
            *out = lanes::dot(q, rows.row(i));
        }
    }
}

/// The twin of `add_rows`.
#[inline(always)]
fn add(weights: &[f32], stride: usize, rows: RowList, out: &mut [f32]) {
    for (weights, out) in weights.chunks(stride.max(1)).zip(out.chunks_exact_mut(rows.width)) {
        for (i, weight) in weights[..rows.offsets.len()].iter().enumerate() {
            lanes::add_scaled(*weight, rows.row(i), out);
        }
    }
}

/// The plain code, compiled for this level.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn dots_avx2(q: &[f32], rows: RowList, out: &mut [f32], stride: usize) {
    dots(q, rows, out, stride);
}

/// The plain code, compiled for this level.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn add_avx2(weights: &[f32], stride: usize, rows: RowList, out: &mut [f32]) {
    add(weights, stride, rows, out);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_gives_the_bits_of_the_twins() {
        let value = |i: usize| ((i * 7919 % 1013) as f32 - 506.0) * 0.37_f32.powi(i as i32 % 7);
        let base: Vec<f32> = (0..40 * 96).map(value).collect();
        for width in [1, 16, 48, 80, 96] {
            for heads in [1, 2, 3, 7, 8, 12] {
                for count in [0, 1, 2, 3, 5, 33] {
                    let q: Vec<f32> = (0..heads * width).map(|i| value(3 * i + 1)).collect();
                    let offsets: Vec<usize> = (0..count).map(|i| i * 5 % 40 * 96 / 2).collect();
                    let rows = RowList { base: &base, offsets: &offsets, width };
                    let stride = count + 2;
                    let len = (heads - 1) * stride + count;
                    let run = |level| {
                        let level = Usable::at_most(level);
                        let mut scores = vec![-1.0; len];
                        level.row_dots(&q, rows, &mut scores, stride);
                        let mut sums = vec![0.5; heads * width];
                        level.add_rows(&scores, stride, rows, &mut sums);
                        [scores, sums].concat().into_iter().map(f32::to_bits).collect::<Vec<_>>()
                    };
                    let plain = run(SimdLevel::Scalar);
                    for level in SimdLevel::ALL {
                        assert_eq!(run(level), plain, "{level:?}: {heads} heads of {width}, {count} rows");
                    }
                }
            }
        }
    }
}
