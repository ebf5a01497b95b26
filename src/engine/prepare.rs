//! From a model file to a memory plan: everything that is known before anything large is allocated.
//! Never reads tensor data. Surprising fact: the vocabulary is loaded first, so that its memory counts as part of the
//! process and not as a surprise.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use cache_policy::ClassShape;
use cache_policy::plan::{self, ClassRequest, Plan, Request};
use cache_policy::policies::{MakePolicy, by_name};

use crate::backend::cpu::matmul::{self, Arithmetic, ProductShape};
use crate::engine::EngineError;
use crate::engine::chunk::chunk_rows;
use crate::engine::device::{self, Chosen};
use crate::engine::host_plan;
use crate::engine::lookahead::memory_bytes;
use crate::engine::metadata::{FileMetadata, vocabulary};
use crate::engine::one_memory;
use crate::engine::options::{
    CTX_DEFAULT_MAX, EngineOptions, LookaheadMode, PRELOAD_AUTO_MAX, Preload, SWEEP_ROWS_MAX, SWEEP_SHARE,
};
use crate::models::{self, ModelConfig, Product, RunnerOptions};
use crate::obs::VerifyCounters;
use crate::quant::QuantType;
use crate::storage::checksum::Checksums;
use crate::storage::expert_cache::{SizeClass, size_classes};
use crate::storage::gguf::GgufFile;
use crate::storage::identity::ModelIdentity;
use crate::storage::layout::{LayerExperts, Layout};
use crate::storage::probe::{DriveRates, ProbeChoice, ProbeError, drive_rates};
use crate::storage::reader::{Alignment, DirectChoice, Reader, ReaderOptions, open_reader};
use crate::storage::row_table::{RowTables, WINDOW_BLOCKS};
use crate::storage::verify::VerifyingReader;
use crate::storage::weights::TensorExtent;
use crate::sys;
use crate::text::tokenizer::Tokenizer;
use crate::units::Bytes;

/// A model file that was looked into, and the plan for running it.
pub struct Prepared {
    pub file: GgufFile,
    pub layout: Layout,
    pub config: Box<dyn ModelConfig>,
    pub tokenizer: Tokenizer,
    pub runner: RunnerOptions,
    /// Frontiers that a session may keep to go back to.
    pub rewind_points: usize,
    /// The products of a pass, for the memory that the device keeps for them.
    pub(super) products: Vec<ProductShape>,
    pub plan: Plan,
    /// Where the model will run.
    pub chosen: Chosen,
    pub(super) arithmetic: Arithmetic,
    pub(super) threads: usize,
    /// What deserves a line before the run: slower paths, lengths beyond training.
    pub notices: Vec<String>,
    /// What the drive gives; `None` where it was not measured.
    pub drive: Option<DriveRates>,
    pub(super) policy: MakePolicy,
    pub(super) reader: Arc<dyn Reader>,
    pub(super) rows: Option<Arc<RowTables>>,
    pub(super) verify: Option<Arc<VerifyCounters>>,
    /// Memory that comparing reads takes.
    verify_bytes: u64,
    /// Experts by size, in the order of the plan's classes.
    pub classes: Vec<SizeClass>,
}

impl Prepared {
    /// Size classes with their slots, as policies and simulators see them.
    pub fn class_shapes(&self) -> Vec<ClassShape> {
        let classes = self.classes.iter().zip(&self.plan.classes);
        classes.map(|(class, planned)| class.shape(planned.slots as usize)).collect()
    }

    /// What tells this model file from any other.
    ///
    /// # Errors
    /// A model file that cannot be read, or is no longer the one that was opened.
    pub fn identity(&self) -> io::Result<ModelIdentity> {
        let (_, _, top_k) = self.config.expert_shape();
        ModelIdentity::of(&self.file, self.config.arch(), &self.layout.experts, top_k as u64)
    }

    /// The plan for the same file under `options` that differ in budget, preload or streaming only.
    ///
    /// # Errors
    /// The planner's refusals.
    pub fn plan_again(&self, options: &EngineOptions) -> Result<Plan, EngineError> {
        let device = Device::of(&self.chosen, (options.arithmetic, self.threads), &self.products);
        let (runner, facts) = ((&self.runner, device), memory_facts(options)?);
        make_plan(
            options,
            &facts,
            self.config.as_ref(),
            (&self.layout, &self.classes),
            runner,
            (self.rows.as_deref(), self.verify_bytes),
        )
    }
}

