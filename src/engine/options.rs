//! What a caller asks of an engine, resolved from flags or built by tests.
//! Holds values only. Surprising fact: there is no "default model" here; finding a file is the front end's business.

use std::path::PathBuf;
use std::sync::Arc;

use crate::backend::cpu::matmul::Arithmetic;
use crate::backend::cpu::simd::SimdLevel;
use crate::backend::ops::Sums;
use crate::storage::probe::{Memory, ProbeChoice};
use crate::storage::reader::{DirectChoice, Reader, ReaderChoice};
use crate::units::{Budget, Bytes};

/// Context length when none is asked for: the trained length, at most this.
pub const CTX_DEFAULT_MAX: usize = 32_768;
/// Rows computed together in prefill when nothing else is asked for, on the processor or on a GPU with little room (`engine::chunk`).
pub const CHUNK_DEFAULT: usize = 512;
/// Widest sweep: what the state between layers of one takes grows with its rows, what it saves does not.
pub const SWEEP_ROWS_MAX: usize = 32_768;
/// An automatic sweep takes at most one part in this many of the usable memory, since what it takes the expert cache lacks.
pub const SWEEP_SHARE: u64 = 16;

/// How the cache is filled before the first token.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Preload {
    /// As much as fits, at most [`PRELOAD_AUTO_MAX`] of reads.
    #[default]
    Auto,
    /// Nothing.
    Cold,
    /// This many experts.
    Experts(u64),
}

/// Reads that an automatic preload may cost: about three seconds of a slow drive, less than one of a fast one.
pub const PRELOAD_AUTO_MAX: Bytes = Bytes::gib(4);

/// Where to compute.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DeviceChoice {
    /// A GPU if there is one, else the processor.
    Auto,
    /// The processor. What tests get when they ask for nothing.
    #[default]
    Cpu,
    /// A GPU, or an error.
    Cuda,
}

/// Which guesses about the next experts are read ahead.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LookaheadMode {
    /// The router's guess where the drive is expected to hold a token up, else nothing.
    #[default]
    Auto,
    Off,
    /// What the last tokens with the same ids used.
    Memory,
    /// What the next layer's router makes of the hidden state now.
    Router,
    Both,
}

impl LookaheadMode {
    /// What `Auto` comes to where reading ahead is or is not worth its reads: chosen by alternating runs (docs/CACHE_TUNING.md, "Reading
    /// ahead").
    #[must_use]
    pub fn resolve(self, is_worth_it: bool) -> Self {
        match self {
            Self::Auto if is_worth_it => Self::Router,
            Self::Auto => Self::Off,
            chosen => chosen,
        }
    }

    /// As the user types it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Off => "off",
            Self::Memory => "memory",
            Self::Router => "router",
            Self::Both => "both",
        }
    }

    /// Whether the route memory is asked.
    pub fn uses_memory(self) -> bool {
        matches!(self, Self::Memory | Self::Both)
    }

    /// Whether the next layer's router is or may be asked.
    pub fn uses_router(self) -> bool {
        matches!(self, Self::Auto | Self::Router | Self::Both)
    }
}

/// How experts get from host memory into that of a GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum GpuUploads {
    /// [`Self::Direct`] on a GPU without memory of its own whose kernels read the host's well, [`Self::Copy`] elsewhere.
    #[default]
    Auto,
    /// Copied first, arranged then.
    Copy,
    /// Read in the host's memory by the kernels that arrange them.
    Direct,
}

/// Everything that shapes an engine.
#[derive(Clone)]
pub struct EngineOptions {
    /// The model file.
    pub model: PathBuf,
    /// Context length; `None` for the default.
    pub ctx: Option<usize>,
    /// Compute threads; `None` for all processors of this process.
    pub threads: Option<usize>,
    pub arithmetic: Arithmetic,
    pub device: DeviceChoice,
    /// The GPU to use, as the driver counts them; `None` for the first.
    pub gpu_device: Option<usize>,
    /// Experts in GPU memory; `None` for what is free.
    pub gpu_budget: Option<Budget>,
    pub gpu_uploads: GpuUploads,
    /// Let a GPU find the experts of a token by itself.
    pub finds_experts: bool,
    /// The order of a GPU's sums; `None` for the default.
    pub gpu_sums: Option<Sums>,
    /// Instruction set; `None` for the best of this machine.
    pub simd: Option<SimdLevel>,
    /// Rows computed together in prefill; `None` for the default.
    pub chunk: Option<usize>,
    /// Rows that share one read of each expert; `None` for what [`SWEEP_SHARE`] of the memory carries.
    pub sweep: Option<usize>,
    /// Leave out prompt rows that no layer needs; never changes a bit.
    pub decoder_suffix: bool,
    /// Leave the rounding of cached rows out.
    pub kv_exact: bool,
    /// Frontiers that a session may keep to go back to: memory that the plan sets aside.
    pub rewind_points: usize,
    /// Keep experts on the drive.
    pub is_streaming: bool,
    /// Cache budget; `None` for the automatic one.
    pub budget: Option<Budget>,
    /// Eviction policy by name; "auto" is the recommended one.
    pub policy: String,
    pub preload: Preload,
    /// Preload by this list, learned earlier with the same model file.
    pub hotlist: Option<PathBuf>,
    /// Where the popularity of this run will be saved: an earlier list there is read at the start, to be merged.
    pub save_hotlist: Option<PathBuf>,
    pub lookahead: LookaheadMode,
    /// Memory to treat as used by others.
    pub simulated_used: Bytes,
    pub io: ReaderChoice,
    /// Compares every expert and row with the checksums in this sidecar.
    pub verify: Option<PathBuf>,
    /// Memory for rows of the n-gram tables that were read before; 0 for none.
    pub row_cache: Bytes,
    /// Whether reads of the drive bypass the page cache.
    pub direct: DirectChoice,
    /// Whether the drive is measured at the start.
    pub probe: ProbeChoice,
    /// Where measured rates are remembered.
    pub probe_memory: Memory,
    /// Reads through this instead of opening the file: tests inject slow or failing drives.
    pub reader: Option<Arc<dyn Reader>>,
}

impl EngineOptions {
    /// Defaults for `model`.
    pub fn new(model: impl Into<PathBuf>) -> Self {
        Self {
            model: model.into(),
            ctx: None,
            threads: None,
            arithmetic: Arithmetic::Fast,
            device: DeviceChoice::default(),
            gpu_device: None,
            gpu_budget: None,
            gpu_uploads: GpuUploads::Auto,
            finds_experts: true,
            gpu_sums: None,
            simd: None,
            chunk: None,
            sweep: None,
            decoder_suffix: true,
            kv_exact: false,
            rewind_points: 0,
            is_streaming: false,
            budget: None,
            policy: "auto".into(),
            preload: Preload::Auto,
            hotlist: None,
            save_hotlist: None,
            lookahead: LookaheadMode::Auto,
            simulated_used: Bytes(0),
            io: ReaderChoice::Auto,
            verify: None,
            row_cache: Bytes(0),
            direct: DirectChoice::Auto,
            probe: ProbeChoice::Auto,
            probe_memory: Memory::of_user(),
            reader: None,
        }
    }
}
