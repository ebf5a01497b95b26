//! Rows in blocks of 256. Every type is brought to four registers of 64 unsigned codes in natural order and the
//! scales of their sub-blocks spread over lanes; the dots are then the same for all, and four blocks are summed over lanes together.
//! Never sums floats inside a block.
//! Surprising fact: the dot of four codes always fits 16 bits, so the scale is applied by one 16-bit multiply-add
//! whose other half is zero.

use super::*;
use crate::quant::iq2_xxs::GRID;
use std::arch::asm;

/// A block of weights, ready for dots.
pub(super) struct Unpacked {
    /// 256 unsigned codes in natural order.
    pub codes: [__m512i; 4],
    /// The 16-bit scale of each four codes, in the low half of its lane; the high half is zero.
    pub scales: [__m512i; 4],
    /// Words that sums of 16 activations are multiplied with: minima, or minus offset times scale.
    pub sub_blocks: __m256i,
}

/// Four blocks of a weight row against `A` activation rows, not yet summed over lanes.
struct Quad<const A: usize> {
    whole: [[__m512i; 4]; A],
    mins: [[__m256i; 4]; A],
}

impl<const A: usize> Quad<A> {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn new() -> Self {
        Quad { whole: [[_mm512_setzero_si512(); 4]; A], mins: [[_mm256_setzero_si256(); 4]; A] }
    }

    /// Makes `w` block `i` of the four. The codes of `SCALED` blocks have been multiplied with their scales.
    #[inline]
    #[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
    fn set<const MINS: bool, const SCALED: bool>(&mut self, i: usize, x: &[&Block256; A], w: &Unpacked) {
        for a in 0..A {
            let sub_blocks = _mm256_madd_epi16(w.sub_blocks, load256(&x[a].sums));
            let mut whole = _mm512_setzero_si512();
            if MINS {
                self.mins[a][i] = sub_blocks;
            } else {
                whole = _mm512_zextsi256_si512(sub_blocks);
            }
            for k in 0..4 {
                let values = load512(part::<i8, 64>(&x[a].codes, k));
                if SCALED {
                    whole = _mm512_dpbusd_epi32(whole, w.codes[k], values);
                } else {
                    let dots = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w.codes[k], values);
                    whole = add_word_dots(whole, dots, w.scales[k]);
                }
            }
            self.whole[a][i] = whole;
        }
    }

    /// Adds the four blocks, of which `x` are the first: `factors` are those of the scales, then those of the minima.
    #[inline]
    #[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
    fn add<const MINS: bool>(&self, x: &[&Block256; A], factors: __m256, sums: &mut [__m128; A]) {
        for a in 0..A {
            let scales = _mm_castsi128_ps(load128(&x[a].scales));
            let whole = totals(self.whole[a]);
            if MINS {
                let [m, n, o, p] = self.mins[a];
                let mn = _mm256_add_epi32(_mm256_unpacklo_epi32(m, n), _mm256_unpackhi_epi32(m, n));
                let op = _mm256_add_epi32(_mm256_unpacklo_epi32(o, p), _mm256_unpackhi_epi32(o, p));
                let mins = _mm256_add_epi32(_mm256_unpacklo_epi64(mn, op), _mm256_unpackhi_epi64(mn, op));
                let lower = _mm256_permute2x128_si256::<0x20>(whole, mins);
                let upper = _mm256_permute2x128_si256::<0x31>(whole, mins);
                let both = _mm256_cvtepi32_ps(_mm256_add_epi32(lower, upper));
                let factors = _mm256_mul_ps(factors, _mm256_set_m128(scales, scales));
                sums[a] = _mm_fmadd_ps(_mm256_castps256_ps128(both), _mm256_castps256_ps128(factors), sums[a]);
                let (mins, factors) = (_mm256_extractf128_ps::<1>(both), _mm256_extractf128_ps::<1>(factors));
                sums[a] = _mm_fnmadd_ps(mins, factors, sums[a]);
            } else {
                let whole = _mm_add_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256::<1>(whole));
                let factors = _mm_mul_ps(_mm256_castps256_ps128(factors), scales);
                sums[a] = _mm_fmadd_ps(_mm_cvtepi32_ps(whole), factors, sums[a]);
            }
        }
    }
}

