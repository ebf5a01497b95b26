//! Experts in memory and the shared expert are computed while the missing ones are still being read, and the sums do not show it.
//! Owns no speed. Surprising fact: the drive is not slow but stopped, so whatever was computed was computed before any read could land.

mod engine_rig;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ds4::engine::Engine;
use ds4::engine::options::{EngineOptions, Preload};
use ds4::models::Want;
use ds4::models::probe::{Point, Probe};
use ds4::storage::reader::fake::{FakeOptions, FakeReader};
use ds4::units::{Budget, TokenId};
use engine_rig::made_models::a;
use engine_rig::{fake, open, options, over, prompt};
use parking_lot::Mutex;

#[derive(Clone, PartialEq, Eq, Debug)]
enum Event {
    Routed(usize, BTreeSet<i32>),
    Shared(usize),
    Expert(usize, i32),
}

#[derive(Clone, Default)]
struct Events(Arc<Mutex<Vec<Event>>>);

impl Probe for Events {
    fn wants(&self, point: Point) -> bool {
        matches!(point, Point::RouterIds | Point::SharedMid)
    }

    fn values(&mut self, point: Point, layer: usize, _first_pos: usize, _width: usize, _values: &[f32]) {
        if point == Point::SharedMid {
            self.0.lock().push(Event::Shared(layer));
        }
    }

    fn ids(&mut self, point: Point, layer: usize, _first_pos: usize, _width: usize, ids: &[i32]) {
        if point == Point::RouterIds {
            self.0.lock().push(Event::Routed(layer, ids.iter().copied().collect()));
        }
    }

    fn wants_expert_mid(&self) -> bool {
        true
    }

    fn expert_mid(&mut self, layer: usize, expert: usize, _width: usize, _values: &[f32]) {
        self.0.lock().push(Event::Expert(layer, expert as i32));
    }
}

/// Misses so far.
fn misses(engine: &Engine) -> u64 {
    engine.cache().unwrap().stats().total().misses
}

/// Waits until a pass stands still: nothing new for a while, with a read wanted. `false` when it ended instead.
fn stands_still(events: &Events, misses: &dyn Fn() -> u64, has_ended: &dyn Fn() -> bool) -> bool {
    let begun = Instant::now();
    let (mut seen, mut since) = (0, Instant::now());
    while begun.elapsed() < Duration::from_secs(30) {
        if has_ended() {
            return false;
        }
        let now = events.0.lock().len();
        if now != seen {
            (seen, since) = (now, Instant::now());
        }
        if misses() > 0 && since.elapsed() > Duration::from_millis(150) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    panic!("a pass neither ended nor waited");
}

/// What the layer that a stopped drive holds up had computed: of one row all that it routed but its misses, after the shared expert. Many
/// rows may add up by rising id, so that a present expert waits behind a missing one of a lower id. Returns how many were computed.
fn check_layer(events: &[Event], misses: u64, rows: usize) -> usize {
    let (layer, routed) = events
        .iter()
        .rev()
        .find_map(|e| match e {
            Event::Routed(layer, ids) => Some((*layer, ids)),
            _ => None,
        })
        .expect("a layer was routed");
    let shared = events.iter().position(|e| *e == Event::Shared(layer));
    assert!(rows > 1 || shared.is_some(), "the shared expert does not wait for reads");
    let computed: BTreeSet<i32> = events[shared.filter(|_| rows == 1).unwrap_or(0)..]
        .iter()
        .filter_map(|e| match e {
            Event::Expert(l, id) if *l == layer => Some(*id),
            _ => None,
        })
        .collect();
    assert!(computed.is_subset(routed), "{computed:?} of {routed:?}");
    let (done, all) = (computed.len() as u64 + misses, routed.len() as u64);
    assert!(
        done == all || rows > 1 && done < all,
        "layer {layer}: every present expert was computed: {computed:?} of {routed:?}"
    );
    computed.len()
}

/// Runs passes of `rows` tokens, each with the drive stopped until the pass waits for it. Returns the logits, and the number of experts that
/// were computed meanwhile.
fn run_stopped(engine: &Engine, drive: &FakeReader, tokens: &[TokenId], rows: usize) -> (Vec<u32>, usize) {
    let (mut bits, mut early) = (Vec::new(), 0);
    let mut runner = engine.runner().unwrap();
    for part in tokens.chunks(rows) {
        let events = Events::default();
        let before = misses(engine);
        drive.hold();
        std::thread::scope(|scope| {
            let mut probe = events.clone();
            let (runner, bits) = (&mut runner, &mut bits);
            let pass = scope.spawn(move || {
                let mut sink = |_: usize, logits: &[f32]| bits.extend(logits.iter().map(|v| v.to_bits()));
                runner.forward(part, Want::All, &mut sink, Some(&mut probe)).unwrap();
            });
            if stands_still(&events, &|| misses(engine) - before, &|| pass.is_finished()) {
                early += check_layer(&events.0.lock(), misses(engine) - before, rows);
            }
            drive.release();
        });
    }
    (bits, early)
}

fn check(rows: usize) {
    let tokens = prompt(48, open(&options(a())).tokenizer().tokens_total());
    let drive = fake(a(), FakeOptions::default());
    let streamed = EngineOptions {
        is_streaming: true,
        budget: Some(Budget::Slots(24)),
        preload: Preload::Experts(16),
        ..options(a())
    };
    let engine = open(&over(streamed, &drive));
    let (found, early) = run_stopped(&engine, &drive, &tokens, rows);
    assert!(early > 0, "no pass had both a hit and a miss in the layer that held it up");
    let resident = open(&options(a()));
    let mut bits = Vec::new();
    let mut sink = |_: usize, logits: &[f32]| bits.extend(logits.iter().map(|v| v.to_bits()));
    resident.runner().unwrap().forward(&tokens, Want::All, &mut sink, None).unwrap();
    assert!(found == bits, "the order of landing reached the logits");
}

#[test]
fn decode_computes_hits_before_misses_land() {
    check(1);
}

#[test]
fn prefill_computes_some_hits_before_misses_land() {
    check(6);
}
