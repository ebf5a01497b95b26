//! The instruction sets: which one this machine has, and the row kernels of each.
//! Never decides a result: every level equals the scalar twins of `matmul::scalar` bit for bit.
//! Surprising fact: the level is a number, so a level forced by a test is simply capped by what the machine has.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub(super) mod rows;

use super::matmul::activations::{self, Block256, Floats, Step32};
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
    /// The same, and matrix tiles of 8-bit codes (AMX) for products with many activation rows.
    Amx,
}

impl SimdLevel {
    /// All levels, plain first.
    pub const ALL: [SimdLevel; 4] = [SimdLevel::Scalar, SimdLevel::Avx2, SimdLevel::Avx512, SimdLevel::Amx];

    /// The highest level that this machine has.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            // A level includes the ones below it.
            if avx2::is_available() && avx512::is_available() {
                return if avx512::has_tiles() { SimdLevel::Amx } else { SimdLevel::Avx512 };
            }
            if avx2::is_available() {
                return SimdLevel::Avx2;
            }
        }
        SimdLevel::Scalar
    }

    /// The name shown in reports.
    pub const fn name(self) -> &'static str {
        match self {
            SimdLevel::Scalar => "scalar",
            SimdLevel::Avx2 => "avx2",
            SimdLevel::Avx512 => "avx512",
            SimdLevel::Amx => "amx",
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
        // Plain loops: iterator adaptors may stay calls in functions of a higher instruction set than theirs.
        let rows = self.bytes.len() / self.row_bytes;
        for o in 0..rows {
            let sums = dot(&self.bytes[o * self.row_bytes..(o + 1) * self.row_bytes]);
            let at = o * self.stride + self.first;
            *self.out[at..].first_chunk_mut().expect("room for the row") = sums;
        }
    }
}

/// Fewest weight rows for which tiles pay.
const TILED_OUTPUTS_MIN: usize = 8;

/// Fewest activation rows for which tiles pay: weights are brought into their form for each call, and a tile takes as long for fewer rows
/// than 16. Measured on one core of a Xeon with 576 weight rows of 5,120: equal speed at about ten rows in blocks of 256, 24 in blocks of 32.
fn tiled_rows_min(ty: QuantType) -> usize {
    match ty.block_values() {
        256 => 12,
        32 => 24,
        _ => usize::MAX,
    }
}

/// Bytes that each thread keeps on this machine to multiply `rows` activation rows of `cols` columns with weights of `ty`.
pub(super) fn tile_bytes(ty: QuantType, cols: usize, rows: usize) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if rows >= tiled_rows_min(ty) && SimdLevel::detect() == SimdLevel::Amx {
        return avx512::tile_bytes(ty, cols, rows);
    }
    0
}

/// A level that this machine has: the proof that its functions may be called.
#[derive(Clone, Copy, Debug)]
pub(super) struct Usable(SimdLevel);

impl Usable {
    /// `level`, lowered to what the machine has.
    pub(super) fn at_most(level: SimdLevel) -> Self {
        Usable(level.min(SimdLevel::detect()))
    }

    pub(super) fn level(self) -> SimdLevel {
        self.0
    }

    /// F32, F16 or BF16 weights times `A` rows of F32.
    pub(super) fn floats<const A: usize>(self, tile: Tile, x: [&[Floats]; A]) {
        let ty = tile.ty;
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `at_most` found the features of the level on this machine.
            SimdLevel::Avx512 | SimdLevel::Amx => unsafe { avx512::floats(tile, x) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `at_most` found the features of the level on this machine.
            SimdLevel::Avx2 => unsafe { avx2::floats(tile, x) },
            _ => tile.fill(|row| x.map(|x| scalar::float_dot(ty, row, x))),
        }
    }

