//! DeepSeek V4.1 against the golden fixtures: every stored array, in one go, in chunks and token by token.
//! Never compares with itself alone: chunkings must also equal each other bit for bit. Surprising fact: fixture `b` covers
//! n-gram memory and a window-only last layer, `a` the candidate stage.

mod common;

use common::checkpoint::fixture;
use common::gguf_file::Converted;
use common::golden::{Golden, argmax, check_close};
use common::recorder::Recorder;
use common::setup::{Setup, run, setup, setup_over};
use ds4::backend::cpu::matmul::Arithmetic;
use ds4::backend::cpu::simd::SimdLevel;
use ds4::models::deepseek41::Config;
use ds4::models::probe::Point;
use ds4::models::{RunnerOptions, Want};

/// Options that take the whole prompt in one go.
fn whole(golden: &Golden, kv_exact: bool) -> RunnerOptions {
    let len = golden.tokens().len();
    RunnerOptions { kv_exact, ..RunnerOptions::new(len + 40, len) }
}

fn check_golden(name: &str, file: &str, kv_exact: bool, limit: f32) {
    let golden = Golden::open(&fixture(name).join(file));
    let setup = setup(&fixture(name), 2, whole(&golden, kv_exact), 8);
    check_setup(name, file, &golden, setup, limit);
}

fn check_setup(name: &str, file: &str, golden: &Golden, setup: Setup, limit: f32) {
    let tokens = golden.tokens();
    let Setup { config, mut runner, .. } = setup;
    let mut seen = Recorder::default();
    let logits = run(&mut *runner, &tokens, &[usize::MAX], Some(&mut seen));
    let rows: Vec<&[f32]> = logits.chunks_exact(config.vocab).collect();

    let positions: Vec<usize> = golden.get("positions").ints.iter().map(|p| *p as usize).collect();
    let at_positions = |of: &dyn Fn(usize) -> Vec<f32>| -> Vec<f32> { positions.iter().flat_map(|p| of(*p)).collect() };
    let worst = check_close("logits", &at_positions(&|p| rows[p].to_vec()), &golden.get("logits").f32s, limit);
    println!("{name}/{file}: logits differ by at most {worst}");
    let picked: Vec<i32> = rows.iter().map(|row| argmax(row) as i32).collect();
    assert_eq!(picked, golden.get("argmax").ints, "argmax");

    for (array, point) in [
        ("hidden", Point::Streams),
        ("attn_out", Point::AttentionOut),
        ("mlp_out", Point::MlpOut),
        ("pre_mix", Point::PreMix),
    ] {
        let Some(want) = golden.find(array) else { continue };
        let part = want.f32s.len() / config.layers.len();
        for layer in 0..config.layers.len() {
            let got = at_positions(&|p| seen.row(point, layer, p).to_vec());
            check_close(&format!("{array} of layer {layer}"), &got, &want.f32s[layer * part..][..part], limit);
        }
    }
    check_routes(golden, &config, &seen, tokens.len(), limit);
    check_selections(golden, &config, &seen, tokens.len());
    check_engram(golden, &config, &seen, &positions, limit);

    let mut continuation = Vec::new();
    let mut next = argmax(rows[tokens.len() - 1]);
    for _ in 0..golden.get("greedy_ids").ints.len() {
        continuation.push(next as i32);
        runner.prefetch_rows(&[next as u32]).unwrap();
        runner.forward(&[next as u32], Want::Last, &mut |_, row| next = argmax(row), None).unwrap();
    }
    assert_eq!(continuation, golden.get("greedy_ids").ints, "greedy continuation");
}

fn check_routes(golden: &Golden, config: &Config, seen: &Recorder, tokens: usize, limit: f32) {
    let (ids, weights) = (golden.get("router_ids"), golden.get("router_weights"));
    let k = config.experts_per_token;
    for layer in 0..config.layers.len() {
        for pos in 0..tokens {
            let at = (layer * tokens + pos) * k;
            let (got, got_weights) =
                (seen.id_row(Point::RouterIds, layer, pos), seen.row(Point::RouterWeights, layer, pos));
            let mut sorted: Vec<(i32, f32)> = got.iter().copied().zip(got_weights.iter().copied()).collect();
            sorted.sort_by_key(|(id, _)| *id);
            let (got, got_weights): (Vec<i32>, Vec<f32>) = sorted.into_iter().unzip();
            assert_eq!(got, ids.ints[at..at + k], "experts of layer {layer}, position {pos}");
            let what = format!("router weights of layer {layer}, position {pos}");
            check_close(&what, &got_weights, &weights.f32s[at..at + k], limit);
        }
    }
}

