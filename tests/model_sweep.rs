//! Sweeps of every width, with and without the decoder suffix, against the plain twin: sweeps of one chunk that compute every row.
//! Never tolerates a difference, neither in the logits nor in anything that is computed later from the state that a sweep left behind.
//! Surprising fact: lengths are taken around every border of the fixture's window, chunk and suffix triangle, plus or minus one.

mod common;

use std::ops::ControlFlow;
use std::sync::atomic::Ordering;

use common::checkpoint::fixture;
use common::golden::Golden;
use common::setup::{Setup, run, setup};
use ds4::models::{Model, ModelError, RunnerOptions, Want};

const CTX: usize = 420;

/// The golden tokens, repeated: enough for every length.
fn tokens(name: &str) -> Vec<u32> {
    let golden = Golden::open(&fixture(name).join("golden.safetensors")).tokens();
    golden.iter().chain(golden.iter().rev()).chain(&golden).copied().take(CTX).collect()
}

fn options(chunk: usize, sweep: usize, decoder_suffix: bool) -> RunnerOptions {
    RunnerOptions { sweep, decoder_suffix, ..RunnerOptions::new(CTX, chunk) }
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|v| v.to_bits()).collect()
}

/// Logits of the last of `prompt` tokens, then of single tokens, of a chunk with all its logits, and of single tokens again.
fn story(setup: &mut Setup, text: &[u32], prompt: usize, want: Want) -> Vec<u32> {
    let runner = &mut *setup.runner;
    runner.reset();
    let mut seen = Vec::new();
    runner.forward(&text[..prompt], want, &mut |_, row| seen.extend_from_slice(row), None).unwrap();
    if want == Want::All {
        seen.drain(..seen.len() - setup.config.vocab);
    }
    let rest = &text[prompt..];
    for token in &rest[..3] {
        runner.forward(&[*token], Want::Last, &mut |_, row| seen.extend_from_slice(row), None).unwrap();
    }
    seen.extend(run(runner, &rest[3..24], &[17, 1, 1, 2], None));
    bits(&seen)
}

/// Lengths at which something begins or ends, and their neighbours.
fn lengths(window: usize, layers_behind: usize, chunk: usize, sweep: usize) -> Vec<usize> {
    let triangle = (0..=layers_behind).map(|l| 1 + l * (window - 1));
    let borders = triangle.chain([window, chunk, 2 * chunk, sweep, sweep + chunk, 300]);
    let mut lengths: Vec<usize> = borders.flat_map(|at| [at.saturating_sub(1), at, at + 1]).collect();
    lengths.retain(|len| (2..CTX - 24).contains(len));
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

#[test]
fn the_decoder_suffix_and_wide_sweeps_change_no_bit() {
    for name in ["a", "b"] {
        let text = tokens(name);
        let mut twin = setup(&fixture(name), 2, options(CTX, CTX, false), 8);
        let config = &twin.config;
        let behind = config.layers.len() - 1 - config.owners.last().copied().unwrap_or(0);
        let window = config.window;
        for (chunk, sweep, lease_max) in [(CTX, CTX, 8), (16, 16, 8), (16, 128, 4), (7, 50, 8), (33, 420, 3)] {
            let mut suffix = setup(&fixture(name), 1, options(chunk, sweep, true), lease_max);
            let mut full = setup(&fixture(name), 2, options(chunk, sweep, false), lease_max);
            for prompt in lengths(window, behind, chunk, sweep) {
                let what = format!("{name}: {prompt} tokens, chunks of {chunk}, sweeps of {sweep}");
                let want = story(&mut twin, &text, prompt, Want::All);
                assert!(story(&mut suffix, &text, prompt, Want::Last) == want, "{what}, suffix");
                if prompt % 5 == 0 {
                    assert!(story(&mut full, &text, prompt, Want::Last) == want, "{what}, all rows");
                    assert!(story(&mut suffix, &text, prompt, Want::All) == want, "{what}, all logits");
                }
            }
        }
    }
}

#[test]
fn rows_that_nobody_sees_are_counted_as_skipped() {
    // Fixture a: six layers, compressed rows made by layer 3, a window of 32; eight rows may be taken back.
    for (want, suffix, skipped) in [
        (Want::Last, true, (200 - 1) + (200 - 39) + (200 - 70)),
        (Want::None, true, 200 + (200 - 39) + (200 - 70)),
        (Want::All, true, 0),
        (Want::Last, false, 0),
    ] {
        let mut setup = setup(&fixture("a"), 1, options(64, 256, suffix), 8);
        setup.runner.forward(&tokens("a")[..200], want, &mut |_, _| (), None).unwrap();
        let counts = setup.model.sweep_counts();
        assert_eq!((counts.sweeps, counts.rows, counts.layer_rows), (1, 200, 1200));
        assert_eq!(counts.layer_rows_skipped, skipped, "{want:?}, suffix {suffix}");
    }
}

/// An expert is asked for once a layer and sweep, however many chunks the sweep has and however few experts may be held.
#[test]
fn a_sweep_asks_for_each_expert_once() {
    for (chunk, lease_max) in [(16, 8), (16, 3), (200, 4)] {
        let mut setup = setup(&fixture("a"), 1, options(chunk, 200, false), lease_max);
        setup.runner.forward(&tokens("a")[..200], Want::Last, &mut |_, _| (), None).unwrap();
        let asked = setup.experts.asked.lock().unwrap().clone();
        let mut distinct = asked.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), asked.len(), "chunks of {chunk}, {lease_max} held at most");
        assert!(asked.len() > 40, "nearly all experts take part");
        assert!(setup.experts.held_most.load(Ordering::Relaxed) <= lease_max as u64);
    }
}