/// The sums of four registers, in order and in two halves that remain to be added.
#[inline]
#[target_feature(enable = "avx512f")]
fn totals(sums: [__m512i; 4]) -> __m256i {
    let quarters = quarter_totals(sums);
    _mm256_add_epi32(_mm512_castsi512_si256(quarters), _mm512_extracti64x4_epi64::<1>(quarters))
}

/// The factors of four blocks: those of the scales, then those of the minima. Blocks that are not there count as 0, which keeps what
/// an earlier four left in their places from being added.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,f16c")]
fn quad_factors<const B: usize>(blocks: &[[u8; B]], halves: impl Fn(&[u8; B]) -> u32) -> __m256 {
    let words = match blocks {
        [a, b, c, d] => [halves(a), halves(b), halves(c), halves(d)],
        [a, b, c] => [halves(a), halves(b), halves(c), 0],
        [a, b] => [halves(a), halves(b), 0, 0],
        [a] => [halves(a), 0, 0, 0],
        _ => panic!("four blocks at most"),
    };
    let [a, b, c, d] = words.map(|word| word as i32);
    let order = _mm_set_epi8(15, 14, 11, 10, 7, 6, 3, 2, 13, 12, 9, 8, 5, 4, 1, 0);
    _mm256_cvtph_ps(_mm_shuffle_epi8(_mm_set_epi32(d, c, b, a), order))
}

#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn fold<const A: usize>(sums: [__m128; A]) -> [f32; A] {
    let mut out = [0.0; A];
    for a in 0..A {
        out[a] = reduce4(sums[a]);
    }
    out
}

/// A row of blocks that `unpack` takes apart; `halves` finds the factors of scales and minima.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
fn dots<const A: usize, const B: usize, const MINS: bool, const SCALED: bool>(
    row: &[u8],
    x: [&[Block256]; A],
    unpack: impl Fn(&[u8; B]) -> Unpacked,
    halves: impl Fn(&[u8; B]) -> u32,
) -> [f32; A] {
    let mut sums = [_mm_setzero_ps(); A];
    let mut quad = Quad::<A>::new();
    let blocks = row.as_chunks::<B>().0;
    for first in (0..blocks.len()).step_by(4) {
        let four = &blocks[first..blocks.len().min(first + 4)];
        if A == 1 && four.len() == 4 {
            // A loop of known length is unrolled, and a single row then stays in registers until its four blocks are summed.
            for i in 0..4 {
                prefetch_after(&four[i]);
                quad.set::<MINS, SCALED>(i, &at_index(&x, first + i), &unpack(&four[i]));
            }
        } else {
            for i in 0..four.len() {
                prefetch_after(&four[i]);
                quad.set::<MINS, SCALED>(i, &at_index(&x, first + i), &unpack(&four[i]));
            }
        }
        quad.add::<MINS>(&at_index(&x, first), quad_factors(four, &halves), &mut sums);
    }
    fold(sums)
}

/// For 64 codes from code `64 k` the scale of each four: byte `(64 k + 4 lane) / span` of the scales into the low byte
/// of the lane, byte `zero` into the others. (A zeroing mask would become one more instruction, an AND.)
const fn spread(span: usize, zero: u8) -> [[u8; 64]; 4] {
    let mut table = [[zero; 64]; 4];
    let mut at = 0;
    while at < 256 {
        table[at / 64][at % 64] = (at / span) as u8;
        at += 4;
    }
    table
}

