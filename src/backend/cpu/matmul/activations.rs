//! Rows of activations in the form that a weight type multiplies with: F32, or 8-bit codes per 32 or 256 values.
//! Never mixes values of two rows. Surprising fact: a block that holds a NaN or an infinity gets the scale NaN, so
//! every output of that row is NaN instead of a number that looks fine.

use super::Arithmetic;
use crate::backend::cpu::pool::Pool;
use crate::backend::cpu::simd::{self, SimdLevel};
use crate::quant::QuantType;
use rayon::prelude::*;

/// Smallest largest magnitude of a block that is kept; below, 127 / amax would overflow and the block counts as zero.
const AMAX_MIN: f32 = 1.0e-36;
/// Adding and subtracting 1.5 * 2^23 rounds to the nearest whole number, ties to even.
const ROUNDER: f32 = 12_582_912.0;
/// Rows are filled on several threads from this many values on.
const PARALLEL_VALUES: usize = 1 << 16;

/// What a row of activations consists of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Form {
    /// Plain values.
    #[default]
    Float,
    /// Per 32 values a scale and codes; `offset` is what the weight codes are shifted by to be unsigned.
    Block32 { offset: i32 },
    /// Per 256 values a scale and codes, and a sum of codes per 16.
    Block256,
}

impl Form {
    /// The form that weights of `ty` need.
    pub(crate) fn of(mode: Arithmetic, ty: QuantType) -> Form {
        match (mode, ty) {
            (Arithmetic::Quality, _) | (_, QuantType::F32 | QuantType::F16 | QuantType::BF16) => Form::Float,
            (_, QuantType::Q8_0) => Form::Block32 { offset: 128 },
            (_, QuantType::MXFP4) => Form::Block32 { offset: 12 },
            (_, QuantType::Q2_K | QuantType::Q3_K | QuantType::Q4_K | QuantType::Q6_K | QuantType::IQ2_XXS) => {
                Form::Block256
            }
            (_, QuantType::I8) => panic!("I8 rows are bytes, not weights"),
        }
    }

    /// Rows are padded with zeros to a multiple of this many values, so that kernels may read whole steps.
    fn padding(self) -> usize {
        match self {
            Form::Float => 32,
            Form::Block32 { .. } => 512,
            Form::Block256 => 256,
        }
    }
}

/// A row in [`Form::Block32`]; padded.
#[derive(Clone, Copy)]
pub(crate) struct Row32<'a> {
    /// Codes, -127..=127.
    pub codes: &'a [i8],
    /// One a block.
    pub scales: &'a [f32],
    /// For each four codes, minus their sum times the offset.
    pub offsets: &'a [i32],
}

/// A row in [`Form::Block256`].
#[derive(Clone, Copy)]
pub(crate) struct Row256<'a> {
    /// Codes, -127..=127.
    pub codes: &'a [i8],
    /// One a block.
    pub scales: &'a [f32],
    /// Sums of 16 codes.
    pub sums: &'a [i16],
}

/// Rows of activations prepared for one weight type; reuse one to keep its memory.
#[derive(Default)]
pub struct Activations {
    form: Form,
    rows: usize,
    cols: usize,
    stride: usize,
    floats: Vec<f32>,
    codes: Vec<i8>,
    scales: Vec<f32>,
    offsets: Vec<i32>,
    sums: Vec<i16>,
}

impl Activations {
    /// Number of rows held.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Values of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Whether products with weights of `ty` can use these rows.
    pub fn suits(&self, ty: QuantType) -> bool {
        ty != QuantType::I8 && (self.form == Form::Float || self.form == Form::of(Arithmetic::Fast, ty))
    }

    pub(crate) fn is_float(&self) -> bool {
        self.form == Form::Float
    }

    pub(crate) fn float_row(&self, row: usize) -> &[f32] {
        &self.floats[row * self.stride..][..self.stride]
    }

