//! Attention sublayer (spec 3.4, 3.5, 3.8): projections, window rows, attention, grouped output.
//! Never normalises query heads. Surprising fact: keys and values are the same rotated rows, so the output is rotated
//! back at the query's position before it is projected.

use super::pass::Pass;
use crate::backend::ops::{self, CacheFormat};
use crate::backend::{Backend, BackendError};
use crate::models::probe::Point;

impl<B: Backend> Pass<'_, B> {
    /// `y = attention(x)`.
    pub fn attention(&mut self, layer: usize) -> Result<(), BackendError> {
        let c = self.ctx.config;
        self.project_input(layer)?;
        self.project_queries(layer)?;
        self.show(Point::QueryLatent, layer, c.q_rank, |w| &w.q_latent)?;
        self.keep_window(layer)?;
        self.compress(layer)?;
        self.select(layer)?;
        self.attend(layer)?;
        self.show(Point::HeadsOut, layer, c.q_width(), |w| &w.heads_out)?;
        self.project_groups(layer)?;
        self.show(Point::GroupsOut, layer, c.o_groups * c.o_rank, |w| &w.groups_out)?;
        let (ctx, w) = (self.ctx, &mut *self.work);
        ctx.matmul(&ctx.layer(layer).attention.output_b, &w.groups_out, &mut w.y)
    }

    /// What queries and window rows are made of: both products of the input.
    fn project_input(&mut self, layer: usize) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let weights = &ctx.layer(layer).attention;
        let (a, b) = (ctx.backend.view(&weights.q_a), ctx.backend.view(&weights.kv));
        ctx.backend.matmul_pair(ops::MatmulPair { a, b, x: &w.x, rows: ctx.rows }, &mut w.q_raw, &mut w.kv_raw)
    }

    /// Spec 3.4: `q_latent` (kept for the indexer) and rotated query heads.
    fn project_queries(&mut self, layer: usize) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let (c, weights) = (ctx.config, &ctx.layer(layer).attention);
        ctx.norm(&w.q_raw, &weights.q_a_norm, (ctx.rows, c.q_rank), &mut w.q_latent)?;
        ctx.matmul(&weights.q_b, &w.q_latent, &mut w.q)?;
        ctx.backend.rope(ctx.rope(layer, c.heads, c.head_dim), &mut w.q)
    }

    /// The window row of each token alone, where nobody needs its queries.
    pub fn project_window(&mut self, layer: usize) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        ctx.matmul(&ctx.layer(layer).attention.kv, &w.x, &mut w.kv_raw)?;
        self.keep_window(layer)
    }

    /// Spec 3.4: the window row of each token, rotated, rounded and stored.
    fn keep_window(&mut self, layer: usize) -> Result<(), BackendError> {
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
        let op = ops::Attention {
            q: &w.q,
            window: &state.windows[layer],
            window_slots: state.window_slots,
            window_len: c.window,
            compressed,
            sinks: &ctx.layer(layer).attention.sinks,
            rows: ctx.rows,
            heads: c.heads,
            width: c.head_dim,
            first_pos: ctx.first_pos,
            scale: 1.0 / (c.head_dim as f32).sqrt(),
        };
        ctx.backend.attention(op, &mut w.heads_out)?;
        let back = ops::Rope { inverse: true, ..ctx.rope(layer, c.heads, c.head_dim) };
        ctx.backend.rope(back, &mut w.heads_out)
    }

    /// Spec 3.8, last line: each group of heads through its own block of the first output matrix.
    fn project_groups(&mut self, layer: usize) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let op = ops::Matmul {
            w: ctx.backend.view(&ctx.layer(layer).attention.output_a),
            x: &w.heads_out,
            rows: ctx.rows,
            groups: ctx.config.o_groups,
        };
        ctx.backend.matmul(op, &mut w.groups_out)
    }
}
