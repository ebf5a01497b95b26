//! Launcher of kernels/hc_enter.cu: the beginning of a sublayer of one row in one launch.
//! Never changes a bit against the four launches that it replaces. Surprising fact: the block that comes last goes on with what all have
//! brought, so there is no second launch, unless ops are recorded: then the sublayer goes on with its input while the coefficients are made.

use std::sync::Arc;

use super::meeting::Meeting;
use super::{Launch, STREAMS_MAX, SUM_THREADS};
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::sides::Side;
use crate::backend::ops::{HcEnter, HcEntered};
use crate::quant::QuantType;

fn kernel(ty: QuantType) -> Option<&'static str> {
    Some(match ty {
        QuantType::F32 => "hc_enter_f32",
        QuantType::F16 => "hc_enter_f16",
        QuantType::BF16 => "hc_enter_bf16",
        _ => return None,
    })
}

/// Whether the kernel exists for `op`.
pub fn takes(op: &HcEnter<'_, '_, CudaBackend>) -> bool {
    op.rows == 1 && op.stream_count <= STREAMS_MAX && kernel(op.w.shape.ty).is_some()
}

pub fn hc_enter(
    device: &Arc<Device>,
    meeting: &Meeting,
    op: HcEnter<'_, '_, CudaBackend>,
    out: HcEntered<'_, CudaBackend>,
) -> Result<(), BackendError> {
    let (n, hidden, shape) = (op.stream_count, op.hidden, op.w.shape);
    let mix = n * (n + 2);
    assert_eq!((shape.rows, shape.cols), (mix, n * hidden), "the shape of a mix");
    let unsupported = BackendError::UnsupportedType { backend: "cuda", op: "hc_enter", ty: shape.ty };
    let kernel = kernel(shape.ty).ok_or(unsupported)?;
    // The sublayer's input is ready long before the coefficients, which only its end needs.
    let is_apart = op.weights.is_some() && device.is_recording();
    let blocks = mix + 1 + usize::from(op.weights.is_some() && !is_apart);
    let launch = Launch::new(device, kernel, [blocks, 1, 1], SUM_THREADS).pointer(op.w.at);
    let launch = launch.buf(op.streams, n * hidden).buf(op.base, mix).buf(op.scale, 3);
    let launch = match op.weights {
        Some(weights) => launch.buf(weights, n),
        None => launch.pointer(0),
    };
    let to = out.coefficients;
    let launch = launch.buf(op.norm, hidden).buf(out.mix, mix).buf(to.pre, n).buf(to.post, n).buf(to.comb, n * n);
    let launch = launch.buf(out.x, hidden).pointer(meeting.coefficients(device)?);
    let launch = launch.int(n).int(hidden).float(op.rms_eps).float(op.hc_eps).int(op.iterations);
    // SAFETY: the parameters of the kernels `hc_enter`, with blocks of more threads than coefficients (8 streams have 80).
    let start = || unsafe { launch.start() };
    let Some(weights) = op.weights.filter(|_| is_apart) else { return start() };
    device.fork(Side::Coefficients)?;
    device.beside(Side::Coefficients, start)?;
    let launch = Launch::new(device, "hc_input", [1, 1, 1], SUM_THREADS);
    let launch = launch.buf(op.streams, n * hidden).buf(weights, n).buf(op.norm, hidden).buf(out.x, hidden);
    // SAFETY: the parameters of `hc_input`.
    unsafe { launch.int(n).int(hidden).float(op.rms_eps).start() }
}
