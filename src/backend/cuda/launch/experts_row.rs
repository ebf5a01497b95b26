//! Launchers of kernels/experts_row.cu: four kernels for all experts of a row, two of them for rounding.
//! Never waits. Surprising fact: pointers to the matrices travel as kernel parameters, so nothing is uploaded for them, or are found by the
//! device itself, which then names slots.

use std::sync::Arc;

use super::Launch;
use super::matmul::{Codes, Rounded, dot_threads, down_threads};
use crate::backend::BackendError;
use crate::backend::cpu::matmul::Arithmetic;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaBuf;
use crate::backend::cuda::{CudaBackend, CudaView, MatShape};
use crate::backend::ops::{ExpertsOut, ExpertsRow};
use crate::quant::QuantType;

/// Experts of one launch, see the kernel.
pub const EXPERTS_MAX: usize = 16;

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

/// Whether there are kernels for experts of these types.
pub fn has_kernels(arithmetic: Arithmetic, gate: QuantType, down: QuantType) -> bool {
    arithmetic == Arithmetic::Fast && gate_up_kernel(gate).is_some() && down_kernel(down).is_some()
}

/// Whether there are kernels for `op`.
pub fn is_fused(arithmetic: Arithmetic, op: &ExpertsRow<'_, '_, CudaBackend>) -> bool {
    let Some(first) = op.experts.first() else { return false };
    let same = |e: &crate::backend::ops::PlacedExpert<'_, CudaBackend>| {
        e.gate.shape == first.gate.shape && e.up.shape == first.gate.shape && e.down.shape == first.down.shape
    };
    has_kernels(arithmetic, first.gate.shape.ty, first.down.shape.ty) && op.experts.iter().all(same)
}

/// Where the matrices of a launch are.
struct Matrices {
    gates: [u64; EXPERTS_MAX],
    ups: [u64; EXPERTS_MAX],
    downs: [u64; EXPERTS_MAX],
    /// Two 32-bit places a word.
    places: [u64; EXPERTS_MAX / 2],
    /// Device memory that names slots instead, or 0; where the second and third matrix lie in a slot.
    slots: u64,
    offsets: [usize; 2],
}

/// One pointer an expert, padded to the size of the kernel's struct.
fn pointers<'w>(views: impl Iterator<Item = CudaView<'w>>) -> [u64; EXPERTS_MAX] {
    let mut all = [0; EXPERTS_MAX];
    all.iter_mut().zip(views).for_each(|(at, view)| *at = view.at);
    all
}

fn packed(places: impl Iterator<Item = usize>) -> [u64; EXPERTS_MAX / 2] {
    let mut words = [0; EXPERTS_MAX / 2];
    for (i, place) in places.enumerate() {
        words[i / 2] |= (place as u64) << (32 * (i % 2));
    }
    words
}

pub fn experts_row(
    device: &Arc<Device>,
    rounded: &Rounded,
    op: ExpertsRow<'_, '_, CudaBackend>,
    out: ExpertsOut<'_, CudaBackend>,
) -> Result<(), BackendError> {
    for experts in op.experts.chunks(EXPERTS_MAX) {
        let matrices = Matrices {
            gates: pointers(experts.iter().map(|e| e.gate)),
            ups: pointers(experts.iter().map(|e| e.up)),
            downs: pointers(experts.iter().map(|e| e.down)),
            places: packed(experts.iter().map(|e| e.place)),
            slots: 0,
            offsets: [0; 2],
        };
        let shape = ExpertShape {
            gate: experts[0].gate.shape,
            down: experts[0].down.shape,
            hidden: op.hidden,
            width: op.width,
            limit: op.limit,
        };
        let codes = rounded.fill(device, op.x, (1, op.hidden), shape.gate.ty.block_values())?;
        let most = experts.iter().map(|e| e.place + 1).max().unwrap_or(0);
        start(device, rounded, (shape, &matrices), experts.len(), codes, (out.outputs, most))?;
    }
    Ok(())
}

/// Types and sizes of the experts of a launch.
#[derive(Clone, Copy)]
pub struct ExpertShape {
    /// Of the first two matrices.
    pub gate: MatShape,
    pub down: MatShape,
    pub hidden: usize,
    pub width: usize,
    pub limit: f32,
}

/// `count` experts whose slots are named by the device memory at `slots` when the kernels run; expert i's output goes to place i. `before` is
/// queued behind the rounding of `x`, in front of the first kernel that looks at the slots.
pub fn experts_in_slots(
    device: &Arc<Device>,
    rounded: &Rounded,
    (shape, slots, offsets): (ExpertShape, u64, [usize; 2]),
    (x, count): (&CudaBuf, usize),
    outputs: &mut CudaBuf,
    before: impl FnOnce() -> Result<(), BackendError>,
) -> Result<(), BackendError> {
    assert!(count <= EXPERTS_MAX, "{count} experts of a row");
    let none = [0; EXPERTS_MAX];
    let matrices = Matrices { gates: none, ups: none, downs: none, places: packed(0..count), slots, offsets };
    let codes = rounded.fill(device, x, (1, shape.hidden), shape.gate.ty.block_values())?;
    before()?;
    start(device, rounded, (shape, &matrices), count, codes, (outputs, count))
}

/// The kernels behind the rounding of the row.
fn start(
    device: &Arc<Device>,
    rounded: &Rounded,
    (shape, matrices): (ExpertShape, &Matrices),
    count: usize,
    x: Codes,
    (outputs, places): (&mut CudaBuf, usize),
) -> Result<(), BackendError> {
    let ExpertShape { gate, down, hidden, width, limit } = shape;
    assert_eq!((gate.rows, gate.cols, down.rows, down.cols), (width, hidden, hidden, width), "shapes of experts");
    let missing = |ty| BackendError::UnsupportedType { backend: "cuda", op: "experts_row", ty };
    let kernel = gate_up_kernel(gate.ty).ok_or_else(|| missing(gate.ty))?;
    let mid = rounded.mid(device, count * width)?;
    // Half of a block's rows are those of the gates.
    let (threads, sharers) = dot_threads(gate.ty);
    let launch = Launch::new(device, kernel, [width.div_ceil(threads / sharers / 2), count, 1], threads);
    let launch = launch.block(&matrices.gates).block(&matrices.ups);
    let launch = launch.pointer(matrices.slots).long(matrices.offsets[0]);
    let launch = launch.pointer(x.codes).pointer(x.scales).pointer(x.sums);
    let launch = launch.pointer(mid).int(width).int(hidden).float(limit);
    // SAFETY: the parameters of the gate-up kernels, with `mid` for all experts of this launch; slots hold whole experts.
    unsafe { launch.start()? };
    let m = rounded.fill_at(device, mid, (count, width), down.ty.block_values())?;
    let kernel = down_kernel(down.ty).ok_or_else(|| missing(down.ty))?;
    let (threads, sharers) = down_threads(down.ty);
    let launch = Launch::new(device, kernel, [hidden.div_ceil(threads / sharers), count, 1], threads);
    let launch = launch.block(&matrices.downs).block(&matrices.places);
    let launch = launch.pointer(matrices.slots).long(matrices.offsets[1]);
    let launch = launch.pointer(m.codes).pointer(m.scales).pointer(m.sums).buf(outputs, places * hidden);
    // SAFETY: the parameters of the down kernels; every place is inside the outputs.
    unsafe { launch.int(width).int(hidden).start() }
}
