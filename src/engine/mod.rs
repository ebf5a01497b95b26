//! Opens a model file, plans memory, and wires models to storage: the only module that sees both sides.
//! Never computes and never parses. Surprising fact: nothing large is allocated before the plan is made and accepted.

pub mod achieved;
pub mod advice;
mod checked_runner;
mod chunk;
pub mod device;
pub mod doctor;
pub mod forecast;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(feature = "cuda")]
mod gpu_ahead;
#[cfg(feature = "cuda")]
mod gpu_experts;
#[cfg(feature = "cuda")]
mod gpu_rows;
#[cfg(feature = "cuda")]
mod gpu_slots;
#[cfg(feature = "cuda")]
mod gpu_times;
#[cfg(feature = "cuda")]
mod gpu_uploads;
mod host_plan;
pub mod hotlist;
pub mod known;
pub mod lookahead;
pub mod metadata;
pub mod observe;
mod one_memory;
pub mod options;
pub mod passes;
pub mod prepare;
mod route_trace;
pub mod routes;
pub mod slabs;
pub mod stats;
pub mod supply;
pub mod token_time;
mod trace_header;
pub mod weights;

use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use cache_policy::plan::{Plan, PlanError};
use cache_policy::{ClassShape, TraceHeader, UnknownPolicy};
use parking_lot::Mutex;

use crate::backend::BackendError;
use crate::backend::cpu::CpuBackend;
use crate::backend::cpu::matmul;
use crate::backend::cpu::simd::SimdLevel;
#[cfg(feature = "cuda")]
use crate::backend::cuda;
use crate::models::metadata::ConfigError;
use crate::models::supply::{ExpertSupply, RowSupply};
use crate::models::{self, Model, ModelError, ModelRunner, RunnerOptions, SweepCounts};
use crate::obs::VerifyCounters;
use crate::storage::checksum::ChecksumError;
use crate::storage::expert_cache::{self, CacheError, CacheParts, ExpertCache};
use crate::storage::gguf::{GgufError, MetadataError};
use crate::storage::identity::ModelIdentity;
use crate::storage::layout::LayoutError;
use crate::storage::reader::{FileChange, OpenError, Reader};
use crate::storage::row_table::{RowError, RowTables};
use crate::storage::weights::{LoadOptions, ResidentWeights, WeightsError};
use crate::sys::{self, SysError};
use crate::text::tokenizer::{Tokenizer, TokenizerError};
use crate::units::{Bytes, ExpertKey};
use checked_runner::CheckedRunner;
use device::{Chosen, On, Placed};
use forecast::Forecast;
use hotlist::{Hotlist, HotlistError};
use known::{KnownExperts, KnownStats};
use lookahead::{Lookahead, LookaheadStats};
use metadata::FileMetadata;
use options::{EngineOptions, LookaheadMode};
use passes::Passes;
use prepare::{Prepared, prepare};
use routes::Routes;
use slabs::{Piece, SlabClass, SlabError, Slabs};
use supply::{ResidentExperts, StreamedExperts, TableRows};
use token_time::TokenTimer;
use weights::FileWeights;