/// What the plan of host memory has to know of where the model runs.
#[derive(Clone, Copy)]
struct Device {
    is_gpu: bool,
    /// Whether the GPU's memory is the host's.
    shares_memory: bool,
    /// Host memory that products pass through.
    scratch: u64,
}

impl Device {
    fn of(chosen: &Chosen, (arithmetic, threads): (Arithmetic, usize), products: &[ProductShape]) -> Self {
        let is_gpu = chosen.gpu().is_some();
        let scratch = if is_gpu { 0 } else { matmul::scratch_bytes(arithmetic, threads, products) };
        Self { is_gpu, shares_memory: chosen.shares_memory(), scratch }
    }
}

/// Looks into the file and plans.
///
/// # Errors
/// Whatever is wrong with the file, and the planner's refusals.
pub fn prepare(options: &EngineOptions) -> Result<Prepared, EngineError> {
    let policy = by_name(&options.policy)?;
    let chosen = device::choose(options)?;
    let file = GgufFile::open(&options.model)?;
    let inside = |error: EngineError| error.inside(&options.model);
    let config = models::config(&FileMetadata(file.metadata())).map_err(|e| inside(e.into()))?;
    let layout = Layout::from_gguf(&file).map_err(|e| inside(e.into()))?;
    let tokenizer = read_tokenizer(&file).map_err(inside)?;
    let mut notices = Vec::new();
    let runner = runner_options(options, config.as_ref(), (&chosen, layout.resident_bytes), &mut notices)?;
    let (tuning, drive) = tune(options, &layout, &mut notices)?;
    let products = product_shapes(&file, config.as_ref(), &runner);
    let threads = options.threads.unwrap_or_else(sys::cpu_count);
    let device = Device::of(&chosen, (options.arithmetic, threads), &products);
    let sums =
        options.verify.as_ref().map(|sidecar| Checksums::open(sidecar, &file, &layout)).transpose()?.map(Arc::new);
    let wire = |reader| wire(options, config.as_ref(), &layout, (runner, device), reader, sums.as_ref());
    let mut wired = wire(match &options.reader {
        Some(reader) => Arc::clone(reader),
        None => open_reader(&options.model, &tuning)?,
    })?;
    // What a plan leaves is the GPU's, if both have one memory.
    if let Some(reason) = cached_reads(options, &layout, &wired).filter(|_| !device.shares_memory) {
        let tuning = ReaderOptions { direct: DirectChoice::Off, ..tuning };
        wired = wire(open_reader(&options.model, &tuning)?)?;
        notices.push(reason);
    }
    let Wired { reader, rows, classes, runner, plan, verify, verify_bytes } = wired;
    notices.extend(reader.notices().iter().map(ToString::to_string));
    Ok(Prepared {
        file,
        layout,
        config,
        tokenizer,
        runner,
        rewind_points: options.rewind_points,
        products,
        plan,
        chosen,
        arithmetic: options.arithmetic,
        threads,
        notices,
        drive,
        policy,
        reader,
        rows,
        verify,
        verify_bytes,
        classes,
    })
}

/// Memory below which the drive is not measured: three times what the measurement takes, since no plan has been made yet.
const PROBE_ROOM_MIN: Bytes = Bytes::mib(128);

/// How to read the model file on its drive, and what the drive gives. Nothing is measured for a run that reads nothing.
fn tune(
    options: &EngineOptions,
    layout: &Layout,
    notices: &mut Vec<String>,
) -> Result<(ReaderOptions, Option<DriveRates>), EngineError> {
    let base = ReaderOptions { io: options.io, direct: options.direct, ..ReaderOptions::default() };
    let reads = options.is_streaming || !layout.tables.is_empty();
    let mut choice = if reads && options.reader.is_none() { options.probe } else { ProbeChoice::Off };
    if options.probe == ProbeChoice::Force && !reads {
        notices.push("note: --probe force measures nothing here: this run reads neither experts nor table rows".into());
    }
    let room = sys::memory_facts()?.usable();
    if choice != ProbeChoice::Off && room < PROBE_ROOM_MIN {
        notices.push(format!(
            "note: {room} of memory is free, too little to measure the drive; reading with the built-in depth"
        ));
        choice = ProbeChoice::Off;
    }
    let rates = match drive_rates(&options.model, &base, choice, &options.probe_memory) {
        Ok(Some(probed)) => {
            notices.extend(probed.notice);
            Some(probed.rates)
        }
        Ok(None) => None,
        Err(ProbeError::Open(error)) => return Err(error.into()),
        Err(error) => {
            notices.push(format!("note: {error}; reading with the built-in depth"));
            None
        }
    };
    Ok((rates.as_ref().map_or(base, |rates| rates.tune(&base)), rates))
}

