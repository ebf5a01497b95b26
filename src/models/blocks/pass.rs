//! One chunk on its way through a layer: what it carries, the ops in the form in which the layers use them, and the order of both halves.
//! Never decides how something is computed: that is in the files of an architecture. Surprising fact: `Ctx` is separate from `Pass` so that
//! ops can borrow some work buffers mutably while it is in use.

use super::architecture::{Architecture, GraphConfig, Weights};
use super::hyper_connections::Hc;
use super::moe::Moe;
use super::probing::{Place, show, show_ids};
use super::suffix::Piece;
use super::workspace::Workspace;
use crate::backend::ops::{self, CacheFormat};
use crate::backend::{Backend, BackendError};
use crate::models::RunnerOptions;
use crate::models::probe::{Point, Probe};
use crate::units::TokenId;

/// What stays fixed during a pass.
pub struct Ctx<'a, B: Backend, A: Architecture<B>> {
    pub config: &'a A::Config,
    pub backend: &'a B,
    pub weights: &'a Weights<B, A>,
    pub options: &'a RunnerOptions,
    /// Rows of this chunk.
    pub rows: usize,
    /// Position of row 0.
    pub first_pos: usize,
    /// Number of this pass among the pieces of one layer's rows.
    pub piece: usize,
}

impl<B: Backend, A: Architecture<B>> Clone for Ctx<'_, B, A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend, A: Architecture<B>> Copy for Ctx<'_, B, A> {}

impl<'a, B: Backend, A: Architecture<B>> Ctx<'a, B, A> {
    /// Tensors of `layer`.
    pub fn layer(&self, layer: usize) -> &'a A::Layer {
        &self.weights.layers[layer]
    }

    /// `out = [rows, outputs of w]`.
    pub fn matmul(&self, w: &B::Mat, x: &B::Buf, out: &mut B::Buf) -> Result<(), BackendError> {
        self.matmul_rows(w, x, self.rows, out)
    }

    /// As `matmul`, for another number of rows.
    pub fn matmul_rows(&self, w: &B::Mat, x: &B::Buf, rows: usize, out: &mut B::Buf) -> Result<(), BackendError> {
        self.backend.matmul(ops::Matmul { w: self.backend.view(w), x, rows, groups: 1 }, out)
    }

    /// `out = [rows, width]`, normalised.
    pub fn norm(
        &self,
        x: &B::Buf,
        weight: &B::Buf,
        (rows, width): (usize, usize),
        out: &mut B::Buf,
    ) -> Result<(), BackendError> {
        self.backend.rms_norm(ops::RmsNorm { x, weight, rows, width, eps: self.config.rms_eps }, out)
    }

    /// Rotation of `[rows, heads, width]` values at the chunk's own positions; the table depends on what the layer attends.
    pub fn rope(&self, layer: usize, heads: usize, width: usize) -> ops::Rope<'a, B> {
        ops::Rope {
            freqs: &self.weights.rope_freqs[usize::from(self.config.is_compressed(layer))],
            rows: self.rows,
            heads,
            width,
            rotary: self.config.rotary,
            first_pos: self.first_pos,
            pos_step: 1,
            inverse: false,
        }
    }

    /// Rounds fresh cache values, unless rounding is off.
    pub fn round(&self, format: CacheFormat, values: usize, x: &mut B::Buf) -> Result<(), BackendError> {
        if self.options.kv_exact { Ok(()) } else { self.backend.round_cache(ops::RoundCache { format, values }, x) }
    }

    /// The hyper-connection ops for this chunk.
    pub fn hc(&self) -> Hc<'a, B> {
        Hc { backend: self.backend, shape: self.config.hc_shape(), rows: self.rows }
    }
}

/// A chunk under way.
pub struct Pass<'a, B: Backend, A: Architecture<B>> {
    pub ctx: Ctx<'a, B, A>,
    pub state: &'a mut A::State,
    pub work: &'a mut Workspace<B>,
    /// Buffers that only this architecture has.
    pub own: &'a mut A::Own,
    pub probe: Option<&'a mut (dyn Probe + 'a)>,
}

