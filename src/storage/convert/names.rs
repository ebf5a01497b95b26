//! Names of the tensors of V4.1 and V4 in checkpoints and in GGUF files, their classes, and which layers have them (spec 2 of each).
//! Owns the one table of names; never looks at shapes or types.
//! Surprising fact: layers differ, so a tensor is expected by a rule over config.json, not by being found.

use crate::storage::gguf::Metadata;

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
    /// Experts by token: I32 in every recipe.
    Ids,
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
            TensorClass::Ids => "ids",
        }
    }
}

/// Which layers have a tensor (spec 1.2 and 2 of each architecture).
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
    /// Layers whose experts follow from the token id.
    Hashed,
    /// All others.
    Routed,
    /// Wherever the checkpoint has it.
    Present,
}

/// Which layers have which parts.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(in crate::storage) struct Schedule {
    /// Tokens of a compressed row by layer.
    pub(in crate::storage) ratios: Vec<u32>,
    pub(in crate::storage) kv_sources: Vec<u32>,
    pub(in crate::storage) index_sources: Vec<u32>,
    /// Layers with an n-gram table.
    pub(in crate::storage) engram: Vec<u32>,
    /// The first layers, whose experts follow from the token id.
    pub(in crate::storage) hashed: u32,
}

impl Schedule {
    /// The schedule of a V4 model, which follows from its ratios (spec 1.2).
    pub(in crate::storage) fn of_ratios(ratios: Vec<u32>, hashed: u32) -> Self {
        let layers = |has: fn(u32) -> bool| -> Vec<u32> {
            let all = ratios.iter().zip(0..);
            all.filter(|(ratio, _)| has(**ratio)).map(|(_, layer)| layer).collect()
        };
        let (kv_sources, index_sources) = (layers(|ratio| ratio > 0), layers(|ratio| ratio == OVERLAPPED));
        Self { kv_sources, index_sources, engram: Vec::new(), hashed, ratios }
    }

    /// Whether `layer` must have the tensors of `rule`.
    pub(in crate::storage) fn wants(&self, layer: u32, rule: Where) -> bool {
        let makes_rows = self.kv_sources.contains(&layer);
        match rule {
            Where::Every => true,
            Where::KvSource => makes_rows,
            Where::PoolingSource => makes_rows && self.ratios[layer as usize] > 1,
            Where::IndexKeys => makes_rows && self.index_sources.contains(&layer),
            Where::IndexSource => self.index_sources.contains(&layer),
            Where::Engram => self.engram.contains(&layer),
            Where::Hashed => layer < self.hashed,
            Where::Routed => layer >= self.hashed,
            Where::Present => false,
        }
    }
}

/// Ratio at which a compressed row also takes the tokens of the group before it, and is chosen by an indexer (spec 1.2).
pub(in crate::storage) const OVERLAPPED: u32 = 4;

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

use TensorClass::{Attention, Down, Embedding, Fixed, GateUp, Head, Ids, Indexer, Mixing, Ngram, Rows, Shared};

/// An architecture whose checkpoints can be converted and whose files can be made up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arch {
    DeepSeek41,
    DeepSeek4,
}

impl Arch {
    /// All of them.
    pub const ALL: [Arch; 2] = [Arch::DeepSeek41, Arch::DeepSeek4];

    /// `general.architecture` of its files.
    pub const fn name(self) -> &'static str {
        match self {
            Arch::DeepSeek41 => "deepseek41",
            Arch::DeepSeek4 => "deepseek4",
        }
    }

    /// `tokenizer.ggml.pre` of its files: two names of the same rules, the one that other readers of the architecture know.
    pub(in crate::storage) const fn splitting(self) -> &'static str {
        match self {
            Arch::DeepSeek41 => "joyai-llm",
            Arch::DeepSeek4 => "deepseek-v3",
        }
    }

    /// The architecture of a file that says so.
    pub(super) fn of_gguf(metadata: &Metadata) -> Option<Self> {
        let found = metadata.str("general.architecture").ok()?;
        Self::ALL.into_iter().find(|arch| arch.name() == found)
    }

    /// Start of `model_type` in its config.json.
    pub(super) const fn model_type(self) -> &'static str {
        match self {
            Arch::DeepSeek41 => "deepseek_v41",
            Arch::DeepSeek4 => "deepseek_v4",
        }
    }

    /// Its tensors outside layers; the names are complete.
    pub(in crate::storage) fn global(self) -> impl Iterator<Item = &'static Name> {
        let own: &'static [Name] = match self {
            Arch::DeepSeek41 => &[],
            Arch::DeepSeek4 => &V4_HEAD,
        };
        GLOBAL.iter().chain(own)
    }

    /// Its tensors of a layer in file order.
    pub(in crate::storage) fn layer(self) -> impl Iterator<Item = &'static Name> {
        let [rows, routing, last]: [&'static [Name]; 3] = match self {
            Arch::DeepSeek41 => [&V41_ROWS, &V41_ROUTING, &V41_TABLE],
            Arch::DeepSeek4 => [&V4_ROWS, &V4_ROUTING, &[]],
        };
        let parts: [&'static [Name]; 6] = [&ATTENTION_HALF, rows, &ROUTER, routing, &EXPERTS, last];
        parts.into_iter().flatten()
    }

    /// Checkpoint tensors of a layer that the text model has no use for, where they are not in the table: biases beside a table of
    /// experts, and those of images.
    pub(super) fn is_unused(self, part: &str) -> bool {
        self == Arch::DeepSeek4 && ["ffn.gate.bias", "ffn.gate.bias_vl"].contains(&part)
    }

    /// Class of a GGUF tensor, `None` for a name that the architecture does not have.
    pub(super) fn class_of(self, gguf_name: &str) -> Option<TensorClass> {
        if let Some(found) = self.global().find(|n| n.gguf == gguf_name) {
            return Some(found.class);
        }
        let (layer, stem) = gguf_name.strip_prefix("blk.")?.split_once('.')?;
        layer.parse::<u32>().ok()?;
        self.layer().find(|n| n.gguf == stem).map(|n| n.class)
    }
}

