//! What a machine and a model file are good for together: facts, health and bounds as one object.
//! Never fixes and never loads a model. Surprising fact: a check that fails is a line of the result and not an error, so that the rest is
//! still told.

use std::path::Path;

use memmap2::{Advice, MmapMut};
use serde::Serialize;

use crate::backend::cpu::memory_rate::read_gb_per_s;
use crate::backend::cpu::pool::Pool;
use crate::backend::cpu::simd::SimdLevel;
use crate::engine::device::{self, GpuRates};
use crate::engine::forecast::{Forecast, GpuTier};
use crate::engine::options::EngineOptions;
use crate::engine::prepare::{Prepared, prepare};
use crate::storage::gguf::GgufFile;
use crate::storage::layout::Layout;
use crate::storage::probe::{DriveRates, ProbeChoice, measure_now};
use crate::storage::reader::file::ModelFile;
use crate::storage::reader::{ReaderChoice, ReaderOptions, open_reader};
use crate::sys;
use crate::sys::mount::mount_of;
use crate::units::{Budget, Bytes};

/// Whether something works, and why not or how.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Check {
    pub is_ok: bool,
    pub detail: String,
}

impl Check {
    fn of<T, E: std::fmt::Display>(result: Result<T, E>, good: impl FnOnce(&T) -> String) -> Self {
        match result {
            Ok(value) => Self { is_ok: true, detail: good(&value) },
            Err(error) => Self { is_ok: false, detail: error.to_string() },
        }
    }
}

/// The machine.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Machine {
    pub kernel: String,
    pub processors: u64,
    pub simd: &'static str,
    pub io_uring: Check,
    /// `None` is unlimited.
    pub memlock_bytes: Option<u64>,
    pub memory_bytes: u64,
    pub available_bytes: u64,
    /// What a plan may take.
    pub usable_bytes: u64,
    pub group_limit_bytes: Option<u64>,
    pub group_used_bytes: u64,
    /// All threads together, over half a GiB; `None` without room for that.
    pub memory_gb_per_s: Option<f64>,
    pub gpu: Check,
    /// Measured now.
    pub gpu_rates: Option<GpuRates>,
    /// Why it was not measured.
    pub gpu_not_measured: Option<String>,
}

/// The drive under the model file.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Drive {
    pub file_system: Option<String>,
    pub source: Option<String>,
    pub direct: Check,
    /// Measured now.
    pub rates: Option<DriveRates>,
    /// Why it was not measured.
    pub not_measured: Option<String>,
}

/// The model file.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Health {
    pub path: String,
    pub bytes: u64,
    /// Header, and every tensor inside the file.
    pub file: Check,
    /// Experts, tables and resident tensors fit together.
    pub layout: Check,
    /// This build can run it on this machine.
    pub runs: Check,
}

impl Health {
    /// Whether the file itself is whole; a machine that is too small is no fault of it.
    pub fn is_whole(&self) -> bool {
        self.file.is_ok && self.layout.is_ok
    }
}

/// What a cache budget allows.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct BudgetBound {
    /// As `--ssd-streaming-cache-experts` takes it; "auto" for the automatic one.
    pub budget: String,
    pub slots: u64,
    pub cache_bytes: u64,
    /// Share of all experts that fit: the hit rate of routes without any habit, which real ones exceed.
    pub share: f64,
    /// Most tokens a second without a hit, at hits of `share`, and with every expert at hand.
    pub decode_tps_cold: Option<f64>,
    pub decode_tps_share: Option<f64>,
    pub decode_tps_hot: Option<f64>,
    /// Most prompt tokens a second of a prompt of `PROMPT_TOKENS` from an empty cache.
    pub prefill_tps: Option<f64>,
    /// Why this budget is refused here.
    pub refused: Option<String>,
}

/// Length of the prompt that prefill is predicted for.
pub const PROMPT_TOKENS: u64 = 4096;

/// Everything.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Diagnosis {
    pub version: &'static str,
    pub machine: Machine,
    pub drive: Drive,
    pub model: Health,
    pub forecast: Option<Forecast>,
    pub bounds: Vec<BudgetBound>,
}

