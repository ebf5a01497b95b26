//! A chunk of this architecture on its way through the layers: hyper-connections (spec 3.2) and the rounding of what is cached (3.6).
//! Never decides the order of a layer's steps: `models::blocks::pass` does. Surprising fact: a sublayer is collapsed with the weights that
//! its own mix has just made.

use super::architecture::V4;
use crate::backend::ops::{self, CacheFormat};
use crate::backend::{Backend, BackendError};
use crate::models::blocks::hyper_connections::HcWeights;
use crate::models::blocks::pass;

/// What stays fixed during a pass.
pub type Ctx<'a, B> = pass::Ctx<'a, B, V4>;
/// A chunk under way.
pub type Pass<'a, B> = pass::Pass<'a, B, V4>;

impl<B: Backend> Ctx<'_, B> {
    /// The format of rows that are attended: all but the rotated values.
    pub fn row_format(&self) -> CacheFormat {
        CacheFormat::Fp8Heads { width: self.config.head_dim, tail: self.config.rotary }
    }

    /// Spec 3.6: transforms and rounds `count` index rows. Without rounding the transform would change no score, so it is left out, too.
    pub fn round_index(&self, count: usize, from: &B::Buf, to: &mut B::Buf) -> Result<(), BackendError> {
        let values = count * self.config.index_dim;
        if self.options.kv_exact {
            return self.backend.copy(from, 0, to, 0, values);
        }
        self.matmul_rows(&self.weights.more.hadamard, from, count, to)?;
        self.round(CacheFormat::Fp4Block32, values, to)
    }
}

impl<B: Backend> Pass<'_, B> {
    /// Spec 3.2: mixing weights from the streams, and the normalised input of the sublayer.
    pub fn enter(&mut self, hc: &HcWeights<B>, norm: &B::Buf) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let coefficients = ops::HcOut { pre: &mut w.pre, post: &mut w.post, comb: &mut w.comb };
        let out = ops::HcEntered { coefficients, mix: &mut w.mix, collapsed: &mut w.collapsed, x: &mut w.x };
        ctx.hc().enter(hc, norm, (&w.streams, None), out)
    }

    /// Spec 3.2, last step: the output `y` of a sublayer joins the mixed streams.
    pub fn expand(&mut self) -> Result<(), BackendError> {
        let (hc, w) = (self.ctx.hc(), &mut *self.work);
        hc.expand(&w.y, &w.post, &w.comb, &mut w.streams)
    }

    /// What later tokens depend on, for rows whose own outputs nobody needs.
    pub fn remember(&mut self, layer: usize, has_window: bool) -> Result<(), BackendError> {
        let weights = self.ctx.layer(layer);
        self.enter(&weights.hc_attention, &weights.attention.norm)?;
        if has_window {
            self.project_kv(layer)?;
            self.keep_window(layer)?;
        }
        self.compress(layer)
    }
}