/// `#` in a checkpoint name of a layer stands for the expert number.
static GLOBAL: [Name; 3] = [
    name("token_embd.weight", "embed.weight", Embedding, Where::Every),
    name("output_norm.weight", "norm.weight", Fixed, Where::Every),
    name("output.weight", "head.weight", Head, Where::Every),
];
static V4_HEAD: [Name; 3] = [
    name("output_hc_fn.weight", "hc_head_fn", Mixing, Where::Every),
    name("output_hc_base.weight", "hc_head_base", Fixed, Where::Every),
    name("output_hc_scale.weight", "hc_head_scale", Fixed, Where::Every),
];
static ATTENTION_HALF: [Name; 15] = [
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
];
static V41_ROWS: [Name; 10] = [
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
];
static V4_ROWS: [Name; 10] = [
    name("attn_compressor_kv.weight", "attn.compressor.wkv.weight", Indexer, Where::KvSource),
    name("attn_compressor_gate.weight", "attn.compressor.wgate.weight", Indexer, Where::KvSource),
    name("attn_compressor_ape.weight", "attn.compressor.ape", Fixed, Where::KvSource),
    name("attn_compressor_norm.weight", "attn.compressor.norm.weight", Fixed, Where::KvSource),
    name("indexer.attn_q_b.weight", "attn.indexer.wq_b.weight", Indexer, Where::IndexSource),
    name("indexer.proj.weight", "attn.indexer.weights_proj.weight", Indexer, Where::IndexSource),
    name("indexer_compressor_kv.weight", "attn.indexer.compressor.wkv.weight", Indexer, Where::IndexSource),
    name("indexer_compressor_gate.weight", "attn.indexer.compressor.wgate.weight", Indexer, Where::IndexSource),
    name("indexer_compressor_ape.weight", "attn.indexer.compressor.ape", Fixed, Where::IndexSource),
    name("indexer_compressor_norm.weight", "attn.indexer.compressor.norm.weight", Fixed, Where::IndexSource),
];
static ROUTER: [Name; 2] = [
    name("ffn_norm.weight", "ffn_norm.weight", Fixed, Where::Every),
    name("ffn_gate_inp.weight", "ffn.gate.weight", Fixed, Where::Every),
];
static V41_ROUTING: [Name; 2] = [
    name("exp_probs_b.bias", "ffn.gate.bias", Fixed, Where::Every),
    name("exp_probs_b_vl.bias", "ffn.gate.bias_vl", Fixed, Where::Present),
];
static V4_ROUTING: [Name; 2] = [
    name("exp_probs_b.bias", "ffn.gate.bias", Fixed, Where::Routed),
    name("ffn_gate_tid2eid.weight", "ffn.gate.tid2eid", Ids, Where::Hashed),
];
static EXPERTS: [Name; 6] = [
    name("ffn_gate_shexp.weight", "ffn.shared_experts.w1.weight", Shared, Where::Every),
    name("ffn_up_shexp.weight", "ffn.shared_experts.w3.weight", Shared, Where::Every),
    name("ffn_down_shexp.weight", "ffn.shared_experts.w2.weight", Shared, Where::Every),
    name("ffn_gate_exps.weight", "ffn.experts.#.w1.weight", GateUp, Where::Every),
    name("ffn_up_exps.weight", "ffn.experts.#.w3.weight", GateUp, Where::Every),
    name("ffn_down_exps.weight", "ffn.experts.#.w2.weight", Down, Where::Every),
];
/// The last tensors of the file, after all layers.
static V41_TABLE: [Name; 1] = [name("engram_embd.weight", "engram.embed.weight", Rows, Where::Engram)];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schedule_follows_from_ratios() {
        let schedule = Schedule::of_ratios(vec![0, 0, 4, 128], 1);
        let layers = |rule| (0..4).filter(|layer| schedule.wants(*layer, rule)).collect::<Vec<_>>();
        assert_eq!(layers(Where::KvSource), [2, 3]);
        assert_eq!(layers(Where::IndexSource), [2]);
        assert_eq!((layers(Where::Hashed), layers(Where::Routed)), (vec![0], vec![1, 2, 3]));
    }

    #[test]
    fn names_have_one_class_each() {
        for arch in Arch::ALL {
            let mut seen = std::collections::BTreeSet::new();
            assert!(arch.global().chain(arch.layer()).all(|name| seen.insert(name.gguf)), "{arch:?}");
        }
        assert_eq!(Arch::DeepSeek4.class_of("blk.0.ffn_gate_tid2eid.weight"), Some(Ids));
        assert_eq!(Arch::DeepSeek41.class_of("blk.0.ffn_gate_tid2eid.weight"), None);
        assert_eq!(Arch::DeepSeek41.class_of("blk.3.engram_embd.weight"), Some(Rows));
    }
}
