//! Row kernels for AVX2 with FMA and F16C: eight blocks of 32 or four of 256 at a time.
//! Never reads past a row: whole blocks arrive as arrays, remainders are copied into zeroed ones first.
//! Surprising fact: byte dots here saturate at 16 bits, but no pair of products of any type comes near that limit.

// Several arrays run side by side, and iterator adaptors may stay calls: they lack the instruction set of their caller.
#![allow(clippy::needless_range_loop)]

use super::{Tile, bytes_at, part};
use crate::backend::cpu::matmul::activations::{self, Block256, Floats, Step32};
use crate::quant::{QuantType, iq2_xxs, mxfp4, q3_k, q4_k};
use std::arch::x86_64::*;

/// Whether the machine has the features of this level.
pub(super) fn is_available() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

/// F32, F16 or BF16 weights times `A` rows.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn floats<const A: usize>(tile: Tile, x: [&[Floats]; A]) {
    match tile.ty {
        QuantType::F32 => tile.fill(|row| float_dots::<A, 128>(row, x, |bytes| f32_values(bytes))),
        QuantType::F16 => tile.fill(|row| float_dots::<A, 64>(row, x, |bytes| f16_values(bytes))),
        QuantType::BF16 => tile.fill(|row| float_dots::<A, 64>(row, x, |bytes| bf16_values(bytes))),
        ty => panic!("{ty} is not a type of plain floats"),
    }
}

/// Weights in blocks of 32 times `A` rows.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn blocks32<const A: usize>(tile: Tile, x: [&[Step32]; A]) {
    match tile.ty {
        QuantType::Q8_0 => tile.fill(|row| dots32::<A, 34>(row, x, |block| q8_0(block))),
        QuantType::MXFP4 => tile.fill(|row| dots32::<A, 17>(row, x, |block| mxfp4(block))),
        ty => panic!("{ty} does not have blocks of 32"),
    }
}

/// Weights in blocks of 256 times `A` rows.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn blocks256<const A: usize>(tile: Tile, x: [&[Block256]; A]) {
    match tile.ty {
        QuantType::Q2_K => tile.fill(|row| dots256::<A, 84, true>(row, x, |block| q2_k(block))),
        QuantType::Q3_K => tile.fill(|row| dots256::<A, 110, false>(row, x, |block| q3_k(block))),
        QuantType::Q4_K => tile.fill(|row| dots256::<A, 144, true>(row, x, |block| q4_k(block))),
        QuantType::Q6_K => tile.fill(|row| dots256::<A, 210, false>(row, x, |block| q6_k(block))),
        QuantType::IQ2_XXS => tile.fill(|row| dots256::<A, 66, false>(row, x, |block| iq2_xxs(block))),
        ty => panic!("{ty} does not have blocks of 256"),
    }
}

/// The plain code, compiled for this level.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn fill32(x: &[f32], offset: i32, row: &mut [Step32]) {
    activations::fill32(x, offset, row);
}

/// The plain code, compiled for this level.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn fill256(x: &[f32], row: &mut [Block256]) {
    activations::fill256(x, row);
}

/// 32 bytes.
#[inline]
#[target_feature(enable = "avx2")]
fn load256<T: bytemuck::Pod, const N: usize>(values: &[T; N]) -> __m256i {
    const { assert!(size_of::<T>() * N == 32) };
    // SAFETY: the array is 32 readable bytes of plain data; the load has no alignment requirement.
    unsafe { _mm256_loadu_si256(values.as_ptr().cast()) }
}

/// 16 bytes.
#[inline]
#[target_feature(enable = "avx2")]
fn load128<T: bytemuck::Pod, const N: usize>(values: &[T; N]) -> __m128i {
    const { assert!(size_of::<T>() * N == 16) };
    // SAFETY: the array is 16 readable bytes of plain data; the load has no alignment requirement.
    unsafe { _mm_loadu_si128(values.as_ptr().cast()) }
}

