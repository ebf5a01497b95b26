//! The layers as a sweep sees them (spec 3.15): pieces between the buffers of all rows and those of a pass.
//! Never computes by itself. Surprising fact: besides the streams only the mixing weights of the expert half travel with the rows.

use super::kv::KvState;
use super::pass::{Ctx, Pass};
use super::workspace::{Carry, Workspace};
use crate::backend::{Backend, BackendError};
use crate::models::blocks::moe::Moe;
use crate::models::blocks::suffix::{Piece, PieceKind};
use crate::models::blocks::sweep::{Layers, Rows};
use crate::models::probe::Probe;
use crate::models::{LogitSink, ModelError};
use crate::units::TokenId;

/// The rows of a sweep.
pub struct SweepRows<'a, B: Backend> {
    /// `rows` and `first_pos` are those of the piece under way.
    pub ctx: Ctx<'a, B>,
    pub state: &'a mut KvState<B>,
    pub work: &'a mut Workspace<B>,
    pub carry: &'a mut Carry<B>,
    pub logits: &'a mut Vec<f32>,
    pub probe: Option<&'a mut (dyn Probe + 'a)>,
    pub tokens: &'a [TokenId],
}

impl<B: Backend> SweepRows<'_, B> {
    fn pass(&mut self, piece: Piece) -> Pass<'_, B> {
        let ctx = Ctx { rows: piece.rows(), first_pos: self.state.len + piece.first, ..self.ctx };
        let probe = self.probe.as_mut().map(|p| &mut **p as &mut dyn Probe);
        Pass { ctx, state: &mut *self.state, work: &mut *self.work, probe }
    }

    fn load_streams(&mut self, piece: Piece) -> Result<(), BackendError> {
        let c = self.ctx.config;
        let rows = Rows { backend: self.ctx.backend, piece };
        rows.load(&self.carry.streams, &mut self.work.streams, c.streams * c.hidden)
    }

    fn save_streams(&mut self, piece: Piece) -> Result<(), BackendError> {
        let c = self.ctx.config;
        let rows = Rows { backend: self.ctx.backend, piece };
        rows.save(&self.work.streams, &mut self.carry.streams, c.streams * c.hidden)
    }
}

impl<B: Backend> Layers<B> for SweepRows<'_, B> {
    fn start(&mut self, piece: Piece) -> Result<(), ModelError> {
        let tokens = &self.tokens[piece.first..piece.end];
        self.pass(piece).start(tokens)?;
        Ok(self.save_streams(piece)?)
    }

    fn attend(&mut self, layer: usize, _number: usize, piece: Piece) -> Result<(), ModelError> {
        self.load_streams(piece)?;
        let tokens = &self.tokens[piece.first..piece.end];
        let mut pass = self.pass(piece);
        match piece.kind {
            PieceKind::Inputs => return Ok(pass.remember(layer, false)?),
            PieceKind::Window => return Ok(pass.remember(layer, true)?),
            PieceKind::Whole => pass.attention_sublayer(layer)?,
        }
        pass.enter_ffn(layer, tokens)?;
        self.save_streams(piece)?;
        let (w, carry, streams) = (&*self.work, &mut *self.carry, self.ctx.config.streams);
        let rows = Rows { backend: self.ctx.backend, piece };
        rows.save(&w.post, &mut carry.post, streams)?;
        Ok(rows.save(&w.comb, &mut carry.comb, streams * streams)?)
    }

    fn moe(&mut self, layer: usize, piece: Piece) -> Moe<'_, B> {
        let ctx = Ctx { rows: piece.rows(), first_pos: self.state.len + piece.first, ..self.ctx };
        let probe = self.probe.as_mut().map(|p| &mut **p as &mut dyn Probe);
        ctx.moe(layer, &mut *self.work, probe)
    }

    fn leave(&mut self, layer: usize, piece: Piece) -> Result<(), ModelError> {
        self.load_streams(piece)?;
        let (w, carry, streams) = (&mut *self.work, &*self.carry, self.ctx.config.streams);
        let rows = Rows { backend: self.ctx.backend, piece };
        rows.load(&carry.post, &mut w.post, streams)?;
        rows.load(&carry.comb, &mut w.comb, streams * streams)?;
        self.pass(piece).leave_ffn(layer)?;
        Ok(self.save_streams(piece)?)
    }

    fn head(&mut self, piece: Piece, sink: &mut LogitSink<'_>) -> Result<(), ModelError> {
        self.load_streams(piece)?;
        let mut logits = std::mem::take(self.logits);
        let result = self.pass(piece).head(0..piece.rows(), &mut logits, sink);
        *self.logits = logits;
        Ok(result?)
    }
}