/// Why there is no engine.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error(transparent)]
    File(#[from] GgufError),
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[error(transparent)]
    ExpertLayout(#[from] expert_cache::LayoutError),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    #[error(transparent)]
    Reader(#[from] OpenError),
    #[error(transparent)]
    Rows(#[from] RowError),
    #[error(transparent)]
    Checksums(#[from] ChecksumError),
    #[error("--row-cache {budget}: {reason}")]
    RowCache { budget: Bytes, reason: &'static str },
    #[error(transparent)]
    System(#[from] SysError),
    #[error(transparent)]
    Policy(#[from] UnknownPolicy),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(
        "{error}. What is short are addresses, not memory (ulimit -v or -d leaves {left} beside what threads reserve): raise the limit or use \
         fewer --threads"
    )]
    Addresses { error: PlanError, left: Bytes },
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(transparent)]
    Slabs(#[from] SlabError),
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Backend(#[from] BackendError),
    #[error(transparent)]
    Hotlist(#[from] HotlistError),
    #[error(
        "the file holds experts of a layer in tensors that were not loaded; convert it again with ds4-gguf convert"
    )]
    ExpertTensors,
    #[error(
        "a context of {ctx} tokens needs {needed} of state and scratch, {room} can be had; use a smaller context or restart with a \
         smaller cache budget"
    )]
    CtxTooLarge { ctx: usize, needed: Bytes, room: Bytes },
    #[error("{}: the file changed while it was opened: {change}; start again with the file in place", path.display())]
    Changed { path: PathBuf, change: FileChange },
    #[error("no GPU: {reason}; use --backend cpu")]
    NoGpu { reason: String },
    #[error("--gpu-uploads direct: {reason}; use --gpu-uploads copy")]
    GpuUploads { reason: String },
    #[error("{flag} needs a GPU: {why}; drop the flag")]
    NoGpuFor { flag: &'static str, why: String },
    #[error(
        "the model needs {needed} of GPU memory without any expert, {free} of {total} are free; use --backend cpu or a smaller --ctx"
    )]
    GpuTooSmall { needed: Bytes, free: Bytes, total: Bytes },
    #[error(
        "--gpu-cache: {wanted} experts ({bytes}) are asked for; one token uses {least}, and {room} of free GPU memory hold {most}"
    )]
    GpuCache { wanted: u64, bytes: Bytes, least: u64, most: u64, room: Bytes },
    #[error("interrupted")]
    Interrupted,
    /// What is wrong with the contents of a file.
    #[error("{}: {error}", path.display())]
    In { path: PathBuf, error: Box<EngineError> },
}

impl EngineError {
    /// This error, found in the file at `path`.
    fn inside(self, path: &Path) -> Self {
        Self::In { path: path.to_owned(), error: Box::new(self) }
    }
}

/// A step of opening that takes time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Reading resident weights; bytes.
    Weights,
    /// Filling the expert cache; bytes.
    Preload,
}

/// Told how far a step is; `Break` gives up.
pub type OnProgress<'a> = dyn Fn(Step, u64, u64) -> ControlFlow<()> + Sync + 'a;

/// An open model: weights in memory, experts one request away.
pub struct Engine {
    pub prepared: Prepared,
    placed: Box<dyn Placed>,
    cache: Option<Arc<ExpertCache>>,
    routes: Routes,
    passes: Arc<Passes>,
    /// Where a GPU computes.
    times: Option<Arc<TokenTimer>>,
    lookahead: Option<Arc<Lookahead>>,
    known: Option<Arc<KnownExperts>>,
    /// An earlier list at the place where this run's popularity will be saved.
    older_hotlist: Option<Hotlist>,
    /// Experts and bytes that a preload has read.
    preloaded: (u64, Bytes),
    forecast: Forecast,
}

