//! Collapse of the output head (spec 3.11). Norm and logits are those of every architecture (`models::blocks::head`).
//! Never mixes: the head has no mix of its own. Surprising fact: the collapse uses the weights that the last expert sublayer made.

use std::ops::Range;

use super::pass::Pass;
use crate::backend::{Backend, BackendError};
use crate::models::blocks::hyper_connections::Hc;

impl<B: Backend> Pass<'_, B> {
    /// `collapsed = [rows, hidden]` from `head_streams`.
    pub fn collapse_head(&mut self, rows: Range<usize>) -> Result<(), BackendError> {
        let (ctx, w, own) = (self.ctx, &mut *self.work, &mut *self.own);
        let (streams, count) = (ctx.config.streams, rows.len());
        ctx.backend.copy(&own.carried, rows.start * streams, &mut own.head_carried, 0, count * streams)?;
        Hc { rows: count, ..ctx.hc() }.collapse(&w.head_streams, &own.head_carried, &mut w.collapsed)
    }
}
