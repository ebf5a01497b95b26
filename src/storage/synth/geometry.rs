//! Sizes of a synthetic model: the published ones or a small set, with replacements, and the tensors and keys that follow.
//! Owns shapes (spec 1, 2); never a value. Surprising fact: the schedule of layers is the published one stretched to any number of
//! layers, so that few layers still have every kind.

use super::SynthError;
use crate::storage::convert::TensorClass;
use crate::storage::convert::engram::{multipliers, primes_from};
use crate::storage::convert::names::{GLOBAL, LAYER, Name, Where};
use crate::storage::gguf::Metadata;
use crate::storage::layout::{engram_encoding, engram_row_bytes};

/// A set of sizes to start from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shape {
    /// The published model (spec 1.1).
    Full,
    /// A few megabytes, every part present: for tests.
    Small,
}

/// Name in config.json, published value, small value.
const SIZES: [(&str, u32, u32); 33] = [
    ("vocab_size", 129_280, 1024),
    ("hidden_size", 5120, 256),
    ("moe_intermediate_size", 2304, 256),
    ("num_hidden_layers", 40, 6),
    ("num_attention_heads", 64, 4),
    ("num_key_value_heads", 1, 1),
    ("head_dim", 512, 64),
    ("qk_rope_head_dim", 64, 32),
    ("q_lora_rank", 1280, 128),
    ("o_lora_rank", 1024, 64),
    ("o_groups", 8, 2),
    ("n_routed_experts", 384, 16),
    ("n_shared_experts", 1, 1),
    ("num_experts_per_tok", 6, 3),
    ("max_position_embeddings", 1_048_576, 65_536),
    ("sliding_window", 128, 32),
    ("index_n_heads", 32, 4),
    ("index_head_dim", 128, 64),
    ("index_topk", 512, 64),
    ("candidate_topk_blocks", 2048, 64),
    ("candidate_block_size", 8, 8),
    ("hc_mult", 4, 4),
    ("hc_sinkhorn_iters", 20, 20),
    ("rope_theta", 10_000, 10_000),
    ("compress_rope_theta", 160_000, 160_000),
    ("engram_n_heads", 8, 8),
    ("engram_head_dim", 256, 32),
    ("engram_max_ngram_size", 4, 4),
    (TABLE_BASE, 16_000_000, 1000),
    // Keys of this tool: layers of each kind follow from them.
    (FIRST_RATIO_LAYER, 2, 2),
    (KV_SOURCE_EVERY, 6, 6),
    (INDEX_SOURCE_EVERY, 4, 4),
    (SECOND_TABLE_LAYER, 14, 4),
];
/// Rows that each of the columns of a table has at least; 0 for a model without tables.
const TABLE_BASE: &str = "engram_vocab_size";
const FIRST_RATIO_LAYER: &str = "first_compressed_layer";
const KV_SOURCE_EVERY: &str = "kv_source_every";
const INDEX_SOURCE_EVERY: &str = "index_source_every";
const SECOND_TABLE_LAYER: &str = "second_table_layer";
/// Layer of the first table.
const FIRST_TABLE_LAYER: u32 = 1;
/// Sizes that have no key of their own in the file.
const KEYLESS_FROM: usize = 25;

/// Largest value of a size, and of the number of experts and layers.
const SIZE_MAX: u32 = 1 << 30;
/// Most bytes of one tensor, so that sums stay far from overflow.
const TENSOR_BYTES_MAX: u64 = 1 << 46;

/// The sizes of a model by their names in config.json.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Dims([u32; SIZES.len()]);

impl Dims {
    /// The sizes of `shape`.
    pub fn of(shape: Shape) -> Self {
        Self(SIZES.map(|(_, full, small)| if shape == Shape::Full { full } else { small }))
    }

