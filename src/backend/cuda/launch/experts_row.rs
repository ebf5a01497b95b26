//! Launchers of kernels/experts_row.cu: four kernels for all experts of a row, two of them for rounding.
//! Never waits. Surprising fact: pointers to the matrices travel as kernel parameters, so nothing is uploaded for them.

use std::sync::Arc;

use super::Launch;
use super::matmul::{Rounded, dot_threads};
use crate::backend::BackendError;
use crate::backend::cpu::matmul::Arithmetic;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::{CudaBackend, CudaView};
use crate::backend::ops::{ExpertsOut, ExpertsRow};
use crate::quant::QuantType;

/// Experts of one launch, see the kernel.
const EXPERTS_MAX: usize = 16;

fn gate_up_kernel(ty: QuantType) -> Option<&'static str> {
    Some(match ty {
        QuantType::Q8_0 => "experts_gate_up_q8_0",
        QuantType::Q2_K => "experts_gate_up_q2_k",
        QuantType::Q3_K => "experts_gate_up_q3_k",
        QuantType::Q4_K => "experts_gate_up_q4_k",
        QuantType::Q6_K => "experts_gate_up_q6_k",
        QuantType::IQ2_XXS => "experts_gate_up_iq2_xxs",
        QuantType::MXFP4 => "experts_gate_up_mxfp4",
        QuantType::F32 | QuantType::F16 | QuantType::BF16 | QuantType::I8 | QuantType::I32 => return None,
    })
}

fn down_kernel(ty: QuantType) -> Option<&'static str> {
    Some(match ty {
        QuantType::Q8_0 => "experts_down_q8_0",
        QuantType::Q2_K => "experts_down_q2_k",
        QuantType::Q3_K => "experts_down_q3_k",
        QuantType::Q4_K => "experts_down_q4_k",
        QuantType::Q6_K => "experts_down_q6_k",
        QuantType::IQ2_XXS => "experts_down_iq2_xxs",
        QuantType::MXFP4 => "experts_down_mxfp4",
        QuantType::F32 | QuantType::F16 | QuantType::BF16 | QuantType::I8 | QuantType::I32 => return None,
    })
}

/// Whether there are kernels for `op`.
pub fn is_fused(arithmetic: Arithmetic, op: &ExpertsRow<'_, '_, CudaBackend>) -> bool {
    let Some(first) = op.experts.first() else { return false };
    let same = |e: &crate::backend::ops::PlacedExpert<'_, CudaBackend>| {
        e.gate.shape == first.gate.shape && e.up.shape == first.gate.shape && e.down.shape == first.down.shape
    };
    arithmetic == Arithmetic::Fast
        && gate_up_kernel(first.gate.shape.ty).is_some()
        && down_kernel(first.down.shape.ty).is_some()
        && op.experts.iter().all(same)
}

/// One pointer an expert, padded to the size of the kernel's struct.
fn pointers<'w>(views: impl Iterator<Item = CudaView<'w>>) -> [u64; EXPERTS_MAX] {
    let mut all = [0; EXPERTS_MAX];
    all.iter_mut().zip(views).for_each(|(at, view)| *at = view.at);
    all
}

pub fn experts_row(
    device: &Arc<Device>,
    rounded: &Rounded,
    op: ExpertsRow<'_, '_, CudaBackend>,
    out: ExpertsOut<'_, CudaBackend>,
) -> Result<(), BackendError> {
    let (hidden, width) = (op.hidden, op.width);
    for experts in op.experts.chunks(EXPERTS_MAX) {
        let (gate, down) = (experts[0].gate.shape, experts[0].down.shape);
        assert_eq!((gate.rows, gate.cols, down.rows, down.cols), (width, hidden, hidden, width), "shapes of experts");
        let missing = |ty| BackendError::UnsupportedType { backend: "cuda", op: "experts_row", ty };
        let kernel = gate_up_kernel(gate.ty).ok_or_else(|| missing(gate.ty))?;
        let x = rounded.fill(device, op.x, (1, hidden), gate.ty.block_values())?;
        let mid = rounded.mid(device, experts.len() * width)?;
        // Half of a block's rows are those of the gates.
        let (threads, sharers) = dot_threads(gate.ty);
        let launch = Launch::new(device, kernel, [width.div_ceil(threads / sharers / 2), experts.len(), 1], threads);
        let launch = launch.block(&pointers(experts.iter().map(|e| e.gate)));
        let launch = launch.block(&pointers(experts.iter().map(|e| e.up))).pointer(x.codes).pointer(x.scales);
        let launch = launch.pointer(x.sums).pointer(mid).int(width).int(hidden).float(op.limit);
        // SAFETY: the parameters of the gate-up kernels, with `mid` for all experts of this launch.
        unsafe { launch.start()? };
        let m = rounded.fill_at(device, mid, (experts.len(), width), down.ty.block_values())?;
        let kernel = down_kernel(down.ty).ok_or_else(|| missing(down.ty))?;
        let mut places = [0u64; EXPERTS_MAX / 2];
        let mut most = 0;
        for (i, expert) in experts.iter().enumerate() {
            places[i / 2] |= (expert.place as u64) << (32 * (i % 2));
            most = most.max(expert.place + 1);
        }
        let (threads, sharers) = dot_threads(down.ty);
        let launch = Launch::new(device, kernel, [hidden.div_ceil(threads / sharers), experts.len(), 1], threads);
        let launch = launch.block(&pointers(experts.iter().map(|e| e.down))).block(&places);
        let launch = launch.pointer(m.codes).pointer(m.scales).pointer(m.sums).buf(out.outputs, most * hidden);
        // SAFETY: the parameters of the down kernels; every place is inside the outputs.
        unsafe { launch.int(width).int(hidden).start()? };
    }
    Ok(())
}
