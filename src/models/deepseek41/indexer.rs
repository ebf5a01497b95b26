//! Which compressed rows each token attends (spec 3.7): scores, candidate blocks, selection.
//! Never scores where everything visible is taken anyway. Surprising fact: layers behind the candidate source score with
//! their own queries but with that source's keys.

use std::ops::Range;

use super::pass::Pass;
use crate::backend::ops::{self, CacheFormat, Visibility};
use crate::backend::{Backend, BackendError};
use crate::models::blocks::workspace::tiles;
use crate::models::probe::Point;

impl<B: Backend> Pass<'_, B> {
    /// Computes the layer's selection, if it makes one; else the latest stays in place.
    pub fn select(&mut self, layer: usize) -> Result<(), BackendError> {
        let (c, rows) = (self.ctx.config, self.ctx.rows);
        let plan = c.layers[layer];
        let Some(keyed) = plan.selects_by else {
            return Ok(());
        };
        let visible = Visibility { first_pos: self.ctx.first_pos, ratio: plan.ratio };
        // The last row sees the most.
        let most = visible.groups(rows - 1);
        let needs_blocks = plan.makes_candidates && most.div_ceil(c.candidate_block) > c.candidate_blocks_max;
        if most > c.index_top_k || needs_blocks {
            self.project_index_queries(layer)?;
        }
        for tile in tiles(0..rows, self.work.score_rows) {
            self.select_tile(layer, keyed, tile, visible)?;
        }
        self.show_ids(Point::Selected, layer, c.index_top_k, |w, _| &w.selected)?;
        if plan.makes_candidates {
            self.show_ids(Point::Candidates, layer, self.own.words, |_, own| &own.candidates)?;
        }
        Ok(())
    }

    /// Rotated and rounded index queries, and the weight of each index head.
    fn project_index_queries(&mut self, layer: usize) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let c = ctx.config;
        let weights = ctx.layer(layer).indexer.as_ref().expect("loaded for layers that select");
        ctx.matmul(&weights.q_b, &w.q_latent, &mut w.index_q)?;
        ctx.backend.rope(ctx.rope(layer, c.index_heads, c.index_dim), &mut w.index_q)?;
        ctx.round(CacheFormat::Fp4Block32, ctx.rows * c.index_heads * c.index_dim, &mut w.index_q)?;
        ctx.matmul(&weights.head_weights, &w.x, &mut w.index_weights)
    }

    /// Scores, candidates and selection of a few rows.
    fn select_tile(
        &mut self,
        layer: usize,
        keyed: usize,
        rows: Range<usize>,
        visible: Visibility,
    ) -> Result<(), BackendError> {
        let (ctx, w, own) = (self.ctx, &mut *self.work, &mut *self.own);
        let c = ctx.config;
        let plan = c.layers[layer];
        let most = visible.groups(rows.end - 1);
        let needs_blocks = plan.makes_candidates && most.div_ceil(c.candidate_block) > c.candidate_blocks_max;
        let needs_scores = most > c.index_top_k || needs_blocks;
        if needs_scores {
            let keys = self.state.owners[keyed].keys.as_ref().expect("the schedule names an owner with keys");
            ctx.score(w, keys, rows.clone(), visible)?;
        }
        let stride = w.score_stride;
        if plan.makes_candidates {
            let op = ops::CandidateBlocks {
                scores: needs_blocks.then_some(&w.scores),
                rows: rows.clone(),
                visible,
                stride,
                block: c.candidate_block,
                blocks_max: c.candidate_blocks_max,
                words: own.words,
            };
            ctx.backend.candidate_blocks(op, &mut own.candidates)?;
        }
        let op = ops::SelectRows {
            scores: needs_scores.then_some(&w.scores),
            mask: plan.masked.then_some(&own.candidates),
            rows,
            visible,
            stride,
            k: c.index_top_k,
            block: c.candidate_block,
            words: own.words,
        };
        ctx.backend.select_rows(op, &mut w.selected)
    }
}
