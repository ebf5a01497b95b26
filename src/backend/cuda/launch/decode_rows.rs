//! Launcher of kernels/decode_rows.cu: four values a thread.
//! Never looks at a row.

use super::{Launch, THREADS};
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaBuf;
use crate::backend::ops::DecodeRows;

pub fn decode_rows(device: &Device, op: DecodeRows<'_, CudaBackend>, out: &mut CudaBuf) -> Result<(), BackendError> {
    let fours = op.rows * op.width / 4;
    let launch = Launch::new(device, "decode_rows", [fours.div_ceil(THREADS), 1, 1], THREADS);
    let launch = launch.ids(op.bytes, op.words()).buf(out, op.rows * op.width);
    // SAFETY: the parameters of `decode_rows`.
    unsafe { launch.long(fours).int(op.width).start() }
}
