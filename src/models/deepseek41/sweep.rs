//! Many rows through the layers, layer by layer (spec 3.13, 7.4): within a layer in pieces of a chunk for everything but the experts, which
//! take the rows of the whole sweep.
//! Never changes a bit by its width. Surprising fact: an expert is read once a sweep however many rows there are, so wider sweeps are faster
//! exactly as far as the drive was the limit.

use super::ahead::Ahead;
use super::carry::Carry;
use super::grouping::Grouping;
use super::kv::KvState;
use super::pass::{Ctx, Pass};
use super::row_feed::RowFeed;
use super::runner::Host;
use super::suffix::{Piece, PieceKind, Suffix};
use super::workspace::{Workspace, ZERO_ROWS};
use crate::backend::{Backend, BackendError, ops};
use crate::models::probe::Probe;
use crate::models::supply::{ExpertMats, ExpertSupply};
use crate::models::{LogitSink, ModelError, Progress};
use crate::units::{ExpertIdx, LayerIdx, TokenId};

/// A sweep under way.
pub struct Sweep<'a, B: Backend> {
    /// `rows`, `first_pos` and `piece` are those of the piece under way.
    pub ctx: Ctx<'a, B>,
    pub state: &'a mut KvState<B>,
    pub work: &'a mut Workspace<B>,
    pub carry: &'a mut Carry<B>,
    pub host: &'a mut Host,
    pub experts: &'a dyn ExpertSupply<B>,
    pub probe: Option<&'a mut (dyn Probe + 'a)>,
    pub suffix: Suffix,
    /// Rows of a piece, at most.
    pub chunk: usize,
    pub tokens: &'a [TokenId],
    /// Told the share that is done, in rows.
    pub progress: &'a mut Progress<'a>,
}

