//! Rows in blocks of 256. Every type is brought to four registers of 64 unsigned codes in natural order and the
//! scales of their sub-blocks spread over lanes; the dots are then the same for all. Never sums floats inside a block.
//! Surprising fact: the dot of four codes always fits 16 bits, so the scale is applied by one 16-bit multiply-add
//! whose other half is zero.

use super::*;
use crate::quant::iq2_xxs::GRID;
use std::arch::asm;

/// The state of one weight row against `A` activation rows.
struct Sums<const A: usize> {
    lanes: [__m512; A],
    mins: [__m256; A],
}

impl<const A: usize> Sums<A> {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn new() -> Self {
        Sums { lanes: [_mm512_setzero_ps(); A], mins: [_mm256_setzero_ps(); A] }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    fn fold(self) -> [f32; A] {
        let mut out = [0.0; A];
        for a in 0..A {
            out[a] = reduce(self.lanes[a], self.mins[a]);
        }
        out
    }

    /// Adds block `b`: `codes` 64 a register, `scales` the 16-bit scale of each four codes in the low half of a lane,
    /// `sub_blocks` what each 16 activations contribute besides.
    #[inline]
    #[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
    fn add<const MINS: bool>(&mut self, x: &[&Block256; A], w: &Unpacked) {
        for a in 0..A {
            let factors = _mm_mul_ps(w.factors, _mm_set1_ps(x[a].scale));
            let sums = load256(&x[a].sums);
            let mut whole = _mm512_setzero_si512();
            if MINS {
                let sums = _mm256_cvtepi32_ps(_mm256_madd_epi16(w.sub_blocks, sums));
                let factor = _mm256_broadcastss_ps(_mm_movehdup_ps(factors));
                self.mins[a] = _mm256_fnmadd_ps(sums, factor, self.mins[a]);
            } else {
                whole = _mm512_zextsi256_si512(_mm256_madd_epi16(w.sub_blocks, sums));
            }
            for k in 0..4 {
                let values = load512(part::<i8, 64>(&x[a].codes, k));
                let dots = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w.codes[k], values);
                whole = add_word_dots(whole, dots, w.scales[k]);
            }
            let factor = _mm512_broadcastss_ps(factors);
            self.lanes[a] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), factor, self.lanes[a]);
        }
    }
}

