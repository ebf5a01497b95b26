//! Matrix-vector and matrix-matrix products over weights in their stored type.
//! Never dequantises a whole matrix. Surprising fact: sums run in a fixed order of lanes on every instruction set,
//! so scalar, AVX2, AVX-512 and AMX give the same bits; `scalar` is where that order is written down.

pub(crate) mod activations;
mod dispatch;
pub(crate) mod scalar;

pub use activations::Activations;

use super::pool::Pool;
use super::simd::{self, SimdLevel, Usable};
use crate::quant::QuantType;
use std::ops::Range;

/// Below this many multiply-adds a product runs on the calling thread: handing half of it to another thread takes
/// some microseconds, in which one core does about this much.
const INLINE_PRODUCTS: usize = 1 << 18;

/// A borrowed weight matrix: `rows` outputs of `cols` inputs each, row-major in blocks of `ty`.
#[derive(Clone, Copy)]
pub struct MatView<'a> {
    pub ty: QuantType,
    pub rows: usize,
    pub cols: usize,
    /// Exactly the rows, at any address.
    pub bytes: &'a [u8],
}

impl<'a> MatView<'a> {
    /// Bytes of one row. Panics if `cols` is not whole blocks of the type: loaders check that first.
    pub fn row_bytes(&self) -> usize {
        let bytes = self.ty.row_bytes(self.cols as u64);
        bytes.unwrap_or_else(|| panic!("{} columns are not whole {} blocks", self.cols, self.ty)) as usize
    }

    /// The same weights, rows `range` only.
    pub fn rows_of(&self, range: Range<usize>) -> MatView<'a> {
        let row_bytes = self.row_bytes();
        let bytes = &self.bytes[range.start * row_bytes..range.end * row_bytes];
        MatView { ty: self.ty, rows: range.len(), cols: self.cols, bytes }
    }

    fn check(&self) {
        assert_eq!(self.bytes.len(), self.rows * self.row_bytes(), "{} x {} {} weights", self.rows, self.cols, self.ty);
    }
}

/// How activations enter a product with quantised weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arithmetic {
    /// F32 activations: what golden values are compared with.
    Quality,
    /// Activations rounded to 8 bits per block, integer dots.
    Fast,
}

/// Which activation rows a product takes.
#[derive(Clone, Copy)]
enum Picks<'a> {
    Stepped { first: usize, step: usize, count: usize },
    List(&'a [u32]),
}

impl Picks<'_> {
    fn first(count: usize) -> Self {
        Picks::Stepped { first: 0, step: 1, count }
    }

    fn len(&self) -> usize {
        match self {
            Picks::Stepped { count, .. } => *count,
            Picks::List(rows) => rows.len(),
        }
    }

    fn row(&self, index: usize) -> usize {
        match self {
            Picks::Stepped { first, step, .. } => first + step * index,
            Picks::List(rows) => rows[index] as usize,
        }
    }
}

/// The row products of one instruction set.
#[derive(Clone, Copy, Debug)]
pub struct Kernels {
    level: Usable,
}

impl Kernels {
    /// Kernels of `level`, lowered to what this machine has.
    pub fn new(level: SimdLevel) -> Self {
        Self { level: Usable::at_most(level) }
    }

    /// The level in use.
    pub fn level(&self) -> SimdLevel {
        self.level.level()
    }

    /// The proof that the code of that level may be called.
    pub(super) fn usable(&self) -> Usable {
        self.level
    }

    /// Makes `into` hold `x` (`[rows, cols]`) in the form that products with `ty` weights need under `mode`.
    pub fn prepare(
        &self,
        mode: Arithmetic,
        ty: QuantType,
        x: &[f32],
        rows: usize,
        cols: usize,
        into: &mut Activations,
    ) {
        into.reset(mode, ty, rows, cols);
        into.fill(None, self.level, x);
    }

    /// [`Self::prepare`] with the rows split over the pool's threads.
    #[allow(clippy::too_many_arguments)]
    pub fn prepare_on(
        &self,
        pool: &Pool,
        mode: Arithmetic,
        ty: QuantType,
        x: &[f32],
        rows: usize,
        cols: usize,
        into: &mut Activations,
    ) {
        into.reset(mode, ty, rows, cols);
        into.fill(Some(pool), self.level, x);
    }

    /// Products of weight rows `range` with every activation row: `out` is `[range.len(), activation rows]`.
    /// `acts` must have been prepared for the type of `w`.
    pub fn matmul_range(&self, w: MatView, range: Range<usize>, acts: &Activations, out: &mut [f32]) {
        self.product(w, range, acts, Picks::first(acts.rows()), out);
    }

