//! Hyper-connections as this architecture uses them (spec 3.2, 3.3).
//! Never collapses with the weights made at the same sublayer. Surprising fact: the collapse uses what the sublayer
//! before it left in `carried`; `expand` is where this sublayer's own weights take that place.

use super::pass::Pass;
use crate::backend::{Backend, BackendError, ops};
use crate::models::blocks::hyper_connections::HcWeights;

impl<B: Backend> Pass<'_, B> {
    /// Spec 3.2: pre, post and combination from the streams as they are now; the input of the sublayer from the carried weights.
    pub fn enter(&mut self, hc: &HcWeights<B>, norm: &B::Buf) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let coefficients = ops::HcOut { pre: &mut w.pre, post: &mut w.post, comb: &mut w.comb };
        let out = ops::HcEntered { coefficients, mix: &mut w.mix, collapsed: &mut w.collapsed, x: &mut w.x };
        ctx.hc().enter(hc, norm, (&w.streams, Some(&self.own.carried)), out)
    }

    /// Only the input of a sublayer: streams collapsed with the carried weights, then normalised.
    pub fn collapse_and_norm(&mut self, norm: &B::Buf) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        ctx.hc().collapse(&w.streams, &self.own.carried, &mut w.collapsed)?;
        ctx.norm(&w.collapsed, norm, (ctx.rows, ctx.config.hidden), &mut w.x)
    }

    /// Adds the sublayer's output `y` to the mixed streams and hands its collapse weights on.
    pub fn expand(&mut self) -> Result<(), BackendError> {
        let (hc, w) = (self.ctx.hc(), &mut *self.work);
        hc.expand(&w.y, &w.post, &w.comb, &mut w.streams)?;
        std::mem::swap(&mut self.own.carried, &mut w.pre);
        Ok(())
    }
}
