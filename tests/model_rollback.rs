//! Taking rows back, saving and loading on the level of a runner: what is computed afterwards has the bits of a run that never knew better.
//! Never tolerates a difference. Surprising fact: lengths lie around the borders of window, pair and chunk, because an odd length in a model
//! with pairs needs values that the pair's own completion has used up.

mod common;
mod v4_rig;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use common::checkpoint;
use common::golden::Golden;
use common::memory_supply::MemoryExperts;
use common::setup::{run, setup};
use ds4::backend::cpu::CpuBackend;
use ds4::models::state::{ROLLBACK_ROWS, StatePart};
use ds4::models::{ModelConfig, ModelRunner, RunnerOptions, Want};
use ds4::session::images::MemoryState;

const CTX: usize = 200;
/// Tokens that a story goes on for.
const REST: usize = 12;

/// A runner of either architecture.
struct Subject {
    window: usize,
    frontier_bytes: u64,
    runner: Box<dyn ModelRunner>,
    experts: Arc<MemoryExperts<CpuBackend>>,
}

/// Names of V4 fixtures are behind `v4-`, the others are of V4.1.
const NAMES: [&str; 5] = ["a", "b", "v4-a", "v4-b", "v4-c"];

/// A fixture's golden values.
fn golden(name: &str) -> PathBuf {
    match name.strip_prefix("v4-") {
        Some("c") => v4_rig::fixture("c").join("golden-mixed.safetensors"),
        Some(name) => v4_rig::fixture(name).join("golden.safetensors"),
        None => checkpoint::fixture(name).join("golden.safetensors"),
    }
}

fn tokens(name: &str) -> Vec<u32> {
    let golden = Golden::open(&golden(name)).tokens();
    golden.iter().chain(golden.iter().rev()).chain(&golden).copied().take(CTX).collect()
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|v| v.to_bits()).collect()
}

fn runner_with(name: &str, options: RunnerOptions) -> Subject {
    match name.strip_prefix("v4-") {
        Some(name) => {
            let made = v4_rig::Fixture::open(name).setup(1, options, 8);
            let (window, frontier_bytes) = (made.config.window, made.config.frontier_bytes());
            Subject { window, frontier_bytes, runner: made.runner, experts: made.experts }
        }
        None => {
            let made = setup(&checkpoint::fixture(name), 1, options, 8);
            let (window, frontier_bytes) = (made.config.window, made.config.frontier_bytes());
            Subject { window, frontier_bytes, runner: made.runner, experts: made.experts }
        }
    }
}

fn runner_of(name: &str, chunk: usize, sweep: usize) -> Subject {
    runner_with(name, RunnerOptions { sweep, ..RunnerOptions::new(CTX, chunk) })
}

/// Feeds `tokens` without a look at the logits.
fn feed(runner: &mut dyn ModelRunner, tokens: &[u32], want: Want) {
    if !tokens.is_empty() {
        runner.forward(tokens, want, &mut |_, _| (), None).unwrap();
    }
}

/// Logits of `rest` behind `before`, which a fresh runner computes at once.
fn fresh(setup: &mut Subject, before: &[u32], rest: &[u32]) -> Vec<u32> {
    setup.runner.reset();
    feed(&mut *setup.runner, before, Want::All);
    bits(&run(&mut *setup.runner, rest, &[rest.len()], None))
}

#[test]
fn of_a_batch_only_the_first_rows_may_be_kept() {
    for name in NAMES {
        let text = tokens(name);
        let wrong: Vec<u32> = text.iter().rev().copied().take(ROLLBACK_ROWS).collect();
        let mut twin = runner_of(name, CTX, CTX);
        let (window, mut known) = (twin.window, HashMap::new());
        // A batch in one sweep, in sweeps of one row, in a sweep of several chunks.
        for (chunk, sweep) in [(16, 16), (1, 1), (5, 64)] {
            let mut subject = runner_of(name, chunk, sweep);
            let lengths = [25, window, 0, 1, window - 1, window + 16];
            for len in lengths.into_iter().take(if chunk == 16 { 6 } else { 2 }) {
                for kept in 0..=ROLLBACK_ROWS {
                    let what = format!("{name}, chunks of {chunk}: {len} tokens, {kept} rows kept");
                    let want = [Want::All, Want::Last, Want::None][kept % 3];
                    let runner = &mut *subject.runner;
                    runner.reset();
                    feed(runner, &text[..len], Want::Last);
                    feed(runner, &wrong, want);
                    let sequence: Vec<u32> = text[..len].iter().chain(&wrong[..kept]).copied().collect();
                    assert_eq!(runner.reach(sequence.len()), sequence.len(), "{what}");
                    assert_eq!(runner.rewind(&sequence), sequence.len(), "{what}");
                    assert_eq!(runner.len(), sequence.len(), "{what}");
                    let rest = &text[len..len + REST];
                    let got = bits(&run(runner, rest, &[1, 2, 8, 1], None));
                    let want = known.entry((len, kept)).or_insert_with(|| fresh(&mut twin, &sequence, rest));
                    assert!(got == *want, "{what}");
                }
            }
        }
    }
}

