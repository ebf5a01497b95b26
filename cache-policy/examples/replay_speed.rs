//! Prints how many expert uses a second the directory serves, by policy, from a thousand to a hundred thousand slots.
//! Owns nothing and checks nothing; run it with --release. Surprising fact: misses cost more than hits only by a factor.

use std::hint::black_box;
use std::time::Instant;

use cache_policy::{ClassShape, Directory, ExpertIdx, LayerIdx, by_name, sim};

const LAYERS: u16 = 400;
const TOP_K: usize = 8;
const TOKENS: usize = 1000;

/// Skewed routes: the product of two uniform numbers favours low experts.
fn routes(experts: u16) -> Vec<(LayerIdx, Vec<ExpertIdx>)> {
    let mut state = 1u64;
    let mut random = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as f64 / (1u64 << 31) as f64
    };
    let mut one = |layer| {
        let mut ids: Vec<ExpertIdx> = Vec::with_capacity(TOP_K);
        while ids.len() < TOP_K {
            let id = ExpertIdx((random() * random() * f64::from(experts)) as u16);
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
        (LayerIdx(layer), ids)
    };
    (0..TOKENS).flat_map(|_| 0..LAYERS).map(&mut one).collect()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("{:>8} {:>8} {:>14} {:>9} {:>16}", "slots", "experts", "policy", "hit rate", "million uses/s");
    for (experts, slots) in [(16u16, 3_200usize), (50, 10_000), (160, 32_000), (512, 102_400)] {
        let shape = ClassShape { layers: (0..LAYERS).map(|l| (LayerIdx(l), experts)).collect(), slots };
        let routes = routes(experts);
        for policy in ["lru", "s3-fifo"] {
            let mut directory = Directory::new(std::slice::from_ref(&shape), &by_name(policy)?);
            let start = Instant::now();
            let iter = routes.iter().map(|(layer, ids)| (*layer, ids.as_slice()));
            let tally = black_box(sim::replay(&mut directory, iter))?;
            let uses = (tally.hits + tally.misses) as f64;
            let rate = uses / start.elapsed().as_secs_f64() / 1e6;
            let (experts, hits) = (usize::from(experts) * usize::from(LAYERS), 100.0 * tally.hits as f64 / uses);
            println!("{slots:>8} {experts:>8} {policy:>14} {hits:>8.1}% {rate:>16.1}");
        }
    }
    Ok(())
}
