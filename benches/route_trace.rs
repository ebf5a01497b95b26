//! What recording costs a token: the events of decode steps with and without a trace being written. Owns no model; layers and experts
//! have the numbers of V4.1 Flash. Surprising fact: the bytes go to memory, so that the drive does not blur a cost of microseconds.
//!
//! `cargo bench --bench route_trace`

use std::io::Write;
use std::time::Instant;

use cache_policy::{Bytes, ExpertIdx, LayerIdx, Phase, TraceHeader, TraceLayer};
use ds4::engine::routes::Routes;

const LAYERS: u16 = 40;
const EXPERTS: u16 = 384;
const TOP_K: u16 = 6;
const TOKENS: u32 = 4000;
const ROUNDS: usize = 7;

/// Counts what is written.
struct Null(u64);

impl Write for Null {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Microseconds a token.
fn run(is_traced: bool) -> f64 {
    let layers: Vec<_> = (0..LAYERS).map(|l| (LayerIdx(l), EXPERTS)).collect();
    let routes = Routes::new(&layers);
    if is_traced {
        let layer = |&(layer, experts): &(LayerIdx, u16)| TraceLayer {
            layer,
            experts,
            top_k: TOP_K,
            expert_bytes: Bytes(9_953_280),
        };
        let header = TraceHeader { model: [0; 32], layers: layers.iter().map(layer).collect() };
        routes.begin_trace(&header, Box::new(Null(0))).expect("nothing was requested yet");
    }
    let mut state = 1u32;
    let begun = Instant::now();
    for token in 0..TOKENS {
        routes.begin_pass(0, token as usize, &[token]);
        for (layer, _) in &layers {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let first = (state >> 16) % u32::from(EXPERTS);
            let ids = std::array::from_fn::<_, { TOP_K as usize }, _>(|i| {
                ExpertIdx(((first + 61 * i as u32) % u32::from(EXPERTS)) as u16)
            });
            routes.request(Phase::Decode, *layer, &ids, 0);
        }
        routes.end_pass(true);
    }
    routes.end_trace().expect("memory does not fail");
    begun.elapsed().as_secs_f64() * 1e6 / f64::from(TOKENS)
}

fn main() {
    let (mut plain, mut traced) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        plain.push(run(false));
        traced.push(run(true));
    }
    plain.sort_by(f64::total_cmp);
    traced.sort_by(f64::total_cmp);
    let (plain, traced) = (plain[ROUNDS / 2], traced[ROUNDS / 2]);
    println!("{plain:.2} us a token without a trace, {traced:.2} us with one: {:.2} us for the trace", traced - plain);
}
