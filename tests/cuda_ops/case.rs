//! What a case is, and the program around the cases: list, coverage of the trait, table.
//! Never compares with something computed on the same device. Surprising fact: `run` is generic over the backend, so both sides execute
//! the same lines; only the last column needs a GPU.

use std::sync::Arc;
use std::time::Instant;

use ds4::backend::Backend;
use ds4::backend::cpu::CpuBackend;
use ds4::backend::cpu::matmul::Arithmetic;
use ds4::backend::cpu::simd::SimdLevel;
use ds4::backend::cuda::{CudaBackend, Device, OpenError};
use ds4::backend::ops::Sums;

use crate::kernels_common::Rng;
use crate::{attending, beside, ends, grids, in_place, products, rows, selection, slots, swept};

/// Ops of one recording, so that what begins and ends it does not count, and weights that take turns are in no cache when their turn comes; and
/// recordings under the clock.
const RECORDED: usize = 64;
const PLAYED: usize = 7;

/// Repetitions of an op under the clock: started one by one, and recorded.
pub struct Clock {
    repeat: usize,
    seconds: f64,
    /// Who records, and which kernels are timed alone, by the beginning of their names.
    recorder: Option<Arc<CudaBackend>>,
    parts: Vec<&'static str>,
    /// Seconds of the op in a recording, then of each part.
    recorded: Vec<f64>,
}

impl Clock {
    /// One that takes no time.
    pub fn stopped() -> Self {
        Self::of(0)
    }

    fn of(repeat: usize) -> Self {
        Self { repeat, seconds: 0.0, recorder: None, parts: Vec::new(), recorded: Vec::new() }
    }

    /// Times `op` queued `repeat` times; `wait` returns when the device is idle. Then a recording of it.
    pub fn time(&mut self, mut op: impl FnMut(usize), wait: impl Fn()) {
        if self.repeat == 0 {
            return;
        }
        (0..3).for_each(&mut op);
        wait();
        let start = Instant::now();
        (0..self.repeat).for_each(&mut op);
        wait();
        self.seconds = start.elapsed().as_secs_f64() / self.repeat as f64;
        let Some(gpu) = &self.recorder else { return };
        for only in std::iter::once(None).chain(self.parts.iter().map(|part| Some(*part))) {
            let queue = || (0..RECORDED).for_each(&mut op);
            self.recorded.push(gpu.replayed_seconds(PLAYED, only, queue).unwrap() / RECORDED as f64);
        }
    }
}

/// One op on one shape.
pub trait Case {
    fn op(&self) -> &'static str;
    fn shape(&self) -> String;
    /// Largest mean squared error over mean square that passes.
    fn limit(&self) -> f64;
    /// Bytes that the op must move at least.
    fn bytes(&self) -> usize;
    fn arithmetic(&self) -> Arithmetic {
        Arithmetic::Quality
    }
    /// Whether the op is one of a token, which is recorded: then its time in a recording is taken too.
    fn is_of_a_token(&self) -> bool {
        true
    }
    /// Kernels of the op that are timed alone, by the beginning of their names, with the bytes that each must move at least.
    fn parts(&self) -> Vec<(&'static str, usize)> {
        Vec::new()
    }
    /// The order of the GPU's sums.
    fn sums(&self) -> Sums {
        Sums::Exact
    }
    /// Outputs of the op on `b`.
    fn run<B: Backend>(&self, b: &B, clock: &mut Clock) -> Vec<Vec<f32>>;
}

/// Where cases are told to run.
pub struct Rig {
    pub rng: Rng,
    repeat: usize,
    only: Option<String>,
    /// Cases that move more are left out: for tools that slow everything down.
    bytes_max: usize,
    /// Whether only ops of a token are wanted.
    is_token_only: bool,
    cpu: [CpuBackend; 2],
    /// As `cpu`, then with fast sums.
    gpu: Option<[Arc<CudaBackend>; 3]>,
    /// Bytes read and written a second by a large copy, in 1e9.
    copy_rate: f64,
    /// Ops that had a case.
    seen: Vec<&'static str>,
    failures: usize,
    differing: usize,
    cases: usize,
}

impl Rig {
    /// The backends with rounded activations, where there is a GPU and `what` is not left out.
    pub fn fast(&mut self, what: &str) -> Option<(&mut Rng, &CpuBackend, &CudaBackend)> {
        let is_wanted = self.only.as_deref().is_none_or(|o| o == what);
        let gpu = self.gpu.as_ref().filter(|_| is_wanted)?;
        Some((&mut self.rng, &self.cpu[1], &*gpu[1]))
    }

    /// The backend with fast sums, where there is a GPU and `what` is not left out.
    pub fn fast_sums(&mut self, what: &str) -> Option<(&mut Rng, &CudaBackend)> {
        let is_wanted = self.only.as_deref().is_none_or(|o| o == what);
        let gpu = self.gpu.as_ref().filter(|_| is_wanted)?;
        Some((&mut self.rng, &*gpu[2]))
    }

