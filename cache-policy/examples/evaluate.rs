//! Prints how every policy does against LRU and the optimum on recorded routes, what lookahead by route memory adds,
//! and how fast replay is. Owns the tables of docs/CACHE_TUNING.md. Never samples: every use of every session counts.
//! Surprising fact: repeated text is one session four times, and only what follows its first pass is counted.
//!
//! `cargo run --release -p cache-policy --example evaluate -- FILE.npz [FILE.npz ...] [policies|lookahead|speed]`

#[path = "routes_npz/mod.rs"]
#[allow(dead_code, reason = "each example uses its part")]
mod routes_npz;

use std::error::Error;
use std::ops::Range;
use std::path::Path;

use cache_policy::route_memory::Prediction;
use cache_policy::{
    Directory, ExpertKey, LayerIdx, MissCurve, Placement, PrefetchLedger, Recording, RouteMemory, by_name, policies,
    sim,
};
use routes_npz::Routes;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Budgets in percent.
const NEW_TEXT: &[usize] = &[10, 25, 50, 75, 90];
const REPEATED: &[usize] = &[10, 25, 50, 60, 75, 80, 90];
const REPEATED_SESSION: usize = 3;

/// What is replayed: stretches of tokens, the first `warm` of them uncounted.
struct Regime {
    title: String,
    percents: &'static [usize],
    /// Experts that the percents are of.
    experts: usize,
    stretches: Vec<Range<usize>>,
    warm: usize,
}

fn main() -> Outcome<()> {
    let (files, parts): (Vec<String>, Vec<String>) = std::env::args().skip(1).partition(|a| a.ends_with(".npz"));
    let wants = |part: &str| parts.is_empty() || parts.iter().any(|p| p == part);
    for file in &files {
        let routes = Routes::read(Path::new(file))?;
        let name = Path::new(file).file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if wants("policies") {
            for regime in regimes(&name, &routes) {
                print_regime(&routes, &regime)?;
            }
        }
        if wants("lookahead") {
            print_lookahead(&name, &routes)?;
        }
        if wants("speed") {
            print_speed(&name, &routes)?;
        }
    }
    Ok(())
}

fn regimes(name: &str, routes: &Routes) -> [Regime; 2] {
    let session = REPEATED_SESSION * routes.tokens..(REPEATED_SESSION + 1) * routes.tokens;
    let mut used: Vec<ExpertKey> = Vec::new();
    for (layer, ids) in routes.requests(session.clone()) {
        used.extend(ids.iter().map(|&expert| ExpertKey { layer, expert }));
    }
    used.sort_unstable();
    used.dedup();
    let new_text = Regime {
        title: format!("{name}, new text: {} sessions in file order", routes.sessions),
        percents: NEW_TEXT,
        experts: routes.experts_total(),
        stretches: std::iter::once(0..routes.sessions * routes.tokens).collect(),
        warm: 0,
    };
    let repeated = Regime {
        title: format!("{name}, repeated text: session {REPEATED_SESSION} four times, first pass not counted"),
        percents: REPEATED,
        experts: used.len(),
        stretches: vec![session; 4],
        warm: 1,
    };
    [new_text, repeated]
}

/// Misses of `policy` with `slots` slots.
fn misses(routes: &Routes, regime: &Regime, policy: &str, slots: usize) -> Outcome<u64> {
    let mut directory = Directory::new(&[routes.class(slots)], &by_name(policy)?);
    let mut misses = 0;
    for (i, stretch) in regime.stretches.iter().enumerate() {
        let tally = sim::replay(&mut directory, routes.requests(stretch.clone()))?;
        misses += if i < regime.warm { 0 } else { tally.misses };
    }
    Ok(misses)
}

fn recording(routes: &Routes, regime: &Regime) -> Outcome<(Recording, u64)> {
    let mut recording = Recording::new(&routes.class(0).layers);
    let mut warm_requests = 0;
    for (i, stretch) in regime.stretches.iter().enumerate() {
        for (layer, ids) in routes.requests(stretch.clone()) {
            recording.push(layer, ids)?;
        }
        if i < regime.warm {
            warm_requests = recording.requests();
        }
    }
    Ok((recording, warm_requests))
}

