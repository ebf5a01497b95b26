//! Prints how many expert requests a second the directory serves, from a thousand to a hundred thousand slots.
//! Owns nothing and checks nothing; run it with --release. Surprising fact: misses cost more than hits only by a factor.

use std::hint::black_box;
use std::time::Instant;

use cache_policy::{ClassShape, Directory, ExpertIdx, LayerIdx, Lru, sim};

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

fn main() {
    println!("{:>8} {:>8} {:>9} {:>12}", "slots", "experts", "hit rate", "accesses/s");
    for (experts, slots) in [(16u16, 3_200usize), (50, 10_000), (160, 32_000), (512, 102_400)] {
        let shape = ClassShape { layers: (0..LAYERS).map(|l| (LayerIdx(l), experts)).collect(), slots };
        let mut directory = Directory::new(&[shape], &|slots| Box::new(Lru::new(slots)));
        let routes = routes(experts);
        let start = Instant::now();
        let iter = routes.iter().map(|(layer, ids)| (*layer, ids.as_slice()));
        let tally = black_box(sim::replay(&mut directory, iter)).expect("routes are made for this shape");
        let accesses = (tally.hits + tally.misses) as f64;
        let rate = accesses / start.elapsed().as_secs_f64();
        let experts = usize::from(experts) * usize::from(LAYERS);
        println!("{slots:>8} {experts:>8} {:>8.1}% {rate:>12.3e}", 100.0 * tally.hits as f64 / accesses);
    }
}