/// What depends on how the file is read.
struct Wired {
    reader: Arc<dyn Reader>,
    rows: Option<Arc<RowTables>>,
    classes: Vec<SizeClass>,
    /// With the sweeps that the plan has room for.
    runner: RunnerOptions,
    plan: Plan,
    verify: Option<Arc<VerifyCounters>>,
    verify_bytes: u64,
}

fn wire(
    options: &EngineOptions,
    config: &dyn ModelConfig,
    layout: &Layout,
    runner: (RunnerOptions, Device),
    reader: Arc<dyn Reader>,
    sums: Option<&Arc<Checksums>>,
) -> Result<Wired, EngineError> {
    let (reader, verify, verify_bytes) = match sums {
        None => (reader, None, 0),
        Some(sums) => {
            let checked = VerifyingReader::new(reader, layout, Arc::clone(sums))?;
            let (counters, bytes) = (checked.verify_counters(), checked.memory_bytes_max());
            (Arc::new(checked) as Arc<dyn Reader>, Some(counters), bytes)
        }
    };
    let rows = row_tables(&reader, layout, options.row_cache)?;
    // Resident experts are loaded unpadded; only reads into slots need room for alignment.
    let alignment = if options.is_streaming { reader.alignment() } else { Alignment::NONE };
    let classes = size_classes(&layout.experts, alignment)?;
    let (runner, plan) = plan_sweeps(options, config, (layout, &classes), runner, (rows.as_deref(), verify_bytes))?;
    Ok(Wired { reader, rows, classes, runner, plan, verify, verify_bytes })
}

/// The tables of the file, if it has some.
fn row_tables(reader: &Arc<dyn Reader>, layout: &Layout, budget: Bytes) -> Result<Option<Arc<RowTables>>, EngineError> {
    let refuse = |reason| Err(EngineError::RowCache { budget, reason });
    if layout.tables.is_empty() {
        return if budget.0 > 0 { refuse("the model has no n-gram tables; drop the flag") } else { Ok(None) };
    }
    let tables = RowTables::new(Arc::clone(reader), &layout.tables, WINDOW_BLOCKS)?.with_cache(budget);
    if budget.0 > 0 && tables.cache_bytes() == 0 {
        return refuse("too small for a few rows; use 0.001GB or more");
    }
    Ok(Some(Arc::new(tables)))
}

/// Why reads should go through the page cache though they need not: everything that they may ask for fits in memory beside the plan,
/// so the system keeps it, also for the next start.
fn cached_reads(options: &EngineOptions, layout: &Layout, wired: &Wired) -> Option<String> {
    let experts = |l: &LayerExperts| l.experts as u64 * (l.gate.slice_bytes + l.up.slice_bytes + l.down.slice_bytes);
    let streamed = if options.is_streaming { layout.experts.iter().map(experts).sum() } else { 0u64 };
    let tables: u64 = layout.tables.iter().map(|t| t.rows.saturating_mul(u64::from(t.row_bytes))).sum();
    let (asked, free) = (streamed.saturating_add(tables), wired.plan.spare.0);
    let is_ours = options.reader.is_none() && options.direct == DirectChoice::Auto && wired.reader.is_direct();
    (is_ours && asked > 0 && asked <= free).then(|| {
        format!(
            "reads go through the page cache: the {} that they may ask for fit in the {} that the plan leaves (--direct on bypasses it)",
            Bytes(asked),
            Bytes(free)
        )
    })
}

/// The tokenizer of a file and its architecture, without looking at anything else.
///
/// # Errors
/// Whatever is wrong with the header or the vocabulary.
pub fn tokenizer(model: &Path) -> Result<(Tokenizer, String), EngineError> {
    let file = GgufFile::open(model)?;
    let arch = file.metadata().str("general.architecture").map_err(|e| EngineError::from(e).inside(model))?.to_owned();
    Ok((read_tokenizer(&file).map_err(|e| e.inside(model))?, arch))
}

fn read_tokenizer(file: &GgufFile) -> Result<Tokenizer, EngineError> {
    Ok(Tokenizer::new(vocabulary(file.metadata())?)?)
}

