//! Conversion judged from outside: values read back are those of the checkpoint, constants those of the fixtures, and
//! every inconsistent checkpoint is refused by name. Owns a naive decoder of its own; never calls the converter's.
//! Surprising fact: the naive decoder holds whole tensors, which the converter never does.

mod checkpoint;

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use checkpoint::{Checkpoint, Stored, fixture, wide};
use ds4::quant::{QuantType, dequantize_row};
use ds4::storage::convert::{
    self, ALIGNMENT, BaseRecipe, ConvertError, Importance, Options, Recipe, Summary, TensorDifference, write_importance,
};
use ds4::storage::gguf::{GgufFile, Value};
use ds4::storage::layout::Layout;
use safetensors::Dtype;
use serde_json::json;

fn run(folder: &Path, output: &Path, recipe: Recipe, importance: Option<&Importance>) -> Result<Summary, ConvertError> {
    let options = Options { recipe, importance, output, force: true, alignment: ALIGNMENT };
    convert::convert(folder, &options, &mut |_, _| ControlFlow::Continue(()))
}

fn set(base: BaseRecipe, settings: &[&str]) -> Recipe {
    Recipe::base(base).with(&settings.iter().map(|s| s.to_string()).collect::<Vec<_>>()).unwrap()
}

/// A scratch folder with a converted file in it.
struct Made {
    folder: tempfile::TempDir,
    file: GgufFile,
    bytes: Vec<u8>,
}

fn made(input: &Path, recipe: Recipe) -> Made {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.gguf");
    run(input, &path, recipe, None).unwrap();
    Made { file: GgufFile::open(&path).unwrap(), bytes: std::fs::read(&path).unwrap(), folder }
}

impl Made {
    fn raw(&self, name: &str) -> &[u8] {
        let t = self.file.tensor(name).unwrap_or_else(|| panic!("no {name}"));
        &self.bytes[t.offset as usize..(t.offset + t.bytes) as usize]
    }

    fn values(&self, name: &str) -> Vec<f32> {
        let t = self.file.tensor(name).unwrap();
        let (columns, rows) = (t.columns() as usize, t.rows() as usize);
        let mut out = vec![0f32; rows * columns];
        let row_bytes = t.bytes as usize / rows;
        for (row, out) in self.raw(name).chunks(row_bytes).zip(out.chunks_mut(columns)) {
            dequantize_row(t.ty, row, out).unwrap();
        }
        out
    }
}

fn e8m0(code: u8) -> f32 {
    2f64.powi(i32::from(code) - 127) as f32
}

fn e4m3(code: u8) -> f32 {
    let (e, m) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let v = if e == 0 { m / 8.0 * 2f64.powi(-6) } else { (1.0 + m / 8.0) * 2f64.powi(e - 7) };
    if code & 0x80 == 0 { v as f32 } else { -v as f32 }
}

fn e2m1(code: u8) -> f32 {
    let v = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    if code & 8 == 0 { v } else { -v }
}

/// Values of a checkpoint tensor, one way for each storage type.
fn naive(tensors: &BTreeMap<String, Stored>, name: &str) -> Vec<f32> {
    let t = tensors.get(name).unwrap_or_else(|| panic!("no {name}"));
    let scale = || &tensors[&name.replace(".weight", ".scale")];
    match t.dtype {
        Dtype::F32 => t.bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
        Dtype::BF16 => {
            t.bytes.chunks(2).map(|b| f32::from_bits(u32::from(b[1]) << 24 | u32::from(b[0]) << 16)).collect()
        }
        Dtype::F8_E4M3 => {
            let (columns, s) = (t.shape[1], scale());
            let value = |(i, code): (usize, &u8)| {
                let (row, column) = (i / columns, i % columns);
                e4m3(*code) * e8m0(s.bytes[row / 32 * s.shape[1] + column / 32])
            };
            t.bytes.iter().enumerate().map(value).collect()
        }
        Dtype::I8 => {
            let s = scale();
            let value = |i: usize| e2m1(t.bytes[i / 2] >> (4 * (i % 2))) * e8m0(s.bytes[i / 32]);
            (0..t.bytes.len() * 2).map(value).collect()
        }
        other => panic!("{name}: {other}"),
    }
}

