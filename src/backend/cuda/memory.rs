//! Memory of the device as the ops see it: values, ids, weight matrices and lent views of them.
//! Never lets a matrix lie as in its file: blocks are cut into planes, see kernels/quant.cuh.
//! Surprising fact: memory is given back when the last handle is dropped, and the driver waits for kernels that still use it.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::CudaEvent;
use parking_lot::Mutex;

use super::device::{Device, Lane};
use super::host_memory::{HostBytes, Registered};
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

    /// The kernel of kernels/arrange.cuh that brings blocks of the file into the layout of the device; none if they stay as they are.
    fn arranger(&self) -> Option<&'static str> {
        Some(match self.ty {
            QuantType::Q8_0 => "arrange_q8_0",
            QuantType::MXFP4 => "arrange_mxfp4",
            QuantType::Q2_K => "arrange_q2_k",
            QuantType::Q3_K => "arrange_q3_k",
            QuantType::Q4_K => "arrange_q4_k",
            QuantType::Q6_K => "arrange_q6_k",
            QuantType::IQ2_XXS => "arrange_iq2_xxs",
            QuantType::F32 | QuantType::F16 | QuantType::BF16 | QuantType::I8 | QuantType::I32 => return None,
        })
    }
}

/// Bytes of each of the two buffers that file bytes pass through.
const STAGING: usize = 16 << 20;
/// Bytes between matrices that are uploaded with them: two changes of alignment.
const GAPS_MAX: usize = 64 << 10;
/// Threads that arrange a block.
const BLOCK_THREADS: usize = 16;

/// Uploads through a buffer of which one is timed: each time costs two events and some questions.
const TIMED_EVERY: usize = 16;

/// How an upload stands to the ops.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Upload {
    /// In order with them.
    InOrder,
    /// Beside them, while they may wait for it: its place is nobody's. Whether the device knows the source.
    Aside { is_registered: bool },
}

impl Upload {
    fn lane(self) -> Lane {
        match self {
            Self::InOrder => Lane::Ops,
            Self::Aside { .. } => Lane::Arranging,
        }
    }
}

/// A buffer on the device between an upload and the kernel that arranges its blocks.
struct Buffer {
    bytes: Bytes,
    /// When its upload has ended, and when the kernel that read it has.
    arrived: CudaEvent,
    free: CudaEvent,
    /// Beginning and end of the last timed upload, and its bytes until they are counted.
    clock: [CudaEvent; 2],
    timed: Option<u64>,
    uploads: usize,
    /// As many bytes of the host, for sources that the driver would have to copy by itself.
    host: Option<HostBytes>,
}

impl Buffer {
    fn new(device: &Arc<Device>) -> Result<Self, BackendError> {
        let bytes = Bytes::new(device, "uploads", STAGING)?;
        let clock = [device.clock_event()?, device.clock_event()?];
        Ok(Self { bytes, arrived: device.event()?, free: device.event()?, clock, timed: None, uploads: 0, host: None })
    }

    /// Uploads `src` to `at` once what uses this buffer has ended; some uploads are timed.
    fn upload(&mut self, device: &Device, src: &[u8], at: u64, way: Upload) -> Result<(), BackendError> {
        if way == (Upload::Aside { is_registered: false })
            && let Some(mut host) = self.host.take()
        {
            // Whatever passed through it last.
            device.wait_for(&self.arrived)?;
            host.write()[..src.len()].copy_from_slice(src);
            let done = self.upload_from(device, &host.read()[..src.len()], at, way);
            self.host = Some(host);
            return done;
        }
        self.upload_from(device, src, at, way)
    }

    fn upload_from(&mut self, device: &Device, src: &[u8], at: u64, way: Upload) -> Result<(), BackendError> {
        // SAFETY: a slice is readable; whoever stores a matrix keeps registered memory.
        unsafe { self.upload_span(device, (src.as_ptr(), src.len()), at, way) }
    }

    /// Uploads the bytes at `src`.
    ///
    /// # Safety
    /// As for [`Device::upload_span`].
    unsafe fn upload_span(
        &mut self,
        device: &Device,
        (src, len): (*const u8, usize),
        at: u64,
        way: Upload,
    ) -> Result<(), BackendError> {
        if self.timed.is_some_and(|bytes| device.note_upload(bytes, &self.clock)) {
            self.timed = None;
        }
        let is_timed = self.timed.is_none() && self.uploads.is_multiple_of(TIMED_EVERY);
        self.uploads += 1;
        if is_timed {
            self.timed = Some(len as u64);
        }
        let (events, clock) = ((&self.free, &self.arrived), is_timed.then_some(&self.clock));
        // SAFETY: the caller's promise.
        unsafe { device.upload_span(src, len, at, events, clock, way.lane()) }
    }
}

/// Two buffers, used in turns: one is filled while the other is read.
struct Buffers {
    both: [Buffer; 2],
    turn: usize,
}

impl Buffers {
    /// Those in `kept`, made if need be.
    fn of<'a>(kept: &'a mut Option<Self>, device: &Arc<Device>) -> Result<&'a mut Self, BackendError> {
        match kept {
            Some(buffers) => Ok(buffers),
            none => Ok(none.insert(Self { both: [Buffer::new(device)?, Buffer::new(device)?], turn: 0 })),
        }
    }
}