impl Engine {
    /// Opens the model of `options`: looks, plans, shows the plan to `accept`, then loads.
    ///
    /// # Errors
    /// Everything that can be wrong with file, machine or request, each saying what to do.
    pub fn open(
        options: &EngineOptions,
        accept: &mut dyn FnMut(&Prepared),
        progress: &OnProgress<'_>,
    ) -> Result<Self, EngineError> {
        let prepared = prepare(options)?;
        accept(&prepared);
        let (hotlist, older_hotlist) = hotlist::read_lists(options, &prepared)?;
        let threads = options.threads.unwrap_or_else(sys::cpu_count);
        let loaded = load_weights(&prepared, options.is_streaming, threads, progress)?;
        let source = FileWeights::new(&prepared.file, Arc::clone(&loaded));
        let seat = Seat::take(options, &prepared, threads, &source)?;
        let forecast = Forecast::of(&prepared).with_memory(seat.memory_gb_per_s(loaded.all()));
        let layers = prepared.layout.experts.clone();
        let (mut lookahead, mut known) = (None, None);
        let (mut preloaded, mut routes) = ((0, Bytes(0)), Routes::without_verdict());
        // A GPU's own tier hears of every request and tells; the cache below it sees only some.
        let is_upper_tier = !matches!(seat, Seat::Cpu(..));
        let mut arena = Vec::new();
        let (experts, cache): (Arc<dyn ExpertSupply<CpuBackend>>, _) = if options.is_streaming {
            // Weights that moved to a GPU leave their host memory to the cache.
            drop((source, loaded));
            let (cache, pieces) = make_cache(&prepared)?;
            let cache = Arc::new(cache);
            arena = pieces;
            if !is_upper_tier {
                routes = Routes::new(&layers.iter().map(|l| (l.layer, l.experts)).collect::<Vec<_>>());
                cache.set_route_sink(Some(routes.sink()));
            }
            preloaded = preload(&cache, &prepared, hotlist.as_ref(), progress)?;
            // On a GPU reading ahead was not measured to pay.
            let mode = options.lookahead.resolve(!is_upper_tier && forecast.is_read_ahead_worth_it());
            lookahead = make_lookahead(mode, &prepared, &cache);
            let (_, _, top_k) = prepared.config.expert_shape();
            let experts = StreamedExperts::new(Arc::clone(&cache), layers, top_k, lookahead.clone());
            known = Some(Arc::clone(experts.known()));
            (Arc::new(experts), Some(cache))
        } else {
            let told = if is_upper_tier { Routes::without_verdict() } else { routes.clone() };
            let resident = ResidentExperts::new(loaded, layers, told).ok_or(EngineError::ExpertTensors)?;
            (Arc::new(resident), None)
        };
        let placed = seat.place((experts, arena), options, &prepared, &routes)?;
        let forecast = forecast.with_lookahead(lookahead.is_some());
        let forecast = placed.gpu_stats().map_or(forecast, |gpu| forecast.with_gpu(gpu.own_read_gb_per_s, gpu.tier()));
        let times = placed.take_times().map(|clock| Arc::new(TokenTimer::new(clock, drive_wait(&cache, &prepared))));
        Ok(Self {
            prepared,
            placed,
            cache,
            routes,
            passes: Arc::default(),
            times,
            lookahead,
            known,
            older_hotlist,
            preloaded,
            forecast,
        })
    }

    /// A fresh sequence with the planned context.
    ///
    /// # Errors
    /// When its state cannot be allocated.
    pub fn runner(&self) -> Result<Box<dyn ModelRunner>, EngineError> {
        self.runner_with(self.prepared.runner)
    }

    fn runner_with(&self, options: RunnerOptions) -> Result<Box<dyn ModelRunner>, EngineError> {
        let rows = self.prepared.rows.clone().map(|rows| Arc::new(TableRows(rows)) as Arc<dyn RowSupply>);
        let reads_on = self.cache.is_some() || rows.is_some();
        let inner = self.placed.runner(options, rows)?;
        // Once everything is in memory the file no longer matters.
        let reader = reads_on.then(|| Arc::clone(&self.prepared.reader));
        let (passes, routes) = (Arc::clone(&self.passes), self.routes.clone());
        let (lookahead, times) = (self.lookahead.clone(), self.times.clone());
        Ok(Box::new(CheckedRunner { inner, reader, passes, times, routes, lookahead, session: None }))
    }