    /// Whether times are wanted: tools that check every access run kernels when they like, and want none.
    pub fn takes_times(&self) -> bool {
        self.repeat > 0
    }

    /// Whether `case` is small enough.
    pub fn is_within(&self, case: &impl Case) -> bool {
        case.bytes() <= self.bytes_max
    }

    /// Counts and prints something that is no op of the trait.
    pub fn note(&mut self, what: &str, is_good: bool) {
        println!("{what:<60} {}", if is_good { "same bits" } else { "FAILED" });
        self.cases += 1;
        self.failures += usize::from(!is_good);
    }

    /// Runs `case` on both sides and prints its line.
    pub fn check(&mut self, case: &impl Case) {
        self.seen.push(case.op());
        let is_left_out = !self.is_within(case) || (self.is_token_only && !case.is_of_a_token());
        let is_wanted = self.only.as_deref().is_none_or(|o| o == case.op()) && !is_left_out;
        let Some(gpu) = self.gpu.as_ref().filter(|_| is_wanted) else {
            return;
        };
        let mode = usize::from(case.arithmetic() == Arithmetic::Fast);
        let want = case.run(&self.cpu[mode], &mut Clock::stopped());
        let of = if case.sums() == Sums::Fast { 2 } else { mode };
        let mut clock = Clock::of(self.repeat);
        clock.recorder = case.is_of_a_token().then(|| Arc::clone(&gpu[of]));
        clock.parts = case.parts().iter().map(|part| part.0).collect();
        let got = case.run(&*gpu[of], &mut clock);
        assert_eq!(want.len(), got.len());
        let (error, worst) = errors(&want, &got);
        let equal = want.iter().zip(&got).all(|(a, b)| a.iter().zip(b).all(|(x, y)| x.to_bits() == y.to_bits()));
        let passed = error <= case.limit();
        let gb = if clock.seconds > 0.0 { case.bytes() as f64 / clock.seconds / 1e9 } else { 0.0 };
        println!(
            "{:<17} {:<42} {:>9} {:>8.0e} {:>9.2} {:>8.1} {}  {}",
            case.op(),
            case.shape(),
            if equal { "same bits".to_owned() } else { format!("{error:.2e}") },
            case.limit(),
            clock.seconds * 1e6,
            gb,
            self.recorded(clock.recorded.first(), case.bytes()),
            if passed { "" } else { "FAILED" }
        );
        for ((name, bytes), seconds) in case.parts().iter().zip(clock.recorded.iter().skip(1)) {
            println!("    {name:<94} {}", self.recorded(Some(seconds), *bytes));
        }
        if !passed {
            println!("    worst element: {worst}");
        }
        self.cases += 1;
        self.failures += usize::from(!passed);
        self.differing += usize::from(!equal);
    }
}

impl Rig {
    /// The columns of a recorded op that moves `bytes`: us, GB/s, and what part of the rate of a copy that is.
    fn recorded(&self, seconds: Option<&f64>, bytes: usize) -> String {
        let Some(seconds) = seconds else { return format!("{:>9} {:>8} {:>6}", "-", "-", "-") };
        let gb = bytes as f64 / seconds / 1e9;
        format!("{:>9.2} {gb:>8.1} {:>4.0} %", seconds * 1e6, 100.0 * gb / self.copy_rate)
    }
}

/// Mean squared error over mean square, and the worst element in words. NaN on one side only counts as infinite.
fn errors(want: &[Vec<f32>], got: &[Vec<f32>]) -> (f64, String) {
    let (mut wrong, mut square, mut worst) = (0.0f64, 0.0f64, (0.0f64, String::new()));
    for (output, (want, got)) in want.iter().zip(got).enumerate() {
        assert_eq!(want.len(), got.len(), "lengths of output {output}");
        for (i, (w, g)) in want.iter().zip(got).enumerate() {
            if w.to_bits() == g.to_bits() || (w.is_nan() && g.is_nan()) {
                square += if w.is_finite() { f64::from(*w).powi(2) } else { 0.0 };
                continue;
            }
            let difference = f64::from(w - g).powi(2);
            let difference = if difference.is_nan() { f64::INFINITY } else { difference };
            (wrong, square) = (wrong + difference, square + f64::from(*w).powi(2));
            if difference >= worst.0 {
                worst = (difference, format!("output {output}, value {i}: {w:e} expected, {g:e} found"));
            }
        }
    }
    (if wrong == 0.0 { 0.0 } else { wrong / square.max(f64::MIN_POSITIVE) }, worst.1)
}

/// Ops of the trait, read from its source: methods that take an argument struct.
fn ops_of_the_trait() -> Vec<&'static str> {
    let text = include_str!("../../src/backend/mod.rs");
    let body = text.split("pub trait Backend").nth(1).expect("the trait is in that file");
    let methods = body.split("fn ").skip(1);
    methods.filter(|m| m.split(';').next().is_some_and(|m| m.contains("op: ops::"))).map(name).collect()
}