/// Starts the kernel that arranges `blocks` blocks of a matrix, from number `first` on.
fn arrange(
    device: &Device,
    (kernel, shape): (&'static str, MatShape),
    (from, to): (u64, u64),
    (first, blocks): (usize, usize),
    lane: Lane,
) -> Result<(), BackendError> {
    let launch = Launch::new(device, kernel, [(blocks * BLOCK_THREADS).div_ceil(256), 1, 1], 256);
    let launch = launch.lane(lane).pointer(from).pointer(to).long(first).long(blocks);
    let launch = launch.int(shape.rows).int(shape.cols / shape.ty.block_values());
    // SAFETY: the parameters of the arranging kernels: `blocks` blocks in the buffer, a whole matrix at `to`, which the caller owns.
    unsafe { launch.start() }
}

/// Brings matrices from the layout of files into that of the device.
pub(super) struct Stager {
    buffers: Mutex<Option<Buffers>>,
    /// Whether kernels read registered memory by themselves.
    in_place: AtomicBool,
}

impl Stager {
    pub(super) fn new() -> Self {
        Self { buffers: Mutex::new(None), in_place: AtomicBool::new(false) }
    }

    /// From now on [`Self::store_together`] needs no upload where kernels reach the source.
    pub(super) fn read_in_place(&self) {
        self.in_place.store(true, Ordering::Relaxed);
    }

    /// Allocates what [`Self::store`] needs, also from sources that are not registered.
    pub(super) fn reserve(&self, device: &Arc<Device>, is_registered: bool) -> Result<(), BackendError> {
        let mut buffers = self.buffers.lock();
        for buffer in &mut Buffers::of(&mut buffers, device)?.both {
            if !is_registered && buffer.host.is_none() {
                buffer.host = Some(device.host_bytes(STAGING)?);
            }
        }
        Ok(())
    }

    /// Writes matrices that lie close together in one piece of registered memory by a single upload: `false`, and nothing is done, where they do
    /// not. As [`Self::store`] of each otherwise.
    pub(super) fn store_together(
        &self,
        device: &Arc<Device>,
        registered: &[Registered],
        parts: &[(MatShape, &[u8], u64)],
        way: Upload,
    ) -> Result<bool, BackendError> {
        let starts = || parts.iter().map(|(_, src, _)| src.as_ptr() as usize);
        let Some(start) = starts().min() else { return Ok(true) };
        let end = starts().zip(parts).map(|(at, (_, src, _))| at + src.len()).max().unwrap_or(start);
        let bytes: usize = parts.iter().map(|(_, src, _)| src.len()).sum();
        let is_close = end - start <= STAGING.min(bytes + GAPS_MAX);
        let kernels: Option<Vec<_>> = parts.iter().map(|(shape, ..)| shape.arranger()).collect();
        let holder = registered.iter().find(|r| r.holds(&(start..end)));
        let (true, Some(holder), Some(kernels)) = (is_close, holder, kernels) else {
            return Ok(false);
        };
        let in_place = if self.in_place.load(Ordering::Relaxed) { holder.place_of(start) } else { None };
        let mut buffers = self.buffers.lock();
        let buffers = Buffers::of(&mut buffers, device)?;
        let buffer = &mut buffers.both[buffers.turn];
        buffers.turn ^= 1;
        if in_place.is_none() {
            let first = std::ptr::with_exposed_provenance::<u8>(start);
            // SAFETY: one piece of registered memory holds the span; the device alone reads it, the gaps too, whose bytes nobody looks at.
            unsafe { buffer.upload_span(device, (first, end - start), buffer.bytes.at, way)? };
        }
        for ((shape, src, to), kernel) in parts.iter().zip(kernels) {
            let from = in_place.unwrap_or(buffer.bytes.at) + (src.as_ptr() as usize - start) as u64;
            let blocks = src.len() / shape.ty.block_bytes();
            arrange(device, (kernel, *shape), (from, *to), (0, blocks), way.lane())?;
        }
        match in_place {
            Some(_) => device.note_in_place(bytes, &buffer.free, way.lane())?,
            None => device.mark(&buffer.free, way.lane())?,
        }
        Ok(true)
    }

    /// Writes the matrix in `src` to `to`. Registered memory must not change before [`Device::wait_uploads`] has returned.
    pub(super) fn store(
        &self,
        device: &Arc<Device>,
        shape: MatShape,
        src: &[u8],
        to: u64,
        way: Upload,
    ) -> Result<(), BackendError> {
        let mut buffers = self.buffers.lock();
        let buffers = Buffers::of(&mut buffers, device)?;
        let lane = way.lane();
        let Some(kernel) = shape.arranger() else {
            // Straight to its place, once the kernels that read what was there have ended.
            let buffer = &mut buffers.both[buffers.turn];
            for (piece, src) in src.chunks(STAGING).enumerate() {
                device.mark(&buffer.free, lane)?;
                buffer.upload(device, src, to + (piece * STAGING) as u64, way)?;
            }
            return Ok(());
        };
        let block = shape.ty.block_bytes();
        let step = STAGING / block;
        for piece in 0..src.len().div_ceil(step * block) {
            let first = piece * step;
            let blocks = step.min(src.len() / block - first);
            let buffer = &mut buffers.both[buffers.turn];
            buffers.turn ^= 1;
            let from = buffer.bytes.at;
            buffer.upload(device, &src[first * block..(first + blocks) * block], from, way)?;
            arrange(device, (kernel, shape), (from, to), (first, blocks), lane)?;
            device.mark(&buffer.free, lane)?;
        }
        Ok(())
    }
}
