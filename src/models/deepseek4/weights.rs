//! The tensors of a model (spec 2): which must be there, with which shapes, and the resident ones on a device.
//! Never touches routed experts beyond their shapes. Surprising fact: the output head's mix is a set of collapse weights only; it is padded
//! to a whole mix, so that the same op computes it.

use super::config::{Config, LayerPlan};
use super::token_experts::TokenExperts;
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

/// Tensors of one kind of compressed rows.
pub struct CompressorWeights<B: Backend> {
    pub values: B::Mat,
    pub gate: B::Mat,
    /// `[ratio, row]`: added to the gates by position in the group.
    pub bias: B::Buf,
    pub norm: B::Buf,
}

/// Tensors of a layer that chooses among its compressed rows.
pub struct IndexerWeights<B: Backend> {
    pub q_b: B::Mat,
    pub head_weights: B::Mat,
    pub keys: CompressorWeights<B>,
}

/// Resident tensors of one layer.
pub struct LayerWeights<B: Backend> {
    pub hc_attention: HcWeights<B>,
    pub hc_ffn: HcWeights<B>,
    pub attention: AttentionWeights<B>,
    pub compressor: Option<CompressorWeights<B>>,
    pub indexer: Option<IndexerWeights<B>>,
    pub moe: MoeWeights<B>,
    /// Experts by token, instead of a choice by the router.
    pub token_experts: Option<TokenExperts>,
}

/// All resident tensors, and tables derived from the configuration.
pub struct Weights<B: Backend> {
    pub embedding: B::Mat,
    pub head_hc: HcWeights<B>,
    pub output_norm: B::Buf,
    pub output: B::Mat,
    pub layers: Vec<LayerWeights<B>>,
    /// Angles per position: window-only layers, then layers with compressed rows.
    pub rope_freqs: [B::Buf; 2],
    /// `[head_dim]` ones: query heads are normalised without a weight.
    pub ones: B::Buf,
    /// `[index_dim, index_dim]`: the orthogonal Hadamard transform (spec 3.6).
    pub hadamard: B::Mat,
}