    /// A fresh sequence with another context length, in place of one with the planned length, which the caller has dropped.
    ///
    /// # Errors
    /// `CtxTooLarge` when the plan has no room for it.
    pub fn runner_with_ctx(&self, ctx: usize) -> Result<Box<dyn ModelRunner>, EngineError> {
        let chunk = self.prepared.runner.chunk.min(ctx);
        let options = RunnerOptions { ctx, chunk, ..self.prepared.runner };
        let bytes = self.prepared.config.runner_bytes(&options);
        let plan = self.plan();
        let products = prepare::product_shapes(&self.prepared.file, self.prepared.config.as_ref(), &options);
        let device = matmul::scratch_bytes(self.prepared.arithmetic, self.prepared.threads, &products);
        let frontiers = prepare::frontiers(self.prepared.rewind_points, self.prepared.config.as_ref());
        let needed = bytes.kv.saturating_add(bytes.scratch).saturating_add(device).saturating_add(frontiers);
        // Half of what the plan left to the system may still be taken without hurting it.
        let room = plan.kv.0 + plan.scratch.0 + plan.spare.0 / 2;
        if needed > room {
            return Err(EngineError::CtxTooLarge { ctx, needed: Bytes(needed), room: Bytes(room) });
        }
        self.runner_with(options)
    }

    /// The memory plan.
    pub fn plan(&self) -> &Plan {
        &self.prepared.plan
    }

    /// The tokenizer of the file.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.prepared.tokenizer
    }

    /// What the sweeps of all sequences did.
    pub fn sweep_counts(&self) -> SweepCounts {
        self.placed.sweep_counts()
    }

    /// Name of the device.
    pub fn backend_name(&self) -> &'static str {
        self.placed.name()
    }

    /// What the GPU did; `None` on the processor.
    pub fn gpu_stats(&self) -> Option<stats::GpuStats> {
        self.placed.gpu_stats()
    }

    /// Where a decoded token's time went on a GPU whose uploads go at `gb_per_s`; `None` on the processor and before one was timed.
    pub fn token_time(&self, gb_per_s: f64) -> Option<token_time::TokenTime> {
        self.times.as_ref()?.mean(gb_per_s)
    }

    /// The expert cache, when streaming.
    pub fn cache(&self) -> Option<&ExpertCache> {
        self.cache.as_deref()
    }

    /// Best possible hit rate of this run's requests with the same slots, from an empty cache; `None` without requests
    /// or after more than are kept.
    pub fn best_hit_rate(&self) -> Option<f64> {
        let best = self.routes.optimum(&self.class_shapes())?;
        let uses = best.hits + best.misses;
        (uses > 0).then(|| best.hits as f64 / uses as f64)
    }

    /// Size classes with their slots, as policies and simulators see them.
    pub fn class_shapes(&self) -> Vec<ClassShape> {
        self.prepared.class_shapes()
    }

    /// Writes the routes of all passes from now on to `out`, until [`Engine::end_trace`].
    ///
    /// # Errors
    /// After the first pass; a model file that cannot be read for its identity; an `out` that cannot be written to.
    pub fn begin_trace(&self, out: Box<dyn Write + Send>) -> io::Result<()> {
        self.routes.begin_trace(&self.trace_header()?, out)
    }

    /// Ends the trace.
    ///
    /// # Errors
    /// The first failure to write.
    pub fn end_trace(&self) -> io::Result<()> {
        self.routes.end_trace()
    }

    /// What a trace says about this model.
    ///
    /// # Errors
    /// A model file that cannot be read.
    pub fn trace_header(&self) -> io::Result<TraceHeader> {
        self.prepared.trace_header()
    }

    /// What tells this model file from any other.
    ///
    /// # Errors
    /// A model file that cannot be read, or is no longer the one that was opened.
    pub fn identity(&self) -> io::Result<ModelIdentity> {
        self.prepared.identity()
    }

    /// What the lookahead did; `None` when there is none.
    pub fn lookahead(&self) -> Option<LookaheadStats> {
        self.lookahead.as_ref().map(|lookahead| lookahead.stats())
    }

    /// What became of experts that follow from token ids; `None` where there are none or nothing is streamed.
    pub fn known(&self) -> Option<KnownStats> {
        self.known.as_ref().and_then(|known| known.stats())
    }

    /// The reader of the model file.
    pub fn reader(&self) -> &dyn Reader {
        self.prepared.reader.as_ref()
    }

    /// The row tables, when the model has some.
    pub fn rows(&self) -> Option<&RowTables> {
        self.prepared.rows.as_deref()
    }

    /// The counters of checksums, when reads are compared with them.
    pub fn verify(&self) -> Option<&VerifyCounters> {
        self.prepared.verify.as_deref()
    }

    /// How fast this run can be.
    pub fn forecast(&self) -> &Forecast {
        &self.forecast
    }

    /// Time that passes have waited for rows so far.
    pub fn row_wait(&self) -> Duration {
        self.rows().map_or(Duration::ZERO, |rows| Duration::from_nanos(rows.counters().wait_ns.get()))
    }

    /// Experts and bytes read by the preload.
    pub fn preloaded(&self) -> (u64, Bytes) {
        self.preloaded
    }
}

