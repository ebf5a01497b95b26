//! How a sublayer begins: mix, coefficients, weighted sum and norm, one by one.
//! Never fuses anything: this is the definition that a device's fused kernel must equal. Surprising fact: it is generic, since it only puts
//! other ops in order.

use crate::backend::ops::{HcCoefficients, HcCollapse, HcEnter, HcEntered, HcOut, Matmul, RmsNorm};
use crate::backend::{Backend, BackendError};

pub fn hc_enter<B: Backend>(backend: &B, op: HcEnter<'_, '_, B>, out: HcEntered<'_, B>) -> Result<(), BackendError> {
    let HcEnter { streams, base, scale, rows, stream_count, hidden, rms_eps, hc_eps, iterations, .. } = op;
    backend.matmul(Matmul { w: op.w, x: streams, rows, groups: 1 }, out.mix)?;
    let coefficients =
        HcCoefficients { streams, mix: out.mix, base, scale, rows, stream_count, hidden, rms_eps, hc_eps, iterations };
    let HcOut { pre, post, comb } = out.coefficients;
    backend.hc_coefficients(coefficients, HcOut { pre: &mut *pre, post, comb })?;
    let weights = op.weights.unwrap_or(pre);
    backend.hc_collapse(HcCollapse { streams, weights, rows, stream_count, hidden }, out.collapsed)?;
    let norm = RmsNorm { x: out.collapsed, weight: op.norm, rows, width: hidden, eps: rms_eps };
    backend.rms_norm(norm, out.x)
}
