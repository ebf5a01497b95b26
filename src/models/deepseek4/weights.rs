//! The tensors of a model (spec 2): which must be there, with which shapes, and the resident ones on a device.
//! Never touches routed experts beyond their shapes. Surprising fact: the output head's mix is a set of collapse weights only; it is padded
//! to a whole mix, so that the same op computes it.

use std::ops::Deref;

use super::config::{Config, LayerPlan};
use super::token_experts::TokenExperts;
use crate::backend::Backend;
use crate::models::blocks::hyper_connections::HcWeights;
use crate::models::blocks::layer_tensors::{Halves, LayerLoader, SpecList, Trunk};
use crate::models::weights::{Loader, TensorSpec, TypeClass, WeightSource, WeightsError, check};

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
    halves: Halves<B>,
    pub compressor: Option<CompressorWeights<B>>,
    pub indexer: Option<IndexerWeights<B>>,
    /// Experts by token, instead of a choice by the router.
    pub token_experts: Option<TokenExperts>,
}

impl<B: Backend> Deref for LayerWeights<B> {
    type Target = Halves<B>;

    fn deref(&self) -> &Halves<B> {
        &self.halves
    }
}

/// All resident tensors, and tables derived from the configuration.
pub type Weights<B> = Trunk<B, LayerWeights<B>, More<B>>;

/// What there is besides the layers and the trunk of every model.
pub struct More<B: Backend> {
    /// The mix of the output head.
    pub head_hc: HcWeights<B>,
    /// `[head_dim]` ones: query heads are normalised without a weight.
    pub ones: B::Buf,
    /// `[index_dim, index_dim]`: the orthogonal Hadamard transform (spec 3.6).
    pub hadamard: B::Mat,
}

/// Every tensor that a file of this configuration has, in the order of spec 2.
pub fn tensor_specs(c: &Config) -> Vec<TensorSpec> {
    use TypeClass::{Matrix, Plain};
    let mut specs = SpecList::default();
    specs.add("token_embd.weight".into(), &[c.hidden, c.vocab], Matrix);
    specs.add("output_hc_fn.weight".into(), &[c.streams * c.hidden, c.streams], Plain);
    specs.add("output_hc_scale.weight".into(), &[1], Plain);
    specs.add("output_hc_base.weight".into(), &[c.streams], Plain);
    specs.add("output_norm.weight".into(), &[c.hidden], Plain);
    specs.add("output.weight".into(), &[c.hidden, c.vocab], Matrix);
    for (layer, plan) in c.layers.iter().enumerate() {
        specs.attention_half(c, layer);
        compressors(&mut specs, c, (layer, plan));
        specs.expert_half(c, layer);
        let bias = specs.add(format!("blk.{layer}.exp_probs_b.bias"), &[c.experts], Plain);
        bias.optional = plan.is_hashed;
        if plan.is_hashed {
            let table = format!("blk.{layer}.ffn_gate_tid2eid.weight");
            specs.add(table, &[c.experts_per_token, c.vocab], TypeClass::Ids);
        }
    }
    specs.specs
}

/// Tensors of what a layer compresses.
fn compressors(specs: &mut SpecList, c: &Config, (layer, plan): (usize, &LayerPlan)) {
    use TypeClass::{Matrix, Plain};
    let kinds = [("attn", c.head_dim, plan.ratio > 0), ("indexer", c.index_dim, plan.has_indexer())];
    for (kind, width, _) in kinds.into_iter().filter(|(_, _, has)| *has) {
        let name = |tensor: &str| format!("blk.{layer}.{kind}_compressor_{tensor}.weight");
        let row = plan.parts() * width;
        specs.add(name("kv"), &[c.hidden, row], Matrix);
        specs.add(name("gate"), &[c.hidden, row], Matrix);
        specs.add(name("ape"), &[row, plan.ratio], Plain);
        specs.add(name("norm"), &[width], Plain);
    }
    if plan.has_indexer() {
        let name = |tensor: &str| format!("blk.{layer}.indexer.{tensor}.weight");
        specs.add(name("attn_q_b"), &[c.q_rank, c.index_heads * c.index_dim], Matrix);
        specs.add(name("proj"), &[c.hidden, c.index_heads], Matrix);
    }
}

/// Checks all tensors of the file, then loads the resident ones.
pub fn load<B: Backend>(config: &Config, backend: &B, source: &dyn WeightSource) -> Result<Weights<B>, WeightsError> {
    check(&tensor_specs(config), source)?;
    let loader = Loader::new(backend, source);
    let derived = |what: &str| {
        let name = format!("({what})");
        move |source| WeightsError::Backend { name, source }
    };
    let dim = config.index_dim;
    let more = More {
        head_hc: head_hc(config, &loader)?,
        ones: loader.put("ones", &vec![1.0; config.head_dim]).map_err(derived("ones"))?,
        hadamard: loader.put_matrix(dim, dim, &hadamard(dim)).map_err(derived("Hadamard matrix"))?,
    };
    Trunk::load(config, &loader, config.layers.len(), |layer| LayerWeights::load(config, layer, &loader), more)
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
        let tensors = LayerLoader { loader, layer };
        let compressor = |kind: &str| -> Result<CompressorWeights<B>, WeightsError> {
            Ok(CompressorWeights {
                values: tensors.matrix(&format!("{kind}_compressor_kv"))?,
                gate: tensors.matrix(&format!("{kind}_compressor_gate"))?,
                bias: tensors.vector(&format!("{kind}_compressor_ape"))?,
                norm: tensors.vector(&format!("{kind}_compressor_norm"))?,
            })
        };
        let indexer = || -> Result<IndexerWeights<B>, WeightsError> {
            Ok(IndexerWeights {
                q_b: tensors.matrix("indexer.attn_q_b")?,
                head_weights: tensors.matrix("indexer.proj")?,
                keys: compressor("indexer")?,
            })
        };
        let token_experts = || -> Result<TokenExperts, WeightsError> {
            let name = format!("blk.{layer}.ffn_gate_tid2eid.weight");
            TokenExperts::new(&name, loader.table(&name)?.as_slice(), config.experts_per_token, config.experts)
        };
        Ok(Self {
            // A bias of the router beside a table is unused (spec 3.9).
            halves: tensors.halves(!plan.is_hashed)?,
            compressor: (plan.ratio > 0).then(|| compressor("attn")).transpose()?,
            indexer: plan.has_indexer().then(indexer).transpose()?,
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
