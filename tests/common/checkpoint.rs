//! A published-format checkpoint (safetensors, config.json) as metadata and weights of a model.
//! Never goes through a GGUF file, so it checks the graph apart from the converter. Surprising fact: everything is decoded
//! to F32, which is exact for BF16, FP8 tiles and FP4 blocks.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use ds4::backend::SharedBytes;
use ds4::models::metadata::{MetaValue, MetadataView};
use ds4::models::weights::{TensorShape, WeightSource};
use ds4::quant::QuantType;
use ds4::quant::minifloat::{E2M1, E4M3, E8M0, bf16_value};
use safetensors::tensor::{Dtype, SafeTensors};
use serde_json::Value;

/// A checkpoint in memory.
pub struct Checkpoint {
    pub config: Value,
    engram: Option<Value>,
    tensors: HashMap<String, (TensorShape, SharedBytes)>,
}

/// Folder of a small fixture.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/deepseek_v41").join(name)
}

fn read_json(path: &Path) -> Option<Value> {
    std::fs::read(path).ok().map(|bytes| serde_json::from_slice(&bytes).unwrap())
}

impl Checkpoint {
    pub fn open(dir: &Path) -> Self {
        let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let mut config = read_json(&dir.join("config.json")).unwrap();
        let mut this = Self {
            config: config["text_config"].take(),
            engram: read_json(&dir.join("engram.json")),
            tensors: HashMap::new(),
        };
        let layers = this.config["num_hidden_layers"].as_u64().unwrap();
        for name in ["embed.weight", "norm.weight", "head.weight"] {
            this.add(&file, name, gguf_name(name).into());
        }
        for layer in 0..layers {
            for name in file.names() {
                let Some(part) = name.strip_prefix(&format!("layers.{layer}.")) else { continue };
                if part.ends_with(".scale") || part.contains(".experts.") || part == "engram.embed.weight" {
                    continue;
                }
                this.add(&file, name, format!("blk.{layer}.{}", gguf_name(part)));
            }
            this.add_experts(&file, layer);
            this.add_table(&file, layer);
        }
        this
    }

    fn put(&mut self, name: String, dims: Vec<u64>, values: &[f32]) {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.tensors.insert(name, (TensorShape { ty: QuantType::F32, dims }, bytes.into()));
    }

    fn add(&mut self, file: &SafeTensors, from: &str, to: String) {
        let (shape, values) = decode(file, from, 32);
        self.put(to, shape.iter().rev().map(|d| *d as u64).collect(), &values);
    }

    fn add_experts(&mut self, file: &SafeTensors, layer: u64) {
        let experts = self.config["n_routed_experts"].as_u64().unwrap();
        for (part, name) in [("w1", "gate"), ("w3", "up"), ("w2", "down")] {
            let (mut all, mut dims) = (Vec::new(), Vec::new());
            for expert in 0..experts {
                let (shape, values) = decode(file, &format!("layers.{layer}.ffn.experts.{expert}.{part}.weight"), 32);
                all.extend(values);
                dims = vec![shape[1] as u64, shape[0] as u64, experts];
            }
            self.put(format!("blk.{layer}.ffn_{name}_exps.weight"), dims, &all);
        }
    }

    fn add_table(&mut self, file: &SafeTensors, layer: u64) {
        let Ok(codes) = file.tensor(&format!("layers.{layer}.engram.embed.weight")) else { return };
        let scales = file.tensor(&format!("layers.{layer}.engram.embed.scale")).unwrap();
        let (rows, width) = (codes.shape()[0], codes.shape()[1]);
        let groups = scales.shape()[1];
        let mut bytes = Vec::new();
        for row in 0..rows {
            bytes.extend_from_slice(&codes.data()[row * width..][..width]);
            bytes.extend_from_slice(&scales.data()[row * groups..][..groups]);
        }
        let dims = vec![(width + groups) as u64, rows as u64];
        let name = format!("blk.{layer}.engram_embd.weight");
        self.tensors.insert(name, (TensorShape { ty: QuantType::I8, dims }, bytes.into()));
    }
}

/// Shape and values of a tensor, whatever it is stored as; FP8 values share a scale in tiles of `tile` x `tile`.
pub fn decode(file: &SafeTensors, name: &str, tile: usize) -> (Vec<usize>, Vec<f32>) {
    let tensor = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
    let (data, mut shape) = (tensor.data(), tensor.shape().to_vec());
    let scale = || file.tensor(&name.replace(".weight", ".scale")).unwrap();
    let values = match tensor.dtype() {
        Dtype::F32 => data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
        Dtype::BF16 => data.chunks_exact(2).map(|b| bf16_value(u16::from_le_bytes(b.try_into().unwrap()))).collect(),
        Dtype::F8_E4M3 => {
            let (cols, scale) = (shape[1], scale());
            let scale_cols = scale.shape()[1];
            let at = |i: usize| E8M0[scale.data()[i / cols / tile * scale_cols + i % cols / tile] as usize];
            data.iter().enumerate().map(|(i, code)| E4M3[*code as usize] * at(i)).collect()
        }
        Dtype::I8 | Dtype::U8 => {
            shape[1] *= 2;
            let scale = scale();
            let code = |i: usize| E2M1[(data[i / 2] >> (4 * (i % 2)) & 15) as usize];
            (0..2 * data.len()).map(|i| code(i) * E8M0[scale.data()[i / 32] as usize]).collect()
        }
        other => panic!("{name}: {other:?}"),
    };
    (shape, values)
}

