//! Speed of matrix-vector products: both cores out of memory, one core out of cache, next to what reading alone gives.
//! Never compares with a bandwidth measured at another time: reads and products alternate over the same bytes.
//! Surprising fact: one core may read no faster from a shared third-level cache than two cores do from memory, so the
//! cache column shows that ceiling too.
//!
//! `cargo bench --bench matvec -- [--level scalar|avx2|avx512|amx] [--type NAME] [--threads N] [--memory no]`

#[path = "../tests/kernels_common/mod.rs"]
mod kernels_common;

use ds4::backend::cpu::matmul::{Activations, Arithmetic, Kernels, MatView, matmul, matmul_prepared};
use ds4::backend::cpu::memory_rate::read;
use ds4::backend::cpu::pool::Pool;
use ds4::backend::cpu::simd::SimdLevel;
use ds4::quant::QuantType;
use kernels_common::{Rng, WEIGHT_TYPES, weights};
use memmap2::{Advice, MmapMut};
use std::hint::black_box;
use std::time::Instant;

const COLS: usize = 5120;
/// Larger than any cache: a third-level cache of 480 MiB was seen.
const MEMORY_BYTES: usize = 3 << 29;
const CACHE_ROWS: usize = 2304;
/// Fits a second-level cache of 2 MiB.
const L2_BYTES: usize = 1 << 20;
/// Weight rows of the batch column.
const BATCH_WEIGHT_ROWS: usize = 128;
/// Activation rows of the batch column.
const BATCH: usize = 64;

/// llama.cpp, portable AVX2 build, one core, 2,304 rows of 5,120 in cache, 1e9 weights a second.
fn reference(ty: QuantType) -> Option<f64> {
    Some(match ty {
        QuantType::Q8_0 => 26.4,
        QuantType::Q4_K => 32.4,
        QuantType::Q2_K => 36.8,
        QuantType::Q3_K => 26.5,
        QuantType::Q6_K => 28.9,
        QuantType::BF16 => 16.8,
        QuantType::IQ2_XXS => 14.8,
        QuantType::MXFP4 => 21.3,
        _ => return None,
    })
}

struct Options {
    level: SimdLevel,
    ty: Option<QuantType>,
    threads: usize,
    memory: bool,
}

fn options() -> Options {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut options = Options { level: SimdLevel::detect(), ty: None, threads, memory: true };
    let mut args = std::env::args().skip(1).filter(|arg| arg != "--bench");
    while let Some(flag) = args.next() {
        let value = args.next().unwrap_or_else(|| panic!("{flag} wants a value"));
        match flag.as_str() {
            "--level" => options.level = SimdLevel::ALL.into_iter().find(|l| l.name() == value).expect("a level"),
            "--type" => options.ty = Some(QuantType::ALL.into_iter().find(|t| t.name() == value).expect("a type")),
            "--threads" => options.threads = value.parse().expect("a number"),
            "--memory" => options.memory = value != "no",
            _ => panic!("unknown flag {flag}"),
        }
    }
    options
}

fn seconds(f: impl FnOnce()) -> f64 {
    let start = Instant::now();
    f();
    start.elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Median seconds of (reading, multiplying) `w`, in turns.
fn measure(pool: &Pool, kernels: &Kernels, w: MatView, turns: usize) -> (f64, f64) {
    let x = Rng(1).normals(w.cols);
    let mut out = vec![0.0; w.rows];
    let (mut reads, mut products) = (Vec::new(), Vec::new());
    for turn in 0..=turns {
        let read = seconds(|| _ = black_box(read(pool, w.bytes)));
        let product = seconds(|| matmul(pool, kernels, Arithmetic::Fast, w, &x, 1, &mut out));
        if turn > 0 {
            reads.push(read);
            products.push(product);
        }
    }
    black_box(out);
    (median(reads), median(products))
}

/// Seconds of a product with many activation rows on one thread, preparation apart.
fn measure_batch(pool: &Pool, kernels: &Kernels, w: MatView) -> f64 {
    let x = Rng(2).normals(BATCH * w.cols);
    let mut acts = Activations::default();
    kernels.prepare(Arithmetic::Fast, w.ty, &x, BATCH, w.cols, &mut acts);
    let mut out = vec![0.0; BATCH * w.rows];
    median((0..15).map(|_| seconds(|| matmul_prepared(pool, kernels, w, &acts, &mut out))).collect())
}

fn main() {
    let options = options();
    let kernels = Kernels::new(options.level);
    let (one, all) = (Pool::new(1).unwrap(), Pool::new(options.threads).unwrap());
    let memory_bytes = if options.memory { MEMORY_BYTES } else { CACHE_ROWS * COLS * 4 };
    let mut memory = MmapMut::map_anon(memory_bytes).expect("memory for the weights");
    if memory.advise(Advice::HugePage).is_err() {
        eprintln!("no huge pages: rates from memory will be lower");
    }
    println!("level {}, {} threads, rows of {COLS}", kernels.level().name(), options.threads);
    println!(
        "memory: GB/s of weights, {:.1} GiB, all threads; L3: 1e9 weights/s, {CACHE_ROWS} rows, one",
        gib(&memory)
    );
    println!(
        "thread (ceiling = reading the same bytes); L2: the same, 1 MiB; batch: 1e9 products/s, {BATCH} rows, one thread"
    );
    println!(
        "{:8} | {:>6} {:>6} {:>6} | {:>6} {:>7} {:>9} {:>6} | {:>6} | {:>6}",
        "type", "read", "memory", "ratio", "L3", "ceiling", "llama.cpp", "ratio", "L2", "batch"
    );
    for ty in WEIGHT_TYPES.into_iter().filter(|&ty| options.ty.is_none_or(|only| only == ty)) {
        let row_bytes = ty.row_bytes(COLS as u64).unwrap() as usize;
        let pattern = weights(&mut Rng(3), ty, CACHE_ROWS, COLS);
        for part in memory.chunks_mut(pattern.len()) {
            part.copy_from_slice(&pattern[..part.len()]);
        }
        let view = |rows: usize| MatView { ty, rows, cols: COLS, bytes: &memory[..rows * row_bytes] };
        let turns = if kernels.level() == SimdLevel::Scalar { 1 } else { 5 };
        let big = view(memory_bytes / row_bytes);
        let (read, product) = measure(&all, &kernels, big, turns);
        let (read, product) = (big.bytes.len() as f64 / read / 1e9, big.bytes.len() as f64 / product / 1e9);
        let rate = |rows: usize, turns: usize| {
            let (read, product) = measure(&one, &kernels, view(rows), turns);
            let weights = (rows * COLS) as f64 / 1e9;
            (weights / read, weights / product)
        };
        let (ceiling, l3) = rate(CACHE_ROWS, 8 * turns);
        let (_, l2) = rate(L2_BYTES / row_bytes, 40 * turns);
        let batch =
            (BATCH_WEIGHT_ROWS * COLS * BATCH) as f64 / measure_batch(&one, &kernels, view(BATCH_WEIGHT_ROWS)) / 1e9;
        let (reference, ratio) = reference(ty).map_or(("-".into(), "-".into()), |reference| {
            (format!("{reference:.1}"), format!("{:.2}", l3 / reference))
        });
        println!(
            "{:8} | {read:6.1} {product:6.1} {:5.0}% | {l3:6.1} {ceiling:7.1} {reference:>9} {ratio:>6} | {l2:6.1} | {batch:6.1}",
            ty.name(),
            100.0 * product / read
        );
    }
}

fn gib(bytes: &[u8]) -> f64 {
    bytes.len() as f64 / (1u64 << 30) as f64
}
