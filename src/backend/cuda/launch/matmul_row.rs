//! Launcher of kernels/matmul_row.cuh: one activation row, rounded and multiplied in one launch.
//! Never changes a bit against the two launches that it replaces; `takes` says where it is the faster way. Surprising fact: the kernel reads weights
//! while the one before it still runs, so it is never set up beside one that writes them (`Device::launch`).

use super::Launch;
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaBuf;
use crate::backend::ops::Matmul;
use crate::quant::QuantType;

/// Threads of a block and blocks of a multiprocessor, see the kernel.
const THREADS: usize = 256;
const ROW_BLOCKS: usize = 3;
/// Columns whose codes and scales fit into the shared memory that a kernel has without being asked for more.
const COLS_MAX: usize = (48 << 10) / 9 * 8;

/// Whether the kernel exists for `op` and pays.
pub(super) fn takes(op: &Matmul<'_, '_, CudaBackend>) -> bool {
    op.w.shape.ty == QuantType::Q8_0 && op.rows == 1 && op.w.shape.cols <= COLS_MAX
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
    // As many as run at once, and none without a row.
    let group_rows = (rows + more) / op.groups;
    let group_blocks = (ROW_BLOCKS * device.properties().multiprocessors / op.groups).clamp(1, group_rows.max(1));
    // A code of each column, and a scale, 4 bytes, of 32.
    let launch = Launch::new(device, "matmul_row_q8_0", [group_blocks * op.groups, 1, 1], THREADS);
    let launch = launch.shared(cols + cols / 32 * 4);
    let launch = launch.pointer(op.w.at).buf(op.x, op.groups * cols).buf(out, rows);
    let launch = launch.int(rows).int(cols).int(op.groups);
    let launch = match second {
        Some((op, out)) => launch.pointer(op.w.at).buf(out, more).int(more),
        None => launch.pointer(0).pointer(0).int(0),
    };
    // SAFETY: the parameters of `matmul_row_q8_0`; the views say how large the matrices are, which have whole rows a group.
    unsafe { launch.start() }
}
