//! One chunk on its way through the layers: what it carries, and the order of things (spec 3.1, 3.2, 3.14).
//! Never decides how something is computed: that is in the file of its spec section. Surprising fact: a sublayer is collapsed with the
//! weights that its own mix has just made.

use super::config::Config;
use super::kv::KvState;
use super::weights::{LayerWeights, Weights};
use super::workspace::Workspace;
use crate::backend::ops::{self, CacheFormat};
use crate::backend::{Backend, BackendError};
use crate::models::blocks::hyper_connections::{Hc, HcWeights};
use crate::models::blocks::moe::Moe;
use crate::models::blocks::probing::{Place, show, show_ids};
use crate::models::probe::{Point, Probe};
use crate::units::TokenId;

/// What stays fixed during a pass, and the ops in the form in which the layers use them.
pub struct Ctx<'a, B: Backend> {
    pub config: &'a Config,
    pub backend: &'a B,
    pub weights: &'a Weights<B>,
    /// Leave the rounding of cached rows out.
    pub kv_exact: bool,
    /// Context length of the state.
    pub ctx: usize,
    /// Rows of this chunk.
    pub rows: usize,
    /// Position of row 0.
    pub first_pos: usize,
}

impl<B: Backend> Clone for Ctx<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Ctx<'_, B> {}

impl<'a, B: Backend> Ctx<'a, B> {
    /// Tensors of `layer`.
    pub fn layer(&self, layer: usize) -> &'a LayerWeights<B> {
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

    /// Spec 3.4 for `[rows, heads, width]` values at the chunk's own positions; the table depends on the layer's ratio.
    pub fn rope(&self, layer: usize, heads: usize, width: usize) -> ops::Rope<'a, B> {
        let compressed = usize::from(self.config.layers[layer].ratio > 0);
        ops::Rope {
            freqs: &self.weights.rope_freqs[compressed],
            rows: self.rows,
            heads,
            width,
            rotary: self.config.rotary,
            first_pos: self.first_pos,
            pos_step: 1,
            inverse: false,
        }
    }

    /// Spec 3.6: rounds fresh cache values, unless rounding is off.
    pub fn round(&self, format: CacheFormat, values: usize, x: &mut B::Buf) -> Result<(), BackendError> {
        if self.kv_exact { Ok(()) } else { self.backend.round_cache(ops::RoundCache { format, values }, x) }
    }

    /// The format of rows that are attended: all but the rotated values.
    pub fn row_format(&self) -> CacheFormat {
        CacheFormat::Fp8Heads { width: self.config.head_dim, tail: self.config.rotary }
    }

    /// Spec 3.6: transforms and rounds `count` index rows. Without rounding the transform would change no score, so it is left out, too.
    pub fn round_index(&self, count: usize, from: &B::Buf, to: &mut B::Buf) -> Result<(), BackendError> {
        let values = count * self.config.index_dim;
        if self.kv_exact {
            return self.backend.copy(from, 0, to, 0, values);
        }
        self.matmul_rows(&self.weights.hadamard, from, count, to)?;
        self.round(CacheFormat::Fp4Block32, values, to)
    }

    /// The hyper-connection ops for this chunk.
    pub fn hc(&self) -> Hc<'a, B> {
        Hc { backend: self.backend, shape: self.config.hc_shape(), rows: self.rows }
    }

    /// The expert half of `layer` over the work buffers.
    pub fn moe<'p>(&self, layer: usize, w: &'p mut Workspace<B>, probe: Option<&'p mut (dyn Probe + 'p)>) -> Moe<'p, B>
    where
        'a: 'p,
    {
        Moe {
            backend: self.backend,
            sizes: self.config.moe_sizes(self.rows),
            rules: self.config.moe_rules(layer),
            weights: &self.layer(layer).moe,
            layer,
            first_pos: self.first_pos,
            rows: self.rows,
            x: &mut w.x,
            y: &mut w.y,
            work: &mut w.moe.0,
            probe,
        }
    }
}

/// A chunk under way.
pub struct Pass<'a, B: Backend> {
    pub ctx: Ctx<'a, B>,
    pub state: &'a mut KvState<B>,
    pub work: &'a mut Workspace<B>,
    pub probe: Option<&'a mut (dyn Probe + 'a)>,
}

