//! Launcher of kernels/matmul_row.cuh: one activation row, rounded and multiplied in one launch.
//! Never changes a bit against the two launches that it replaces; `takes` says where it is the faster way.

use super::Launch;
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaBuf;
use crate::backend::ops::Matmul;
use crate::quant::QuantType;

/// Weight rows of a unit, values of a thread in a turn, most threads of a block, and turns, see the kernel.
const ROWS: usize = 4;
const EACH: usize = 16;
const THREADS_MAX: usize = 320;
const TURNS_MAX: usize = 2;
/// Places between the rows in shared memory, beyond their sums.
const PAD: usize = 8;
/// Threads of a multiprocessor that a launch takes: loads of so many keep memory busy, and others find room beside them. The two products behind attention,
/// long rows and groups of them, have nobody beside them, and take all that registers allow.
const AT_ONCE: [usize; 2] = [768, 1024];

/// Weights of a matrix up to which the kernel is the faster way: longer ones hide in the kernels that read along a row what a launch and its rounding take.
const WEIGHTS_MAX: usize = 48 << 20;

/// Whether the kernel exists for `op` and pays.
pub(super) fn takes(op: &Matmul<'_, '_, CudaBackend>) -> bool {
    let shape = op.w.shape;
    let fits = (1..=TURNS_MAX * THREADS_MAX * EACH).contains(&shape.cols);
    shape.ty == QuantType::Q8_0 && op.rows == 1 && fits && shape.rows * shape.cols <= WEIGHTS_MAX
}

pub(super) fn matmul_row(device: &Device, op: &Matmul<'_, '_, CudaBackend>, out: &CudaBuf) -> Result<(), BackendError> {
    start(device, op, out, None)
}

/// Two products of the same row in one launch.
pub(super) fn matmul_row_pair(
    device: &Device,
    (a, b): (&Matmul<'_, '_, CudaBackend>, &Matmul<'_, '_, CudaBackend>),
    (out_a, out_b): (&CudaBuf, &CudaBuf),
) -> Result<(), BackendError> {
    assert!(a.groups == 1 && b.groups == 1, "a pair has no groups");
    start(device, a, out_a, Some((b, out_b)))
}

fn start(
    device: &Device,
    op: &Matmul<'_, '_, CudaBackend>,
    out: &CudaBuf,
    second: Option<(&Matmul<'_, '_, CudaBackend>, &CudaBuf)>,
) -> Result<(), BackendError> {
    let (rows, cols) = (op.w.shape.rows, op.w.shape.cols);
    let more = second.as_ref().map_or(0, |(op, _)| op.w.shape.rows);
    let turns = cols.div_ceil(THREADS_MAX * EACH);
    let threads = cols.div_ceil(turns * EACH).next_multiple_of(32);
    let kernel = if turns > 1 { "matmul_row_q8_0_2" } else { "matmul_row_q8_0_1" };
    // For two units a sum and a factor, 4 bytes each, for each 32 columns of each row.
    let shared = 2 * 8 * ROWS * (turns * threads * EACH / 32 + PAD);
    let units = (rows / op.groups).div_ceil(ROWS) + more.div_ceil(ROWS);
    let at_once =
        device.properties().multiprocessors * (AT_ONCE[usize::from(turns > 1 || op.groups > 1)] / threads) / op.groups;
    let blocks = units.min(at_once.max(1)) * op.groups;
    let launch = Launch::new(device, kernel, [blocks, 1, 1], threads).shared(shared);
    let launch = launch.pointer(op.w.at).buf(op.x, op.groups * cols).buf(out, rows).int(rows).int(cols).int(op.groups);
    let launch = match second {
        Some((op, out)) => launch.pointer(op.w.at).buf(out, more).int(more),
        None => launch.pointer(0).pointer(0).int(0),
    };
    // SAFETY: the parameters of the kernels `matmul_row_q8_0`; the views say how large the matrices are.
    unsafe { launch.start() }
}