/// Checkpoint name of a GGUF tensor, without the layer prefix; `#` is the expert.
fn checkpoint_name(stem: &str) -> String {
    let plain = [
        ("attn_sinks.weight", "attn.attn_sink"),
        ("attn_q_a_norm.weight", "attn.q_norm.weight"),
        ("attn_kv_a_norm.weight", "attn.kv_norm.weight"),
        ("attn_q_a.weight", "attn.wq_a.weight"),
        ("attn_q_b.weight", "attn.wq_b.weight"),
        ("attn_kv.weight", "attn.wkv.weight"),
        ("attn_output_a.weight", "attn.wo_a.weight"),
        ("attn_output_b.weight", "attn.wo_b.weight"),
        ("attn_compressor_kv.weight", "attn.compressor.wkv.weight"),
        ("attn_compressor_gate.weight", "attn.compressor.wgate.weight"),
        ("attn_compressor_norm.weight", "attn.compressor.norm.weight"),
        ("indexer.attn_k.weight", "attn.indexer.wk.weight"),
        ("indexer.k_norm.weight", "attn.indexer.k_norm.weight"),
        ("indexer.attn_q_b.weight", "attn.indexer.wq_b.weight"),
        ("indexer.proj.weight", "attn.indexer.weights_proj.weight"),
        ("engram_q_norm.weight", "engram.q_weight"),
        ("engram_k_norm.weight", "engram.k_weight"),
        ("engram_kv.weight", "engram.wkv.weight"),
        ("engram_embd.weight", "engram.embed.weight"),
        ("ffn_gate_inp.weight", "ffn.gate.weight"),
        ("exp_probs_b.bias", "ffn.gate.bias"),
        ("ffn_gate_shexp.weight", "ffn.shared_experts.w1.weight"),
        ("ffn_up_shexp.weight", "ffn.shared_experts.w3.weight"),
        ("ffn_down_shexp.weight", "ffn.shared_experts.w2.weight"),
        ("ffn_gate_exps.weight", "ffn.experts.#.w1.weight"),
        ("ffn_up_exps.weight", "ffn.experts.#.w3.weight"),
        ("ffn_down_exps.weight", "ffn.experts.#.w2.weight"),
        ("attn_norm.weight", "attn_norm.weight"),
        ("ffn_norm.weight", "ffn_norm.weight"),
    ];
    match plain.iter().find(|(gguf, _)| *gguf == stem) {
        Some((_, found)) => found.to_string(),
        // The mixing tensors only lose their ending.
        None => stem.strip_suffix(".weight").expect(stem).to_owned(),
    }
}

/// All values of the GGUF tensor in the checkpoint.
fn expected(c: &Checkpoint, name: &str, experts: u64) -> Vec<f32> {
    match name {
        "token_embd.weight" => return naive(&c.tensors, "embed.weight"),
        "output.weight" => return naive(&c.tensors, "head.weight"),
        "output_norm.weight" => return naive(&c.tensors, "norm.weight"),
        _ => {}
    }
    let (layer, stem) = name.strip_prefix("blk.").unwrap().split_once('.').unwrap();
    let source = format!("layers.{layer}.{}", checkpoint_name(stem));
    if !source.contains('#') {
        return naive(&c.tensors, &source);
    }
    (0..experts).flat_map(|e| naive(&c.tensors, &source.replace('#', &e.to_string()))).collect()
}

fn same_bits(name: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{name}");
    if let Some(i) = (0..found.len()).find(|&i| found[i].to_bits() != expected[i].to_bits()) {
        panic!("{name}: value {i} is {}, expected {}", found[i], expected[i]);
    }
}

/// Converts natively and checks every value of every tensor.
fn check_native(input: &Path) -> Made {
    let c = Checkpoint::load(input);
    let m = made(input, Recipe::base(BaseRecipe::Native));
    let experts = u64::from(m.file.metadata().u32("deepseek41.n_routed_experts").unwrap());
    for t in m.file.tensors() {
        if t.ty.is_numeric() {
            same_bits(&t.name, &m.values(&t.name), &expected(&c, &t.name, experts));
            continue;
        }
        let layer = t.name.split('.').nth(1).unwrap();
        let codes = &c.tensors[&format!("layers.{layer}.engram.embed.weight")];
        let scales = &c.tensors[&format!("layers.{layer}.engram.embed.scale")].bytes;
        let width = codes.shape[1];
        let rows: Vec<u8> =
            codes.bytes.chunks(width).zip(scales.chunks(width / 32)).flat_map(|(c, s)| [c, s].concat()).collect();
        assert_eq!(m.raw(&t.name), rows, "{}", t.name);
    }
    // Every tensor of the checkpoint has its place: scales in their weights, experts stacked.
    let stored = c.tensors.keys().filter(|k| !k.ends_with(".scale")).count();
    let stacked: usize =
        Layout::from_gguf(&m.file).unwrap().experts.iter().map(|l| 3 * usize::from(l.experts) - 3).sum();
    assert_eq!(m.file.tensors().len() + stacked, stored);
    m
}

