//! Collected statistics against sums taken directly, and what they are good for: fixture b in full, the trained model
//! where it is at hand. Never uses the collector's own sums to judge it. Surprising fact: the input of an expert's last
//! matrix is recomputed here from decoded weights, since no probe point shows it row by row.

mod common;

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::process::{Command, Output};

use common::checkpoint::{Checkpoint, fixture};
use common::golden::Golden;
use common::recorder::Recorder;
use common::setup::{Setup, run, setup, shared};
use ds4::models::deepseek41::Config;
use ds4::models::probe::{Feed, MatrixInput, Point};
use ds4::models::weights::{TypeClass, WeightSource};
use ds4::models::{ModelConfig, RunnerOptions};
use ds4::quant::{QuantType, dequantize_row, quantize_row};
use ds4::session::importance::{Collector, ImportanceError, MeanSquares};

const TOKENS: usize = 40;

fn tokens(config: &Config) -> Vec<u32> {
    (0..TOKENS as u32).map(|i| (i * i * 7 + 3 * i + 1) % config.vocab as u32).collect()
}

fn options(chunk: usize) -> RunnerOptions {
    RunnerOptions::new(64, chunk)
}

fn collector(config: &Config) -> Collector {
    Collector::new(config.matrix_inputs(), config.experts)
}

/// Statistics of the fixture's tokens.
fn collect(threads: usize, chunk: usize, lease_max: usize) -> MeanSquares {
    let Setup { config, mut runner, .. } = setup(&fixture("b"), threads, options(chunk), lease_max);
    let mut collector = collector(&config);
    run(&mut *runner, &tokens(&config), &[chunk], Some(&mut collector));
    collector.finish().unwrap()
}

#[test]
fn every_matrix_has_an_input_of_its_width() {
    for name in ["a", "b"] {
        let config = Config::from_metadata(&Checkpoint::open(&fixture(name))).unwrap();
        let inputs = config.matrix_inputs();
        let names: HashSet<&str> = inputs.iter().map(|i| i.tensor.as_str()).collect();
        assert_eq!(names.len(), inputs.len(), "a tensor is listed twice");
        let specs = config.tensor_specs();
        let matrices = specs.iter().filter(|s| s.types == TypeClass::Matrix && s.name != "token_embd.weight");
        let want: BTreeMap<&str, u64> = matrices.map(|s| (s.name.as_str(), s.dims[0])).collect();
        let got: BTreeMap<&str, u64> = inputs.iter().map(|i| (i.tensor.as_str(), i.width as u64)).collect();
        assert_eq!(got, want, "fixture {name}");
    }
}

/// Mean squares by column of rows of `width`.
fn mean_squares(values: &[f32], width: usize) -> Vec<f64> {
    let rows = values.len() / width;
    let column = |c: usize| (0..rows).map(|r| f64::from(values[r * width + c]).powi(2)).sum::<f64>() / rows as f64;
    (0..width).map(column).collect()
}

/// The three matrices of one expert on one row, as far as the last one's input.
fn expert_mid(source: &Checkpoint, config: &Config, layer: usize, expert: usize, x: &[f32]) -> Vec<f32> {
    let product = |part: &str| -> Vec<f64> {
        let bytes = source.bytes(&format!("blk.{layer}.ffn_{part}_exps.weight")).unwrap();
        let weights: Vec<f32> = bytes.as_slice().chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        let matrix = &weights[expert * config.expert_width * config.hidden..][..config.expert_width * config.hidden];
        let dot = |row: &[f32]| row.iter().zip(x).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        matrix.chunks_exact(config.hidden).map(dot).collect()
    };
    let limit = f64::from(config.swiglu_limit);
    let one = |(gate, up): (f64, f64)| {
        let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
        (gate / (1.0 + (-gate).exp()) * up) as f32
    };
    product("gate").into_iter().zip(product("up")).map(one).collect()
}

/// What the statistics of `input` must be, by part.
fn direct(source: &Checkpoint, config: &Config, seen: &Recorder, input: &MatrixInput) -> Vec<Vec<f64>> {
    let point = match input.feed {
        Feed::Rows { point, .. } => return vec![mean_squares(&seen.values[&(point, input.layer)].1, input.width)],
        Feed::Routed(point) => point,
        Feed::ExpertMid => Point::MlpIn,
    };
    let layer = input.layer;
    let mut rows: Vec<Vec<f32>> = vec![Vec::new(); config.experts];
    for pos in 0..TOKENS {
        for &expert in seen.id_row(Point::RouterIds, layer, pos) {
            let x = seen.row(point, layer, pos);
            let expert = expert as usize;
            match input.feed {
                Feed::ExpertMid => rows[expert].extend(expert_mid(source, config, layer, expert, x)),
                _ => rows[expert].extend(x),
            }
        }
    }
    let all = rows.concat();
    rows.iter().map(|r| mean_squares(if r.is_empty() { &all } else { r }, input.width)).collect()
}