impl<'a, B: Backend, A: Architecture<B>> Pass<'a, B, A> {
    /// All streams start as the token's embedding.
    pub fn start(&mut self, tokens: &[TokenId]) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let ids: Vec<i32> = tokens.iter().map(|t| *t as i32).collect();
        ctx.backend.upload_ids(&ids, &mut w.tokens, 0)?;
        let table = ctx.backend.view(&ctx.weights.embedding);
        let op = ops::Embed { table, ids: &w.tokens, rows: ctx.rows, copies: ctx.config.streams };
        ctx.backend.embed(op, &mut w.streams)?;
        A::start(self)
    }

    /// The part of the pass that is the `number`-th `piece` of one layer's rows.
    pub fn piece(&mut self, piece: Piece, number: usize) -> Pass<'_, B, A> {
        let ctx = Ctx { rows: piece.rows(), first_pos: self.ctx.first_pos + piece.first, piece: number, ..self.ctx };
        let probe = self.probe.as_mut().map(|p| &mut **p as &mut dyn Probe);
        Pass { ctx, state: self.state, work: self.work, own: self.own, probe }
    }

    /// The attention half of a layer.
    pub fn attention_half(&mut self, layer: usize) -> Result<(), BackendError> {
        let (weights, hidden, streams) = (self.ctx.layer(layer), self.ctx.config.hidden, self.ctx.config.streams);
        self.show(Point::AttentionMixIn, layer, streams * hidden, |w, _| &w.streams)?;
        A::enter(self, &weights.hc_attention, &weights.attention.norm)?;
        self.show(Point::AttentionIn, layer, hidden, |w, _| &w.x)?;
        A::attention(self, layer)?;
        self.show(Point::AttentionOut, layer, hidden, |w, _| &w.y)?;
        A::expand(self)
    }

    /// The expert half up to the choice of experts; returns it where it follows from `tokens`.
    pub fn enter_experts(&mut self, layer: usize, tokens: &[TokenId]) -> Result<Option<Vec<i32>>, BackendError> {
        let (weights, hidden, streams) = (self.ctx.layer(layer), self.ctx.config.hidden, self.ctx.config.streams);
        self.show(Point::MlpMixIn, layer, streams * hidden, |w, _| &w.streams)?;
        A::enter(self, &weights.hc_ffn, &weights.moe.norm)?;
        self.show(Point::MlpIn, layer, hidden, |w, _| &w.x)?;
        // The router and the shared expert need nothing of each other.
        self.ctx.backend.fork()?;
        let known = A::known_experts(weights, tokens);
        self.moe(layer).route(known.as_deref())?;
        Ok(known)
    }

    /// The end of the expert half, whose output is in its place.
    pub fn leave_experts(&mut self, layer: usize) -> Result<(), BackendError> {
        let (hidden, streams) = (self.ctx.config.hidden, self.ctx.config.streams);
        self.show(Point::MlpOut, layer, hidden, |w, _| &w.y)?;
        A::expand(self)?;
        self.show(Point::Streams, layer, streams * hidden, |w, _| &w.streams)?;
        A::show_end(self, layer)
    }

    /// The expert half of `layer`.
    pub fn moe(&mut self, layer: usize) -> Moe<'_, B> {
        let probe = self.probe.as_mut().map(|p| &mut **p as &mut dyn Probe);
        Pass { ctx: self.ctx, state: self.state, work: self.work, own: self.own, probe }.into_moe(layer)
    }

    /// As `moe`, for the rest of the pass.
    pub fn into_moe(self, layer: usize) -> Moe<'a, B> {
        let (ctx, w) = (self.ctx, self.work);
        Moe {
            backend: ctx.backend,
            sizes: ctx.config.moe_sizes(ctx.rows),
            rules: ctx.config.moe_rules(layer),
            weights: &ctx.layer(layer).moe,
            layer,
            first_pos: ctx.first_pos,
            rows: ctx.rows,
            x: &mut w.x,
            y: &mut w.y,
            work: &mut w.moe.0,
            probe: self.probe,
        }
    }

    /// Shows `[rows, width]` values to a probe that wants them.
    pub fn show(
        &mut self,
        point: Point,
        layer: usize,
        width: usize,
        buf: impl for<'w> Fn(&'w Workspace<B>, &'w A::Own) -> &'w B::Buf,
    ) -> Result<(), BackendError> {
        self.show_some(point, (layer, self.ctx.first_pos), (self.ctx.rows, width), buf)
    }

    /// As `show`, for another number of rows and another first position.
    pub fn show_some(
        &mut self,
        point: Point,
        (layer, first_pos): (usize, usize),
        (rows, width): (usize, usize),
        buf: impl for<'w> Fn(&'w Workspace<B>, &'w A::Own) -> &'w B::Buf,
    ) -> Result<(), BackendError> {
        let place = Place { point, layer, first_pos };
        show(self.ctx.backend, self.probe.as_deref_mut(), place, (rows, width), buf(self.work, self.own))
    }

    /// Shows `[rows, width]` ids to a probe that wants them.
    pub fn show_ids(
        &mut self,
        point: Point,
        layer: usize,
        width: usize,
        ids: impl for<'w> Fn(&'w Workspace<B>, &'w A::Own) -> &'w B::Ids,
    ) -> Result<(), BackendError> {
        let place = Place { point, layer, first_pos: self.ctx.first_pos };
        show_ids(self.ctx.backend, self.probe.as_deref_mut(), place, (self.ctx.rows, width), ids(self.work, self.own))
    }
}
