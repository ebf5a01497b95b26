//! DeepSeek V4 checkpoints converted: every value is that of the checkpoint, the model computes the golden logits, and inconsistent folders
//! are refused by name.
//! Never calls the converter's own decoders. Surprising fact: no published-format fixture is wide enough for types of 256 values a block, so
//! one is put together from the values of a quantised file.

mod checkpoint;
mod common;
mod v4_rig;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use checkpoint::{Checkpoint, Stored};
use common::gguf_file::Converted;
use common::golden::{Golden, argmax, check_close};
use common::setup::{run as feed, shared};
use ds4::backend::cpu::matmul::Arithmetic;
use ds4::backend::cpu::simd::SimdLevel;
use ds4::engine::metadata::FileMetadata;
use ds4::models::RunnerOptions;
use ds4::models::weights::WeightSource;
use ds4::quant::{QuantType, dequantize_row};
use ds4::storage::convert::{
    ALIGNMENT, BaseRecipe, ConvertError, Options, Recipe, Summary, TensorDifference, compare, convert, quantize,
};
use ds4::storage::gguf::GgufFile;
use safetensors::Dtype;
use serde_json::json;
use v4_rig::{Source, checkpoint as decoded, fixture, setup, v4_name};

/// Limit of logits, as in `model_v4_golden`.
const LIMIT: f32 = 1e-3;

fn go_on(_: u64, _: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn run(folder: &Path, output: &Path, base: BaseRecipe) -> Result<Summary, ConvertError> {
    let options = Options { recipe: Recipe::base(base), importance: None, output, force: true, alignment: ALIGNMENT };
    convert(folder, &options, &mut go_on)
}

/// All values of a tensor.
fn values(source: &dyn WeightSource, name: &str) -> Vec<f32> {
    let (shape, bytes) = (source.shape(name).unwrap(), source.bytes(name).unwrap());
    let mut out = vec![0.0; shape.dims.iter().product::<u64>() as usize];
    let columns = shape.dims[0] as usize;
    let row_bytes = shape.ty.row_bytes(shape.dims[0]).unwrap() as usize;
    for (row, out) in bytes.as_slice().chunks(row_bytes).zip(out.chunks_mut(columns)) {
        dequantize_row(shape.ty, row, out).unwrap();
    }
    out
}

/// Logits of the golden prompt by a converted file, without rounding of cached rows.
fn check_logits(file: &Converted, golden: &Golden) {
    let tokens = golden.tokens();
    let options = RunnerOptions { kv_exact: true, ..RunnerOptions::new(tokens.len(), 64) };
    let how = (2, Arithmetic::Quality, SimdLevel::detect());
    let mut made = setup(&file.metadata(), file, how, options, 8);
    let logits = feed(&mut *made.runner, &tokens, &[usize::MAX], None);
    let rows: Vec<&[f32]> = logits.chunks_exact(made.config.vocab).collect();
    let positions = golden.get("positions").ints.iter().map(|p| *p as usize);
    let at_positions: Vec<f32> = positions.flat_map(|p| rows[p].to_vec()).collect();
    let worst = check_close("logits", &at_positions, &golden.get("logits").f32s, LIMIT);
    println!("logits differ by at most {worst}");
    let picked: Vec<i32> = rows.iter().map(|row| argmax(row) as i32).collect();
    assert_eq!(picked, golden.get("argmax").ints, "argmax");
}

/// FP8 tiles, FP4 experts, tables of I64.
#[test]
fn native_keeps_every_value_and_the_golden_logits() {
    let file = Converted::native(&fixture("b"));
    let Source { tensors, .. } = decoded(&fixture("b"));
    for (name, (shape, bytes)) in &tensors {
        let found = file.shape(name).unwrap_or_else(|| panic!("{name} is missing"));
        assert_eq!(found.dims, shape.dims, "{name}");
        if shape.ty == QuantType::I32 {
            assert_eq!((found.ty, file.bytes(name).unwrap().as_slice()), (shape.ty, bytes.as_slice()), "{name}");
            continue;
        }
        let want = bytes.as_slice().chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap()));
        let found = values(&file, name).into_iter().map(f32::to_bits);
        assert!(found.eq(want), "{name}");
    }
    assert_eq!(file.shape("blk.0.ffn_down_exps.weight").unwrap().ty, QuantType::MXFP4);
    assert_eq!(file.shape("blk.0.attn_q_a.weight").unwrap().ty, QuantType::BF16);
    check_logits(&file, &Golden::open(&fixture("b").join("golden.safetensors")));
}