/// Looks at the machine, the drive under the model of `options`, the file, and what they give together.
pub fn examine(options: &EngineOptions) -> Diagnosis {
    let path = &options.model;
    let mut machine = machine(path, options.threads.unwrap_or_else(sys::cpu_count));
    let drive = drive(path, options);
    let streamed = EngineOptions { is_streaming: true, probe: ProbeChoice::Off, ..options.clone() };
    let prepared = prepare(&streamed);
    let chosen = match &prepared {
        Ok(prepared) => Ok(prepared.chosen.clone()),
        Err(_) => device::choose(&streamed).map_err(|e| e.to_string()),
    };
    match chosen.and_then(|chosen| chosen.read_rates()) {
        Ok(rates) => machine.gpu_rates = Some(rates),
        Err(why) => machine.gpu_not_measured = Some(why),
    }
    let forecast = prepared.as_ref().ok().map(|prepared| {
        let forecast = Forecast::of(prepared).with_drive(drive.rates.as_ref());
        match &machine.gpu_rates {
            // How many slots there is room for shows when weights are loaded; what its kernels read of the host's memory is about what copies get.
            Some(gpu) => forecast.with_gpu(
                Some(gpu.own_gb_per_s),
                GpuTier { slots: forecast.experts_total, bus_gb_per_s: Some(gpu.host_gb_per_s) },
            ),
            None => forecast.with_memory(machine.memory_gb_per_s),
        }
    });
    let bounds = match (&prepared, &forecast) {
        (Ok(prepared), Some(forecast)) => bounds(prepared, forecast, &streamed),
        _ => Vec::new(),
    };
    let model = health(path, prepared.as_ref().map_err(ToString::to_string).map(|_| ()));
    Diagnosis { version: env!("CARGO_PKG_VERSION"), machine, drive, model, forecast, bounds }
}

fn machine(path: &Path, threads: usize) -> Machine {
    let uname = rustix::system::uname();
    let kernel = format!("{} {}", uname.sysname().to_string_lossy(), uname.release().to_string_lossy());
    // Rings are of the system, not of the file: the program itself serves where the model cannot be opened.
    let own = std::env::current_exe().unwrap_or_default();
    let ring = |path: &Path| open_reader(path, &ReaderOptions { io: ReaderChoice::Uring, ..ReaderOptions::default() });
    let io_uring = Check::of(ring(path).or_else(|_| ring(&own)), |_| "available".into());
    let facts = sys::memory_facts().unwrap_or_default();
    Machine {
        kernel,
        processors: sys::cpu_count() as u64,
        simd: SimdLevel::detect().name(),
        io_uring,
        memlock_bytes: sys::lock_limit().map(|b| b.0),
        memory_bytes: facts.total.0,
        available_bytes: facts.available.0,
        usable_bytes: facts.usable().0,
        group_limit_bytes: facts.group_limit.map(|b| b.0),
        group_used_bytes: facts.group_used.0,
        memory_gb_per_s: memory_rate(threads, facts.usable()),
        gpu: gpu(),
        gpu_rates: None,
        gpu_not_measured: None,
    }
}

/// Fills half a GiB and reads it.
fn memory_rate(threads: usize, usable: Bytes) -> Option<f64> {
    const BYTES: usize = 512 << 20;
    if usable.0 < 4 * BYTES as u64 {
        return None;
    }
    let mut memory = MmapMut::map_anon(BYTES).ok()?;
    // Advice only.
    #[cfg(target_os = "linux")]
    let _ = memory.advise(Advice::HugePage);
    let pool = Pool::new(threads).ok()?;
    // Pages that were never written are all the same page of zeros, which lies in cache.
    pool.split_mut(&mut memory, 1 << 20, 1, |first, part| part.fill(first as u8 | 1));
    read_gb_per_s(&pool, &memory)
}

