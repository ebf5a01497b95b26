//! Tensors that every architecture of this family has, around its layers and in each of them: their list, and how they come to a device.
//! Never knows which others a layer has. Surprising fact: the bias of the router is not among them, since a layer may choose its experts
//! without one.

use super::backbone::Backbone;
use super::hyper_connections::HcWeights;
use super::moe::MoeWeights;
use crate::backend::Backend;
use crate::models::weights::{Loader, Residency, TensorSpec, TypeClass, WeightsError};

/// The tensors of a file, as they are listed.
#[derive(Default)]
pub struct SpecList {
    pub specs: Vec<TensorSpec>,
}

impl SpecList {
    /// Adds a resident tensor that must be there; what is returned may still say otherwise.
    pub fn add(&mut self, name: String, dims: &[usize], types: TypeClass) -> &mut TensorSpec {
        let dims = dims.iter().map(|d| *d as u64).collect();
        self.specs.push(TensorSpec { name, dims, types, residency: Residency::Resident, optional: false });
        let last = self.specs.len() - 1;
        &mut self.specs[last]
    }

    /// Hyper-connections, norms and attention projections of `layer`.
    pub fn attention_half(&mut self, b: &Backbone, layer: usize) {
        use TypeClass::{Matrix, Plain};
        let name = |tensor: &str| format!("blk.{layer}.{tensor}.weight");
        for part in ["attn", "ffn"] {
            self.add(name(&format!("hc_{part}_fn")), &[b.streams * b.hidden, b.mix_width()], Matrix);
            self.add(name(&format!("hc_{part}_base")), &[b.mix_width()], Plain);
            self.add(name(&format!("hc_{part}_scale")), &[3], Plain);
            self.add(name(&format!("{part}_norm")), &[b.hidden], Plain);
        }
        self.add(name("attn_sinks"), &[b.heads], Plain);
        self.add(name("attn_q_a"), &[b.hidden, b.q_rank], Matrix);
        self.add(name("attn_q_a_norm"), &[b.q_rank], Plain);
        self.add(name("attn_q_b"), &[b.q_rank, b.q_width()], Matrix);
        self.add(name("attn_kv"), &[b.hidden, b.head_dim], Matrix);
        self.add(name("attn_kv_a_norm"), &[b.head_dim], Plain);
        self.add(name("attn_output_a"), &[b.q_width() / b.o_groups, b.o_width()], Matrix);
        self.add(name("attn_output_b"), &[b.o_width(), b.hidden], Matrix);
    }

    /// Router, shared expert and routed experts of `layer`.
    pub fn expert_half(&mut self, b: &Backbone, layer: usize) {
        use TypeClass::{Matrix, Plain};
        let name = |tensor: &str| format!("blk.{layer}.{tensor}.weight");
        self.add(name("ffn_gate_inp"), &[b.hidden, b.experts], Plain);
        let (hidden, width) = (b.hidden, b.expert_width);
        for (part, inputs, outputs) in [("gate", hidden, width), ("up", hidden, width), ("down", width, hidden)] {
            self.add(name(&format!("ffn_{part}_shexp")), &[inputs, outputs], Matrix);
            let experts = self.add(name(&format!("ffn_{part}_exps")), &[inputs, outputs, b.experts], Matrix);
            experts.residency = Residency::Streamed;
        }
    }
}

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

/// Tensors that every layer has: of its attention half and of its expert half.
pub struct Halves<B: Backend> {
    pub hc_attention: HcWeights<B>,
    pub hc_ffn: HcWeights<B>,
    pub attention: AttentionWeights<B>,
    pub moe: MoeWeights<B>,
}

/// Tensors that every model has around its layers of `L`, what all layers share, and whatever `more` an architecture has.
pub struct Trunk<B: Backend, L, M> {
    pub embedding: B::Mat,
    pub output_norm: B::Buf,
    pub output: B::Mat,
    pub layers: Vec<L>,
    /// Angles per position: layers with a window only, then layers with compressed rows.
    pub rope_freqs: [B::Buf; 2],
    pub more: M,
}

