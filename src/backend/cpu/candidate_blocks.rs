//! Candidate stage of the selection (spec 3.7, layer 20): the best blocks of neighbouring compressed rows.
//! Never marks a block that the row does not see. Surprising fact: the newest block, partial or not, is always in.

use super::{CpuBackend, parts::parts, pool::Pool, ranking};
use crate::backend::ops::CandidateBlocks;

pub fn candidate_blocks(pool: &Pool, op: CandidateBlocks<'_, CpuBackend>, mask: &mut [i32]) {
    let part = &mut mask[op.rows.start * op.words..op.rows.end * op.words];
    let cost = op.visible.groups(op.rows.end.saturating_sub(1)) * 2;
    parts(pool, part, op.words, cost, |at, words| {
        let visible = op.visible.groups(op.rows.start + at);
        let blocks = visible.div_ceil(op.block);
        let mut best: Vec<u32> = (0..blocks as u32).collect();
        if blocks > op.blocks_max {
            let scores = op.scores.expect("scores are given when a row sees more blocks than it keeps");
            let row = &scores[at * op.stride..][..visible];
            let mut tops: Vec<f32> =
                row.chunks(op.block).map(|b| b.iter().copied().fold(f32::NEG_INFINITY, f32::max)).collect();
            tops[blocks - 1] = f32::INFINITY;
            ranking::keep_best(&tops, &mut best, op.blocks_max);
        }
        words.fill(0);
        for block in best {
            words[block as usize / 32] |= (1u32 << (block % 32)) as i32;
        }
    });
}