fn print_regime(routes: &Routes, regime: &Regime) -> Outcome<()> {
    let budgets: Vec<(usize, usize)> = regime
        .percents
        .iter()
        .map(|&p| (p, regime.experts * p / 100))
        .filter(|b| b.1 >= routes.uses_per_token())
        .collect();
    println!("\n{} ({} experts); misses relative to LRU / to the optimum\n", regime.title, regime.experts);
    let head: Vec<String> = budgets.iter().map(|(percent, slots)| format!(" {percent} % ({slots}) |")).collect();
    println!("| policy |{}", head.concat());
    println!("|---|{}", "---|".repeat(budgets.len()));
    let (recording, warm_requests) = recording(routes, regime)?;
    let best: Vec<u64> =
        budgets.iter().map(|b| recording.optimum(&[routes.class(b.1)], warm_requests).misses).collect();
    let mut lru = Vec::new();
    for (policy, _) in policies::KNOWN {
        let counts: Vec<u64> = budgets.iter().map(|b| misses(routes, regime, policy, b.1)).collect::<Outcome<_>>()?;
        if lru.is_empty() {
            lru.clone_from(&counts);
        }
        print_row(policy, &counts, &lru, &best);
    }
    print_row("optimum", &best, &lru, &best);
    let uses: usize = regime.stretches[regime.warm..].iter().map(|s| s.len() * routes.uses_per_token()).sum();
    let rates: Vec<String> =
        lru.iter().map(|&m| format!(" {:.2} % |", 100.0 * (1.0 - m as f64 / uses as f64))).collect();
    println!("| LRU's hit rate |{}", rates.concat());
    Ok(())
}

fn print_row(name: &str, counts: &[u64], lru: &[u64], best: &[u64]) {
    let cell = |((&m, &l), &b): ((&u64, &u64), &u64)| {
        format!(" {:.3} / {:.2} |", m as f64 / l.max(1) as f64, m as f64 / b.max(1) as f64)
    };
    let cells: Vec<String> = counts.iter().zip(lru).zip(best).map(cell).collect();
    println!("| {name} |{}", cells.concat());
}

/// When to act on a prediction.
struct Lookahead {
    policy: &'static str,
    /// Least probability at which a cached expert is kept for the running token.
    keep: f32,
    /// Least probability at which an absent expert is read.
    read: f32,
}

/// Demand misses, all reads, and what became of the prefetches.
fn look_ahead(routes: &Routes, slots: usize, how: &Lookahead) -> Outcome<(u64, PrefetchLedger)> {
    let mut directory = Directory::new(&[routes.class(slots)], &by_name(how.policy)?);
    let mut memory = RouteMemory::new(routes.layers, routes.top_k, routes.experts, 1 << 16);
    let mut ledger = PrefetchLedger::new();
    let (mut predictions, mut placements, mut tally) = (Vec::<Prediction>::new(), Vec::new(), sim::Tally::default());
    for token in 0..routes.sessions * routes.tokens {
        if token % routes.tokens == 0 {
            memory.begin_session();
        }
        let (experts, id) = routes.token(token);
        // Time in layers computed. The drive is taken to read one route's experts per layer, in order of the layers.
        let now = (token * routes.layers) as u64;
        directory.begin_token();
        memory.begin_token(id, &mut predictions);
        for p in predictions.iter().filter(|p| p.probability >= how.keep) {
            directory.expect(p.key);
        }
        let mut reads = 0;
        for p in predictions.iter().filter(|p| p.probability >= how.read) {
            let Some(Placement::Fill { evict }) = directory.prefetch(p.key, &mut |_| false) else { continue };
            reads += 1;
            evict.into_iter().for_each(|key| ledger.dropped(key));
            ledger.issued(p.key, now + 1 + reads / routes.top_k as u64);
        }
        for (layer, ids) in experts.chunks_exact(routes.top_k).enumerate() {
            let layer = LayerIdx(layer as u16);
            directory.request(layer, ids, &mut |_| false, &mut placements)?;
            tally.count(&placements);
            for (&expert, placement) in ids.iter().zip(&placements) {
                match *placement {
                    Placement::Hit => _ = ledger.used(ExpertKey { layer, expert }, now + u64::from(layer.0)),
                    Placement::Fill { evict } => evict.into_iter().for_each(|key| ledger.dropped(key)),
                }
            }
            memory.record(layer, ids);
        }
    }
    Ok((tally.misses, ledger))
}