#[test]
fn native_keeps_every_value_of_a() {
    let m = check_native(&fixture("a"));
    assert!(!m.file.metadata().contains("deepseek41.engram.layer_ids"));
    assert!(!m.file.metadata().contains("tokenizer.ggml.tokens"));
    assert_eq!(m.file.tensor("blk.0.ffn_down_exps.weight").unwrap().ty, QuantType::BF16);
}

#[test]
fn native_keeps_every_value_of_b() {
    let m = check_native(&fixture("b"));
    let meta = m.file.metadata();
    assert_eq!(m.file.tensor("blk.0.ffn_down_exps.weight").unwrap().ty, QuantType::MXFP4);
    assert_eq!(m.file.tensor("blk.0.attn_q_a.weight").unwrap().ty, QuantType::BF16);
    assert_eq!(m.file.tensors().last().unwrap().name, "blk.3.engram_embd.weight");
    assert_eq!(meta.str("general.architecture"), Ok("deepseek41"));
    assert_eq!(meta.u32("deepseek41.rope_theta"), Ok(10_000));
    assert_eq!(meta.f32("deepseek41.rms_norm_eps"), Ok(1e-20));
    assert_eq!(meta.f32("deepseek41.rope_scaling.original_max_position_embeddings"), Ok(64.0));
    assert_eq!(meta.str("deepseek41.topk_method"), Ok("noaux_tc"));
    assert_eq!(meta.u32_array("deepseek41.compress_ratios"), Ok(vec![0, 2, 1, 1, 0]));
    assert_eq!(
        meta.str("deepseek41.config").unwrap(),
        std::fs::read_to_string(fixture("b").join("config.json")).unwrap()
    );
    let engram: serde_json::Value =
        serde_json::from_slice(&std::fs::read(fixture("b").join("engram.json")).unwrap()).unwrap();
    assert_eq!(json!(meta.u32_array("deepseek41.engram.token_map").unwrap()), engram["token_map"]);
    assert_eq!(meta.u64_array("deepseek41.engram.multipliers").unwrap()[4], 5_578_124_970_612_189);
    assert_eq!(meta.u64_array("deepseek41.engram.primes").unwrap().len(), 24);
    assert_eq!(meta.str("deepseek41.engram.encoding"), Ok("e4m3_e8m0_32_row33"));
    assert_eq!(meta.u32("deepseek41.engram.pad_id"), Ok(2));
    let tokens = meta.str_array("tokenizer.ggml.tokens").unwrap();
    assert_eq!(
        (tokens.len(), tokens.get(635), tokens.get(2)),
        (640, Some("<think>"), Some("<\u{ff5c}\u{2581}pad\u{2581}\u{ff5c}>"))
    );
    let types = meta.i32_array("tokenizer.ggml.token_type").unwrap();
    assert_eq!((types[0], types[3], types[639]), (3, 1, 3));
    assert_eq!(meta.str_array("tokenizer.ggml.merges").unwrap().get(1), Some("\u{120} \u{120}"));
    assert_eq!(meta.u32("tokenizer.ggml.eos_token_id"), Ok(1));
    assert_eq!(meta.bool("tokenizer.ggml.add_bos_token"), Ok(true));
}

