//! Row kernels for AVX-512 with VBMI, VNNI and GFNI. Owns the loads and the final fold that its kernels share.
//! Never reads past a row: whole blocks arrive as arrays, remainders are copied into zeroed ones first.
//! Surprising fact: intrinsics on registers are safe inside functions of the right features, so loads and stores
//! are all that is unsafe here.

// Several arrays run side by side, and iterator adaptors may stay calls: they lack the instruction set of their caller.
#![allow(clippy::needless_range_loop)]

mod block256;
mod block32;
mod float;
pub(super) mod rows;
mod tiles;

use super::{Tile, bytes_at, part};
use crate::backend::cpu::matmul::activations::{self, Block256, Floats, Step32};
use crate::quant::QuantType;
use std::arch::asm;
use std::arch::x86_64::*;

/// Whether the machine has the features of this level, beyond those of AVX2.
pub(super) fn is_available() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vbmi")
        && is_x86_feature_detected!("avx512vnni")
        && is_x86_feature_detected!("gfni")
}

/// F32, F16 or BF16 weights times `A` rows.
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
pub(super) fn floats<const A: usize>(tile: Tile, x: [&[Floats]; A]) {
    match tile.ty {
        QuantType::F32 => tile.fill(|row| float::dot::<A, 128>(row, x, |bytes| float::f32_values(bytes))),
        QuantType::F16 => tile.fill(|row| float::dot::<A, 64>(row, x, |bytes| float::f16_values(bytes))),
        QuantType::BF16 => tile.fill(|row| float::dot::<A, 64>(row, x, |bytes| float::bf16_values(bytes))),
        ty => panic!("{ty} is not a type of plain floats"),
    }
}

/// Weights in blocks of 32 times `A` rows.
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
pub(super) fn blocks32<const A: usize>(tile: Tile, x: [&[Step32]; A]) {
    match tile.ty {
        QuantType::Q8_0 => tile.fill(|row| block32::q8_0(row, x)),
        QuantType::MXFP4 => tile.fill(|row| block32::mxfp4(row, x)),
        ty => panic!("{ty} does not have blocks of 32"),
    }
}

/// Weights in blocks of 256 times `A` rows.
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
pub(super) fn blocks256<const A: usize>(tile: Tile, x: [&[Block256]; A]) {
    match tile.ty {
        QuantType::Q2_K => tile.fill(|row| block256::q2_k(row, x)),
        QuantType::Q3_K => tile.fill(|row| block256::q3_k(row, x)),
        QuantType::Q4_K => tile.fill(|row| block256::q4_k(row, x)),
        QuantType::Q6_K => tile.fill(|row| block256::q6_k(row, x)),
        QuantType::IQ2_XXS => tile.fill(|row| block256::iq2_xxs(row, x)),
        ty => panic!("{ty} does not have blocks of 256"),
    }
}

/// Whether the machine also multiplies whole tiles, and lets this process do so.
pub(super) fn has_tiles() -> bool {
    tiles::are_available()
}

/// Bytes that a thread keeps to multiply `rows` activation rows of `cols` columns with weights of `ty` on tiles.
pub(super) fn tile_bytes(ty: QuantType, cols: usize, rows: usize) -> u64 {
    tiles::scratch_bytes(ty, cols, rows)
}

/// Weights (type, bytes, bytes of a row) times rows `x(0..count)`, on tiles: `out` is `[weight rows, count]`. Only where there are tiles.
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
pub(super) fn tiles32<'a>(
    weights: (QuantType, &[u8], usize),
    x: (&dyn Fn(usize) -> &'a [Step32], usize),
    out: &mut [f32],
) {
    tiles::product32(weights, x, out);
}

/// As [`tiles32`].
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
pub(super) fn tiles256<'a>(
    weights: (QuantType, &[u8], usize),
    x: (&dyn Fn(usize) -> &'a [Block256], usize),
    out: &mut [f32],
) {
    tiles::product256(weights, x, out);
}

/// The plain code, compiled for this level.
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
pub(super) fn fill32(x: &[f32], offset: i32, row: &mut [Step32]) {
    activations::fill32(x, offset, row);
}

/// The plain code, compiled for this level.
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
pub(super) fn fill256(x: &[f32], row: &mut [Block256]) {
    activations::fill256(x, row);
}

