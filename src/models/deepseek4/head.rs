//! Output head (spec 3.13): a mix of its own, collapse, norm, logits, for the rows that are asked for.
//! Never computes logits that nobody wants. Surprising fact: the mix makes collapse weights only; what the op makes besides is not used.

use std::ops::Range;

use super::pass::Pass;
use super::workspace::LOGIT_ROWS_MAX;
use crate::backend::{Backend, BackendError, ops};
use crate::models::LogitSink;
use crate::models::blocks::hyper_connections::Hc;
use crate::models::blocks::probing::{Place, show};
use crate::models::probe::Point;

impl<B: Backend> Pass<'_, B> {
    /// Logits of `rows` of the chunk, handed to `sink` one row at a time.
    pub fn head(
        &mut self,
        rows: Range<usize>,
        host: &mut Vec<f32>,
        sink: &mut LogitSink<'_>,
    ) -> Result<(), BackendError> {
        for first in rows.clone().step_by(LOGIT_ROWS_MAX) {
            self.head_tile(first..rows.end.min(first + LOGIT_ROWS_MAX), host, sink)?;
        }
        Ok(())
    }

    fn head_tile(
        &mut self,
        rows: Range<usize>,
        host: &mut Vec<f32>,
        sink: &mut LogitSink<'_>,
    ) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let (c, count, pos) = (ctx.config, rows.len(), ctx.first_pos + rows.start);
        let width = c.streams * c.hidden;
        let place = |point| Place { point, layer: c.layers.len(), first_pos: pos };
        ctx.backend.copy(&w.streams, rows.start * width, &mut w.head_streams, 0, count * width)?;
        show(ctx.backend, self.probe.as_deref_mut(), place(Point::HeadMixIn), (count, width), &w.head_streams)?;
        let hc = Hc { rows: count, ..ctx.hc() };
        let out = ops::HcOut { pre: &mut w.pre, post: &mut w.post, comb: &mut w.comb };
        hc.mix(&ctx.weights.head_hc, &w.head_streams, &mut w.mix, out)?;
        hc.collapse(&w.head_streams, &w.pre, &mut w.collapsed)?;
        ctx.norm(&w.collapsed, &ctx.weights.output_norm, (count, c.hidden), &mut w.x)?;
        show(ctx.backend, self.probe.as_deref_mut(), place(Point::HeadIn), (count, c.hidden), &w.x)?;
        ctx.matmul_rows(&ctx.weights.output, &w.x, count, &mut w.logits)?;
        host.resize(c.vocab, 0.0);
        for row in 0..count {
            ctx.backend.download(&w.logits, row * c.vocab, host)?;
            sink(pos + row, host);
        }
        Ok(())
    }
}