#[test]
fn constants_are_derived_when_engram_json_is_absent() {
    let scratch = tempfile::tempdir().unwrap();
    // The same folder name, because it becomes general.name.
    let folder = scratch.path().join("b");
    let mut c = Checkpoint::load(&fixture("b"));
    c.files.remove("engram.json");
    c.save(&folder);
    let (derived, given) =
        (made(&folder, Recipe::base(BaseRecipe::Native)), made(&fixture("b"), Recipe::base(BaseRecipe::Native)));
    for (key, value) in given.file.metadata().iter().filter(|(k, _)| k.starts_with("deepseek41.engram.")) {
        assert_eq!(derived.file.metadata().get(key), Some(value), "{key}");
    }
    c.files.remove("tokenizer.json");
    c.save(&folder);
    std::fs::remove_file(folder.join("tokenizer.json")).unwrap();
    refused_folder(&folder, "tokenizer.json: is missing, and there is no engram.json");
}

#[test]
fn the_bytes_depend_on_the_input_alone() {
    let scratch = tempfile::tempdir().unwrap();
    let (single, sharded) = (scratch.path().join("one/x"), scratch.path().join("many/x"));
    wide(3).save(&single);
    wide(3).save_sharded(&sharded, 3);
    let in_pool = |threads: usize, input: &PathBuf| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| made(input, Recipe::base(BaseRecipe::Q2)).bytes)
    };
    let first = in_pool(1, &single);
    assert_eq!(first, in_pool(1, &single));
    assert_eq!(first, in_pool(4, &single));
    assert_eq!(first, in_pool(2, &sharded));
}

#[test]
fn recipes_choose_types() {
    let scratch = tempfile::tempdir().unwrap();
    let input = scratch.path().join("x");
    wide(2).save(&input);
    let ty = |m: &Made, name: &str| m.file.tensor(name).unwrap().ty;
    let q2 = made(&input, Recipe::base(BaseRecipe::Q2));
    assert_eq!(ty(&q2, "blk.0.ffn_gate_exps.weight"), QuantType::IQ2_XXS);
    assert_eq!(ty(&q2, "blk.1.ffn_down_exps.weight"), QuantType::Q2_K);
    assert_eq!(ty(&q2, "output.weight"), QuantType::Q8_0);
    assert_eq!(ty(&q2, "token_embd.weight"), QuantType::F16);
    assert_eq!(ty(&q2, "blk.1.engram_kv.weight"), QuantType::F16);
    assert_eq!(ty(&q2, "blk.1.ffn_gate_inp.weight"), QuantType::F32);
    assert_eq!(ty(&q2, "blk.1.engram_embd.weight"), QuantType::I8);
    let mixed =
        made(&input, set(BaseRecipe::Q4, &["attention=Q4_K", "head=q6_k", "shared=Q3_K", "down=native", "ngram=q8_0"]));
    assert_eq!(ty(&mixed, "blk.0.attn_output_b.weight"), QuantType::Q4_K);
    assert_eq!(ty(&mixed, "output.weight"), QuantType::Q6_K);
    assert_eq!(ty(&mixed, "blk.0.ffn_up_shexp.weight"), QuantType::Q3_K);
    assert_eq!(ty(&mixed, "blk.0.ffn_down_exps.weight"), QuantType::MXFP4);
    assert_eq!(ty(&mixed, "blk.1.engram_kv.weight"), QuantType::Q8_0);
    let text = mixed.file.metadata().str("deepseek41.quantization").unwrap();
    assert_eq!(
        text,
        "Q4_K gate/up; native down; Q4_K attention; Q3_K shared; Q6_K head; F16 embedding/indexer/mixing; Q8_0 ngram"
    );
    // Errors stay in the order of magnitude that the types allow.
    let native = made(&input, Recipe::base(BaseRecipe::Native));
    for (name, limit) in [("output.weight", 1e-3), ("blk.0.attn_q_a.weight", 2e-2), ("blk.1.engram_kv.weight", 1e-4)] {
        let (x, y) = (native.values(name), mixed.values(name));
        let error: f64 = x.iter().zip(&y).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        let energy: f64 = x.iter().map(|a| f64::from(*a).powi(2)).sum();
        assert!(error > 0.0 && error / energy < limit, "{name}: {}", error / energy);
    }
}

