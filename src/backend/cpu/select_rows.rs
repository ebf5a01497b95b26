//! Selection of compressed rows (spec 3.7): the k best scores, kept in rising row order.
//! Never selects outside the candidate mask. Surprising fact: rows come out sorted by index, so the attention sums in an
//! order that does not depend on the scores.

use super::{CpuBackend, parts::parts, pool::Pool, ranking};
use crate::backend::ops::SelectRows;

pub fn select_rows(pool: &Pool, op: SelectRows<'_, CpuBackend>, selected: &mut [i32]) {
    let part = &mut selected[op.rows.start * op.k..op.rows.end * op.k];
    let cost = op.visible.groups(op.rows.end.saturating_sub(1)) * 4;
    parts(pool, part, op.k, cost, |at, out| {
        let r = op.rows.start + at;
        let visible = op.visible.groups(r);
        let is_candidate = |row: u32| match op.mask {
            None => true,
            Some(mask) => {
                let block = row as usize / op.block;
                (mask[r * op.words + block / 32] as u32 >> (block % 32)) & 1 == 1
            }
        };
        let mut rows: Vec<u32> = (0..visible as u32).filter(|row| is_candidate(*row)).collect();
        if rows.len() > op.k {
            let scores = op.scores.expect("scores are given when a row sees more keys than it keeps");
            ranking::keep_best(&scores[at * op.stride..][..visible], &mut rows, op.k);
        }
        out.fill(-1);
        for (out, row) in out.iter_mut().zip(&rows) {
            *out = *row as i32;
        }
    });
}
