//! Collapse of the output head (spec 3.13): a mix of its own. Norm and logits are those of every architecture (`models::blocks::head`).
//! Never uses what the last layer left for a next one. Surprising fact: the mix makes collapse weights only; what the op makes besides is
//! not used.

use std::ops::Range;

use super::pass::Pass;
use crate::backend::{Backend, BackendError, ops};
use crate::models::blocks::hyper_connections::Hc;
use crate::models::probe::Point;

impl<B: Backend> Pass<'_, B> {
    /// `collapsed = [rows, hidden]` from `head_streams`.
    pub fn collapse_head(&mut self, rows: Range<usize>) -> Result<(), BackendError> {
        let (ctx, c, count) = (self.ctx, self.ctx.config, rows.len());
        let place = (c.layers.len(), ctx.first_pos + rows.start);
        self.show_some(Point::HeadMixIn, place, (count, c.streams * c.hidden), |w, _| &w.head_streams)?;
        let w = &mut *self.work;
        let hc = Hc { rows: count, ..ctx.hc() };
        let out = ops::HcOut { pre: &mut w.pre, post: &mut w.post, comb: &mut w.comb };
        hc.mix(&ctx.weights.more.head_hc, &w.head_streams, &mut w.mix, out)?;
        hc.collapse(&w.head_streams, &w.pre, &mut w.collapsed)
    }
}
