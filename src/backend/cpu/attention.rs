//! Attention over one shared key = value row a token (spec 3.8): a window and selected compressed rows, with sinks.
//! Never looks past the row's own position. Surprising fact: a recent token can occur twice, once in the window and once
//! as a compressed row; both count.

use std::cell::RefCell;

use super::simd::Usable;
use super::simd::rows::RowList;
use super::{CpuBackend, lanes, parts::parts, pool::Pool};
use crate::backend::ops::Attention;

thread_local! {
    /// Row offsets and scores of one task; kept so that decode does not allocate.
    static SCRATCH: RefCell<(Vec<usize>, Vec<f32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

pub fn attention(pool: &Pool, level: Usable, op: Attention<'_, CpuBackend>, out: &mut [f32]) {
    // Heads of one task share the rows in the nearest cache, and in registers.
    let block = [8, 4, 2].into_iter().find(|b| op.heads.is_multiple_of(*b)).unwrap_or(1);
    let (blocks, part) = (op.heads / block, block * op.width);
    let keys_max = op.window_len + op.compressed.as_ref().map_or(0, |c| c.k);
    parts(pool, &mut out[..op.rows * op.heads * op.width], part, 2 * part * keys_max, |i, out| {
        SCRATCH.with_borrow_mut(|(offsets, weights)| {
            let (r, head) = (i / blocks, i % blocks * block);
            let window = list_keys(&op, r, offsets);
            let q = &op.q[(r * op.heads + head) * op.width..][..part];
            attend(level, &op, (q, &op.sinks[head..head + block]), (offsets, window), weights, out);
        });
    });
}

/// Offsets of the visible rows: window by rising position, then selected rows; returns how many are of the window.
fn list_keys(op: &Attention<'_, CpuBackend>, r: usize, keys: &mut Vec<usize>) -> usize {
    let pos = op.first_pos + r;
    keys.clear();
    keys.extend(((pos + 1).saturating_sub(op.window_len)..=pos).map(|p| p % op.window_slots * op.width));
    let window = keys.len();
    if let Some(compressed) = &op.compressed {
        let selected = &compressed.selected[r * compressed.k..][..compressed.k];
        keys.extend(selected.iter().take_while(|s| **s >= 0).map(|s| *s as usize * op.width));
    }
    window
}

/// Some heads: scores, softmax with the sink in the denominator, weighted sum of the same rows.
fn attend(
    level: Usable,
    op: &Attention<'_, CpuBackend>,
    (q, sinks): (&[f32], &[f32]),
    (offsets, window): (&[usize], usize),
    weights: &mut Vec<f32>,
    out: &mut [f32],
) {
    let (keys, width) = (offsets.len(), op.width);
    let (recent, selected) = offsets.split_at(window);
    let recent = RowList { base: op.window, offsets: recent, width };
    let compressed = op.compressed.as_ref().map_or(&[][..], |c| c.rows);
    let selected = RowList { base: compressed, offsets: selected, width };
    weights.clear();
    weights.resize(sinks.len() * keys, 0.0);
    level.row_dots(q, recent, weights, keys);
    if !selected.offsets.is_empty() {
        level.row_dots(q, selected, &mut weights[window..], keys);
    }
    out.fill(0.0);
    let mut sums = [0.0f32; HEADS_MAX];
    for ((weights, sink), sum) in weights.chunks_exact_mut(keys).zip(sinks).zip(&mut sums) {
        *sum = soften(weights, *sink, op.scale);
    }
    level.add_rows(weights, keys, recent, out);
    if !selected.offsets.is_empty() {
        level.add_rows(&weights[window..], keys, selected, out);
    }
    for (out, sum) in out.chunks_exact_mut(width).zip(sums) {
        out.iter_mut().for_each(|v| *v /= sum);
    }
}

/// Heads of one task at most.
const HEADS_MAX: usize = 8;

/// Scores to weights; returns their sum, the sink's included.
fn soften(weights: &mut [f32], sink: f32, scale: f32) -> f32 {
    weights.iter_mut().for_each(|w| *w *= scale);
    let max = weights.iter().copied().fold(sink, f32::max);
    let mut sum = lanes::exp(sink - max);
    for weight in weights.iter_mut() {
        *weight = lanes::exp(*weight - max);
        sum += *weight;
    }
    sum
}