fn name(method: &'static str) -> &'static str {
    method.split(['(', '<']).next().unwrap_or("").trim()
}

fn argument(flag: &str) -> Option<String> {
    let args: Vec<String> = std::env::args().collect();
    let at = args.iter().position(|a| a == flag)?;
    Some(args.get(at + 1).cloned().unwrap_or_default())
}

fn open() -> Result<Option<Arc<Device>>, String> {
    match Device::open(0, std::env::args().any(|a| a == "--text")) {
        Ok(device) => Ok(Some(Arc::new(device))),
        Err(
            e @ (OpenError::NoDriver
            | OpenError::Init { .. }
            | OpenError::DriverTooOld { .. }
            | OpenError::NoDevice { .. }),
        ) => {
            println!("cuda_ops: skipped, {e}");
            Ok(None)
        }
        Err(other) => Err(other.to_string()),
    }
}

/// Bytes read and written a second by a copy that no cache holds, in 1e9: what the bandwidth of ops is compared with.
fn copy_rate(gpu: &CudaBackend) -> f64 {
    const VALUES: usize = 256 << 20;
    let (src, mut dst) = (gpu.alloc("copy", VALUES).unwrap(), gpu.alloc("copy", VALUES).unwrap());
    let mut clock = Clock::of(10);
    clock.time(|_| gpu.copy(&src, 0, &mut dst, 0, VALUES).unwrap(), || gpu.device().wait().unwrap());
    8.0 * VALUES as f64 / clock.seconds / 1e9
}

/// Bytes a second from ordinary host memory to the device, in 1e9.
fn upload_rate(gpu: &CudaBackend) -> f64 {
    const VALUES: usize = 16 << 20;
    let (src, mut dst) = (vec![1.0f32; VALUES], gpu.alloc("upload", VALUES).unwrap());
    let mut clock = Clock::of(10);
    clock.time(|_| gpu.upload(&src, &mut dst, 0).unwrap(), || gpu.device().wait().unwrap());
    4.0 * VALUES as f64 / clock.seconds / 1e9
}

/// The whole program.
///
/// # Errors
/// What failed, as a sentence.
pub fn run_all() -> Result<(), String> {
    let device = open()?;
    if let Some(device) = &device {
        let p = device.properties();
        println!(
            "{}, compute capability {}.{}, {} multiprocessors, kernels {}",
            p.name,
            p.capability.0,
            p.capability.1,
            p.multiprocessors,
            device.kernels_from()
        );
    }
    let number = |flag, or| argument(flag).map_or(Ok(or), |v| v.parse::<u64>().map_err(|e| format!("{flag}: {e}")));
    let cpu = |mode| CpuBackend::new(ds4::sys::cpu_count(), mode, SimdLevel::detect()).map_err(|e| e.to_string());
    let mut rig = Rig {
        rng: Rng(number("--seed", 1)?),
        repeat: number("--repeat", 20)? as usize,
        only: argument("--only"),
        is_token_only: std::env::args().any(|a| a == "--token"),
        bytes_max: number("--bytes-max", u64::MAX)? as usize,
        cpu: [cpu(Arithmetic::Quality)?, cpu(Arithmetic::Fast)?],
        gpu: device.map(|d| {
            let [quality, fast, free] = [Arithmetic::Quality, Arithmetic::Fast, Arithmetic::Quality]
                .map(|m| CudaBackend::new(Arc::clone(&d), m));
            [quality, fast, free.with_sums(Sums::Fast)].map(Arc::new)
        }),
        copy_rate: 0.0,
        seen: Vec::new(),
        failures: 0,
        differing: 0,
        cases: 0,
    };
    if let Some([_, gpu, _]) = &rig.gpu {
        rig.copy_rate = copy_rate(gpu);
        let upload = upload_rate(gpu);
        println!("device copy: {:.0} GB/s read and written; pageable upload: {upload:.1} GB/s", rig.copy_rate);
        println!(
            "us: started {} times one after another, by the host's clock; recorded: {RECORDED} of them in one graph",
            rig.repeat
        );
        println!(
            "{:<17} {:<42} {:>9} {:>8} {:>9} {:>8} {:>9} {:>8} {:>6}",
            "op", "shape", "NMSE", "limit", "us", "GB/s", "recorded", "GB/s", "copy"
        );
    }
    beside::check(&mut rig);
    rows::cases(&mut rig);
    attending::cases(&mut rig);
    selection::cases(&mut rig);
    ends::cases(&mut rig);
    products::cases(&mut rig);
    swept::cases(&mut rig);
    grids::check()?;
    slots::check(&mut rig);
    in_place::check(&mut rig);
    let missing: Vec<_> = ops_of_the_trait().into_iter().filter(|op| !rig.seen.contains(op)).collect();
    if !missing.is_empty() || ops_of_the_trait().len() < 20 {
        return Err(format!("ops without a case: {}", missing.join(", ")));
    }
    println!(
        "{} ops have cases; {} cases ran, {} failed, {} differ in some bit",
        ops_of_the_trait().len(),
        rig.cases,
        rig.failures,
        rig.differing
    );
    if rig.failures > 0 { Err(format!("{} cases failed", rig.failures)) } else { Ok(()) }
}