fn runner_options(
    options: &EngineOptions,
    config: &dyn ModelConfig,
    (chosen, resident): (&Chosen, Bytes),
    notices: &mut Vec<String>,
) -> Result<RunnerOptions, EngineError> {
    let trained = config.positions_max();
    let ctx = options.ctx.unwrap_or(trained.min(CTX_DEFAULT_MAX));
    if ctx > trained {
        notices.push(format!(
            "--ctx {ctx} goes beyond the {trained} positions the model was trained for; answers may degrade there"
        ));
    }
    let usable = memory_facts(options)?.usable();
    let chunk = chunk_rows(options, config, (chosen, resident, usable), ctx)?;
    let (decoder_suffix, kv_exact) = (options.decoder_suffix, options.kv_exact);
    Ok(RunnerOptions { decoder_suffix, kv_exact, ..RunnerOptions::new(ctx, chunk) })
}

/// Widest sweep, in whole chunks, whose rows take at most their share of `usable`.
fn widest_sweep(config: &dyn ModelConfig, runner: &RunnerOptions, usable: Bytes) -> usize {
    let bytes = |chunks: usize| {
        let bytes = config.runner_bytes(&RunnerOptions { sweep: chunks * runner.chunk, ..*runner });
        bytes.scratch.saturating_add(bytes.kv)
    };
    let least = bytes(1);
    let (mut fits, mut too_many) = (1, runner.ctx.min(SWEEP_ROWS_MAX).div_ceil(runner.chunk) + 1);
    while too_many - fits > 1 {
        let middle = fits.midpoint(too_many);
        let is_within = bytes(middle).saturating_sub(least) <= usable.0 / SWEEP_SHARE;
        *(if is_within { &mut fits } else { &mut too_many }) = middle;
    }
    fits * runner.chunk
}

/// Threads beside those that compute: readers, and those that load the weights.
const OTHER_THREADS: usize = 4;

/// What the machine has, less what the caller takes as used and what threads take of a limited address space.
fn memory_facts(options: &EngineOptions) -> Result<plan::Facts, EngineError> {
    let facts = sys::memory_facts()?;
    let threads = options.threads.unwrap_or_else(sys::cpu_count) + OTHER_THREADS;
    let reserved = sys::thread_addresses().0.saturating_mul(threads as u64);
    let address_space = facts.address_space.map(|left| Bytes(left.0.saturating_sub(reserved)));
    Ok(plan::Facts { address_space, simulated_used: options.simulated_used, ..facts })
}

/// A refusal of the planner, with the limit that caused it where that is one on addresses.
fn explain(error: EngineError, facts: &plan::Facts) -> EngineError {
    match (error, facts.address_space) {
        (EngineError::Plan(error), Some(left)) if left == facts.usable() => EngineError::Addresses { error, left },
        (error, _) => error,
    }
}

/// The plan, and the runner with the sweeps that it has room for. A width that was asked for is not changed.
fn plan_sweeps(
    options: &EngineOptions,
    config: &dyn ModelConfig,
    (layout, classes): (&Layout, &[SizeClass]),
    (mut runner, device): (RunnerOptions, Device),
    rows: (Option<&RowTables>, u64),
) -> Result<(RunnerOptions, Plan), EngineError> {
    let facts = memory_facts(options)?;
    runner.sweep = options.sweep.unwrap_or_else(|| widest_sweep(config, &runner, facts.usable()));
    loop {
        match make_plan(options, &facts, config, (layout, classes), (&runner, device), rows) {
            // Whatever else was asked for comes first.
            Err(EngineError::Plan(_)) if options.sweep.is_none() && runner.sweep > runner.chunk => {
                runner.sweep = (runner.sweep / 2).next_multiple_of(runner.chunk).min(runner.sweep - runner.chunk);
            }
            planned => return Ok((runner, planned.map_err(|error| explain(error, &facts))?)),
        }
    }
}

/// The products of a pass with the types that the file has. A tensor that is missing is an error of the loader.
pub(super) fn product_shapes(file: &GgufFile, config: &dyn ModelConfig, runner: &RunnerOptions) -> Vec<ProductShape> {
    let types: HashMap<&str, QuantType> = file.tensors().iter().map(|t| (t.name.as_str(), t.ty)).collect();
    let is_weights = |ty: &QuantType| ty.is_numeric();
    let shape = |Product { tensor, rows, groups, cols, outputs }| {
        let ty = types.get(tensor.as_str()).copied().filter(is_weights)?;
        Some(ProductShape { ty, rows, groups, cols, outputs })
    };
    config.products(runner).into_iter().filter_map(shape).collect()
}

