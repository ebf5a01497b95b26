//! Launchers of kernels/matmul.cu: the choice of kernel by type, arithmetic and shape, and the rounded activations that it needs.
//! Never lets the choice change a bit: all kernels of one arithmetic sum in the same order.
//! Surprising fact: rounded activations live in one buffer that only grows; in stream order nobody can see it change too early.

use std::sync::Arc;

use parking_lot::Mutex;

use super::{Launch, eights, float_strips, matmul_row, tiles};
use crate::backend::BackendError;
use crate::backend::cpu::matmul::{Arithmetic, ProductShape};
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::{Bytes, CudaBuf};
use crate::backend::ops::{Matmul, MatmulPair, MoveRows};
use crate::quant::QuantType;

/// Weight rows of a block in the kernels over floats.
const FLOAT_ROWS: usize = 4;
/// Activation rows that a kernel takes at once, if there is more than one.
const ROWS_AT_ONCE: usize = 4;
/// Up to this many outputs a block works on one of them: fewer warps than that leave multiprocessors idle.
const WIDE_OUTPUTS_MAX: usize = 2048;

/// Rounded activations: codes, then sums, then scales.
pub(in crate::backend::cuda) struct Rounded {
    bytes: Mutex<Option<Bytes>>,
    /// F32 values between two products of an op.
    mid: Mutex<Option<Bytes>>,
}

/// Where they are.
#[derive(Clone, Copy)]
pub(super) struct Codes {
    pub(super) codes: u64,
    pub(super) scales: u64,
    pub(super) sums: u64,
}

impl Rounded {
    pub(in crate::backend::cuda) fn new() -> Self {
        Self { bytes: Mutex::new(None), mid: Mutex::new(None) }
    }

    /// Rounds `rows` rows of `cols` values in blocks of `block`.
    pub(super) fn fill(
        &self,
        device: &Arc<Device>,
        x: &CudaBuf,
        (rows, cols): (usize, usize),
        block: usize,
    ) -> Result<Codes, BackendError> {
        assert!(x.len >= rows * cols, "{rows} rows of {cols} activations in a buffer of {}", x.len);
        self.fill_at(device, x.bytes.at, (rows, cols), block)
    }

    /// As [`Self::fill`], of `rows * cols` values at `x`.
    pub(super) fn fill_at(
        &self,
        device: &Arc<Device>,
        x: u64,
        (rows, cols): (usize, usize),
        block: usize,
    ) -> Result<Codes, BackendError> {
        let at = self.room(device, rows * cols)?;
        let kernel = if block == 32 { "quantise_32" } else { "quantise_256" };
        // Four warps a block, 256 values each.
        let launch = Launch::new(device, kernel, [cols.div_ceil(4 * 256), rows, 1], 128);
        let launch = launch.pointer(x).pointer(at.codes).pointer(at.scales).pointer(at.sums).int(cols);
        // SAFETY: the parameters of the quantise kernels, with room for `rows * cols` codes.
        unsafe { launch.start()? };
        Ok(at)
    }

    /// As [`Self::fill`], of the rows that `op` names.
    pub(super) fn gather(
        &self,
        device: &Arc<Device>,
        op: MoveRows<'_, CudaBackend>,
        block: usize,
    ) -> Result<Codes, BackendError> {
        let (rows, cols) = (op.range.len(), op.width);
        let at = self.room(device, rows * cols)?;
        let kernel = if block == 32 { "quantise_rows_32" } else { "quantise_rows_256" };
        let launch = Launch::new(device, kernel, [cols.div_ceil(4 * 256), rows, 1], 128);
        let launch = launch.buf(op.src, cols).ids(op.indices, op.range.end);
        let launch = launch.pointer(at.codes).pointer(at.scales).pointer(at.sums).int(op.range.start).int(cols);
        // SAFETY: the parameters of the kernels, with room for `rows * cols` codes; indices are rows of `src` by contract.
        unsafe { launch.start()? };
        Ok(at)
    }

    /// Makes room for rows of together `values` values, and for `mid` values between two products, so that none is made later.
    pub(in crate::backend::cuda) fn reserve(
        &self,
        device: &Arc<Device>,
        (values, mid): (usize, usize),
    ) -> Result<(), BackendError> {
        self.room(device, values)?;
        self.mid(device, mid).map(|_| ())
    }

    /// Room for `values` rounded values.
    pub(super) fn room(&self, device: &Arc<Device>, values: usize) -> Result<Codes, BackendError> {
        let padded = values.next_multiple_of(256);
        let codes = grown(&mut self.bytes.lock(), device, code_bytes(values))?;
        Ok(Codes { codes, sums: codes + padded as u64, scales: codes + (padded + padded / 16 * 2) as u64 })
    }

    /// Room for `values` values between two products.
    pub(super) fn mid(&self, device: &Arc<Device>, values: usize) -> Result<u64, BackendError> {
        grown(&mut self.mid.lock(), device, 4 * values)
    }
}

