//! Output head (spec 3.11): collapse, norm, logits, for the rows that are asked for.
//! Never computes logits that nobody wants. Surprising fact: the collapse uses the weights that the last expert sublayer
//! made; the head has no mix of its own.

use std::ops::Range;

use super::pass::Pass;
use super::workspace::LOGIT_ROWS_MAX;
use crate::backend::{Backend, BackendError, ops};
use crate::models::LogitSink;
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
            let tile = first..rows.end.min(first + LOGIT_ROWS_MAX);
            self.head_tile(tile, host, sink)?;
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
        let (c, count) = (ctx.config, rows.len());
        let width = c.streams * c.hidden;
        ctx.backend.copy(&w.streams, rows.start * width, &mut w.head_streams, 0, count * width)?;
        ctx.backend.copy(&w.carried, rows.start * c.streams, &mut w.head_carried, 0, count * c.streams)?;
        let op = ops::HcCollapse {
            streams: &w.head_streams,
            weights: &w.head_carried,
            rows: count,
            stream_count: c.streams,
            hidden: c.hidden,
        };
        ctx.backend.hc_collapse(op, &mut w.collapsed)?;
        ctx.norm(&w.collapsed, &ctx.weights.output_norm, (count, c.hidden), &mut w.x)?;
        ctx.matmul_rows(&ctx.weights.output, &w.x, count, &mut w.logits)?;
        host.resize(c.vocab.max(c.hidden), 0.0);
        for row in 0..count {
            let pos = ctx.first_pos + rows.start + row;
            if let Some(probe) = self.probe.as_mut().filter(|p| p.wants(Point::HeadIn)) {
                ctx.backend.download(&w.x, row * c.hidden, &mut host[..c.hidden])?;
                probe.values(Point::HeadIn, c.layers.len(), pos, c.hidden, &host[..c.hidden]);
            }
            ctx.backend.download(&w.logits, row * c.vocab, &mut host[..c.vocab])?;
            sink(pos, &host[..c.vocab]);
        }
        Ok(())
    }
}
