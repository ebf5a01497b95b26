//! DeepSeek V4 through whole engines: streamed equals resident bit for bit, and the experts that token ids name are on their way before
//! they are asked for.
//! Never tolerates a difference. Surprising fact: one fixture has two expert sizes, so its cache has two classes of slots.

mod engine_rig;

use std::path::{Path, PathBuf};
use std::time::Duration;

use ds4::backend::cpu::matmul::Arithmetic;
use ds4::backend::cpu::simd::SimdLevel;
use ds4::engine::options::{EngineOptions, LookaheadMode, Preload};
use ds4::models::Want;
use ds4::session::timeline::Timeline;
use ds4::storage::reader::ReaderChoice;
use ds4::storage::reader::fake::FakeOptions;
use ds4::units::Budget;
use engine_rig::{Trail, difference, fake, fresh_trail, open, options, over, prompt};

const CHUNKS: [usize; 3] = [1, 7, 64];
/// Longer than windows and selections of the fixtures: groups of 128 close, indexers choose.
const PROMPT: usize = 140;
const GENERATED: usize = 6;

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/deepseek_v4").join(name)
}

fn a() -> PathBuf {
    file("a/model.gguf")
}

fn c() -> PathBuf {
    file("c/model-mixed.gguf")
}

/// The twin: experts in memory, one thread, scalar code, one token at a time.
fn plain(model: &Path, arithmetic: Arithmetic) -> (Trail, usize) {
    let mut engine =
        open(&EngineOptions { arithmetic, simd: Some(SimdLevel::Scalar), threads: Some(1), ..options(model) });
    assert!(engine.cache().is_none());
    assert_eq!(engine.prepared.config.arch(), "deepseek4");
    let vocab = engine.tokenizer().tokens_total();
    (fresh_trail(&mut engine, 1, &prompt(PROMPT, vocab), GENERATED), vocab)
}

fn assert_same(found: &Trail, want: &Trail, vocab: usize, what: &str) {
    assert!(found == want, "{what}: {}", difference(found, want, vocab));
}

/// Every budget x threads x reader x chunk width; the last budget holds all experts.
fn check_streamed(model: &Path, budgets: &[u64]) {
    for arithmetic in [Arithmetic::Quality, Arithmetic::Fast] {
        let (want, vocab) = plain(model, arithmetic);
        let prompt = prompt(PROMPT, vocab);
        for (slots, (threads, io)) in budgets
            .iter()
            .flat_map(|slots| [(1, ReaderChoice::Uring), (2, ReaderChoice::Pread)].map(|how| (*slots, how)))
        {
            let options = EngineOptions {
                arithmetic,
                threads: Some(threads),
                io,
                is_streaming: true,
                budget: Some(Budget::Slots(slots)),
                preload: if threads == 1 { Preload::Cold } else { Preload::Auto },
                ..options(model)
            };
            let mut engine = open(&options);
            for chunk in CHUNKS {
                let found = fresh_trail(&mut engine, chunk, &prompt, GENERATED);
                assert_same(
                    &found,
                    &want,
                    vocab,
                    &format!("{arithmetic:?}, {slots} slots, {threads} threads, {chunk}"),
                );
            }
            let stats = engine.cache().unwrap().stats();
            assert!(stats.total().hits > 0, "the cache was used");
            assert_eq!(stats.total().evictions > 0, slots < budgets[budgets.len() - 1], "{slots} slots");
            assert_eq!(stats.slots_held + stats.slots_filling, 0, "at rest");
        }
    }
}

#[test]
fn streamed_equals_resident() {
    check_streamed(&a(), &[15, 24, 40]);
}

#[test]
fn streamed_equals_resident_with_two_expert_sizes() {
    check_streamed(&c(), &[4, 10, 16]);
}

#[test]
fn reading_ahead_is_invisible() {
    let (want, vocab) = plain(&a(), Arithmetic::Fast);
    let prompt = prompt(PROMPT, vocab);
    for lookahead in [LookaheadMode::Off, LookaheadMode::Memory, LookaheadMode::Router, LookaheadMode::Both] {
        let streamed = EngineOptions {
            is_streaming: true,
            budget: Some(Budget::Slots(18)),
            preload: Preload::Cold,
            lookahead,
            ..options(&a())
        };
        let drive = FakeOptions { jitter: Duration::from_micros(200), seed: 3, ..FakeOptions::default() };
        let mut engine = open(&over(streamed, &fake(&a(), drive)));
        for chunk in [1, 64] {
            assert_same(&fresh_trail(&mut engine, chunk, &prompt, GENERATED), &want, vocab, lookahead.name());
        }
        assert!(engine.known().unwrap().uses > 0);
    }
}

/// Two of five layers follow from token ids. With room for a few tokens' experts, what they need is never a demand miss.
#[test]
fn experts_that_token_ids_name_are_read_before_they_are_requested() {
    let streamed =
        EngineOptions { is_streaming: true, budget: Some(Budget::Slots(24)), preload: Preload::Cold, ..options(&a()) };
    let engine = open(&streamed);
    let vocab = engine.tokenizer().tokens_total();
    let mut timeline = Timeline::new(engine.runner().unwrap());
    let tokens = prompt(200, vocab);
    timeline.sync(&tokens[..8], Want::Last, &mut Trail::default()).unwrap();
    for token in &tokens[8..] {
        timeline.announce(*token).unwrap();
        timeline.append(&[*token], Want::Last, &mut Trail::default()).unwrap();
    }
    let (known, stats) = (engine.known().unwrap(), engine.cache().unwrap().stats());
    println!("known: {known:?}, reads ahead: {:?}, decode: {:?}", stats.lookahead, stats.decode);
    assert_eq!(known.tokens, 192);
    assert_eq!(known.uses, 192 * 2 * 3, "every use of these layers was foreseen");
    assert!(100 * known.misses < known.uses, "{known:?}");
    assert!(stats.lookahead.issued > 50 && stats.lookahead.wasted == 0, "{:?}", stats.lookahead);
    assert!(stats.decode.misses > 50, "other layers still miss: {:?}", stats.decode);
}

/// A resident run tells nobody, and nothing is counted.
#[test]
fn without_streaming_nothing_is_read_ahead() {
    let mut engine = open(&options(&c()));
    let vocab = engine.tokenizer().tokens_total();
    fresh_trail(&mut engine, 4, &prompt(9, vocab), 2);
    assert!(engine.known().is_none());
}