impl<B: Backend> Pass<'_, B> {
    /// Spec 3.1: all streams start as the token's embedding.
    pub fn start(&mut self, tokens: &[TokenId]) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let ids: Vec<i32> = tokens.iter().map(|t| *t as i32).collect();
        ctx.backend.upload_ids(&ids, &mut w.tokens, 0)?;
        let table = ctx.backend.view(&ctx.weights.embedding);
        let op = ops::Embed { table, ids: &w.tokens, rows: ctx.rows, copies: ctx.config.streams };
        ctx.backend.embed(op, &mut w.streams)
    }

    /// Spec 3.2: mixing weights from the streams, and the normalised input of the sublayer.
    fn enter(&mut self, hc: &HcWeights<B>, norm: &B::Buf) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let out = ops::HcOut { pre: &mut w.pre, post: &mut w.post, comb: &mut w.comb };
        ctx.hc().mix(hc, &w.streams, &mut w.mix, out)?;
        ctx.hc().collapse(&w.streams, &w.pre, &mut w.collapsed)?;
        ctx.norm(&w.collapsed, norm, (ctx.rows, ctx.config.hidden), &mut w.x)
    }

    /// Spec 3.2, last step: the output `y` of a sublayer joins the mixed streams.
    fn expand(&mut self) -> Result<(), BackendError> {
        let (hc, w) = (self.ctx.hc(), &mut *self.work);
        hc.expand(&w.y, &w.post, &w.comb, &mut w.streams)
    }

    /// The part of the attention sublayer that later tokens depend on, for rows whose own outputs nobody needs: compressed rows, index
    /// keys, and window rows where `has_window`.
    pub fn remember(&mut self, layer: usize, has_window: bool) -> Result<(), BackendError> {
        let weights = self.ctx.layer(layer);
        self.enter(&weights.hc_attention, &weights.attention.norm)?;
        if has_window {
            self.project_window(layer)?;
        }
        self.compress(layer)
    }

    /// The attention half of a layer.
    pub fn attention_sublayer(&mut self, layer: usize) -> Result<(), BackendError> {
        let (weights, hidden, streams) = (self.ctx.layer(layer), self.ctx.config.hidden, self.ctx.config.streams);
        self.show(Point::AttentionMixIn, layer, streams * hidden, |w| &w.streams)?;
        self.enter(&weights.hc_attention, &weights.attention.norm)?;
        self.show(Point::AttentionIn, layer, hidden, |w| &w.x)?;
        self.attention(layer)?;
        self.show(Point::AttentionOut, layer, hidden, |w| &w.y)?;
        self.expand()
    }

    /// The expert half up to the choice of experts; returns it where it follows from `tokens`.
    pub fn enter_ffn(&mut self, layer: usize, tokens: &[TokenId]) -> Result<Option<Vec<i32>>, BackendError> {
        let (weights, hidden, streams) = (self.ctx.layer(layer), self.ctx.config.hidden, self.ctx.config.streams);
        self.show(Point::MlpMixIn, layer, streams * hidden, |w| &w.streams)?;
        self.enter(&weights.hc_ffn, &weights.moe.norm)?;
        self.show(Point::MlpIn, layer, hidden, |w| &w.x)?;
        let known = weights.token_experts.as_ref().map(|table| table.of(tokens));
        self.moe(layer).route(known.as_deref())?;
        Ok(known)
    }

    /// The end of the expert half.
    pub fn leave_ffn(&mut self, layer: usize) -> Result<(), BackendError> {
        let (hidden, streams) = (self.ctx.config.hidden, self.ctx.config.streams);
        self.show(Point::MlpOut, layer, hidden, |w| &w.y)?;
        self.expand()?;
        self.show(Point::Streams, layer, streams * hidden, |w| &w.streams)
    }

    /// The expert half of `layer`.
    pub fn moe(&mut self, layer: usize) -> Moe<'_, B> {
        let probe = self.probe.as_mut().map(|p| &mut **p as &mut dyn Probe);
        self.ctx.moe(layer, &mut *self.work, probe)
    }

    /// Shows `[rows, width]` values to a probe that wants them.
    pub fn show(
        &mut self,
        point: Point,
        layer: usize,
        width: usize,
        buf: impl Fn(&Workspace<B>) -> &B::Buf,
    ) -> Result<(), BackendError> {
        let place = Place { point, layer, first_pos: self.ctx.first_pos };
        show(self.ctx.backend, self.probe.as_deref_mut(), place, (self.ctx.rows, width), buf(self.work))
    }

    /// Shows `[rows, width]` ids to a probe that wants them.
    pub fn show_ids(
        &mut self,
        point: Point,
        layer: usize,
        width: usize,
        ids: impl Fn(&Workspace<B>) -> &B::Ids,
    ) -> Result<(), BackendError> {
        let place = Place { point, layer, first_pos: self.ctx.first_pos };
        show_ids(self.ctx.backend, self.probe.as_deref_mut(), place, (self.ctx.rows, width), ids(self.work))
    }
}