    /// All names that [`Dims::set`] knows.
    pub fn names() -> impl Iterator<Item = &'static str> {
        SIZES.iter().map(|(name, ..)| *name)
    }

    /// The size of this name; the name is one of [`Dims::names`].
    pub fn get(&self, name: &str) -> u32 {
        self.0[SIZES.iter().position(|(n, ..)| *n == name).expect("a name of the table")]
    }

    /// Replaces a size.
    ///
    /// # Errors
    /// An unknown name, a value out of range.
    pub fn set(&mut self, name: &str, value: u32) -> Result<(), SynthError> {
        let fail = |reason: String| SynthError::Dim { name: name.into(), value: value.to_string(), reason };
        let Some(at) = SIZES.iter().position(|(n, ..)| *n == name) else {
            return Err(fail(format!("unknown size; the sizes are {}", Self::names().collect::<Vec<_>>().join(", "))));
        };
        if value > SIZE_MAX || (value == 0 && name != TABLE_BASE) {
            return Err(fail(format!("must be between 1 and {SIZE_MAX}")));
        }
        self.0[at] = value;
        Ok(())
    }

    /// Sets the rows of a table, about: each of its columns has at least its share, and 0 leaves tables out.
    ///
    /// # Errors
    /// As [`Dims::set`].
    pub fn set_table_rows(&mut self, rows: u64) -> Result<(), SynthError> {
        let fail = |reason: &str| SynthError::Dim {
            name: "table rows".into(),
            value: rows.to_string(),
            reason: reason.into(),
        };
        let columns = u64::from(self.get("engram_n_heads")) * u64::from(self.get("engram_max_ngram_size").max(2) - 1);
        if rows != 0 && rows < 2 * columns {
            return Err(fail("a table needs two rows a column at least, or none at all"));
        }
        let base = u32::try_from(rows / columns).map_err(|_| fail("more rows than can be numbered"))?;
        self.set(TABLE_BASE, base)
    }
}

/// A tensor of the file.
pub(super) struct Tensor {
    pub(super) name: String,
    /// The name without its layer.
    pub(super) stem: &'static str,
    pub(super) class: TensorClass,
    /// Fastest dimension first.
    pub(super) dims: Vec<u64>,
}

/// The n-gram tables.
struct Tables {
    layers: Vec<u32>,
    rows: Vec<u64>,
    primes: Vec<u64>,
    multipliers: Vec<u64>,
}

/// Sizes with everything that follows from them.
pub(super) struct Geometry<'a> {
    dims: &'a Dims,
    ratios: Vec<u32>,
    kv_sources: Vec<u32>,
    index_sources: Vec<u32>,
    candidate_source: u32,
    tables: Option<Tables>,
}

impl<'a> Geometry<'a> {
    pub(super) fn new(dims: &'a Dims) -> Result<Self, SynthError> {
        let layers = dims.get("num_hidden_layers");
        let limits =
            [("num_hidden_layers", 4096), ("n_routed_experts", 65_535), ("vocab_size", 1 << 20), ("hc_mult", 8)];
        for (name, limit) in limits.into_iter().chain([("engram_n_heads", 4096)]) {
            check(dims, name, dims.get(name) <= limit, &format!("at most {limit}"))?;
        }
        let width = dims.get("engram_head_dim");
        check(dims, "engram_head_dim", width.is_multiple_of(32), "rows are groups of 32 values")?;
        let orders = dims.get("engram_max_ngram_size");
        check(dims, "engram_max_ngram_size", (2..=16).contains(&orders), "must be between 2 and 16")?;
        let groups = dims.get("o_groups");
        check(dims, "o_groups", dims.get("num_attention_heads").is_multiple_of(groups), "must divide the heads")?;

        let first = dims.get(FIRST_RATIO_LAYER).min(layers);
        let middle = (layers / 2).max(first);
        let ratios: Vec<u32> =
            (0..layers).map(|l| u32::from(l >= first) + u32::from(l >= first && l < middle)).collect();
        let mut kv_sources: Vec<u32> = (first..middle).step_by(dims.get(KV_SOURCE_EVERY) as usize).collect();
        let mut index_sources = kv_sources.clone();
        if middle < layers {
            kv_sources.push(middle);
            index_sources.extend((middle..layers).step_by(dims.get(INDEX_SOURCE_EVERY) as usize));
        }
        let candidate_source = middle.min(layers - 1);
        let geometry =
            Self { dims, ratios, kv_sources, index_sources, candidate_source, tables: tables(dims, layers)? };
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
        let mut tensors = Vec::new();
        let mut add = |name: &Name, layer: Option<u32>| {
            let full = layer.map_or_else(|| name.gguf.to_owned(), |l| format!("blk.{l}.{}", name.gguf));
            let dims = self.dims_of(name.gguf, layer.unwrap_or(0));
            tensors.push(Tensor { name: full, stem: name.gguf, class: name.class, dims });
        };
        GLOBAL.iter().for_each(|name| add(name, None));
        for rows in [false, true] {
            for layer in 0..self.layers() {
                for name in
                    LAYER.iter().filter(|n| (n.class == TensorClass::Rows) == rows && self.wants(layer, n.layers))
                {
                    add(name, Some(layer));
                }
            }
        }
        tensors
    }

    fn wants(&self, layer: u32, rule: Where) -> bool {
        let makes_rows = self.kv_sources.contains(&layer);
        match rule {
            Where::Every | Where::Present => true,
            Where::KvSource => makes_rows,
            Where::PoolingSource => makes_rows && self.ratios[layer as usize] == 2,
            Where::IndexKeys => makes_rows && self.index_sources.contains(&layer),
            Where::IndexSource => self.index_sources.contains(&layer),
            Where::Engram => self.tables.as_ref().is_some_and(|t| t.layers.contains(&layer)),
        }
    }

