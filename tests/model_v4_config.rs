//! DeepSeek V4 metadata and tensors: both spellings of what converters write, published shapes, and files that contradict themselves.
//! Never opens a file. Surprising fact: the list of ratios may be longer than the model, but not shorter.

mod common;
mod v4_rig;

use ds4::backend::cpu::CpuBackend;
use ds4::backend::cpu::matmul::Arithmetic;
use ds4::backend::cpu::simd::SimdLevel;
use ds4::engine::metadata::FileMetadata;
use ds4::models::deepseek4::{Config, DeepSeek4};
use ds4::models::metadata::MetaValue::{self, Float, Floats, Text, Texts, Uint, Uints};
use ds4::models::{ModelConfig, RunnerOptions};
use ds4::storage::gguf::{Metadata, Value};
use v4_rig::{Setup, Source, made};

fn config(changes: &[(&str, Option<MetaValue<'static>>)]) -> Result<Config, String> {
    let mut keys = Source { keys: made::model().keys, ..Source::default() };
    for (name, value) in changes {
        match value {
            Some(value) => keys.set(name, value.clone()),
            None => _ = keys.keys.remove(&format!("deepseek4.{name}")),
        }
    }
    Config::from_metadata(&keys).map_err(|e| e.to_string())
}

#[test]
fn what_converters_write_in_several_ways_reads_the_same() {
    let plain = config(&[]).unwrap();
    assert_eq!(plain.layers.len(), 6);
    assert_eq!(plain.layers[2].limit, 1.0);
    let same: [&[(&str, Option<MetaValue>)]; 6] = [
        &[("attention.compress_ratios", Some(Uints(vec![0, 0, 4, 128, 4, 128, 4, 0])))],
        &[("swiglu_clamp_exp", Some(Floats(vec![1.0; 8]))), ("swiglu_clamp_shexp", Some(Float(1.0)))],
        &[("swiglu_clamp_exp", Some(Uint(1)))],
        &[("expert_feed_forward_length", Some(Uints(vec![256; 6])))],
        &[("expert_gating_func", Some(Uint(4))), ("expert_group_count", Some(Uint(0)))],
        &[("block_count", Some(Uint(7))), ("nextn_predict_layers", Some(Uint(1)))],
    ];
    for changes in same {
        assert_eq!(config(changes), Ok(plain.clone()), "{changes:?}");
    }
    let off = config(&[("swiglu_clamp_exp", Some(Floats(vec![0.0; 6])))]).unwrap();
    assert_eq!(off.layers[0].limit, f32::INFINITY);
    // The vocabulary of the tokenizer stands in for a missing key.
    let mut keys = Source { keys: made::model().keys, ..Source::default() };
    keys.keys.remove("deepseek4.vocab_size");
    keys.keys.insert("tokenizer.ggml.tokens".into(), Texts(64));
    assert_eq!(Config::from_metadata(&keys), Ok(plain));
}

/// Integers of every width in a real file's metadata.
#[test]
fn integers_of_any_width_are_accepted() {
    let expected = config(&[]).unwrap();
    for width in 0..4 {
        let mut metadata = Metadata::new();
        for (key, value) in made::model().keys {
            let integer = |v: u64| match width {
                0 => Value::U32(v as u32),
                1 => Value::I32(v as i32),
                2 => Value::U64(v),
                _ => Value::I64(v as i64),
            };
            let value = match value {
                Uint(v) => integer(v),
                Float(v) if width % 2 == 1 => Value::F64(f64::from(v)),
                Float(v) => Value::F32(v),
                Text(text) => Value::Str(text.into()),
                Uints(v) if width < 2 => v.iter().map(|v| *v as i32).collect::<Vec<i32>>().into(),
                Uints(v) => v.iter().map(|v| *v as u32).collect::<Vec<u32>>().into(),
                other => panic!("{key}: {other:?}"),
            };
            metadata.insert(key, value);
        }
        assert_eq!(Config::from_metadata(&FileMetadata(&metadata)), Ok(expected.clone()), "width {width}");
    }
}

#[test]
fn contradictions_name_their_key() {
    for (name, value, what) in [
        ("attention.compress_ratios", Some(Uints(vec![0, 0, 4])), "shorter than the 6 layers"),
        ("attention.compress_ratios", Some(Uints(vec![0, 0, 4, 128, 2, 128])), "only 0, 4 and 128"),
        ("attention.compress_ratios", None, "has no metadata key"),
        ("hash_layer_count", Some(Uint(7)), "must be between 0 and 6"),
        ("expert_gating_func", Some(Uint(2)), "only 4, sqrt(softplus)"),
        ("expert_group_count", Some(Uint(8)), "groups of experts are not supported"),
        ("expert_feed_forward_length", Some(Uints(vec![256, 128])), "same width"),
        ("expert_used_count", Some(Uint(9)), "more than expert_count"),
        ("swiglu_clamp_exp", Some(Floats(vec![1.0])), "one number is needed for each of 6 layers"),
        ("attention.value_length", Some(Uint(64)), "must be between 128 and 128"),
        ("attention.indexer.key_length", Some(Uint(96)), "powers of two"),
        ("rope.dimension_count", Some(Uint(128)), "must be below attention.key_length"),
        ("rope.scaling.type", Some(Text("linear")), "only yarn is known"),
        ("embedding_length", Some(Uint(0)), "must be between 1"),
        ("vocab_size", None, "has no metadata key"),
    ] {
        let error = config(&[(name, value)]).unwrap_err();
        assert!(error.contains(&format!("deepseek4.{name}")) && error.contains(what), "{name}: {error}");
    }
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    let backend = || std::sync::Arc::new(CpuBackend::new(1, Arithmetic::Quality, SimdLevel::Scalar).unwrap());
    let load = |source: &Source| DeepSeek4::load(source, backend(), source).err().map(|e| e.to_string());
    let mut source = made::model();
    assert_eq!(load(&source), None);
    // A bias beside a table is allowed and not used.
    source.put("blk.0.exp_probs_b.bias".into(), vec![8], &[9.0; 8]);
    assert_eq!(load(&source), None);
    let mut ids: Vec<i32> = [0, 1].repeat(64);
    ids[9] = 8;
    source.put_ids("blk.1.ffn_gate_tid2eid.weight".into(), vec![2, 64], &ids);
    let error = load(&source).unwrap();
    assert!(
        error.contains("blk.1.ffn_gate_tid2eid") && error.contains("row 4") && error.contains("expert 8"),
        "{error}"
    );
    source.put("blk.1.ffn_gate_tid2eid.weight".into(), vec![2, 64], &[0.0; 128]);
    assert!(load(&source).unwrap().contains("has type F32, expected I32"));
    let mut source = made::model();
    source.tensors.remove("blk.2.indexer_compressor_ape.weight");
    assert!(load(&source).unwrap().contains("no tensor blk.2.indexer_compressor_ape.weight"));
}

#[test]
fn stated_memory_is_what_is_allocated() {
    let source = made::model();
    for (ctx, chunk, sweep) in [(300, 1, 1), (300, 64, 64), (1000, 16, 200)] {
        let options = RunnerOptions { sweep, ..RunnerOptions::new(ctx, chunk) };
        let how = (1, Arithmetic::Quality, SimdLevel::Scalar);
        let Setup { config, runner, .. } = v4_rig::setup(&source, &source, how, options, 8);
        assert_eq!(config.runner_bytes(&options), runner.bytes(), "{ctx}, {chunk}, {sweep}");
    }
}

/// Spec 4.1: what the published model keeps of a token that is long past, and the shapes of its larger sibling.
#[test]
fn published_shapes() {
    let ratios = |head: [u64; 2], pairs: usize| {
        let middle = [4, 128].repeat(pairs);
        [&head[..], &middle, &[4, 0]].concat()
    };
    let flash = |changes: &[(&str, u64)], ratios: Vec<u64>| {
        let mut all: Vec<(&str, Option<MetaValue>)> = vec![
            ("attention.compress_ratios", Some(Uints(ratios))),
            ("swiglu_clamp_exp", Some(Float(10.0))),
            ("expert_weights_scale", Some(Float(1.5))),
        ];
        let published = [
            ("block_count", 43),
            ("vocab_size", 129_280),
            ("embedding_length", 4096),
            ("attention.head_count", 64),
            ("attention.key_length", 512),
            ("attention.value_length", 512),
            ("attention.q_lora_rank", 1024),
            ("attention.output_lora_rank", 1024),
            ("attention.output_group_count", 8),
            ("attention.sliding_window", 128),
            ("attention.indexer.head_count", 64),
            ("attention.indexer.top_k", 512),
            ("expert_count", 256),
            ("expert_used_count", 6),
            ("expert_feed_forward_length", 2048),
            ("hash_layer_count", 3),
        ];
        all.extend(published.iter().chain(changes).map(|(name, value)| (*name, Some(Uint(*value)))));
        config(&all).unwrap()
    };
    let model = flash(&[], ratios([0, 0], 20));
    assert_eq!(model.layers.iter().filter(|plan| plan.has_indexer()).count(), 21);
    let bytes = |ctx: usize| model.runner_bytes(&RunnerOptions::new(ctx, 128)).kv;
    assert_eq!((bytes(129 * 128) - bytes(128)) / (128 * 128), 13_760);
    // Of 43 windows, 21 layers of ratio 4 with index keys and 20 of ratio 128: rows and compressor inputs, and 49 numbers.
    let rows = 43 * 135 * 512 + 21 * 15 * 2 * (1024 + 256) + 20 * 135 * 2 * 512;
    assert_eq!(model.frontier_bytes(), 4 * rows + 8 * 49);
    let larger = flash(
        &[
            ("block_count", 61),
            ("embedding_length", 7168),
            ("attention.head_count", 128),
            ("attention.q_lora_rank", 1536),
            ("attention.output_group_count", 16),
            ("attention.indexer.top_k", 1024),
            ("expert_count", 384),
            ("expert_feed_forward_length", 3072),
        ],
        ratios([128, 128], 29),
    );
    assert_eq!(larger.expert_shape(), (61, 384, 6));
    assert_eq!(larger.layers.iter().filter(|plan| plan.ratio == 128).count(), 31);
    let spec = |name: &str| larger.tensor_specs().into_iter().find(|spec| spec.name == name).unwrap().dims;
    assert_eq!(spec("blk.60.attn_output_a.weight"), [4096, 16_384]);
    assert_eq!(spec("blk.0.attn_compressor_ape.weight"), [512, 128]);
    assert_eq!(spec("blk.2.ffn_gate_tid2eid.weight"), [6, 129_280]);
}