/// The published configuration as keys of a file; a block that drafts tokens is left out.
#[test]
fn keys_are_those_of_the_configuration() {
    let scratch = tempfile::tempdir().unwrap();
    let output = scratch.path().join("b.gguf");
    let summary = run(&fixture("b"), &output, BaseRecipe::Native).unwrap();
    let c = Checkpoint::load(&fixture("b"));
    assert_eq!(summary.left_out, c.tensors.keys().filter(|name| name.starts_with("mtp.")).count());
    let file = GgufFile::open(&output).unwrap();
    let meta = file.metadata();
    for (key, value) in [("expert_count", 8), ("hash_layer_count", 1), ("attention.indexer.top_k", 24)] {
        assert_eq!(meta.u32(&format!("deepseek4.{key}")), Ok(value), "{key}");
    }
    assert_eq!(meta.u32("deepseek4.rope.scaling.original_context_length"), Ok(64));
    // With those of the draft stages, as published files have them.
    assert_eq!(meta.u32_array("deepseek4.attention.compress_ratios"), Ok(vec![0, 4, 128, 0]));
    assert_eq!(meta.str("deepseek4.quantization").unwrap().split(' ').next(), Some("native"));
    assert!(!meta.contains("tokenizer.ggml.tokens"));
}

/// Beside the file that another program's converter made of the same checkpoint.
#[test]
fn a_conversion_equals_another_programs() {
    let Some(folder) = shared("golden/deepseek_v4/a") else { return };
    let scratch = tempfile::tempdir().unwrap();
    let output = scratch.path().join("a.gguf");
    run(&folder, &output, BaseRecipe::Native).unwrap();
    let (ours, theirs) = (GgufFile::open(&output).unwrap(), GgufFile::open(fixture("a").join("model.gguf")).unwrap());
    let found = compare(&ours, &theirs, &mut go_on).unwrap();
    assert_eq!(found.tensors, theirs.tensors().len());
    let is_type = |d: &TensorDifference| matches!(d, TensorDifference::Type { .. });
    assert!(found.differences.iter().all(is_type), "{:?}", found.differences);
    let both = |key: &str| ours.metadata().contains(key) && theirs.metadata().contains(key);
    let keys = found.metadata.iter().filter(|m| m.key.starts_with("deepseek4.") || m.key.starts_with("tokenizer."));
    // What only they have: nothing that is asked for. What both have: the same but for the widths of whole numbers.
    // The folder has no template; theirs was handed one.
    for key in keys.map(|m| m.key.as_str()).filter(|key| *key != "tokenizer.chat_template") {
        let lists = [&ours, &theirs].map(|file| file.metadata().u64_array(key).ok());
        let is_same_list = lists[0].is_some() && lists[0] == lists[1];
        let is_ours = ours.metadata().contains(key) && !theirs.metadata().contains(key);
        assert!(is_ours || (both(key) && is_same_list), "{key} differs");
    }
    check_logits(&Converted::open(&output), &Golden::open(&fixture("a").join("golden.safetensors")));
}

/// Fixture c's values as a checkpoint: F32 everywhere, names of fixture b, whose layers 1 and 2 have the kinds of its 0 and 1.
fn wide() -> Checkpoint {
    let file = Converted::open(&fixture("c").join("model-mixed.gguf"));
    let mut c = Checkpoint::load(&fixture("b"));
    let changed = json!({
        "hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2, "compress_ratios": [4, 128],
        "num_nextn_predict_layers": 0,
    });
    c.config.as_object_mut().unwrap().extend(changed.as_object().unwrap().clone());
    let names: Vec<String> = std::mem::take(&mut c.tensors).into_keys().collect();
    for name in names {
        let name = match name.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) {
            Some(("0", "ffn.gate.tid2eid")) | None => name,
            Some(("1", part)) if part != "ffn.gate.bias" => format!("layers.0.{part}"),
            Some(("2", part)) => format!("layers.1.{part}"),
            _ => continue,
        };
        if let Some(stored) = stored(&file, &name) {
            c.tensors.insert(name, stored);
        }
    }
    c
}