/// Unsigned scales below 128, one byte each, spread over lanes; byte 63 counts as zero.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
fn spread_bytes(table: &[[u8; 64]; 4], scales: __m128i) -> [__m512i; 4] {
    let scales = _mm512_zextsi128_si512(scales);
    let mut out = [scales; 4];
    for k in 0..4 {
        out[k] = _mm512_permutexvar_epi8(load512(&table[k]), scales);
    }
    out
}

/// Sixteen signed words spread over lanes, four lanes each.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
fn spread_words(scales: __m256i) -> [__m512i; 4] {
    static TABLE: [[u16; 32]; 4] = {
        let mut table = [[31; 32]; 4];
        let mut at = 0;
        while at < 128 {
            table[at / 32][at % 32] = (at / 8) as u16;
            at += 2;
        }
        table
    };
    let scales = _mm512_zextsi256_si512(scales);
    let mut out = [scales; 4];
    for k in 0..4 {
        out[k] = _mm512_permutexvar_epi16(load512(&TABLE[k]), scales);
    }
    out
}

/// Adds the dots of word pairs to `sums`. Written out because the optimiser takes the intrinsic apart into a
/// multiply-add and an addition, which is shorter in latency but one more instruction where throughput counts.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
pub(super) fn add_word_dots(mut sums: __m512i, dots: __m512i, scales: __m512i) -> __m512i {
    // SAFETY: works on registers only.
    unsafe {
        asm!("vpdpwssd {sums}, {dots}, {scales}", sums = inout(zmm_reg) sums, dots = in(zmm_reg) dots,
            scales = in(zmm_reg) scales, options(pure, nomem, nostack, preserves_flags));
    }
    sums
}

/// Bit positions for a multishift that moves the bytes of the lower and of the upper 32 by these shifts to the right.
const fn shifts(low: i32, high: i32) -> [u8; 64] {
    let mut table = [0; 64];
    let mut at = 0;
    while at < 64 {
        let shift = if at < 32 { low } else { high };
        table[at] = (8 * (at as i32 % 8) + shift).rem_euclid(64) as u8;
        at += 1;
    }
    table
}

#[inline(always)]
pub(super) fn u16_at<const B: usize>(block: &[u8; B], at: usize) -> u32 {
    u32::from(u16::from_le_bytes(*bytes_at(block, at)))
}

#[inline(always)]
pub(super) fn u32_at<const B: usize>(block: &[u8; B], at: usize) -> u32 {
    u32::from_le_bytes(*bytes_at(block, at))
}

#[inline(always)]
fn u64_at<const B: usize>(block: &[u8; B], at: usize) -> u64 {
    u64::from_le_bytes(*bytes_at(block, at))
}

/// One Q4_K block.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
pub(super) fn unpack_q4_k(block: &[u8; 144]) -> Unpacked {
    /// After unpacking: scales 0..4, minima 0..4, scales 4..8, minima 4..8.
    static SCALES: [[u8; 64]; 4] = {
        let mut table = spread(32, 63);
        let mut at = 0;
        while at < 256 {
            let sub = table[at / 64][at % 64];
            table[at / 64][at % 64] = sub + sub / 4 * 4;
            at += 4;
        }
        table
    };
    /// Each minimum twice, as words.
    static MINS: [u8; 32] = {
        let mut table = [31; 32];
        let mut at = 0;
        while at < 32 {
            table[at] = (at / 4 + at / 16 * 4 + 4) as u8;
            at += 2;
        }
        table
    };
    static SHIFTS: [u8; 64] = shifts(0, 4);
    let (first, last) = (u64_at(block, 4), u64::from(u32_at(block, 12)));
    let low = first & 0x3f3f_3f3f_3f3f_3f3f;
    let high = ((last | last << 28) & 0x0f0f_0f0f_0f0f_0f0f) | (first >> 2 & 0x3030_3030_3030_3030);
    let packed = _mm_set_epi64x(high as i64, low as i64);
    let mins = _mm256_permutexvar_epi8(load256(&MINS), _mm256_zextsi128_si256(packed));
    let mut codes = [_mm512_setzero_si512(); 4];
    for k in 0..4 {
        let bytes = _mm512_broadcast_i64x4(load256(bytes_at::<32, 144>(block, 16 + 32 * k)));
        codes[k] = _mm512_and_si512(_mm512_multishift_epi64_epi8(load512(&SHIFTS), bytes), _mm512_set1_epi8(15));
    }
    Unpacked { codes, scales: spread_bytes(&SCALES, packed), sub_blocks: mins }
}

