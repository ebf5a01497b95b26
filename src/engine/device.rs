//! Where an engine computes: the choice of a backend, and a model on it behind one face.
//! Never computes. Surprising fact: a GPU is opened before the model file, so that a refusal costs nothing and the plan can say where
//! the model will run.

use std::sync::Arc;

use parking_lot::Mutex;
use serde::Serialize;

#[cfg(feature = "cuda")]
use crate::backend::cuda;
use crate::backend::{Backend, BackendError};
use crate::engine::EngineError;
#[cfg(feature = "cuda")]
use crate::engine::gpu_uploads;
use crate::engine::options::{DeviceChoice, EngineOptions, GpuUploads};
use crate::engine::stats::GpuStats;
use crate::engine::token_time::PassClock;
use crate::models::supply::{ExpertSupply, RowSupply};
use crate::models::{Model, ModelRunner, RunnerOptions, SweepCounts};
use crate::units::Bytes;

/// The device that was chosen, and why.
#[derive(Clone)]
pub enum Chosen {
    /// The processor; `why` if something else might have been expected.
    Cpu { why: Option<String> },
    /// A GPU.
    #[cfg(feature = "cuda")]
    Cuda(Arc<cuda::Device>),
}

impl Chosen {
    /// The GPU in words; `None` on the processor.
    pub fn gpu(&self) -> Option<String> {
        match self {
            Self::Cpu { .. } => None,
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => {
                let p = device.properties();
                let (major, minor) = p.capability;
                let (name, number, kernels) = (&p.name, p.ordinal, device.kernels_from());
                let shared = if p.is_integrated { ", in the host's memory" } else { "" };
                Some(format!("{name} (device {number}), compute capability {major}.{minor}{shared}, kernels {kernels}"))
            }
        }
    }

    /// Whether there is a GPU without memory of its own.
    pub fn shares_memory(&self) -> bool {
        match self {
            Self::Cpu { .. } => false,
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => device.properties().is_integrated,
        }
    }

    /// What kernels of the GPU read a second of the host's memory and of its own, measured now.
    ///
    /// # Errors
    /// Why it was not measured, in words.
    pub fn read_rates(&self) -> Result<GpuRates, String> {
        match self {
            Self::Cpu { why } => Err(why.clone().unwrap_or_else(|| "the processor was asked for".to_owned())),
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => {
                let rates = gpu_uploads::measure(device)?;
                let (host_gb_per_s, own_gb_per_s) = (rates.host_gb_per_s, rates.own_gb_per_s);
                Ok(GpuRates { name: device.properties().name.clone(), host_gb_per_s, own_gb_per_s })
            }
        }
    }

    /// What is free of the GPU's memory; `None` on the processor.
    ///
    /// # Errors
    /// Failures of the device.
    pub fn free_memory(&self) -> Result<Option<Bytes>, BackendError> {
        match self {
            Self::Cpu { .. } => Ok(None),
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => Ok(Some(Bytes(device.memory()?.0))),
        }
    }

    /// Why the processor computes, if that is not what was asked for.
    pub fn why(&self) -> Option<&str> {
        match self {
            Self::Cpu { why } => why.as_deref(),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => None,
        }
    }
}

/// What kernels of a GPU that do nothing else read a second, in 1e9 bytes.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct GpuRates {
    pub name: String,
    /// Of host memory that the GPU knows.
    pub host_gb_per_s: f64,
    /// Of memory that the GPU gave out.
    pub own_gb_per_s: f64,
}

/// The device for `options`.
///
/// # Errors
/// A GPU that was asked for and cannot be used; GPU memory or a way of a GPU for a run without one.
pub(super) fn choose(options: &EngineOptions) -> Result<Chosen, EngineError> {
    let chosen = match options.device {
        DeviceChoice::Cpu => Chosen::Cpu { why: None },
        // A device that was named is asked for.
        DeviceChoice::Auto if options.gpu_device.is_some() => open_gpu(options)?,
        DeviceChoice::Auto => match open_gpu(options) {
            Ok(gpu) => gpu,
            Err(EngineError::NoGpu { reason }) => Chosen::Cpu { why: Some(format!("no GPU: {reason}")) },
            Err(other) => return Err(other),
        },
        DeviceChoice::Cuda => open_gpu(options)?,
    };
    if let Chosen::Cpu { why } = &chosen {
        let of_a_gpu = [
            ("--gpu-cache", options.gpu_budget.is_some()),
            ("--gpu-uploads", options.gpu_uploads != GpuUploads::Auto),
            ("--no-graph", !options.finds_experts),
            ("--gpu-sums", options.gpu_sums.is_some()),
        ];
        if let Some((flag, _)) = of_a_gpu.into_iter().find(|(_, is_given)| *is_given) {
            let why = why.clone().unwrap_or_else(|| "the processor was asked for".to_owned());
            return Err(EngineError::NoGpuFor { flag, why });
        }
    }
    Ok(chosen)
}

#[cfg(feature = "cuda")]
fn open_gpu(options: &EngineOptions) -> Result<Chosen, EngineError> {
    let device = cuda::Device::open(options.gpu_device.unwrap_or(0), false)
        .map_err(|e| EngineError::NoGpu { reason: e.to_string() })?;
    Ok(Chosen::Cuda(Arc::new(device)))
}

#[cfg(not(feature = "cuda"))]
fn open_gpu(_: &EngineOptions) -> Result<Chosen, EngineError> {
    Err(EngineError::NoGpu { reason: "this program was built without CUDA".to_owned() })
}

/// A model on a device.
pub(super) trait Placed: Send + Sync {
    /// Name of the backend.
    fn name(&self) -> &'static str;
    /// A sequence of its own.
    fn runner(
        &self,
        options: RunnerOptions,
        rows: Option<Arc<dyn RowSupply>>,
    ) -> Result<Box<dyn ModelRunner>, EngineError>;
    /// Takes the time of a GPU's passes; handed out once.
    fn take_times(&self) -> Option<Box<dyn PassClock>>;
    /// What the GPU did.
    fn gpu_stats(&self) -> Option<GpuStats>;
    /// What the model's sweeps did.
    fn sweep_counts(&self) -> SweepCounts;
}

/// Reads the counters of a GPU.
pub(super) type ReadGpu = Box<dyn Fn() -> GpuStats + Send + Sync>;

/// A model with backend `B`.
pub(super) struct On<B: Backend> {
    pub backend: Arc<B>,
    pub model: Arc<dyn Model<B>>,
    pub experts: Arc<dyn ExpertSupply<B>>,
    pub read_gpu: Option<ReadGpu>,
    pub times: Mutex<Option<Box<dyn PassClock>>>,
}

impl<B: Backend> Placed for On<B> {
    fn name(&self) -> &'static str {
        self.backend.name()
    }

    fn runner(
        &self,
        options: RunnerOptions,
        rows: Option<Arc<dyn RowSupply>>,
    ) -> Result<Box<dyn ModelRunner>, EngineError> {
        Ok(Arc::clone(&self.model).runner(options, Arc::clone(&self.experts), rows)?)
    }

    fn take_times(&self) -> Option<Box<dyn PassClock>> {
        self.times.lock().take()
    }

    fn gpu_stats(&self) -> Option<GpuStats> {
        self.read_gpu.as_ref().map(|read| read())
    }

    fn sweep_counts(&self) -> SweepCounts {
        self.model.sweep_counts()
    }
}
