//! Attention half of a layer (spec 3.5): projections, window rows, attention, grouped output.
//! Never scales the sink. Surprising fact: keys and values are the same rotated rows, so the output is rotated back at the query's position
//! before it is projected.

use super::pass::Pass;
use crate::backend::{Backend, BackendError, ops};

impl<B: Backend> Pass<'_, B> {
    /// `y = attention(x)`.
    pub fn attention(&mut self, layer: usize) -> Result<(), BackendError> {
        let backend = self.ctx.backend;
        self.project_input(layer)?;
        backend.aside(|| {
            self.keep_window(layer)?;
            self.compress(layer)
        })?;
        self.project_queries(layer)?;
        backend.join()?;
        let selected = self.select(layer)?;
        self.attend(layer, selected)?;
        self.project_output(layer)
    }

    /// Query heads: each normalised, then rotated.
    fn project_queries(&mut self, layer: usize) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let c = ctx.config;
        ctx.matmul(&ctx.layer(layer).attention.q_b, &w.q_latent, &mut w.heads_out)?;
        ctx.norm(&w.heads_out, &ctx.weights.more.ones, (ctx.rows * c.heads, c.head_dim), &mut w.q)?;
        ctx.backend.rope(ctx.rope(layer, c.heads, c.head_dim), &mut w.q)
    }

    /// The window row of each token, rounded but for its rotated values.
    pub fn keep_window(&mut self, layer: usize) -> Result<(), BackendError> {
        self.ctx.keep_row(layer, self.work, self.ctx.row_format(), &mut self.state.layers[layer].window)
    }

    /// Attention over the window and `k` selected rows a token, rotated back.
    fn attend(&mut self, layer: usize, k: usize) -> Result<(), BackendError> {
        let (ctx, w, state) = (self.ctx, &mut *self.work, &self.state.layers[layer]);
        let rows = state.compressed.as_ref().map(|compressed| &compressed.rows);
        let compressed = rows.map(|rows| ops::Compressed { rows, selected: &w.selected, k });
        // Rotated values of a row stay F32.
        ctx.attend(layer, &w.q, (&state.window, false), compressed, &mut w.heads_out)
    }
}
