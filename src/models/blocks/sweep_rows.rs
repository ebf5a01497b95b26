//! The layers as a sweep sees them: pieces between the buffers in which all rows wait and those of a pass.
//! Never computes by itself. Surprising fact: how the output of the experts joins the streams is known before they are chosen, and waits
//! with the rows.

use super::architecture::{Architecture, Feed, Wait};
use super::moe::Moe;
use super::pass::Pass;
use super::suffix::{Piece, PieceKind};
use super::sweep::{Layers, Rows};
use super::workspace::Carry;
use crate::backend::{Backend, BackendError};
use crate::models::{LogitSink, ModelError};
use crate::units::TokenId;

/// The rows of a sweep.
pub struct SweepRows<'a, B: Backend, A: Architecture<B>> {
    /// Of all rows; its buffers hold one piece at a time.
    pub pass: Pass<'a, B, A>,
    pub carry: &'a mut Carry<B>,
    pub feed: &'a mut A::Feed,
    /// `[vocab]` of one row.
    pub logits: &'a mut Vec<f32>,
    pub tokens: &'a [TokenId],
}

impl<B: Backend, A: Architecture<B>> Pass<'_, B, A> {
    fn leave_streams(&mut self, carry: &mut Carry<B>, piece: Piece) -> Result<(), BackendError> {
        let (rows, c) = (Rows { backend: self.ctx.backend, piece }, self.ctx.config);
        rows.save(&self.work.streams, &mut carry.streams, c.streams * c.hidden)?;
        A::leave(self, &rows, Wait::Streams)
    }

    fn resume_streams(&mut self, carry: &Carry<B>, piece: Piece) -> Result<(), BackendError> {
        let (rows, c) = (Rows { backend: self.ctx.backend, piece }, self.ctx.config);
        rows.load(&carry.streams, &mut self.work.streams, c.streams * c.hidden)?;
        A::resume(self, &rows, Wait::Streams)
    }

    fn leave_mix(&mut self, carry: &mut Carry<B>, piece: Piece) -> Result<(), BackendError> {
        let (rows, streams) = (Rows { backend: self.ctx.backend, piece }, self.ctx.config.streams);
        rows.save(&self.work.post, &mut carry.post, streams)?;
        rows.save(&self.work.comb, &mut carry.comb, streams * streams)?;
        A::leave(self, &rows, Wait::Mix)
    }

    fn resume_mix(&mut self, carry: &Carry<B>, piece: Piece) -> Result<(), BackendError> {
        let (rows, streams) = (Rows { backend: self.ctx.backend, piece }, self.ctx.config.streams);
        rows.load(&carry.post, &mut self.work.post, streams)?;
        rows.load(&carry.comb, &mut self.work.comb, streams * streams)?;
        A::resume(self, &rows, Wait::Mix)
    }
}

impl<B: Backend, A: Architecture<B>> Layers<B> for SweepRows<'_, B, A> {
    fn start(&mut self, piece: Piece) -> Result<(), ModelError> {
        let mut pass = self.pass.piece(piece, 0);
        pass.start(&self.tokens[piece.first..piece.end])?;
        Ok(pass.leave_streams(self.carry, piece)?)
    }

    fn attend(&mut self, layer: usize, number: usize, piece: Piece) -> Result<(), ModelError> {
        let mut pass = self.pass.piece(piece, number);
        pass.resume_streams(self.carry, piece)?;
        self.feed.add(&mut pass, layer, piece)?;
        match piece.kind {
            PieceKind::Inputs => return Ok(A::remember(&mut pass, layer, false)?),
            PieceKind::Window => return Ok(A::remember(&mut pass, layer, true)?),
            PieceKind::Whole => {}
        }
        let rows = Rows { backend: pass.ctx.backend, piece };
        A::resume(&mut pass, &rows, Wait::Attention(layer))?;
        pass.attention_half(layer)?;
        pass.enter_experts(layer, &self.tokens[piece.first..piece.end])?;
        A::leave(&mut pass, &rows, Wait::Attention(layer))?;
        pass.leave_streams(self.carry, piece)?;
        Ok(pass.leave_mix(self.carry, piece)?)
    }

    fn settle(&mut self, layer: usize, pieces: usize) -> Result<(), ModelError> {
        Ok(A::settle(&self.pass.ctx, self.pass.state, layer, pieces)?)
    }

    fn moe(&mut self, layer: usize, piece: Piece) -> Moe<'_, B> {
        self.pass.piece(piece, 0).into_moe(layer)
    }

    fn leave(&mut self, layer: usize, piece: Piece) -> Result<(), ModelError> {
        let mut pass = self.pass.piece(piece, 0);
        pass.resume_streams(self.carry, piece)?;
        pass.resume_mix(self.carry, piece)?;
        pass.leave_experts(layer)?;
        Ok(pass.leave_streams(self.carry, piece)?)
    }

    fn head(&mut self, piece: Piece, sink: &mut LogitSink<'_>) -> Result<(), ModelError> {
        let mut pass = self.pass.piece(piece, 0);
        pass.resume_streams(self.carry, piece)?;
        Ok(pass.head(0..piece.rows(), self.logits, sink)?)
    }
}