/// One Q4_K row.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
pub(super) fn q4_k<const A: usize>(row: &[u8], x: [&[Block256]; A]) -> [f32; A] {
    dots::<A, 144, true, false>(row, x, |block| unpack_q4_k(block), |block| u32_at(block, 0))
}

/// 64 codes of two bits from each 32 bytes, for both halves of the block.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
fn two_bit_codes(bytes: &[u8; 64]) -> [__m512i; 4] {
    static SHIFTS: [[u8; 64]; 2] = [shifts(0, 2), shifts(4, 6)];
    let mut codes = [_mm512_setzero_si512(); 4];
    for k in 0..4 {
        let bytes = _mm512_broadcast_i64x4(load256(part::<u8, 32>(bytes, k / 2)));
        let shifted = _mm512_multishift_epi64_epi8(load512(&SHIFTS[k % 2]), bytes);
        codes[k] = _mm512_and_si512(shifted, _mm512_set1_epi8(3));
    }
    codes
}

static SPREAD16: [[u8; 64]; 4] = spread(16, 63);

/// The scale of each code into its own byte.
static EVERY16: [[u8; 64]; 4] = {
    let mut table = [[0; 64]; 4];
    let mut at = 0;
    while at < 256 {
        table[at / 64][at % 64] = (at / 16) as u8;
        at += 1;
    }
    table
};

/// Code (the low two bits) times scale (the four above).
static PRODUCTS: [u8; 64] = {
    let mut table = [0; 64];
    let mut at = 0;
    while at < 64 {
        table[at] = (at % 4 * (at / 4)) as u8;
        at += 1;
    }
    table
};

/// One Q2_K block. The codes of a `SCALED` one are multiplied with their scales, at most 45, by a table.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
pub(super) fn unpack_q2_k<const SCALED: bool>(block: &[u8; 84]) -> Unpacked {
    let nibble = _mm_set1_epi8(15);
    let packed = load128(bytes_at::<16, 84>(block, 0));
    let small = _mm_and_si128(packed, nibble);
    let mins = _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16::<4>(packed), nibble));
    let mut codes = two_bit_codes(bytes_at(block, 16));
    let mut scales = [_mm512_setzero_si512(); 4];
    if SCALED {
        let shifted = spread_bytes(&EVERY16, _mm_slli_epi16::<2>(small));
        for k in 0..4 {
            codes[k] = _mm512_permutexvar_epi8(_mm512_or_si512(shifted[k], codes[k]), load512(&PRODUCTS));
        }
    } else {
        scales = spread_bytes(&SPREAD16, small);
    }
    Unpacked { codes, scales, sub_blocks: mins }
}

/// One Q2_K row. Multiplying codes with scales pays from the second activation row.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
pub(super) fn q2_k<const A: usize>(row: &[u8], x: [&[Block256]; A]) -> [f32; A] {
    if A == 1 {
        dots::<A, 84, true, false>(row, x, |block| unpack_q2_k::<false>(block), |block| u32_at(block, 80))
    } else {
        dots::<A, 84, true, true>(row, x, |block| unpack_q2_k::<true>(block), |block| u32_at(block, 80))
    }
}