/// As a draft is verified: over and over, each time other rows of the batch stay.
#[test]
fn batches_follow_each_other() {
    for (name, chunk) in [("a", 16), ("b", 9), ("b", 16), ("v4-a", 9), ("v4-b", 16), ("v4-c", 3)] {
        let text = tokens(name);
        let mut subject = runner_of(name, chunk, chunk);
        let mut sequence = text[..29].to_vec();
        feed(&mut *subject.runner, &sequence, Want::Last);
        for (round, kept) in [3, 0, 8, 1, 7, 2, 5, 0, 4, 6, 1, 1, 8, 3].into_iter().enumerate() {
            let batch = &text[5 * round..5 * round + ROLLBACK_ROWS];
            feed(&mut *subject.runner, batch, Want::All);
            sequence.extend_from_slice(&batch[..kept]);
            assert_eq!(subject.runner.rewind(&sequence), sequence.len(), "{name}, round {round}");
        }
        let got = bits(&run(&mut *subject.runner, &text[..REST], &[1, 4, 7], None));
        assert!(got == fresh(&mut runner_of(name, CTX, CTX), &sequence, &text[..REST]), "{name}");
    }
}

#[test]
fn rows_of_a_long_sweep_that_were_not_computed_are_out_of_reach() {
    let text = tokens("b");
    let mut subject = runner_of("b", 64, 128);
    feed(&mut *subject.runner, &text[..100], Want::Last);
    // The decoder suffix left earlier rows out, so what follows them cannot be computed from this state.
    let reached: Vec<usize> = (1..=100).filter(|len| subject.runner.reach(*len) == *len).collect();
    assert_eq!(reached, (92..=100).collect::<Vec<_>>());
    feed(&mut *subject.runner, &text[100..103], Want::Last);
    assert_eq!(subject.runner.reach(94), 94, "still in the rings");
    assert_eq!(subject.runner.reach(91), 0);
    assert_eq!(subject.runner.rewind(&text[..91]), 0);
    assert!(subject.runner.is_empty());
}

#[test]
fn a_failed_batch_leaves_what_was_in_reach_or_says_that_it_did_not() {
    use std::sync::atomic::Ordering;
    for name in NAMES {
        let text = tokens(name);
        for (len, batch) in [(41, 8), (41, 1), (60, 40), (33, 3)] {
            let mut subject = runner_of(name, 16, 64);
            for token in &text[..len] {
                feed(&mut *subject.runner, &[*token], Want::None);
            }
            subject.experts.fail_after.store(1, Ordering::Relaxed);
            let failed = subject.runner.forward(&text[..batch], Want::Last, &mut |_, _| (), None);
            assert!(failed.is_err());
            subject.experts.fail_after.store(-1, Ordering::Relaxed);
            for back in (0..6).rev() {
                let target = subject.runner.reach(len - back);
                if target == 0 {
                    continue;
                }
                // Of the largest step back first: a smaller one is no longer there afterwards.
                assert_eq!(subject.runner.rewind(&text[..target]), target);
                let got = bits(&run(&mut *subject.runner, &text[7..7 + REST], &[REST], None));
                let want = fresh(&mut runner_of(name, CTX, CTX), &text[..target], &text[7..7 + REST]);
                assert!(got == want, "{name}: {batch} rows failed after {len}, back to {target}");
                break;
            }
        }
    }
}