fn check_selections(golden: &Golden, config: &Config, seen: &Recorder, tokens: usize) {
    for layer in 0..config.layers.len() {
        if let Some(want) = golden.find(&format!("index_ids.{layer}")) {
            let k = want.shape[1];
            for pos in 0..tokens {
                // Golden rows put -1 before or behind the ids; only the set counts.
                let set = |ids: &[i32]| -> Vec<i32> { ids.iter().copied().filter(|id| *id >= 0).collect() };
                let got = set(seen.id_row(Point::Selected, layer, pos));
                assert_eq!(got, set(&want.ints[pos * k..][..k]), "selection of layer {layer}, position {pos}");
            }
        }
        if let Some(want) = golden.find(&format!("candidate_blocks.{layer}")) {
            let blocks = want.shape[1];
            for pos in 0..tokens {
                let words = seen.id_row(Point::Candidates, layer, pos);
                let got: Vec<i32> = (0..blocks).map(|b| (words[b / 32] as u32 >> (b % 32) & 1) as i32).collect();
                assert_eq!(got, want.ints[pos * blocks..][..blocks], "candidates of layer {layer}, position {pos}");
            }
        }
    }
}

fn check_engram(golden: &Golden, config: &Config, seen: &Recorder, positions: &[usize], limit: f32) {
    let (Some(engram), Some(rows)) = (&config.engram, golden.find("engram_rows")) else { return };
    for (table, layer) in engram.layers.iter().enumerate() {
        for pos in 0..rows.shape[0] {
            let at = (pos * engram.layers.len() + table) * engram.columns();
            let want = &rows.ints[at..][..engram.columns()];
            assert_eq!(seen.id_row(Point::EngramRows, *layer, pos), want, "rows of table {table}, position {pos}");
        }
        for (array, point) in [("embedding", Point::EngramEmbedding), ("gate", Point::EngramGate)] {
            // The file without rounding has rows only.
            let Some(want) = golden.find(&format!("engram_{array}.{layer}")) else { continue };
            let got: Vec<f32> = positions.iter().flat_map(|p| seen.row(point, *layer, *p).to_vec()).collect();
            check_close(&format!("engram_{array} of layer {layer}"), &got, &want.f32s, limit);
        }
    }
}

#[test]
fn fixture_a_without_rounding() {
    check_golden("a", "golden-norounding.safetensors", true, 2e-3);
}

#[test]
fn fixture_b_without_rounding() {
    check_golden("b", "golden-norounding.safetensors", true, 2e-3);
}

#[test]
fn fixture_a() {
    check_golden("a", "golden.safetensors", false, 3e-3);
}

#[test]
fn fixture_b() {
    check_golden("b", "golden.safetensors", false, 3e-3);
}

/// The converter's lossless output, in its stored types, on every instruction set.
#[test]
fn fixtures_through_a_converted_file() {
    for name in ["a", "b"] {
        let converted = Converted::native(&fixture(name));
        let golden = Golden::open(&fixture(name).join("golden.safetensors"));
        for level in SimdLevel::ALL.into_iter().filter(|level| *level <= SimdLevel::detect()) {
            let options = whole(&golden, false);
            let setup = setup_over(&converted.metadata(), &converted, (2, Arithmetic::Quality, level), options, 8);
            check_setup(name, level.name(), &golden, setup, 3e-3);
        }
    }
}

/// Thread count, chunk borders (odd ones, too), the chunk capacity and the number of leased experts change no bit.
#[test]
fn chunks_threads_and_leases_change_no_bit() {
    for name in ["a", "b"] {
        let golden = Golden::open(&fixture(name).join("golden.safetensors"));
        let tokens = &golden.tokens()[..200];
        let all: &[usize] = &[usize::MAX];
        let variants: [(usize, usize, &[usize], usize); 8] = [
            (1, 200, all, 8),
            (2, 200, all, 8),
            (2, 200, all, 4),
            (2, 200, all, 3),
            (1, 1, all, 8),
            (2, 7, all, 8),
            (1, 64, all, 8),
            (2, 100, &[100, 29, 1, 1, 200], 8),
        ];
        let mut first: Option<Vec<u32>> = None;
        for (threads, chunk, pieces, lease_max) in variants {
            let options = RunnerOptions::new(200, chunk);
            let Setup { mut runner, .. } = setup(&fixture(name), threads, options, lease_max);
            let bits: Vec<u32> = run(&mut *runner, tokens, pieces, None).iter().map(|v| v.to_bits()).collect();
            match &first {
                None => first = Some(bits),
                Some(first) => assert!(*first == bits, "{name}: {threads} threads, chunk {chunk}, {pieces:?}"),
            }
        }
    }
}