/// Every tensor that a file of this configuration has, in the order of spec 2.
pub fn tensor_specs(c: &Config) -> Vec<TensorSpec> {
    use TypeClass::{Matrix, Plain};
    let mut specs = SpecList { specs: Vec::new() };
    specs.add("token_embd.weight".into(), &[c.hidden, c.vocab], Matrix);
    specs.add("output_hc_fn.weight".into(), &[c.streams * c.hidden, c.streams], Plain);
    specs.add("output_hc_scale.weight".into(), &[1], Plain);
    specs.add("output_hc_base.weight".into(), &[c.streams], Plain);
    specs.add("output_norm.weight".into(), &[c.hidden], Plain);
    specs.add("output.weight".into(), &[c.hidden, c.vocab], Matrix);
    for (layer, plan) in c.layers.iter().enumerate() {
        specs.attention(c, layer);
        specs.compressors(c, layer, plan);
        specs.experts(c, layer, plan);
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

    fn attention(&mut self, c: &Config, layer: usize) {
        use TypeClass::{Matrix, Plain};
        let name = |tensor: &str| format!("blk.{layer}.{tensor}.weight");
        for part in ["attn", "ffn"] {
            self.add(name(&format!("hc_{part}_fn")), &[c.streams * c.hidden, c.mix_width()], Matrix);
            self.add(name(&format!("hc_{part}_scale")), &[3], Plain);
            self.add(name(&format!("hc_{part}_base")), &[c.mix_width()], Plain);
            self.add(name(&format!("{part}_norm")), &[c.hidden], Plain);
        }
        let group = c.q_width() / c.o_groups;
        self.add(name("attn_q_a"), &[c.hidden, c.q_rank], Matrix);
        self.add(name("attn_q_a_norm"), &[c.q_rank], Plain);
        self.add(name("attn_q_b"), &[c.q_rank, c.q_width()], Matrix);
        self.add(name("attn_kv"), &[c.hidden, c.head_dim], Matrix);
        self.add(name("attn_kv_a_norm"), &[c.head_dim], Plain);
        self.add(name("attn_sinks"), &[c.heads], Plain);
        self.add(name("attn_output_a"), &[group, c.o_groups * c.o_rank], Matrix);
        self.add(name("attn_output_b"), &[c.o_groups * c.o_rank, c.hidden], Matrix);
    }

    fn compressors(&mut self, c: &Config, layer: usize, plan: &LayerPlan) {
        use TypeClass::{Matrix, Plain};
        let kinds = [("attn", c.head_dim, plan.ratio > 0), ("indexer", c.index_dim, plan.has_indexer())];
        for (kind, width, _) in kinds.into_iter().filter(|(_, _, has)| *has) {
            let name = |tensor: &str| format!("blk.{layer}.{kind}_compressor_{tensor}.weight");
            let row = if plan.overlaps() { 2 * width } else { width };
            self.add(name("kv"), &[c.hidden, row], Matrix);
            self.add(name("gate"), &[c.hidden, row], Matrix);
            self.add(name("ape"), &[row, plan.ratio], Plain);
            self.add(name("norm"), &[width], Plain);
        }
        if plan.has_indexer() {
            let name = |tensor: &str| format!("blk.{layer}.indexer.{tensor}.weight");
            self.add(name("attn_q_b"), &[c.q_rank, c.index_heads * c.index_dim], Matrix);
            self.add(name("proj"), &[c.hidden, c.index_heads], Matrix);
        }
    }

    fn experts(&mut self, c: &Config, layer: usize, plan: &LayerPlan) {
        use TypeClass::{Ids, Matrix, Plain};
        let name = |tensor: &str| format!("blk.{layer}.{tensor}.weight");
        self.add(name("ffn_gate_inp"), &[c.hidden, c.experts], Plain);
        self.add(format!("blk.{layer}.exp_probs_b.bias"), &[c.experts], Plain).optional = plan.is_hashed;
        if plan.is_hashed {
            self.add(name("ffn_gate_tid2eid"), &[c.experts_per_token, c.vocab], Ids);
        }
        for (part, inputs, outputs) in
            [("gate", c.hidden, c.expert_width), ("up", c.hidden, c.expert_width), ("down", c.expert_width, c.hidden)]
        {
            self.add(name(&format!("ffn_{part}_shexp")), &[inputs, outputs], Matrix);
            let experts = self.add(name(&format!("ffn_{part}_exps")), &[inputs, outputs, c.experts], Matrix);
            experts.residency = Residency::Streamed;
        }
    }
}

impl<B: Backend> Weights<B> {
    /// Checks all tensors of the file, then loads the resident ones.
    pub fn load(config: &Config, backend: &B, source: &dyn WeightSource) -> Result<Self, WeightsError> {
        check(&tensor_specs(config), source)?;
        let loader = Loader::new(backend, source);
        let derived = |what: &str| {
            let name = format!("({what})");
            move |source| WeightsError::Backend { name, source }
        };
        let freqs =
            |compressed: bool| loader.put("rope table", &config.rope_freqs(compressed)).map_err(derived("rope table"));
        let dim = config.index_dim;
        Ok(Self {
            embedding: loader.matrix("token_embd.weight")?,
            head_hc: head_hc(config, &loader)?,
            output_norm: loader.vector("output_norm.weight")?,
            output: loader.matrix("output.weight")?,
            layers: (0..config.layers.len())
                .map(|layer| LayerWeights::load(config, layer, &loader))
                .collect::<Result<_, _>>()?,
            rope_freqs: [freqs(false)?, freqs(true)?],
            ones: loader.put("ones", &vec![1.0; config.head_dim]).map_err(derived("ones"))?,
            hadamard: loader.put_matrix(dim, dim, &hadamard(dim)).map_err(derived("Hadamard matrix"))?,
        })
    }
}

/// The mix of the output head (spec 3.13) as a mix of which only the collapse weights mean something.
fn head_hc<B: Backend>(c: &Config, loader: &Loader<'_, B>) -> Result<HcWeights<B>, WeightsError> {
    let padded = |name: &str, len: usize| -> Result<Vec<f32>, WeightsError> {
        let mut values = loader.values(&format!("output_hc_{name}.weight"))?;
        values.resize(len, 0.0);
        Ok(values)
    };
    let (width, cols) = (c.mix_width(), c.streams * c.hidden);
    let (mix, base, scale) = (padded("fn", width * cols)?, padded("base", width)?, padded("scale", 3)?);
    let failed = |source| WeightsError::Backend { name: "output_hc".into(), source };
    Ok(HcWeights {
        mix: loader.put_matrix(width, cols, &mix).map_err(failed)?,
        base: loader.put("head mix", &base).map_err(failed)?,
        scale: loader.put("head mix", &scale).map_err(failed)?,
    })
}

/// Sylvester's matrix of order `n`, scaled to be orthogonal.
fn hadamard(n: usize) -> Vec<f32> {
    let scale = (1.0 / (n as f64).sqrt()) as f32;
    let sign = |i: usize, j: usize| if (i & j).count_ones().is_multiple_of(2) { scale } else { -scale };
    (0..n * n).map(|at| sign(at / n, at % n)).collect()
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
        let compressor = |kind: &str| -> Result<CompressorWeights<B>, WeightsError> {
            Ok(CompressorWeights {
                values: matrix(&format!("{kind}_compressor_kv"))?,
                gate: matrix(&format!("{kind}_compressor_gate"))?,
                bias: vector(&format!("{kind}_compressor_ape"))?,
                norm: vector(&format!("{kind}_compressor_norm"))?,
            })
        };
        let indexer = || -> Result<IndexerWeights<B>, WeightsError> {
            Ok(IndexerWeights {
                q_b: matrix("indexer.attn_q_b")?,
                head_weights: matrix("indexer.proj")?,
                keys: compressor("indexer")?,
            })
        };
        let token_experts = || -> Result<TokenExperts, WeightsError> {
            let name = format!("blk.{layer}.ffn_gate_tid2eid.weight");
            TokenExperts::new(&name, loader.table(&name)?.as_slice(), config.experts_per_token, config.experts)
        };
        let bias = || loader.vector(&format!("blk.{layer}.exp_probs_b.bias"));
        Ok(Self {
            hc_attention: hc("attn")?,
            hc_ffn: hc("ffn")?,
            attention: AttentionWeights {
                norm: vector("attn_norm")?,
                sinks: vector("attn_sinks")?,
                q_a: matrix("attn_q_a")?,
                q_a_norm: vector("attn_q_a_norm")?,
                q_b: matrix("attn_q_b")?,
                kv: matrix("attn_kv")?,
                kv_norm: vector("attn_kv_a_norm")?,
                output_a: matrix("attn_output_a")?,
                output_b: matrix("attn_output_b")?,
            },
            compressor: (plan.ratio > 0).then(|| compressor("attn")).transpose()?,
            indexer: plan.has_indexer().then(indexer).transpose()?,
            moe: MoeWeights {
                norm: vector("ffn_norm")?,
                router: matrix("ffn_gate_inp")?,
                // A bias beside a table is unused (spec 3.9).
                bias: (!plan.is_hashed).then(bias).transpose()?,
                shared_gate: matrix("ffn_gate_shexp")?,
                shared_up: matrix("ffn_up_shexp")?,
                shared_down: matrix("ffn_down_shexp")?,
            },
            token_experts: plan.is_hashed.then(token_experts).transpose()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_transform_is_its_own_inverse() {
        let n = 32;
        let h = hadamard(n);
        for i in 0..n {
            for j in 0..n {
                let dot: f32 = (0..n).map(|k| h[i * n + k] * h[j * n + k]).sum();
                assert!((dot - f32::from(u8::from(i == j))).abs() < 1e-6);
            }
        }
    }
}
