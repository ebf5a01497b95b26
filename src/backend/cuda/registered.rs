//! Host memory that the device knows: uploads from it run beside everything else, and kernels may read it.
//! Never touches its bytes. Surprising fact: kernels may find it at another address than the host does.

use std::any::Any;
use std::ops::Range;
use std::os::raw::c_void;
use std::sync::Arc;

use cudarc::driver::sys;

use super::device::Device;
use crate::backend::BackendError;

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
            BackendError::Device { reason, .. } => BackendError::HostMemory { backend: "cuda", bytes: len, reason },
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
