//! The tensors of a model (spec 2): which must be there, with which shapes, and the resident ones on a device.
//! Never touches routed experts or n-gram rows beyond their shapes. Surprising fact: the router bias for image tokens
//! is part of every file and unused for text.

use super::config::Config;
use crate::backend::Backend;
use crate::models::blocks::hyper_connections::HcWeights;
use crate::models::blocks::moe::MoeWeights;
use crate::models::weights::{Loader, Residency, TensorSpec, TypeClass, WeightSource, WeightsError, check};

/// Query, window and output tensors of one layer.
pub struct AttentionWeights<B: Backend> {
    pub norm: B::Buf,
    pub sinks: B::Buf,
    pub q_a: B::Mat,
    pub q_a_norm: B::Buf,
    pub q_b: B::Mat,
    pub kv: B::Mat,
    pub kv_norm: B::Buf,
    pub output_a: B::Mat,
    pub output_b: B::Mat,
}

/// Tensors of a layer that makes compressed rows.
pub struct CompressorWeights<B: Backend> {
    pub values: B::Mat,
    /// Ratio 2 only.
    pub gate: Option<B::Mat>,
    pub norm: B::Buf,
    /// Index key projection and norm, where the layer makes index keys.
    pub keys: Option<(B::Mat, B::Buf)>,
}

/// Tensors of a layer that computes a selection.
pub struct IndexerWeights<B: Backend> {
    pub q_b: B::Mat,
    pub head_weights: B::Mat,
}

/// Tensors of a layer with n-gram memory, without the table.
pub struct EngramWeights<B: Backend> {
    pub keys_value: B::Mat,
    pub q_norm: B::Buf,
    pub k_norm: B::Buf,
}

/// Resident tensors of one layer.
pub struct LayerWeights<B: Backend> {
    pub hc_attention: HcWeights<B>,
    pub hc_ffn: HcWeights<B>,
    pub attention: AttentionWeights<B>,
    pub compressor: Option<CompressorWeights<B>>,
    pub indexer: Option<IndexerWeights<B>>,
    pub moe: MoeWeights<B>,
    pub engram: Option<EngramWeights<B>>,
}

/// All resident tensors, and tables derived from the configuration.
pub struct Weights<B: Backend> {
    pub embedding: B::Mat,
    pub output_norm: B::Buf,
    pub output: B::Mat,
    pub layers: Vec<LayerWeights<B>>,
    /// Angles per position: window-only layers, then layers with compressed rows.
    pub rope_freqs: [B::Buf; 2],
}

/// Every tensor that a file of this configuration has, in the order of spec 2.
pub fn tensor_specs(config: &Config) -> Vec<TensorSpec> {
    let mut specs = SpecList { specs: Vec::new() };
    specs.add("token_embd.weight".into(), &[config.hidden, config.vocab], TypeClass::Matrix);
    specs.add("output_norm.weight".into(), &[config.hidden], TypeClass::Plain);
    specs.add("output.weight".into(), &[config.hidden, config.vocab], TypeClass::Matrix);
    for layer in 0..config.layers.len() {
        specs.layer(config, layer);
        specs.some_layers(config, layer);
    }
    specs.specs
}

struct SpecList {
    specs: Vec<TensorSpec>,
}

impl SpecList {
    fn add(&mut self, name: String, dims: &[usize], types: TypeClass) -> &mut TensorSpec {
        let dims = dims.iter().map(|d| *d as u64).collect();
        self.specs.push(TensorSpec { name, dims, types, residency: Residency::Resident, optional: false });
        let last = self.specs.len() - 1;
        &mut self.specs[last]
    }

    /// Spec 2.2.
    fn layer(&mut self, c: &Config, layer: usize) {
        use TypeClass::{Matrix, Plain};
        let name = |tensor: &str| format!("blk.{layer}.{tensor}");
        for part in ["attn", "ffn"] {
            self.add(name(&format!("hc_{part}_fn.weight")), &[c.streams * c.hidden, c.mix_width()], Matrix);
            self.add(name(&format!("hc_{part}_base.weight")), &[c.mix_width()], Plain);
            self.add(name(&format!("hc_{part}_scale.weight")), &[3], Plain);
            self.add(name(&format!("{part}_norm.weight")), &[c.hidden], Plain);
        }
        let group = c.q_width() / c.o_groups;
        self.add(name("attn_sinks.weight"), &[c.heads], Plain);
        self.add(name("attn_q_a.weight"), &[c.hidden, c.q_rank], Matrix);
        self.add(name("attn_q_a_norm.weight"), &[c.q_rank], Plain);
        self.add(name("attn_q_b.weight"), &[c.q_rank, c.q_width()], Matrix);
        self.add(name("attn_kv.weight"), &[c.hidden, c.head_dim], Matrix);
        self.add(name("attn_kv_a_norm.weight"), &[c.head_dim], Plain);
        self.add(name("attn_output_a.weight"), &[group, c.o_groups * c.o_rank], Matrix);
        self.add(name("attn_output_b.weight"), &[c.o_groups * c.o_rank, c.hidden], Matrix);
        self.add(name("ffn_gate_inp.weight"), &[c.hidden, c.experts], Plain);
        self.add(name("exp_probs_b.bias"), &[c.experts], Plain);
        self.add(name("exp_probs_b_vl.bias"), &[c.experts], Plain).optional = true;
        for (part, inputs, outputs) in
            [("gate", c.hidden, c.expert_width), ("up", c.hidden, c.expert_width), ("down", c.expert_width, c.hidden)]
        {
            self.add(name(&format!("ffn_{part}_shexp.weight")), &[inputs, outputs], Matrix);
            let experts = self.add(name(&format!("ffn_{part}_exps.weight")), &[inputs, outputs, c.experts], Matrix);
            experts.residency = Residency::Streamed;
        }
    }

