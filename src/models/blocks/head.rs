//! Output head: norm and logits of the rows that are asked for, a few at a time.
//! Never computes logits that nobody wants. Surprising fact: how the streams are collapsed before the norm is what architectures differ in.

use std::ops::Range;

use super::architecture::Architecture;
use super::pass::Pass;
use super::workspace::{LOGIT_ROWS_MAX, tiles};
use crate::backend::{Backend, BackendError, ops};
use crate::models::LogitSink;
use crate::models::probe::Point;
use crate::units::TokenId;

impl<B: Backend, A: Architecture<B>> Pass<'_, B, A> {
    /// Logits of `rows` of the chunk, handed to `sink` one row at a time.
    pub fn head(
        &mut self,
        rows: Range<usize>,
        host: &mut Vec<f32>,
        sink: &mut LogitSink<'_>,
    ) -> Result<(), BackendError> {
        tiles(rows, LOGIT_ROWS_MAX).try_for_each(|tile| self.head_tile(tile, host, sink))
    }

    fn head_tile(
        &mut self,
        rows: Range<usize>,
        host: &mut Vec<f32>,
        sink: &mut LogitSink<'_>,
    ) -> Result<(), BackendError> {
        let (ctx, vocab, pos) = (self.ctx, self.ctx.config.vocab, self.ctx.first_pos + rows.start);
        let count = rows.len();
        self.logits(rows)?;
        host.resize(vocab, 0.0);
        for row in 0..count {
            ctx.backend.download(&self.work.logits, row * vocab, host)?;
            sink(pos + row, host);
        }
        Ok(())
    }

    /// The most likely token after the only row, or one drawn by `rule`; `None` where nothing can be chosen. Its logits stay where they are.
    pub fn choose(&mut self, rule: Option<ops::DrawRule>) -> Result<Option<TokenId>, BackendError> {
        self.logits(0..1)?;
        let (backend, w) = (self.ctx.backend, &mut *self.work);
        let (values, count) = (&w.logits, self.ctx.config.vocab);
        match rule {
            None => backend.best_of(ops::BestOf { values, count }, &mut w.chosen)?,
            Some(rule) => backend.draw(ops::Draw { values, count, rule }, &mut w.chosen)?,
        }
        let mut id = [0];
        backend.download_ids(&w.chosen, 0, &mut id)?;
        Ok(TokenId::try_from(id[0]).ok())
    }

    /// Logits of a tile, kept on the device.
    fn logits(&mut self, rows: Range<usize>) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let (c, count, pos) = (ctx.config, rows.len(), ctx.first_pos + rows.start);
        let width = c.streams * c.hidden;
        ctx.backend.copy(&w.streams, rows.start * width, &mut w.head_streams, 0, count * width)?;
        A::collapse_head(self, rows)?;
        let w = &mut *self.work;
        ctx.norm(&w.collapsed, &ctx.weights.output_norm, (count, c.hidden), &mut w.x)?;
        self.show_some(Point::HeadIn, (ctx.weights.layers.len(), pos), (count, c.hidden), |w, _| &w.x)?;
        let w = &mut *self.work;
        ctx.matmul_rows(&ctx.weights.output, &w.x, count, &mut w.logits)
    }
}
