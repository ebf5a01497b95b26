//! Walks weight rows and activation rows in cache-sized tiles and calls the row kernels of the chosen level.
//! Never changes a result: a kernel computes each (weight row, activation row) pair on its own.
//! Surprising fact: under F32 activations a quantised row is decoded once, into a buffer, for all activation rows.

use super::activations::Activations;
use super::{MatView, Picks};
use crate::backend::cpu::simd::{Tile, Usable};
use crate::quant::{QuantType, dequantize_row};
use std::cell::RefCell;

/// Activation rows that a kernel handles at once.
const ACT_TILE: usize = 4;
/// Weight bytes of a tile: they stay in a second-level cache of 512 KiB while every activation row passes over them.
const TILE_BYTES: usize = 128 << 10;

thread_local! {
    static DECODED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// All products of `w` with the picked rows of `acts`; `out` is `[w.rows, picks.len()]`.
pub(super) fn product(level: Usable, w: MatView, acts: &Activations, picks: Picks, out: &mut [f32]) {
    if out.is_empty() {
        return;
    }
    let row_bytes = w.row_bytes();
    let is_plain = matches!(w.ty, QuantType::F32 | QuantType::F16 | QuantType::BF16);
    if acts.is_float() && !is_plain {
        return decoded_product(level, w, acts, picks, out);
    }
    if !acts.is_float() && level.wants_tiles(w.ty, picks.len(), w.rows) {
        let weights = (w.ty, w.bytes, row_bytes);
        return if w.ty.block_values() == 32 {
            level.tiles32(weights, (&|a| acts.row32(picks.row(a)), picks.len()), out)
        } else {
            level.tiles256(weights, (&|a| acts.row256(picks.row(a)), picks.len()), out)
        };
    }
    let tile_rows = if picks.len() <= ACT_TILE { w.rows } else { (TILE_BYTES / row_bytes).max(1) };
    let bytes = w.bytes.chunks(tile_rows * row_bytes);
    for (bytes, out) in bytes.zip(out.chunks_mut(tile_rows * picks.len())) {
        tile(level, w.ty, bytes, row_bytes, acts, picks, out);
    }
}

fn decoded_product(level: Usable, w: MatView, acts: &Activations, picks: Picks, out: &mut [f32]) {
    DECODED.with_borrow_mut(|decoded| {
        decoded.resize(w.cols, 0.0);
        for (row, out) in w.bytes.chunks_exact(w.row_bytes()).zip(out.chunks_exact_mut(picks.len())) {
            dequantize_row(w.ty, row, decoded).expect("a weight row is whole blocks");
            let bytes: &[u8] = bytemuck::cast_slice(decoded);
            tile(level, QuantType::F32, bytes, bytes.len(), acts, picks, out);
        }
    });
}

/// Every picked activation row against the weight rows in `bytes`.
fn tile(
    level: Usable,
    ty: QuantType,
    bytes: &[u8],
    row_bytes: usize,
    acts: &Activations,
    picks: Picks,
    out: &mut [f32],
) {
    let stride = picks.len();
    for first in (0..stride).step_by(ACT_TILE) {
        let tile = Tile { ty, bytes, row_bytes, out: &mut *out, stride, first };
        match stride - first {
            1 => columns::<1>(level, tile, acts, picks),
            2 => columns::<2>(level, tile, acts, picks),
            3 => columns::<3>(level, tile, acts, picks),
            _ => columns::<ACT_TILE>(level, tile, acts, picks),
        }
    }
}

fn columns<const A: usize>(level: Usable, tile: Tile, acts: &Activations, picks: Picks) {
    let first = tile.first;
    let row = |a: usize| picks.row(first + a);
    if acts.is_float() {
        level.floats::<A>(tile, std::array::from_fn(|a| acts.float_row(row(a))));
    } else if tile.ty.block_values() == 32 {
        level.blocks32::<A>(tile, std::array::from_fn(|a| acts.row32(row(a))));
    } else {
        level.blocks256::<A>(tile, std::array::from_fn(|a| acts.row256(row(a))));
    }
}
