//! Puts a model on a GPU: what of its memory goes where, and the refusals with numbers.
//! Never falls back: a GPU that is too small is an error. Surprising fact: slots take what weights and work memory leave, and never more
//! than there are experts.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::backend::cpu::CpuBackend;
use crate::backend::cuda::{self, CudaBackend, DeviceCounters};
use crate::backend::ops::Sums;
use crate::engine::EngineError;
use crate::engine::device::{On, ReadGpu};
use crate::engine::gpu_experts::{GpuExperts, slot_bytes};
use crate::engine::gpu_rows::RowTable;
use crate::engine::gpu_times::GpuTimes;
use crate::engine::gpu_uploads::{self, HostSlots};
use crate::engine::metadata::FileMetadata;
use crate::engine::one_memory;
use crate::engine::options::EngineOptions;
use crate::engine::prepare::Prepared;
use crate::engine::routes::Routes;
use crate::engine::slabs::Piece;
use crate::engine::stats::GpuStats;
use crate::engine::weights::FileWeights;
use crate::models::supply::ExpertSupply;
use crate::models::{self, Model};
use crate::units::{Budget, Bytes};

/// Memory that stays unplanned: modules, the upload buffer, and what else the driver takes.
const MARGIN: u64 = 512 << 20;

/// A backend and the model on it.
type OnGpu = (Arc<CudaBackend>, Arc<dyn Model<CudaBackend>>);

/// Loads resident weights, after a look whether they fit.
///
/// # Errors
/// A GPU that is too small, and failures of the device.
pub(super) fn load(
    device: &Arc<cuda::Device>,
    options: &EngineOptions,
    prepared: &Prepared,
    source: &FileWeights<'_>,
) -> Result<OnGpu, EngineError> {
    let (free, total) = device.memory()?;
    let needed = prepared.layout.resident_bytes.0 + work_bytes(prepared) + MARGIN;
    if needed > free {
        return Err(EngineError::GpuTooSmall { needed: Bytes(needed), free: Bytes(free), total: Bytes(total) });
    }
    let backend =
        CudaBackend::new(Arc::clone(device), options.arithmetic).with_sums(options.gpu_sums.unwrap_or_default());
    let backend = Arc::new(backend);
    let model = models::load(&FileMetadata(prepared.file.metadata()), Arc::clone(&backend), source)
        .map_err(|e| EngineError::from(e).inside(prepared.file.path()))?;
    // Host memory of the weights may be given back once they are on the device.
    device.wait()?;
    Ok((backend, model))
}

/// The model with its tier of expert slots over `inner`.
///
/// # Errors
/// Too few slots for one token, or a budget beyond what is free.
pub(super) fn place(
    (backend, model): (Arc<CudaBackend>, Arc<dyn Model<CudaBackend>>),
    (inner, arena): (Arc<dyn ExpertSupply<CpuBackend>>, Vec<Piece>),
    options: &EngineOptions,
    prepared: &Prepared,
    routes: Routes,
) -> Result<On<CudaBackend>, EngineError> {
    let HostSlots { registered, rates } = gpu_uploads::prepare(&backend, &arena, options.gpu_uploads)?;
    let layers = prepared.layout.experts.clone();
    let slots = slots(&backend, options, prepared, slot_bytes(&layers) as u64)?;
    let (_, _, top_k) = prepared.config.expert_shape();
    let rows = match options.finds_experts {
        true => RowTable::new(&backend, &layers, (top_k, !registered.is_empty()))?,
        false => None,
    };
    let rows = (rows, options.lookahead.uses_router());
    let experts = GpuExperts::new(Arc::clone(&backend), (inner, registered), layers, slots, routes, rows)?;
    let experts = Arc::new(experts);
    // Weights came from memory that the device does not know: their rate says nothing about that of experts.
    let loaded = backend.device().counters();
    let read_gpu: ReadGpu = {
        let (backend, experts) = (Arc::clone(&backend), Arc::clone(&experts));
        let measured = Measured {
            host: rates.map(|rates| rates.host_gb_per_s),
            own: rates.map(|rates| rates.own_gb_per_s).or_else(|| backend.own_rate()),
            bus: experts.bus_gb_per_s().unwrap_or(0.0),
        };
        Box::new(move || read(&backend, &experts, &loaded, measured))
    };
    let times = GpuTimes { backend: Arc::clone(&backend), experts: Arc::clone(&experts) };
    Ok(On { backend, model, experts, read_gpu: Some(read_gpu), times: Mutex::new(Some(Box::new(times))) })
}