    /// As [`Self::matmul_range`] for the activation rows listed in `picks` only: `out` is
    /// `[range.len(), picks.len()]`. How the rows routed to one expert are taken from those of a whole chunk.
    pub fn matmul_range_picked(
        &self,
        w: MatView,
        range: Range<usize>,
        acts: &Activations,
        picks: &[u32],
        out: &mut [f32],
    ) {
        self.product(w, range, acts, Picks::List(picks), out);
    }

    fn product(&self, w: MatView, range: Range<usize>, acts: &Activations, picks: Picks, out: &mut [f32]) {
        w.check();
        assert!(acts.suits(w.ty), "activations were prepared for another type than {}", w.ty);
        assert_eq!(acts.cols(), w.cols, "columns of activations and weights");
        assert_eq!(out.len(), range.len() * picks.len(), "output of {} x {}", range.len(), picks.len());
        dispatch::product(self.level, w.rows_of(range), acts, picks, out);
    }
}

/// A product that is going to be asked for, as far as its memory depends on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProductShape {
    /// Type of the weights.
    pub ty: QuantType,
    /// Most activation rows.
    pub rows: usize,
    /// Groups of [`matmul_grouped`]; 1 for a plain product.
    pub groups: usize,
    /// Inputs of one weight row.
    pub cols: usize,
    /// Weight rows.
    pub outputs: usize,
}

/// Memory that products pass activations and sums through. One serves all products of a pool, which run one after
/// another; a decode step allocates nothing.
#[derive(Default)]
pub(crate) struct Scratch {
    acts: Activations,
    out: Vec<f32>,
}

impl Scratch {
    /// Scratch that does not grow in any of `products`.
    pub(crate) fn for_products(mode: Arithmetic, products: &[ProductShape]) -> Self {
        let out = products.iter().map(out_len).max().unwrap_or(0);
        Self { acts: Activations::for_products(mode, products), out: Vec::with_capacity(out) }
    }
}

/// Bytes of scratch that a pool of `threads` holds for `products`, for the memory plan.
pub fn scratch_bytes(mode: Arithmetic, threads: usize, products: &[ProductShape]) -> u64 {
    let out = products.iter().map(out_len).max().unwrap_or(0);
    let tiles = match mode {
        Arithmetic::Fast => products.iter().map(|p| simd::tile_bytes(p.ty, p.cols, p.rows)).max().unwrap_or(0),
        Arithmetic::Quality => 0,
    };
    Activations::bytes_for(mode, products) + 4 * out as u64 + threads as u64 * tiles
}

fn out_len(product: &ProductShape) -> usize {
    if product.rows == 1 { 0 } else { product.rows.saturating_mul(product.outputs) }
}

/// `out[r][o] = sum over i of w[o][i] * x[r][i]`: `x` is `[rows, w.cols]`, `out` `[rows, w.rows]`.
pub fn matmul(pool: &Pool, kernels: &Kernels, mode: Arithmetic, w: MatView, x: &[f32], rows: usize, out: &mut [f32]) {
    with_scratch(pool, |scratch| {
        kernels.prepare_on(pool, mode, w.ty, x, rows, w.cols, &mut scratch.acts);
        product_on(pool, kernels, w, &scratch.acts, &mut scratch.out, out);
    });
}

/// [`matmul`] with activations that are prepared already, for several matrices on the same input: `out` is
/// `[acts.rows(), w.rows]`.
pub fn matmul_prepared(pool: &Pool, kernels: &Kernels, w: MatView, acts: &Activations, out: &mut [f32]) {
    with_scratch(pool, |scratch| product_on(pool, kernels, w, acts, &mut scratch.out, out));
}

/// [`matmul`] of the same input with two matrices. The input is prepared once if both take it in the same form.
pub fn matmul_pair(
    pool: &Pool,
    kernels: &Kernels,
    mode: Arithmetic,
    (a, b): (MatView, MatView),
    (x, rows): (&[f32], usize),
    (out_a, out_b): (&mut [f32], &mut [f32]),
) {
    assert_eq!(a.cols, b.cols, "both matrices take the same input");
    with_scratch(pool, |scratch| {
        kernels.prepare_on(pool, mode, a.ty, x, rows, a.cols, &mut scratch.acts);
        product_on(pool, kernels, a, &scratch.acts, &mut scratch.out, out_a);
        if !scratch.acts.is_form_for(mode, b.ty) {
            kernels.prepare_on(pool, mode, b.ty, x, rows, b.cols, &mut scratch.acts);
        }
        product_on(pool, kernels, b, &scratch.acts, &mut scratch.out, out_b);
    });
}