/// A tensor of the checkpoint out of the file; `None` for scales and draft stages.
fn stored(file: &Converted, name: &str) -> Option<Stored> {
    let floats = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let layer_part = name.strip_prefix("layers.").and_then(|name| name.strip_suffix(".weight"));
    if let Some((layer, expert)) = layer_part.and_then(|name| name.split_once(".ffn.experts.")) {
        let (expert, part) = expert.split_once('.').unwrap();
        let part = [("w1", "gate"), ("w3", "up"), ("w2", "down")].iter().find(|(w, _)| *w == part).unwrap().1;
        let tensor = format!("blk.{layer}.ffn_{part}_exps.weight");
        let dims = file.shape(&tensor).unwrap().dims;
        let (count, at) = ((dims[0] * dims[1]) as usize, expert.parse::<usize>().unwrap());
        let bytes = floats(&values(file, &tensor)[at * count..][..count]);
        return Some(Stored { dtype: Dtype::F32, shape: vec![dims[1] as usize, dims[0] as usize], bytes });
    }
    let tensor = v4_name(name)?;
    let shape = file.shape(&tensor).unwrap_or_else(|| panic!("{tensor} for {name}"));
    let dims = shape.dims.iter().rev().map(|d| *d as usize).collect();
    if shape.ty == QuantType::I32 {
        let ids = file.bytes(&tensor).unwrap();
        let wide = |b: &[u8]| i64::from(i32::from_le_bytes(b.try_into().unwrap())).to_le_bytes();
        let bytes = ids.as_slice().chunks_exact(4).flat_map(wide).collect();
        return Some(Stored { dtype: Dtype::I64, shape: dims, bytes });
    }
    Some(Stored { dtype: Dtype::F32, shape: dims, bytes: floats(&values(file, &tensor)) })
}

#[test]
fn every_recipe_makes_a_file_that_computes() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().join("wide");
    wide().save(&folder);
    let make = |name: &str, base| -> PathBuf {
        let path = scratch.path().join(name);
        run(&folder, &path, base).unwrap();
        path
    };
    let native = make("native.gguf", BaseRecipe::Native);
    let golden = Golden::open(&fixture("c").join("golden-mixed.safetensors"));
    check_logits(&Converted::open(&native), &golden);
    let native = GgufFile::open(&native).unwrap();
    for (base, types, worst) in [
        (BaseRecipe::Q4, [QuantType::Q4_K, QuantType::Q4_K], 0.01),
        (BaseRecipe::Q2, [QuantType::IQ2_XXS, QuantType::Q2_K], 0.2),
    ] {
        let path = make("other.gguf", base);
        let file = GgufFile::open(&path).unwrap();
        let found = compare(&native, &file, &mut go_on).unwrap();
        assert!(found.within(worst), "{base:?}: {:?}", found.differences);
        for (stem, ty) in ["gate_exps", "down_exps"].into_iter().zip(types) {
            assert_eq!(file.tensor(&format!("blk.1.ffn_{stem}.weight")).unwrap().ty, ty);
        }
        assert_eq!(file.tensor("blk.0.ffn_gate_tid2eid.weight").unwrap().ty, QuantType::I32);
        assert_eq!(file.tensor("blk.0.attn_compressor_kv.weight").unwrap().ty, QuantType::F16);
        let tokens = &golden.tokens()[..150];
        let file = Converted::open(&path);
        let how = (2, Arithmetic::Fast, SimdLevel::detect());
        let mut made = setup(&file.metadata(), &file, how, RunnerOptions::new(150, 64), 8);
        let logits = feed(&mut *made.runner, tokens, &[usize::MAX], None);
        let spread = logits.iter().map(|v| v * v).sum::<f32>() / logits.len() as f32;
        assert!((1.0..100.0).contains(&spread), "{base:?}: {spread}");
    }
}

