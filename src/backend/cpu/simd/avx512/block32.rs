//! Q8_0 and MXFP4 rows, 16 blocks a step, summed over lanes together. Codes are shifted to be unsigned, as the byte dot product wants one
//! unsigned side; the activations bring the sums that undo the shift. Never converts factors one by one.
//! Surprising fact: in 16 blocks of 34 bytes the factors are words 0, 17, .., 255, four in each 128 bytes.

use super::*;

/// Blocks of a step.
const STEP: usize = 16;
const Q8_STEP: usize = STEP * 34;
const MX_STEP: usize = STEP * 17;

/// Words of the factors in each 128 bytes of a Q8_0 step, at the places where four of the sixteen belong.
static Q8_FACTORS: [[u16; 32]; 4] = {
    let mut table = [[0; 32]; 4];
    let mut block = 0;
    while block < 16 {
        table[block / 4][block] = (17 * block - 64 * (block / 4)) as u16;
        block += 1;
    }
    table
};

/// Bytes of the exponents in each 128 bytes of an MXFP4 step, at the low byte of a lane.
static MX_EXPONENTS: [[u8; 64]; 2] = {
    let mut table = [[0; 64]; 2];
    let mut block = 0;
    while block < 16 {
        table[block / 8][4 * block] = (17 * block - 128 * (block / 8)) as u8;
        block += 1;
    }
    table
};

/// Bytes of the codes of two MXFP4 blocks, each twice: once for low nibbles, once for high ones. The second table is
/// for the last pair of a step, read 30 bytes early so as not to read past it.
static MX_CODES: [[u8; 64]; 2] = {
    let mut table = [[0; 64]; 2];
    let mut at = 0;
    while at < 64 {
        let byte = at / 32 * 17 + 1 + at % 16;
        (table[0][at], table[1][at]) = (byte as u8, byte as u8 + 30);
        at += 1;
    }
    table
};

/// Twice the E2M1 value of each nibble, plus 12; whatever the two bits above the nibble are.
static MX_VALUES: [u8; 64] = {
    let mut table = [0; 64];
    let mut at = 0;
    while at < 64 {
        table[at] = (crate::quant::mxfp4::CODES[at % 16] + 12) as u8;
        at += 1;
    }
    table
};

/// Adds a step: 64 unsigned codes a register, the factors of the blocks in order.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
fn add_step<const A: usize>(sums: &mut [__m256; A], x: &[&Step32; A], codes: &[__m512i; 8], factors: __m512) {
    for a in 0..A {
        let mut pairs = [_mm512_setzero_si512(); 8];
        for p in 0..8 {
            pairs[p] = _mm512_dpbusd_epi32(pairs[p], codes[p], load512(part::<i8, 64>(&x[a].codes, p)));
        }
        let whole = _mm512_add_epi32(step_totals(pairs), load512(&x[a].offsets));
        let whole = _mm512_cvtepi32_ps(whole);
        let factors = _mm512_mul_ps(factors, _mm512_castsi512_ps(load512(&x[a].scales)));
        let (low, high) = (_mm512_castps512_ps256(whole), _mm512_extractf32x8_ps::<1>(whole));
        sums[a] = _mm256_fmadd_ps(low, _mm512_castps512_ps256(factors), sums[a]);
        sums[a] = _mm256_fmadd_ps(high, _mm512_extractf32x8_ps::<1>(factors), sums[a]);
    }
}

/// The sums of sixteen half registers, in order.
#[inline]
#[target_feature(enable = "avx512f")]
fn step_totals([a, b, c, d, e, f, g, h]: [__m512i; 8]) -> __m512i {
    /// Even blocks before odd ones, for each eight.
    static ORDER: [i32; 16] = [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15];
    let (front, back) = (quarter_totals([a, b, c, d]), quarter_totals([e, f, g, h]));
    let low = _mm512_shuffle_i32x4::<0x88>(front, back);
    let high = _mm512_shuffle_i32x4::<0xdd>(front, back);
    _mm512_permutexvar_epi32(load512(&ORDER), _mm512_add_epi32(low, high))
}

