//! Who measured what: names of machine, build and model that stand in every row.
//! Never reads a whole model file: size, head and evenly spread samples tell files apart. Surprising fact: a build is named by the hash of
//! the running program, which tells two builds of one version apart without a version control system.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use xxhash_rust::xxh3::Xxh3;

use crate::backend::cpu::matmul::Arithmetic;
use crate::cli::bench::row::{Row, round};
use crate::engine::Engine;
use crate::engine::options::EngineOptions;
use crate::engine::stats::{RunStats, Timings};
use crate::units::Bytes;

/// Bytes of a file's head that are part of its identity: metadata and tensor directory of most files.
const HEAD_BYTES: usize = 1 << 20;
/// Samples of the rest.
const SAMPLES: u64 = 256;
const SAMPLE_BYTES: usize = 4096;

/// What does not change while a program runs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    model: String,
    model_id: String,
    build: String,
    machine: String,
}

impl Identity {
    /// Names of this machine, this program and the file at `model`.
    ///
    /// # Errors
    /// When the model file cannot be read.
    pub fn of(model: &Path) -> io::Result<Self> {
        let name = model.file_name().map_or_else(|| model.display().to_string(), |n| n.to_string_lossy().into_owned());
        Ok(Self { model: name, model_id: file_id(model)?, build: build(), machine: machine() })
    }

    /// A row with everything that is known before measuring.
    pub fn row(&self, engine: &Engine, options: &EngineOptions) -> Row {
        let stats = RunStats::collect(engine, engine.prepared.runner.ctx, &Timings::default());
        Row {
            cache_budget_bytes: stats.cache_bytes,
            cache_slots: stats.cache_slots,
            ctx_alloc: stats.ctx,
            model: self.model.clone(),
            model_id: self.model_id.clone(),
            build: self.build.clone(),
            machine: self.machine.clone(),
            backend: stats.backend.into(),
            threads: options.threads.unwrap_or_else(crate::sys::cpu_count) as u64,
            arithmetic: if options.arithmetic == Arithmetic::Quality { "f32" } else { "8-bit" }.into(),
            prefill_chunk: engine.prepared.runner.chunk as u64,
            prefill_sweep: engine.prepared.runner.sweep_rows() as u64,
            cache_policy: if stats.is_streaming { options.policy.clone() } else { String::new() },
            lookahead: if stats.is_streaming { options.lookahead.name().into() } else { String::new() },
            drive_gb_per_s: stats.drive.map(|drive| round(drive.bulk.gb_per_s)),
            io: format!("{} {}", stats.io, if stats.is_direct { "direct" } else { "buffered" }),
            ..Row::default()
        }
    }

    /// The conditions as lines.
    pub fn lines(&self) -> [String; 3] {
        [
            format!("machine: {}", self.machine),
            format!("build: {}", self.build),
            format!("model: {} ({})", self.model, self.model_id),
        ]
    }
}

/// Hash over the length, the head and samples of a file: 16 hex digits.
///
/// # Errors
/// When it cannot be read.
pub fn file_id(path: &Path) -> io::Result<String> {
    let file = File::open(path)?;
    let len = file.metadata()?.len();
    let mut hash = Xxh3::new();
    hash.update(&len.to_le_bytes());
    let mut part = vec![0; HEAD_BYTES.min(usize::try_from(len).unwrap_or(HEAD_BYTES))];
    file.read_exact_at(&mut part, 0)?;
    hash.update(&part);
    let rest = len - part.len() as u64;
    let (at, mut sample) = (part.len() as u64, [0; SAMPLE_BYTES]);
    for i in 0..if rest > SAMPLE_BYTES as u64 { SAMPLES } else { 0 } {
        // The last one ends with the file.
        let offset = at + (u128::from(rest - SAMPLE_BYTES as u64) * u128::from(i) / u128::from(SAMPLES - 1)) as u64;
        file.read_exact_at(&mut sample, offset)?;
        hash.update(&sample);
    }
    Ok(format!("{:016x}", hash.digest()))
}

fn build() -> String {
    let profile = if cfg!(debug_assertions) { "debug" } else { "optimised" };
    let program = std::env::current_exe().and_then(|exe| file_id(&exe)).unwrap_or_else(|_| "unknown".into());
    format!("{} {profile} {program}", env!("CARGO_PKG_VERSION"))
}

fn machine() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let name = |text: &str, key: &str| {
        let line = text.lines().find(|line| line.starts_with(key))?;
        Some(line.split_once(':')?.1.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    let info = read("/proc/cpuinfo");
    let processor = ["model name", "Model", "CPU part"].iter().find_map(|key| name(&info, key));
    let memory = crate::sys::memory_facts().map_or(Bytes(0), |facts| facts.total);
    let kernel = read("/proc/sys/kernel/osrelease");
    let processor = processor.unwrap_or_else(|| std::env::consts::ARCH.into());
    format!("{processor}; {} cpus; {memory}; Linux {}", crate::sys::cpu_count(), kernel.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_told_apart_by_size_head_and_samples() {
        let folder = tempfile::tempdir().unwrap();
        let id = |bytes: &[u8]| {
            let path = folder.path().join("f");
            std::fs::write(&path, bytes).unwrap();
            file_id(&path).unwrap()
        };
        let mut bytes = vec![1; 3 << 20];
        let first = id(&bytes);
        assert_eq!(first, id(&bytes));
        for at in [0, HEAD_BYTES - 1, HEAD_BYTES + 5, bytes.len() - 1] {
            bytes[at] = 2;
            assert_ne!(first, id(&bytes), "byte {at}");
            bytes[at] = 1;
        }
        bytes.pop();
        assert_ne!(first, id(&bytes));
        assert!(id(b"").len() == 16 && id(b"") != id(b"x"));
        assert!(file_id(&folder.path().join("none")).is_err());
    }

    #[test]
    fn machine_and_build_have_names() {
        assert!(machine().contains(" cpus; ") && machine().contains("Linux"), "{}", machine());
        assert!(build().starts_with(env!("CARGO_PKG_VERSION")) && !build().contains("unknown"), "{}", build());
    }
}
