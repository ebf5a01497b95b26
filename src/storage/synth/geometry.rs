//! What follows from the sizes of a synthetic model: its tensors and their dimensions.
//! Owns shapes (spec 2 of each architecture); never a value. Surprising fact: one table of dimensions serves both architectures, because a
//! name that they share means the same in both.

use super::SynthError;
use super::deepseek4;
use super::deepseek41::{self, Tables};
use super::dims::Dims;
use crate::storage::convert::names::{Name, OVERLAPPED, Schedule, Where};
use crate::storage::convert::{Arch, TensorClass};
use crate::storage::gguf::Metadata;
use crate::storage::layout::engram_row_bytes;

/// Most bytes of one tensor, so that sums stay far from overflow.
const TENSOR_BYTES_MAX: u64 = 1 << 46;
/// Largest value of some sizes.
const LIMITS: [(&str, u32); 4] =
    [("num_hidden_layers", 4096), ("n_routed_experts", 65_535), ("vocab_size", 1 << 20), ("hc_mult", 8)];

/// A tensor of the file.
pub(super) struct Tensor {
    pub(super) name: String,
    /// The name without its layer.
    pub(super) stem: &'static str,
    pub(super) class: TensorClass,
    /// Fastest dimension first.
    pub(super) dims: Vec<u64>,
}

/// Sizes with everything that follows from them.
pub(super) struct Geometry<'a> {
    pub(super) dims: &'a Dims,
    pub(super) schedule: Schedule,
    pub(super) tables: Option<Tables>,
}

impl<'a> Geometry<'a> {
    pub(super) fn new(dims: &'a Dims) -> Result<Self, SynthError> {
        for (name, limit) in LIMITS {
            dims.check(name, dims.get(name) <= limit, &format!("at most {limit}"))?;
        }
        let groups = dims.get("o_groups");
        dims.check("o_groups", dims.get("num_attention_heads").is_multiple_of(groups), "must divide the heads")?;
        let used = dims.get("num_experts_per_tok");
        dims.check("num_experts_per_tok", used <= dims.get("n_routed_experts"), "more than the experts of a layer")?;
        let (schedule, tables) = match dims.arch() {
            Arch::DeepSeek41 => {
                let tables = Tables::new(dims)?;
                (deepseek41::schedule(dims, tables.as_ref()), tables)
            }
            Arch::DeepSeek4 => (deepseek4::schedule(dims), None),
        };
        let geometry = Self { dims, schedule, tables };
        for tensor in geometry.tensors() {
            let bytes = tensor.dims.iter().try_fold(4u64, |a, d| a.checked_mul(*d));
            if bytes.is_none_or(|b| b > TENSOR_BYTES_MAX) {
                let reason = format!("larger than the limit of {TENSOR_BYTES_MAX} bytes a tensor");
                return Err(SynthError::Dim { name: tensor.name, value: format!("{:?}", tensor.dims), reason });
            }
        }
        Ok(geometry)
    }

    fn get(&self, name: &str) -> u64 {
        u64::from(self.dims.get(name))
    }

    pub(super) fn layers(&self) -> u32 {
        self.dims.get("num_hidden_layers")
    }

    pub(super) fn vocab(&self) -> u32 {
        self.dims.get("vocab_size")
    }

    pub(super) fn experts(&self) -> u32 {
        self.dims.get("n_routed_experts")
    }

    pub(super) fn experts_per_token(&self) -> u32 {
        self.dims.get("num_experts_per_tok")
    }

    /// All tensors in file order; tables last, as in converted files.
    pub(super) fn tensors(&self) -> Vec<Tensor> {
        let arch = self.dims.arch();
        let mut tensors = Vec::new();
        let mut add = |name: &Name, layer: Option<u32>| {
            let full = layer.map_or_else(|| name.gguf.to_owned(), |l| format!("blk.{l}.{}", name.gguf));
            let dims = self.dims_of(name.gguf, layer.unwrap_or(0));
            tensors.push(Tensor { name: full, stem: name.gguf, class: name.class, dims });
        };
        arch.global().for_each(|name| add(name, None));
        for rows in [false, true] {
            for layer in 0..self.layers() {
                let wanted = |n: &&Name| n.layers == Where::Present || self.schedule.wants(layer, n.layers);
                let turn = |n: &&Name| (n.class == TensorClass::Rows) == rows;
                arch.layer().filter(turn).filter(wanted).for_each(|name| add(name, Some(layer)));
            }
        }
        tensors
    }

