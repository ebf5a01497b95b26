//! Checkpoint folders for tests: the small fixtures loaded for changing, and one made by code whose rows are 256 wide.
//! Owns fixtures only; never calls the converter. Surprising fact: values are drawn from the storage formats' own codes,
//! so every checkpoint is exactly what its bytes say.
#![allow(dead_code)] // Each test binary uses its own part of this.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

/// One stored tensor.
#[derive(Clone)]
pub struct Stored {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// A checkpoint in memory.
#[derive(Clone)]
pub struct Checkpoint {
    pub config: Value,
    pub tensors: BTreeMap<String, Stored>,
    /// Other files of the folder.
    pub files: BTreeMap<String, Vec<u8>>,
}

/// The folder of a fixture.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/deepseek_v41").join(name)
}

fn write_tensors(path: &Path, tensors: &[(&String, &Stored)]) {
    let mut views = Vec::new();
    for (name, t) in tensors {
        let view = TensorView::new(t.dtype, t.shape.clone(), &t.bytes).expect("shape and bytes agree");
        views.push(((*name).clone(), view));
    }
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

impl Checkpoint {
    pub fn load(folder: &Path) -> Self {
        let bytes = fs::read(folder.join("model.safetensors")).unwrap();
        let parsed = SafeTensors::deserialize(&bytes).unwrap();
        let stored = |(name, t): (String, TensorView)| {
            (name, Stored { dtype: t.dtype(), shape: t.shape().to_vec(), bytes: t.data().to_vec() })
        };
        let mut files = BTreeMap::new();
        for name in ["engram.json", "tokenizer.json", "tokenizer_config.json"] {
            if let Ok(bytes) = fs::read(folder.join(name)) {
                files.insert(name.to_owned(), bytes);
            }
        }
        let config = serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
        Self { config, tensors: parsed.tensors().into_iter().map(stored).collect(), files }
    }

    fn save_rest(&self, folder: &Path) {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join("config.json"), serde_json::to_string_pretty(&self.config).unwrap()).unwrap();
        for (name, bytes) in &self.files {
            fs::write(folder.join(name), bytes).unwrap();
        }
    }

    pub fn save(&self, folder: &Path) {
        self.save_rest(folder);
        write_tensors(&folder.join("model.safetensors"), &self.tensors.iter().collect::<Vec<_>>());
    }

    /// As `count` files and an index.
    pub fn save_sharded(&self, folder: &Path, count: usize) {
        self.save_rest(folder);
        let all: Vec<_> = self.tensors.iter().collect();
        let mut map = serde_json::Map::new();
        for i in 0..count {
            // Dealt like cards, so that a weight and its scale lie in different files.
            let part: Vec<_> = all.iter().skip(i).step_by(count).copied().collect();
            let file = format!("model-{:05}-of-{count:05}.safetensors", i + 1);
            write_tensors(&folder.join(&file), &part);
            map.extend(part.iter().map(|(name, _)| ((*name).clone(), json!(file))));
        }
        let index = json!({"metadata": {}, "weight_map": map});
        fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
    }

    /// Sets a key of the text model's configuration.
    pub fn set(&mut self, key: &str, value: Value) {
        self.config["text_config"][key] = value;
    }
}

/// A cheap deterministic sequence of bytes.
struct Stream(u64);

impl Stream {
    fn next(&mut self) -> u8 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 56) as u8
    }
    fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next()).collect()
    }
    /// E4M3 codes without NaN.
    fn e4m3(&mut self, n: usize) -> Vec<u8> {
        self.bytes(n).into_iter().map(|b| if b & 0x7f == 0x7f { b & 0xf0 } else { b }).collect()
    }
    /// E8M0 codes around 2^-10.
    fn e8m0(&mut self, n: usize) -> Vec<u8> {
        self.bytes(n).into_iter().map(|b| 114 + b % 6).collect()
    }
    /// F32 values in (-1, 1).
    fn f32(&mut self, n: usize) -> Vec<u8> {
        (0..n).flat_map(|_| (f32::from(self.next()) / 128.0 - 1.0).to_le_bytes()).collect()
    }
    /// BF16 values of the same kind.
    fn bf16(&mut self, n: usize) -> Vec<u8> {
        (0..n).flat_map(|_| (((f32::from(self.next()) / 128.0 - 1.0).to_bits() >> 16) as u16).to_le_bytes()).collect()
    }
}

const HIDDEN: usize = 256;
const VOCAB: usize = 64;

