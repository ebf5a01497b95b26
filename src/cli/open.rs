//! From flags to an open engine: options, the plan on the screen, progress of the loads.
//! Never decides anything about memory; it shows what the planner decided. Surprising fact: Ctrl-C while loading ends the program at once,
//! since nothing exists yet that could be lost.

use std::ops::ControlFlow;
use std::sync::Mutex;

use crate::backend::cpu::matmul::Arithmetic;
use crate::backend::cpu::simd::SimdLevel;
use crate::backend::ops::Sums;
use crate::cli::args::{
    BackendChoice, Cli, DirectFlag, IoChoice, LookaheadChoice, ProbeFlag, SimdChoice, SumsChoice, SweepRows,
    UploadsChoice,
};
use crate::cli::interrupt::Interrupt;
use crate::cli::output::note;
use crate::cli::progress::{Meter, Unit};
use crate::cli::{CliError, input};
use crate::engine::options::{DeviceChoice, EngineOptions, GpuUploads, LookaheadMode, Preload};
use crate::engine::prepare::Prepared;
use crate::engine::{Engine, EngineError, Step};
use crate::storage::checksum::sidecar_path;
use crate::storage::probe::ProbeChoice;
use crate::storage::reader::{DirectChoice, ReaderChoice};
use crate::units::{parse_budget, parse_gigabytes};

/// Engine options of a command line.
///
/// # Errors
/// Usage errors only: budgets that are no amounts, backends and instruction sets that are not here, no model.
pub fn engine_options(cli: &Cli) -> Result<EngineOptions, CliError> {
    let (path, notice) = input::model_path(cli)?;
    if let Some(notice) = notice {
        note(&notice);
    }
    let streaming = &cli.streaming;
    let budget = streaming.ssd_streaming_cache_experts.as_deref().map(parse_budget).transpose();
    let budget = budget.map_err(|e| CliError::usage(format!("--ssd-streaming-cache-experts: {e}")))?;
    let gpu_budget = cli.model.gpu_cache.as_deref().map(parse_budget).transpose();
    let gpu_budget = gpu_budget.map_err(|e| CliError::usage(format!("--gpu-cache: {e}")))?;
    let device = match cli.model.backend {
        BackendChoice::Auto if !cli.model.cpu => DeviceChoice::Auto,
        BackendChoice::Auto | BackendChoice::Cpu => DeviceChoice::Cpu,
        BackendChoice::Cuda => DeviceChoice::Cuda,
    };
    let of_a_gpu = [
        ("--gpu-devices", cli.model.gpu_devices.is_some()),
        ("--gpu-cache", gpu_budget.is_some()),
        ("--gpu-uploads", cli.model.gpu_uploads != UploadsChoice::Auto),
        ("--no-graph", cli.model.no_graph),
        ("--gpu-sums", cli.model.gpu_sums.is_some()),
    ];
    if let (DeviceChoice::Cpu, Some((flag, _))) = (device, of_a_gpu.iter().find(|(_, is_given)| *is_given)) {
        return Err(CliError::usage(format!("{flag} needs a GPU; drop it, or --cpu and --backend cpu")));
    }
    cache_policy::by_name(&streaming.cache_policy).map_err(|e| CliError::usage(format!("--cache-policy: {e}")))?;
    let used = streaming.simulate_used_memory.as_deref().map(parse_gigabytes).transpose();
    let simulated_used = used.map_err(|e| CliError::usage(format!("--simulate-used-memory: {e}")))?.unwrap_or_default();
    let row_cache = streaming.row_cache.as_deref().map(parse_gigabytes).transpose();
    let row_cache = row_cache.map_err(|e| CliError::usage(format!("--row-cache: {e}")))?.unwrap_or_default();
    let sidecar = || streaming.checksums.clone().unwrap_or_else(|| sidecar_path(&path));
    let verify = streaming.verify_reads.then(sidecar);
    let preload = match (streaming.ssd_streaming_cold, streaming.ssd_streaming_preload_experts) {
        (true, _) => Preload::Cold,
        (_, Some(experts)) => Preload::Experts(u64::from(experts)),
        _ => Preload::Auto,
    };
    Ok(EngineOptions {
        ctx: cli.model.ctx.map(|n| n as usize),
        threads: cli.model.threads.map(usize::from),
        arithmetic: if cli.model.quality { Arithmetic::Quality } else { Arithmetic::Fast },
        device,
        gpu_device: cli.model.gpu_devices.map(usize::from),
        gpu_budget,
        gpu_uploads: match cli.model.gpu_uploads {
            UploadsChoice::Auto => GpuUploads::Auto,
            UploadsChoice::Copy => GpuUploads::Copy,
            UploadsChoice::Direct => GpuUploads::Direct,
        },
        finds_experts: !cli.model.no_graph,
        gpu_sums: cli.model.gpu_sums.map(|sums| match sums {
            SumsChoice::Exact => Sums::Exact,
            SumsChoice::Fast => Sums::Fast,
        }),
        simd: simd(cli.model.simd)?,
        chunk: cli.model.prefill_chunk.map(|n| n as usize),
        sweep: match cli.model.sweep_rows {
            None | Some(SweepRows::Auto) => None,
            Some(SweepRows::Rows(rows)) => Some(rows),
        },
        decoder_suffix: !cli.model.no_decoder_suffix,
        kv_exact: cli.model.kv_exact,
        is_streaming: streaming.ssd_streaming,
        budget,
        policy: streaming.cache_policy.clone(),
        preload,
        hotlist: streaming.hotlist.clone(),
        save_hotlist: streaming.save_hotlist.clone(),
        lookahead: match streaming.lookahead {
            LookaheadChoice::Auto => LookaheadMode::Auto,
            LookaheadChoice::Off => LookaheadMode::Off,
            LookaheadChoice::Memory => LookaheadMode::Memory,
            LookaheadChoice::Router => LookaheadMode::Router,
            LookaheadChoice::Both => LookaheadMode::Both,
        },
        simulated_used,
        io: match streaming.io {
            IoChoice::Auto => ReaderChoice::Auto,
            IoChoice::Uring => ReaderChoice::Uring,
            IoChoice::Pread => ReaderChoice::Pread,
        },
        verify,
        row_cache,
        direct: match streaming.direct {
            DirectFlag::Auto => DirectChoice::Auto,
            DirectFlag::On => DirectChoice::On,
            DirectFlag::Off => DirectChoice::Off,
        },
        probe: match streaming.probe {
            ProbeFlag::Auto => ProbeChoice::Auto,
            ProbeFlag::Off => ProbeChoice::Off,
            ProbeFlag::Force => ProbeChoice::Force,
        },
        ..EngineOptions::new(path)
    })
}

