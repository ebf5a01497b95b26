//! Memory of the device as the ops see it: values, ids, weight matrices and lent views of them.
//! Never lets a matrix lie as in its file: blocks are split into bodies and factors, see kernels/quant.cuh.
//! Surprising fact: memory is given back when the last handle is dropped, and the driver waits for kernels that still use it.

use std::marker::PhantomData;
use std::sync::Arc;

use parking_lot::Mutex;

use super::device::Device;
use super::launch::Launch;
use crate::backend::BackendError;
use crate::quant::QuantType;

/// Bytes of the device, owned.
pub(super) struct Bytes {
    device: Arc<Device>,
    pub(super) at: u64,
    pub(super) len: usize,
}

impl Bytes {
    pub(super) fn new(device: &Arc<Device>, what: &'static str, len: usize) -> Result<Self, BackendError> {
        Ok(Self { device: Arc::clone(device), at: device.take(what, len)?, len })
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        self.device.give(self.at);
    }
}

/// F32 values of the device.
pub struct CudaBuf {
    pub(super) bytes: Bytes,
    pub(super) len: usize,
}

/// I32 ids of the device.
pub struct CudaIds {
    pub(super) bytes: Bytes,
    pub(super) len: usize,
}

/// A resident matrix.
pub struct CudaMat {
    pub(super) shape: MatShape,
    pub(super) bytes: Bytes,
}

/// Type and size of a matrix.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MatShape {
    pub ty: QuantType,
    pub rows: usize,
    pub cols: usize,
}

/// A lent matrix.
#[derive(Clone, Copy)]
pub struct CudaView<'a> {
    pub(super) shape: MatShape,
    pub(super) at: u64,
    lender: PhantomData<&'a ()>,
}

impl CudaView<'_> {
    /// The matrix at `at`, which the lender keeps there for the lifetime.
    pub(super) fn new(shape: MatShape, at: u64) -> Self {
        Self { shape, at, lender: PhantomData }
    }
}

impl MatShape {
    /// Bytes of the matrix, the same in a file and on the device; `None` if rows are not whole blocks.
    pub fn bytes(&self) -> Option<usize> {
        let bytes = self.ty.row_bytes(self.cols as u64)?.checked_mul(self.rows as u64)?;
        usize::try_from(bytes).ok()
    }

    /// Where in a block of the file its factors lie, and their bytes; no bytes if blocks stay whole.
    fn tail(&self) -> (usize, usize) {
        match self.ty {
            QuantType::Q8_0 | QuantType::IQ2_XXS => (0, 2),
            QuantType::MXFP4 => (0, 1),
            QuantType::Q2_K => (80, 4),
            QuantType::Q3_K => (108, 2),
            QuantType::Q6_K => (208, 2),
            QuantType::F32 | QuantType::F16 | QuantType::BF16 | QuantType::Q4_K | QuantType::I8 | QuantType::I32 => {
                (0, 0)
            }
        }
    }
}

/// Bytes of the buffer that file bytes pass through.
const STAGING: usize = 32 << 20;

/// Brings matrices from the layout of files into that of the device.
pub(super) struct Stager {
    staging: Mutex<Option<Bytes>>,
}

impl Stager {
    pub(super) fn new() -> Self {
        Self { staging: Mutex::new(None) }
    }

    /// Writes the matrix in `src` to `to`, in stream order.
    pub(super) fn store(&self, device: &Arc<Device>, shape: MatShape, src: &[u8], to: u64) -> Result<(), BackendError> {
        let (tail_at, tail) = shape.tail();
        if tail == 0 {
            return device.upload(src, to);
        }
        let block = shape.ty.block_bytes();
        let total = src.len() / block;
        let mut staging = self.staging.lock();
        let staging = match &mut *staging {
            Some(staging) => staging,
            none => none.insert(Bytes::new(device, "uploads", STAGING)?),
        };
        let step = STAGING / block;
        for first in (0..total).step_by(step) {
            let blocks = step.min(total - first);
            device.upload(&src[first * block..(first + blocks) * block], staging.at)?;
            let launch = Launch::new(device, "planar", [(blocks * block).div_ceil(256), 1, 1], 256);
            let launch = launch.pointer(staging.at).pointer(to).long(first).long(blocks).long(total);
            let launch = launch.int(block).int(tail_at).int(tail);
            // SAFETY: the parameters of `planar`: `blocks` blocks in the staging buffer, `total` at `to`, which the caller owns.
            unsafe { launch.start()? };
        }
        Ok(())
    }
}