/// Most memory that products of `shapes` keep beside the buffers of a pass.
pub fn scratch_bytes(shapes: &[ProductShape]) -> u64 {
    let rounded = |s: &ProductShape| code_bytes(tiles::padded_rows(s.rows) * s.groups * s.cols);
    shapes.iter().map(rounded).max().unwrap_or(0) as u64
}

/// Bytes of `values` rounded activations, with at most a scale for each 32 of them.
fn code_bytes(values: usize) -> usize {
    let padded = values.next_multiple_of(256);
    padded + padded / 16 * 2 + padded / 32 * 4
}

/// Memory of at least `needed` bytes, cleared when it is made: a pass that is given up rounds what none of its kernels has written.
fn grown(bytes: &mut Option<Bytes>, device: &Arc<Device>, needed: usize) -> Result<u64, BackendError> {
    if bytes.as_ref().is_none_or(|b| b.len < needed) {
        // The old one goes first: both at once might not fit.
        *bytes = None;
        let made = Bytes::new(device, "rounded activations", needed)?;
        device.zero(made.at, needed)?;
        *bytes = Some(made);
    }
    Ok(bytes.as_ref().expect("taken above").at)
}

/// Threads of a block in the kernels over several experts, and how many of them share a weight row: DOT_THREADS and ROW_THREADS of
/// kernels/dots.cuh.
pub(super) fn dot_threads(ty: QuantType) -> (usize, usize) {
    match (ty, ty.block_values()) {
        // Blocks that fill large tables first.
        (QuantType::IQ2_XXS, _) => (864, 4),
        (_, 256) => (128, 4),
        _ => (128, 8),
    }
}

/// As [`dot_threads`], of the kernels over the second matrices of several experts: DOWN_THREADS.
pub(super) fn down_threads(ty: QuantType) -> (usize, usize) {
    if ty == QuantType::IQ2_XXS { (960, 4) } else { dot_threads(ty) }
}

/// As [`dot_threads`], of the kernels over one matrix.
fn dot_threads_alone(ty: QuantType) -> (usize, usize) {
    if ty == QuantType::IQ2_XXS { (512, 4) } else { dot_threads(ty) }
}

/// Kernel over the codes of one row for weights of `ty`.
fn codes_kernel(ty: QuantType) -> Option<&'static str> {
    Some(match ty {
        QuantType::Q8_0 => "matmul_q8_0_codes",
        QuantType::Q2_K => "matmul_q2_k_codes",
        QuantType::Q3_K => "matmul_q3_k_codes",
        QuantType::Q4_K => "matmul_q4_k_codes",
        QuantType::Q6_K => "matmul_q6_k_codes",
        QuantType::IQ2_XXS => "matmul_iq2_xxs_codes",
        QuantType::MXFP4 => "matmul_mxfp4_codes",
        _ => return None,
    })
}

/// Kernel over F32 activations, and how many of their rows it takes at once.
fn floats_kernel(ty: QuantType, is_one: bool) -> Option<(&'static str, usize)> {
    Some(match (ty, is_one) {
        (QuantType::F32, false) => ("matmul_f32_floats_4", ROWS_AT_ONCE),
        (QuantType::F16, false) => ("matmul_f16_floats_4", ROWS_AT_ONCE),
        (QuantType::BF16, false) => ("matmul_bf16_floats_4", ROWS_AT_ONCE),
        (QuantType::F32, true) => ("matmul_f32_floats_1", 1),
        (QuantType::F16, true) => ("matmul_f16_floats_1", 1),
        (QuantType::BF16, true) => ("matmul_bf16_floats_1", 1),
        (QuantType::Q8_0, _) => ("matmul_q8_0_floats_1", 1),
        (QuantType::Q2_K, _) => ("matmul_q2_k_floats_1", 1),
        (QuantType::Q3_K, _) => ("matmul_q3_k_floats_1", 1),
        (QuantType::Q4_K, _) => ("matmul_q4_k_floats_1", 1),
        (QuantType::Q6_K, _) => ("matmul_q6_k_floats_1", 1),
        (QuantType::IQ2_XXS, _) => ("matmul_iq2_xxs_floats_1", 1),
        (QuantType::MXFP4, _) => ("matmul_mxfp4_floats_1", 1),
        (QuantType::I8 | QuantType::I32, _) => return None,
    })
}

fn wide_kernel(ty: QuantType) -> Option<&'static str> {
    Some(match ty {
        QuantType::F32 => "matmul_f32_wide",
        QuantType::F16 => "matmul_f16_wide",
        QuantType::BF16 => "matmul_bf16_wide",
        _ => return None,
    })
}

