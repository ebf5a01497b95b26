//! What comparing reads with checksums costs: two engines over the same file, one of them with `--verify-reads`, decode in turns.
//! Run: `cargo bench --bench verified_reads -- MODEL SLOTS [ROUNDS]` after `ds4-gguf checksum MODEL`.
//! Surprising fact: both engines see the same tokens, so they miss the same experts, and the ratio of a pair of turns needs no quiet machine.

use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

use ds4::engine::Engine;
use ds4::engine::options::{EngineOptions, Preload};
use ds4::models::Want;
use ds4::session::timeline::{NoWatcher, Timeline};
use ds4::storage::checksum::sidecar_path;
use ds4::storage::probe::ProbeChoice;
use ds4::storage::reader::DirectChoice;
use ds4::units::{Budget, TokenId};

/// Tokens of one turn.
const TURN: usize = 4;

fn cpu_seconds() -> f64 {
    // Fields 14 and 15 of /proc/self/stat: user and system time in clock ticks of 1/100 s.
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    let ticks = |i: usize| fields.get(i).and_then(|f| f.parse::<f64>().ok()).unwrap_or(0.0);
    (ticks(11) + ticks(12)) / 100.0
}

fn open(model: &Path, slots: u64, is_verified: bool) -> Engine {
    let options = EngineOptions {
        ctx: Some(512),
        is_streaming: true,
        budget: Some(Budget::Slots(slots)),
        preload: Preload::Cold,
        probe: ProbeChoice::Off,
        direct: DirectChoice::On,
        verify: is_verified.then(|| sidecar_path(model)),
        ..EngineOptions::new(model)
    };
    Engine::open(&options, &mut |_| {}, &|_, _, _| ControlFlow::Continue(())).unwrap_or_else(|e| panic!("{e}"))
}

/// Decodes the tokens of one turn; seconds and processor seconds.
fn turn(timeline: &mut Timeline, tokens: &[TokenId]) -> (f64, f64) {
    let (begun, cpu) = (Instant::now(), cpu_seconds());
    for token in tokens {
        timeline
            .announce(*token)
            .and_then(|()| timeline.append(&[*token], Want::Last, &mut NoWatcher))
            .expect("decode");
    }
    (begun.elapsed().as_secs_f64(), cpu_seconds() - cpu)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let (Some(model), Some(slots)) = (args.first().map(Path::new), args.get(1).and_then(|s| s.parse().ok())) else {
        return println!("usage: cargo bench --bench verified_reads -- MODEL SLOTS [ROUNDS]");
    };
    let rounds: usize = args.get(2).and_then(|s| s.parse().ok()).unwrap_or(9);
    let engines = [false, true].map(|is_verified| open(model, slots, is_verified));
    let vocab = engines[0].tokenizer().tokens_total() as u64;
    let mut timelines = engines.each_ref().map(|e| Timeline::new(e.runner().expect("memory")));
    let mut state = 7u64;
    let mut tokens = || -> Vec<TokenId> {
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            3 + ((state >> 33) % (vocab - 3)) as TokenId
        };
        (0..TURN).map(|_| next()).collect()
    };
    let (mut plain, mut checked, mut ratios, mut cpu) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for round in 0..=rounds {
        let tokens = tokens();
        // Who goes first changes from round to round.
        let first = round % 2;
        let mut found = [(0.0, 0.0); 2];
        for which in [first, 1 - first] {
            found[which] = turn(&mut timelines[which], &tokens);
        }
        // The first round warms up.
        if round > 0 {
            plain.push(found[0].0 / TURN as f64 * 1e3);
            checked.push(found[1].0 / TURN as f64 * 1e3);
            ratios.push(found[1].0 / found[0].0);
            cpu.push(found[1].1 / found[0].1);
        }
    }
    let misses = engines[0].cache().map_or(0, |c| c.stats().decode.misses) as f64 / ((rounds + 1) * TURN) as f64;
    let counters = engines[1].verify().expect("one engine verifies").snapshot();
    assert_eq!((counters.mismatches, counters.unchecked), (0, 0));
    let (a, b) = (median(&mut plain), median(&mut checked));
    let (ratio, cpu) = (median(&mut ratios), median(&mut cpu));
    println!(
        "{misses:.1} misses a token, medians of {rounds} pairs: plain {a:.0} ms a token, checked {b:.0} ms, ratio {ratio:.3} ({:.3} to {:.3}), processor time {cpu:.3}",
        ratios[rounds / 4],
        ratios[rounds - 1 - rounds / 4]
    );
}
