//! Prints how many expert uses a second the directory serves, by policy, for models from small to far larger than any.
//! Owns nothing and checks nothing; run it with --release. Surprising fact: time is that of the thread, so other work on
//! the machine counts only through the caches that it takes.

use std::hint::black_box;

use cache_policy::{ClassShape, Directory, ExpertIdx, LayerIdx, by_name, sim};

const USES: usize = 4_000_000;

/// Skewed routes: the product of two uniform numbers favours low experts.
fn routes(layers: u16, experts: u16, top_k: usize) -> Vec<(LayerIdx, Vec<ExpertIdx>)> {
    let mut state = 1u64;
    let mut random = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as f64 / (1u64 << 31) as f64
    };
    let mut one = |layer| {
        let mut ids: Vec<ExpertIdx> = Vec::with_capacity(top_k);
        while ids.len() < top_k {
            let id = ExpertIdx((random() * random() * f64::from(experts)) as u16);
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
        (LayerIdx(layer), ids)
    };
    let tokens = USES / usize::from(layers) / top_k;
    (0..tokens).flat_map(|_| 0..layers).map(&mut one).collect()
}

/// Seconds that this thread has run.
fn cpu_seconds() -> Result<f64, Box<dyn std::error::Error>> {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    Ok(stat.split(' ').next().unwrap_or_default().parse::<u64>()? as f64 / 1e9)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!(
        "{:>7} {:>8} {:>6} {:>8} {:>10} {:>9} {:>15}",
        "layers", "experts", "top k", "slots", "policy", "hit rate", "million uses/s"
    );
    for (layers, experts, top_k) in [(10u16, 24u16, 4), (12, 256, 6), (40, 384, 6), (100, 512, 8), (400, 512, 8)] {
        let slots = usize::from(layers) * usize::from(experts) / 2;
        let shape = ClassShape { layers: (0..layers).map(|l| (LayerIdx(l), experts)).collect(), slots };
        let routes = routes(layers, experts, top_k);
        for policy in ["lru", "s3-fifo"] {
            let mut directory = Directory::new(std::slice::from_ref(&shape), &by_name(policy)?);
            let begin = cpu_seconds()?;
            let tally = black_box(sim::replay(&mut directory, routes.iter().map(|(l, ids)| (*l, ids.as_slice()))))?;
            let uses = (tally.hits + tally.misses) as f64;
            let (rate, hits) = (uses / (cpu_seconds()? - begin) / 1e6, 100.0 * tally.hits as f64 / uses);
            println!("{layers:>7} {experts:>8} {top_k:>6} {slots:>8} {policy:>10} {hits:>8.1}% {rate:>15.1}");
        }
    }
    Ok(())
}