    /// Dimensions of spec 2.
    fn dims_of(&self, stem: &str, layer: u32) -> Vec<u64> {
        let hidden = self.get("hidden_size");
        let (width, experts) = (self.get("moe_intermediate_size"), self.get("n_routed_experts"));
        let (streams, heads, head) = (self.get("hc_mult"), self.get("num_attention_heads"), self.get("head_dim"));
        let (q_rank, groups, o_rank) = (self.get("q_lora_rank"), self.get("o_groups"), self.get("o_lora_rank"));
        let (index_heads, index_dim) = (self.get("index_n_heads"), self.get("index_head_dim"));
        let ratio = u64::from(self.schedule.ratios[layer as usize]);
        // A token's projection has a part for the next group, too.
        let parts = if ratio == u64::from(OVERLAPPED) { 2 } else { 1 };
        match stem {
            "token_embd.weight" | "output.weight" => vec![hidden, self.get("vocab_size")],
            "output_hc_fn.weight" => vec![streams * hidden, streams],
            "output_hc_base.weight" => vec![streams],
            "output_hc_scale.weight" => vec![1],
            "hc_attn_fn.weight" | "hc_ffn_fn.weight" => vec![streams * hidden, streams * (streams + 2)],
            "hc_attn_base.weight" | "hc_ffn_base.weight" => vec![streams * (streams + 2)],
            "hc_attn_scale.weight" | "hc_ffn_scale.weight" => vec![3],
            "attn_norm.weight" | "ffn_norm.weight" | "output_norm.weight" => vec![hidden],
            "attn_sinks.weight" => vec![heads],
            "attn_q_a.weight" => vec![hidden, q_rank],
            "attn_q_a_norm.weight" => vec![q_rank],
            "attn_q_b.weight" => vec![q_rank, heads * head],
            "attn_kv.weight" => vec![hidden, head],
            "attn_kv_a_norm.weight" | "attn_compressor_norm.weight" => vec![head],
            "attn_output_a.weight" => vec![heads * head / groups, groups * o_rank],
            "attn_output_b.weight" => vec![groups * o_rank, hidden],
            "attn_compressor_kv.weight" | "attn_compressor_gate.weight" => vec![hidden, parts * head],
            "attn_compressor_ape.weight" => vec![parts * head, ratio],
            "indexer_compressor_kv.weight" | "indexer_compressor_gate.weight" => vec![hidden, parts * index_dim],
            "indexer_compressor_ape.weight" => vec![parts * index_dim, ratio],
            "indexer_compressor_norm.weight" => vec![index_dim],
            "indexer.attn_k.weight" => vec![head, index_dim],
            "indexer.k_norm.weight" => vec![index_dim],
            "indexer.attn_q_b.weight" => vec![q_rank, index_heads * index_dim],
            "indexer.proj.weight" => vec![hidden, index_heads],
            "engram_q_norm.weight" | "engram_k_norm.weight" => vec![hidden, streams],
            "engram_kv.weight" => vec![self.tables().columns() * self.tables().width, (streams + 1) * hidden],
            "ffn_gate_inp.weight" => vec![hidden, experts],
            "exp_probs_b.bias" | "exp_probs_b_vl.bias" => vec![experts],
            "ffn_gate_tid2eid.weight" => vec![self.get("num_experts_per_tok"), self.get("vocab_size")],
            "ffn_gate_shexp.weight" | "ffn_up_shexp.weight" => vec![hidden, width],
            "ffn_down_shexp.weight" => vec![width, hidden],
            "ffn_gate_exps.weight" | "ffn_up_exps.weight" => vec![hidden, width, experts],
            "ffn_down_exps.weight" => vec![width, hidden, experts],
            "engram_embd.weight" => vec![engram_row_bytes(self.tables().width), self.tables().rows_of(layer)],
            other => unreachable!("{other} is not in the table of names"),
        }
    }

    fn tables(&self) -> &Tables {
        self.tables.as_ref().expect("only layers with a table have these tensors")
    }

    /// Adds the keys that say what the file computes.
    pub(super) fn describe(&self, m: &mut Metadata) {
        match self.dims.arch() {
            Arch::DeepSeek41 => deepseek41::describe(self, m),
            Arch::DeepSeek4 => deepseek4::describe(self.dims, &self.schedule, m),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::synth::Shape;

    #[test]
    fn any_number_of_layers_has_a_schedule() {
        for layers in 1..50 {
            for arch in Arch::ALL {
                let mut dims = Dims::of(arch, Shape::Small);
                dims.set("num_hidden_layers", layers).unwrap();
                let g = Geometry::new(&dims).unwrap();
                assert_eq!(g.schedule.ratios.len(), layers as usize);
                assert!(g.schedule.engram.iter().all(|l| *l < layers), "{layers}");
                assert!(g.schedule.hashed <= layers, "{layers}");
            }
        }
    }
}