fn work_bytes(prepared: &Prepared) -> u64 {
    let bytes = prepared.config.runner_bytes(&prepared.runner);
    bytes.kv.saturating_add(bytes.scratch).saturating_add(cuda::product_bytes(&prepared.products))
}

fn slots(
    backend: &CudaBackend,
    options: &EngineOptions,
    prepared: &Prepared,
    slot_bytes: u64,
) -> Result<usize, EngineError> {
    let (free, _) = backend.device().memory()?;
    let room = free.saturating_sub(work_bytes(prepared) + MARGIN);
    let (room, automatic) = match backend.device().properties().is_integrated {
        true => one_memory::room(room, &prepared.plan, MARGIN),
        false => (room, room),
    };
    let slot_bytes = slot_bytes.max(1);
    let room_for = |bytes: u64| bytes / slot_bytes;
    let fit = room_for(room);
    let (_, _, top_k) = prepared.config.expert_shape();
    let experts: u64 = prepared.layout.experts.iter().map(|l| u64::from(l.experts)).sum();
    let wanted = match options.gpu_budget {
        // A token's experts come before comfort.
        None => room_for(automatic).max(fit.min(top_k as u64)).min(experts),
        Some(Budget::Slots(slots)) => slots,
        Some(Budget::Bytes(bytes)) => room_for(bytes.0),
    };
    if wanted < top_k as u64 || wanted > fit {
        return Err(EngineError::GpuCache {
            wanted,
            bytes: Bytes(wanted.saturating_mul(slot_bytes)),
            least: top_k as u64,
            most: fit,
            room: Bytes(room),
        });
    }
    // More slots than experts would only stay empty.
    Ok(wanted.min(experts) as usize)
}

/// What was measured at the start, in 1e9 bytes a second.
#[derive(Clone, Copy)]
struct Measured {
    /// Kernels read of host memory, and of the GPU's own.
    host: Option<f64>,
    own: Option<f64>,
    /// Copies from host memory; 0 where that cannot be told.
    bus: f64,
}

fn read(backend: &CudaBackend, experts: &GpuExperts, loaded: &DeviceCounters, measured: Measured) -> GpuStats {
    let (counts, device) = (experts.counts(), backend.device().counters());
    let (slots, bytes) = experts.size();
    let (attentions, tensor_attentions) = backend.attention_counts();
    GpuStats {
        name: backend.device().properties().name.clone(),
        device: backend.device().properties().ordinal as u64,
        kernels: backend.device().kernels_from(),
        cache_slots: slots as u64,
        cache_bytes: bytes as u64,
        expert_hits: counts.hits,
        expert_misses: counts.misses,
        evictions: counts.evictions,
        found_rows: counts.found_rows,
        guessed_uploads: counts.guessed,
        guessed_bytes: counts.guessed_bytes,
        guessed_used: counts.guessed_used,
        guessed_wasted: counts.guessed_wasted,
        sums: match backend.sums() {
            Sums::Exact => "exact",
            Sums::Fast => "fast",
        },
        attentions,
        tensor_attentions,
        launches: device.launches,
        graphs: device.graphs,
        chosen_tokens: device.choices,
        waits: device.waits,
        wait_ms: device.wait_ns as f64 / 1e6,
        registered_bytes: experts.registered_bytes() as u64,
        in_place_bytes: device.in_place_bytes,
        host_read_gb_per_s: measured.host,
        own_read_gb_per_s: measured.own,
        upload_bytes: device.upload_bytes,
        download_bytes: device.download_bytes,
        // Bytes a nanosecond.
        upload_gb_per_s: (device.timed_upload_bytes - loaded.timed_upload_bytes) as f64
            / (device.timed_upload_ns - loaded.timed_upload_ns).max(1) as f64,
        bus_gb_per_s: measured.bus,
    }
}
