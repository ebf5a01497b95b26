//! Which compressed rows each token attends (spec 3.8): all complete ones, or the best of them by an indexer.
//! Never scores where everything visible is taken anyway. Surprising fact: queries come from the query latent, the weights of the index
//! heads from the layer's input.

use std::ops::Range;

use super::pass::Pass;
use crate::backend::ops::{self, Visibility};
use crate::backend::{Backend, BackendError};
use crate::models::blocks::workspace::tiles;
use crate::models::probe::Point;

impl<B: Backend> Pass<'_, B> {
    /// Computes the layer's selection; returns its width, 0 for none.
    pub fn select(&mut self, layer: usize) -> Result<usize, BackendError> {
        let (ctx, plan) = (self.ctx, self.ctx.config.layers[layer]);
        if plan.ratio == 0 {
            return Ok(0);
        }
        let k = ctx.config.selected(plan.ratio, ctx.options.ctx);
        let visible = Visibility { first_pos: ctx.first_pos, ratio: plan.ratio };
        // The last row sees the most.
        if plan.has_indexer() && visible.groups(ctx.rows - 1) > k {
            self.project_index_queries(layer)?;
        }
        for tile in tiles(0..ctx.rows, self.work.score_rows) {
            self.select_tile(layer, k, tile, visible)?;
        }
        self.show_ids(Point::Selected, layer, k, |w, _| &w.selected)?;
        Ok(k)
    }

    /// Rotated, transformed and rounded index queries, and the weight of each index head.
    fn project_index_queries(&mut self, layer: usize) -> Result<(), BackendError> {
        let (ctx, w, own) = (self.ctx, &mut *self.work, &mut *self.own);
        let c = ctx.config;
        let weights = ctx.layer(layer).indexer.as_ref().expect("loaded for layers that choose");
        ctx.matmul(&weights.q_b, &w.q_latent, &mut own.index_q_raw)?;
        ctx.backend.rope(ctx.rope(layer, c.index_heads, c.index_dim), &mut own.index_q_raw)?;
        ctx.round_index(ctx.rows * c.index_heads, &own.index_q_raw, &mut w.index_q)?;
        ctx.matmul(&weights.head_weights, &w.x, &mut w.index_weights)
    }

    /// Scores and selection of a few rows.
    fn select_tile(
        &mut self,
        layer: usize,
        k: usize,
        rows: Range<usize>,
        visible: Visibility,
    ) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let needs_scores = visible.groups(rows.end - 1) > k;
        if needs_scores {
            let keys = self.state.layers[layer].keys.as_ref().expect("everything complete is selected otherwise");
            ctx.score(w, &keys.rows, rows.clone(), visible)?;
        }
        let stride = w.score_stride;
        let scores = needs_scores.then_some(&w.scores);
        let op = ops::SelectRows { scores, mask: None, rows, visible, stride, k, block: 1, words: 0 };
        ctx.backend.select_rows(op, &mut w.selected)
    }
}