/// Four numbers.
#[inline]
#[target_feature(enable = "avx2")]
fn load_ps(values: &[f32; 4]) -> __m128 {
    _mm_castsi128_ps(load128(values))
}

/// The fold of `scalar::reduce8`.
#[inline]
#[target_feature(enable = "avx2")]
fn reduce8(eight: __m256) -> f32 {
    reduce4(_mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight)))
}

/// The fold of `scalar::reduce4`.
#[inline]
#[target_feature(enable = "avx2")]
fn reduce4(four: __m128) -> f32 {
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    let one = _mm_add_ss(two, _mm_movehdup_ps(two));
    _mm_cvtss_f32(_mm_add_ss(one, _mm_setzero_ps()))
}

/// An F16 number.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn half_at<const B: usize>(block: &[u8; B], at: usize) -> f32 {
    let bits = u16::from_le_bytes(*bytes_at(block, at));
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))))
}

#[inline]
#[target_feature(enable = "avx2")]
fn f32_values(bytes: &[u8; 128]) -> [__m256; 4] {
    let mut out = [_mm256_setzero_ps(); 4];
    for k in 0..4 {
        out[k] = _mm256_castsi256_ps(load256(part::<u8, 32>(bytes, k)));
    }
    out
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn f16_values(bytes: &[u8; 64]) -> [__m256; 4] {
    let mut out = [_mm256_setzero_ps(); 4];
    for k in 0..4 {
        out[k] = _mm256_cvtph_ps(load128(part::<u8, 16>(bytes, k)));
    }
    out
}

#[inline]
#[target_feature(enable = "avx2")]
fn bf16_values(bytes: &[u8; 64]) -> [__m256; 4] {
    let mut out = [_mm256_setzero_ps(); 4];
    for k in 0..4 {
        let wide = _mm256_cvtepu16_epi32(load128(part::<u8, 16>(bytes, k)));
        out[k] = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide));
    }
    out
}

/// A row of plain floats, `B` bytes per 32 values. Activation rows go one by one: four registers of sums each leave no
/// room for more.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn float_dots<const A: usize, const B: usize>(
    row: &[u8],
    x: [&[Floats]; A],
    values: impl Fn(&[u8; B]) -> [__m256; 4],
) -> [f32; A] {
    let (steps, rest) = row.as_chunks::<B>();
    let mut padded = [0; B];
    padded[..rest.len()].copy_from_slice(rest);
    let mut out = [0.0; A];
    for a in 0..A {
        let mut lanes = [_mm256_setzero_ps(); 4];
        for index in 0..row.len().div_ceil(B) {
            let bytes = if index < steps.len() { &steps[index] } else { &padded };
            let (w, x) = (values(bytes), f32_values(bytemuck::cast_ref(&x[a][index].0)));
            for k in 0..4 {
                lanes[k] = _mm256_fmadd_ps(w[k], x[k], lanes[k]);
            }
        }
        let sixteen = [_mm256_add_ps(lanes[0], lanes[2]), _mm256_add_ps(lanes[1], lanes[3])];
        out[a] = reduce8(_mm256_add_ps(sixteen[0], sixteen[1]));
    }
    out
}

/// Sums of four products of signed bytes, of which -128 may only be among the first.
#[inline]
#[target_feature(enable = "avx2")]
fn signed_dots(w: __m256i, x: __m256i) -> __m256i {
    let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
}

/// The sums of eight registers, in order.
#[inline]
#[target_feature(enable = "avx2")]
fn eight_totals(sums: [__m256i; 8]) -> __m256i {
    let [a, b, c, d, e, f, g, h] = sums;
    let (front, back) = (half_totals([a, b, c, d]), half_totals([e, f, g, h]));
    let (low, high) = (_mm256_permute2x128_si256::<0x20>(front, back), _mm256_permute2x128_si256::<0x31>(front, back));
    _mm256_add_epi32(low, high)
}