#[test]
fn quantising_a_native_file_equals_converting() {
    let scratch = tempfile::tempdir().unwrap();
    let input = scratch.path().join("x");
    wide(2).save(&input);
    let native = made(&input, Recipe::base(BaseRecipe::Native));
    let direct = made(&input, Recipe::base(BaseRecipe::Q4));
    let output = scratch.path().join("q.gguf");
    let options = Options {
        recipe: Recipe::base(BaseRecipe::Q4),
        importance: None,
        output: &output,
        force: false,
        alignment: ALIGNMENT,
    };
    convert::quantize(&native.file, &options, &mut |_, _| ControlFlow::Continue(())).unwrap();
    assert_eq!(std::fs::read(&output).unwrap(), direct.bytes);
    let again = convert::quantize(&native.file, &options, &mut |_, _| ControlFlow::Continue(()));
    assert!(again.unwrap_err().to_string().contains("exists already"));
}

#[test]
fn a_stopped_conversion_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("x.gguf");
    let options = Options {
        recipe: Recipe::base(BaseRecipe::Native),
        importance: None,
        output: &output,
        force: false,
        alignment: 64,
    };
    let mut calls = 0;
    let stopped = convert::convert(&fixture("b"), &options, &mut |done, total| {
        calls += 1;
        assert!(done <= total);
        if calls == 20 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert!(matches!(stopped, Err(ConvertError::Stopped)));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn importance_changes_the_codes_and_must_match() {
    let scratch = tempfile::tempdir().unwrap();
    let (input, path) = (scratch.path().join("x"), scratch.path().join("i.safetensors"));
    wide(2).save(&input);
    const GATE: &str = "blk.0.ffn_gate_exps.weight";
    // Expert 0 never ran; expert 1 cares for its first inputs only.
    let seen = (0..512)
        .map(|i| {
            if (256..272).contains(&i) {
                100.0
            } else if i < 256 {
                0.0
            } else {
                1e-3
            }
        })
        .collect();
    let write = |name: &str, shape: Vec<usize>, values: Vec<f32>| {
        write_importance(&path, &[(name.to_owned(), (shape, values))].into(), &[("tokens", "7".into())]).unwrap();
        Importance::open(&path)
    };
    let importance = write(GATE, vec![2, 256], seen).unwrap();
    let output = scratch.path().join("i.gguf");
    let summary = run(&input, &output, Recipe::base(BaseRecipe::Q2), Some(&importance)).unwrap();
    assert_eq!(summary.with_importance, 1);
    let (plain, file) = (made(&input, Recipe::base(BaseRecipe::Q2)), GgufFile::open(&output).unwrap());
    assert_eq!(file.metadata().str("deepseek41.calibration"), Ok("imatrix"));
    assert_eq!(file.metadata().str("quantize.imatrix.file"), Ok("i.safetensors"));
    let bytes = std::fs::read(&output).unwrap();
    let gate = file.tensor(GATE).unwrap();
    let (start, half) = (gate.offset as usize, gate.bytes as usize / 2);
    let (before, after) = (plain.raw(GATE), &bytes[start..start + 2 * half]);
    assert!(before[..half] == after[..half], "an expert nobody saw is encoded without importance");
    assert!(before[half..] != after[half..], "importance changes the codes");

    let refused = |importance: Result<Importance, ConvertError>, text: &str| {
        let error = importance.and_then(|i| run(&input, &output, Recipe::base(BaseRecipe::Q2), Some(&i))).unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
    };
    refused(write("blk.9.ffn_gate_exps.weight", vec![2, 256], vec![1.0; 512]), "is no tensor of this model");
    refused(write(GATE, vec![1, 512], vec![1.0; 512]), "has shape [1, 512], the tensor needs [2, 256]");
    refused(write(GATE, vec![2, 256], vec![-1.0; 512]), "is not a mean of squares");
    refused(write(GATE, vec![2, 256], vec![f32::NAN; 512]), "is not a mean of squares");
    refused(Importance::open(&input.join("model.safetensors")), "format is absent, expected ds4-importance-1");
}

#[test]
fn comparison_measures_what_differs() {
    let scratch = tempfile::tempdir().unwrap();
    let input = scratch.path().join("x");
    let mut c = wide(2);
    c.save(&input);
    let first = made(&input, Recipe::base(BaseRecipe::Native));
    let same = made(&input, Recipe::base(BaseRecipe::Native));
    let compare =
        |a: &Made, b: &Made| convert::compare(&a.file, &b.file, &mut |_, _| ControlFlow::Continue(())).unwrap();
    let equal = compare(&first, &same);
    assert!(equal.differences.is_empty() && equal.metadata.is_empty() && equal.within(0.0));
    let wider = made(&input, set(BaseRecipe::Native, &["attention=F32"]));
    let found = compare(&first, &wider);
    assert!(found.within(0.0) && !found.differences.is_empty());
    assert!(found.differences.iter().all(|d| matches!(d, TensorDifference::Type { .. })));
    assert!(found.metadata.iter().any(|m| m.key == "deepseek41.quantization" && m.is_provenance));
    // One value of the head, one byte of the table, one key.
    c.tensors.get_mut("head.weight").unwrap().bytes[1] ^= 0x80;
    c.tensors.get_mut("layers.1.engram.embed.weight").unwrap().bytes[5] ^= 1;
    c.set("sliding_window", json!(47));
    c.save(&input);
    let found = compare(&first, &made(&input, Recipe::base(BaseRecipe::Native)));
    let value = first.values("output.weight")[0];
    match &found.differences[..] {
        [TensorDifference::Values { name, max_abs, nmse, .. }, TensorDifference::Raw { name: raw, .. }] => {
            assert_eq!((name.as_str(), raw.as_str()), ("output.weight", "blk.1.engram_embd.weight"));
            assert_eq!(*max_abs, 2.0 * f64::from(value.abs()));
            assert!(*nmse > 0.0 && *nmse < 1.0);
        }
        other => panic!("{other:?}"),
    }
    assert!(found.metadata.iter().any(|m| m.key == "deepseek41.sliding_window" && !m.is_provenance));
    assert!(!found.within(1.0));
    drop(first.folder);
}

fn refused_folder(folder: &Path, text: &str) {
    let output = folder.join("never.gguf");
    let error = run(folder, &output, Recipe::base(BaseRecipe::Native), None).expect_err(text).to_string();
    assert!(error.contains(text), "{error:?} lacks {text:?}");
    assert!(!output.exists());
}

/// Changes the fixture b and expects the conversion to fail.
fn refused(change: impl FnOnce(&mut Checkpoint), text: &str) {
    let scratch = tempfile::tempdir().unwrap();
    let mut c = Checkpoint::load(&fixture("b"));
    change(&mut c);
    c.save(scratch.path());
    refused_folder(scratch.path(), text);
}

#[test]
fn inconsistent_configurations_are_refused() {
    refused(|c| c.config["model_type"] = json!("llama"), "model_type is llama");
    refused(|c| c.set("head_dim", json!(null)), "config.json: head_dim is missing");
    refused(|c| c.set("head_dim", json!(-1)), "config.json: head_dim is -1, expected a whole number");
    refused(|c| c.set("head_dim", json!(1.5)), "head_dim is 1.5");
    refused(|c| c.set("rms_norm_eps", json!("small")), "rms_norm_eps is \"small\"");
    refused(|c| c.set("gate_temp", json!(2.0)), "gate_temp is 2.0; only 1.0 can be stored");
    refused(|c| c.set("q_head_norm", json!(true)), "q_head_norm is true");
    refused(|c| c.set("compress_ratios", json!([0, 2])), "compress_ratios has 2 entries for 5 layers");
    refused(|c| c.set("rope_scaling", json!({"factor": 1})), "rope_scaling.beta_fast is missing");
    refused(|c| c.config["quantization_config"] = json!({}), "quantization_config.weight_block_size");
    refused(|c| c.set("n_routed_experts", json!(u32::MAX)), "layers.0.ffn.experts.8.w1.weight is missing");
    refused(|c| c.set("n_routed_experts", json!(9)), "layers.0.ffn.experts.8.w1.weight is missing");
    refused(
        |c| c.set("hidden_size", json!(64)),
        "blk.0.ffn_gate_exps.weight has dimensions [128, 64, 8], expected [64, 64, 8]",
    );
    refused(|c| c.set("kv_source_layer_ids", json!([1])), "layers.2.attn.compressor.norm.weight has no place");
}

#[test]
fn inconsistent_tables_are_refused() {
    fn engram(change: impl FnOnce(&mut serde_json::Value)) -> impl FnOnce(&mut Checkpoint) {
        |c| {
            let mut json: serde_json::Value = serde_json::from_slice(&c.files["engram.json"]).unwrap();
            change(&mut json);
            c.files.insert("engram.json".into(), json.to_string().into_bytes());
        }
    }
    refused(
        engram(|e| e["primes"][1][0][0] = json!(588)),
        "the primes of layer 3 sum to 7399, the table has 7398 rows",
    );
    refused(engram(|e| e["primes"][0][0][0] = json!("x")), "primes must hold whole numbers only");
    refused(engram(|e| e["multipliers"][0][0] = json!(4)), "multiplier 4 is even or above");
    refused(engram(|e| e["multipliers"][0][0] = json!(u64::MAX)), "multiplier 18446744073709551615 is even or above");
    refused(engram(|e| e["token_map"] = json!([0, 1])), "the token map has 2 entries for 640 tokens");
    refused(engram(|e| e["token_map"][5] = json!(5000)), "5001 normalised tokens, but config.json says 489");
    refused(engram(|e| e["pad_compressed_id"] = json!(489)), "pad id 489 is no normalised token");
    refused(engram(|e| e["token_map"][5] = json!(-1)), "token_map must hold whole numbers only");
    refused(|c| c.set("engram_num_embeddings", json!([6480])), "24 primes and 1 row counts for 2 layers");
    refused(
        |c| c.tensors.get_mut("layers.1.engram.embed.weight").unwrap().bytes[40] = 0x7f,
        "row 1, column 8: value NaN in an n-gram row",
    );
    refused(
        |c| c.tensors.get_mut("layers.1.engram.embed.scale").unwrap().bytes[2] = 0xff,
        "row 2, column 0: value NaN as a scale",
    );
}

#[test]
fn inconsistent_tensors_are_refused() {
    fn tensor(name: &'static str, change: impl FnOnce(&mut Stored)) -> impl FnOnce(&mut Checkpoint) {
        move |c| change(c.tensors.get_mut(name).unwrap())
    }
    const Q_A: &str = "layers.0.attn.wq_a.weight";
    refused(|c| drop(c.tensors.remove("norm.weight")), "checkpoint tensor norm.weight is missing");
    refused(|c| drop(c.tensors.remove("layers.0.attn.wq_a.scale")), "layers.0.attn.wq_a.scale is missing");
    refused(tensor(Q_A, |t| t.shape = vec![128, 64]), "wq_a.scale has shape [2, 4], expected [4, 2]");
    refused(tensor(Q_A, |t| t.shape = vec![2, 32, 128]), "expected one or two dimensions");
    refused(tensor(Q_A, |t| t.dtype = Dtype::F8_E5M2), "wq_a.weight has type F8_E5M2");
    refused(tensor(Q_A, |t| t.dtype = Dtype::I8), "expected F8_E4M3 or, for routed experts, packed FP4");
    refused(tensor("layers.0.attn.wq_a.scale", |t| t.dtype = Dtype::U8), "wq_a.scale has type U8, expected F8_E8M0");
    refused(tensor("norm.weight", |t| t.dtype = Dtype::I16), "norm.weight has type I16");
    refused(tensor("layers.0.ffn.experts.3.w2.weight", |t| t.shape = vec![64, 64]), "experts.3.w2.scale has shape");
    refused(tensor(Q_A, |t| t.bytes[130] = 0xff), "blk.0.attn_q_a.weight, row 1, column 2: value NaN in the source");
    refused(
        tensor("layers.0.ffn.experts.1.w1.scale", |t| t.bytes[5] = 0xff),
        "blk.0.ffn_gate_exps.weight, row 65, column 32: value NaN",
    );
    // 2^-9 * 2^-127 lies below what BF16 can hold exactly.
    refused(
        |c| {
            c.tensors.get_mut(Q_A).unwrap().bytes[0] = 1;
            c.tensors.get_mut("layers.0.attn.wq_a.scale").unwrap().bytes[0] = 0;
        },
        "is not exact in BF16",
    );
    refused(
        |c| {
            let extra = c.tensors["norm.weight"].clone();
            c.tensors.insert("layers.4.attn.extra.weight".into(), extra);
        },
        "layers.4.attn.extra.weight has no place in the model",
    );
}

#[test]
fn draft_stages_and_vision_are_left_out() {
    let scratch = tempfile::tempdir().unwrap();
    let mut c = wide(2);
    for name in ["mtp.0.norm.weight", "vision.patch.weight", "layers.2.attn_norm.weight"] {
        let extra = c.tensors["norm.weight"].clone();
        c.tensors.insert(name.into(), extra);
    }
    // Image routing bias: kept where it is present.
    let bias = c.tensors["layers.0.ffn.gate.bias"].clone();
    c.tensors.insert("layers.0.ffn.gate.bias_vl".into(), bias);
    c.save(scratch.path());
    let output = scratch.path().join("x.gguf");
    let summary = run(scratch.path(), &output, Recipe::base(BaseRecipe::Native), None).unwrap();
    assert_eq!(summary.left_out, 3);
    let file = GgufFile::open(&output).unwrap();
    assert!(file.tensor("blk.0.exp_probs_b_vl.bias").is_some() && file.tensor("blk.1.exp_probs_b_vl.bias").is_none());
    assert_eq!(file.metadata().get("general.alignment"), Some(&Value::U32(ALIGNMENT)));
}

#[test]
fn damaged_folders_are_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path();
    refused_folder(folder, "config.json: is missing");
    wide(2).save(folder);
    let weights = folder.join("model.safetensors");
    let whole = std::fs::read(&weights).unwrap();
    let damage = |bytes: &[u8], text: &str| {
        std::fs::write(&weights, bytes).unwrap();
        refused_folder(folder, text);
    };
    damage(&whole[..whole.len() - 1], "past the end of the file");
    damage(&whole[..100], "safetensors header: it claims");
    damage(&whole[..4], "cannot read tensor data");
    damage(&[&u64::MAX.to_le_bytes()[..], &whole[8..]].concat(), "it claims 18446744073709551615 bytes");
    damage(&[&2u64.to_le_bytes()[..], b"[]"].concat(), "safetensors header");
    let lying = br#"{"x":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,16]}}"#;
    damage(&[&(lying.len() as u64).to_le_bytes()[..], lying, &[0; 16]].concat(), "do not hold F32 values");
    let backwards = br#"{"x":{"dtype":"F32","shape":[4],"data_offsets":[16,0]}}"#;
    damage(&[&(backwards.len() as u64).to_le_bytes()[..], backwards, &[0; 16]].concat(), "end lies before its start");
    std::fs::remove_file(&weights).unwrap();
    refused_folder(folder, "no model.safetensors and no model.safetensors.index.json");
    let index = |text: &str| std::fs::write(folder.join("model.safetensors.index.json"), text).unwrap();
    index("{}");
    refused_folder(folder, "weight_map is missing");
    index(r#"{"weight_map": {"x": "../secret"}}"#);
    refused_folder(folder, "is no file name in this folder");
    index(r#"{"weight_map": {"x": "gone.safetensors"}}"#);
    refused_folder(folder, "gone.safetensors: cannot open");
    let config = folder.join("config.json");
    let text = std::fs::read(&config).unwrap();
    for (bytes, said) in [
        (&b"{"[..], "config.json: EOF"),
        (&text[..text.len() / 2], "config.json: EOF"),
        (&[&text[..], b"}"].concat(), "config.json: trailing characters"),
        (b"[1]", "config.json: invalid type"),
        (b"{\"\xff\": 1}", "config.json: cannot read: stream did not contain valid UTF-8"),
    ] {
        std::fs::write(&config, bytes).unwrap();
        refused_folder(folder, said);
    }
    // Longer than is believed, without a byte on the drive; then what states no length and would never end, or never begin.
    std::fs::File::create(&config).unwrap().set_len(1 << 40).unwrap();
    refused_folder(folder, "config.json: is larger than any such file");
    std::fs::remove_file(&config).unwrap();
    std::os::unix::fs::symlink("/dev/zero", &config).unwrap();
    refused_folder(folder, "config.json: is no regular file");
    std::fs::remove_file(&config).unwrap();
    let pipe =
        |path: &Path| rustix::fs::mkfifoat(rustix::fs::CWD, path, rustix::fs::Mode::from_raw_mode(0o600)).unwrap();
    pipe(&config);
    refused_folder(folder, "config.json: is no regular file");
    std::fs::remove_file(&config).unwrap();
    std::fs::write(&config, &text).unwrap();
    std::fs::remove_file(folder.join("model.safetensors.index.json")).unwrap();
    pipe(&weights);
    refused_folder(folder, "model.safetensors: cannot open: it is no regular file");
}