/// 64 bytes.
#[inline]
#[target_feature(enable = "avx512f")]
fn load512<T: bytemuck::Pod, const N: usize>(values: &[T; N]) -> __m512i {
    const { assert!(size_of::<T>() * N == 64) };
    // SAFETY: the array is 64 readable bytes of plain data; the load has no alignment requirement.
    unsafe { _mm512_loadu_si512(values.as_ptr().cast()) }
}

/// 64 bytes, loaded behind the optimiser's back: where it sees that a load lies inside an earlier wider one, it cuts
/// the value out of that register with a chain of shuffles instead of loading it.
#[inline]
#[target_feature(enable = "avx512f")]
fn load512_opaque(bytes: &[u8; 64]) -> __m512i {
    let value: __m512i;
    // SAFETY: reads the 64 bytes of the array and nothing else; the instruction has no alignment requirement.
    unsafe {
        asm!("vmovdqu64 {value}, [{at}]", value = lateout(zmm_reg) value, at = in(reg) bytes,
            options(pure, readonly, nostack, preserves_flags))
    };
    value
}

/// 32 bytes.
#[inline]
#[target_feature(enable = "avx512f")]
fn load256<T: bytemuck::Pod, const N: usize>(values: &[T; N]) -> __m256i {
    const { assert!(size_of::<T>() * N == 32) };
    // SAFETY: the array is 32 readable bytes of plain data; the load has no alignment requirement.
    unsafe { _mm256_loadu_si256(values.as_ptr().cast()) }
}

/// 16 bytes.
#[inline]
#[target_feature(enable = "avx512f")]
fn load128<T: bytemuck::Pod, const N: usize>(values: &[T; N]) -> __m128i {
    const { assert!(size_of::<T>() * N == 16) };
    // SAFETY: the array is 16 readable bytes of plain data; the load has no alignment requirement.
    unsafe { _mm_loadu_si128(values.as_ptr().cast()) }
}

/// Element `index` of each row.
#[inline(always)]
fn at_index<'a, T, const A: usize>(x: &[&'a [T]; A], index: usize) -> [&'a T; A] {
    let mut at = [&x[0][index]; A];
    for a in 1..A {
        at[a] = &x[a][index];
    }
    at
}

/// Asks for the bytes that lie `AHEAD` bytes after a block, so that they come from memory or a shared cache while this
/// block is computed: rows follow each other, and the processor's own prefetcher stops at each page.
#[inline]
#[target_feature(enable = "avx512f")]
fn prefetch_after<const B: usize>(block: &[u8; B]) {
    /// Half a page; measured flat from 1 to 4 KiB.
    const AHEAD: usize = 2048;
    for line in 0..B.div_ceil(64) {
        let at = block.as_ptr().wrapping_add(AHEAD + 64 * line);
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
}

/// Part `index` of `steps`, or a copy of the shorter `rest` filled up with zeros.
#[inline(always)]
fn step_or_rest<'a, const B: usize>(
    steps: &'a [[u8; B]],
    rest: &[u8],
    index: usize,
    padded: &'a mut [u8; B],
) -> &'a [u8; B] {
    steps.get(index).unwrap_or_else(|| {
        padded[..rest.len()].copy_from_slice(rest);
        padded
    })
}

/// 64 bytes.
#[inline]
#[target_feature(enable = "avx512f")]
fn store512<T: bytemuck::Pod, const N: usize>(into: &mut [T; N], values: __m512i) {
    const { assert!(size_of::<T>() * N == 64) };
    // SAFETY: the array is 64 writable bytes of plain data; the store has no alignment requirement.
    unsafe { _mm512_storeu_si512(into.as_mut_ptr().cast(), values) }
}

/// The sums of four registers, in order, for each quarter apart.
#[inline]
#[target_feature(enable = "avx512f")]
fn quarter_totals([a, b, c, d]: [__m512i; 4]) -> __m512i {
    let ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd))
}

/// The fold of `scalar::reduce8`.
#[inline]
#[target_feature(enable = "avx512f")]
fn reduce8(eight: __m256) -> f32 {
    reduce4(_mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight)))
}

/// The fold of `scalar::reduce4`.
#[inline]
#[target_feature(enable = "avx512f")]
fn reduce4(four: __m128) -> f32 {
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    let one = _mm_add_ss(two, _mm_movehdup_ps(two));
    _mm_cvtss_f32(_mm_add_ss(one, _mm_setzero_ps()))
}
