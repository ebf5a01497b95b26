//! Streamed equals resident, bit for bit: cache size, threads, reader, chunk width and instruction set are invisible in the logits.
//! Never tolerates a difference. Surprising fact: engines are used for several chunk widths in a row, so that caches in every state of
//! warmth take part.

mod engine_rig;

use std::path::Path;
use std::time::Duration;

use ds4::backend::cpu::matmul::Arithmetic;
use ds4::backend::cpu::simd::SimdLevel;
use ds4::engine::options::{EngineOptions, LookaheadMode, Preload};
use ds4::storage::reader::fake::FakeOptions;
use ds4::storage::reader::{DirectChoice, ReaderChoice};
use ds4::units::Budget;
use engine_rig::made_models::{a, b, wide_q2};
use engine_rig::{Trail, difference, fake, fresh_trail, open, options, over, prompt};

const CHUNKS: [usize; 4] = [1, 7, 64, 512];
const MODES_AHEAD: [LookaheadMode; 3] = [LookaheadMode::Memory, LookaheadMode::Router, LookaheadMode::Both];
const MODES: [Arithmetic; 2] = [Arithmetic::Quality, Arithmetic::Fast];
/// Longer than every window and selection of the fixtures.
const PROMPT: usize = 100;
const GENERATED: usize = 8;

/// The twin: experts in memory, one thread, scalar code, one token at a time.
fn plain(model: &Path, arithmetic: Arithmetic) -> (Trail, usize) {
    let mut engine =
        open(&EngineOptions { arithmetic, simd: Some(SimdLevel::Scalar), threads: Some(1), ..options(model) });
    assert!(engine.cache().is_none());
    let vocab = engine.tokenizer().tokens_total();
    (fresh_trail(&mut engine, 1, &prompt(PROMPT, vocab), GENERATED), vocab)
}

fn assert_same(found: &Trail, want: &Trail, vocab: usize, what: &str) {
    assert!(found == want, "{what}: {}", difference(found, want, vocab));
}

/// Minimum, 25 %, 50 % and 100 % of the experts; sizes below the minimum are left out.
fn cache_sizes(minimum: u64, experts: u64) -> Vec<u64> {
    let mut sizes = vec![minimum, experts / 4, experts / 2, experts];
    sizes.retain(|slots| *slots >= minimum);
    sizes.dedup();
    sizes
}

/// Every cache size x threads x reader x chunk width.
fn check_streamed(model: &Path, minimum: u64, experts: u64) {
    for arithmetic in MODES {
        let (want, vocab) = plain(model, arithmetic);
        let prompt = prompt(PROMPT, vocab);
        for slots in cache_sizes(minimum, experts) {
            for (threads, io) in [1, 2].into_iter().flat_map(|t| [(t, ReaderChoice::Uring), (t, ReaderChoice::Pread)]) {
                let options = EngineOptions {
                    arithmetic,
                    threads: Some(threads),
                    io,
                    is_streaming: true,
                    budget: Some(Budget::Slots(slots)),
                    preload: if threads == 1 { Preload::Cold } else { Preload::Auto },
                    // The fixtures fit in memory, so that `Auto` would go through the page cache.
                    direct: if threads == 1 { DirectChoice::On } else { DirectChoice::Auto },
                    ..options(model)
                };
                let mut engine = open(&options);
                assert_eq!(engine.plan().cache_slots, slots);
                for chunk in CHUNKS {
                    let found = fresh_trail(&mut engine, chunk, &prompt, GENERATED);
                    let what = format!("{arithmetic:?}, {slots} slots, {threads} threads, {io:?}, chunks of {chunk}");
                    assert_same(&found, &want, vocab, &what);
                }
                let stats = engine.cache().unwrap().stats();
                let both = stats.prefill.plus(&stats.decode);
                assert!(both.hits > 0, "the cache was used");
                assert_eq!(both.evictions > 0, slots < experts, "{slots} slots: {} evictions", both.evictions);
                assert_eq!(stats.slots_held + stats.slots_filling, 0, "at rest");
            }
        }
    }
}

#[test]
fn streamed_equals_resident() {
    check_streamed(a(), 18, 48);
}