/// A two-layer model whose matrices have rows of 256, so that every type fits, with a table on layer 1.
pub fn wide(experts: usize) -> Checkpoint {
    let mut config: Value = serde_json::from_slice(&fs::read(fixture("b").join("config.json")).unwrap()).unwrap();
    let text = json!({
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64,
        "q_lora_rank": 256, "o_groups": 1, "o_lora_rank": 256, "moe_intermediate_size": 256,
        "n_routed_experts": experts, "compress_ratios": [0, 2], "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1], "candidate_source_layer_id": 1, "index_n_heads": 4, "index_head_dim": 32,
        "engram_layer_ids": [1], "engram_max_ngram_size": 3, "engram_n_heads": 2, "engram_head_dim": 32,
        "engram_vocab_size": 11, "engram_num_embeddings": [60], "engram_compressed_vocab_size": VOCAB,
    });
    config["text_config"].as_object_mut().unwrap().extend(text.as_object().unwrap().clone());
    let engram = json!({
        "token_map": (0..VOCAB).collect::<Vec<_>>(), "primes": [[[11, 13], [17, 19]]],
        "multipliers": [[3, 5, 7]], "pad_id": 2,
    });
    let mut made = Maker { tensors: BTreeMap::new(), stream: Stream(1) };
    for (name, rows) in [("embed.weight", VOCAB), ("head.weight", VOCAB)] {
        made.bf16(name, &[rows, HIDDEN]);
    }
    made.f32("norm.weight", &[HIDDEN]);
    for layer in 0..2 {
        made.layer(layer, experts);
    }
    let files = [("engram.json".to_owned(), engram.to_string().into_bytes())].into();
    Checkpoint { config, tensors: made.tensors, files }
}

struct Maker {
    tensors: BTreeMap<String, Stored>,
    stream: Stream,
}

impl Maker {
    fn put(&mut self, name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) {
        self.tensors.insert(name.into(), Stored { dtype, shape: shape.to_vec(), bytes });
    }
    fn f32(&mut self, name: &str, shape: &[usize]) {
        let bytes = self.stream.f32(shape.iter().product());
        self.put(name, Dtype::F32, shape, bytes);
    }
    fn bf16(&mut self, name: &str, shape: &[usize]) {
        let bytes = self.stream.bf16(shape.iter().product());
        self.put(name, Dtype::BF16, shape, bytes);
    }
    fn fp8(&mut self, stem: &str, rows: usize, columns: usize, tile_rows: usize) {
        let (codes, scale) = (self.stream.e4m3(rows * columns), [rows.div_ceil(tile_rows), columns / 32]);
        let scales = self.stream.e8m0(scale[0] * scale[1]);
        self.put(&format!("{stem}.weight"), Dtype::F8_E4M3, &[rows, columns], codes);
        self.put(&format!("{stem}.scale"), Dtype::F8_E8M0, &scale, scales);
    }
    fn fp4(&mut self, stem: &str, rows: usize, columns: usize) {
        let (codes, scales) = (self.stream.bytes(rows * columns / 2), self.stream.e8m0(rows * columns / 32));
        self.put(&format!("{stem}.weight"), Dtype::I8, &[rows, columns / 2], codes);
        self.put(&format!("{stem}.scale"), Dtype::F8_E8M0, &[rows, columns / 32], scales);
    }
    fn layer(&mut self, layer: usize, experts: usize) {
        let l = |rest: &str| format!("layers.{layer}.{rest}");
        for kind in ["attn", "ffn"] {
            self.f32(&l(&format!("hc_{kind}_fn")), &[24, 4 * HIDDEN]);
            self.f32(&l(&format!("hc_{kind}_base")), &[24]);
            self.f32(&l(&format!("hc_{kind}_scale")), &[3]);
            self.f32(&l(&format!("{kind}_norm.weight")), &[HIDDEN]);
        }
        self.f32(&l("attn.attn_sink"), &[4]);
        self.f32(&l("attn.q_norm.weight"), &[256]);
        self.f32(&l("attn.kv_norm.weight"), &[64]);
        for (name, rows) in [("wq_a", 256), ("wq_b", 256), ("wkv", 64), ("wo_a", 256), ("wo_b", HIDDEN)] {
            self.fp8(&l(&format!("attn.{name}")), rows, 256, 32);
        }
        self.bf16(&l("ffn.gate.weight"), &[experts, HIDDEN]);
        self.f32(&l("ffn.gate.bias"), &[experts]);
        for w in ["w1", "w2", "w3"] {
            self.fp8(&l(&format!("ffn.shared_experts.{w}")), 256, 256, 32);
            for e in 0..experts {
                self.fp4(&l(&format!("ffn.experts.{e}.{w}")), 256, 256);
            }
        }
        if layer == 1 {
            for (name, rows, columns) in
                [("compressor.wkv", 64, 256), ("compressor.wgate", 64, 256), ("indexer.wk", 32, 64)]
            {
                self.bf16(&l(&format!("attn.{name}.weight")), &[rows, columns]);
            }
            self.f32(&l("attn.compressor.norm.weight"), &[64]);
            self.f32(&l("attn.indexer.k_norm.weight"), &[32]);
            self.fp8(&l("attn.indexer.wq_b"), 128, 256, 32);
            self.bf16(&l("attn.indexer.weights_proj.weight"), &[4, HIDDEN]);
            self.f32(&l("engram.q_weight"), &[4, HIDDEN]);
            self.f32(&l("engram.k_weight"), &[4, HIDDEN]);
            self.fp8(&l("engram.wkv"), 5 * HIDDEN, 128, 32);
            self.fp8(&l("engram.embed"), 60, 32, 1);
        }
    }
}
