//! Device memory in which the blocks of one launch meet: who comes last goes on with what all have brought.
//! Never holds anything between two launches: each leaves zeros. Surprising fact: one is enough for all ops, since they run in order.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::backend::BackendError;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::Bytes;

/// Bytes of each of the two parts.
const PART_BYTES: usize = 16;

/// The memory, taken at its first use.
pub(in crate::backend::cuda) struct Meeting(Mutex<Option<Bytes>>);

impl Meeting {
    pub(in crate::backend::cuda) fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// `Meeting` of kernels/hc_enter.cu.
    pub(super) fn coefficients(&self, device: &Arc<Device>) -> Result<u64, BackendError> {
        let mut kept = self.0.lock();
        if kept.is_none() {
            let bytes = Bytes::new(device, "where blocks meet", 2 * PART_BYTES)?;
            device.zero(bytes.at, 2 * PART_BYTES)?;
            *kept = Some(bytes);
        }
        Ok(kept.as_ref().expect("taken above").at)
    }

    /// `Found` of kernels/best_of.cu.
    pub(super) fn found(&self, device: &Arc<Device>) -> Result<u64, BackendError> {
        Ok(self.coefficients(device)? + PART_BYTES as u64)
    }
}
