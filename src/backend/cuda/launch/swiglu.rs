//! Launcher of kernels/swiglu.cu: one thread a value.
//! Never clamps the gate from below.

use super::{Launch, THREADS};
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaBuf;
use crate::backend::ops::SwiGlu;

pub fn swiglu(device: &Device, op: SwiGlu<'_, CudaBackend>, gate: &mut CudaBuf) -> Result<(), BackendError> {
    let launch = Launch::new(device, "swiglu", [op.values.div_ceil(THREADS), 1, 1], THREADS);
    // SAFETY: the parameters of `swiglu`.
    unsafe { launch.buf(gate, op.values).buf(op.up, op.values).int(op.values).float(op.limit).start() }
}
