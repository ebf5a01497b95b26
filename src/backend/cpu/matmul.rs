//! Matrix-vector and matrix-matrix products over weights in their stored type.
//! Never dequantises a whole matrix. Surprising fact: sums run in a fixed order of 16 lanes on every instruction set,
//! so scalar, AVX2 and AVX-512 give the same bits.

use crate::quant::QuantType;

/// A borrowed weight matrix: `rows` outputs of `cols` inputs each, row-major in blocks of `ty`.
#[derive(Clone, Copy)]
pub struct MatView<'a> {
    pub ty: QuantType,
    pub rows: usize,
    pub cols: usize,
    pub bytes: &'a [u8],
}

/// How activations enter a product with quantised weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arithmetic {
    /// F32 activations: what golden values are compared with.
    Quality,
    /// Activations rounded to 8 bits per block, integer dots.
    Fast,
}
