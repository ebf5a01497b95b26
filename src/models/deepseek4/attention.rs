//! Attention half of a layer (spec 3.5): projections, window rows, attention, grouped output.
//! Never scales the sink. Surprising fact: keys and values are the same rotated rows, so the output is rotated back at the query's position
//! before it is projected.

use super::pass::Pass;
use crate::backend::ops;
use crate::backend::{Backend, BackendError};
use crate::models::blocks::attention::Window;
use crate::models::probe::Point;

impl<B: Backend> Pass<'_, B> {
    /// `y = attention(x)`.
    pub fn attention(&mut self, layer: usize) -> Result<(), BackendError> {
        let c = self.ctx.config;
        self.project_input(layer)?;
        self.project_queries(layer)?;
        self.show(Point::QueryLatent, layer, c.q_rank, |w, _| &w.q_latent)?;
        self.keep_window(layer)?;
        self.compress(layer)?;
        let selected = self.select(layer)?;
        self.attend(layer, selected)?;
        self.show(Point::HeadsOut, layer, c.q_width(), |w, _| &w.heads_out)?;
        self.project_groups(layer)?;
        self.show(Point::GroupsOut, layer, c.o_width(), |w, _| &w.groups_out)?;
        self.project_output(layer)
    }

    /// `q_latent` (kept for the indexer) and query heads: each normalised, then rotated.
    fn project_queries(&mut self, layer: usize) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let (c, weights) = (ctx.config, &ctx.layer(layer).attention);
        ctx.norm(&w.q_raw, &weights.q_a_norm, (ctx.rows, c.q_rank), &mut w.q_latent)?;
        ctx.matmul(&weights.q_b, &w.q_latent, &mut w.heads_out)?;
        ctx.norm(&w.heads_out, &ctx.weights.more.ones, (ctx.rows * c.heads, c.head_dim), &mut w.q)?;
        ctx.backend.rope(ctx.rope(layer, c.heads, c.head_dim), &mut w.q)
    }

    /// The window row of each token, rotated, rounded and stored.
    pub fn keep_window(&mut self, layer: usize) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let (c, weights) = (ctx.config, &ctx.layer(layer).attention);
        ctx.norm(&w.kv_raw, &weights.kv_norm, (ctx.rows, c.head_dim), &mut w.kv)?;
        ctx.backend.rope(ctx.rope(layer, 1, c.head_dim), &mut w.kv)?;
        ctx.round(ctx.row_format(), ctx.rows * c.head_dim, &mut w.kv)?;
        self.state.layers[layer].window.store(ctx.backend, &w.kv, ctx.rows, ctx.first_pos)
    }

    /// Attention over the window and `k` selected rows a token, rotated back.
    fn attend(&mut self, layer: usize, k: usize) -> Result<(), BackendError> {
        let (ctx, w, state) = (self.ctx, &mut *self.work, &self.state.layers[layer]);
        let rows = state.compressed.as_ref().map(|compressed| &compressed.rows);
        let compressed = rows.map(|rows| ops::Compressed { rows, selected: &w.selected, k });
        let window = Window { rows: &state.window.rows, slots: state.window.slots };
        ctx.attend(layer, &w.q, window, compressed, &mut w.heads_out)
    }
}