/// Name in a GGUF file; layer parts without their prefix.
pub fn gguf_name(name: &str) -> &str {
    match name {
        "embed.weight" => "token_embd.weight",
        "norm.weight" => "output_norm.weight",
        "head.weight" => "output.weight",
        "hc_attn_fn" => "hc_attn_fn.weight",
        "hc_ffn_fn" => "hc_ffn_fn.weight",
        "hc_attn_base" => "hc_attn_base.weight",
        "hc_ffn_base" => "hc_ffn_base.weight",
        "hc_attn_scale" => "hc_attn_scale.weight",
        "hc_ffn_scale" => "hc_ffn_scale.weight",
        "attn.attn_sink" => "attn_sinks.weight",
        "attn.wq_a.weight" => "attn_q_a.weight",
        "attn.q_norm.weight" => "attn_q_a_norm.weight",
        "attn.wq_b.weight" => "attn_q_b.weight",
        "attn.wkv.weight" => "attn_kv.weight",
        "attn.kv_norm.weight" => "attn_kv_a_norm.weight",
        "attn.wo_a.weight" => "attn_output_a.weight",
        "attn.wo_b.weight" => "attn_output_b.weight",
        "ffn.gate.weight" => "ffn_gate_inp.weight",
        "ffn.gate.bias" => "exp_probs_b.bias",
        "ffn.gate.bias_vl" => "exp_probs_b_vl.bias",
        "ffn.shared_experts.w1.weight" => "ffn_gate_shexp.weight",
        "ffn.shared_experts.w3.weight" => "ffn_up_shexp.weight",
        "ffn.shared_experts.w2.weight" => "ffn_down_shexp.weight",
        "attn.compressor.wkv.weight" => "attn_compressor_kv.weight",
        "attn.compressor.wgate.weight" => "attn_compressor_gate.weight",
        "attn.compressor.norm.weight" => "attn_compressor_norm.weight",
        "attn.indexer.wk.weight" => "indexer.attn_k.weight",
        "attn.indexer.k_norm.weight" => "indexer.k_norm.weight",
        "attn.indexer.wq_b.weight" => "indexer.attn_q_b.weight",
        "attn.indexer.weights_proj.weight" => "indexer.proj.weight",
        "engram.wkv.weight" => "engram_kv.weight",
        "engram.q_weight" => "engram_q_norm.weight",
        "engram.k_weight" => "engram_k_norm.weight",
        same => same,
    }
}

impl WeightSource for Checkpoint {
    fn shape(&self, name: &str) -> Option<TensorShape> {
        self.tensors.get(name).map(|(shape, _)| shape.clone())
    }

    fn bytes(&self, name: &str) -> Option<SharedBytes> {
        self.tensors.get(name).map(|(_, bytes)| bytes.clone())
    }
}

/// All integers below a JSON value, in order.
fn flat(value: &Value) -> Vec<u64> {
    match value {
        Value::Array(items) => items.iter().flat_map(flat).collect(),
        other => vec![other.as_u64().unwrap()],
    }
}

impl MetadataView for Checkpoint {
    fn get(&self, key: &str) -> Option<MetaValue<'_>> {
        if key == "general.architecture" {
            return Some(MetaValue::Text("deepseek41"));
        }
        let name = key.strip_prefix("deepseek41.")?;
        if let Some(part) = name.strip_prefix("engram.") {
            let engram = self.engram.as_ref()?;
            return Some(match part {
                "encoding" => match self.config["engram_head_dim"].as_u64().unwrap() {
                    32 => MetaValue::Text("e4m3_e8m0_32_row33"),
                    64 => MetaValue::Text("e4m3_e8m0_32_row66"),
                    other => panic!("no name for width {other}"),
                },
                "layer_ids" => MetaValue::Uints(flat(&self.config["engram_layer_ids"])),
                "rows" => MetaValue::Uints(flat(&self.config["engram_num_embeddings"])),
                "compressed_vocab_size" => {
                    MetaValue::Uint(self.config["engram_compressed_vocab_size"].as_u64().unwrap())
                }
                "pad_id" => {
                    let id = engram.get("pad_compressed_id").or(engram.get("pad_id")).unwrap();
                    MetaValue::Uint(id.as_u64().unwrap())
                }
                other => MetaValue::Uints(flat(engram.get(other)?)),
            });
        }
        let value = match name.strip_prefix("rope_scaling.") {
            Some(part) => &self.config["rope_scaling"][part],
            None => self.config.get(name)?,
        };
        match value {
            Value::Number(n) if n.is_u64() => n.as_u64().map(MetaValue::Uint),
            Value::Number(n) => n.as_f64().map(|v| MetaValue::Float(v as f32)),
            Value::Bool(b) => Some(MetaValue::Bool(*b)),
            Value::String(text) => Some(MetaValue::Text(text)),
            Value::Array(_) => Some(MetaValue::Uints(flat(value))),
            _ => None,
        }
    }
}