    /// Weights in blocks of 32 times `A` rows of 8-bit codes.
    pub(super) fn blocks32<const A: usize>(self, tile: Tile, x: [&[Step32]; A]) {
        let ty = tile.ty;
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `at_most` found the features of the level on this machine.
            SimdLevel::Avx512 | SimdLevel::Amx => unsafe { avx512::blocks32(tile, x) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `at_most` found the features of the level on this machine.
            SimdLevel::Avx2 => unsafe { avx2::blocks32(tile, x) },
            _ => tile.fill(|row| x.map(|x| scalar::dot32(ty, row, x))),
        }
    }

    /// Weights in blocks of 256 times `A` rows of 8-bit codes.
    pub(super) fn blocks256<const A: usize>(self, tile: Tile, x: [&[Block256]; A]) {
        let ty = tile.ty;
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `at_most` found the features of the level on this machine.
            SimdLevel::Avx512 | SimdLevel::Amx => unsafe { avx512::blocks256(tile, x) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `at_most` found the features of the level on this machine.
            SimdLevel::Avx2 => unsafe { avx2::blocks256(tile, x) },
            _ => tile.fill(|row| x.map(|x| scalar::dot256(ty, row, x))),
        }
    }

    /// Whether tiles are there and pay for this many activation and weight rows.
    pub(super) fn wants_tiles(self, ty: QuantType, rows: usize, outputs: usize) -> bool {
        self.0 == SimdLevel::Amx && rows >= tiled_rows_min(ty) && outputs >= TILED_OUTPUTS_MIN
    }

    /// Weights (type, bytes, bytes of a row) in blocks of 32 times rows `x(0..count)` of 8-bit codes: `out` is `[weight rows, count]`.
    pub(super) fn tiles32<'a>(
        self,
        weights: (QuantType, &[u8], usize),
        x: (&dyn Fn(usize) -> &'a [Step32], usize),
        out: &mut [f32],
    ) {
        assert_eq!(self.0, SimdLevel::Amx, "tiles belong to one level");
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `at_most` found the features of the level on this machine.
        unsafe {
            avx512::tiles32(weights, x, out)
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (weights, x, out);
    }

    /// Weights (type, bytes, bytes of a row) in blocks of 256 times rows `x(0..count)` of 8-bit codes: `out` is `[weight rows, count]`.
    pub(super) fn tiles256<'a>(
        self,
        weights: (QuantType, &[u8], usize),
        x: (&dyn Fn(usize) -> &'a [Block256], usize),
        out: &mut [f32],
    ) {
        assert_eq!(self.0, SimdLevel::Amx, "tiles belong to one level");
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `at_most` found the features of the level on this machine.
        unsafe {
            avx512::tiles256(weights, x, out)
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (weights, x, out);
    }

    /// Fills a row of codes per 32 values.
    pub(super) fn fill32(self, x: &[f32], offset: i32, row: &mut [Step32]) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `at_most` found the features of the level on this machine.
            SimdLevel::Avx512 | SimdLevel::Amx => unsafe { avx512::fill32(x, offset, row) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `at_most` found the features of the level on this machine.
            SimdLevel::Avx2 => unsafe { avx2::fill32(x, offset, row) },
            _ => activations::fill32(x, offset, row),
        }
    }

    /// Fills a row of codes per 256 values.
    pub(super) fn fill256(self, x: &[f32], row: &mut [Block256]) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `at_most` found the features of the level on this machine.
            SimdLevel::Avx512 | SimdLevel::Amx => unsafe { avx512::fill256(x, row) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `at_most` found the features of the level on this machine.
            SimdLevel::Avx2 => unsafe { avx2::fill256(x, row) },
            _ => activations::fill256(x, row),
        }
    }
}

/// Part `index` of `N` elements.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn part<T, const N: usize>(values: &[T], index: usize) -> &[T; N] {
    values[index * N..].first_chunk().expect("whole parts")
}

/// `N` bytes of a block from `at`.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn bytes_at<const N: usize, const B: usize>(block: &[u8; B], at: usize) -> &[u8; N] {
    block[at..].first_chunk().expect("inside the block")
}