fn print_lookahead(name: &str, routes: &Routes) -> Outcome<()> {
    let slots = routes.experts_total() / 2;
    let all = 0..routes.sessions * routes.tokens;
    let mut directory = Directory::new(&[routes.class(slots)], &by_name("lru")?);
    let base = sim::replay(&mut directory, routes.requests(all))?.misses as f64;
    println!("\n{name}, new text, 50 %: lookahead by route memory, relative to LRU without it\n");
    println!("| policy | keep from | read from | stalling misses | reads | useful | late | wasted |");
    println!("|---|---|---|---|---|---|---|---|");
    for policy in ["lru", policies::DEFAULT] {
        for (keep, read) in [(2.0, 2.0), (0.2, 2.0), (0.2, 0.6), (0.2, 0.5), (0.2, 0.4), (0.2, 0.3), (0.2, 0.2)] {
            let how = Lookahead { policy, keep, read };
            let (misses, ledger) = look_ahead(routes, slots, &how)?;
            let score = ledger.total();
            let share = |count: u64| count as f64 / base;
            let from = |p: f32| if p > 1.0 { "never".into() } else { format!("{p:.1}") };
            println!(
                "| {policy} | {} | {} | {:.3} | {:.3} | {:.3} | {:.3} | {:.3} |",
                from(keep),
                from(read),
                share(misses),
                share(misses + score.issued),
                share(score.useful),
                share(score.late),
                share(score.wasted)
            );
        }
    }
    Ok(())
}

/// Seconds that this thread has run: other work on the machine is not counted.
fn cpu_seconds() -> Outcome<f64> {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let ns: u64 = stat.split(' ').next().unwrap_or_default().parse()?;
    Ok(ns as f64 / 1e9)
}

fn print_speed(name: &str, routes: &Routes) -> Outcome<()> {
    let slots = routes.experts_total() / 2;
    let all = 0..routes.sessions * routes.tokens;
    let uses = (all.len() * routes.uses_per_token()) as f64;
    println!("\n{name}, 50 %: million uses replayed a second of CPU time, one core\n");
    for (policy, make) in policies::KNOWN {
        let mut directory = Directory::new(&[routes.class(slots)], make);
        let begin = cpu_seconds()?;
        sim::replay(&mut directory, routes.requests(all.clone()))?;
        println!("{policy:14} {:6.1}", uses / (cpu_seconds()? - begin) / 1e6);
    }
    let mut recording = Recording::new(&routes.class(0).layers);
    let begin = cpu_seconds()?;
    for (layer, ids) in routes.requests(all.clone()) {
        recording.push(layer, ids)?;
    }
    recording.optimum(&[routes.class(slots)], 0);
    println!("{:14} {:6.1}", "optimum", uses / (cpu_seconds()? - begin) / 1e6);
    let mut curve = MissCurve::new(routes.experts_total());
    let begin = cpu_seconds()?;
    for (layer, ids) in routes.requests(all) {
        ids.iter().for_each(|e| curve.record(usize::from(layer.0) * usize::from(routes.experts) + usize::from(e.0)));
    }
    println!("{:14} {:6.1}", "curve", uses / (cpu_seconds()? - begin) / 1e6);
    Ok(())
}
