//! Launcher of kernels/float_strips.cuh: products of many rows of floats.
//! Never changes a bit: strips add in the lanes of the other kernels over floats. Surprising fact: rows that are no whole 16 bytes are left to
//! the kernels that take four rows, since copies on their way to shared memory are of 16 bytes.

use super::{Launch, has_shared};
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::CudaBuf;
use crate::backend::ops::Matmul;
use crate::quant::QuantType;

/// Columns of a step, and steps in shared memory.
const COLS: usize = 128;
const STAGES: usize = 4;
/// Fewest rows for which strips are faster than rows four at a time (measured on an H200).
const ROWS_MIN: usize = 64;

/// A kernel: its name, weight rows and activation rows of a block, and its threads.
struct Kernel {
    name: &'static str,
    outputs: usize,
    rows: usize,
    threads: usize,
}

/// Fewest large blocks that keep the device as busy as small ones: about three for four of 132 multiprocessors.
const WIDE_MIN: usize = 96;

/// The kernel for `rows` rows and `outputs` outputs of each of `groups` groups, where a block may have what `fits`.
fn kernel(
    ty: QuantType,
    (rows, groups, outputs): (usize, usize, usize),
    fits: impl Fn(usize) -> bool,
) -> Option<Kernel> {
    let [few, wide] = match ty {
        QuantType::F32 => ["float_strips_f32", "float_strips_f32_wide"],
        QuantType::F16 => ["float_strips_f16", "float_strips_f16_wide"],
        QuantType::BF16 => ["float_strips_bf16", "float_strips_bf16_wide"],
        _ => return None,
    };
    let wide = Kernel { name: wide, outputs: 48, rows: 32, threads: 256 };
    let blocks = rows.div_ceil(wide.rows) * groups * outputs.div_ceil(wide.outputs);
    let few = Kernel { name: few, outputs: 24, rows: 8, threads: 128 };
    let is_possible = |kernel: &Kernel| fits(shared_bytes(kernel, ty));
    Some(wide).filter(|wide| blocks >= WIDE_MIN && is_possible(wide)).or(Some(few).filter(is_possible))
}

fn kernel_of(device: &Device, op: &Matmul<'_, '_, CudaBackend>) -> Option<Kernel> {
    let (shape, groups) = (op.w.shape, op.groups);
    kernel(shape.ty, (op.rows, groups, shape.rows / groups), |bytes| has_shared(device, bytes))
}

fn shared_bytes(kernel: &Kernel, ty: QuantType) -> usize {
    STAGES * COLS * (kernel.outputs * ty.block_bytes() + kernel.rows * 4)
}

/// Whether `op` goes in strips.
pub(super) fn takes(device: &Device, op: &Matmul<'_, '_, CudaBackend>) -> bool {
    let shape = op.w.shape;
    op.rows >= ROWS_MIN
        && (shape.cols * shape.ty.block_bytes()).is_multiple_of(16)
        && op.w.at.is_multiple_of(16)
        && kernel_of(device, op).is_some()
}

/// The product.
pub(super) fn float_strips(
    device: &Device,
    op: &Matmul<'_, '_, CudaBackend>,
    out: &CudaBuf,
) -> Result<(), BackendError> {
    let (shape, rows, groups) = (op.w.shape, op.rows, op.groups);
    let kernel = kernel_of(device, op).expect("asked by `takes`");
    let grid = [rows.div_ceil(kernel.rows), groups * (shape.rows / groups).div_ceil(kernel.outputs), 1];
    let launch = Launch::new(device, kernel.name, grid, kernel.threads).shared(shared_bytes(&kernel, shape.ty));
    let launch = launch.pointer(op.w.at).buf(op.x, rows * groups * shape.cols).buf(out, rows * shape.rows);
    // SAFETY: the parameters of the kernels over strips; the view says how large the matrix is.
    unsafe { launch.int(shape.rows).int(shape.cols).int(rows).int(groups).start() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_small_where_outputs_are_few() {
        let name = |shape| kernel(QuantType::F16, shape, |_| true).unwrap().name;
        assert_eq!(name((2048, 1, 24)), "float_strips_f16");
        assert_eq!(name((512, 1, 384)), "float_strips_f16_wide");
        assert_eq!(name((64, 1, 384)), "float_strips_f16");
        assert_eq!(name((64, 8, 1024)), "float_strips_f16_wide");
        assert!(kernel(QuantType::Q8_0, (64, 1, 24), |_| true).is_none());
        for ty in [QuantType::F32, QuantType::F16, QuantType::BF16] {
            // A GB10 has 99 KiB a block, an H200 has 227.
            let name = |kib: usize| kernel(ty, (2048, 1, 384), |bytes| bytes <= kib << 10).map(|k| k.outputs);
            assert_eq!((name(99), name(227)), (Some(24), Some(48)), "{ty}");
        }
    }
}
