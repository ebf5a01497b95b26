//! DeepSeek V4 models for tests: GGUF fixtures, a published-format checkpoint, and a model whose weights follow from names.
//! Never goes through an engine. Surprising fact: the made model needs no file at all: value `i` of a tensor is a hash of its name and `i`.
#![allow(dead_code)] // Each test binary uses its own part of this.

pub mod made;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ds4::backend::SharedBytes;
use ds4::backend::cpu::CpuBackend;
use ds4::backend::cpu::matmul::Arithmetic;
use ds4::backend::cpu::simd::SimdLevel;
use ds4::models::deepseek4::{Config, DeepSeek4};
use ds4::models::metadata::{MetaValue, MetadataView};
use ds4::models::weights::{TensorShape, WeightSource};
use ds4::models::{Model, ModelRunner, RunnerOptions};
use ds4::quant::QuantType;
use safetensors::tensor::SafeTensors;
use serde_json::Value;

use crate::common::checkpoint::{decode, gguf_name};
use crate::common::gguf_file::Converted;
use crate::common::memory_supply::MemoryExperts;

/// Metadata and tensors in memory.
#[derive(Default)]
pub struct Source {
    pub keys: HashMap<String, MetaValue<'static>>,
    pub tensors: HashMap<String, (TensorShape, SharedBytes)>,
}

impl Source {
    /// Sets `deepseek4.` + `name`.
    pub fn set(&mut self, name: &str, value: MetaValue<'static>) {
        self.keys.insert(format!("deepseek4.{name}"), value);
    }

    pub fn put(&mut self, name: String, dims: Vec<u64>, values: &[f32]) {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.tensors.insert(name, (TensorShape { ty: QuantType::F32, dims }, bytes.into()));
    }

    pub fn put_ids(&mut self, name: String, dims: Vec<u64>, ids: &[i32]) {
        let bytes: Vec<u8> = ids.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.tensors.insert(name, (TensorShape { ty: QuantType::I32, dims }, bytes.into()));
    }
}

impl MetadataView for Source {
    fn get(&self, key: &str) -> Option<MetaValue<'_>> {
        self.keys.get(key).cloned()
    }
}

impl WeightSource for Source {
    fn shape(&self, name: &str) -> Option<TensorShape> {
        self.tensors.get(name).map(|(shape, _)| shape.clone())
    }

    fn bytes(&self, name: &str) -> Option<SharedBytes> {
        self.tensors.get(name).map(|(_, bytes)| bytes.clone())
    }
}

/// Folder of a fixture.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/deepseek_v4").join(name)
}

/// Fixture `b`: FP8 tiles and FP4 experts, decoded to F32, which is exact.
pub fn checkpoint(dir: &Path) -> Source {
    let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let config: Value = serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap();
    let mut source = Source { keys: metadata(&config), ..Source::default() };
    for name in file.names() {
        let Some(to) = v4_name(name) else { continue };
        if name.ends_with("tid2eid") {
            let tensor = file.tensor(name).unwrap();
            let ids: Vec<i32> =
                tensor.data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as i32).collect();
            source.put_ids(to, tensor.shape().iter().rev().map(|d| *d as u64).collect(), &ids);
        } else {
            let (shape, values) = decode(&file, name, 128);
            source.put(to, shape.iter().rev().map(|d| *d as u64).collect(), &values);
        }
    }
    let experts = config["n_routed_experts"].as_u64().unwrap();
    for layer in 0..config["num_hidden_layers"].as_u64().unwrap() {
        for (part, name) in [("w1", "gate"), ("w3", "up"), ("w2", "down")] {
            let (mut all, mut dims) = (Vec::new(), Vec::new());
            for expert in 0..experts {
                let (shape, values) = decode(&file, &format!("layers.{layer}.ffn.experts.{expert}.{part}.weight"), 128);
                all.extend(values);
                dims = vec![shape[1] as u64, shape[0] as u64, experts];
            }
            source.put(format!("blk.{layer}.ffn_{name}_exps.weight"), dims, &all);
        }
    }
    source
}

/// Name in a GGUF file; `None` for what is put together otherwise or not used.
pub fn v4_name(name: &str) -> Option<String> {
    if name.ends_with(".scale") || name.contains(".experts.") || name.starts_with("mtp.") {
        return None;
    }
    let Some((layer, part)) = name.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) else {
        return Some(match name {
            "hc_head_fn" | "hc_head_base" | "hc_head_scale" => format!("output_{}.weight", name.replace("_head", "")),
            other => gguf_name(other).to_owned(),
        });
    };
    let part = match part {
        "attn.compressor.ape" => "attn_compressor_ape.weight",
        "attn.indexer.compressor.ape" => "indexer_compressor_ape.weight",
        "attn.indexer.compressor.wkv.weight" => "indexer_compressor_kv.weight",
        "attn.indexer.compressor.wgate.weight" => "indexer_compressor_gate.weight",
        "attn.indexer.compressor.norm.weight" => "indexer_compressor_norm.weight",
        "ffn.gate.tid2eid" => "ffn_gate_tid2eid.weight",
        other => gguf_name(other),
    };
    Some(format!("blk.{layer}.{part}"))
}

