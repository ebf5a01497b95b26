//! Host memory that a device reads and writes by itself: given out by the driver, or made known to it.
//! Never lets go of memory that a transfer may still use: drops wait. Surprising fact: memory of the driver has one address on both sides, so a
//! kernel can tell the host something by writing to it.

use std::any::Any;
use std::ops::Range;
use std::os::raw::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::{result, sys};

use super::device::Device;
use crate::backend::BackendError;

/// Host memory that the driver gave out.
pub(super) struct HostBytes {
    device: Arc<Device>,
    start: usize,
    len: usize,
}

impl HostBytes {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Where kernels find it: host memory of the driver has one address on both sides.
    pub(super) fn address(&self) -> u64 {
        self.start as u64
    }

    /// Word `index`, which kernels may write or read at any time.
    pub(super) fn word(&self, index: usize) -> &AtomicU32 {
        assert!(4 * index + 4 <= self.len, "word {index} of {} bytes", self.len);
        let at = std::ptr::with_exposed_provenance_mut::<u32>(self.start + 4 * index);
        // SAFETY: inside the allocation, which is aligned to pages and lives as long as `self`; the host only looks at words atomically.
        unsafe { AtomicU32::from_ptr(at) }
    }

    /// All bytes; nothing may be on its way.
    pub(super) fn write(&mut self) -> &mut [u8] {
        let start = std::ptr::with_exposed_provenance_mut::<u8>(self.start);
        // SAFETY: `len` bytes that live as long as `self`, zeroed at first, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(start, self.len) }
    }

    /// What was written; nothing may be on its way.
    pub(super) fn read(&self) -> &[u8] {
        let start = std::ptr::with_exposed_provenance::<u8>(self.start);
        // SAFETY: `len` bytes that live as long as `self`, zeroed at first; writers borrow `self` mutably.
        unsafe { std::slice::from_raw_parts(start, self.len) }
    }
}

impl Drop for HostBytes {
    fn drop(&mut self) {
        if self.device.wait().is_ok() {
            // SAFETY: from `host_bytes`, and no copy is under way.
            let _ = unsafe { result::free_host(std::ptr::with_exposed_provenance_mut::<c_void>(self.start)) };
        }
    }
}

impl Device {
    /// Host memory that the device writes by itself.
    pub(super) fn host_bytes(self: &Arc<Self>, len: usize) -> Result<HostBytes, BackendError> {
        self.bind()?;
        self.awaiting.take_turn("allocating host memory")?;
        let what = format!("allocating {len} bytes of host memory that the GPU reads");
        // SAFETY: a plain allocation, given back once, when the result is dropped.
        let start = self.check(&what, unsafe { result::malloc_host(len, 0) })?;
        // SAFETY: `len` bytes were allocated at `start`.
        unsafe { start.cast::<u8>().write_bytes(0, len) };
        Ok(HostBytes { device: Arc::clone(self), start: start.expose_provenance(), len })
    }

    /// As [`Self::upload`], of bytes that must not change before the ops queued so far have ended.
    pub(super) fn upload_kept(&self, src: &HostBytes, len: usize, at: u64) -> Result<(), BackendError> {
        self.bind()?;
        assert!(len <= src.len, "{len} bytes of {}", src.len);
        self.counts.upload_bytes.fetch_add(len as u64, Ordering::Relaxed);
        // SAFETY: the caller owns `len` bytes at `at`; the source lives until its drop, which waits.
        self.check("an upload", unsafe { result::memcpy_htod_async(at, &src.read()[..len], self.raw_stream()) })
    }

    /// Device to host behind the kernels so far; `len` bytes of `dst` are there when an event marked after this has come.
    pub(super) fn download_aside(&self, at: u64, dst: &mut HostBytes, len: usize) -> Result<(), BackendError> {
        self.bind()?;
        assert!(len <= dst.len, "{len} bytes into {}", dst.len);
        self.counts.download_bytes.fetch_add(len as u64, Ordering::Relaxed);
        let to = std::ptr::with_exposed_provenance_mut::<u8>(dst.start);
        // SAFETY: `dst` has that many bytes, is nobody else's, and outlives the copy: its drop waits.
        let to = unsafe { std::slice::from_raw_parts_mut(to, len) };
        // SAFETY: the caller owns `len` bytes at `at`.
        self.check("a download", unsafe { result::memcpy_dtoh_async(to, at, self.raw_stream()) })
    }
}

/// How the device may use host memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HostAccess {
    /// Uploads read it.
    Uploads,
    /// Kernels, too.
    Kernels,
}

/// Host memory that the device knows.
pub struct Registered {
    device: Arc<Device>,
    start: usize,
    len: usize,
    /// Where kernels find it, if they may.
    on_device: Option<u64>,
    /// Dropped last: the memory stays mapped while it is registered.
    _owner: Arc<dyn Any + Send + Sync>,
}

impl Registered {
    /// Makes `len` bytes of host memory at address `start` known to `device`, until the result is dropped. `owner` keeps them mapped.
    ///
    /// # Errors
    /// When the system does not lock that much, or the device cannot do this.
    pub fn new(
        device: &Arc<Device>,
        (start, len): (usize, usize),
        owner: Arc<dyn Any + Send + Sync>,
        access: HostAccess,
    ) -> Result<Self, BackendError> {
        device.bind()?;
        let at = std::ptr::with_exposed_provenance_mut::<c_void>(start);
        let flags = if access == HostAccess::Kernels { sys::CU_MEMHOSTREGISTER_DEVICEMAP } else { 0 };
        // SAFETY: the range is only described to the driver, which refuses what is not mapped; `owner` keeps it mapped until the drop below.
        let done = unsafe { sys::cuMemHostRegister_v2(at, len, flags).result() };
        let refused = |error| match error {
            BackendError::Device { reason, .. } | BackendError::Full { reason, .. } => {
                BackendError::HostMemory { backend: "cuda", bytes: len, reason }
            }
            lasting => lasting,
        };
        device.check("registering host memory", done).map_err(refused)?;
        let mut known = Self { device: Arc::clone(device), start, len, on_device: None, _owner: owner };
        if access == HostAccess::Kernels {
            let mut place = 0;
            // SAFETY: the pointer is valid for the call, and the range was registered just above.
            let done = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut place, at, 0).result() };
            device.check("mapping host memory for kernels", done).map_err(refused)?;
            known.on_device = Some(place);
        }
        Ok(known)
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its first byte.
    pub(super) fn pointer(&self) -> *const c_void {
        std::ptr::with_exposed_provenance(self.start)
    }

    /// Whether all of `span` is in it.
    pub(super) fn holds(&self, span: &Range<usize>) -> bool {
        self.start <= span.start && span.end <= self.start + self.len
    }

    /// Where kernels find the byte at address `at` of the host, which is in it, if they may read it.
    pub(super) fn place_of(&self, at: usize) -> Option<u64> {
        Some(self.on_device? + (at - self.start) as u64)
    }

    /// Where kernels find its first byte, if they may read it.
    pub(super) fn on_device(&self) -> Option<u64> {
        self.on_device
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if self.device.wait().is_ok() {
            let at = std::ptr::with_exposed_provenance_mut::<c_void>(self.start);
            // SAFETY: registered by `new`, and no transfer is under way.
            let _ = unsafe { sys::cuMemHostUnregister(at).result() };
        }
    }
}