#[test]
fn a_file_is_quantised_again() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("again.gguf");
    let input = GgufFile::open(fixture("c").join("model-mixed.gguf")).unwrap();
    let recipe = Recipe::base(BaseRecipe::Native).with(&["down=q4_k".into(), "mixing=f16".into()]).unwrap();
    let options = Options { recipe, importance: None, output: &path, force: false, alignment: 32 };
    quantize(&input, &options, &mut go_on).unwrap();
    let file = GgufFile::open(&path).unwrap();
    let types = |name: &str| [&input, &file].map(|file| file.tensor(name).unwrap().ty);
    assert_eq!(types("blk.0.ffn_down_exps.weight"), [QuantType::Q2_K, QuantType::Q4_K]);
    assert_eq!(types("output_hc_fn.weight"), [QuantType::F32, QuantType::F16]);
    assert_eq!(types("blk.0.ffn_gate_exps.weight"), [QuantType::IQ2_XXS; 2]);
    assert_eq!(types("blk.0.ffn_gate_tid2eid.weight"), [QuantType::I32; 2]);
    assert!(compare(&input, &file, &mut go_on).unwrap().within(0.01));
    ds4::models::config(&FileMetadata(file.metadata())).unwrap();
}

fn refused_folder(folder: &Path, base: BaseRecipe, text: &str) {
    let output = folder.join("never.gguf");
    let error = run(folder, &output, base).expect_err(text).to_string();
    assert!(error.contains(text), "{error:?} lacks {text:?}");
    assert!(!output.exists());
}

/// Changes fixture b and expects the conversion to fail.
fn refused(change: impl FnOnce(&mut Checkpoint), text: &str) {
    let scratch = tempfile::tempdir().unwrap();
    let mut c = Checkpoint::load(&fixture("b"));
    change(&mut c);
    c.save(scratch.path());
    refused_folder(scratch.path(), BaseRecipe::Native, text);
}

#[test]
fn inconsistent_configurations_are_refused() {
    fn key(name: &'static str, value: serde_json::Value) -> impl FnOnce(&mut Checkpoint) {
        move |c| c.config[name] = value
    }
    refused(key("model_type", json!("deepseek_v42")), "model_type is deepseek_v42; deepseek_v41 and deepseek_v4 can");
    refused(key("num_hash_layers", json!(null)), "config.json: num_hash_layers is missing");
    refused(key("compress_ratios", json!([0, 4])), "compress_ratios has 2 entries for 3 layers");
    refused(key("compress_ratios", json!([0, 4, 64])), "compress_ratios has a ratio of 64; 0, 4 and 128 are known");
    refused(key("compress_ratios", json!([4, 4, 128])), "layers.0.attn.compressor.wkv.weight is missing");
    refused(key("compress_ratios", json!([0, 0, 128])), "layers.1.attn.compressor.ape has no place in the model");
    refused(key("num_hash_layers", json!(2)), "layers.1.ffn.gate.tid2eid is missing");
    refused(key("num_hash_layers", json!(0)), "layers.0.ffn.gate.bias is missing");
    refused(key("scoring_func", json!("sigmoid")), "scoring_func is \"sigmoid\"; only \"sqrtsoftplus\" can be stored");
    refused(key("n_shared_experts", json!(2)), "n_shared_experts is 2; only 1 can be stored in a deepseek4 file");
    refused(key("swiglu_limit", json!("ten")), "swiglu_limit is \"ten\"");
    refused(key("rope_scaling", json!({"factor": 4})), "rope_scaling.beta_fast is missing");
    refused(key("quantization_config", json!({})), "quantization_config.weight_block_size");
    refused(key("quantization_config", json!({"weight_block_size": [64, 64]})), "has shape [1, 1], expected [1, 2]");
    refused(key("n_routed_experts", json!(9)), "layers.0.ffn.experts.8.w1.weight is missing");
    refused(key("vocab_size", json!(511)), "tid2eid has shape [512, 2], expected [511, 2]");
}