    /// Dimensions of spec 2.
    fn dims_of(&self, stem: &str, layer: u32) -> Vec<u64> {
        let hidden = self.get("hidden_size");
        let (width, experts) = (self.get("moe_intermediate_size"), self.get("n_routed_experts"));
        let (streams, heads, head) = (self.get("hc_mult"), self.get("num_attention_heads"), self.get("head_dim"));
        let (q_rank, groups, o_rank) = (self.get("q_lora_rank"), self.get("o_groups"), self.get("o_lora_rank"));
        let (index_heads, index_dim) = (self.get("index_n_heads"), self.get("index_head_dim"));
        let row_width = self.get("engram_head_dim");
        match stem {
            "token_embd.weight" | "output.weight" => vec![hidden, self.get("vocab_size")],
            "hc_attn_fn.weight" | "hc_ffn_fn.weight" => vec![streams * hidden, streams * (streams + 2)],
            "hc_attn_base.weight" | "hc_ffn_base.weight" => vec![streams * (streams + 2)],
            "hc_attn_scale.weight" | "hc_ffn_scale.weight" => vec![3],
            "attn_norm.weight" | "ffn_norm.weight" | "output_norm.weight" => vec![hidden],
            "attn_sinks.weight" => vec![heads],
            "attn_q_a.weight" => vec![hidden, q_rank],
            "attn_q_a_norm.weight" => vec![q_rank],
            "attn_q_b.weight" => vec![q_rank, heads * head],
            "attn_kv.weight" | "attn_compressor_kv.weight" | "attn_compressor_gate.weight" => vec![hidden, head],
            "attn_kv_a_norm.weight" | "attn_compressor_norm.weight" => vec![head],
            "attn_output_a.weight" => vec![heads * head / groups, groups * o_rank],
            "attn_output_b.weight" => vec![groups * o_rank, hidden],
            "indexer.attn_k.weight" => vec![head, index_dim],
            "indexer.k_norm.weight" => vec![index_dim],
            "indexer.attn_q_b.weight" => vec![q_rank, index_heads * index_dim],
            "indexer.proj.weight" => vec![hidden, index_heads],
            "engram_q_norm.weight" | "engram_k_norm.weight" => vec![hidden, streams],
            "engram_kv.weight" => vec![self.columns() * row_width, (streams + 1) * hidden],
            "ffn_gate_inp.weight" => vec![hidden, experts],
            "exp_probs_b.bias" | "exp_probs_b_vl.bias" => vec![experts],
            "ffn_gate_shexp.weight" | "ffn_up_shexp.weight" => vec![hidden, width],
            "ffn_down_shexp.weight" => vec![width, hidden],
            "ffn_gate_exps.weight" | "ffn_up_exps.weight" => vec![hidden, width, experts],
            "ffn_down_exps.weight" => vec![width, hidden, experts],
            "engram_embd.weight" => {
                let tables = self.tables.as_ref().expect("only layers with a table have this tensor");
                let at = tables.layers.iter().position(|l| *l == layer).expect("this layer has a table");
                vec![engram_row_bytes(row_width), tables.rows[at]]
            }
            other => unreachable!("{other} is not in the table of names"),
        }
    }

    /// Rows that one token reads of a table.
    fn columns(&self) -> u64 {
        self.get("engram_n_heads") * (self.get("engram_max_ngram_size") - 1)
    }