#[test]
fn a_state_loads_under_any_chunk_and_goes_on_bit_for_bit() {
    for name in NAMES {
        let text = tokens(name);
        let mut twin = runner_of(name, CTX, CTX);
        let mut from = runner_of(name, 16, 64);
        let mut into = runner_of(name, 7, 7);
        let window = twin.window;
        for len in [1, 2, 7, window - 2, window - 1, window, window + 1, 63, 64, 65, 101, 150] {
            from.runner.reset();
            feed(&mut *from.runner, &text[..len / 2], Want::Last);
            feed(&mut *from.runner, &text[len / 2..len], Want::Last);
            let mut state = MemoryState::default();
            from.runner.save_state(StatePart::Whole, &mut state).unwrap();
            let rest = &text[len..len + REST];
            // Whatever was there before counts for nothing.
            feed(&mut *into.runner, &text[60..95], Want::Last);
            into.runner.load_state(StatePart::Whole, &text[..len], &mut state.reader()).unwrap();
            assert_eq!(into.runner.len(), len);
            let mut again = MemoryState::default();
            into.runner.save_state(StatePart::Whole, &mut again).unwrap();
            assert!(again == state, "{name}, {len}: a loaded state is saved as it was");
            let reached = |len: usize| from.runner.reach(len) == len;
            let back = (1..=ROLLBACK_ROWS.min(len - 1)).take_while(|back| reached(len - back)).count();
            let got = bits(&run(&mut *into.runner, rest, &[1, 1, 3], None));
            let want = fresh(&mut twin, &text[..len], rest);
            assert!(got == want, "{name}: loaded at {len}");
            assert!(bits(&run(&mut *from.runner, rest, &[5], None)) == want, "{name}: saving changes nothing at {len}");
            for kept in [len - back, len - back / 2] {
                into.runner.load_state(StatePart::Whole, &text[..kept], &mut state.reader()).unwrap();
                let got = bits(&run(&mut *into.runner, rest, &[2, 1, 9], None));
                assert!(got == fresh(&mut twin, &text[..kept], rest), "{name}: loaded at {len} up to {kept}");
            }
        }
    }
}

#[test]
fn a_frontier_is_small_and_leads_back() {
    for name in NAMES {
        let text = tokens(name);
        let mut twin = runner_of(name, CTX, CTX);
        let mut subject = runner_of(name, 16, 32);
        for len in [3, 31, 32, 40, 65, 90] {
            let runner = &mut *subject.runner;
            runner.reset();
            feed(runner, &text[..len], Want::Last);
            let mut state = MemoryState::default();
            runner.save_state(StatePart::Frontier, &mut state).unwrap();
            assert!(state.bytes() <= subject.frontier_bytes, "{name}, {len}: {}", state.bytes());
            // Far enough that nothing is left in the rings: a window, a chunk and more.
            feed(runner, &text[20..20 + 100], Want::Last);
            for kept in [len, len - 1, len.saturating_sub(7).max(1)] {
                assert_eq!(runner.reach(kept), 0, "{name}, {kept}");
                runner.load_state(StatePart::Frontier, &text[..kept], &mut state.reader()).unwrap();
                let rest = &text[100..100 + REST];
                let got = bits(&run(runner, rest, &[1, 7, 3], None));
                assert!(got == fresh(&mut twin, &text[..kept], rest), "{name}: {len}, back to {kept}");
                if kept + 7 > len {
                    feed(runner, &text[30..30 + 60], Want::Last);
                }
            }
        }
        // The longest one takes what was planned: it ends where a group of 128 is one token short after all that can be taken back.
        let mut state = MemoryState::default();
        subject.runner.reset();
        for token in &text[..127 + ROLLBACK_ROWS] {
            feed(&mut *subject.runner, &[*token], Want::None);
        }
        subject.runner.save_state(StatePart::Frontier, &mut state).unwrap();
        assert_eq!(state.bytes(), subject.frontier_bytes, "{name}");
    }
}

#[test]
fn states_of_other_shapes_are_refused() {
    for name in ["a", "v4-a"] {
        states_of_other_shapes_are_refused_by(name);
    }
}

fn states_of_other_shapes_are_refused_by(name: &str) {
    let text = tokens(name);
    let mut a = runner_of(name, 16, 16);
    feed(&mut *a.runner, &text[..40], Want::Last);
    let mut state = MemoryState::default();
    a.runner.save_state(StatePart::Whole, &mut state).unwrap();
    for other in ["a", "b", "v4-a", "v4-b"].into_iter().filter(|other| *other != name) {
        let mut b = runner_of(other, 16, 16);
        let error = b.runner.load_state(StatePart::Whole, &text[..40], &mut state.reader()).unwrap_err();
        assert!(error.to_string().contains("does not fit"), "{other}: {error}");
        assert!(b.runner.is_empty());
    }
    // More or fewer tokens than the state has.
    for wrong in [31, 41] {
        let error = a.runner.load_state(StatePart::Whole, &text[..wrong], &mut state.reader()).unwrap_err();
        assert!(error.to_string().contains("number of tokens"), "{error}");
        assert!(a.runner.is_empty());
    }
    let mut small = runner_with(name, RunnerOptions::new(39, 16));
    let error = small.runner.load_state(StatePart::Whole, &text[..40], &mut state.reader()).unwrap_err();
    assert!(error.to_string().contains("at most 39"), "{error}");
}
