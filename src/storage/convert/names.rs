//! Names of the V4.1 tensors in checkpoints and in GGUF files, their classes, and which layers have them (spec 2).
//! Owns the one table of names; never looks at shapes or types.
//! Surprising fact: layers differ, so a tensor is expected by a rule over config.json, not by being found.

/// What a tensor is for: the left side of a recipe.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum TensorClass {
    Embedding,
    Attention,
    Shared,
    /// Indexer and compressor matrices.
    Indexer,
    /// Hyper-connection mixing matrices.
    Mixing,
    GateUp,
    Down,
    Head,
    /// The projection of looked-up n-gram rows.
    Ngram,
    /// Router, norms, biases, scales, sinks: F32 in every recipe.
    Fixed,
    /// N-gram table rows: the bytes of the checkpoint in every recipe.
    Rows,
}

impl TensorClass {
    /// Classes whose type a recipe chooses.
    pub const SETTABLE: [TensorClass; 9] = [
        TensorClass::Embedding,
        TensorClass::Attention,
        TensorClass::Shared,
        TensorClass::Indexer,
        TensorClass::Mixing,
        TensorClass::GateUp,
        TensorClass::Down,
        TensorClass::Head,
        TensorClass::Ngram,
    ];

    /// The name used on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            TensorClass::Embedding => "embedding",
            TensorClass::Attention => "attention",
            TensorClass::Shared => "shared",
            TensorClass::Indexer => "indexer",
            TensorClass::Mixing => "mixing",
            TensorClass::GateUp => "gate_up",
            TensorClass::Down => "down",
            TensorClass::Head => "head",
            TensorClass::Ngram => "ngram",
            TensorClass::Fixed => "fixed",
            TensorClass::Rows => "rows",
        }
    }
}

/// Which layers have a tensor (spec 1.2 and 2.3).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::storage) enum Where {
    Every,
    /// Layers that make compressed rows.
    KvSource,
    /// Those of them that pool several tokens into one row.
    PoolingSource,
    /// Those of them that also make index keys.
    IndexKeys,
    /// Layers that choose rows.
    IndexSource,
    Engram,
    /// Wherever the checkpoint has it.
    Present,
}

/// One line of the table: name after `blk.L.`, name after `layers.L.`, class, layers.
#[derive(Clone, Copy, Debug)]
pub(in crate::storage) struct Name {
    pub(in crate::storage) gguf: &'static str,
    pub(in crate::storage) checkpoint: &'static str,
    pub(in crate::storage) class: TensorClass,
    pub(in crate::storage) layers: Where,
}

const fn name(gguf: &'static str, checkpoint: &'static str, class: TensorClass, layers: Where) -> Name {
    Name { gguf, checkpoint, class, layers }
}

use TensorClass::{Attention, Down, Embedding, Fixed, GateUp, Head, Indexer, Mixing, Ngram, Rows, Shared};

/// Tensors outside layers; the names are complete.
pub(in crate::storage) const GLOBAL: [Name; 3] = [
    name("token_embd.weight", "embed.weight", Embedding, Where::Every),
    name("output_norm.weight", "norm.weight", Fixed, Where::Every),
    name("output.weight", "head.weight", Head, Where::Every),
];

/// Tensors of a layer in file order. `#` in a checkpoint name stands for the expert number.
pub(in crate::storage) const LAYER: [Name; 36] = [
    name("hc_attn_fn.weight", "hc_attn_fn", Mixing, Where::Every),
    name("hc_attn_base.weight", "hc_attn_base", Fixed, Where::Every),
    name("hc_attn_scale.weight", "hc_attn_scale", Fixed, Where::Every),
    name("hc_ffn_fn.weight", "hc_ffn_fn", Mixing, Where::Every),
    name("hc_ffn_base.weight", "hc_ffn_base", Fixed, Where::Every),
    name("hc_ffn_scale.weight", "hc_ffn_scale", Fixed, Where::Every),
    name("attn_norm.weight", "attn_norm.weight", Fixed, Where::Every),
    name("attn_sinks.weight", "attn.attn_sink", Fixed, Where::Every),
    name("attn_q_a.weight", "attn.wq_a.weight", Attention, Where::Every),
    name("attn_q_a_norm.weight", "attn.q_norm.weight", Fixed, Where::Every),
    name("attn_q_b.weight", "attn.wq_b.weight", Attention, Where::Every),
    name("attn_kv.weight", "attn.wkv.weight", Attention, Where::Every),
    name("attn_kv_a_norm.weight", "attn.kv_norm.weight", Fixed, Where::Every),
    name("attn_output_a.weight", "attn.wo_a.weight", Attention, Where::Every),
    name("attn_output_b.weight", "attn.wo_b.weight", Attention, Where::Every),
    name("attn_compressor_kv.weight", "attn.compressor.wkv.weight", Indexer, Where::KvSource),
    name("attn_compressor_gate.weight", "attn.compressor.wgate.weight", Indexer, Where::PoolingSource),
    name("attn_compressor_norm.weight", "attn.compressor.norm.weight", Fixed, Where::KvSource),
    name("indexer.attn_k.weight", "attn.indexer.wk.weight", Indexer, Where::IndexKeys),
    name("indexer.k_norm.weight", "attn.indexer.k_norm.weight", Fixed, Where::IndexKeys),
    name("indexer.attn_q_b.weight", "attn.indexer.wq_b.weight", Indexer, Where::IndexSource),
    name("indexer.proj.weight", "attn.indexer.weights_proj.weight", Indexer, Where::IndexSource),
    name("engram_q_norm.weight", "engram.q_weight", Fixed, Where::Engram),
    name("engram_k_norm.weight", "engram.k_weight", Fixed, Where::Engram),
    name("engram_kv.weight", "engram.wkv.weight", Ngram, Where::Engram),
    name("ffn_norm.weight", "ffn_norm.weight", Fixed, Where::Every),
    name("ffn_gate_inp.weight", "ffn.gate.weight", Fixed, Where::Every),
    name("exp_probs_b.bias", "ffn.gate.bias", Fixed, Where::Every),
    name("exp_probs_b_vl.bias", "ffn.gate.bias_vl", Fixed, Where::Present),
    name("ffn_gate_shexp.weight", "ffn.shared_experts.w1.weight", Shared, Where::Every),
    name("ffn_up_shexp.weight", "ffn.shared_experts.w3.weight", Shared, Where::Every),
    name("ffn_down_shexp.weight", "ffn.shared_experts.w2.weight", Shared, Where::Every),
    name("ffn_gate_exps.weight", "ffn.experts.#.w1.weight", GateUp, Where::Every),
    name("ffn_up_exps.weight", "ffn.experts.#.w3.weight", GateUp, Where::Every),
    name("ffn_down_exps.weight", "ffn.experts.#.w2.weight", Down, Where::Every),
    // The last tensors of the file, after all layers: see `plan`.
    name("engram_embd.weight", "engram.embed.weight", Rows, Where::Engram),
];

/// Class of a GGUF tensor, `None` for a name that V4.1 does not have.
pub(super) fn class_of(gguf_name: &str) -> Option<TensorClass> {
    if let Some(found) = GLOBAL.iter().find(|n| n.gguf == gguf_name) {
        return Some(found.class);
    }
    let (layer, stem) = gguf_name.strip_prefix("blk.")?.split_once('.')?;
    layer.parse::<u32>().ok()?;
    LAYER.iter().find(|n| n.gguf == stem).map(|n| n.class)
}
