//! Compressed rows and index keys (spec 3.6), on the layers that make them.
//! Never overlaps groups. Surprising fact: the index key is made from the latent before it is rotated and rounded, and a
//! group takes the position of its first token.

use super::pass::Pass;
use crate::backend::ops::{self, CacheFormat};
use crate::backend::{Backend, BackendError};
use crate::models::probe::Point;

/// Groups of a chunk: those that were complete before it, and those that it completes.
#[derive(Clone, Copy)]
struct Groups {
    ratio: usize,
    before: usize,
    closed: usize,
}

impl Groups {
    /// Rotation of one row a group, at the position of its first token.
    fn rope<'a, B: Backend>(self, args: ops::Rope<'a, B>) -> ops::Rope<'a, B> {
        ops::Rope { rows: self.closed, first_pos: self.before * self.ratio, pos_step: self.ratio, ..args }
    }
}

impl<B: Backend> Pass<'_, B> {
    /// Appends the groups that this chunk completes to the layer's owner.
    pub fn compress(&mut self, layer: usize) -> Result<(), BackendError> {
        let plan = self.ctx.config.layers[layer];
        let (Some(owner), true) = (plan.owner, plan.makes_rows) else {
            return Ok(());
        };
        let closed = self.make_latents(layer, owner)?;
        let groups = Groups { ratio: plan.ratio, before: self.ctx.first_pos / plan.ratio, closed };
        if closed > 0 {
            self.store_keys(layer, owner, groups)?;
            self.store_latents(layer, owner, groups)?;
        }
        Ok(())
    }

    /// `latent = [closed groups, head_dim]`; returns how many.
    fn make_latents(&mut self, layer: usize, owner: usize) -> Result<usize, BackendError> {
        let (ctx, x, own) = (self.ctx, &self.work.x, &mut *self.own);
        let width = ctx.config.head_dim;
        let weights = ctx.layer(layer).compressor.as_ref().expect("loaded for layers that make rows");
        let Some(gate) = &weights.gate else {
            ctx.matmul(&weights.values, x, &mut own.pair_values)?;
            ctx.norm(&own.pair_values, &weights.norm, (ctx.rows, width), &mut own.latent)?;
            return Ok(ctx.rows);
        };
        let (a, b) = (ctx.backend.view(&weights.values), ctx.backend.view(gate));
        let pair = ops::MatmulPair { a, b, x, rows: ctx.rows };
        ctx.backend.matmul_pair(pair, &mut own.pair_values, &mut own.pair_gates)?;
        let state = &mut *self.state;
        let [first, second] = state.owners[owner].open.as_mut().expect("kept for ratio 2");
        let is_swapped = (state.open_now + ctx.piece) % 2 == 1;
        let (now, next) = if is_swapped { (second, first) } else { (first, second) };
        let op = ops::PoolPairs {
            values: &own.pair_values,
            gates: &own.pair_gates,
            open_values: &now.values,
            open_gates: &now.gates,
            rows: ctx.rows,
            width,
            first_pos: ctx.first_pos,
        };
        let out = ops::PairsOut { pooled: &mut own.pooled, open_values: &mut next.values, open_gates: &mut next.gates };
        let closed = ctx.backend.pool_pairs(op, out)?;
        self.state.keep_pairs(owner, ctx, (&self.own.pair_values, &self.own.pair_gates))?;
        let own = &mut *self.own;
        ctx.norm(&own.pooled, &weights.norm, (closed, width), &mut own.latent)?;
        Ok(closed)
    }

    /// Index keys of the new groups, from the latents as they are.
    fn store_keys(&mut self, layer: usize, owner: usize, groups: Groups) -> Result<(), BackendError> {
        let ctx = self.ctx;
        let weights = ctx.layer(layer).compressor.as_ref().expect("loaded for layers that make rows");
        let Some((project, norm)) = &weights.keys else {
            return Ok(());
        };
        let (width, closed) = (ctx.config.index_dim, groups.closed);
        let latents = (closed, ctx.config.head_dim);
        self.show_some(Point::IndexKeyIn, (layer, groups.before * groups.ratio), latents, |_, own| &own.latent)?;
        let own = &mut *self.own;
        ctx.matmul_rows(project, &own.latent, closed, &mut own.key_raw)?;
        ctx.norm(&own.key_raw, norm, (closed, width), &mut own.key)?;
        ctx.backend.rope(groups.rope(ctx.rope(layer, 1, width)), &mut own.key)?;
        ctx.round(CacheFormat::Fp4Block32, closed * width, &mut own.key)?;
        let keys = self.state.owners[owner].keys.as_mut().expect("kept where keys are made");
        ctx.backend.copy(&own.key, 0, keys, groups.before * width, closed * width)
    }

    /// The new groups themselves, rotated and rounded.
    fn store_latents(&mut self, layer: usize, owner: usize, groups: Groups) -> Result<(), BackendError> {
        let (ctx, width) = (self.ctx, self.ctx.config.head_dim);
        let own = &mut *self.own;
        ctx.backend.rope(groups.rope(ctx.rope(layer, 1, width)), &mut own.latent)?;
        ctx.round(CacheFormat::Fp4Block16, groups.closed * width, &mut own.latent)?;
        let rows = &mut self.state.owners[owner].rows;
        ctx.backend.copy(&own.latent, 0, rows, groups.before * width, groups.closed * width)
    }
}