/// One Q3_K block.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
pub(super) fn unpack_q3_k(block: &[u8; 110]) -> Unpacked {
    /// Bits `2 k` and `2 k + 1` of the mask to bit 2.
    static HIGH: [[u8; 64]; 4] = [shifts(-2, -1), shifts(0, 1), shifts(2, 3), shifts(4, 5)];
    const NIBBLES: u64 = 0x0f0f_0f0f_0f0f_0f0f;
    const PAIRS: u64 = 0x3030_3030_3030_3030;
    let (low, high) = (u64_at(block, 96), u64::from(u32_at(block, 104)));
    let first = low & NIBBLES | (high << 4 | high << 34) & PAIRS;
    let second = low >> 4 & NIBBLES | (high | high << 30) & PAIRS;
    let scales = _mm_sub_epi8(_mm_set_epi64x(second as i64, first as i64), _mm_set1_epi8(32));
    let scales = _mm256_cvtepi8_epi16(scales);
    let offset = _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_slli_epi16::<2>(scales));
    let mask = _mm512_broadcast_i64x4(load256(bytes_at::<32, 110>(block, 0)));
    let mut codes = two_bit_codes(bytes_at(block, 32));
    for k in 0..4 {
        let bits = _mm512_multishift_epi64_epi8(load512(&HIGH[k]), mask);
        codes[k] = or_masked(codes[k], bits, _mm512_set1_epi8(4));
    }
    Unpacked { codes, scales: spread_words(scales), sub_blocks: offset }
}

/// One Q3_K row.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
pub(super) fn q3_k<const A: usize>(row: &[u8], x: [&[Block256]; A]) -> [f32; A] {
    dots::<A, 110, false, false>(row, x, |block| unpack_q3_k(block), |block| u16_at(block, 108))
}

/// `a | b & mask`.
#[inline]
#[target_feature(enable = "avx512f")]
fn or_masked(a: __m512i, b: __m512i, mask: __m512i) -> __m512i {
    _mm512_ternarylogic_epi32::<0xf8>(a, b, mask)
}

/// One Q6_K block.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
pub(super) fn unpack_q6_k(block: &[u8; 210]) -> Unpacked {
    /// The pair at bit 0, 2, 4, 6 to bit 4.
    static HIGH: [[u8; 64]; 2] = [shifts(-4, -2), shifts(0, 2)];
    let scales = _mm256_cvtepi8_epi16(load128(bytes_at::<16, 210>(block, 192)));
    let offset = _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_slli_epi16::<5>(scales));
    let (nibble, pair) = (_mm512_set1_epi8(15), _mm512_set1_epi8(0x30));
    let mut codes = [_mm512_setzero_si512(); 4];
    for half in 0..2 {
        let low = load512(bytes_at::<64, 210>(block, 64 * half));
        let high = _mm512_broadcast_i64x4(load256(bytes_at::<32, 210>(block, 128 + 32 * half)));
        let upper = _mm512_srli_epi16::<4>(low);
        let bits = _mm512_multishift_epi64_epi8(load512(&HIGH[0]), high);
        codes[2 * half] = or_masked(_mm512_and_si512(low, nibble), bits, pair);
        let bits = _mm512_multishift_epi64_epi8(load512(&HIGH[1]), high);
        codes[2 * half + 1] = or_masked(_mm512_and_si512(upper, nibble), bits, pair);
    }
    Unpacked { codes, scales: spread_words(scales), sub_blocks: offset }
}

/// One Q6_K row.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
pub(super) fn q6_k<const A: usize>(row: &[u8], x: [&[Block256]; A]) -> [f32; A] {
    dots::<A, 210, false, false>(row, x, |block| unpack_q6_k(block), |block| u16_at(block, 208))
}

/// The grid with two bits a value, as two planes of bytes: bits 0..8 and 8..16 of each entry.
static GRID_PLANES: [[[u8; 64]; 4]; 2] = {
    let mut planes = [[[0; 64]; 4]; 2];
    let mut at = 0;
    while at < 256 * 8 {
        let (entry, value) = (at / 8, at % 8);
        // 8, 25, 43 -> 0, 1, 2.
        let code = (GRID[entry] >> (8 * value)) as u8 / 17;
        planes[value / 4][entry / 64][entry % 64] |= code << (2 * (value % 4));
        at += 1;
    }
    planes
};

