//! Attention over one shared key = value row a token (spec 3.8): a window and selected compressed rows, with sinks.
//! Never looks past the row's own position. Surprising fact: a recent token can occur twice, once in the window and once
//! as a compressed row; both count.

use std::cell::RefCell;

use super::{CpuBackend, lanes, parts::parts, pool::Pool};
use crate::backend::ops::Attention;

thread_local! {
    /// Row offsets and scores of one task; kept so that decode does not allocate.
    static SCRATCH: RefCell<(Vec<usize>, Vec<f32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

pub fn attention(pool: &Pool, op: Attention<'_, CpuBackend>, out: &mut [f32]) {
    // Heads of one task share the rows in the nearest cache.
    let block = [8, 4, 2].into_iter().find(|b| op.heads.is_multiple_of(*b)).unwrap_or(1);
    let (blocks, part) = (op.heads / block, block * op.width);
    let keys_max = op.window_len + op.compressed.as_ref().map_or(0, |c| c.k);
    parts(pool, &mut out[..op.rows * op.heads * op.width], part, 2 * part * keys_max, |i, out| {
        SCRATCH.with_borrow_mut(|(keys, weights)| {
            let (r, head) = (i / blocks, i % blocks * block);
            let window = list_keys(&op, r, keys);
            for (h, out) in out.chunks_exact_mut(op.width).enumerate() {
                let q = &op.q[(r * op.heads + head + h) * op.width..][..op.width];
                attend(&op, q, op.sinks[head + h], (keys, window), weights, out);
            }
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

/// One head: scores, softmax with the sink in the denominator, weighted sum of the same rows.
fn attend(
    op: &Attention<'_, CpuBackend>,
    q: &[f32],
    sink: f32,
    (keys, window): (&[usize], usize),
    weights: &mut Vec<f32>,
    out: &mut [f32],
) {
    let row = |i: usize| -> &[f32] {
        match &op.compressed {
            Some(c) if i >= window => &c.rows[keys[i]..][..op.width],
            _ => &op.window[keys[i]..][..op.width],
        }
    };
    weights.clear();
    weights.extend((0..keys.len()).map(|i| lanes::dot(q, row(i)) * op.scale));
    let max = weights.iter().copied().fold(sink, f32::max);
    let mut sum = lanes::exp(sink - max);
    for weight in weights.iter_mut() {
        *weight = lanes::exp(*weight - max);
        sum += *weight;
    }
    out.fill(0.0);
    for (i, weight) in weights.iter().enumerate() {
        lanes::add_scaled(*weight, row(i), out);
    }
    out.iter_mut().for_each(|v| *v /= sum);
}