/// Memory of the frontiers that a session may keep to go back to.
pub(super) fn frontiers(rewind_points: usize, config: &dyn ModelConfig) -> u64 {
    config.frontier_bytes().saturating_mul(rewind_points as u64)
}

/// Most row-table memory of one pass: all rows of a chunk, and the rows that are kept. The columns of a token are not known here, so the count comes from the
/// bytes that the model says a token asks for.
fn staging(runner: &RunnerOptions, config: &dyn ModelConfig, (rows, is_gpu): (Option<&RowTables>, bool)) -> u64 {
    rows.map_or(0, |tables| {
        let batch = tables.batch_bytes_max((runner.chunk * config.rows_per_token()) as u64);
        // Two of them in front of a device that queues (`RowFeed`).
        batch.saturating_mul(if is_gpu { 2 } else { 1 }).saturating_add(tables.cache_bytes())
    })
}

fn make_plan(
    options: &EngineOptions,
    facts: &plan::Facts,
    config: &dyn ModelConfig,
    (layout, classes): (&Layout, &[SizeClass]),
    (runner, device): (&RunnerOptions, Device),
    (rows, verify_bytes): (Option<&RowTables>, u64),
) -> Result<Plan, EngineError> {
    let bytes = config.runner_bytes(runner);
    let (_, _, top_k) = config.expert_shape();
    let is_ahead = options.is_streaming && options.lookahead != LookaheadMode::Off;
    let lookahead = if is_ahead { memory_bytes(options.lookahead, config.expert_shape()) } else { 0 };
    let requests: Vec<ClassRequest> = classes.iter().map(SizeClass::request).collect();
    let mut request = Request {
        process: sys::process_memory()?.resident,
        resident: layout.resident_bytes,
        ctx: runner.ctx as u64,
        sweep: runner.sweep_rows() as u64,
        kv: Bytes(bytes.kv.saturating_add(frontiers(options.rewind_points, config))),
        scratch: Bytes(bytes.scratch.saturating_add(device.scratch).saturating_add(lookahead)),
        staging: Bytes(staging(runner, config, (rows, device.is_gpu)).saturating_add(verify_bytes)),
        prefill_reserve: Bytes(0),
        classes: requests,
        top_k: top_k as u64,
        is_streaming: options.is_streaming,
        budget: options.budget.map_or(plan::Budget::Auto, Into::into),
        preload: None,
        locked: Bytes(0),
    };
    if device.shares_memory {
        request = one_memory::landing(facts, request);
    } else if device.is_gpu {
        request = host_plan::without_weights(facts, request);
    }
    if options.is_streaming {
        request.preload = match options.preload {
            Preload::Cold => None,
            Preload::Experts(experts) => Some(experts),
            Preload::Auto => Some(preload_auto(facts, &request)?),
        };
    }
    let mut plan = plan::plan(facts, &request)?;
    if device.shares_memory && options.is_streaming {
        let slots = plan.cache_slots;
        plan.notes
            .push(format!("experts are read into {slots} host slots and kept in GPU slots in the memory that is left"));
    }
    if request.resident < layout.resident_bytes {
        let passing = layout.resident_bytes;
        plan.notes.push(format!("{passing} of weights move to the GPU before the cache is filled"));
    }
    Ok(plan)
}

/// What an automatic preload reads: what fits the cache, within a few seconds of reads.
fn preload_auto(facts: &plan::Facts, request: &Request) -> Result<u64, EngineError> {
    let largest = request.classes.iter().map(|c| c.slot_bytes.0).max().unwrap_or(1).max(1);
    let slots = plan::plan(facts, request)?.cache_slots;
    Ok(slots.min(PRELOAD_AUTO_MAX.0 / largest))
}

/// The tensors to read at start: resident ones, and all experts when nothing is streamed.
pub(super) fn tensors_to_load(file: &GgufFile, layout: &Layout, is_streaming: bool) -> Vec<TensorExtent> {
    let is_expert = |name: &str| name.contains("_exps.");
    file.tensors()
        .iter()
        .enumerate()
        .filter(|(index, t)| layout.resident.contains(index) || (!is_streaming && is_expert(&t.name)))
        .filter(|(index, _)| !layout.drafting.contains(index))
        .map(|(_, t)| TensorExtent {
            name: t.name.clone(),
            extent: crate::storage::layout::Extent { offset: t.offset, len: t.bytes },
        })
        .collect()
}