/// The magnitude of a two-bit code, whatever the four bits above it are.
static MAGNITUDES: [u8; 64] = {
    let mut table = [0; 64];
    let mut at = 0;
    while at < 64 {
        table[at] = [8, 25, 43, 0][at % 4];
        at += 1;
    }
    table
};

/// What two IQ2_XXS blocks decode to before their codes are expanded.
pub(super) struct GridPair {
    /// For each block its 32 entries of 16 bits, in order.
    entries: [__m512i; 2],
    /// One bit a value, set where it is negative; four words a block.
    signs: [u64; 8],
    /// For each block, byte `8 s + 4` is the scale of sub-block `s`.
    scales: [__m512i; 2],
}

/// Looks up two blocks at once, since a byte lookup handles 64 indices and a block has 32.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
pub(super) fn grid_pair(first: &[u8; 66], second: &[u8; 66]) -> GridPair {
    /// Four sign codes of seven bits into bytes 0..4 of each eight bytes, the scale into the low bits of the others.
    static FIELDS: [u8; 64] = {
        let mut table = [0; 64];
        let mut at = 0;
        while at < 64 {
            table[at] = if at % 8 < 4 { 32 + 7 * (at % 8) as u8 } else { 60 };
            at += 1;
        }
        table
    };
    /// Signs of the first block (low halves of the eight-byte groups), then of the second.
    static SIGN_ORDER: [i32; 16] = [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15];
    /// Bits 0..7 stay, bit 7 becomes the parity of the seven: rows of the bit matrix, row of bit 7 in the lowest byte.
    const PARITY: i64 = 0x0102_0408_1020_407f;
    const HIGH_HALVES: u16 = 0xaaaa;
    let blocks = [load512(bytes_at::<64, 66>(first, 2)), load512(bytes_at::<64, 66>(second, 2))];
    let indices = _mm512_mask_mov_epi32(blocks[0], HIGH_HALVES, _mm512_slli_epi64::<32>(blocks[1]));
    let is_upper = _mm512_movepi8_mask(indices);
    let mut bytes = [indices; 2];
    for p in 0..2 {
        let plane = &GRID_PLANES[p];
        let lower = _mm512_permutex2var_epi8(load512(&plane[0]), indices, load512(&plane[1]));
        let upper = _mm512_permutex2var_epi8(load512(&plane[2]), indices, load512(&plane[3]));
        bytes[p] = _mm512_mask_mov_epi8(lower, is_upper, upper);
    }
    // Each 16 bytes are two groups: four entries of the first block and four of the second, twice.
    let even = _mm512_unpacklo_epi8(bytes[0], bytes[1]);
    let odd = _mm512_unpackhi_epi8(bytes[0], bytes[1]);
    let fields = load512(&FIELDS);
    let (f0, f1) = (_mm512_multishift_epi64_epi8(fields, blocks[0]), _mm512_multishift_epi64_epi8(fields, blocks[1]));
    let signs = _mm512_mask_mov_epi32(f0, HIGH_HALVES, _mm512_slli_epi64::<32>(f1));
    let signs = _mm512_gf2p8affine_epi64_epi8::<0>(signs, _mm512_set1_epi64(PARITY));
    let signs = _mm512_permutexvar_epi32(load512(&SIGN_ORDER), signs);
    let mut sign_words = [0u64; 8];
    store512(&mut sign_words, signs);
    let odd_scale = |f| {
        // Byte 0 of each eight becomes zero: the filler of spread scales.
        let doubled = _mm512_and_si512(_mm512_add_epi8(f, f), _mm512_set1_epi64(0x1e << 32));
        _mm512_or_si512(doubled, _mm512_set1_epi64(1 << 32))
    };
    GridPair {
        entries: [_mm512_unpacklo_epi64(even, odd), _mm512_unpackhi_epi64(even, odd)],
        signs: sign_words,
        scales: [odd_scale(f0), odd_scale(f1)],
    }
}

