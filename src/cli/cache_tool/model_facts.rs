//! What a model file and this machine say about budgets: slots with their padding, memory for experts, bytes of a step.
//! Owns nothing of the model; never reads tensor data. Surprising fact: the embedding is resident but not read by a step,
//! which looks up one row of it.

use std::path::Path;

use cache_policy::plan::{Facts, Plan};
use cache_policy::{ClassShape, TraceHeader};

use super::budgets::{Budget, Classes};
use crate::backend::cpu::memory_rate::read_gb_per_s;
use crate::backend::cpu::pool::Pool;
use crate::cli::CliError;
use crate::engine::options::{EngineOptions, Preload};
use crate::engine::prepare::{Prepared, prepare};
use crate::sys;
use crate::units::{Bytes, parse_gigabytes};

const EMBEDDING: &str = "token_embd.weight";
/// What is read to see how fast memory is.
const MEMORY_PROBE_BYTES: u64 = 384 << 20;

/// A model file and its plan.
pub struct ModelFacts {
    pub prepared: Prepared,
    pub header: TraceHeader,
    pub classes: Classes,
    /// Resident weights that every step reads.
    pub dense_bytes: u64,
    /// Bytes of one token's experts.
    pub expert_bytes: u64,
}

/// Whether a budget fits this machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fit {
    /// Within the automatic budget.
    Yes,
    /// Beyond it, within what an explicit budget may take.
    Tight,
    No,
}

impl Fit {
    /// For a table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Yes => "yes",
            Self::Tight => "tight",
            Self::No => "no",
        }
    }
}

/// Engine options of a tool run: streaming, nothing preloaded.
///
/// # Errors
/// An amount that is none.
pub fn options(model: &Path, ctx: Option<u32>, used: Option<&str>) -> Result<EngineOptions, CliError> {
    let used = used.map(parse_gigabytes).transpose();
    Ok(EngineOptions {
        ctx: ctx.map(|n| n as usize),
        is_streaming: true,
        preload: Preload::Cold,
        simulated_used: used.map_err(|e| CliError::usage(format!("--simulate-used-memory: {e}")))?.unwrap_or_default(),
        ..EngineOptions::new(model)
    })
}

impl ModelFacts {
    /// Looks into the file of `options` and plans.
    ///
    /// # Errors
    /// Whatever keeps the model from being run here.
    pub fn open(options: &EngineOptions) -> Result<Self, CliError> {
        Self::of(prepare(options).map_err(CliError::failed)?)
    }

    /// From a file that is prepared already.
    ///
    /// # Errors
    /// A header that cannot be read again.
    pub fn of(prepared: Prepared) -> Result<Self, CliError> {
        let header = prepared.trace_header().map_err(CliError::failed)?;
        let classes = padded_classes(&prepared);
        let embedding = prepared.file.tensors().iter().find(|t| t.name == EMBEDDING).map_or(0, |t| t.bytes);
        let dense_bytes = prepared.layout.resident_bytes.0.saturating_sub(embedding);
        let expert_bytes = header.layers.iter().map(|l| l.expert_bytes.0 * u64::from(l.top_k)).sum();
        Ok(Self { prepared, header, classes, dense_bytes, expert_bytes })
    }

    /// Whether slots of `bytes` fit beside the rest of the plan.
    pub fn fit(&self, bytes: Bytes) -> Fit {
        let plan = &self.prepared.plan;
        match bytes.0 {
            b if b <= plan.cache.0 => Fit::Yes,
            b if b <= room_for_experts(plan) => Fit::Tight,
            _ => Fit::No,
        }
    }

    /// The plan's own budget, which is the automatic one if none was asked for.
    pub fn planned_budget(&self, label: String) -> Budget {
        let plan = &self.prepared.plan;
        let shapes = self.prepared.classes.iter().zip(&plan.classes).map(|(c, p)| c.shape(p.slots as usize)).collect();
        Budget { label, slots: plan.cache_slots, bytes: plan.cache, shapes }
    }

    /// Bytes that a step reads from memory when every expert is cached.
    pub fn step_bytes(&self) -> f64 {
        (self.dense_bytes + self.expert_bytes) as f64
    }
}

/// Budgets of a prepared model, with the padded slots of a live run.
pub fn padded_classes(prepared: &Prepared) -> Classes {
    let (_, _, top_k) = prepared.config.expert_shape();
    let requests = prepared.classes.iter().map(|c| c.request()).collect();
    let shapes: Vec<ClassShape> = prepared.classes.iter().map(|c| c.shape(0)).collect();
    Classes::padded(requests, shapes, top_k as u64)
}

/// The most bytes that an explicit budget may take: what the plan gives and what is spare, less a 32nd of the machine,
/// which the planner keeps in any case.
fn room_for_experts(plan: &Plan) -> u64 {
    let world = plan.facts.total.0.min(plan.facts.group_limit.map_or(u64::MAX, |l| l.0));
    (plan.cache.0 + plan.spare.0).saturating_sub(world / 32)
}

/// Bytes a second at which all processors together read memory: the better of two passes.
///
/// # Errors
/// When threads cannot be started, or memory is too short to tell.
pub fn memory_rate() -> Result<f64, CliError> {
    let usable = sys::memory_facts().as_ref().map(Facts::usable).map_err(CliError::failed)?;
    let pool = Pool::new(sys::cpu_count()).map_err(CliError::failed)?;
    let memory = vec![1; usable.0.min(MEMORY_PROBE_BYTES) as usize];
    let passes = [(); 2].map(|()| read_gb_per_s(&pool, &memory).unwrap_or(0.0));
    match passes[0].max(passes[1]) {
        rate if rate > 0.0 => Ok(1e9 * rate),
        _ => {
            Err(CliError::failed("there is too little free memory to measure its rate; give --step-ms or --memory-gbs"))
        }
    }
}