impl<B: Backend, L, M> Trunk<B, L, M> {
    /// Loads them; `layer` loads one of `layers`.
    pub fn load(
        b: &Backbone,
        loader: &Loader<'_, B>,
        layers: usize,
        layer: impl Fn(usize) -> Result<L, WeightsError>,
        more: M,
    ) -> Result<Self, WeightsError> {
        Ok(Self {
            embedding: loader.matrix("token_embd.weight")?,
            output_norm: loader.vector("output_norm.weight")?,
            output: loader.matrix("output.weight")?,
            layers: (0..layers).map(layer).collect::<Result<_, _>>()?,
            rope_freqs: rope_tables(b, loader)?,
            more,
        })
    }
}

/// Loads the tensors of one layer.
pub struct LayerLoader<'a, B: Backend> {
    pub loader: &'a Loader<'a, B>,
    pub layer: usize,
}

impl<B: Backend> LayerLoader<'_, B> {
    /// The matrix `blk.LAYER.TENSOR.weight`.
    pub fn matrix(&self, tensor: &str) -> Result<B::Mat, WeightsError> {
        self.loader.matrix(&format!("blk.{}.{tensor}.weight", self.layer))
    }

    /// The vector `blk.LAYER.TENSOR.weight`.
    pub fn vector(&self, tensor: &str) -> Result<B::Buf, WeightsError> {
        self.loader.vector(&format!("blk.{}.{tensor}.weight", self.layer))
    }

    /// The mix of the sublayer `attn` or `ffn`.
    fn hyper_connection(&self, part: &str) -> Result<HcWeights<B>, WeightsError> {
        Ok(HcWeights {
            mix: self.matrix(&format!("hc_{part}_fn"))?,
            base: self.vector(&format!("hc_{part}_base"))?,
            scale: self.vector(&format!("hc_{part}_scale"))?,
        })
    }

    /// What every layer has; a bias of the router where the layer `has_bias`.
    pub fn halves(&self, has_bias: bool) -> Result<Halves<B>, WeightsError> {
        Ok(Halves {
            hc_attention: self.hyper_connection("attn")?,
            hc_ffn: self.hyper_connection("ffn")?,
            attention: self.attention()?,
            moe: self.experts(has_bias)?,
        })
    }

    /// The projections of the attention half.
    fn attention(&self) -> Result<AttentionWeights<B>, WeightsError> {
        Ok(AttentionWeights {
            norm: self.vector("attn_norm")?,
            sinks: self.vector("attn_sinks")?,
            q_a: self.matrix("attn_q_a")?,
            q_a_norm: self.vector("attn_q_a_norm")?,
            q_b: self.matrix("attn_q_b")?,
            kv: self.matrix("attn_kv")?,
            kv_norm: self.vector("attn_kv_a_norm")?,
            output_a: self.matrix("attn_output_a")?,
            output_b: self.matrix("attn_output_b")?,
        })
    }

    /// Router and shared expert; a bias of the router where the layer `has_bias`.
    fn experts(&self, has_bias: bool) -> Result<MoeWeights<B>, WeightsError> {
        let bias = || self.loader.vector(&format!("blk.{}.exp_probs_b.bias", self.layer));
        Ok(MoeWeights {
            norm: self.vector("ffn_norm")?,
            router: self.matrix("ffn_gate_inp")?,
            bias: has_bias.then(bias).transpose()?,
            shared_gate: self.matrix("ffn_gate_shexp")?,
            shared_up: self.matrix("ffn_up_shexp")?,
            shared_down: self.matrix("ffn_down_shexp")?,
        })
    }
}

/// Angles per position: of layers with a window only, then of those with compressed rows.
fn rope_tables<B: Backend>(b: &Backbone, loader: &Loader<'_, B>) -> Result<[B::Buf; 2], WeightsError> {
    let put = |compressed: bool| {
        let table = loader.put("rope table", &b.rope_freqs(compressed));
        table.map_err(|source| WeightsError::Backend { name: "(rope table)".into(), source })
    };
    Ok([put(false)?, put(true)?])
}
