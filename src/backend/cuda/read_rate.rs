//! How fast kernels read the host's memory, and how fast the device's own: what tells whether weights are better copied first.
//! Never keeps memory. Surprising fact: on a GPU without memory of its own the two are one memory and still differ, by what the caches keep of them.

use std::sync::Arc;

use cudarc::driver::result;

use super::device::{Device, Lane};
use super::host_memory::Registered;
use super::launch::memory_rate::memory_rate;
use super::memory::Bytes;
use crate::backend::BackendError;

/// Bytes that are read: more than caches hold, and a few milliseconds over a bus.
pub const RATE_BYTES: usize = 128 << 20;
/// Below this the time is that of a launch.
const BYTES_MIN: usize = 4 << 20;
/// Passes under the clock.
const ROUNDS: usize = 3;

/// Bytes read a second by kernels that do nothing else, in 1e9.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ReadRates {
    /// Of memory of the host that the device knows.
    pub host_gb_per_s: f64,
    /// Of memory that the device gave out.
    pub own_gb_per_s: f64,
}

/// Reads up to [`RATE_BYTES`] of `host`, and as much of the device's own memory. `None` where there is too little to tell, or the device does not
/// reach `host`.
///
/// # Errors
/// Too little memory, and failures of the device.
pub fn read_rates(device: &Arc<Device>, host: &Registered) -> Result<Option<ReadRates>, BackendError> {
    let len = host.len().min(RATE_BYTES);
    let (Some(at), true) = (host.on_device(), len >= BYTES_MIN) else { return Ok(None) };
    Ok(Some(ReadRates { host_gb_per_s: timed(device, at, len)?, own_gb_per_s: own_rate(device, len)? }))
}

/// What kernels read of `len` bytes of the device's own memory, in 1e9 bytes a second.
///
/// # Errors
/// Too little memory, and failures of the device.
pub fn own_rate(device: &Arc<Device>, len: usize) -> Result<f64, BackendError> {
    let own = Bytes::new(device, "measuring how fast it is read", len)?;
    device.zero(own.at, len)?;
    timed(device, own.at, len)
}

/// The exclusive or of the words in the whole lines of `host`, read by the device; `None` if it does not reach them.
///
/// # Errors
/// Failures of the device.
pub fn words_of(device: &Arc<Device>, host: &Registered) -> Result<Option<u64>, BackendError> {
    let Some(at) = host.on_device() else { return Ok(None) };
    let out = Sum::new(device)?;
    memory_rate(device, at, host.len(), out.0.at)?;
    let mut word = [0; 8];
    device.download(out.0.at, &mut word)?;
    Ok(Some(u64::from_le_bytes(word)))
}

/// A word of the device, zero at first.
struct Sum(Bytes);

impl Sum {
    fn new(device: &Arc<Device>) -> Result<Self, BackendError> {
        let bytes = Bytes::new(device, "a sum", 8)?;
        device.zero(bytes.at, 8)?;
        Ok(Self(bytes))
    }
}

/// Bytes a nanosecond over some passes; the one before them maps what has to be mapped.
fn timed(device: &Arc<Device>, at: u64, len: usize) -> Result<f64, BackendError> {
    let (out, began, ended) = (Sum::new(device)?, device.clock_event()?, device.clock_event()?);
    memory_rate(device, at, len, out.0.at)?;
    device.mark(&began, Lane::Ops)?;
    for _ in 0..ROUNDS {
        memory_rate(device, at, len, out.0.at)?;
    }
    device.mark(&ended, Lane::Ops)?;
    device.wait_for(&ended)?;
    // SAFETY: both events live, were recorded, and have come.
    let ms = device.check("timing a kernel", unsafe { result::event::elapsed(began.cu_event(), ended.cu_event()) })?;
    Ok((ROUNDS * len) as f64 / (f64::from(ms) * 1e6).max(1.0))
}