/// A block of weights, ready for dots.
struct Unpacked {
    /// 256 unsigned codes in natural order.
    codes: [__m512i; 4],
    /// The 16-bit scale of each four codes, in the low half of its lane.
    scales: [__m512i; 4],
    /// Words that sums of 16 activations are multiplied with: minima, or minus offset times scale.
    sub_blocks: __m256i,
    /// The factor of the scales, then that of the minima.
    factors: __m128,
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
fn add_word_dots(mut sums: __m512i, dots: __m512i, scales: __m512i) -> __m512i {
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

/// The two factors, or one and whatever follows it.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,f16c")]
fn halves(bytes: u32) -> __m128 {
    _mm_cvtph_ps(_mm_cvtsi32_si128(bytes as i32))
}

#[inline(always)]
fn u16_at<const B: usize>(block: &[u8; B], at: usize) -> u32 {
    u32::from(u16::from_le_bytes(*bytes_at(block, at)))
}

#[inline(always)]
fn u32_at<const B: usize>(block: &[u8; B], at: usize) -> u32 {
    u32::from_le_bytes(*bytes_at(block, at))
}

#[inline(always)]
fn u64_at<const B: usize>(block: &[u8; B], at: usize) -> u64 {
    u64::from_le_bytes(*bytes_at(block, at))
}

/// One Q4_K row.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
pub(super) fn q4_k<const A: usize>(row: &[u8], x: [&[Block256]; A]) -> [f32; A] {
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
    let mut sums = Sums::<A>::new();
    let blocks = row.as_chunks::<144>().0;
    for b in 0..blocks.len() {
        let block = &blocks[b];
        prefetch_after(block);
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
        let w = Unpacked {
            codes,
            scales: spread_bytes(&SCALES, packed),
            sub_blocks: mins,
            factors: halves(u32_at(block, 0)),
        };
        sums.add::<true>(&at_index(&x, b), &w);
    }
    sums.fold()
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

/// One Q2_K row.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
pub(super) fn q2_k<const A: usize>(row: &[u8], x: [&[Block256]; A]) -> [f32; A] {
    let mut sums = Sums::<A>::new();
    let blocks = row.as_chunks::<84>().0;
    for b in 0..blocks.len() {
        let block = &blocks[b];
        prefetch_after(block);
        let packed = load128(bytes_at::<16, 84>(block, 0));
        let nibble = _mm_set1_epi8(15);
        let scales = spread_bytes(&SPREAD16, _mm_and_si128(packed, nibble));
        let mins = _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16::<4>(packed), nibble));
        let codes = two_bit_codes(bytes_at(block, 16));
        let w = Unpacked { codes, scales, sub_blocks: mins, factors: halves(u32_at(block, 80)) };
        sums.add::<true>(&at_index(&x, b), &w);
    }
    sums.fold()
}

/// One Q3_K row.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
pub(super) fn q3_k<const A: usize>(row: &[u8], x: [&[Block256]; A]) -> [f32; A] {
    /// Bits `2 k` and `2 k + 1` of the mask to bit 2.
    static HIGH: [[u8; 64]; 4] = [shifts(-2, -1), shifts(0, 1), shifts(2, 3), shifts(4, 5)];
    let mut sums = Sums::<A>::new();
    let blocks = row.as_chunks::<110>().0;
    for b in 0..blocks.len() {
        let block = &blocks[b];
        prefetch_after(block);
        let (low, high) = (u64_at(block, 96), u64::from(u32_at(block, 104)));
        const NIBBLES: u64 = 0x0f0f_0f0f_0f0f_0f0f;
        const PAIRS: u64 = 0x3030_3030_3030_3030;
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
        let w =
            Unpacked { codes, scales: spread_words(scales), sub_blocks: offset, factors: halves(u16_at(block, 108)) };
        sums.add::<false>(&at_index(&x, b), &w);
    }
    sums.fold()
}

/// `a | b & mask`.
#[inline]
#[target_feature(enable = "avx512f")]
fn or_masked(a: __m512i, b: __m512i, mask: __m512i) -> __m512i {
    _mm512_ternarylogic_epi32::<0xf8>(a, b, mask)
}

/// One Q6_K row.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
pub(super) fn q6_k<const A: usize>(row: &[u8], x: [&[Block256]; A]) -> [f32; A] {
    /// The pair at bit 0, 2, 4, 6 to bit 4.
    static HIGH: [[u8; 64]; 2] = [shifts(-4, -2), shifts(0, 2)];
    let mut sums = Sums::<A>::new();
    let blocks = row.as_chunks::<210>().0;
    for b in 0..blocks.len() {
        let block = &blocks[b];
        prefetch_after(block);
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
        let w =
            Unpacked { codes, scales: spread_words(scales), sub_blocks: offset, factors: halves(u16_at(block, 208)) };
        sums.add::<false>(&at_index(&x, b), &w);
    }
    sums.fold()
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
struct GridPair {
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
fn grid_pair(first: &[u8; 66], second: &[u8; 66]) -> GridPair {
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

/// 64 bytes.
#[inline]
#[target_feature(enable = "avx512f")]
fn store512(words: &mut [u64; 8], values: __m512i) {
    // SAFETY: the array is 64 writable bytes; the store has no alignment requirement.
    unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), values) }
}

/// Adds block `which` of the pair.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
fn add_grid_block<const A: usize>(lanes: &mut [__m512; A], x: &[&Block256; A], pair: &GridPair, which: usize, d: u32) {
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
    let mut whole = [_mm512_setzero_si512(); A];
    for k in 0..4 {
        let entries = _mm512_permutexvar_epi8(load512(&ENTRIES[k]), pair.entries[which]);
        let codes = _mm512_multishift_epi64_epi8(load512(&CODES), entries);
        let magnitudes = _mm512_permutexvar_epi8(codes, load512(&MAGNITUDES));
        let scales = _mm512_permutexvar_epi8(load512(&SCALES[k]), pair.scales[which]);
        let negative = pair.signs[4 * which + k];
        for a in 0..A {
            let values = load512(part::<i8, 64>(&x[a].codes, k));
            let values = _mm512_mask_sub_epi8(values, negative, _mm512_setzero_si512(), values);
            let dots = _mm512_dpbusd_epi32(_mm512_setzero_si512(), magnitudes, values);
            whole[a] = add_word_dots(whole[a], dots, scales);
        }
    }
    let d = _mm_mul_ps(halves(d), _mm_set1_ps(0.125));
    for a in 0..A {
        let factor = _mm512_broadcastss_ps(_mm_mul_ps(d, _mm_set1_ps(x[a].scale)));
        lanes[a] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[a]), factor, lanes[a]);
    }
}

/// One IQ2_XXS row.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
pub(super) fn iq2_xxs<const A: usize>(row: &[u8], x: [&[Block256]; A]) -> [f32; A] {
    let mut sums = Sums::<A>::new();
    let blocks = row.as_chunks::<66>().0;
    let last = blocks.len().saturating_sub(1);
    for b in (0..blocks.len()).step_by(2) {
        let next = last.min(b + 1);
        prefetch_after(&blocks[b]);
        prefetch_after(&blocks[next]);
        let pair = grid_pair(&blocks[b], &blocks[next]);
        add_grid_block(&mut sums.lanes, &at_index(&x, b), &pair, 0, u16_at(&blocks[b], 0));
        if next > b {
            add_grid_block(&mut sums.lanes, &at_index(&x, next), &pair, 1, u16_at(&blocks[next], 0));
        }
    }
    sums.fold()
}
