//! What the attention half does alike everywhere: products around the heads, and attention itself.
//! Never says which rows are attended or how they are kept. Surprising fact: keys and values are the same rotated rows, so the output is
//! rotated back at the query's position before it is projected.

use super::architecture::Architecture;
use super::pass::{Ctx, Pass};
use crate::backend::{Backend, BackendError, ops};

/// Rows of the window: position `p` in slot `p mod slots`.
pub struct Window<'a, B: Backend> {
    pub rows: &'a B::Buf,
    pub slots: usize,
}

impl<B: Backend, A: Architecture<B>> Ctx<'_, B, A> {
    /// `out = [rows, heads, head_dim]`: attention of the queries `q` of `layer` over the window and the selected compressed rows, rotated back.
    pub fn attend(
        &self,
        layer: usize,
        q: &B::Buf,
        window: Window<'_, B>,
        compressed: Option<ops::Compressed<'_, B>>,
        out: &mut B::Buf,
    ) -> Result<(), BackendError> {
        let c = self.config;
        let op = ops::Attention {
            q,
            window: window.rows,
            window_slots: window.slots,
            window_len: c.window,
            compressed,
            sinks: &self.layer(layer).attention.sinks,
            rows: self.rows,
            heads: c.heads,
            width: c.head_dim,
            first_pos: self.first_pos,
            scale: 1.0 / (c.head_dim as f32).sqrt(),
        };
        self.backend.attention(op, out)?;
        let back = ops::Rope { inverse: true, ..self.rope(layer, c.heads, c.head_dim) };
        self.backend.rope(back, out)
    }
}

impl<B: Backend, A: Architecture<B>> Pass<'_, B, A> {
    /// What queries and window rows are made of: `q_raw` and `kv_raw`, both products of the input.
    pub fn project_input(&mut self, layer: usize) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let weights = &ctx.layer(layer).attention;
        let (a, b) = (ctx.backend.view(&weights.q_a), ctx.backend.view(&weights.kv));
        ctx.backend.matmul_pair(ops::MatmulPair { a, b, x: &w.x, rows: ctx.rows }, &mut w.q_raw, &mut w.kv_raw)
    }

    /// `kv_raw` alone, where nobody needs the queries.
    pub fn project_kv(&mut self, layer: usize) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        ctx.matmul(&ctx.layer(layer).attention.kv, &w.x, &mut w.kv_raw)
    }

    /// `groups_out`: each group of heads through its own block of the first output matrix.
    pub fn project_groups(&mut self, layer: usize) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let op = ops::Matmul {
            w: ctx.backend.view(&ctx.layer(layer).attention.output_a),
            x: &w.heads_out,
            rows: ctx.rows,
            groups: ctx.config.o_groups,
        };
        ctx.backend.matmul(op, &mut w.groups_out)
    }

    /// `y` from all groups.
    pub fn project_output(&mut self, layer: usize) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        ctx.matmul(&ctx.layer(layer).attention.output_b, &w.groups_out, &mut w.y)
    }
}
