//! The times of a GPU's passes, for the breakdown of a token.
//! Never waits. Surprising fact: what the gates say is drawn here, behind the ops, since only then the device's clock can be translated.

use std::sync::Arc;

use crate::backend::cuda::CudaBackend;
use crate::engine::gpu_experts::GpuExperts;
use crate::engine::token_time::{GpuWork, PassClock, PassTimes};

/// The clock of one backend.
pub(super) struct GpuTimes {
    pub backend: Arc<CudaBackend>,
    pub experts: Arc<GpuExperts>,
}

impl PassClock for GpuTimes {
    fn begin(&self) {
        // A device that fails here fails the pass too, which says why.
        let _ = self.backend.device().begin_times();
    }

    fn end(&self) -> Option<PassTimes> {
        let busy_ns = self.backend.device().end_times()?;
        let gates = self.experts.gate_times();
        if let Some(gates) = gates {
            gates.draw(self.backend.device());
        }
        Some(PassTimes { busy_ns, stalled_ns: gates.and_then(|gates| gates.stalled_ns()) })
    }

    fn work(&self) -> GpuWork {
        let counters = self.backend.device().counters();
        GpuWork { wait_ns: counters.wait_ns, aside_bytes: counters.aside_bytes }
    }
}
