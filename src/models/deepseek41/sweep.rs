//! The layers as a sweep sees them (spec 3.13, 7.4): pieces between the buffers of all rows and those of a pass.
//! Never computes by itself. Surprising fact: selections travel with the rows, since layers may use the one of an earlier layer.

use super::carry::Carry;
use super::kv::KvState;
use super::pass::{Ctx, Pass};
use super::row_feed::RowFeed;
use super::workspace::Workspace;
use crate::backend::{Backend, BackendError};
use crate::models::blocks::moe::Moe;
use crate::models::blocks::suffix::{Piece, PieceKind};
use crate::models::blocks::sweep::{Layers, Rows};
use crate::models::probe::Probe;
use crate::models::{LogitSink, ModelError};
use crate::units::TokenId;

/// The rows of a sweep.
pub struct SweepRows<'a, 'f, B: Backend> {
    /// `rows`, `first_pos` and `piece` are those of the piece under way.
    pub ctx: Ctx<'a, B>,
    pub state: &'a mut KvState<B>,
    pub work: &'a mut Workspace<B>,
    pub carry: &'a mut Carry<B>,
    /// Bytes and values of n-gram rows.
    pub rows_host: (&'a mut Vec<u8>, &'a mut Vec<f32>),
    pub logits: &'a mut Vec<f32>,
    pub probe: Option<&'a mut (dyn Probe + 'a)>,
    pub feed: Option<&'a mut RowFeed<'f>>,
    pub tokens: &'a [TokenId],
}

impl<B: Backend> SweepRows<'_, '_, B> {
    /// The pass of one piece, the `number`-th of its layer.
    fn pass(&mut self, piece: Piece, number: usize) -> Pass<'_, B> {
        let first_pos = self.state.len + piece.first;
        let ctx = Ctx { rows: piece.rows(), first_pos, piece: number, ..self.ctx };
        let probe = self.probe.as_mut().map(|p| &mut **p as &mut dyn Probe);
        Pass { ctx, state: &mut *self.state, work: &mut *self.work, probe }
    }

    /// Attention of a piece, then its experts' input and choice; all of it goes to the carry buffers.
    fn attend_and_route(&mut self, layer: usize, (piece, number): (Piece, usize)) -> Result<(), ModelError> {
        let plan = self.ctx.config.layers[layer];
        if plan.owner.is_some() && (plan.selects_by.is_none() || plan.masked) {
            self.load_selection(piece)?;
        }
        let mut pass = self.pass(piece, number);
        pass.attention_sublayer(layer)?;
        pass.enter_ffn(layer)?;
        pass.moe(layer).route(None)?;
        if plan.selects_by.is_some() {
            self.save_selection(piece)?;
        }
        self.save_streams(piece)?;
        Ok(self.save_mix(piece)?)
    }

    fn load_streams(&mut self, piece: Piece) -> Result<(), BackendError> {
        let (w, carry, c) = (&mut *self.work, &*self.carry, self.ctx.config);
        let rows = Rows { backend: self.ctx.backend, piece };
        rows.load(&carry.streams, &mut w.streams, c.streams * c.hidden)?;
        rows.load(&carry.carried, &mut w.carried, c.streams)
    }

    fn save_streams(&mut self, piece: Piece) -> Result<(), BackendError> {
        let (w, carry, c) = (&*self.work, &mut *self.carry, self.ctx.config);
        let rows = Rows { backend: self.ctx.backend, piece };
        rows.save(&w.streams, &mut carry.streams, c.streams * c.hidden)?;
        rows.save(&w.carried, &mut carry.carried, c.streams)
    }

    /// The mixing weights between the two halves of an expert sublayer.
    fn save_mix(&mut self, piece: Piece) -> Result<(), BackendError> {
        let (w, carry, c) = (&*self.work, &mut *self.carry, self.ctx.config);
        let rows = Rows { backend: self.ctx.backend, piece };
        rows.save(&w.pre, &mut carry.pre, c.streams)?;
        rows.save(&w.post, &mut carry.post, c.streams)?;
        rows.save(&w.comb, &mut carry.comb, c.streams * c.streams)
    }

    fn load_mix(&mut self, piece: Piece) -> Result<(), BackendError> {
        let (w, carry, c) = (&mut *self.work, &*self.carry, self.ctx.config);
        let rows = Rows { backend: self.ctx.backend, piece };
        rows.load(&carry.pre, &mut w.pre, c.streams)?;
        rows.load(&carry.post, &mut w.post, c.streams)?;
        rows.load(&carry.comb, &mut w.comb, c.streams * c.streams)
    }

    fn load_selection(&mut self, piece: Piece) -> Result<(), BackendError> {
        let (w, carry, c) = (&mut *self.work, &*self.carry, self.ctx.config);
        let rows = Rows { backend: self.ctx.backend, piece };
        rows.load_ids(&carry.selected, &mut w.selected, c.index_top_k)?;
        rows.load_ids(&carry.candidates, &mut w.candidates, carry.words)
    }

    fn save_selection(&mut self, piece: Piece) -> Result<(), BackendError> {
        let (w, carry, c) = (&*self.work, &mut *self.carry, self.ctx.config);
        let rows = Rows { backend: self.ctx.backend, piece };
        rows.save_ids(&w.selected, &mut carry.selected, c.index_top_k)?;
        rows.save_ids(&w.candidates, &mut carry.candidates, carry.words)
    }
}