    /// Adds the keys of spec 1.3.
    pub(super) fn describe(&self, m: &mut Metadata) {
        for (name, ..) in &SIZES[..KEYLESS_FROM] {
            m.insert(format!("deepseek41.{name}"), self.dims.get(name));
        }
        m.insert("deepseek41.candidate_source_layer_id", self.candidate_source);
        let floats = [
            ("rms_norm_eps", 1e-20f32),
            ("hc_eps", 1e-6),
            ("swiglu_limit", 10.0),
            ("routed_scaling_factor", 1.5),
            ("rope_scaling.factor", 16.0),
            ("rope_scaling.beta_fast", 32.0),
            ("rope_scaling.beta_slow", 1.0),
            ("rope_scaling.original_max_position_embeddings", 65_536.0),
        ];
        for (name, value) in floats {
            m.insert(format!("deepseek41.{name}"), value);
        }
        m.insert("deepseek41.norm_topk_prob", true);
        for (name, value) in [("scoring_func", "sqrtsoftplus"), ("hidden_act", "silu"), ("topk_method", "noaux_tc")] {
            m.insert(format!("deepseek41.{name}"), value);
        }
        m.insert("deepseek41.compress_ratios", self.ratios.clone());
        m.insert("deepseek41.kv_source_layer_ids", self.kv_sources.clone());
        m.insert("deepseek41.index_source_layer_ids", self.index_sources.clone());
        let Some(tables) = &self.tables else { return };
        let (vocab, compressed) = (u64::from(self.vocab()), u64::from(compressed_vocab(self.dims)));
        m.insert("deepseek41.engram.encoding", engram_encoding(self.get("engram_head_dim")));
        m.insert("deepseek41.engram.layer_ids", tables.layers.clone());
        m.insert("deepseek41.engram.rows", tables.rows.clone());
        m.insert("deepseek41.engram.compressed_vocab_size", compressed as u32);
        m.insert("deepseek41.engram.pad_id", PAD_ID.min(compressed as u32 - 1));
        let map: Vec<u32> = (0..vocab).map(|id| (id * compressed / vocab) as u32).collect();
        m.insert("deepseek41.engram.token_map", map);
        m.insert("deepseek41.engram.primes", tables.primes.clone());
        m.insert("deepseek41.engram.multipliers", tables.multipliers.clone());
    }
}

/// Compressed id that stands for what is before the text.
const PAD_ID: u32 = 2;

/// Distinct normalised tokens: the published vocabulary has 99,092 for 129,280 tokens.
fn compressed_vocab(dims: &Dims) -> u32 {
    (u64::from(dims.get("vocab_size")) * 99_092 / 129_280).max(1) as u32
}

fn check(dims: &Dims, name: &str, holds: bool, reason: &str) -> Result<(), SynthError> {
    if holds {
        return Ok(());
    }
    Err(SynthError::Dim { name: name.into(), value: dims.get(name).to_string(), reason: reason.into() })
}

fn tables(dims: &Dims, layers: u32) -> Result<Option<Tables>, SynthError> {
    let base = dims.get(TABLE_BASE);
    if base == 0 {
        return Ok(None);
    }
    let mut at = vec![FIRST_TABLE_LAYER.min(layers - 1), dims.get(SECOND_TABLE_LAYER).min(layers - 1)];
    at.sort_unstable();
    at.dedup();
    let columns = dims.get("engram_n_heads") as usize * (dims.get("engram_max_ngram_size") as usize - 1);
    let primes: Vec<u64> = primes_from(u64::from(base)).take(columns * at.len()).collect();
    let factors = multipliers(&at, dims.get("engram_max_ngram_size"), u64::from(compressed_vocab(dims)));
    let rows = primes.chunks_exact(columns).map(|p| p.iter().sum()).collect();
    Ok(Some(Tables { layers: at, rows, primes, multipliers: factors }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spec 1.2, 1.3 and 2.
    #[test]
    fn the_full_shape_is_the_published_one() {
        let dims = Dims::of(Shape::Full);
        let g = Geometry::new(&dims).unwrap();
        assert_eq!(g.kv_sources, [2, 8, 14, 20]);
        assert_eq!(g.index_sources, [2, 8, 14, 20, 24, 28, 32, 36]);
        assert_eq!(g.candidate_source, 20);
        let mut ratios = vec![0, 0];
        ratios.extend([2; 18]);
        ratios.extend([1; 20]);
        assert_eq!(g.ratios, ratios);
        let tables = g.tables.as_ref().unwrap();
        assert_eq!((&tables.layers[..], &tables.rows[..]), (&[1, 14][..], &[384_006_168, 384_016_682][..]));
        assert_eq!(compressed_vocab(&dims), 99_092);
        let tensors = g.tensors();
        assert_eq!(tensors.last().unwrap().name, "blk.14.engram_embd.weight");
        assert_eq!(tensors.last().unwrap().dims, [264, 384_016_682]);
        // Spec 2.4: gate and up of all layers, in values.
        let gate: u64 =
            tensors.iter().filter(|t| t.stem == "ffn_gate_exps.weight").map(|t| t.dims.iter().product::<u64>()).sum();
        assert_eq!(gate, 40 * 384 * 5120 * 2304);
    }

    #[test]
    fn any_number_of_layers_has_a_schedule() {
        for layers in 1..50 {
            let mut dims = Dims::of(Shape::Small);
            dims.set("num_hidden_layers", layers).unwrap();
            let g = Geometry::new(&dims).unwrap();
            assert_eq!(g.ratios.len(), layers as usize);
            assert!(g.tables.as_ref().unwrap().layers.iter().all(|l| *l < layers), "{layers}");
        }
    }
}