    pub(crate) fn row32(&self, row: usize) -> Row32<'_> {
        let stride = self.stride;
        Row32 {
            codes: &self.codes[row * stride..][..stride],
            scales: &self.scales[row * (stride / 32)..][..stride / 32],
            offsets: &self.offsets[row * (stride / 4)..][..stride / 4],
        }
    }

    pub(crate) fn row256(&self, row: usize) -> Row256<'_> {
        let stride = self.stride;
        Row256 {
            codes: &self.codes[row * stride..][..stride],
            scales: &self.scales[row * (stride / 256)..][..stride / 256],
            sums: &self.sums[row * (stride / 16)..][..stride / 16],
        }
    }

    pub(super) fn reset(&mut self, mode: Arithmetic, ty: QuantType, rows: usize, cols: usize) {
        assert!(cols > 0 && cols.is_multiple_of(ty.block_values()), "{cols} columns are not whole {ty} blocks");
        let form = Form::of(mode, ty);
        let stride = cols.next_multiple_of(form.padding());
        if (form, stride, cols) != (self.form, self.stride, self.cols) {
            // Padding of the former shape would not be where this one expects zeros.
            let Self { floats, codes, scales, offsets, sums, .. } = self;
            floats.clear();
            codes.clear();
            scales.clear();
            offsets.clear();
            sums.clear();
        }
        (self.form, self.rows, self.cols, self.stride) = (form, rows, cols, stride);
        let values = rows * stride;
        match form {
            Form::Float => self.floats.resize(values, 0.0),
            Form::Block32 { .. } => {
                self.codes.resize(values, 0);
                self.scales.resize(values / 32, 0.0);
                self.offsets.resize(values / 4, 0);
            }
            Form::Block256 => {
                self.codes.resize(values, 0);
                self.scales.resize(values / 256, 0.0);
                self.sums.resize(values / 16, 0);
            }
        }
    }

    pub(super) fn fill(&mut self, level: SimdLevel, x: &[f32]) {
        assert_eq!(x.len(), self.rows * self.cols, "{} rows of {} activations", self.rows, self.cols);
        let (form, stride) = (self.form, self.stride);
        let x = x.chunks_exact(self.cols);
        match form {
            Form::Float => {
                let rows = self.floats.chunks_exact_mut(stride);
                x.zip(rows).for_each(|(x, row)| row[..x.len()].copy_from_slice(x));
            }
            Form::Block32 { offset } => {
                let codes = self.codes.chunks_exact_mut(stride);
                let scales = self.scales.chunks_exact_mut(stride / 32);
                let offsets = self.offsets.chunks_exact_mut(stride / 4);
                x.zip(codes).zip(scales.zip(offsets)).for_each(|((x, codes), (scales, offsets))| {
                    simd::fill32(level, x, offset, codes, scales, offsets);
                });
            }
            Form::Block256 => {
                let codes = self.codes.chunks_exact_mut(stride);
                let scales = self.scales.chunks_exact_mut(stride / 256);
                let sums = self.sums.chunks_exact_mut(stride / 16);
                x.zip(codes).zip(scales.zip(sums)).for_each(|((x, codes), (scales, sums))| {
                    simd::fill256(level, x, codes, scales, sums);
                });
            }
        }
    }

    pub(super) fn fill_on(&mut self, pool: &Pool, level: SimdLevel, x: &[f32]) {
        if pool.threads() == 1 || self.rows < 2 || x.len() < PARALLEL_VALUES {
            return self.fill(level, x);
        }
        assert_eq!(x.len(), self.rows * self.cols, "{} rows of {} activations", self.rows, self.cols);
        let (form, stride) = (self.form, self.stride);
        let x = x.par_chunks_exact(self.cols);
        pool.run(|| match form {
            Form::Float => {
                let rows = self.floats.par_chunks_exact_mut(stride);
                x.zip(rows).for_each(|(x, row)| row[..x.len()].copy_from_slice(x));
            }
            Form::Block32 { offset } => {
                let codes = self.codes.par_chunks_exact_mut(stride);
                let scales = self.scales.par_chunks_exact_mut(stride / 32);
                let offsets = self.offsets.par_chunks_exact_mut(stride / 4);
                x.zip(codes).zip(scales.zip(offsets)).for_each(|((x, codes), (scales, offsets))| {
                    simd::fill32(level, x, offset, codes, scales, offsets);
                });
            }
            Form::Block256 => {
                let codes = self.codes.par_chunks_exact_mut(stride);
                let scales = self.scales.par_chunks_exact_mut(stride / 256);
                let sums = self.sums.par_chunks_exact_mut(stride / 16);
                x.zip(codes).zip(scales.zip(sums)).for_each(|((x, codes), (scales, sums))| {
                    simd::fill256(level, x, codes, scales, sums);
                });
            }
        });
    }
}

/// Codes of one block; returns its scale, amax / 127. Only plain arithmetic, so every instruction set that compiles
/// it gives the same bits.
#[inline(always)]
fn encode<const N: usize>(x: &[f32; N], codes: &mut [i8; N]) -> f32 {
    // As whole numbers, magnitudes order like floats, and NaN and infinity come out above every number.
    let amax_bits = x.iter().fold(0, |amax, value| (value.to_bits() & 0x7fff_ffff).max(amax));
    let amax = f32::from_bits(amax_bits);
    if !amax.is_finite() || amax < AMAX_MIN {
        codes.fill(0);
        return if amax.is_finite() { 0.0 } else { f32::NAN };
    }
    let inverse = 127.0 / amax;
    for (code, value) in codes.iter_mut().zip(x) {
        let rounded = (value * inverse + ROUNDER).to_bits();
        *code = rounded.wrapping_sub(ROUNDER.to_bits()) as i8;
    }
    amax / 127.0
}

/// One row in [`Form::Block32`].
#[inline(always)]
pub(crate) fn fill32(x: &[f32], offset: i32, codes: &mut [i8], scales: &mut [f32], offsets: &mut [i32]) {
    let blocks = x.as_chunks::<32>().0.iter().zip(codes.as_chunks_mut::<32>().0);
    for ((x, codes), (scale, offsets)) in blocks.zip(scales.iter_mut().zip(offsets.as_chunks_mut::<8>().0)) {
        *scale = encode(x, codes);
        for (sum, quad) in offsets.iter_mut().zip(codes.as_chunks::<4>().0) {
            *sum = -offset * quad.iter().map(|&code| i32::from(code)).sum::<i32>();
        }
    }
}

/// One row in [`Form::Block256`].
#[inline(always)]
pub(crate) fn fill256(x: &[f32], codes: &mut [i8], scales: &mut [f32], sums: &mut [i16]) {
    let blocks = x.as_chunks::<256>().0.iter().zip(codes.as_chunks_mut::<256>().0);
    for ((x, codes), (scale, sums)) in blocks.zip(scales.iter_mut().zip(sums.as_chunks_mut::<16>().0)) {
        *scale = encode(x, codes);
        for (sum, part) in sums.iter_mut().zip(codes.as_chunks::<16>().0) {
            *sum = part.iter().map(|&code| i16::from(code)).sum();
        }
    }
}
