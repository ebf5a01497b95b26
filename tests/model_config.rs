//! Metadata and tensors that a model refuses, and memory that it states before taking it.
//! Never accepts a file by luck: each refusal names the key or the tensor.

mod common;

use std::collections::HashMap;

use common::checkpoint::{Checkpoint, fixture};
use common::setup::setup;
use ds4::backend::SharedBytes;
use ds4::models::deepseek41::Config;
use ds4::models::metadata::{ConfigError, MetaValue, MetadataView};
use ds4::models::weights::{TensorShape, WeightSource, check};
use ds4::models::{ModelConfig, RunnerOptions, config};
use ds4::quant::QuantType;

/// A fixture with some keys replaced (`None` = removed).
struct Changed<'a> {
    base: &'a Checkpoint,
    keys: HashMap<&'a str, Option<MetaValue<'a>>>,
}

impl MetadataView for Changed<'_> {
    fn get(&self, key: &str) -> Option<MetaValue<'_>> {
        match self.keys.get(key) {
            Some(value) => value.clone(),
            None => self.base.get(key),
        }
    }
}

fn refusal(base: &Checkpoint, key: &str, value: Option<MetaValue<'_>>) -> ConfigError {
    Config::from_metadata(&Changed { base, keys: [(key, value)].into() }).expect_err(key)
}

#[test]
fn every_key_is_needed_and_named() {
    let base = Checkpoint::open(&fixture("b"));
    for name in [
        "vocab_size",
        "hidden_size",
        "moe_intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "qk_rope_head_dim",
        "q_lora_rank",
        "o_lora_rank",
        "o_groups",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts_per_tok",
        "max_position_embeddings",
        "sliding_window",
        "index_n_heads",
        "index_head_dim",
        "index_topk",
        "candidate_source_layer_id",
        "candidate_topk_blocks",
        "candidate_block_size",
        "hc_mult",
        "hc_sinkhorn_iters",
        "rope_theta",
        "compress_rope_theta",
        "rms_norm_eps",
        "hc_eps",
        "swiglu_limit",
        "routed_scaling_factor",
        "rope_scaling.factor",
        "rope_scaling.beta_fast",
        "rope_scaling.beta_slow",
        "rope_scaling.original_max_position_embeddings",
        "norm_topk_prob",
        "compress_ratios",
        "kv_source_layer_ids",
        "index_source_layer_ids",
        "engram.encoding",
        "engram.layer_ids",
        "engram.rows",
        "engram.compressed_vocab_size",
        "engram.pad_id",
        "engram.token_map",
        "engram.primes",
        "engram.multipliers",
    ] {
        let key = format!("deepseek41.{name}");
        assert_eq!(refusal(&base, &key, None), ConfigError::Missing { key: key.clone() });
        let wrong = refusal(&base, &key, Some(MetaValue::Other("an array of strings")));
        assert!(matches!(wrong, ConfigError::WrongType { key: found, .. } if found == key), "{key}");
    }
}

#[test]
fn contradictions_name_their_key() {
    use MetaValue::{Float, Text, Uint, Uints};
    let base = Checkpoint::open(&fixture("b"));
    let cases = [
        ("scoring_func", Text("softmax"), "scoring_func"),
        ("hidden_act", Text("gelu"), "hidden_act"),
        ("head_dim", Uint(65), "head_dim"),
        ("head_dim", Uint(0), "head_dim"),
        ("hidden_size", Uint(u64::MAX), "hidden_size"),
        ("qk_rope_head_dim", Uint(33), "qk_rope_head_dim"),
        ("o_groups", Uint(3), "o_groups"),
        ("num_experts_per_tok", Uint(9), "num_experts_per_tok"),
        ("num_key_value_heads", Uint(2), "num_key_value_heads"),
        ("candidate_topk_blocks", Uint(3), "candidate_topk_blocks"),
        ("candidate_source_layer_id", Uint(0), "candidate_source_layer_id"),
        ("rms_norm_eps", Float(f32::NAN), "rms_norm_eps"),
        ("swiglu_limit", Float(0.0), "swiglu_limit"),
        ("compress_ratios", Uints(vec![0, 2, 1, 1]), "compress_ratios"),
        ("compress_ratios", Uints(vec![0, 2, 1, 4, 0]), "compress_ratios"),
        ("compress_ratios", Uints(vec![2, 2, 1, 1, 0]), "kv_source_layer_ids"),
        ("compress_ratios", Uints(vec![0, 2, 1, 2, 0]), "compress_ratios"),
        ("kv_source_layer_ids", Uints(vec![2, 1]), "kv_source_layer_ids"),
        ("index_source_layer_ids", Uints(vec![1, 2, 9]), "index_source_layer_ids"),
        ("engram.encoding", Text("lloyd4_e5m3_32_r136"), "engram.encoding"),
        ("engram.encoding", Text("conversion_underway"), "engram.encoding"),
        ("engram.layer_ids", Uints(vec![1, 7]), "engram.layer_ids"),
        ("engram.rows", Uints(vec![6480, 7399]), "engram.rows"),
        ("engram.rows", Uints(vec![6480]), "engram.rows"),
        ("engram.multipliers", Uints(vec![2; 8]), "engram.multipliers"),
        ("engram.multipliers", Uints(vec![u64::MAX; 8]), "engram.multipliers"),
        ("engram.primes", Uints(vec![7; 23]), "engram.primes"),
        ("engram.token_map", Uints(vec![0; 639]), "engram.token_map"),
        ("engram.token_map", Uints(vec![489; 640]), "engram.token_map"),
        ("engram.pad_id", Uint(489), "engram.pad_id"),
    ];
    for (name, value, named) in cases {
        let error = refusal(&base, &format!("deepseek41.{name}"), Some(value.clone()));
        let ConfigError::Unusable { key, .. } = &error else { panic!("{name}: {error}") };
        assert_eq!(*key, format!("deepseek41.{named}"), "{name} = {value:?}: {error}");
    }
}