/// A block-diagonal product: the rows of `w` fall into `groups` equal runs, run `g` is applied to part `g` of each
/// activation row. `x` is `[rows, groups, w.cols]`, `out` is `[rows, w.rows]`.
#[allow(clippy::too_many_arguments)]
pub fn matmul_grouped(
    pool: &Pool,
    kernels: &Kernels,
    mode: Arithmetic,
    w: MatView,
    x: &[f32],
    rows: usize,
    groups: usize,
    out: &mut [f32],
) {
    w.check();
    assert!(groups > 0 && w.rows.is_multiple_of(groups), "{} rows in {groups} groups", w.rows);
    assert_eq!(out.len(), rows * w.rows, "output of {rows} x {}", w.rows);
    let group_rows = w.rows / groups;
    with_scratch(pool, |scratch| {
        // Seen as [rows * groups, cols], so activation row r, group g is row r * groups + g.
        kernels.prepare_on(pool, mode, w.ty, x, rows * groups, w.cols, &mut scratch.acts);
        let acts = &scratch.acts;
        let columns = columns(&mut scratch.out, rows, out.len());
        let grain = grain(rows * w.cols);
        pool.split_mut(if rows == 1 { out } else { columns }, rows, grain, |first, run| {
            let mut row = first;
            let mut rest = run;
            while !rest.is_empty() {
                let group = row / group_rows;
                let end = ((group + 1) * group_rows).min(row + rest.len() / rows);
                let (part, tail) = rest.split_at_mut((end - row) * rows);
                let picks = Picks::Stepped { first: group, step: groups, count: rows };
                kernels.product(w, row..end, acts, picks, part);
                (row, rest) = (end, tail);
            }
        });
        if rows > 1 {
            transpose(pool, &scratch.out, w.rows, rows, out);
        }
    });
}

fn with_scratch<R>(pool: &Pool, f: impl FnOnce(&mut Scratch) -> R) -> R {
    // Taken out, not locked: while this thread waits for others, rayon may let it start another product. That one
    // finds nothing and makes its own, which is kept only until this one is put back.
    let mut scratch = std::mem::take(&mut *pool.scratch.lock());
    let result = f(&mut scratch);
    *pool.scratch.lock() = scratch;
    result
}

fn product_on(pool: &Pool, kernels: &Kernels, w: MatView, acts: &Activations, scratch: &mut Vec<f32>, out: &mut [f32]) {
    let rows = acts.rows();
    assert_eq!(out.len(), rows * w.rows, "output of {rows} x {}", w.rows);
    let grain = grain(rows * w.cols);
    let columns = columns(scratch, rows, out.len());
    pool.split_mut(if rows == 1 { out } else { columns }, rows.max(1), grain, |first, run| {
        kernels.matmul_range(w, first..first + run.len() / rows, acts, run);
    });
    if rows > 1 {
        transpose(pool, scratch, w.rows, rows, out);
    }
}

/// Weight rows that make a piece worth handing over, at `products` multiply-adds each.
fn grain(products: usize) -> usize {
    INLINE_PRODUCTS.div_ceil(products.max(1))
}

/// Scratch for `[weight rows, activation rows]`; one activation row needs none, the two orders being the same.
fn columns(scratch: &mut Vec<f32>, rows: usize, len: usize) -> &mut [f32] {
    let len = if rows == 1 { 0 } else { len };
    if scratch.len() < len {
        // Nothing is worth keeping, and a copy would hold both at once.
        if scratch.capacity() < len {
            *scratch = Vec::with_capacity(len);
        }
        scratch.resize(len, 0.0);
    }
    &mut scratch[..len]
}

/// `columns` `[width, rows]` into `out` `[rows, width]`.
fn transpose(pool: &Pool, columns: &[f32], width: usize, rows: usize, out: &mut [f32]) {
    // Square tiles, so that the 16 lines being read stay in the first-level cache.
    const TILE: usize = 16;
    pool.split_mut(out, width, TILE.max((1 << 15) / width.max(1)), |first, run| {
        let count = run.len() / width;
        for r0 in (0..count).step_by(TILE) {
            for o0 in (0..width).step_by(TILE) {
                for r in r0..(r0 + TILE).min(count) {
                    for o in o0..(o0 + TILE).min(width) {
                        run[r * width + o] = columns[o * rows + first + r];
                    }
                }
            }
        }
    });
}
