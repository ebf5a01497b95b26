//! Launcher of kernels/embed.cu: one thread a column.
//! Never decodes rows that are not asked for.

use super::{Launch, THREADS, over_rows};
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaBuf;
use crate::backend::ops::Embed;
use crate::quant::QuantType;

pub fn embed(device: &Device, op: Embed<'_, CudaBackend>, out: &mut CudaBuf) -> Result<(), BackendError> {
    let shape = op.table.shape;
    let kernel = match shape.ty {
        QuantType::F32 => "embed_f32",
        QuantType::F16 => "embed_f16",
        QuantType::BF16 => "embed_bf16",
        QuantType::Q8_0 => "embed_q8_0",
        QuantType::Q2_K => "embed_q2_k",
        QuantType::Q3_K => "embed_q3_k",
        QuantType::Q4_K => "embed_q4_k",
        QuantType::Q6_K => "embed_q6_k",
        QuantType::IQ2_XXS => "embed_iq2_xxs",
        QuantType::MXFP4 => "embed_mxfp4",
        ty @ (QuantType::I8 | QuantType::I32) => {
            return Err(BackendError::UnsupportedType { backend: "cuda", op: "embed", ty });
        }
    };
    let launch = Launch::new(device, kernel, over_rows(shape.cols, op.rows), THREADS);
    let launch = launch.pointer(op.table.at).ids(op.ids, op.rows).buf(out, op.rows * op.copies * shape.cols);
    // SAFETY: the parameters of the embed kernels; ids are rows of the table by contract.
    unsafe { launch.int(shape.rows).int(shape.cols).int(op.copies).start() }
}