#[test]
fn values_are_those_of_a_direct_computation() {
    let source = Checkpoint::open(&fixture("b"));
    let Setup { config, mut runner, .. } = setup(&fixture("b"), 2, options(64), 64);
    let mut seen = Recorder::default();
    run(&mut *runner, &tokens(&config), &[64], Some(&mut seen));
    let got = collect(2, 64, 64);
    assert_eq!(got.len(), config.matrix_inputs().len());
    for input in config.matrix_inputs() {
        let want = direct(&source, &config, &seen, &input);
        let (shape, values) = &got[&input.tensor];
        let is_routed = !matches!(input.feed, Feed::Rows { .. });
        assert_eq!(*shape, if is_routed { vec![config.experts, input.width] } else { vec![input.width] });
        let scale = want.iter().flatten().fold(0.0, |a: f64, b| a.max(*b));
        assert!(scale > 0.0, "{} saw zeros only", input.tensor);
        for (i, (got, want)) in values.iter().zip(want.iter().flatten()).enumerate() {
            // The recomputed products differ in the last bits from those of the model.
            let error = (f64::from(*got) - want).abs();
            assert!(error <= 1e-5 * want + 1e-9 * scale, "{} at {i}: {got}, expected {want}", input.tensor);
        }
    }
}

#[test]
fn threads_chunks_and_leases_change_no_bit() {
    let want = collect(1, 64, 64);
    for (threads, chunk, lease_max) in [(2, 64, 64), (2, 1, 3), (1, 7, 3)] {
        let got = collect(threads, chunk, lease_max);
        for (tensor, (_, values)) in &want {
            let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&got[tensor].1), bits(values), "{tensor}, {threads} threads, chunks of {chunk}");
        }
    }
}

#[test]
fn unseen_experts_take_the_mean_of_their_layer() {
    let Setup { config, mut runner, .. } = setup(&fixture("b"), 1, options(1), 64);
    let (mut collector, mut seen) = (collector(&config), Recorder::default());
    run(&mut *runner, &[5, 5], &[2], Some(&mut seen));
    runner.reset();
    run(&mut *runner, &[5, 5], &[2], Some(&mut collector));
    let (layers, experts, chosen) = config.expert_shape();
    assert_eq!(collector.unseen_experts(), (layers * (experts - chosen), layers * experts));
    let means = collector.finish().unwrap();
    for layer in 0..layers {
        let (shape, values) = &means[&format!("blk.{layer}.ffn_down_exps.weight")];
        let rows: Vec<&[f32]> = values.chunks_exact(shape[1]).collect();
        let ids: Vec<usize> = seen.id_row(Point::RouterIds, layer, 0).iter().map(|id| *id as usize).collect();
        assert!(ids.iter().any(|a| rows[*a] != rows[ids[0]]), "experts of one token differ");
        let mean = |column| ids.iter().map(|id| f64::from(rows[*id][column])).sum::<f64>() / chosen as f64;
        let want: Vec<f64> = (0..shape[1]).map(mean).collect();
        for expert in (0..experts).filter(|e| !ids.contains(e)) {
            for (column, (got, want)) in rows[expert].iter().zip(&want).enumerate() {
                let error = (f64::from(*got) - want).abs();
                assert!(
                    error <= 1e-6 * want,
                    "layer {layer}, expert {expert}, column {column}: {got}, expected {want}"
                );
            }
        }
    }
}

#[test]
fn nothing_seen_and_nonsense_are_errors() {
    let config = Config::from_metadata(&Checkpoint::open(&fixture("b"))).unwrap();
    let error = collector(&config).finish().unwrap_err();
    assert!(matches!(&error, ImportanceError::Unseen { tensor } if tensor.starts_with("blk.0.")), "{error}");
    let input = |feed| MatrixInput { tensor: "x".into(), layer: 0, feed, width: 2 };
    let rows = Feed::Rows { point: Point::MlpIn, slices: 2 };
    let mut collector = Collector::new(vec![input(rows)], 4);
    ds4::models::probe::Probe::values(&mut collector, Point::MlpIn, 0, 0, 4, &[1.0, 2.0, f32::NAN, 0.0]);
    assert!(matches!(collector.finish().unwrap_err(), ImportanceError::NotFinite { .. }));
}

fn ds4_gguf(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ds4-gguf")).args(args).output().unwrap()
}

fn check(args: &[&str], code: i32, text: &str) {
    let out = ds4_gguf(args);
    let stderr = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(code), "{args:?}: {stderr}");
    assert!(stderr.contains(text) && !stderr.contains("panicked"), "{args:?} lacks {text:?}:\n{stderr}");
}