/// The sums of four registers, in order, for each half apart.
#[inline]
#[target_feature(enable = "avx2")]
fn half_totals([a, b, c, d]: [__m256i; 4]) -> __m256i {
    let ab = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    let cd = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
    _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd))
}

/// A row in blocks of 32, eight at a time; `decode` gives the signed codes and the factor of a block.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dots32<const A: usize, const B: usize>(
    row: &[u8],
    x: [&[Step32]; A],
    decode: impl Fn(&[u8; B]) -> (__m256i, f32),
) -> [f32; A] {
    let mut sums = [_mm256_setzero_ps(); A];
    let blocks = row.as_chunks::<B>().0;
    for first in (0..blocks.len()).step_by(8) {
        // Of blocks that are not there the factors remain 0.
        let mut d = [0.0; 8];
        let mut whole = [[_mm256_setzero_si256(); 8]; A];
        let (step, half) = (first / 16, first % 16 / 8);
        for i in 0..8.min(blocks.len() - first) {
            let (codes, factor) = decode(&blocks[first + i]);
            d[i] = factor;
            for a in 0..A {
                whole[a][i] = signed_dots(codes, load256(part::<i8, 32>(&x[a][step].codes, 8 * half + i)));
            }
        }
        let d = _mm256_castsi256_ps(load256(&d));
        for a in 0..A {
            let scales = _mm256_castsi256_ps(load256(part::<f32, 8>(&x[a][step].scales, half)));
            let whole = _mm256_cvtepi32_ps(eight_totals(whole[a]));
            sums[a] = _mm256_fmadd_ps(whole, _mm256_mul_ps(d, scales), sums[a]);
        }
    }
    let mut out = [0.0; A];
    for a in 0..A {
        out[a] = reduce8(sums[a]);
    }
    out
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn q8_0(block: &[u8; 34]) -> (__m256i, f32) {
    (load256(bytes_at::<32, 34>(block, 2)), half_at(block, 0))
}

#[inline]
#[target_feature(enable = "avx2")]
fn mxfp4(block: &[u8; 17]) -> (__m256i, f32) {
    let bytes = load128(bytes_at::<16, 17>(block, 1));
    let nibbles = _mm256_set_m128i(_mm_srli_epi16::<4>(bytes), bytes);
    let nibbles = _mm256_and_si256(nibbles, _mm256_set1_epi8(15));
    let values = _mm256_broadcastsi128_si256(load128(&mxfp4::CODES));
    (_mm256_shuffle_epi8(values, nibbles), mxfp4::scale(block[0]))
}

/// A block of 256 weights, ready for dots.
struct Unpacked {
    /// Unsigned codes in natural order.
    codes: [__m256i; 8],
    /// All ones where a weight is negative.
    negative: Option<[__m256i; 8]>,
    /// A word per 16 values.
    scales: __m256i,
    /// Words that sums of 16 activations are multiplied with: minima, or minus offset times scale.
    sub_blocks: __m256i,
    d: f32,
    dmin: f32,
}

/// For 32 values from value `32 h`, words `2 h` and `2 h + 1` of the scales, eight times each.
#[inline]
#[target_feature(enable = "avx2")]
fn spread_scales(scales: __m256i) -> [__m256i; 8] {
    let low = _mm256_permute4x64_epi64::<0x44>(scales);
    let high = _mm256_permute4x64_epi64::<0xee>(scales);
    let mut out = [scales; 8];
    for h in 0..8 {
        let word = 2 * (2 * (h as i16 % 4)) * 0x101 + 0x100;
        let order = _mm256_set_m128i(_mm_set1_epi16(word + 0x202), _mm_set1_epi16(word));
        out[h] = _mm256_shuffle_epi8(if h < 4 { low } else { high }, order);
    }
    out
}

/// The sums of four registers, in order.
#[inline]
#[target_feature(enable = "avx2")]
fn totals(sums: [__m256i; 4]) -> __m128i {
    let halves = half_totals(sums);
    _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves))
}