impl<B: Backend> Sweep<'_, B> {
    /// All layers.
    pub fn layers(&mut self, mut feed: Option<&mut RowFeed<'_>>) -> Result<(), ModelError> {
        self.embed()?;
        let experts = self.ctx.config.experts;
        let mut ahead = Ahead::new(self.experts, 0, experts);
        for layer in 0..self.ctx.config.layers.len() {
            self.attention(layer, &mut feed, &mut ahead)?;
            let mut next = Ahead::new(self.experts, layer + 1, experts);
            self.routed_experts(layer, ahead, &mut next)?;
            self.leave(layer)?;
            ahead = next;
        }
        Ok(())
    }

    /// Says that `done` of `all` parts of half `half` of a layer are done, and stops if nobody wants the rest.
    fn tell(&mut self, (layer, half): (usize, usize), done: usize, all: usize) -> Result<(), ModelError> {
        let halves = 2 * self.ctx.config.layers.len() * all.max(1);
        let rows = self.tokens.len() * ((2 * layer + half) * all.max(1) + done) / halves;
        if (self.progress)(rows).is_break() { Err(ModelError::Interrupted) } else { Ok(()) }
    }

    /// Logits of the last `count` rows.
    pub fn logits(&mut self, count: usize, sink: &mut LogitSink<'_>) -> Result<(), ModelError> {
        let rows = self.tokens.len();
        for first in (rows - count..rows).step_by(self.chunk) {
            let piece = Piece { first, end: rows.min(first + self.chunk), kind: PieceKind::Whole };
            self.load_streams(piece)?;
            let mut logits = std::mem::take(&mut self.host.logits);
            let result = self.pass(piece, 0).head(0..piece.len(), &mut logits, sink);
            self.host.logits = logits;
            result?;
        }
        Ok(())
    }

    /// The pass of one piece, the `number`-th of its layer.
    fn pass(&mut self, piece: Piece, number: usize) -> Pass<'_, B> {
        let first_pos = self.state.len + piece.first;
        let ctx = Ctx { rows: piece.len(), first_pos, piece: number, ..self.ctx };
        let probe = self.probe.as_mut().map(|p| &mut **p as &mut dyn Probe);
        Pass { ctx, state: &mut *self.state, work: &mut *self.work, probe }
    }

    fn embed(&mut self) -> Result<(), ModelError> {
        let layer = self.suffix.layer(0);
        for piece in self.suffix.pieces(0, self.chunk) {
            debug_assert!(piece.first >= layer.inputs);
            let tokens = &self.tokens[piece.first..piece.end];
            self.pass(piece, 0).start(tokens)?;
            self.save_streams(piece)?;
        }
        Ok(())
    }

    /// Everything of a layer up to the choice of experts, piece by piece.
    fn attention<'s>(
        &mut self,
        layer: usize,
        feed: &mut Option<&mut RowFeed<'_>>,
        ahead: &mut Ahead<'s, B>,
    ) -> Result<(), ModelError> {
        let (c, k) = (self.ctx.config, self.ctx.config.experts_per_token);
        let whole = self.suffix.layer(layer).whole;
        self.host.grouping.ids.resize((self.tokens.len() - whole) * k, 0);
        let mut pieces = 0;
        for (number, piece) in self.suffix.pieces(layer, self.chunk).enumerate() {
            pieces = number + 1;
            self.tell((layer, 0), piece.first, self.tokens.len())?;
            self.load_streams(piece)?;
            if let (Some(table), Some(feed)) = (c.layers[layer].table, feed.as_mut()) {
                let mut bytes = std::mem::take(&mut self.host.row_bytes);
                let mut values = std::mem::take(&mut self.host.row_values);
                let (rows, range) = feed.wait(table, piece, &mut bytes)?;
                self.pass(piece, number).engram(layer, rows, &bytes[range], &mut values)?;
                (self.host.row_bytes, self.host.row_values) = (bytes, values);
            }
            match piece.kind {
                PieceKind::Inputs => self.pass(piece, number).remember(layer, false)?,
                PieceKind::Window => self.pass(piece, number).remember(layer, true)?,
                PieceKind::Whole => {
                    self.attend_and_route(layer, (piece, number))?;
                    let from = (piece.first - whole) * k;
                    let ids = &mut self.host.grouping.ids[from..from + piece.len() * k];
                    self.ctx.backend.download_ids(&self.work.router_ids, 0, ids)?;
                    if piece.first == whole && piece.end < self.tokens.len() {
                        ahead.ask_early(&distinct(&self.host.grouping.ids[..piece.len() * k], c.experts))?;
                    }
                }
            }
        }
        if let (Some(owner), true) = (c.layers[layer].owner, c.layers[layer].makes_rows) {
            self.state.settle_open(owner, pieces, c.head_dim, self.ctx.backend)?;
        }
        Ok(())
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
        pass.route(layer)?;
        if plan.selects_by.is_some() {
            self.save_selection(piece)?;
        }
        self.save_streams(piece)?;
        Ok(self.save_ffn(piece)?)
    }

    /// Whether the rows of `layer` are so many that practically every expert will be chosen: chosen evenly, each would be expected
    /// eight times, and left out once in 3,000 times.
    fn wants_all_experts(&self, layer: usize) -> bool {
        const EXPECTED_USES: usize = 8;
        let c = self.ctx.config;
        let rows = |layer| self.tokens.len() - self.suffix.layer(layer).whole;
        layer < c.layers.len() && rows(layer) * c.experts_per_token >= EXPECTED_USES * c.experts
    }

    /// Spec 3.9, step 5, for all rows: each expert once, by rising id. `next` may begin to read.
    fn routed_experts(
        &mut self,
        layer: usize,
        mut ahead: Ahead<'_, B>,
        next: &mut Ahead<'_, B>,
    ) -> Result<(), ModelError> {
        let reads_next = self.wants_all_experts(layer + 1);
        let (c, whole) = (self.ctx.config, self.suffix.layer(layer).whole);
        let mut grouping = std::mem::take(&mut self.host.grouping);
        let result = (|| {
            grouping.group(c.experts, c.experts_per_token);
            grouping.active.sort_unstable();
            self.experts.favour(LayerIdx(layer as u16), &grouping.ranked(c.experts_per_token));
            grouping.shift(whole, c.experts_per_token);
            self.ctx.backend.upload_ids(&grouping.rows, &mut self.carry.group_rows, 0)?;
            self.ctx.backend.upload_ids(&grouping.places, &mut self.carry.group_places, 0)?;
            ahead.settle(&grouping.active);
            ahead.ask_from(&grouping.active, 0)?;
            if self.is_one_piece(layer) {
                // Its input is still in place; the drive works meanwhile.
                let piece = Piece { first: whole, end: self.tokens.len(), kind: PieceKind::Whole };
                self.pass(piece, 0).shared_expert(layer)?;
            }
            for (done, expert) in grouping.active.iter().enumerate() {
                self.tell((layer, 1), done, grouping.active.len())?;
                ahead.ask_from(&grouping.active, done)?;
                if reads_next && ahead.has_asked(&grouping.active[done..]) {
                    next.ask_unseen(&ahead)?;
                }
                ahead.with(*expert, |mats| self.expert(layer, *expert, mats, &grouping))?;
            }
            Ok(())
        })();
        self.host.grouping = grouping;
        result
    }

    /// Whether all rows whose experts are computed fit one piece.
    fn is_one_piece(&self, layer: usize) -> bool {
        (1..=self.chunk).contains(&(self.tokens.len() - self.suffix.layer(layer).whole))
    }

    /// One expert: its rows in tiles, each tile's outputs added to the sums of its rows.
    fn expert(
        &mut self,
        layer: usize,
        expert: ExpertIdx,
        mats: &ExpertMats<'_, B>,
        grouping: &Grouping,
    ) -> Result<(), ModelError> {
        let (backend, hidden, range) = (self.ctx.backend, self.ctx.config.hidden, grouping.range(expert));
        for first in range.clone().step_by(self.chunk) {
            let range = first..range.end.min(first + self.chunk);
            let rows = range.len();
            let (w, carry) = (&mut *self.work, &mut *self.carry);
            let rows_of = |src, width| ops::MoveRows { src, indices: &carry.group_rows, range: range.clone(), width };
            backend.gather_rows(rows_of(&carry.x, hidden), &mut w.expert_x)?;
            let pair = ops::MatmulPair { a: mats.gate, b: mats.up, x: &w.expert_x, rows };
            backend.matmul_pair(pair, &mut w.expert_gate, &mut w.expert_up)?;
            let piece = Piece { first: 0, end: rows, kind: PieceKind::Whole };
            self.pass(piece, 0).expert_down(layer, expert, mats, rows)?;
            let (w, carry) = (&mut *self.work, &mut *self.carry);
            let weights = ops::MoveRows {
                src: &carry.router_weights,
                indices: &carry.group_places,
                range: range.clone(),
                width: 1,
            };
            backend.gather_rows(weights, &mut w.expert_weights)?;
            let indices = &carry.group_rows;
            let sums = ops::MoveRows { src: &carry.sum, indices, range: range.clone(), width: hidden };
            backend.gather_rows(sums, &mut w.sums)?;
            add(backend, (&w.expert_y, &w.expert_weights), &w.sums, (rows, hidden), &mut w.y)?;
            let back = ops::MoveRows { src: &w.y, indices, range, width: hidden };
            backend.scatter_rows(back, &mut carry.sum)?;
        }
        Ok(())
    }

    /// The shared expert, and the end of the layer, piece by piece.
    fn leave(&mut self, layer: usize) -> Result<(), ModelError> {
        let (backend, hidden) = (self.ctx.backend, self.ctx.config.hidden);
        for piece in self.suffix.pieces(layer, self.chunk).filter(|p| p.kind == PieceKind::Whole) {
            self.load_streams(piece)?;
            self.load_ffn(piece)?;
            if !self.is_one_piece(layer) {
                self.pass(piece, 0).shared_expert(layer)?;
            }
            let w = &mut *self.work;
            add(backend, (&w.sums, &w.ones), &w.shared_out, (piece.len(), hidden), &mut w.y)?;
            self.pass(piece, 0).leave_ffn(layer)?;
            self.save_streams(piece)?;
        }
        Ok(())
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

    /// What lies between the two halves of an expert sublayer, with the sums at zero.
    fn save_ffn(&mut self, piece: Piece) -> Result<(), BackendError> {
        let (w, carry, c) = (&*self.work, &mut *self.carry, self.ctx.config);
        let rows = Rows { backend: self.ctx.backend, piece };
        rows.save(&w.pre, &mut carry.pre, c.streams)?;
        rows.save(&w.post, &mut carry.post, c.streams)?;
        rows.save(&w.comb, &mut carry.comb, c.streams * c.streams)?;
        rows.save(&w.x, &mut carry.x, c.hidden)?;
        rows.save(&w.router_weights, &mut carry.router_weights, c.experts_per_token)?;
        for first in (piece.first..piece.end).step_by(ZERO_ROWS) {
            let piece = Piece { first, end: piece.end.min(first + ZERO_ROWS), ..piece };
            Rows { backend: self.ctx.backend, piece }.save(&w.zeros, &mut carry.sum, c.hidden)?;
        }
        Ok(())
    }

    fn load_ffn(&mut self, piece: Piece) -> Result<(), BackendError> {
        let (w, carry, c) = (&mut *self.work, &*self.carry, self.ctx.config);
        let rows = Rows { backend: self.ctx.backend, piece };
        rows.load(&carry.pre, &mut w.pre, c.streams)?;
        rows.load(&carry.post, &mut w.post, c.streams)?;
        rows.load(&carry.comb, &mut w.comb, c.streams * c.streams)?;
        rows.load(&carry.x, &mut w.x, c.hidden)?;
        rows.load(&carry.sum, &mut w.sums, c.hidden)
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

/// `out = weights * outputs + sums`, row by row: exactly how a single row adds one output more.
fn add<B: Backend>(
    backend: &B,
    (outputs, weights): (&B::Buf, &B::Buf),
    sums: &B::Buf,
    (rows, width): (usize, usize),
    out: &mut B::Buf,
) -> Result<(), BackendError> {
    backend.combine_experts(ops::CombineExperts { outputs, weights, shared: sums, rows, k: 1, width }, out)
}

/// The distinct ids, rising.
fn distinct(ids: &[i32], experts: usize) -> Vec<ExpertIdx> {
    let mut is_used = vec![false; experts];
    ids.iter().for_each(|id| is_used[*id as usize] = true);
    (0..experts).filter(|expert| is_used[*expert]).map(|expert| ExpertIdx(expert as u16)).collect()
}

/// Copies of a piece's rows between the buffers of a sweep and those of a pass.
struct Rows<'a, B: Backend> {
    backend: &'a B,
    piece: Piece,
}

impl<B: Backend> Rows<'_, B> {
    fn load(&self, carry: &B::Buf, work: &mut B::Buf, width: usize) -> Result<(), BackendError> {
        self.backend.copy(carry, self.piece.first * width, work, 0, self.piece.len() * width)
    }

    fn save(&self, work: &B::Buf, carry: &mut B::Buf, width: usize) -> Result<(), BackendError> {
        self.backend.copy(work, 0, carry, self.piece.first * width, self.piece.len() * width)
    }

    fn load_ids(&self, carry: &B::Ids, work: &mut B::Ids, width: usize) -> Result<(), BackendError> {
        self.backend.copy_ids(carry, self.piece.first * width, work, 0, self.piece.len() * width)
    }

    fn save_ids(&self, work: &B::Ids, carry: &mut B::Ids, width: usize) -> Result<(), BackendError> {
        self.backend.copy_ids(work, 0, carry, self.piece.first * width, self.piece.len() * width)
    }
}