#[test]
fn other_dialects_and_architectures_are_refused_by_name() {
    let base = Checkpoint::open(&fixture("a"));
    let error = refusal(&base, "deepseek41.attention.compress_ratios", Some(MetaValue::Uints(vec![0])));
    assert!(matches!(error, ConfigError::Dialect { key, .. } if key == "deepseek41.attention.compress_ratios"));
    let keys = [("general.architecture", Some(MetaValue::Text("llama")))].into();
    let error = config(&Changed { base: &base, keys }).err().unwrap();
    assert!(error.to_string().contains("llama") && error.to_string().contains("deepseek41"), "{error}");
}

/// A fixture with one tensor changed.
struct ChangedTensor<'a>(&'a Checkpoint, &'a str, Option<TensorShape>);

impl WeightSource for ChangedTensor<'_> {
    fn shape(&self, name: &str) -> Option<TensorShape> {
        if name == self.1 { self.2.clone() } else { self.0.shape(name) }
    }

    fn bytes(&self, name: &str) -> Option<SharedBytes> {
        self.0.bytes(name)
    }
}

#[test]
fn missing_and_misshapen_tensors_are_named() {
    let base = Checkpoint::open(&fixture("b"));
    let specs = Config::from_metadata(&base).unwrap().tensor_specs();
    check(&specs, &base).unwrap();
    for spec in &specs {
        let missing = check(&specs, &ChangedTensor(&base, &spec.name, None));
        assert_eq!(missing.is_ok(), spec.optional, "{}", spec.name);
        let Some(mut shape) = base.shape(&spec.name) else { continue };
        shape.dims[0] += 1;
        let error = check(&specs, &ChangedTensor(&base, &spec.name, Some(shape))).unwrap_err().to_string();
        assert!(error.contains(&spec.name), "{error}");
        let mut shape = base.shape(&spec.name).unwrap();
        shape.ty = if shape.ty == QuantType::I8 { QuantType::F32 } else { QuantType::I8 };
        let error = check(&specs, &ChangedTensor(&base, &spec.name, Some(shape))).unwrap_err().to_string();
        assert!(error.contains(&spec.name), "{error}");
    }
}

#[test]
fn stated_memory_is_what_is_allocated() {
    for name in ["a", "b"] {
        for (ctx, chunk) in [(1, 1), (33, 8), (600, 64), (1000, 100)] {
            let options = RunnerOptions::new(ctx, chunk);
            let setup = setup(&fixture(name), 1, options, 8);
            assert_eq!(setup.runner.bytes(), setup.config.runner_bytes(&options), "{name}, ctx {ctx}, chunk {chunk}");
        }
    }
}

/// Spec appendix, in double precision; the table is F32.
#[test]
fn yarn_frequencies_of_the_published_geometry() {
    let base = Checkpoint::open(&fixture("a"));
    let mut config = Config::from_metadata(&base).unwrap();
    config.backbone.rotary = 64;
    config.backbone.yarn.factor = 16.0;
    config.backbone.yarn.original_positions = 65536.0;
    let freqs = config.rope_freqs(true);
    for (i, want) in [
        (0, 1.0),
        (1, 0.687656022),
        (8, 0.05),
        (15, 3.635538584e-3),
        (16, 2.265625e-3),
        (20, 2.969777783e-4),
        (24, 1.953125e-5),
        (25, 5.372312671e-6),
        (31, 5.680529037e-7),
    ] {
        assert!((f64::from(freqs[i]) / want - 1.0).abs() < 1e-6, "{i}: {} {want}", freqs[i]);
    }
}

/// The table of spec 1.2, from the arrays of the published model.
#[test]
fn schedule_of_the_published_model() {
    use MetaValue::{Uint, Uints};
    let base = Checkpoint::open(&fixture("a"));
    let ratios = [vec![0; 2], vec![2; 18], vec![1; 20]].concat();
    let (kv_sources, index_sources) = (vec![2, 8, 14, 20], vec![2, 8, 14, 20, 24, 28, 32, 36]);
    let keys = [
        ("deepseek41.num_hidden_layers", Some(Uint(40))),
        ("deepseek41.compress_ratios", Some(Uints(ratios.clone()))),
        ("deepseek41.kv_source_layer_ids", Some(Uints(kv_sources.clone()))),
        ("deepseek41.index_source_layer_ids", Some(Uints(index_sources.clone()))),
        ("deepseek41.candidate_source_layer_id", Some(Uint(20))),
    ];
    let config = Config::from_metadata(&Changed { base: &base, keys: keys.into() }).unwrap();
    assert_eq!(config.owners, [2, 8, 14, 20]);
    for (layer, plan) in config.layers.iter().enumerate() {
        let owner = [2..8, 8..14, 14..20, 20..40].iter().position(|layers| layers.contains(&layer));
        let selects = index_sources.contains(&(layer as u64));
        assert_eq!(plan.ratio as u64, ratios[layer], "layer {layer}");
        assert_eq!(plan.owner, owner, "layer {layer}");
        assert_eq!(plan.makes_rows, kv_sources.contains(&(layer as u64)), "layer {layer}");
        assert_eq!(plan.makes_keys, plan.makes_rows, "layer {layer}");
        assert_eq!(plan.selects_by, owner.filter(|_| selects), "layer {layer}");
        assert_eq!(plan.makes_candidates, layer == 20, "layer {layer}");
        assert_eq!(plan.masked, [24, 28, 32, 36].contains(&layer), "layer {layer}");
    }
}