/// The metadata that a GGUF file of a published configuration has.
fn metadata(config: &Value) -> HashMap<String, MetaValue<'static>> {
    let mut source = Source::default();
    source.keys.insert("general.architecture".into(), MetaValue::Text("deepseek4"));
    let scaling = &config["rope_scaling"];
    for (key, value) in [
        ("block_count", &config["num_hidden_layers"]),
        ("context_length", &config["max_position_embeddings"]),
        ("vocab_size", &config["vocab_size"]),
        ("embedding_length", &config["hidden_size"]),
        ("attention.head_count", &config["num_attention_heads"]),
        ("attention.head_count_kv", &config["num_key_value_heads"]),
        ("attention.key_length", &config["head_dim"]),
        ("attention.value_length", &config["head_dim"]),
        ("attention.q_lora_rank", &config["q_lora_rank"]),
        ("attention.output_lora_rank", &config["o_lora_rank"]),
        ("attention.output_group_count", &config["o_groups"]),
        ("attention.sliding_window", &config["sliding_window"]),
        ("attention.layer_norm_rms_epsilon", &config["rms_norm_eps"]),
        ("attention.compress_rope_freq_base", &config["compress_rope_theta"]),
        ("attention.indexer.head_count", &config["index_n_heads"]),
        ("attention.indexer.key_length", &config["index_head_dim"]),
        ("attention.indexer.top_k", &config["index_topk"]),
        ("rope.dimension_count", &config["qk_rope_head_dim"]),
        ("rope.freq_base", &config["rope_theta"]),
        ("rope.scaling.factor", &scaling["factor"]),
        ("rope.scaling.original_context_length", &scaling["original_max_position_embeddings"]),
        ("rope.scaling.yarn_beta_fast", &scaling["beta_fast"]),
        ("rope.scaling.yarn_beta_slow", &scaling["beta_slow"]),
        ("expert_count", &config["n_routed_experts"]),
        ("expert_used_count", &config["num_experts_per_tok"]),
        ("expert_shared_count", &config["n_shared_experts"]),
        ("expert_feed_forward_length", &config["moe_intermediate_size"]),
        ("expert_weights_scale", &config["routed_scaling_factor"]),
        ("hash_layer_count", &config["num_hash_layers"]),
        ("hyper_connection.count", &config["hc_mult"]),
        ("hyper_connection.sinkhorn_iterations", &config["hc_sinkhorn_iters"]),
        ("hyper_connection.epsilon", &config["hc_eps"]),
        ("swiglu_clamp_exp", &config["swiglu_limit"]),
    ] {
        let value = value.as_u64().map_or_else(|| MetaValue::Float(value.as_f64().unwrap() as f32), MetaValue::Uint);
        source.set(key, value);
    }
    source.set("expert_weights_norm", MetaValue::Bool(config["norm_topk_prob"].as_bool().unwrap()));
    let ratios = config["compress_ratios"].as_array().unwrap().iter().map(|r| r.as_u64().unwrap()).collect();
    source.set("attention.compress_ratios", MetaValue::Uints(ratios));
    source.keys
}

pub struct Setup {
    pub config: Config,
    pub runner: Box<dyn ModelRunner>,
    pub experts: Arc<MemoryExperts<CpuBackend>>,
}

/// A runner over any metadata and weights.
pub fn setup(
    view: &dyn MetadataView,
    source: &dyn WeightSource,
    (threads, arithmetic, level): (usize, Arithmetic, SimdLevel),
    options: RunnerOptions,
    lease_max: usize,
) -> Setup {
    let backend = Arc::new(CpuBackend::new(threads, arithmetic, level).unwrap());
    let config = Config::from_metadata(view).unwrap();
    let model = Arc::new(DeepSeek4::load(view, Arc::clone(&backend), source).unwrap());
    let shape = (config.layers.len(), config.experts);
    let experts = Arc::new(MemoryExperts::new(backend, source, shape, lease_max));
    let runner = model.runner(options, experts.clone(), None).unwrap();
    Setup { config, runner, experts }
}

/// One of the golden models.
pub enum Fixture {
    File(Converted),
    Memory(Source),
}

impl Fixture {
    /// `a` and `c` are GGUF files, `b` is a checkpoint.
    pub fn open(name: &str) -> Self {
        match name {
            "a" => Self::File(Converted::open(&fixture("a").join("model.gguf"))),
            "c" => Self::File(Converted::open(&fixture("c").join("model-mixed.gguf"))),
            _ => Self::Memory(checkpoint(&fixture(name))),
        }
    }

    /// A runner in exact arithmetic on the best instruction set.
    pub fn setup(&self, threads: usize, options: RunnerOptions, lease_max: usize) -> Setup {
        self.setup_on((threads, Arithmetic::Quality, SimdLevel::detect()), options, lease_max)
    }

    /// As [`setup`].
    pub fn setup_on(&self, how: (usize, Arithmetic, SimdLevel), options: RunnerOptions, lease_max: usize) -> Setup {
        match self {
            Self::File(file) => setup(&file.metadata(), file, how, options, lease_max),
            Self::Memory(source) => setup(source, source, how, options, lease_max),
        }
    }
}
