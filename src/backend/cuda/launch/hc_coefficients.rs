//! Launcher of kernels/hc_coefficients.cu: one block a row.
//! Never takes more streams than its shared matrix holds.

use super::{Launch, STREAMS_MAX, SUM_THREADS};
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::ops::{HcCoefficients, HcOut};

pub fn hc_coefficients(
    device: &Device,
    op: HcCoefficients<'_, CudaBackend>,
    out: HcOut<'_, CudaBackend>,
) -> Result<(), BackendError> {
    let (n, rows) = (op.stream_count, op.rows);
    assert!(n <= STREAMS_MAX, "at most {STREAMS_MAX} streams");
    let mix = n * (n + 2);
    let launch = Launch::new(device, "hc_coefficients", [rows, 1, 1], SUM_THREADS);
    let launch = launch.buf(op.streams, rows * n * op.hidden).buf(op.mix, rows * mix).buf(op.base, mix);
    let launch = launch.buf(op.scale, 3).buf(out.pre, rows * n).buf(out.post, rows * n).buf(out.comb, rows * n * n);
    let launch = launch.int(n).int(op.hidden).float(op.rms_eps).float(op.hc_eps).int(op.iterations);
    // SAFETY: the parameters of `hc_coefficients`, for `rows` blocks of more threads than coefficients (8 streams have 80).
    unsafe { launch.start() }
}