impl<B: Backend> Layers<B> for SweepRows<'_, '_, B> {
    fn start(&mut self, piece: Piece) -> Result<(), ModelError> {
        let tokens = &self.tokens[piece.first..piece.end];
        self.pass(piece, 0).start(tokens)?;
        Ok(self.save_streams(piece)?)
    }

    fn attend(&mut self, layer: usize, number: usize, piece: Piece) -> Result<(), ModelError> {
        self.load_streams(piece)?;
        if let (Some(table), true) = (self.ctx.config.layers[layer].table, self.feed.is_some()) {
            let (mut bytes, mut values) = (std::mem::take(self.rows_host.0), std::mem::take(self.rows_host.1));
            let feed = self.feed.take().expect("checked");
            let (rows, range) = feed.wait(table, piece, &mut bytes)?;
            self.pass(piece, number).engram(layer, rows, &bytes[range], &mut values)?;
            self.feed = Some(feed);
            (*self.rows_host.0, *self.rows_host.1) = (bytes, values);
        }
        match piece.kind {
            PieceKind::Inputs => Ok(self.pass(piece, number).remember(layer, false)?),
            PieceKind::Window => Ok(self.pass(piece, number).remember(layer, true)?),
            PieceKind::Whole => self.attend_and_route(layer, (piece, number)),
        }
    }

    fn settle(&mut self, layer: usize, pieces: usize) -> Result<(), ModelError> {
        let c = self.ctx.config;
        if let (Some(owner), true) = (c.layers[layer].owner, c.layers[layer].makes_rows) {
            self.state.settle_open(owner, pieces, c.head_dim, self.ctx.backend)?;
        }
        Ok(())
    }

    fn moe(&mut self, layer: usize, piece: Piece) -> Moe<'_, B> {
        let (first_pos, ctx) = (self.state.len + piece.first, self.ctx);
        let ctx = Ctx { rows: piece.rows(), first_pos, ..ctx };
        let probe = self.probe.as_mut().map(|p| &mut **p as &mut dyn Probe);
        ctx.moe(layer, &mut *self.work, probe)
    }

    fn leave(&mut self, layer: usize, piece: Piece) -> Result<(), ModelError> {
        self.load_streams(piece)?;
        self.load_mix(piece)?;
        self.pass(piece, 0).leave_ffn(layer)?;
        Ok(self.save_streams(piece)?)
    }

    fn head(&mut self, piece: Piece, sink: &mut LogitSink<'_>) -> Result<(), ModelError> {
        self.load_streams(piece)?;
        let mut logits = std::mem::take(self.logits);
        let result = self.pass(piece, 0).head(0..piece.rows(), &mut logits, sink);
        *self.logits = logits;
        Ok(result?)
    }
}