/// A row in blocks of 256, four at a time. With `MINS` the sub-blocks go under a factor of their own.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dots256<const A: usize, const B: usize, const MINS: bool>(
    row: &[u8],
    x: [&[Block256]; A],
    unpack: impl Fn(&[u8; B]) -> Unpacked,
) -> [f32; A] {
    let mut sums = [_mm_setzero_ps(); A];
    let blocks = row.as_chunks::<B>().0;
    for first in (0..blocks.len()).step_by(4) {
        // Of blocks that are not there the factors remain 0.
        let (mut d, mut dmin) = ([0.0; 4], [0.0; 4]);
        let (mut whole, mut mins) = ([[_mm256_setzero_si256(); 4]; A], [[_mm256_setzero_si256(); 4]; A]);
        for i in 0..4.min(blocks.len() - first) {
            let w = unpack(&blocks[first + i]);
            let scales = spread_scales(w.scales);
            (d[i], dmin[i]) = (w.d, w.dmin);
            for a in 0..A {
                let x = &x[a][first + i];
                let sub_blocks = _mm256_madd_epi16(w.sub_blocks, load256(&x.sums));
                let mut parts = [_mm256_setzero_si256(), if MINS { _mm256_setzero_si256() } else { sub_blocks }];
                for h in 0..8 {
                    let mut values = load256(part::<i8, 32>(&x.codes, h));
                    if let Some(negative) = w.negative {
                        values = _mm256_sub_epi8(_mm256_xor_si256(values, negative[h]), negative[h]);
                    }
                    let pairs = _mm256_maddubs_epi16(w.codes[h], values);
                    parts[h % 2] = _mm256_add_epi32(parts[h % 2], _mm256_madd_epi16(pairs, scales[h]));
                }
                whole[a][i] = _mm256_add_epi32(parts[0], parts[1]);
                mins[a][i] = sub_blocks;
            }
        }
        for a in 0..A {
            let scales = load_ps(&x[a][first].scales);
            let factors = _mm_mul_ps(load_ps(&d), scales);
            sums[a] = _mm_fmadd_ps(_mm_cvtepi32_ps(totals(whole[a])), factors, sums[a]);
            if MINS {
                let factors = _mm_mul_ps(load_ps(&dmin), scales);
                sums[a] = _mm_fnmadd_ps(_mm_cvtepi32_ps(totals(mins[a])), factors, sums[a]);
            }
        }
    }
    let mut out = [0.0; A];
    for a in 0..A {
        out[a] = reduce4(sums[a]);
    }
    out
}

/// `bytes >> shift & mask`, byte by byte; `mask` has no bit that comes from the neighbour.
#[inline]
#[target_feature(enable = "avx2")]
fn field(bytes: __m256i, shift: usize, mask: i8) -> __m256i {
    _mm256_and_si256(_mm256_srl_epi16(bytes, _mm_cvtsi32_si128(shift as i32)), _mm256_set1_epi8(mask))
}

