//! Speed of products with many activation rows next to the single-row path: one thread, the shapes of a V4.1 expert, by the time that the
//! thread ran. Never compares runs of different minutes: single rows and batches alternate. Surprising fact: the ratio has two answers, since a single
//! row is bound by memory where its weights come from there, as those of a decoded token do, and by arithmetic where they are in a cache.
//!
//! `cargo bench --bench batch -- [--level scalar|avx2|avx512|amx] [--type NAME] [--rows N]`

#[path = "../tests/kernels_common/mod.rs"]
mod kernels_common;

use ds4::backend::cpu::matmul::{Arithmetic, Kernels, MatView, matmul};
use ds4::backend::cpu::pool::Pool;
use ds4::backend::cpu::simd::SimdLevel;
use ds4::quant::QuantType;
use kernels_common::{Rng, weights};
use memmap2::{Advice, MmapMut};
use std::hint::black_box;
use std::time::Instant;

/// Outputs and inputs of the gate and up matrices, then of the down matrix.
const SHAPES: [(usize, usize); 2] = [(2304, 5120), (5120, 2304)];
/// Larger than the third-level caches that were seen.
const MEMORY_BYTES: usize = 1 << 30;
const TURNS: usize = 7;

struct Options {
    level: SimdLevel,
    ty: Option<QuantType>,
    rows: usize,
}

fn options() -> Options {
    let mut options = Options { level: SimdLevel::detect(), ty: None, rows: 512 };
    let mut args = std::env::args().skip(1).filter(|arg| arg != "--bench");
    while let Some(flag) = args.next() {
        let value = args.next().unwrap_or_else(|| panic!("{flag} wants a value"));
        match flag.as_str() {
            "--level" => options.level = SimdLevel::ALL.into_iter().find(|l| l.name() == value).expect("a level"),
            "--type" => options.ty = Some(QuantType::ALL.into_iter().find(|t| t.name() == value).expect("a type")),
            "--rows" => options.rows = value.parse().expect("a number"),
            _ => panic!("unknown flag {flag}"),
        }
    }
    options
}

struct Bench {
    pool: Pool,
    kernels: Kernels,
}

/// Seconds that this thread has run: unlike the clock, not what others took of the processor. Correct to a tick, a few milliseconds.
fn ran() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").expect("the kernel counts a thread's time");
    stat.split(' ').next().and_then(|ns| ns.parse::<f64>().ok()).expect("nanoseconds") / 1e9
}

impl Bench {
    /// 1e9 products a second of calls that take some tenth of a second together, activations prepared within each.
    fn rate(&self, w: MatView, x: &[f32], rows: usize, out: &mut Vec<f32>) -> f64 {
        out.resize(rows * w.rows, 0.0);
        let (start, clock, mut calls) = (ran(), Instant::now(), 0);
        while calls == 0 || clock.elapsed().as_secs_f64() < 0.1 {
            matmul(&self.pool, &self.kernels, Arithmetic::Fast, w, x, rows, out);
            calls += 1;
        }
        let seconds = ran() - start;
        black_box(out);
        (w.rows * w.cols * rows * calls) as f64 / seconds / 1e9
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let options = options();
    let bench = Bench { pool: Pool::new(1).unwrap(), kernels: Kernels::new(options.level) };
    let mut memory = MmapMut::map_anon(MEMORY_BYTES).expect("memory for the weights");
    if memory.advise(Advice::HugePage).is_err() {
        eprintln!("no huge pages: rates from memory will be lower");
    }
    println!(
        "level {}, one thread; 1e9 products/s of the thread's own time, medians of {TURNS}",
        bench.kernels.level().name()
    );
    println!(
        "{:8} {:>11} | {:>12} {:>12} | {:>9} | {:>12} {:>12}",
        "type",
        "shape",
        "1 row memory",
        "1 row cached",
        format!("{} rows", options.rows),
        "ratio memory",
        "ratio cached"
    );
    for ty in [QuantType::Q4_K, QuantType::Q2_K, QuantType::Q3_K, QuantType::Q6_K, QuantType::IQ2_XXS, QuantType::Q8_0]
    {
        if options.ty.is_some_and(|only| only != ty) {
            continue;
        }
        for (outputs, cols) in SHAPES {
            let row_bytes = ty.row_bytes(cols as u64).unwrap() as usize;
            let expert = weights(&mut Rng(3), ty, outputs, cols);
            for part in memory.chunks_mut(expert.len()) {
                part.copy_from_slice(&expert[..part.len()]);
            }
            let rows = memory.len() / row_bytes;
            let large = MatView { ty, rows, cols, bytes: &memory[..rows * row_bytes] };
            let one = MatView { ty, rows: outputs, cols, bytes: &expert };
            let x = Rng(1).normals(options.rows * cols);
            let mut outs = [const { Vec::new() }; 3];
            let mut rates = [const { Vec::new() }; 3];
            for turn in 0..=TURNS {
                let [large_out, out, batch_out] = &mut outs;
                let turn_rates = [
                    bench.rate(large, &x[..cols], 1, large_out),
                    bench.rate(one, &x[..cols], 1, out),
                    bench.rate(one, &x, options.rows, batch_out),
                ];
                if turn > 0 {
                    rates.iter_mut().zip(turn_rates).for_each(|(all, rate)| all.push(rate));
                }
            }
            let [memory, cached, batch] = rates.map(median);
            println!(
                "{:8} {:>11} | {memory:12.1} {cached:12.1} | {batch:9.1} | {:12.2} {:12.2}",
                ty.name(),
                format!("{outputs}x{cols}"),
                batch / memory,
                batch / cached
            );
        }
    }
}
