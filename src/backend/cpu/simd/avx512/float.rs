//! Rows of plain floats. Never rounds a weight: F16 and BF16 widen exactly.
//! Surprising fact: 32 running sums are two registers, the least that hides half of the latency of FMA for one row.

use super::*;

/// 32 values of `B` bytes as two registers.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn f32_values(bytes: &[u8; 128]) -> [__m512; 2] {
    [_mm512_castsi512_ps(load512(part::<u8, 64>(bytes, 0))), _mm512_castsi512_ps(load512(part::<u8, 64>(bytes, 1)))]
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn f16_values(bytes: &[u8; 64]) -> [__m512; 2] {
    [_mm512_cvtph_ps(load256(part::<u8, 32>(bytes, 0))), _mm512_cvtph_ps(load256(part::<u8, 32>(bytes, 1)))]
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn bf16_values(bytes: &[u8; 64]) -> [__m512; 2] {
    let widen = |half| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)));
    [widen(load256(part::<u8, 32>(bytes, 0))), widen(load256(part::<u8, 32>(bytes, 1)))]
}

/// One weight row, `B` bytes per 32 values, times `A` activation rows.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
pub(super) fn dot<const A: usize, const B: usize>(
    row: &[u8],
    x: [&[Floats]; A],
    values: impl Fn(&[u8; B]) -> [__m512; 2],
) -> [f32; A] {
    let mut lanes = [[_mm512_setzero_ps(); 2]; A];
    let (steps, rest) = row.as_chunks::<B>();
    let mut padded = [0; B];
    for index in 0..row.len().div_ceil(B) {
        let bytes = step_or_rest(steps, rest, index, &mut padded);
        prefetch_after(bytes);
        let w = values(bytes);
        for a in 0..A {
            let x = f32_values(bytemuck::cast_ref(&x[a][index].0));
            lanes[a][0] = _mm512_fmadd_ps(w[0], x[0], lanes[a][0]);
            lanes[a][1] = _mm512_fmadd_ps(w[1], x[1], lanes[a][1]);
        }
    }
    let mut out = [0.0; A];
    for a in 0..A {
        let sixteen = _mm512_add_ps(lanes[a][0], lanes[a][1]);
        out[a] = reduce8(_mm256_add_ps(_mm512_castps512_ps256(sixteen), _mm512_extractf32x8_ps::<1>(sixteen)));
    }
    out
}
