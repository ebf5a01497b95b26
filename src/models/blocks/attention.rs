//! What the attention half does alike everywhere: products around the heads, and attention itself.
//! Never says which rows are attended or how they are kept. Surprising fact: keys and values are the same rotated rows, so the output is
//! rotated back at the query's position before it is projected.

use super::architecture::Architecture;
use super::pass::{Ctx, Pass};
use super::ring::Ring;
use super::workspace::Workspace;
use crate::backend::ops::{self, CacheFormat};
use crate::backend::{Backend, BackendError};
use crate::models::probe::Point;

impl<B: Backend, A: Architecture<B>> Ctx<'_, B, A> {
    /// `out = [rows, heads, head_dim]`: attention of the queries `q` of `layer` over the window, with whether its rows and the compressed ones are
    /// BF16 values, and the selected compressed rows, rotated back.
    pub fn attend(
        &self,
        layer: usize,
        q: &B::Buf,
        (window, keys_are_bf16): (&Ring<B>, bool),
        compressed: Option<ops::Compressed<'_, B>>,
        out: &mut B::Buf,
    ) -> Result<(), BackendError> {
        let c = self.config;
        let op = ops::Attention {
            q,
            window: &window.rows,
            window_slots: window.slots,
            window_len: c.window,
            compressed,
            sinks: &self.layer(layer).attention.sinks,
            rows: self.rows,
            heads: c.heads,
            width: c.head_dim,
            first_pos: self.first_pos,
            scale: 1.0 / (c.head_dim as f32).sqrt(),
            keys_are_bf16,
        };
        self.backend.attention(op, out)?;
        let back = ops::Rope { inverse: true, ..self.rope(layer, c.heads, c.head_dim) };
        self.backend.rope(back, out)
    }

    /// The window row of each token from `kv_raw`: normalised, rotated, rounded to `format` and stored.
    pub fn keep_row(
        &self,
        layer: usize,
        w: &mut Workspace<B>,
        format: CacheFormat,
        window: &mut Ring<B>,
    ) -> Result<(), BackendError> {
        let width = self.config.head_dim;
        self.norm(&w.kv_raw, &self.layer(layer).attention.kv_norm, (self.rows, width), &mut w.kv)?;
        self.backend.rope(self.rope(layer, 1, width), &mut w.kv)?;
        self.round(format, self.rows * width, &mut w.kv)?;
        window.store(self.backend, &w.kv, self.rows, self.first_pos)
    }
}

impl<B: Backend, A: Architecture<B>> Pass<'_, B, A> {
    /// What queries and window rows are made of: `q_latent` (kept for the indexer) and `kv_raw`, from both products of the input.
    pub fn project_input(&mut self, layer: usize) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let weights = &ctx.layer(layer).attention;
        let (a, b) = (ctx.backend.view(&weights.q_a), ctx.backend.view(&weights.kv));
        ctx.backend.matmul_pair(ops::MatmulPair { a, b, x: &w.x, rows: ctx.rows }, &mut w.q_raw, &mut w.kv_raw)?;
        // From here on queries and cache rows need nothing of each other.
        ctx.backend.fork()?;
        let width = ctx.config.q_rank;
        ctx.norm(&w.q_raw, &weights.q_a_norm, (ctx.rows, width), &mut w.q_latent)?;
        self.show(Point::QueryLatent, layer, width, |w, _| &w.q_latent)
    }

    /// `kv_raw` alone, where nobody needs the queries.
    pub fn project_kv(&mut self, layer: usize) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        ctx.matmul(&ctx.layer(layer).attention.kv, &w.x, &mut w.kv_raw)
    }

    /// `y` from `heads_out`: each group of heads through its own block of the first output matrix, then all groups through the second.
    pub fn project_output(&mut self, layer: usize) -> Result<(), BackendError> {
        let (ctx, c) = (self.ctx, self.ctx.config);
        let weights = &ctx.layer(layer).attention;
        self.show(Point::HeadsOut, layer, c.q_width(), |w, _| &w.heads_out)?;
        let (w, first) = (&mut *self.work, ctx.backend.view(&weights.output_a));
        let op = ops::Matmul { w: first, x: &w.heads_out, rows: ctx.rows, groups: c.o_groups };
        ctx.backend.matmul(op, &mut w.groups_out)?;
        self.show(Point::GroupsOut, layer, c.o_width(), |w, _| &w.groups_out)?;
        let w = &mut *self.work;
        ctx.matmul(&weights.output_b, &w.groups_out, &mut w.y)
    }
}
