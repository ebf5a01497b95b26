//! What a request costs the expert cache beside reads: slot lookup and choice of a victim, from 1,000 slots to 100,000.
//! Run: `cargo bench --bench slot_table`. Surprising fact: no slot holds a byte; the decisions are made by the same directory that the
//! simulator uses.

use std::time::Instant;

use cache_policy::{ClassShape, Directory, ExpertIdx, LayerIdx, by_name};

const LAYERS: u16 = 40;
const TOP_K: u64 = 6;
/// Experts are four times the slots, up to what a layer can number.
const TIMES: usize = 4;
const TOKENS: usize = 400;

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 20) % n
    }
}

/// Nanoseconds a requested expert.
fn measure(policy: &str, slots: usize) -> f64 {
    let make = by_name(policy).expect("a known policy");
    let experts = (slots * TIMES / usize::from(LAYERS)) as u16;
    let shape = ClassShape { layers: (0..LAYERS).map(|l| (LayerIdx(l), experts)).collect(), slots };
    let mut directory = Directory::new(&[shape], &make);
    let mut random = Random(3);
    let (mut ids, mut placements): (Vec<ExpertIdx>, _) = (Vec::new(), Vec::new());
    let mut token = |directory: &mut Directory| {
        for layer in 0..LAYERS {
            ids.clear();
            while (ids.len() as u64) < TOP_K {
                let id = ExpertIdx(random.below(u64::from(experts)) as u16);
                if !ids.contains(&id) {
                    ids.push(id);
                }
            }
            directory.request(LayerIdx(layer), &ids, &mut |_| false, &mut placements).expect("experts that exist");
        }
    };
    // Full, and evicting.
    for _ in 0..2 * slots / (usize::from(LAYERS) * TOP_K as usize) + 10 {
        token(&mut directory);
    }
    let begun = Instant::now();
    for _ in 0..TOKENS {
        token(&mut directory);
    }
    begun.elapsed().as_secs_f64() * 1e9 / (TOKENS * usize::from(LAYERS) * TOP_K as usize) as f64
}

fn main() {
    println!("{:14} {:>8} {:>8} {:>8}  ns an expert, best of 3", "slots", 1_000, 10_000, 100_000);
    for (policy, _) in cache_policy::policies::KNOWN {
        let best = |slots| (0..3).map(|_| measure(policy, slots)).fold(f64::MAX, f64::min);
        println!("{policy:14} {:8.0} {:8.0} {:8.0}", best(1_000), best(10_000), best(100_000));
    }
}
