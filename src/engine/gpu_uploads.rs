//! How experts get from the host's slots into the planes that kernels read: through a copy, or read where they lie by the kernels that arrange them.
//! Never lets a refusal pass in silence: a way that was asked for is an error, one that was chosen is a warning. Surprising fact: over a bus
//! the second way works and is slow, since those kernels read bytes.

use std::sync::Arc;

use memmap2::MmapMut;

use crate::backend::BackendError;
use crate::backend::cuda::{CudaBackend, Device, HostAccess, RATE_BYTES, ReadRates, Registered, read_rates};
use crate::engine::EngineError;
use crate::engine::options::GpuUploads;
use crate::engine::slabs::Piece;

/// Experts are read in place if kernels read the host's memory at more than this part of the rate of their own. A third would do for whole lines, as
/// a copy reads it once, then writes and reads the GPU's own memory; but what arranges experts reads bytes, which caches must join.
const IN_PLACE_FROM: f64 = 0.75;

/// The host's slots as the GPU knows them.
pub(super) struct HostSlots {
    pub registered: Vec<Registered>,
    /// What kernels read; absent where nobody asked.
    pub rates: Option<ReadRates>,
}

/// Makes the host's slots known to the GPU and chooses the way of their experts.
///
/// # Errors
/// A way that was asked for and cannot be had; failures of the device.
pub(super) fn prepare(backend: &CudaBackend, arena: &[Piece], wanted: GpuUploads) -> Result<HostSlots, EngineError> {
    let refused = |reason: String| EngineError::GpuUploads { reason };
    if wanted == GpuUploads::Direct && arena.is_empty() {
        return Err(refused("without --ssd-streaming all experts are copied before the first token".into()));
    }
    let is_integrated = backend.device().properties().is_integrated;
    let registered = match wanted {
        GpuUploads::Direct => Some(register(backend, arena, HostAccess::Kernels).map_err(|e| refused(e.to_string()))?),
        GpuUploads::Auto if is_integrated => {
            let known = register(backend, arena, HostAccess::Kernels);
            if_taken(known, "experts are copied on their way")?
        }
        GpuUploads::Auto | GpuUploads::Copy => None,
    };
    let Some(registered) = registered else {
        // A device that refuses says so once, and uploads are copied by the driver.
        let registered = register(backend, arena, HostAccess::Uploads);
        let registered = if_taken(registered, "uploads of experts will be several times slower")?;
        return Ok(HostSlots { registered: registered.unwrap_or_default(), rates: None });
    };
    let rates = match registered.first() {
        Some(piece) => backend.read_rates(piece)?,
        None => None,
    };
    if wanted == GpuUploads::Direct || is_shorter_in_place(rates) {
        backend.read_in_place();
    }
    Ok(HostSlots { registered, rates })
}

/// What was registered; nothing, with a warning that ends with `instead`, if the driver does not take it. A device that failed is no such refusal.
fn if_taken(
    registered: Result<Vec<Registered>, BackendError>,
    instead: &str,
) -> Result<Option<Vec<Registered>>, BackendError> {
    match registered {
        Err(error @ BackendError::HostMemory { .. }) => {
            tracing::warn!("{error}; {instead}");
            Ok(None)
        }
        other => other.map(Some),
    }
}

/// Whether experts are better read in place; so too where they are too few to tell.
fn is_shorter_in_place(rates: Option<ReadRates>) -> bool {
    rates.is_none_or(|rates| rates.host_gb_per_s > IN_PLACE_FROM * rates.own_gb_per_s)
}

/// Makes all of `arena` known to the device, or nothing.
fn register(backend: &CudaBackend, arena: &[Piece], access: HostAccess) -> Result<Vec<Registered>, BackendError> {
    arena.iter().map(|piece| backend.register(piece.start, piece.len, Arc::clone(&piece.owner), access)).collect()
}

/// The rates of `device` on memory taken for that.
///
/// # Errors
/// Memory that cannot be had or registered, and failures of the device, in words.
pub(super) fn measure(device: &Arc<Device>) -> Result<ReadRates, String> {
    let memory = MmapMut::map_anon(RATE_BYTES).map_err(|e| format!("{} bytes of memory: {e}", RATE_BYTES))?;
    let (start, len) = (memory.as_ptr().expose_provenance(), memory.len());
    let registered =
        Registered::new(device, (start, len), Arc::new(memory), HostAccess::Kernels).map_err(|e| e.to_string())?;
    read_rates(device, &registered).map_err(|e| e.to_string())?.ok_or_else(|| "too little memory".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_spared_unless_the_hosts_memory_is_slower() {
        let is_shorter =
            |host_gb_per_s, own_gb_per_s| is_shorter_in_place(Some(ReadRates { host_gb_per_s, own_gb_per_s }));
        assert!(is_shorter(230.0, 240.0) && is_shorter(190.0, 240.0) && is_shorter_in_place(None));
        // Uncached mappings of some integrated GPUs; a bus.
        assert!(!is_shorter(90.0, 240.0) && !is_shorter(55.0, 4000.0));
    }
}
