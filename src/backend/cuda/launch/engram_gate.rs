//! Launcher of kernels/engram_gate.cu: one block a row and stream.
//! Never mixes streams.

use super::{Launch, SUM_THREADS};
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaBuf;
use crate::backend::ops::EngramGate;

pub fn engram_gate(
    device: &Device,
    op: EngramGate<'_, CudaBackend>,
    streams: &mut CudaBuf,
    gates: &mut CudaBuf,
) -> Result<(), BackendError> {
    let (n, rows, hidden) = (op.stream_count, op.rows, op.hidden);
    let launch = Launch::new(device, "engram_gate", [n, rows, 1], SUM_THREADS);
    let launch = launch.buf(op.keys_value, rows * (n + 1) * hidden).buf(op.q_norm, n * hidden);
    let launch = launch.buf(op.k_norm, n * hidden).buf(streams, rows * n * hidden).buf(gates, rows * n);
    let launch = launch.int(n).int(hidden).float(op.rms_eps).float(op.floor).float(1.0 / (hidden as f32).sqrt());
    // SAFETY: the parameters of `engram_gate`.
    unsafe { launch.start() }
}
