//! Attention sublayer (spec 3.4, 3.5, 3.8): projections, window rows, attention, grouped output.
//! Never normalises query heads. Surprising fact: keys and values are the same rotated rows, so the output is rotated
//! back at the query's position before it is projected.

use super::pass::Pass;
use crate::backend::ops::{self, CacheFormat};
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
        self.select(layer)?;
        self.attend(layer)?;
        self.show(Point::HeadsOut, layer, c.q_width(), |w, _| &w.heads_out)?;
        self.project_groups(layer)?;
        self.show(Point::GroupsOut, layer, c.o_width(), |w, _| &w.groups_out)?;
        self.project_output(layer)
    }

    /// Spec 3.4: `q_latent` (kept for the indexer) and rotated query heads.
    fn project_queries(&mut self, layer: usize) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let (c, weights) = (ctx.config, &ctx.layer(layer).attention);
        ctx.norm(&w.q_raw, &weights.q_a_norm, (ctx.rows, c.q_rank), &mut w.q_latent)?;
        ctx.matmul(&weights.q_b, &w.q_latent, &mut w.q)?;
        ctx.backend.rope(ctx.rope(layer, c.heads, c.head_dim), &mut w.q)
    }

    /// Spec 3.4: the window row of each token, rotated, rounded and stored.
    pub fn keep_window(&mut self, layer: usize) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let (c, weights) = (ctx.config, &ctx.layer(layer).attention);
        ctx.norm(&w.kv_raw, &weights.kv_norm, (ctx.rows, c.head_dim), &mut w.kv)?;
        ctx.backend.rope(ctx.rope(layer, 1, c.head_dim), &mut w.kv)?;
        ctx.round(CacheFormat::Fp8Block32, ctx.rows * c.head_dim, &mut w.kv)?;
        let slots = self.state.window_slots;
        let op =
            ops::StoreRows { src: &w.kv, rows: ctx.rows, width: c.head_dim, first_slot: ctx.first_pos % slots, slots };
        ctx.backend.store_rows(op, &mut self.state.windows[layer])
    }

    /// Spec 3.8: attention over the window and the selected rows, rotated back.
    fn attend(&mut self, layer: usize) -> Result<(), BackendError> {
        let (ctx, w, state) = (self.ctx, &mut *self.work, &*self.state);
        let c = ctx.config;
        let compressed = c.layers[layer].owner.map(|owner| ops::Compressed {
            rows: &state.owners[owner].rows,
            selected: &w.selected,
            k: c.index_top_k,
        });
        let window = Window { rows: &state.windows[layer], slots: state.window_slots };
        ctx.attend(layer, &w.q, window, compressed, &mut w.heads_out)
    }
}