/// Codes of two bits from 64 bytes.
#[inline]
#[target_feature(enable = "avx2")]
fn two_bit_codes(bytes: &[u8; 64]) -> [__m256i; 8] {
    let mut codes = [_mm256_setzero_si256(); 8];
    for h in 0..8 {
        codes[h] = field(load256(part::<u8, 32>(bytes, h / 4)), 2 * (h % 4), 3);
    }
    codes
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn q2_k(block: &[u8; 84]) -> Unpacked {
    let packed = _mm256_cvtepu8_epi16(load128(bytes_at::<16, 84>(block, 0)));
    Unpacked {
        codes: two_bit_codes(bytes_at(block, 16)),
        negative: None,
        scales: _mm256_and_si256(packed, _mm256_set1_epi16(15)),
        sub_blocks: _mm256_srli_epi16::<4>(packed),
        d: half_at(block, 80),
        dmin: half_at(block, 82),
    }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn q3_k(block: &[u8; 110]) -> Unpacked {
    let scales = _mm256_cvtepi8_epi16(load128(&q3_k::unpack_scales(bytes_at(block, 96))));
    let mut codes = two_bit_codes(bytes_at(block, 32));
    let high = load256(bytes_at::<32, 110>(block, 0));
    for h in 0..8 {
        codes[h] = _mm256_or_si256(codes[h], _mm256_slli_epi16::<2>(field(high, h, 1)));
    }
    Unpacked {
        codes,
        negative: None,
        scales,
        sub_blocks: _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_slli_epi16::<2>(scales)),
        d: half_at(block, 108),
        dmin: 0.0,
    }
}

/// Eight bytes as words, each twice.
#[inline]
#[target_feature(enable = "avx2")]
fn doubled_words(bytes: [u8; 8]) -> __m256i {
    let words = _mm_cvtsi64_si128(i64::from_le_bytes(bytes));
    _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(words, words))
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn q4_k(block: &[u8; 144]) -> Unpacked {
    let (scales, mins) = q4_k::unpack_scales(bytes_at(block, 4));
    let mut codes = [_mm256_setzero_si256(); 8];
    for h in 0..8 {
        codes[h] = field(load256(bytes_at::<32, 144>(block, 16 + h / 2 * 32)), h % 2 * 4, 15);
    }
    Unpacked {
        codes,
        negative: None,
        scales: doubled_words(scales),
        sub_blocks: doubled_words(mins),
        d: half_at(block, 0),
        dmin: half_at(block, 2),
    }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn q6_k(block: &[u8; 210]) -> Unpacked {
    let scales = _mm256_cvtepi8_epi16(load128(bytes_at::<16, 210>(block, 192)));
    let mut codes = [_mm256_setzero_si256(); 8];
    for h in 0..8 {
        let low = load256(bytes_at::<32, 210>(block, h / 4 * 64 + h % 2 * 32));
        let high = load256(bytes_at::<32, 210>(block, 128 + h / 4 * 32));
        let pair = _mm256_slli_epi16::<4>(field(high, 2 * (h % 4), 3));
        codes[h] = _mm256_or_si256(field(low, h % 4 / 2 * 4, 15), pair);
    }
    Unpacked {
        codes,
        negative: None,
        scales,
        sub_blocks: _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_slli_epi16::<5>(scales)),
        d: half_at(block, 208),
        dmin: 0.0,
    }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn iq2_xxs(block: &[u8; 66]) -> Unpacked {
    let (mut codes, mut negative) = ([_mm256_setzero_si256(); 8], [_mm256_setzero_si256(); 8]);
    let mut scales = [0; 8];
    // Byte g of the sign word to the eight values of group g, then one bit for each.
    let groups = _mm256_set_epi64x(0x0303_0303_0303_0303, 0x0202_0202_0202_0202, 0x0101_0101_0101_0101, 0);
    let bits = _mm256_set1_epi64x(i64::from_le_bytes([1, 2, 4, 8, 16, 32, 64, 128]));
    for h in 0..8 {
        let bytes: &[u8; 8] = bytes_at(block, 2 + 8 * h);
        let word = u32::from_le_bytes(*bytes_at(bytes, 4));
        let mut grid = [0; 4];
        let mut signs = [0; 4];
        for g in 0..4 {
            grid[g] = iq2_xxs::GRID[usize::from(bytes[g])];
            signs[g] = iq2_xxs::SIGNS[(word >> (7 * g)) as usize & 127];
        }
        codes[h] = load256(&grid);
        let signs = _mm256_shuffle_epi8(_mm256_set1_epi32(i32::from_le_bytes(signs)), groups);
        negative[h] = _mm256_cmpeq_epi8(_mm256_and_si256(signs, bits), bits);
        scales[h] = 2 * (word >> 28) as u8 + 1;
    }
    Unpacked {
        codes,
        negative: Some(negative),
        scales: doubled_words(scales),
        sub_blocks: _mm256_setzero_si256(),
        d: half_at(block, 0) * 0.125,
        dmin: 0.0,
    }
}