#[test]
fn inconsistent_tensors_are_refused() {
    fn tensor(name: &'static str, change: impl FnOnce(&mut Stored)) -> impl FnOnce(&mut Checkpoint) {
        move |c| change(c.tensors.get_mut(name).unwrap())
    }
    const TABLE: &str = "layers.0.ffn.gate.tid2eid";
    let gone = |name: &'static str| move |c: &mut Checkpoint| drop(c.tensors.remove(name));
    refused(gone("hc_head_fn"), "checkpoint tensor hc_head_fn is missing");
    refused(gone("layers.0.attn.wq_b.scale"), "layers.0.attn.wq_b.scale is missing");
    refused(gone("layers.2.ffn.experts.5.w2.scale"), "layers.2.ffn.experts.5.w2.scale is missing");
    refused(gone("layers.1.attn.indexer.compressor.ape"), "layers.1.attn.indexer.compressor.ape is missing");
    refused(
        tensor("layers.0.attn.wq_b.scale", |t| t.shape = vec![1, 2]),
        "wq_b.scale has shape [1, 2], expected [2, 1]",
    );
    refused(tensor(TABLE, |t| t.dtype = Dtype::U64), "tid2eid has type U64, expected I64 or I32");
    refused(tensor(TABLE, |t| t.bytes[24] = 8), "blk.0.ffn_gate_tid2eid.weight, row 1, column 1: value 8 is no expert");
    refused(tensor(TABLE, |t| t.bytes[7] = 0x80), "row 0, column 0: value -9223372000000000000 is no expert");
    let extra = |c: &mut Checkpoint| {
        let extra = c.tensors["norm.weight"].clone();
        c.tensors.insert("layers.1.attn.extra.weight".into(), extra);
    };
    refused(extra, "layers.1.attn.extra.weight has no place in the model");
    // Rows of 128 values: the type is named, and those that fit.
    refused_folder_of_b(BaseRecipe::Q4, "rows of 128 values do not fit Q4_K");
}

fn refused_folder_of_b(base: BaseRecipe, text: &str) {
    let scratch = tempfile::tempdir().unwrap();
    Checkpoint::load(&fixture("b")).save(scratch.path());
    refused_folder(scratch.path(), base, text);
}

/// A shard that ends early, as after a broken download.
#[test]
fn a_truncated_shard_is_refused() {
    let scratch = tempfile::tempdir().unwrap();
    Checkpoint::load(&fixture("b")).save_sharded(scratch.path(), 3);
    let shard = scratch.path().join("model-00002-of-00003.safetensors");
    let len = shard.metadata().unwrap().len();
    std::fs::File::options().write(true).open(&shard).unwrap().set_len(len - 1).unwrap();
    let name = shard.file_name().unwrap().to_str().unwrap();
    refused_folder(scratch.path(), BaseRecipe::Native, name);
    refused_folder(scratch.path(), BaseRecipe::Native, "past the end of the file; the download may be incomplete");
    std::fs::remove_file(&shard).unwrap();
    refused_folder(scratch.path(), BaseRecipe::Native, name);
}

/// Biases that nothing reads: those of images, and those beside a table of experts.
#[test]
fn unused_biases_are_left_out() {
    let scratch = tempfile::tempdir().unwrap();
    let mut c = Checkpoint::load(&fixture("b"));
    let bias = c.tensors["layers.1.ffn.gate.bias"].clone();
    for name in ["layers.0.ffn.gate.bias", "layers.1.ffn.gate.bias_vl"] {
        c.tensors.insert(name.into(), bias.clone());
    }
    let drafting = c.tensors.keys().filter(|name| name.starts_with("mtp.")).count();
    c.save(scratch.path());
    let output = scratch.path().join("x.gguf");
    let summary = run(scratch.path(), &output, BaseRecipe::Native).unwrap();
    assert_eq!(summary.left_out, drafting + 2);
    let file = GgufFile::open(&output).unwrap();
    assert!(file.tensor("blk.0.exp_probs_b.bias").is_none() && file.tensor("blk.1.exp_probs_b.bias").is_some());
}