    /// Spec 2.3.
    fn some_layers(&mut self, c: &Config, layer: usize) {
        use TypeClass::{Bytes, Matrix, Plain};
        let name = |tensor: &str| format!("blk.{layer}.{tensor}");
        let plan = c.layers[layer];
        if plan.makes_rows {
            self.add(name("attn_compressor_kv.weight"), &[c.hidden, c.head_dim], Matrix);
            if plan.ratio == 2 {
                self.add(name("attn_compressor_gate.weight"), &[c.hidden, c.head_dim], Matrix);
            }
            self.add(name("attn_compressor_norm.weight"), &[c.head_dim], Plain);
        }
        if plan.makes_keys {
            self.add(name("indexer.attn_k.weight"), &[c.head_dim, c.index_dim], Matrix);
            self.add(name("indexer.k_norm.weight"), &[c.index_dim], Plain);
        }
        if plan.selects_by.is_some() {
            self.add(name("indexer.attn_q_b.weight"), &[c.q_rank, c.index_heads * c.index_dim], Matrix);
            self.add(name("indexer.proj.weight"), &[c.hidden, c.index_heads], Matrix);
        }
        if let (Some(table), Some(engram)) = (plan.table, &c.engram) {
            self.add(name("engram_q_norm.weight"), &[c.hidden, c.streams], Plain);
            self.add(name("engram_k_norm.weight"), &[c.hidden, c.streams], Plain);
            let inputs = engram.columns() * engram.width;
            self.add(name("engram_kv.weight"), &[inputs, (c.streams + 1) * c.hidden], Matrix);
            let rows = engram.rows[table] as usize;
            self.add(name("engram_embd.weight"), &[engram.row_bytes, rows], Bytes).residency = Residency::DiskOnly;
        }
    }
}

impl<B: Backend> Weights<B> {
    /// Checks all tensors of the file, then loads the resident ones.
    pub fn load(config: &Config, backend: &B, source: &dyn WeightSource) -> Result<Self, WeightsError> {
        check(&tensor_specs(config), source)?;
        let loader = Loader::new(backend, source);
        let freqs = |compressed: bool| {
            let put = loader.put("rope table", &config.rope_freqs(compressed));
            put.map_err(|source| WeightsError::Backend { name: "(rope table)".into(), source })
        };
        Ok(Self {
            embedding: loader.matrix("token_embd.weight")?,
            output_norm: loader.vector("output_norm.weight")?,
            output: loader.matrix("output.weight")?,
            layers: (0..config.layers.len())
                .map(|layer| LayerWeights::load(config, layer, &loader))
                .collect::<Result<_, _>>()?,
            rope_freqs: [freqs(false)?, freqs(true)?],
        })
    }
}

impl<B: Backend> LayerWeights<B> {
    fn load(config: &Config, layer: usize, loader: &Loader<'_, B>) -> Result<Self, WeightsError> {
        let plan = config.layers[layer];
        let matrix = |tensor: &str| loader.matrix(&format!("blk.{layer}.{tensor}.weight"));
        let vector = |tensor: &str| loader.vector(&format!("blk.{layer}.{tensor}.weight"));
        let hc = |part: &str| -> Result<HcWeights<B>, WeightsError> {
            Ok(HcWeights {
                mix: matrix(&format!("hc_{part}_fn"))?,
                base: vector(&format!("hc_{part}_base"))?,
                scale: vector(&format!("hc_{part}_scale"))?,
            })
        };
        let attention = AttentionWeights {
            norm: vector("attn_norm")?,
            sinks: vector("attn_sinks")?,
            q_a: matrix("attn_q_a")?,
            q_a_norm: vector("attn_q_a_norm")?,
            q_b: matrix("attn_q_b")?,
            kv: matrix("attn_kv")?,
            kv_norm: vector("attn_kv_a_norm")?,
            output_a: matrix("attn_output_a")?,
            output_b: matrix("attn_output_b")?,
        };
        let compressor = || -> Result<CompressorWeights<B>, WeightsError> {
            Ok(CompressorWeights {
                values: matrix("attn_compressor_kv")?,
                gate: (plan.ratio == 2).then(|| matrix("attn_compressor_gate")).transpose()?,
                norm: vector("attn_compressor_norm")?,
                keys: match plan.makes_keys {
                    true => Some((matrix("indexer.attn_k")?, vector("indexer.k_norm")?)),
                    false => None,
                },
            })
        };
        let indexer = || -> Result<IndexerWeights<B>, WeightsError> {
            Ok(IndexerWeights { q_b: matrix("indexer.attn_q_b")?, head_weights: matrix("indexer.proj")? })
        };
        let engram = || -> Result<EngramWeights<B>, WeightsError> {
            Ok(EngramWeights {
                keys_value: matrix("engram_kv")?,
                q_norm: vector("engram_q_norm")?,
                k_norm: vector("engram_k_norm")?,
            })
        };
        Ok(Self {
            hc_attention: hc("attn")?,
            hc_ffn: hc("ffn")?,
            attention,
            compressor: plan.makes_rows.then(compressor).transpose()?,
            indexer: plan.selects_by.map(|_| indexer()).transpose()?,
            moe: MoeWeights {
                norm: vector("ffn_norm")?,
                router: matrix("ffn_gate_inp")?,
                bias: Some(loader.vector(&format!("blk.{layer}.exp_probs_b.bias"))?),
                shared_gate: matrix("ffn_gate_shexp")?,
                shared_up: matrix("ffn_up_shexp")?,
                shared_down: matrix("ffn_down_shexp")?,
            },
            engram: plan.table.map(|_| engram()).transpose()?,
        })
    }
}