/// One Q8_0 row times `A` activation rows.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
pub(super) fn q8_0<const A: usize>(row: &[u8], x: [&[Step32]; A]) -> [f32; A] {
    let mut sums = [_mm256_setzero_ps(); A];
    let (steps, rest) = row.as_chunks::<Q8_STEP>();
    let mut padded = [0; Q8_STEP];
    for index in 0..row.len().div_ceil(Q8_STEP) {
        let bytes = step_or_rest(steps, rest, index, &mut padded);
        prefetch_after(bytes);
        let x = at_index(&x, index);
        let mut codes = [_mm512_setzero_si512(); 8];
        for pair in 0..8 {
            let low = load256(bytes_at::<32, Q8_STEP>(bytes, 68 * pair + 2));
            let high = load256(bytes_at::<32, Q8_STEP>(bytes, 68 * pair + 36));
            let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
            codes[pair] = _mm512_xor_si512(both, _mm512_set1_epi8(-128));
        }
        add_step(&mut sums, &x, &codes, q8_factors(bytes));
    }
    fold(sums)
}

/// The sixteen factors of a step.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
fn q8_factors(bytes: &[u8; Q8_STEP]) -> __m512 {
    let mut factors = _mm512_setzero_si512();
    for quarter in 0..4 {
        let low = load512_opaque(bytes_at::<64, Q8_STEP>(bytes, 128 * quarter));
        let high = load512_opaque(bytes_at::<64, Q8_STEP>(bytes, 128 * quarter + 64));
        let mask = 0xf << (4 * quarter);
        factors =
            _mm512_or_si512(factors, _mm512_maskz_permutex2var_epi16(mask, low, load512(&Q8_FACTORS[quarter]), high));
    }
    _mm512_cvtph_ps(_mm512_castsi512_si256(factors))
}

/// One MXFP4 row times `A` activation rows.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
pub(super) fn mxfp4<const A: usize>(row: &[u8], x: [&[Step32]; A]) -> [f32; A] {
    let mut sums = [_mm256_setzero_ps(); A];
    // Words of the upper 16 bytes of each half are shifted so that their high nibbles come down.
    let shifts = _mm512_set_epi64(
        0x0004_0004_0004_0004,
        0x0004_0004_0004_0004,
        0,
        0,
        0x0004_0004_0004_0004,
        0x0004_0004_0004_0004,
        0,
        0,
    );
    let values = load512(&MX_VALUES);
    let (steps, rest) = row.as_chunks::<MX_STEP>();
    let mut padded = [0; MX_STEP];
    for index in 0..row.len().div_ceil(MX_STEP) {
        let bytes = step_or_rest(steps, rest, index, &mut padded);
        prefetch_after(bytes);
        let x = at_index(&x, index);
        let mut codes = [_mm512_setzero_si512(); 8];
        for pair in 0..8 {
            let (at, table) = if pair < 7 { (34 * pair, 0) } else { (MX_STEP - 64, 1) };
            let window = load512(bytes_at::<64, MX_STEP>(bytes, at));
            let nibbles = _mm512_srlv_epi16(_mm512_permutexvar_epi8(load512(&MX_CODES[table]), window), shifts);
            codes[pair] = _mm512_permutexvar_epi8(nibbles, values);
        }
        add_step(&mut sums, &x, &codes, mx_factors(bytes));
    }
    fold(sums)
}

/// The sixteen factors 2^(exponent - 128) of a step.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
fn mx_factors(bytes: &[u8; MX_STEP]) -> __m512 {
    let window = |at| load512_opaque(bytes_at::<64, MX_STEP>(bytes, at));
    let low = _mm512_maskz_permutex2var_epi8(0x0000_0000_1111_1111, window(0), load512(&MX_EXPONENTS[0]), window(64));
    let high =
        _mm512_maskz_permutex2var_epi8(0x1111_1111_0000_0000, window(128), load512(&MX_EXPONENTS[1]), window(192));
    let exponents = _mm512_or_si512(low, high);
    let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(exponents, _mm512_set1_epi32(1)));
    // 2^-128 and 2^-127 are subnormal.
    let subnormal = _mm512_sllv_epi32(_mm512_set1_epi32(1 << 21), exponents);
    let is_subnormal = _mm512_cmplt_epi32_mask(exponents, _mm512_set1_epi32(2));
    _mm512_castsi512_ps(_mm512_mask_blend_epi32(is_subnormal, normal, subnormal))
}

#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn fold<const A: usize>(sums: [__m256; A]) -> [f32; A] {
    let mut out = [0.0; A];
    for a in 0..A {
        out[a] = reduce8(sums[a]);
    }
    out
}