/// Two products of the same rows: in one launch where the kernel for one row takes both, else from activations that are rounded once if both
/// matrices take the same.
pub fn matmul_pair(
    device: &Arc<Device>,
    rounded: &Rounded,
    arithmetic: Arithmetic,
    op: MatmulPair<'_, '_, CudaBackend>,
    (out_a, out_b): (&mut CudaBuf, &mut CudaBuf),
) -> Result<(), BackendError> {
    let (rows, x) = (op.rows, op.x);
    let a: Matmul<'_, '_, CudaBackend> = Matmul { w: op.a, x, rows, groups: 1 };
    let b: Matmul<'_, '_, CudaBackend> = Matmul { w: op.b, x, rows, groups: 1 };
    let types = (a.w.shape.ty, b.w.shape.ty);
    assert_eq!(a.w.shape.cols, b.w.shape.cols, "both matrices take the same input");
    if arithmetic == Arithmetic::Fast && rows > 0 {
        let is_row = (matmul_row::takes(&a), matmul_row::takes(&b));
        if is_row == (true, true) {
            return matmul_row::matmul_row_pair(device, (&a, &b), (out_a, out_b));
        }
        let has_codes = codes_kernel(types.0).is_some() && codes_kernel(types.1).is_some();
        let is_alike = types.0.block_values() == types.1.block_values();
        if is_alike && tiles::takes(&a) && tiles::takes(&b) {
            let at = tiles::round(device, rounded, &a)?;
            tiles::tiles(device, &a, at, out_a)?;
            return tiles::tiles(device, &b, at, out_b);
        }
        let is_tiled = tiles::takes(&a) || tiles::takes(&b);
        if is_row == (false, false) && !is_tiled && has_codes && is_alike {
            let at = rounded.fill(device, x, (rows, a.w.shape.cols), types.0.block_values())?;
            product_of_codes(device, &a, at, out_a)?;
            return product_of_codes(device, &b, at, out_b);
        }
    }
    matmul(device, rounded, arithmetic, a, out_a)?;
    matmul(device, rounded, arithmetic, b, out_b)
}

/// One row, or a few, over activations that were rounded for it.
fn product_of_codes(
    device: &Arc<Device>,
    op: &Matmul<'_, '_, CudaBackend>,
    at: Codes,
    out: &CudaBuf,
) -> Result<(), BackendError> {
    let (shape, rows) = (op.w.shape, op.rows);
    if shape.rows == 0 {
        return Ok(());
    }
    if rows > 1 {
        return eights::alone(device, (op.w, rows, op.groups), at, out);
    }
    let kernel = codes_kernel(shape.ty).expect("asked by who rounded");
    let (threads, sharers) = dot_threads_alone(shape.ty);
    let launch = Launch::new(device, kernel, [shape.rows.div_ceil(threads / sharers), 1, 1], threads);
    let launch = launch.pointer(op.w.at).pointer(at.codes).pointer(at.scales).pointer(at.sums);
    let launch = launch.buf(out, shape.rows).int(shape.rows).int(shape.cols).int(op.groups);
    // SAFETY: the parameters of the kernels over codes; the view says how large the matrix is.
    unsafe { launch.start() }
}

pub fn matmul(
    device: &Arc<Device>,
    rounded: &Rounded,
    arithmetic: Arithmetic,
    op: Matmul<'_, '_, CudaBackend>,
    out: &mut CudaBuf,
) -> Result<(), BackendError> {
    let (shape, rows, groups) = (op.w.shape, op.rows, op.groups);
    assert!(groups > 0 && shape.rows.is_multiple_of(groups), "{} rows in {groups} groups", shape.rows);
    if rows == 0 || shape.rows == 0 {
        return Ok(());
    }
    let is_one = rows == 1;
    let values = rows * groups * shape.cols;
    if arithmetic == Arithmetic::Fast && matmul_row::takes(&op) {
        return matmul_row::matmul_row(device, &op, out);
    }
    if arithmetic == Arithmetic::Fast && tiles::takes(&op) {
        let at = tiles::round(device, rounded, &op)?;
        return tiles::tiles(device, &op, at, out);
    }
    if arithmetic == Arithmetic::Fast && codes_kernel(shape.ty).is_some() {
        let at = rounded.fill(device, op.x, (rows * groups, shape.cols), shape.ty.block_values())?;
        return product_of_codes(device, &op, at, out);
    }
    if let Some(kernel) = wide_kernel(shape.ty).filter(|_| is_one && shape.rows <= WIDE_OUTPUTS_MAX) {
        let launch = Launch::new(device, kernel, [shape.rows, rows, 1], super::THREADS);
        let launch = launch.pointer(op.w.at).buf(op.x, values).buf(out, rows * shape.rows);
        // SAFETY: the parameters of the wide kernels.
        return unsafe { launch.int(shape.rows).int(shape.cols).int(groups).start() };
    }
    if float_strips::takes(device, &op) {
        return float_strips::float_strips(device, &op, out);
    }
    let unsupported = BackendError::UnsupportedType { backend: "cuda", op: "matmul", ty: shape.ty };
    let (kernel, at_once) = floats_kernel(shape.ty, is_one).ok_or(unsupported)?;
    let grid = [shape.rows.div_ceil(FLOAT_ROWS), rows.div_ceil(at_once), 1];
    let launch = Launch::new(device, kernel, grid, 32 * FLOAT_ROWS);
    let launch = launch.pointer(op.w.at).buf(op.x, values).buf(out, rows * shape.rows);
    // SAFETY: the parameters of the kernels over floats.
    unsafe { launch.int(shape.rows).int(shape.cols).int(rows).int(groups).start() }
}