#[test]
fn streamed_equals_resident_with_row_tables() {
    check_streamed(b(), 10, 40);
}

#[test]
fn streamed_equals_resident_in_two_bits() {
    check_streamed(wide_q2(), 4, 32);
}

#[test]
fn instruction_sets_threads_and_chunks_equal_the_plain_twin() {
    for (model, arithmetic) in [a(), b(), wide_q2()].into_iter().flat_map(|m| MODES.map(|mode| (m, mode))) {
        let (want, vocab) = plain(model, arithmetic);
        let prompt = prompt(PROMPT, vocab);
        for level in SimdLevel::ALL {
            if level > SimdLevel::detect() {
                println!("notice: {} is not offered by this processor", level.name());
                continue;
            }
            // The twin runs one thread and single tokens; here both differ.
            let mut engine = open(&EngineOptions { arithmetic, simd: Some(level), threads: Some(2), ..options(model) });
            for chunk in [7, 64] {
                let found = fresh_trail(&mut engine, chunk, &prompt, GENERATED);
                assert_same(&found, &want, vocab, &format!("{arithmetic:?}, {}, chunks of {chunk}", level.name()));
            }
        }
    }
}

#[test]
fn eviction_policies_are_invisible() {
    let (want, vocab) = plain(b(), Arithmetic::Fast);
    let prompt = prompt(PROMPT, vocab);
    for (policy, _) in cache_policy::policies::KNOWN {
        let options = EngineOptions {
            is_streaming: true,
            budget: Some(Budget::Slots(13)),
            policy: (*policy).into(),
            ..options(b())
        };
        let mut engine = open(&options);
        assert_same(&fresh_trail(&mut engine, 7, &prompt, GENERATED), &want, vocab, policy);
        assert!(engine.cache().unwrap().stats().decode.evictions > 0, "{policy} had something to choose");
    }
}

#[test]
fn reading_ahead_is_invisible() {
    for (model, slots) in [(a(), [20, 36]), (b(), [12, 30]), (wide_q2(), [7, 20])] {
        let (want, vocab) = plain(model, Arithmetic::Fast);
        let prompt = prompt(PROMPT, vocab);
        for (lookahead, slots) in MODES_AHEAD.into_iter().flat_map(|mode| slots.map(|s| (mode, s))) {
            let streamed = EngineOptions {
                is_streaming: true,
                budget: Some(Budget::Slots(slots)),
                preload: Preload::Cold,
                lookahead,
                ..options(model)
            };
            let drive = FakeOptions { jitter: Duration::from_micros(200), seed: slots, ..FakeOptions::default() };
            for options in [over(streamed.clone(), &fake(model, drive)), streamed] {
                let mut engine = open(&options);
                let what = format!("{}, {lookahead:?}, {slots} slots", model.display());
                // One token at a time, so that every position is looked ahead of; then a chunk over its leftovers.
                for chunk in [1, 64] {
                    assert_same(&fresh_trail(&mut engine, chunk, &prompt, GENERATED), &want, vocab, &what);
                }
                let stats = engine.lookahead().unwrap();
                assert!(stats.memory.uses + stats.router.uses > 0 && stats.total.issued > 0, "{what}: {stats:?}");
            }
        }
    }
}

#[test]
fn a_drive_that_reorders_and_reads_short_changes_nothing() {
    let (want, vocab) = plain(b(), Arithmetic::Fast);
    let prompt = prompt(PROMPT, vocab);
    for seed in 0..3 {
        let drive =
            FakeOptions { jitter: Duration::from_micros(300), short_of_256: 64, seed, ..FakeOptions::default() };
        let reader = fake(b(), drive);
        let streamed = EngineOptions {
            is_streaming: true,
            budget: Some(Budget::Slots(10)),
            preload: Preload::Cold,
            ..options(b())
        };
        let mut engine = open(&over(streamed, &reader));
        assert_same(&fresh_trail(&mut engine, 64, &prompt, GENERATED), &want, vocab, &format!("seed {seed}"));
        assert!(engine.reader().counters().snapshot().short_reads > 0, "the drive did read short");
    }
}
