//! One chunk on its way through the layers: what it carries, and the order of things (spec 3.1, 3.3).
//! Never decides how something is computed: that is in the file of its spec section. Surprising fact: `Ctx` is separate
//! from `Pass` so that ops can borrow some work buffers mutably while it is in use.

use super::config::Config;
use super::kv::KvState;
use super::weights::{LayerWeights, Weights};
use super::workspace::Workspace;
use crate::backend::ops::{self, CacheFormat};
use crate::backend::{Backend, BackendError};
use crate::models::blocks::hyper_connections::Hc;
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
    /// Rows of this chunk.
    pub rows: usize,
    /// Position of row 0.
    pub first_pos: usize,
    /// Number of this pass among the pieces of one layer's rows.
    pub piece: usize,
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

    /// Spec 3.5 for `[rows, heads, width]` values at the chunk's own positions; the table depends on the layer's ratio.
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
            rules: self.config.moe_rules(),
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

    /// Spec 3.10: rounds fresh cache values, unless rounding is off.
    pub fn round(&self, format: CacheFormat, values: usize, x: &mut B::Buf) -> Result<(), BackendError> {
        if self.kv_exact { Ok(()) } else { self.backend.round_cache(ops::RoundCache { format, values }, x) }
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
    /// Spec 3.1: all streams start as the token's embedding, and the carried weights as (1, 0, 0, ..).
    pub fn start(&mut self, tokens: &[TokenId]) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let ids: Vec<i32> = tokens.iter().map(|t| *t as i32).collect();
        ctx.backend.upload_ids(&ids, &mut w.tokens, 0)?;
        let copies = ctx.config.streams;
        let table = ctx.backend.view(&ctx.weights.embedding);
        let op = ops::Embed { table, ids: &w.tokens, rows: ctx.rows, copies };
        ctx.backend.embed(op, &mut w.streams)?;
        let first: Vec<f32> = (0..ctx.rows * copies).map(|i| if i % copies == 0 { 1.0 } else { 0.0 }).collect();
        ctx.backend.upload(&first, &mut w.carried, 0)
    }

    /// The part of the attention sublayer that later tokens depend on, for rows whose own outputs nobody needs: compressed rows, index keys,
    /// and window rows where `has_window`.
    pub fn remember(&mut self, layer: usize, has_window: bool) -> Result<(), BackendError> {
        let weights = self.ctx.layer(layer);
        self.collapse_and_norm(&weights.attention.norm)?;
        if has_window {
            self.project_window(layer)?;
        }
        self.compress(layer)
    }

    /// Attention sublayer of spec 3.3.
    pub fn attention_sublayer(&mut self, layer: usize) -> Result<(), BackendError> {
        let (weights, hidden, streams) = (self.ctx.layer(layer), self.ctx.config.hidden, self.ctx.config.streams);
        self.show(Point::AttentionMixIn, layer, streams * hidden, |w| &w.streams)?;
        self.mix(&weights.hc_attention)?;
        self.collapse_and_norm(&weights.attention.norm)?;
        self.show(Point::AttentionIn, layer, hidden, |w| &w.x)?;
        self.attention(layer)?;
        self.show(Point::AttentionOut, layer, hidden, |w| &w.y)?;
        self.expand()
    }

    /// First half of the expert sublayer of spec 3.3, up to the input of the router.
    pub fn enter_ffn(&mut self, layer: usize) -> Result<(), BackendError> {
        let (weights, hidden, streams) = (self.ctx.layer(layer), self.ctx.config.hidden, self.ctx.config.streams);
        self.show(Point::MlpMixIn, layer, streams * hidden, |w| &w.streams)?;
        self.mix(&weights.hc_ffn)?;
        self.collapse_and_norm(&weights.moe.norm)?;
        self.show(Point::MlpIn, layer, hidden, |w| &w.x)
    }

    /// Second half of the expert sublayer.
    pub fn leave_ffn(&mut self, layer: usize) -> Result<(), BackendError> {
        let (hidden, streams) = (self.ctx.config.hidden, self.ctx.config.streams);
        self.show(Point::MlpOut, layer, hidden, |w| &w.y)?;
        self.expand()?;
        self.show(Point::Streams, layer, streams * hidden, |w| &w.streams)?;
        self.show(Point::PreMix, layer, streams, |w| &w.carried)
    }

    /// Shows `[rows, width]` values to a probe that wants them.
    pub fn show(
        &mut self,
        point: Point,
        layer: usize,
        width: usize,
        buf: impl Fn(&Workspace<B>) -> &B::Buf,
    ) -> Result<(), BackendError> {
        self.show_some(point, (layer, self.ctx.first_pos), (self.ctx.rows, width), buf)
    }

    /// As `show`, for another number of rows and another first position.
    pub fn show_some(
        &mut self,
        point: Point,
        (layer, first_pos): (usize, usize),
        (rows, width): (usize, usize),
        buf: impl Fn(&Workspace<B>) -> &B::Buf,
    ) -> Result<(), BackendError> {
        let place = Place { point, layer, first_pos };
        show(self.ctx.backend, self.probe.as_deref_mut(), place, (rows, width), buf(self.work))
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

    /// Spec 3.9: the expert half of `layer`.
    pub fn moe(&mut self, layer: usize) -> Moe<'_, B> {
        let probe = self.probe.as_mut().map(|p| &mut **p as &mut dyn Probe);
        self.ctx.moe(layer, &mut *self.work, probe)
    }
}
