//! Ids on their way to the host while the device goes on: asked for at one place among the ops, taken when they are needed.
//! Never waits for ops after the question. Surprising fact: only memory that the driver gave out itself is written without a wait.

use std::sync::Arc;

use cudarc::driver::CudaEvent;
use parking_lot::Mutex;

use super::device::{Device, Lane};
use super::host_memory::HostBytes;
use crate::backend::BackendError;

/// One question and its answer.
pub(super) struct Answer {
    place: Mutex<Option<Place>>,
}

struct Place {
    bytes: HostBytes,
    arrived: CudaEvent,
}

impl Answer {
    pub(super) fn new() -> Self {
        Self { place: Mutex::new(None) }
    }

    /// Queues the way of `len` ids at `at` of the device, which the caller keeps.
    pub(super) fn ask(&self, device: &Arc<Device>, at: u64, len: usize) -> Result<(), BackendError> {
        let mut place = self.place.lock();
        if place.as_ref().is_none_or(|p| p.bytes.len() < 4 * len) {
            // The old memory goes when nothing is written to it any more.
            device.wait()?;
            *place =
                Some(Place { bytes: device.host_bytes((4 * len).next_multiple_of(4096))?, arrived: device.event()? });
        }
        let place = place.as_mut().expect("made above");
        device.download_aside(at, &mut place.bytes, 4 * len)?;
        device.mark(&place.arrived, Lane::Ops)
    }

    /// Waits for the answer and copies it.
    pub(super) fn take(&self, device: &Arc<Device>, ids: &mut [i32]) -> Result<(), BackendError> {
        let place = self.place.lock();
        let place = place.as_ref().expect("asked before");
        device.wait_for(&place.arrived)?;
        let found = &place.bytes.read()[..4 * ids.len()];
        bytemuck::cast_slice_mut::<i32, u8>(ids).copy_from_slice(found);
        Ok(())
    }
}
