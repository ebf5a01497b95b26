//! Sizes of a synthetic model: the published ones of an architecture or a small set, with replacements.
//! Owns the numbers and their names; never what follows from them. Surprising fact: some sizes are keys of no config.json: layers of each
//! kind follow from them.

use super::SynthError;
use crate::storage::convert::Arch;

/// A set of sizes to start from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shape {
    /// The published model (spec 1.1).
    Full,
    /// A few megabytes, every part present: for tests.
    Small,
}

/// Name in config.json, published value, small value.
type Size = (&'static str, u32, u32);

/// Rows that each of the columns of a table has at least; 0 for a model without tables.
pub(super) const TABLE_BASE: &str = "engram_vocab_size";
pub(super) const FIRST_RATIO_LAYER: &str = "first_compressed_layer";
pub(super) const KV_SOURCE_EVERY: &str = "kv_source_every";
pub(super) const INDEX_SOURCE_EVERY: &str = "index_source_every";
pub(super) const SECOND_TABLE_LAYER: &str = "second_table_layer";
/// Layers whose experts follow from the token id.
pub(super) const HASHED: &str = "num_hash_layers";

static V41: [Size; 33] = [
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
    (FIRST_RATIO_LAYER, 2, 2),
    (KV_SOURCE_EVERY, 6, 6),
    (INDEX_SOURCE_EVERY, 4, 4),
    (SECOND_TABLE_LAYER, 14, 4),
];

static V4: [Size; 23] = [
    ("vocab_size", 129_280, 1024),
    ("hidden_size", 4096, 256),
    ("moe_intermediate_size", 2048, 256),
    ("num_hidden_layers", 43, 6),
    ("num_attention_heads", 64, 4),
    ("head_dim", 512, 64),
    ("qk_rope_head_dim", 64, 32),
    ("q_lora_rank", 1024, 128),
    ("o_lora_rank", 1024, 64),
    ("o_groups", 8, 2),
    ("n_routed_experts", 256, 16),
    ("num_experts_per_tok", 6, 3),
    ("max_position_embeddings", 1_048_576, 65_536),
    ("sliding_window", 128, 32),
    ("index_n_heads", 64, 4),
    ("index_head_dim", 128, 64),
    ("index_topk", 512, 16),
    ("hc_mult", 4, 4),
    ("hc_sinkhorn_iters", 20, 20),
    ("rope_theta", 10_000, 10_000),
    ("compress_rope_theta", 160_000, 160_000),
    (HASHED, 3, 2),
    (FIRST_RATIO_LAYER, 2, 2),
];

/// Sizes that may be nothing.
const MAY_BE_ZERO: [&str; 3] = [TABLE_BASE, FIRST_RATIO_LAYER, HASHED];
/// Largest value of a size.
const SIZE_MAX: u32 = 1 << 30;

/// The sizes of a model by their names in config.json.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Dims {
    arch: Arch,
    /// In the order of the table.
    values: Vec<u32>,
}

impl Dims {
    /// The sizes of `shape`.
    pub fn of(arch: Arch, shape: Shape) -> Self {
        let value = |(_, full, small): &Size| if shape == Shape::Full { *full } else { *small };
        Self { arch, values: Self::table(arch).iter().map(value).collect() }
    }

    fn table(arch: Arch) -> &'static [Size] {
        match arch {
            Arch::DeepSeek41 => &V41,
            Arch::DeepSeek4 => &V4,
        }
    }

    /// The architecture that these are sizes of.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// All names that [`Dims::set`] knows.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        Self::table(self.arch).iter().map(|(name, ..)| *name)
    }

    fn place(&self, name: &str) -> Option<usize> {
        self.names().position(|known| known == name)
    }

    /// The size of this name; the name is one of [`Dims::names`].
    pub fn get(&self, name: &str) -> u32 {
        self.values[self.place(name).expect("a name of the table")]
    }

    /// Replaces a size.
    ///
    /// # Errors
    /// An unknown name, a value out of range.
    pub fn set(&mut self, name: &str, value: u32) -> Result<(), SynthError> {
        let fail = |reason: String| SynthError::Dim { name: name.into(), value: value.to_string(), reason };
        let Some(at) = self.place(name) else {
            let names = self.names().collect::<Vec<_>>().join(", ");
            return Err(fail(format!("unknown size; the sizes are {names}")));
        };
        if value > SIZE_MAX || (value == 0 && !MAY_BE_ZERO.contains(&name)) {
            return Err(fail(format!("must be between 1 and {SIZE_MAX}")));
        }
        self.values[at] = value;
        Ok(())
    }

    /// Sets the rows of a table, about: each of its columns has at least its share, and 0 leaves tables out.
    ///
    /// # Errors
    /// As [`Dims::set`]; an architecture without tables.
    pub fn set_table_rows(&mut self, rows: u64) -> Result<(), SynthError> {
        let fail = |reason: &str| SynthError::Dim {
            name: "table rows".into(),
            value: rows.to_string(),
            reason: reason.into(),
        };
        if self.place(TABLE_BASE).is_none() {
            return Err(fail(&format!("{} models have no n-gram tables", self.arch.name())));
        }
        let columns = u64::from(self.get("engram_n_heads")) * u64::from(self.get("engram_max_ngram_size").max(2) - 1);
        if rows != 0 && rows < 2 * columns {
            return Err(fail("a table needs two rows a column at least, or none at all"));
        }
        let base = u32::try_from(rows / columns).map_err(|_| fail("more rows than can be numbered"))?;
        self.set(TABLE_BASE, base)
    }

    /// Refuses the size of this name unless `holds`.
    pub(super) fn check(&self, name: &str, holds: bool, reason: &str) -> Result<(), SynthError> {
        if holds {
            return Ok(());
        }
        Err(SynthError::Dim { name: name.into(), value: self.get(name).to_string(), reason: reason.into() })
    }
}
