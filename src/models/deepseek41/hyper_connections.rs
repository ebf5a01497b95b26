//! Hyper-connections (spec 3.2, 3.3): coefficients, collapse before a sublayer, expansion after it.
//! Never collapses with the weights made at the same sublayer. Surprising fact: the collapse uses what the sublayer
//! before it left in `carried`; `expand` is where this sublayer's own weights take that place.

use super::pass::Pass;
use super::weights::HcWeights;
use crate::backend::{Backend, BackendError, ops};

impl<B: Backend> Pass<'_, B> {
    /// Spec 3.2: pre, post and combination from the streams as they are now.
    pub fn mix(&mut self, hc: &HcWeights<B>) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        ctx.matmul(&hc.mix, &w.streams, &mut w.mix)?;
        let op = ops::HcCoefficients {
            streams: &w.streams,
            mix: &w.mix,
            base: &hc.base,
            scale: &hc.scale,
            rows: ctx.rows,
            stream_count: ctx.config.streams,
            hidden: ctx.config.hidden,
            rms_eps: ctx.config.rms_eps,
            hc_eps: ctx.config.hc_eps,
            iterations: ctx.config.sinkhorn_iterations,
        };
        let out = ops::HcOut { pre: &mut w.pre, post: &mut w.post, comb: &mut w.comb };
        ctx.backend.hc_coefficients(op, out)
    }

    /// Input of a sublayer: streams collapsed with the carried weights, then normalised.
    pub fn collapse_and_norm(&mut self, norm: &B::Buf) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let op = ops::HcCollapse {
            streams: &w.streams,
            weights: &w.carried,
            rows: ctx.rows,
            stream_count: ctx.config.streams,
            hidden: ctx.config.hidden,
        };
        ctx.backend.hc_collapse(op, &mut w.collapsed)?;
        ctx.norm(&w.collapsed, norm, (ctx.rows, ctx.config.hidden), &mut w.x)
    }

    /// Adds the sublayer's output `y` to the mixed streams and hands its collapse weights on.
    pub fn expand(&mut self) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let op = ops::HcExpand {
            y: &w.y,
            post: &w.post,
            comb: &w.comb,
            rows: ctx.rows,
            stream_count: ctx.config.streams,
            hidden: ctx.config.hidden,
        };
        ctx.backend.hc_expand(op, &mut w.streams)?;
        std::mem::swap(&mut w.carried, &mut w.pre);
        Ok(())
    }
}
