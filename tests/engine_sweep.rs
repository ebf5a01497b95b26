//! What sweeps cost the drive, and what they leave in the cache: counts of whole engines, none of which depends on time.
//! Never judges values. Surprising fact: a sweep reads an expert once however few slots there are, so its reads follow from its routes.

mod engine_rig;

use ds4::engine::Engine;
use ds4::engine::options::{EngineOptions, Preload};
use ds4::models::Want;
use ds4::session::timeline::{NoWatcher, Timeline};
use ds4::storage::expert_cache::CacheStats;
use ds4::units::Budget;
use engine_rig::made_models::{a, wide_q2};
use engine_rig::{best, open, options, prompt};

fn cold(model: &std::path::Path, slots: u64) -> Engine {
    let budget = Some(Budget::Slots(slots));
    open(&EngineOptions { is_streaming: true, budget, preload: Preload::Cold, ..options(model) })
}

fn stats(engine: &Engine) -> CacheStats {
    engine.cache().unwrap().stats()
}

/// A prompt of `rows` on a fresh sequence, in sweeps of `sweep`.
fn prefill(engine: &mut Engine, rows: usize, (chunk, sweep): (usize, usize)) -> Timeline {
    (engine.prepared.runner.chunk, engine.prepared.runner.sweep) = (chunk, sweep);
    let tokens = prompt(rows, engine.tokenizer().tokens_total());
    let mut timeline = Timeline::new(engine.runner().unwrap());
    timeline.sync(&tokens, Want::Last, &mut NoWatcher).unwrap();
    timeline
}

#[test]
fn a_sweep_reads_each_missing_expert_once() {
    // Six layers of eight experts; 200 rows use all of them but in the last layer, whose only visible row uses three.
    for (slots, chunk) in [(18, 16), (18, 200), (30, 7)] {
        let mut engine = cold(a(), slots);
        prefill(&mut engine, 200, (chunk, 200));
        let found = stats(&engine).prefill;
        assert_eq!((found.misses, found.hits), (5 * 8 + 3, 0), "{slots} slots, chunks of {chunk}");
        let class = engine.prepared.layout.experts[0].expert_bytes();
        assert_eq!(found.read_bytes, found.misses * class.0);
        // The same text again asks for the same experts, each once.
        prefill(&mut engine, 200, (chunk, 200));
        let again = stats(&engine).prefill;
        assert_eq!(again.misses + again.hits, 2 * (5 * 8 + 3));
        assert_eq!(again.read_bytes, again.misses * class.0);
    }
}

#[test]
fn wider_sweeps_read_less() {
    let reads = |sweep: usize| {
        let mut engine = cold(a(), 18);
        prefill(&mut engine, 320, (16, sweep));
        stats(&engine).prefill.misses
    };
    let [narrow, wide] = [reads(16), reads(320)];
    assert!(wide * 8 < narrow, "{narrow} reads in 20 sweeps, {wide} in one");
}

/// Two layers of 16 experts: what a sweep leaves in the cache serves decode from its first steps on.
#[test]
fn decode_goes_on_from_what_a_sweep_left() {
    let mut engine = cold(wide_q2(), 16);
    let mut timeline = prefill(&mut engine, 120, (16, 120));
    let before = stats(&engine).decode;
    for _ in 0..24 {
        timeline.append(&[best(timeline.last_logits())], Want::Last, &mut NoWatcher).unwrap();
    }
    let after = stats(&engine).decode;
    let first = stats(&engine).prefill;
    assert!(first.evictions < first.misses, "free slots are used");
    let (hits, misses) = (after.hits - before.hits, after.misses - before.misses);
    assert!(hits > misses, "{hits} hits, {misses} misses with half of the experts in the cache");
}
