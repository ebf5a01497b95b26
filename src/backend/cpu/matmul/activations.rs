//! Rows of activations in the form that a weight type multiplies with: F32, or 8-bit codes per 32 or 256 values.
//! Never mixes values of two rows. Surprising fact: a block that holds a NaN or an infinity gets the scale NaN, so
//! every output of that row is NaN instead of a number that looks fine.

use super::{Arithmetic, ProductShape};
use crate::backend::cpu::pool::Pool;
use crate::backend::cpu::simd::Usable;
use crate::quant::QuantType;

/// Smallest largest magnitude of a block that is kept; below, 127 / amax would overflow and the block counts as zero.
const AMAX_MIN: f32 = 1.0e-36;
/// Adding and subtracting 1.5 * 2^23 rounds to the nearest whole number, ties to even.
const ROUNDER: f32 = 12_582_912.0;
/// Values that make a piece worth handing to another thread.
const PARALLEL_VALUES: usize = 1 << 16;

/// What a row of activations consists of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Form {
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
    fn of(mode: Arithmetic, ty: QuantType) -> Form {
        match (mode, ty) {
            (Arithmetic::Quality, _) | (_, QuantType::F32 | QuantType::F16 | QuantType::BF16) => Form::Float,
            (_, QuantType::Q8_0) => Form::Block32 { offset: 128 },
            (_, QuantType::MXFP4) => Form::Block32 { offset: 12 },
            (_, QuantType::Q2_K | QuantType::Q3_K | QuantType::Q4_K | QuantType::Q6_K | QuantType::IQ2_XXS) => {
                Form::Block256
            }
            (_, QuantType::I8 | QuantType::I32) => panic!("{ty} rows are no weights"),
        }
    }

    /// Groups of values that a row of `cols` becomes.
    fn groups(self, cols: usize) -> usize {
        match self {
            Form::Float => cols.div_ceil(32),
            Form::Block32 { .. } => cols.div_ceil(512),
            Form::Block256 => cols / 256,
        }
    }
}

/// 32 plain values; the last ones of a row may be padding of zeros.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Floats(pub [f32; 32]);

/// 16 blocks of 32 values; the last ones of a row may be padding of zeros.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Step32 {
    /// Codes, -127..=127.
    pub codes: [i8; 512],
    /// For each block, minus the sum of its codes times the offset.
    pub offsets: [i32; 16],
    /// One a block.
    pub scales: [f32; 16],
}

/// A block of 256 values.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Block256 {
    /// Codes, -127..=127.
    pub codes: [i8; 256],
    /// Sums of 16 codes.
    pub sums: [i16; 16],
    /// Those of the four blocks among which this one is number `b % 4`; blocks that the row does not have count as 0.
    pub scales: [f32; 4],
}

impl Floats {
    const ZERO: Self = Floats([0.0; 32]);
}

impl Step32 {
    const ZERO: Self = Step32 { codes: [0; 512], offsets: [0; 16], scales: [0.0; 16] };
}

impl Block256 {
    const ZERO: Self = Block256 { codes: [0; 256], sums: [0; 16], scales: [0.0; 4] };
}

/// Rows of activations prepared for one weight type; reuse one to keep its memory.
#[derive(Default)]
pub struct Activations {
    form: Form,
    rows: usize,
    cols: usize,
    /// Only the one that `form` names is in use; `[rows, groups of a row]`.
    floats: Vec<Floats>,
    steps: Vec<Step32>,
    blocks: Vec<Block256>,
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
        ty.is_numeric() && (self.form == Form::Float || self.form == Form::of(Arithmetic::Fast, ty))
    }

    /// Whether weights of `ty` would get these very rows in `mode`; rows that merely suit may be finer than that.
    pub(crate) fn is_form_for(&self, mode: Arithmetic, ty: QuantType) -> bool {
        self.form == Form::of(mode, ty)
    }

    pub(crate) fn is_float(&self) -> bool {
        self.form == Form::Float
    }

    pub(crate) fn float_row(&self, row: usize) -> &[Floats] {
        group(&self.floats, row, self.cols.div_ceil(32))
    }

    pub(crate) fn row32(&self, row: usize) -> &[Step32] {
        group(&self.steps, row, self.cols.div_ceil(512))
    }

    pub(crate) fn row256(&self, row: usize) -> &[Block256] {
        group(&self.blocks, row, self.cols.div_ceil(256))
    }

    /// Takes a new shape. What the rows hold is undefined until they are filled.
    pub(super) fn reset(&mut self, mode: Arithmetic, ty: QuantType, rows: usize, cols: usize) {
        assert!(cols > 0 && cols.is_multiple_of(ty.block_values()), "{cols} columns are not whole {ty} blocks");
        (self.form, self.rows, self.cols) = (Form::of(mode, ty), rows, cols);
        let len = rows * self.form.groups(cols);
        match self.form {
            Form::Float => fit(&mut self.floats, len, Floats::ZERO),
            Form::Block32 { .. } => fit(&mut self.steps, len, Step32::ZERO),
            Form::Block256 => fit(&mut self.blocks, len, Block256::ZERO),
        }
    }

    /// Empty rows with room for the activations of each of `products`.
    pub(super) fn for_products(mode: Arithmetic, products: &[ProductShape]) -> Self {
        let [floats, steps, blocks] = groups_max(mode, products);
        Self {
            floats: Vec::with_capacity(floats),
            steps: Vec::with_capacity(steps),
            blocks: Vec::with_capacity(blocks),
            ..Self::default()
        }
    }

    /// Bytes of the room of [`Self::for_products`].
    pub(super) fn bytes_for(mode: Arithmetic, products: &[ProductShape]) -> u64 {
        let [floats, steps, blocks] = groups_max(mode, products);
        (floats * size_of::<Floats>() + steps * size_of::<Step32>() + blocks * size_of::<Block256>()) as u64
    }

    /// Fills the rows from `x`, `[rows, cols]`, on the pool's threads if one is given.
    pub(super) fn fill(&mut self, pool: Option<&Pool>, level: Usable, x: &[f32]) {
        assert_eq!(x.len(), self.rows * self.cols, "{} rows of {} activations", self.rows, self.cols);
        let (cols, len) = (self.cols, self.form.groups(self.cols));
        match self.form {
            Form::Float => fill_rows(pool, x, cols, &mut self.floats, len, fill_floats),
            Form::Block32 { offset } => {
                let fill = |x: &[f32], row: &mut [Step32]| level.fill32(x, offset, row);
                fill_rows(pool, x, cols, &mut self.steps, len, fill);
            }
            Form::Block256 => {
                let fill = |x: &[f32], row: &mut [Block256]| level.fill256(x, row);
                fill_rows(pool, x, cols, &mut self.blocks, len, fill);
            }
        }
    }
}

