//! Hyper-connections: coefficients from the streams, collapse before a sublayer, expansion after it.
//! Never decides which weights collapse which sublayer: architectures differ there. Surprising fact: the mixing matrix is applied to the raw
//! streams and the norm factor to its result.

use crate::backend::{Backend, BackendError, ops};

/// Hyper-connection tensors of one sublayer.
pub struct HcWeights<B: Backend> {
    pub mix: B::Mat,
    pub base: B::Buf,
    pub scale: B::Buf,
}

/// Sizes and constants.
#[derive(Clone, Copy)]
pub struct HcShape {
    pub streams: usize,
    pub hidden: usize,
    pub rms_eps: f32,
    pub hc_eps: f32,
    pub iterations: usize,
}

/// The ops for some rows.
#[derive(Clone, Copy)]
pub struct Hc<'a, B: Backend> {
    pub backend: &'a B,
    pub shape: HcShape,
    pub rows: usize,
}

impl<B: Backend> Hc<'_, B> {
    /// Pre, post and combination from `[rows, streams, hidden]`; `mix` is work memory of `[rows, streams * (streams + 2)]`.
    pub fn mix(
        &self,
        weights: &HcWeights<B>,
        streams: &B::Buf,
        mix: &mut B::Buf,
        out: ops::HcOut<'_, B>,
    ) -> Result<(), BackendError> {
        let w = self.backend.view(&weights.mix);
        self.backend.matmul(ops::Matmul { w, x: streams, rows: self.rows, groups: 1 }, mix)?;
        let op = ops::HcCoefficients {
            streams,
            mix,
            base: &weights.base,
            scale: &weights.scale,
            rows: self.rows,
            stream_count: self.shape.streams,
            hidden: self.shape.hidden,
            rms_eps: self.shape.rms_eps,
            hc_eps: self.shape.hc_eps,
            iterations: self.shape.iterations,
        };
        self.backend.hc_coefficients(op, out)
    }

    /// How a sublayer begins: its coefficients, and the norm of the streams weighted with `weights`, or with the coefficients' own `pre`.
    pub fn enter(
        &self,
        hc: &HcWeights<B>,
        norm: &B::Buf,
        (streams, weights): (&B::Buf, Option<&B::Buf>),
        out: ops::HcEntered<'_, B>,
    ) -> Result<(), BackendError> {
        let op = ops::HcEnter {
            w: self.backend.view(&hc.mix),
            streams,
            base: &hc.base,
            scale: &hc.scale,
            weights,
            norm,
            rows: self.rows,
            stream_count: self.shape.streams,
            hidden: self.shape.hidden,
            rms_eps: self.shape.rms_eps,
            hc_eps: self.shape.hc_eps,
            iterations: self.shape.iterations,
        };
        self.backend.hc_enter(op, out)
    }

    /// `out = [rows, hidden]`: streams weighted with `[rows, streams]`.
    pub fn collapse(&self, streams: &B::Buf, weights: &B::Buf, out: &mut B::Buf) -> Result<(), BackendError> {
        let (stream_count, hidden) = (self.shape.streams, self.shape.hidden);
        let op = ops::HcCollapse { streams, weights, rows: self.rows, stream_count, hidden };
        self.backend.hc_collapse(op, out)
    }

    /// Mixes the streams and adds a sublayer's output `y` to each.
    pub fn expand(&self, y: &B::Buf, post: &B::Buf, comb: &B::Buf, streams: &mut B::Buf) -> Result<(), BackendError> {
        let (stream_count, hidden) = (self.shape.streams, self.shape.hidden);
        let op = ops::HcExpand { y, post, comb, rows: self.rows, stream_count, hidden };
        self.backend.hc_expand(op, streams)
    }
}