/// A read that fails in any layer of any sweep takes the whole sweep back, and nothing before it.
#[test]
fn a_failed_sweep_leaves_no_trace() {
    for name in ["a", "b"] {
        let text = tokens(name);
        for before in [0, 1, 31, 90, 151] {
            let mut undisturbed = setup(&fixture(name), 1, options(16, 128, true), 8);
            run(&mut *undisturbed.runner, &text[..before], &[usize::MAX], None);
            let rest = &text[before..before + 160];
            let want = bits(&run(&mut *undisturbed.runner, rest, &[1, 1, 130, 28], None));

            let mut setup = setup(&fixture(name), 1, options(16, 128, true), 8);
            run(&mut *setup.runner, &text[..before], &[usize::MAX], None);
            for failing in [0, 3, 9] {
                setup.experts.fail_after.store(failing, Ordering::Relaxed);
                let error = setup.runner.forward(&rest[..120], Want::Last, &mut |_, _| panic!("no logits"), None);
                assert!(error.unwrap_err().to_string().contains("cannot be read"));
                assert_eq!(setup.runner.len(), before);
            }
            setup.experts.fail_after.store(-1, Ordering::Relaxed);
            let got = bits(&run(&mut *setup.runner, rest, &[1, 1, 130, 28], None));
            assert!(got == want, "{name}: after {before} tokens");
        }
    }
}

#[test]
fn a_sweep_can_be_watched_and_given_up() {
    let text = tokens("a");
    let mut setup = setup(&fixture("a"), 1, options(16, 128, true), 8);
    let mut told = Vec::new();
    let mut watch = |rows: usize| {
        told.push(rows);
        if rows >= 150 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let error = setup.runner.forward_watched(&text[..300], Want::Last, &mut |_, _| (), None, &mut watch).unwrap_err();
    assert!(matches!(error, ModelError::Interrupted), "{error}");
    assert_eq!(setup.runner.len(), 128, "the first sweep stays");
    assert!(told.windows(2).all(|w| w[0] <= w[1]) && told.len() > 6, "{told:?}");
    let mut twin = common::setup::setup(&fixture("a"), 1, options(CTX, CTX, false), 8);
    let want = run(&mut *twin.runner, &text[..300], &[usize::MAX], None);
    let vocab = twin.config.vocab;
    let got = run(&mut *setup.runner, &text[128..300], &[usize::MAX], None);
    assert!(bits(&got) == bits(&want[128 * vocab..]));
}

/// Allocations are what the planner is told, with wide sweeps too.
#[test]
fn memory_is_as_planned() {
    use ds4::models::ModelConfig;
    for name in ["a", "b"] {
        for (chunk, sweep) in [(16, 16), (16, 128), (100, 420), (64, 10_000)] {
            let options = options(chunk, sweep, true);
            let Setup { config, runner, .. } = setup(&fixture(name), 1, options, 8);
            assert_eq!(runner.bytes(), config.runner_bytes(&options), "{name}, {chunk}, {sweep}");
            assert_eq!(runner.sweep(), sweep.clamp(chunk, CTX));
        }
    }
}
