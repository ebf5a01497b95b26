//! The tensors of a model (spec 2): which must be there, with which shapes, and the resident ones on a device.
//! Never touches routed experts or n-gram rows beyond their shapes. Surprising fact: the router bias for image tokens
//! is part of every file and unused for text.

use std::ops::Deref;

use super::config::Config;
use crate::backend::Backend;
use crate::models::blocks::layer_tensors::{Halves, LayerLoader, SpecList, Trunk};
use crate::models::weights::{Loader, Residency, TensorSpec, TypeClass, WeightSource, WeightsError, check};

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
    halves: Halves<B>,
    pub compressor: Option<CompressorWeights<B>>,
    pub indexer: Option<IndexerWeights<B>>,
    pub engram: Option<EngramWeights<B>>,
}

impl<B: Backend> Deref for LayerWeights<B> {
    type Target = Halves<B>;

    fn deref(&self) -> &Halves<B> {
        &self.halves
    }
}

/// All resident tensors, and tables derived from the configuration.
pub type Weights<B> = Trunk<B, LayerWeights<B>, ()>;

/// Every tensor that a file of this configuration has, in the order of spec 2.
pub fn tensor_specs(config: &Config) -> Vec<TensorSpec> {
    let mut specs = SpecList::default();
    specs.add("token_embd.weight".into(), &[config.hidden, config.vocab], TypeClass::Matrix);
    specs.add("output_norm.weight".into(), &[config.hidden], TypeClass::Plain);
    specs.add("output.weight".into(), &[config.hidden, config.vocab], TypeClass::Matrix);
    for layer in 0..config.layers.len() {
        specs.attention_half(config, layer);
        specs.expert_half(config, layer);
        specs.add(format!("blk.{layer}.exp_probs_b.bias"), &[config.experts], TypeClass::Plain);
        specs.add(format!("blk.{layer}.exp_probs_b_vl.bias"), &[config.experts], TypeClass::Plain).optional = true;
        some_layers(&mut specs, config, layer);
    }
    specs.specs
}

/// Spec 2.3.
fn some_layers(specs: &mut SpecList, c: &Config, layer: usize) {
    use TypeClass::{Bytes, Matrix, Plain};
    let name = |tensor: &str| format!("blk.{layer}.{tensor}");
    let plan = c.layers[layer];
    if plan.makes_rows {
        specs.add(name("attn_compressor_kv.weight"), &[c.hidden, c.head_dim], Matrix);
        if plan.ratio == 2 {
            specs.add(name("attn_compressor_gate.weight"), &[c.hidden, c.head_dim], Matrix);
        }
        specs.add(name("attn_compressor_norm.weight"), &[c.head_dim], Plain);
    }
    if plan.makes_keys {
        specs.add(name("indexer.attn_k.weight"), &[c.head_dim, c.index_dim], Matrix);
        specs.add(name("indexer.k_norm.weight"), &[c.index_dim], Plain);
    }
    if plan.selects_by.is_some() {
        specs.add(name("indexer.attn_q_b.weight"), &[c.q_rank, c.index_heads * c.index_dim], Matrix);
        specs.add(name("indexer.proj.weight"), &[c.hidden, c.index_heads], Matrix);
    }
    if let (Some(table), Some(engram)) = (plan.table, &c.engram) {
        specs.add(name("engram_q_norm.weight"), &[c.hidden, c.streams], Plain);
        specs.add(name("engram_k_norm.weight"), &[c.hidden, c.streams], Plain);
        let inputs = engram.columns() * engram.width;
        specs.add(name("engram_kv.weight"), &[inputs, (c.streams + 1) * c.hidden], Matrix);
        let rows = engram.rows[table] as usize;
        specs.add(name("engram_embd.weight"), &[engram.row_bytes, rows], Bytes).residency = Residency::DiskOnly;
    }
}

/// Checks all tensors of the file, then loads the resident ones.
pub fn load<B: Backend>(config: &Config, backend: &B, source: &dyn WeightSource) -> Result<Weights<B>, WeightsError> {
    check(&tensor_specs(config), source)?;
    let loader = Loader::new(backend, source);
    Trunk::load(config, &loader, config.layers.len(), |layer| LayerWeights::load(config, layer, &loader), ())
}

impl<B: Backend> LayerWeights<B> {
    fn load(config: &Config, layer: usize, loader: &Loader<'_, B>) -> Result<Self, WeightsError> {
        let plan = config.layers[layer];
        let tensors = LayerLoader { loader, layer };
        let (matrix, vector) = (|name: &str| tensors.matrix(name), |name: &str| tensors.vector(name));
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
            halves: tensors.halves(true)?,
            compressor: plan.makes_rows.then(compressor).transpose()?,
            indexer: plan.selects_by.map(|_| indexer()).transpose()?,
            engram: plan.table.map(|_| engram()).transpose()?,
        })
    }
}