/// Tells how long single tokens have waited for experts and rows from the drive, in nanoseconds.
fn drive_wait(cache: &Option<Arc<ExpertCache>>, prepared: &Prepared) -> Box<dyn Fn() -> u64 + Send + Sync> {
    let (cache, rows) = (cache.clone(), prepared.rows.clone());
    Box::new(move || {
        let experts = cache.as_ref().map_or(0, |cache| cache.stats().decode.wait_ns);
        experts + rows.as_ref().map_or(0, |rows| rows.counters().wait_ns.get())
    })
}

/// A model on its backend, before its experts have a supply.
enum Seat {
    Cpu(Arc<CpuBackend>, Arc<dyn Model<CpuBackend>>),
    #[cfg(feature = "cuda")]
    Cuda(Arc<cuda::CudaBackend>, Arc<dyn Model<cuda::CudaBackend>>),
}

impl Seat {
    /// Loads the resident weights where `prepared` says.
    fn take(
        options: &EngineOptions,
        prepared: &Prepared,
        threads: usize,
        source: &FileWeights<'_>,
    ) -> Result<Self, EngineError> {
        match &prepared.chosen {
            Chosen::Cpu { .. } => {
                let level = options.simd.unwrap_or_else(SimdLevel::detect);
                let backend = Arc::new(CpuBackend::new(threads, options.arithmetic, level)?);
                backend.reserve(&prepared.products);
                let model = models::load(&FileMetadata(prepared.file.metadata()), Arc::clone(&backend), source)
                    .map_err(|e| EngineError::from(e).inside(prepared.file.path()))?;
                Ok(Self::Cpu(backend, model))
            }
            #[cfg(feature = "cuda")]
            Chosen::Cuda(device) => {
                let (backend, model) = gpu::load(device, options, prepared, source)?;
                Ok(Self::Cuda(backend, model))
            }
        }
    }

    /// How fast the processor reads `bytes`; `None` where weights lie in a GPU.
    fn memory_gb_per_s(&self, bytes: &[u8]) -> Option<f64> {
        match self {
            Self::Cpu(backend, _) => backend.memory_gb_per_s(bytes),
            #[cfg(feature = "cuda")]
            Self::Cuda(..) => None,
        }
    }

