//! What the bus between host and device gives when nothing else uses it: the number that uploads of experts are compared with.
//! Never changes a byte that anybody reads. Surprising fact: the first copy of a process is slower than those behind it, so the best of a few
//! counts.

use cudarc::driver::result;
use cudarc::driver::sys;

use super::CudaSlab;
use super::device::Device;
use super::host_memory::Registered;
use crate::backend::BackendError;

/// Bytes of a copy: where rates have levelled off (an H200 reaches 48 of 55 GB/s with 1 MiB).
const COPY: usize = 16 << 20;
/// Less than this is not worth a number.
const COPY_LEAST: usize = 1 << 20;
const COPIES: usize = 4;

impl Device {
    /// Uploads from `source` to `to`, whose contents nobody has asked for yet, in 1e9 bytes a second; `None` where they are too small to tell.
    ///
    /// # Errors
    /// Failures of the device.
    pub fn bus_gb_per_s(&self, source: &Registered, to: &CudaSlab) -> Result<Option<f64>, BackendError> {
        self.bind()?;
        let len = COPY.min(source.len()).min(to.len());
        if len < COPY_LEAST {
            return Ok(None);
        }
        let [began, ended] = [self.clock_event()?, self.clock_event()?];
        let mut best = 0.0f64;
        for _ in 0..COPIES {
            self.check("measuring the bus", began.record(self.uploads()))?;
            // SAFETY: `len` bytes of memory that is mapped while it is registered, and of the slab; the wait below ends the copy.
            let started =
                unsafe { sys::cuMemcpyHtoDAsync_v2(to.bytes.at, source.pointer(), len, self.uploads().cu_stream()) };
            self.check("measuring the bus", started.result())?;
            self.check("measuring the bus", ended.record(self.uploads()))?;
            self.check("measuring the bus", ended.synchronize())?;
            // SAFETY: both events live, have times and have come.
            let ms =
                self.check("measuring the bus", unsafe { result::event::elapsed(began.cu_event(), ended.cu_event()) })?;
            if ms > 0.0 {
                best = best.max(len as f64 / 1e6 / f64::from(ms));
            }
        }
        Ok((best > 0.0).then_some(best))
    }
}