/// Magnitudes, scales (in the low byte of each lane) and sign bits of codes `64 k..` of block `which`.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
pub(super) fn grid_codes(pair: &GridPair, which: usize, k: usize) -> (__m512i, __m512i, u64) {
    /// Entry `8 k + j` into all four words of the eight bytes `j`.
    static ENTRIES: [[u8; 64]; 4] = {
        let mut table = [[0; 64]; 4];
        let mut at = 0;
        while at < 256 {
            table[at / 64][at % 64] = (at / 8 * 2 + at % 2) as u8;
            at += 1;
        }
        table
    };
    /// Code `i` of an entry into the low bits of byte `i`.
    static CODES: [u8; 64] = {
        let mut table = [0; 64];
        let mut at = 0;
        while at < 64 {
            table[at] = 2 * (at % 8) as u8;
            at += 1;
        }
        table
    };
    static SCALES: [[u8; 64]; 4] = {
        let mut table = spread(32, 0);
        let mut at = 0;
        while at < 256 {
            table[at / 64][at % 64] = 8 * table[at / 64][at % 64] + 4;
            at += 4;
        }
        table
    };
    let entries = _mm512_permutexvar_epi8(load512(&ENTRIES[k]), pair.entries[which]);
    let codes = _mm512_multishift_epi64_epi8(load512(&CODES), entries);
    let magnitudes = _mm512_permutexvar_epi8(codes, load512(&MAGNITUDES));
    let scales = _mm512_permutexvar_epi8(load512(&SCALES[k]), pair.scales[which]);
    (magnitudes, scales, pair.signs[4 * which + k])
}

impl<const A: usize> Quad<A> {
    /// Makes block `which` of the pair block `i` of the four.
    #[inline]
    #[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
    fn set_grid(&mut self, i: usize, x: &[&Block256; A], pair: &GridPair, which: usize) {
        let mut whole = [_mm512_setzero_si512(); A];
        for k in 0..4 {
            let (magnitudes, scales, negative) = grid_codes(pair, which, k);
            for a in 0..A {
                let values = load512(part::<i8, 64>(&x[a].codes, k));
                let values = _mm512_mask_sub_epi8(values, negative, _mm512_setzero_si512(), values);
                let dots = _mm512_dpbusd_epi32(_mm512_setzero_si512(), magnitudes, values);
                whole[a] = add_word_dots(whole[a], dots, scales);
            }
        }
        for a in 0..A {
            self.whole[a][i] = whole[a];
        }
    }
}

/// One IQ2_XXS row.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
pub(super) fn iq2_xxs<const A: usize>(row: &[u8], x: [&[Block256]; A]) -> [f32; A] {
    let mut sums = [_mm_setzero_ps(); A];
    let mut quad = Quad::<A>::new();
    let blocks = row.as_chunks::<66>().0;
    for first in (0..blocks.len()).step_by(4) {
        let four = &blocks[first..blocks.len().min(first + 4)];
        for i in (0..four.len()).step_by(2) {
            let next = (i + 1).min(four.len() - 1);
            prefetch_after(&four[i]);
            prefetch_after(&four[next]);
            let pair = grid_pair(&four[i], &four[next]);
            quad.set_grid(i, &at_index(&x, first + i), &pair, 0);
            if next > i {
                quad.set_grid(next, &at_index(&x, first + next), &pair, 1);
            }
        }
        let factors = quad_factors(four, |block| u16_at(block, 0));
        quad.add::<false>(&at_index(&x, first), _mm256_mul_ps(factors, _mm256_set1_ps(0.125)), &mut sums);
    }
    fold(sums)
}
