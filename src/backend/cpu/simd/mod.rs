//! The instruction sets: which one this machine has, and the row kernels of each.
//! Never decides a result: every level equals the scalar twins of `matmul::scalar` bit for bit.
//! Surprising fact: the level is a number, so a level forced by a test is simply capped by what the machine has.

use super::matmul::activations::{self, Row32, Row256};
use super::matmul::scalar;
use crate::quant::QuantType;

/// Instruction sets, plain first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum SimdLevel {
    /// The twins that define the results.
    Scalar,
    /// AVX2, FMA, F16C.
    Avx2,
    /// AVX-512 F, BW, DQ, VL, VBMI, VNNI, and GFNI.
    Avx512,
}

impl SimdLevel {
    /// All levels, plain first.
    pub const ALL: [SimdLevel; 3] = [SimdLevel::Scalar, SimdLevel::Avx2, SimdLevel::Avx512];

    /// The highest level that this machine has.
    pub fn detect() -> Self {
        SimdLevel::Scalar
    }

    /// The name shown in reports.
    pub const fn name(self) -> &'static str {
        match self {
            SimdLevel::Scalar => "scalar",
            SimdLevel::Avx2 => "avx2",
            SimdLevel::Avx512 => "avx512",
        }
    }
}

/// Weight rows and the place of their results: weight row `o` times activation row `a` of the call goes to
/// `out[o * stride + first + a]`.
pub(super) struct Tile<'a> {
    pub ty: QuantType,
    pub bytes: &'a [u8],
    pub row_bytes: usize,
    pub out: &'a mut [f32],
    pub stride: usize,
    pub first: usize,
}

impl Tile<'_> {
    /// Stores what `dot` makes of each weight row.
    #[inline(always)]
    fn fill<const A: usize>(self, mut dot: impl FnMut(&[u8]) -> [f32; A]) {
        let rows = self.bytes.chunks_exact(self.row_bytes);
        for (row, out) in rows.zip(self.out.chunks_exact_mut(self.stride)) {
            out[self.first..self.first + A].copy_from_slice(&dot(row));
        }
    }
}

/// F32, F16 or BF16 weights times `A` rows of F32.
pub(super) fn floats<const A: usize>(level: SimdLevel, tile: Tile, x: [&[f32]; A]) {
    let _ = level;
    let ty = tile.ty;
    tile.fill(|row| x.map(|x| scalar::float_dot(ty, row, x)));
}

/// Weights in blocks of 32 times `A` rows of 8-bit codes.
pub(super) fn blocks32<const A: usize>(level: SimdLevel, tile: Tile, x: [Row32; A]) {
    let _ = level;
    let ty = tile.ty;
    tile.fill(|row| x.map(|x| scalar::dot32(ty, row, x)));
}

/// Weights in blocks of 256 times `A` rows of 8-bit codes.
pub(super) fn blocks256<const A: usize>(level: SimdLevel, tile: Tile, x: [Row256; A]) {
    let _ = level;
    let ty = tile.ty;
    tile.fill(|row| x.map(|x| scalar::dot256(ty, row, x)));
}

/// Fills a row of codes per 32 values.
pub(super) fn fill32(
    level: SimdLevel,
    x: &[f32],
    offset: i32,
    codes: &mut [i8],
    scales: &mut [f32],
    offsets: &mut [i32],
) {
    let _ = level;
    activations::fill32(x, offset, codes, scales, offsets);
}

/// Fills a row of codes per 256 values.
pub(super) fn fill256(level: SimdLevel, x: &[f32], codes: &mut [i8], scales: &mut [f32], sums: &mut [i16]) {
    let _ = level;
    activations::fill256(x, codes, scales, sums);
}