/// What the system shows of a GPU, without its driver's libraries.
fn gpu() -> Check {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let mut names = Vec::new();
    for entry in std::fs::read_dir("/proc/driver/nvidia/gpus").into_iter().flatten().flatten() {
        let text = std::fs::read_to_string(entry.path().join("information")).unwrap_or_default();
        let model = text.lines().find_map(|l| l.strip_prefix("Model:")).map(str::trim);
        names.push(model.unwrap_or("of unknown model").to_owned());
    }
    if names.is_empty() {
        let detail = match Path::new("/dev/nvidiactl").exists() {
            true => "device files of an NVIDIA driver, but /proc/driver/nvidia names no GPU",
            false => "none found (no /proc/driver/nvidia)",
        };
        return Check { is_ok: false, detail: detail.into() };
    }
    let driver = read("/proc/driver/nvidia/version").unwrap_or_default();
    let version = driver.lines().next().and_then(|l| l.split_whitespace().find(|w| w.contains('.'))).unwrap_or("?");
    Check { is_ok: true, detail: format!("{}; driver {version}", names.join(", ")) }
}

fn drive(path: &Path, options: &EngineOptions) -> Drive {
    let mount = mount_of(path);
    let direct = Check::of(ModelFile::open_direct(path), |file| {
        format!("aligned to {} bytes in the file and {} in memory", file.alignment.offset, file.alignment.memory)
    });
    let base = ReaderOptions { io: options.io, direct: options.direct, ..ReaderOptions::default() };
    let (rates, not_measured) = match options.probe {
        ProbeChoice::Off => (None, Some("--probe off".into())),
        _ => match measure_now(path, &base) {
            Ok(rates) => (Some(rates), None),
            Err(error) => (None, Some(error.to_string())),
        },
    };
    Drive {
        file_system: mount.as_ref().map(|m| m.kind.clone()),
        source: mount.map(|m| m.source),
        direct,
        rates,
        not_measured,
    }
}

fn health(path: &Path, runs: Result<(), String>) -> Health {
    let parsed = GgufFile::open(path);
    let layout = match &parsed {
        Ok(file) => Check::of(Layout::from_gguf(file), |layout| {
            let experts: u64 = layout.experts.iter().map(|l| u64::from(l.experts)).sum();
            let (resident, tables) = (layout.resident_bytes, layout.tables.len());
            format!("{resident} resident, {experts} experts in {} layers, {tables} row tables", layout.experts.len())
        }),
        Err(_) => Check { is_ok: false, detail: "the header cannot be read".into() },
    };
    Health {
        path: path.display().to_string(),
        bytes: std::fs::metadata(path).map_or(0, |m| m.len()),
        file: Check::of(parsed, |file| format!("{} tensors, all inside the file", file.tensors().len())),
        layout,
        runs: Check::of(runs, |()| "plans on this machine".into()),
    }
}

/// Bounds at the automatic budget and at shares of the experts, the smallest that works first.
fn bounds(prepared: &Prepared, forecast: &Forecast, options: &EngineOptions) -> Vec<BudgetBound> {
    let (token, all) = (prepared.plan.token_experts, prepared.plan.experts_total);
    if all == 0 {
        return Vec::new();
    }
    let mut slots: Vec<u64> =
        [token, all / 20, all / 10, all / 4, all / 2, all].into_iter().filter(|s| *s >= token).collect();
    slots.sort_unstable();
    slots.dedup();
    let asked = slots.into_iter().map(|n| (n.to_string(), Some(Budget::Slots(n))));
    asked
        .chain([("auto".to_owned(), None)])
        .map(|(name, budget)| bound(prepared, forecast, options, name, budget))
        .collect()
}

fn bound(
    prepared: &Prepared,
    forecast: &Forecast,
    options: &EngineOptions,
    name: String,
    budget: Option<Budget>,
) -> BudgetBound {
    let plan = prepared.plan_again(&EngineOptions { budget, ..options.clone() });
    let (slots, cache_bytes, refused) = match plan {
        Ok(plan) => (plan.cache_slots, plan.cache.0, None),
        Err(error) => (0, 0, Some(error.to_string())),
    };
    let share = slots as f64 / prepared.plan.experts_total as f64;
    let here = Forecast { cache_slots: slots, ..*forecast };
    let tps = |miss_rate: f64| refused.is_none().then(|| here.decode(miss_rate).tps()).flatten();
    BudgetBound {
        budget: name,
        slots,
        cache_bytes,
        share,
        decode_tps_cold: tps(1.0),
        decode_tps_share: tps(1.0 - share),
        decode_tps_hot: tps(0.0),
        prefill_tps: if refused.is_none() { here.prefill_tps(PROMPT_TOKENS) } else { None },
        refused,
    }
}