fn simd(choice: SimdChoice) -> Result<Option<SimdLevel>, CliError> {
    let wanted = match choice {
        SimdChoice::Auto => return Ok(None),
        SimdChoice::Scalar => SimdLevel::Scalar,
        SimdChoice::Avx2 => SimdLevel::Avx2,
        SimdChoice::Avx512 => SimdLevel::Avx512,
        SimdChoice::Amx => SimdLevel::Amx,
    };
    let best = SimdLevel::detect();
    if wanted > best {
        return Err(CliError::usage(format!(
            "--simd {}: this processor offers {} at most",
            wanted.name(),
            best.name()
        )));
    }
    Ok(Some(wanted))
}

/// Shows what was found and planned.
pub fn show_plan(prepared: &Prepared, options: &EngineOptions) {
    prepared.notices.iter().for_each(|line| note(line));
    if options.hotlist.is_some() && options.preload == Preload::Cold {
        note("note: --ssd-streaming-cold starts with an empty cache; the hotlist is not loaded");
    }
    let threads = options.threads.unwrap_or_else(crate::sys::cpu_count);
    let level = options.simd.unwrap_or_else(SimdLevel::detect);
    let arithmetic = match options.arithmetic {
        Arithmetic::Quality => "f32 activations",
        Arithmetic::Fast => "8-bit activations",
    };
    let place = match prepared.chosen.gpu() {
        Some(gpu) => format!("backend cuda: {gpu}"),
        None => format!("backend cpu: {threads} threads, {}", level.name()),
    };
    let why = prepared.chosen.why().map_or(String::new(), |why| format!(" ({why})"));
    note(&format!("{} ({}), {place}, {arithmetic}{why}", prepared.file.path().display(), prepared.config.arch(),));
    note(&prepared.plan.to_string());
}

/// Why a model cannot be opened. Where memory is short only because a flag says so, the flag is the cause.
pub fn refusal(error: &EngineError, options: &EngineOptions) -> CliError {
    match (error, options.simulated_used) {
        (EngineError::Plan(_), used) if used.0 > 0 => {
            CliError::failed(format!("{error}; --simulate-used-memory takes {used} of it, give it less"))
        }
        _ => CliError::failed(error),
    }
}

/// Opens the engine with plan and progress on stderr.
///
/// # Errors
/// Whatever keeps the model from running.
pub fn open(options: &EngineOptions, interrupt: &Interrupt) -> Result<Engine, CliError> {
    let meters =
        Mutex::new((Meter::new("loading weights", Unit::Bytes), Meter::new("preloading experts", Unit::Bytes)));
    let progress = |step: Step, done: u64, total: u64| {
        // Several threads load: whoever holds the lock speaks for all of them.
        let mut meters = meters.lock().expect("no progress call panics");
        if interrupt.is_set() {
            // Nothing is dropped by an exit.
            meters.0.clear();
            meters.1.clear();
            note("interrupted");
            std::process::exit(1);
        }
        match step {
            Step::Weights => meters.0.set(done, total),
            Step::Preload => meters.1.set(done, total),
        }
        ControlFlow::Continue(())
    };
    let engine = Engine::open(options, &mut |prepared| show_plan(prepared, options), &progress);
    let engine = engine.map_err(|error| refusal(&error, options))?;
    note(&engine.forecast().to_string());
    Ok(engine)
}