    /// Gives the model its experts.
    fn place(
        self,
        (experts, arena): (Arc<dyn ExpertSupply<CpuBackend>>, Vec<Piece>),
        #[cfg_attr(not(feature = "cuda"), expect(unused_variables))] options: &EngineOptions,
        #[cfg_attr(not(feature = "cuda"), expect(unused_variables))] prepared: &Prepared,
        #[cfg_attr(not(feature = "cuda"), expect(unused_variables))] routes: &Routes,
    ) -> Result<Box<dyn Placed>, EngineError> {
        #[cfg(not(feature = "cuda"))]
        drop(arena);
        match self {
            // Only a device has to know the memory of slots.
            Self::Cpu(backend, model) => {
                Ok(Box::new(On { backend, model, experts, read_gpu: None, times: Mutex::default() }))
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(backend, model) => {
                Ok(Box::new(gpu::place((backend, model), (experts, arena), options, prepared, routes.clone())?))
            }
        }
    }
}

fn load_weights(
    prepared: &Prepared,
    is_streaming: bool,
    threads: usize,
    progress: &OnProgress<'_>,
) -> Result<Arc<ResidentWeights>, EngineError> {
    let tensors = prepare::tensors_to_load(&prepared.file, &prepared.layout, is_streaming);
    let options = LoadOptions { threads: threads.max(4), drop_page_cache: is_streaming };
    let report = |done, total| {
        let _ = progress(Step::Weights, done, total);
    };
    let loaded = ResidentWeights::load(prepared.file.path(), &tensors, &options, &report)?;
    // Header, weights and streamed reads open the file one after another; it must be one file to all of them.
    let same = prepared.file.identity().compare(loaded.identity()).and_then(|()| prepared.reader.check_file());
    same.map_err(|change| EngineError::Changed { path: prepared.file.path().to_owned(), change })?;
    Ok(Arc::new(loaded))
}

/// The cache, and the memory of its slots.
fn make_cache(prepared: &Prepared) -> Result<(ExpertCache, Vec<Piece>), EngineError> {
    let slab_classes: Vec<SlabClass> =
        prepared.plan.classes.iter().map(|c| SlabClass { slot_bytes: c.slot_bytes, slots: c.slots }).collect();
    let slabs = Slabs::allocate(&slab_classes)?;
    let cache = ExpertCache::new(CacheParts {
        reader: Arc::clone(&prepared.reader),
        layout: &prepared.layout.experts,
        classes: &prepared.classes,
        memory: slabs.slots,
        policy: &prepared.policy,
        hold_wait: expert_cache::HOLD_WAIT,
    })?;
    Ok((cache, slabs.pieces))
}

fn make_lookahead(mode: LookaheadMode, prepared: &Prepared, cache: &Arc<ExpertCache>) -> Option<Arc<Lookahead>> {
    if mode == LookaheadMode::Off {
        return None;
    }
    let (_, experts, top_k) = prepared.config.expert_shape();
    let layers = prepared.layout.experts.iter().map(|l| l.layer).collect();
    Some(Arc::new(Lookahead::new(mode, Arc::clone(cache), layers, (experts, top_k))))
}

/// The same number of experts of every layer, in file order: without routes to go by, no layer deserves more.
fn preload_keys(prepared: &Prepared) -> Vec<ExpertKey> {
    let layers = &prepared.layout.experts;
    let mut keys: Vec<ExpertKey> = Vec::with_capacity(prepared.plan.preload as usize);
    let widest = layers.iter().map(|l| l.experts).max().unwrap_or(0);
    for expert in 0..widest {
        for layer in layers.iter().filter(|l| expert < l.experts) {
            if keys.len() as u64 == prepared.plan.preload {
                return keys;
            }
            keys.push(ExpertKey::new(layer.layer.0, expert));
        }
    }
    keys
}

fn preload(
    cache: &ExpertCache,
    prepared: &Prepared,
    hotlist: Option<&Hotlist>,
    progress: &OnProgress<'_>,
) -> Result<(u64, Bytes), EngineError> {
    let keys = match hotlist {
        Some(list) => list.best(&prepared.class_shapes(), prepared.plan.preload),
        None => preload_keys(prepared),
    };
    if keys.is_empty() {
        return Ok((0, Bytes(0)));
    }
    let per_expert = prepared.plan.cache.0 / prepared.plan.cache_slots.max(1);
    let report = cache
        .preload(&keys, &mut |p| progress(Step::Preload, p.experts_done * per_expert, p.experts_total * per_expert))?;
    if report.is_cut_short {
        return Err(EngineError::Interrupted);
    }
    Ok((report.experts, report.bytes))
}
