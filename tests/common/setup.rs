//! A runner over a checkpoint folder, and how tokens are fed to it.
//! Never uses more than memory. Surprising fact: the supplies stay reachable, so that tests can make them fail.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::checkpoint::Checkpoint;
use super::memory_supply::{MemoryExperts, MemoryRows};
use ds4::backend::cpu::CpuBackend;
use ds4::backend::cpu::matmul::Arithmetic;
use ds4::backend::cpu::simd::SimdLevel;
use ds4::models::deepseek41::{Config, DeepSeek41};
use ds4::models::metadata::MetadataView;
use ds4::models::probe::Probe;
use ds4::models::supply::RowSupply;
use ds4::models::weights::WeightSource;
use ds4::models::{Model, ModelRunner, RunnerOptions, Want};

pub struct Setup {
    pub config: Config,
    pub model: Arc<DeepSeek41<CpuBackend>>,
    pub runner: Box<dyn ModelRunner>,
    pub experts: Arc<MemoryExperts<CpuBackend>>,
    pub rows: Option<Arc<MemoryRows>>,
}

/// Over a checkpoint folder.
pub fn setup(dir: &Path, threads: usize, options: RunnerOptions, lease_max: usize) -> Setup {
    let checkpoint = Checkpoint::open(dir);
    setup_over(&checkpoint, &checkpoint, (threads, Arithmetic::Quality, SimdLevel::detect()), options, lease_max)
}

/// Over any metadata and weights, on any arithmetic of the CPU.
pub fn setup_over(
    view: &dyn MetadataView,
    source: &dyn WeightSource,
    (threads, arithmetic, level): (usize, Arithmetic, SimdLevel),
    options: RunnerOptions,
    lease_max: usize,
) -> Setup {
    let backend = Arc::new(CpuBackend::new(threads, arithmetic, level).unwrap());
    let config = Config::from_metadata(view).unwrap();
    let model = Arc::new(DeepSeek41::load(view, backend.clone(), source).unwrap());
    let shape = (config.layers.len(), config.experts);
    let experts = Arc::new(MemoryExperts::new(backend, source, shape, lease_max));
    let rows = config.engram.as_ref().map(|e| Arc::new(MemoryRows::new(source, &e.layers)));
    let supply = rows.clone().map(|rows| rows as Arc<dyn RowSupply>);
    let runner = model.clone().runner(options, experts.clone(), supply).unwrap();
    Setup { config, model, runner, experts, rows }
}

/// A file or folder of the shared data, in whichever parent of the project has it; a notice if none does.
pub fn shared(part: &str) -> Option<PathBuf> {
    let parents = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().skip(1);
    let found = parents.map(|parent| parent.join("shared").join(part)).find(|path| path.exists());
    if found.is_none() {
        println!("notice: shared/{part} is absent, nothing compared");
    }
    found
}

/// All logits of `tokens`, fed in pieces of the given lengths (the last repeats).
pub fn run(
    runner: &mut dyn ModelRunner,
    tokens: &[u32],
    pieces: &[usize],
    mut probe: Option<&mut dyn Probe>,
) -> Vec<f32> {
    let mut logits = Vec::new();
    let (mut rest, mut piece) = (tokens, 0);
    while !rest.is_empty() {
        let len = pieces[piece.min(pieces.len() - 1)].min(rest.len());
        let probe = probe.as_mut().map(|p| &mut **p as &mut dyn Probe);
        runner.forward(&rest[..len], Want::All, &mut |_, row| logits.extend_from_slice(row), probe).unwrap();
        rest = &rest[len..];
        piece += 1;
    }
    logits
}
