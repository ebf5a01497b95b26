//! Compressed rows and index keys (spec 3.7), on the layers that make them.
//! Never makes a row of a group that is not complete. Surprising fact: with overlap a token's row has two halves, the first for the group
//! after its own, and a group takes the position of its first own token.

use std::ops::Range;

use super::kv::CompressedState;
use super::pass::{Ctx, Pass};
use super::weights::CompressorWeights;
use super::workspace::Own;
use crate::backend::ops;
use crate::backend::{Backend, BackendError};

impl<B: Backend> Pass<'_, B> {
    /// Appends the rows and index keys of the groups that this chunk completes.
    pub fn compress(&mut self, layer: usize) -> Result<(), BackendError> {
        let (ctx, x, own, state) = (self.ctx, &self.work.x, &mut *self.own, &mut self.state.layers[layer]);
        let (c, weights) = (ctx.config, ctx.layer(layer));
        if let (Some(weights), Some(state)) = (&weights.compressor, &mut state.compressed) {
            let groups = pool(&ctx, (x, own), (layer, c.head_dim), weights, state)?;
            let width = c.head_dim;
            ctx.round(ctx.row_format(), groups.len() * width, &mut own.compressed)?;
            ctx.backend.copy(&own.compressed, 0, &mut state.rows, groups.start * width, groups.len() * width)?;
        }
        if let (Some(weights), Some(state)) = (&weights.indexer, &mut state.keys) {
            let groups = pool(&ctx, (x, own), (layer, c.index_dim), &weights.keys, state)?;
            let width = c.index_dim;
            ctx.round_index(groups.len(), &own.compressed, &mut own.keys)?;
            ctx.backend.copy(&own.keys, 0, &mut state.rows, groups.start * width, groups.len() * width)?;
        }
        Ok(())
    }
}

/// Stores the projections of all rows, then leaves the groups that they complete in `compressed`: pooled, normalised, rotated.
fn pool<B: Backend>(
    ctx: &Ctx<'_, B>,
    (x, own): (&B::Buf, &mut Own<B>),
    (layer, width): (usize, usize),
    weights: &CompressorWeights<B>,
    state: &mut CompressedState<B>,
) -> Result<Range<usize>, BackendError> {
    let plan = ctx.config.layers[layer];
    ctx.matmul(&weights.values, x, &mut own.compressor_row)?;
    state.values.store(ctx.backend, &own.compressor_row, ctx.rows, ctx.first_pos)?;
    ctx.matmul(&weights.gate, x, &mut own.compressor_row)?;
    state.gates.store(ctx.backend, &own.compressor_row, ctx.rows, ctx.first_pos)?;
    let groups = ctx.first_pos / plan.ratio..(ctx.first_pos + ctx.rows) / plan.ratio;
    if groups.is_empty() {
        return Ok(groups);
    }
    let op = ops::PoolGroups {
        values: &state.values.rows,
        gates: &state.gates.rows,
        bias: &weights.bias,
        slots: state.values.slots,
        width,
        ratio: plan.ratio,
        overlaps: plan.overlaps(),
        groups: groups.clone(),
    };
    ctx.backend.pool_groups(op, &mut own.pooled)?;
    ctx.norm(&own.pooled, &weights.norm, (groups.len(), width), &mut own.compressed)?;
    let rope = ops::Rope {
        rows: groups.len(),
        first_pos: groups.start * plan.ratio,
        pos_step: plan.ratio,
        ..ctx.rope(layer, 1, width)
    };
    ctx.backend.rope(rope, &mut own.compressed)?;
    Ok(groups)
}
