//! Attention sublayer (spec 3.4, 3.5, 3.8): projections, window rows, attention, grouped output.
//! Never normalises query heads. Surprising fact: keys and values are the same rotated rows, so the output is rotated
//! back at the query's position before it is projected.

use super::pass::Pass;
use crate::backend::ops::{self, CacheFormat};
use crate::backend::{Backend, BackendError};

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
        self.select(layer)?;
        self.attend(layer)?;
        self.project_output(layer)
    }

    /// Spec 3.4: rotated query heads.
    fn project_queries(&mut self, layer: usize) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        ctx.matmul(&ctx.layer(layer).attention.q_b, &w.q_latent, &mut w.q)?;
        ctx.backend.rope(ctx.rope(layer, ctx.config.heads, ctx.config.head_dim), &mut w.q)
    }

    /// Spec 3.4, 3.10: the window row of each token, rounded to FP8 with a scale for 32 values.
    pub fn keep_window(&mut self, layer: usize) -> Result<(), BackendError> {
        self.ctx.keep_row(layer, self.work, CacheFormat::Fp8Block32, &mut self.state.windows[layer])
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
        // FP8 and FP4 times a factor of few bits.
        let are_bf16 = !ctx.options.kv_exact;
        ctx.attend(layer, &w.q, (&state.windows[layer], are_bf16), compressed, &mut w.heads_out)
    }
}