#[test]
fn the_command_writes_the_same_file_each_time_and_convert_takes_it() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (model, text, first, second) = (at("b.gguf"), at("text.txt"), at("1.safetensors"), at("2.safetensors"));
    let b = fixture("b");
    let b = b.to_str().unwrap();
    check(&["convert", b, "--recipe", "native", "-o", &model], 0, "wrote");
    std::fs::write(&text, "It was a dark evening, and the old captain rushed along the road. ".repeat(4)).unwrap();
    let imatrix = ["imatrix", &model, "--text", &text, "--ctx", "32"];
    let with = |more: &[&'static str], output: &String| -> Vec<String> {
        imatrix.iter().chain(more).map(|a| (*a).to_owned()).chain(["-o".into(), output.clone()]).collect()
    };
    let run = |args: Vec<String>, code, text| check(&args.iter().map(String::as_str).collect::<Vec<_>>(), code, text);
    run(with(&["-t", "1"], &first), 0, "windows of 32; perplexity of the text");
    run(with(&["-t", "2", "--ssd-streaming"], &second), 0, "experts were never chosen");
    assert_eq!(std::fs::read(&first).unwrap(), std::fs::read(&second).unwrap());
    run(with(&[], &first), 1, "exists already; use --force");
    run(with(&["--force"], &"/dev/null".into()), 1, "is not a regular file");
    run(with(&["--tokens", "9", "--force"], &first), 0, "from 9 tokens");
    assert_ne!(std::fs::read(&first).unwrap(), std::fs::read(&second).unwrap());
    let output = at("with.gguf");
    let convert = ["convert", b, "--recipe", "native", "--set", "gate_up=MXFP4", "-o", &output, "--imatrix", &second];
    check(&convert, 0, "tensors were encoded with importance");

    std::fs::write(&text, "").unwrap();
    let third = at("3.safetensors");
    run(with(&[], &third), 2, "prompt is empty");
    std::fs::write(&text, [0xff, 0xfe]).unwrap();
    run(with(&[], &third), 1, "is not UTF-8 text");
    // Found before anything is read.
    run(with(&[], &"/nowhere/x".into()), 1, "no folder /nowhere");
    check(&["imatrix", b, "--text", &text, "-o", &third], 1, "");
    assert!(!Path::new(&third).exists());
    let mut left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["1.safetensors", "2.safetensors", "b.gguf", "text.txt", "with.gguf"]);
}

/// Squared error of `values` after a round trip, weighed by the importance of their columns.
fn weighted_error(ty: QuantType, values: &[f32], guide: Option<&[f32]>, judge: &[f32]) -> f64 {
    let mut bytes = vec![0; ty.row_bytes(judge.len() as u64).unwrap() as usize];
    let mut decoded = vec![0.0; judge.len()];
    let mut sum = 0.0;
    for row in values.chunks_exact(judge.len()) {
        quantize_row(ty, row, guide, &mut bytes).unwrap();
        dequantize_row(ty, &bytes, &mut decoded).unwrap();
        let errors = row.iter().zip(&decoded).zip(judge);
        sum += errors.map(|((a, b), w)| f64::from(a - b).powi(2) * f64::from(*w)).sum::<f64>();
    }
    sum
}

#[test]
fn statistics_of_one_text_lower_the_error_on_another() {
    let Some(model) = shared("models/ds41-mini") else { return };
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let native = at("native.gguf");
    check(&["convert", model.to_str().unwrap(), "--recipe", "native", "-o", &native], 0, "wrote");
    let statistics = |text: &Path, name: &str| {
        let text = text.to_str().unwrap();
        check(&["imatrix", &native, "--text", text, "--tokens", "4096", "-o", &at(name)], 0, "wrote");
        Golden::open(&folder.path().join(name))
    };
    let guide = statistics(&root.join("models/ds41-mini-calibration.txt"), "guide");
    let judge = statistics(&model.join("heldout.txt"), "judge");
    let source = Checkpoint::open(&model);
    for (part, ty) in [("gate", QuantType::IQ2_XXS), ("up", QuantType::IQ2_XXS), ("down", QuantType::Q2_K)] {
        let tensor = format!("blk.5.ffn_{part}_exps.weight");
        let (shape, bytes) = (source.shape(&tensor).unwrap(), source.bytes(&tensor).unwrap());
        let values: Vec<f32> = bytes.as_slice().chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        let (guide, judge) = (guide.get(&tensor), judge.get(&tensor));
        let columns = shape.dims[0] as usize;
        let (mut plain, mut guided) = (0.0, 0.0);
        for (expert, values) in values.chunks_exact(values.len() / shape.dims[2] as usize).enumerate() {
            let part = expert * columns..(expert + 1) * columns;
            let (guide, judge) = (&guide.f32s[part.clone()], &judge.f32s[part]);
            plain += weighted_error(ty, values, None, judge);
            guided += weighted_error(ty, values, Some(guide), judge);
        }
        println!("{tensor} as {ty}: weighted error {guided:.5} with importance, {plain:.5} without");
        assert!(guided < 0.99 * plain, "{tensor}: {guided} is not clearly below {plain}");
    }
}