/// Most groups of each form, in the order of the fields, that one of `products` needs.
fn groups_max(mode: Arithmetic, products: &[ProductShape]) -> [usize; 3] {
    let mut most = [0; 3];
    for product in products {
        let form = Form::of(mode, product.ty);
        let most = match form {
            Form::Float => &mut most[0],
            Form::Block32 { .. } => &mut most[1],
            Form::Block256 => &mut most[2],
        };
        *most = (*most).max(product.rows * product.groups * form.groups(product.cols));
    }
    most
}

/// Gives `groups` the length `len` without ever holding an old copy beside a new one.
fn fit<T: Copy>(groups: &mut Vec<T>, len: usize, zero: T) {
    if groups.capacity() < len {
        *groups = Vec::new();
        groups.reserve_exact(len);
    }
    groups.resize(len, zero);
}

fn group<T>(all: &[T], row: usize, len: usize) -> &[T] {
    &all[row * len..][..len]
}

/// Calls `fill` on each row of `x` and the `len` groups that it becomes.
fn fill_rows<T: Send>(
    pool: Option<&Pool>,
    x: &[f32],
    cols: usize,
    groups: &mut [T],
    len: usize,
    fill: impl Fn(&[f32], &mut [T]) + Sync,
) {
    let run = |first: usize, groups: &mut [T]| {
        let x = x[first * cols..].chunks_exact(cols);
        x.zip(groups.chunks_exact_mut(len)).for_each(|(x, row)| fill(x, row));
    };
    match pool {
        Some(pool) => pool.split_mut(groups, len, PARALLEL_VALUES.div_ceil(cols), run),
        None => run(0, groups),
    }
}

fn fill_floats(x: &[f32], row: &mut [Floats]) {
    for (x, floats) in x.chunks(32).zip(row) {
        floats.0[..x.len()].copy_from_slice(x);
        floats.0[x.len()..].fill(0.0);
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
pub(crate) fn fill32(x: &[f32], offset: i32, row: &mut [Step32]) {
    for (x, step) in x.chunks(512).zip(row) {
        if x.len() < 512 {
            *step = Step32::ZERO;
        }
        let blocks = x.as_chunks::<32>().0.iter().zip(step.codes.as_chunks_mut::<32>().0);
        for ((x, codes), scale) in blocks.zip(&mut step.scales) {
            *scale = encode(x, codes);
        }
        for (sum, codes) in step.offsets.iter_mut().zip(step.codes.as_chunks::<32>().0) {
            *sum = -offset * codes.iter().map(|&code| i32::from(code)).sum::<i32>();
        }
    }
}

/// One row in [`Form::Block256`].
#[inline(always)]
pub(crate) fn fill256(x: &[f32], row: &mut [Block256]) {
    for (x, quad) in x.chunks(4 * 256).zip(row.chunks_mut(4)) {
        let mut scales = [0.0; 4];
        for ((x, block), scale) in x.as_chunks::<256>().0.iter().zip(quad.iter_mut()).zip(&mut scales) {
            *scale = encode(x, &mut block.codes);
            for (sum, part) in block.sums.iter_mut().zip(block.codes.as_chunks::<16>().0) {
                *sum = part.iter().map(|&code| i16::from(code)).sum();
            }
        }
        quad.iter_mut().for_each(|block| block.scales = scales);
    }
}
