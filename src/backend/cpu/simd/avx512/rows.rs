//! Query heads against cached rows, eight heads at a time. Owns the register blocks; the order of sums is that of `lanes`.
//! Never fuses a product with its addition: that would round once where the twin rounds twice. Surprising fact: one register holds exactly
//! the 16 lanes of the order, so nothing has to be rearranged.

// Several arrays run side by side, and iterator adaptors may stay calls: they lack the instruction set of their caller.
#![allow(clippy::needless_range_loop)]

use crate::backend::cpu::simd::rows::RowList;
use std::arch::x86_64::*;

/// Values of a register.
const LANES: usize = 16;

/// `row_dots`; the width is whole registers.
#[target_feature(enable = "avx512f,avx512dq")]
pub(in crate::backend::cpu::simd) fn dots(q: &[f32], rows: RowList, out: &mut [f32], stride: usize) {
    let heads = q.len() / rows.width;
    let mut h = 0;
    while h < heads {
        let (q, out) = (&q[h * rows.width..], &mut out[h * stride..]);
        h += match heads - h {
            8.. => head_dots::<8>(q, rows, out, stride),
            4.. => head_dots::<4>(q, rows, out, stride),
            2.. => head_dots::<2>(q, rows, out, stride),
            _ => head_dots::<1>(q, rows, out, stride),
        };
    }
}

/// `H` heads, two rows at a time; returns `H`.
#[target_feature(enable = "avx512f,avx512dq")]
fn head_dots<const H: usize>(q: &[f32], rows: RowList, out: &mut [f32], stride: usize) -> usize {
    let count = rows.offsets.len();
    let mut i = 0;
    while i < count {
        if i + 2 <= count {
            block_dots::<H, 2>(q, rows, i, out, stride);
            i += 2;
        } else {
            block_dots::<H, 1>(q, rows, i, out, stride);
            i += 1;
        }
    }
    H
}

/// `H` heads times the `R` rows from `first` on.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn block_dots<const H: usize, const R: usize>(q: &[f32], rows: RowList, first: usize, out: &mut [f32], stride: usize) {
    let steps = rows.width / LANES;
    let mut keys: [&[[f32; LANES]]; R] = [&[]; R];
    for r in 0..R {
        keys[r] = &rows.row(first + r).as_chunks().0[..steps];
    }
    let mut heads: [&[[f32; LANES]]; H] = [&[]; H];
    for h in 0..H {
        heads[h] = &q[h * rows.width..][..rows.width].as_chunks().0[..steps];
    }
    let mut sums = [[_mm512_setzero_ps(); R]; H];
    for step in 0..steps {
        let mut key = [_mm512_setzero_ps(); R];
        for r in 0..R {
            key[r] = load(&keys[r][step]);
        }
        for h in 0..H {
            let x = load(&heads[h][step]);
            for r in 0..R {
                sums[h][r] = _mm512_add_ps(sums[h][r], _mm512_mul_ps(x, key[r]));
            }
        }
    }
    for h in 0..H {
        for r in 0..R {
            out[h * stride + first + r] = fold(sums[h][r]);
        }
    }
}

/// `add_rows`; the width is whole registers.
#[target_feature(enable = "avx512f,avx512dq")]
pub(in crate::backend::cpu::simd) fn add(weights: &[f32], stride: usize, rows: RowList, out: &mut [f32]) {
    let heads = out.len() / rows.width;
    let mut h = 0;
    while h < heads {
        let (weights, out) = (&weights[h * stride..], &mut out[h * rows.width..]);
        h += match heads - h {
            8.. => head_sums::<8>(weights, stride, rows, out),
            4.. => head_sums::<4>(weights, stride, rows, out),
            2.. => head_sums::<2>(weights, stride, rows, out),
            _ => head_sums::<1>(weights, stride, rows, out),
        };
    }
}

/// `H` heads, two registers of columns at a time; returns `H`.
#[target_feature(enable = "avx512f,avx512dq")]
fn head_sums<const H: usize>(weights: &[f32], stride: usize, rows: RowList, out: &mut [f32]) -> usize {
    let mut column = 0;
    while column < rows.width {
        if column + 2 * LANES <= rows.width {
            block_sums::<H, 2>(weights, stride, rows, column, out);
            column += 2 * LANES;
        } else {
            block_sums::<H, 1>(weights, stride, rows, column, out);
            column += LANES;
        }
    }
    H
}

/// `C` registers of columns of `H` heads over all rows.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn block_sums<const H: usize, const C: usize>(
    weights: &[f32],
    stride: usize,
    rows: RowList,
    column: usize,
    out: &mut [f32],
) {
    let count = rows.offsets.len();
    let mut scales: [&[f32]; H] = [&[]; H];
    let mut sums = [[_mm512_setzero_ps(); C]; H];
    for h in 0..H {
        scales[h] = &weights[h * stride..][..count];
        for c in 0..C {
            sums[h][c] = load(lanes_at(&out[h * rows.width + column..], c));
        }
    }
    for i in 0..count {
        let row = &rows.row(i)[column..];
        let mut values = [_mm512_setzero_ps(); C];
        for c in 0..C {
            values[c] = load(lanes_at(row, c));
        }
        for h in 0..H {
            let scale = _mm512_set1_ps(scales[h][i]);
            for c in 0..C {
                sums[h][c] = _mm512_add_ps(sums[h][c], _mm512_mul_ps(scale, values[c]));
            }
        }
    }
    for h in 0..H {
        for c in 0..C {
            let at = h * rows.width + column + c * LANES;
            store(out[at..].first_chunk_mut().expect("whole registers"), sums[h][c]);
        }
    }
}

/// Register `index` of `values`.
#[inline(always)]
fn lanes_at(values: &[f32], index: usize) -> &[f32; LANES] {
    values[index * LANES..].first_chunk().expect("whole registers")
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(values: &[f32; LANES]) -> __m512 {
    // SAFETY: the array is 64 readable bytes; the load has no alignment requirement.
    unsafe { _mm512_loadu_ps(values.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(into: &mut [f32; LANES], values: __m512) {
    // SAFETY: the array is 64 writable bytes; the store has no alignment requirement.
    unsafe { _mm512_storeu_ps(into.as_mut_ptr(), values) }
}

/// The fold of `lanes`: 16 -> 8 -> 4 -> 2 -> 1.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn fold(lanes: __m512) -> f32 {
    let eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps::<1>(lanes));
    let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}
