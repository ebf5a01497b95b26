//! Hyperparameters, read from the `deepseek41.*` keys (spec 1.1, 1.3).
//! Never assumes the published geometry: every size comes from the file and is checked against the others.
//! Surprising fact: the n-gram geometry has no keys of its own; it follows from the lengths of primes and multipliers.

use std::ops::Deref;

use super::schedule::{self, LayerPlan};
use crate::models::blocks::backbone::Backbone;
use crate::models::blocks::rotary::Yarn;
use crate::models::metadata::{ConfigError, Keys, MetadataView};

/// `general.architecture` of these files.
pub const ARCH: &str = "deepseek41";

/// Largest width, count or length that is believed; products of two stay far inside 64 bits.
const DIM_MAX: u64 = 1 << 20;

/// N-gram tables and their hash (spec 4).
#[derive(Clone, PartialEq, Debug)]
pub struct EngramConfig {
    /// Layers with a table, rising.
    pub layers: Vec<usize>,
    /// Rows of each table.
    pub rows: Vec<u64>,
    /// Tokens of the longest n-gram.
    pub order_max: usize,
    /// Hashes of each n-gram length.
    pub heads: usize,
    /// Values of one row.
    pub width: usize,
    /// Bytes of one row: codes, then a scale for each 32 values.
    pub row_bytes: usize,
    /// Compressed id of each token.
    pub token_map: Vec<u32>,
    /// Compressed id that stands for what is before the text.
    pub pad: u32,
    /// `[table][column]` modulus.
    pub primes: Vec<Vec<u64>>,
    /// `[table][column]` first row.
    pub offsets: Vec<Vec<u64>>,
    /// `[table][look-back]` factor.
    pub multipliers: Vec<Vec<u64>>,
}

impl EngramConfig {
    /// Rows that one token reads of one table.
    pub fn columns(&self) -> usize {
        (self.order_max - 1) * self.heads
    }
}

/// Everything the graph needs to know about one model.
#[derive(Clone, PartialEq, Debug)]
pub struct Config {
    pub backbone: Backbone,
    pub candidate_blocks_max: usize,
    pub candidate_block: usize,
    pub swiglu_limit: f32,
    /// One plan a layer (spec 1.2).
    pub layers: Vec<LayerPlan>,
    /// Layers that make compressed rows, by owner number.
    pub owners: Vec<usize>,
    pub engram: Option<EngramConfig>,
}

impl Deref for Config {
    type Target = Backbone;

    fn deref(&self) -> &Backbone {
        &self.backbone
    }
}

impl Config {
    /// Reads and checks the metadata of a file.
    pub fn from_metadata(view: &dyn MetadataView) -> Result<Self, ConfigError> {
        refuse_other_dialects(view)?;
        let keys = Keys::new(view, ARCH);
        keys.expect_text("scoring_func", "sqrtsoftplus")?;
        keys.expect_text("hidden_act", "silu")?;
        keys.expect_text("topk_method", "noaux_tc")?;
        keys.uint("num_key_value_heads", 1, 1)?;
        keys.uint("n_shared_experts", 1, 1)?;
        let dim = |name: &str| keys.uint(name, 1, DIM_MAX);
        let vocab = dim("vocab_size")?;
        let engram = EngramConfig::read(&keys, vocab)?;
        let plan = schedule::read(&keys, engram.as_ref().map_or(&[], |e| &e.layers))?;
        let backbone = Backbone {
            vocab,
            hidden: dim("hidden_size")?,
            expert_width: dim("moe_intermediate_size")?,
            heads: dim("num_attention_heads")?,
            head_dim: dim("head_dim")?,
            rotary: dim("qk_rope_head_dim")?,
            q_rank: dim("q_lora_rank")?,
            o_rank: dim("o_lora_rank")?,
            o_groups: dim("o_groups")?,
            experts: keys.uint("n_routed_experts", 1, u64::from(u16::MAX))?,
            experts_per_token: dim("num_experts_per_tok")?,
            positions_max: keys.uint("max_position_embeddings", 1, 1 << 30)?,
            window: dim("sliding_window")?,
            index_heads: dim("index_n_heads")?,
            index_dim: dim("index_head_dim")?,
            index_top_k: dim("index_topk")?,
            streams: keys.uint("hc_mult", 1, 8)?,
            sinkhorn_iterations: keys.uint("hc_sinkhorn_iters", 1, 1000)?,
            rope_theta: keys.positive("rope_theta")?,
            yarn: Yarn {
                theta: keys.positive("compress_rope_theta")?,
                factor: keys.positive("rope_scaling.factor")?,
                original_positions: keys.positive("rope_scaling.original_max_position_embeddings")?,
                beta_fast: keys.positive("rope_scaling.beta_fast")?,
                beta_slow: keys.positive("rope_scaling.beta_slow")?,
            },
            rms_eps: keys.float("rms_norm_eps")?,
            hc_eps: keys.float("hc_eps")?,
            routed_scale: keys.positive("routed_scaling_factor")?,
            normalise_top_k: keys.bool("norm_topk_prob")?,
        };
        let config = Self {
            backbone,
            candidate_blocks_max: dim("candidate_topk_blocks")?,
            candidate_block: dim("candidate_block_size")?,
            swiglu_limit: keys.positive("swiglu_limit")?,
            layers: plan.layers,
            owners: plan.owners,
            engram,
        };
        config.check(&keys)?;
        Ok(config)
    }

    /// Sizes that have to fit each other.
    fn check(&self, keys: &Keys<'_>) -> Result<(), ConfigError> {
        keys.expect(&[
            (self.head_dim.is_multiple_of(32), "head_dim", self.head_dim, "cache rows are blocks of 32 values"),
            (self.index_dim.is_multiple_of(32), "index_head_dim", self.index_dim, "index rows are blocks of 32 values"),
            (self.rotary.is_multiple_of(2), "qk_rope_head_dim", self.rotary, "rotation works on pairs"),
            (self.rotary <= self.head_dim, "qk_rope_head_dim", self.rotary, "wider than head_dim"),
            (self.rotary <= self.index_dim, "qk_rope_head_dim", self.rotary, "wider than index_head_dim"),
            (self.heads.is_multiple_of(self.o_groups), "o_groups", self.o_groups, "must divide num_attention_heads"),
            (
                self.experts_per_token <= self.experts,
                "num_experts_per_tok",
                self.experts_per_token,
                "more than experts",
            ),
            (self.rms_eps >= 0.0, "rms_norm_eps", 0, "must not be negative"),
            (self.hc_eps > 0.0, "hc_eps", 0, "must be above zero"),
            (
                self.candidate_blocks_max * self.candidate_block >= self.index_top_k,
                "candidate_topk_blocks",
                self.candidate_blocks_max,
                "candidate blocks hold fewer rows than index_topk selects",
            ),
        ])
    }

    /// Compressed rows that `owner` may hold at a context of `ctx` tokens (spec 5.1).
    pub fn owner_rows(&self, owner: usize, ctx: usize) -> usize {
        ctx / self.layers[self.owners[owner]].ratio + 1
    }

    /// Tokens before the current one that a table row depends on.
    pub fn look_back(&self) -> usize {
        self.engram.as_ref().map_or(0, EngramConfig::look_back)
    }

    /// Most compressed rows that any layer sees at a context of `ctx` tokens.
    pub fn compressed_rows_max(&self, ctx: usize) -> usize {
        (0..self.owners.len()).map(|o| self.owner_rows(o, ctx)).max().unwrap_or(0)
    }
}

/// Names a key that only other converters write (spec 1.3, last paragraph).
fn refuse_other_dialects(view: &dyn MetadataView) -> Result<(), ConfigError> {
    const FOREIGN: [(&str, &str); 7] = [
        ("block_count", "llama.cpp"),
        ("embedding_length", "llama.cpp"),
        ("attention.kv_source_layer_ids", "llama.cpp"),
        ("attention.compress_ratios", "llama.cpp"),
        ("hyper_connection.count", "llama.cpp"),
        ("engram.hash_primes", "engram.hash_* names"),
        ("kv_source_layers", "engram.hash_* names"),
    ];
    let keys = Keys::new(view, ARCH);
    for (name, dialect) in FOREIGN {
        if keys.get(name).is_some() {
            return Err(ConfigError::Dialect { key: keys.key(name), dialect });
        }
    }
    Ok(())
}

/// Prefix of the row encoding that is understood; the number of bytes follows.
const ROW_ENCODING: &str = "e4m3_e8m0_32_row";

impl EngramConfig {
    /// `None` if the file has no n-gram tables.
    fn read(keys: &Keys<'_>, vocab: usize) -> Result<Option<Self>, ConfigError> {
        if keys.get("engram.layer_ids").is_none() && keys.get("engram.encoding").is_none() {
            return Ok(None);
        }
        let layers = keys.uints("engram.layer_ids")?;
        if layers.is_empty() {
            return Ok(None);
        }
        if layers.len() > 64 || layers.windows(2).any(|w| w[0] >= w[1]) || layers.iter().any(|l| *l >= DIM_MAX) {
            return Err(ConfigError::unusable(&keys.key("engram.layer_ids"), layers, "must be few and rising"));
        }
        let (width, row_bytes) = Self::read_encoding(keys)?;
        let compressed = keys.uint("engram.compressed_vocab_size", 1, DIM_MAX)? as u64;
        let pad = keys.uint("engram.pad_id", 0, compressed - 1)? as u32;
        let token_map = keys.uints("engram.token_map")?;
        if token_map.len() != vocab || token_map.iter().any(|id| *id >= compressed) {
            let reason = format!("must map each of {vocab} tokens to an id below {compressed}");
            return Err(ConfigError::unusable(&keys.key("engram.token_map"), token_map.len(), reason));
        }
        let tables = layers.len();
        let (multipliers, order_max) = Self::read_multipliers(keys, tables, compressed)?;
        let primes = keys.uints("engram.primes")?;
        let columns = primes.len() / tables;
        if primes.len() != tables * columns || columns == 0 || !columns.is_multiple_of(order_max - 1) {
            let reason = format!("{tables} tables of {} n-gram lengths need as many primes each", order_max - 1);
            return Err(ConfigError::unusable(&keys.key("engram.primes"), primes.len(), reason));
        }
        let primes: Vec<Vec<u64>> = primes.chunks_exact(columns).map(<[u64]>::to_vec).collect();
        let rows = keys.uints("engram.rows")?;
        let offsets = Self::offsets(keys, &primes, &rows)?;
        Ok(Some(Self {
            layers: layers.iter().map(|l| *l as usize).collect(),
            rows,
            order_max,
            heads: columns / (order_max - 1),
            width,
            row_bytes,
            token_map: token_map.iter().map(|id| *id as u32).collect(),
            pad,
            primes,
            offsets,
            multipliers,
        }))
    }

    /// Values and bytes of a row, from the name of the encoding.
    fn read_encoding(keys: &Keys<'_>) -> Result<(usize, usize), ConfigError> {
        let name = "engram.encoding";
        let encoding = keys.text(name)?;
        let bytes: Option<usize> = encoding.strip_prefix(ROW_ENCODING).and_then(|n| n.parse().ok());
        match bytes {
            // 32 codes and one scale are 33 bytes.
            Some(bytes) if bytes > 0 && bytes.is_multiple_of(33) && bytes as u64 <= DIM_MAX => {
                Ok((bytes / 33 * 32, bytes))
            }
            _ => {
                let reason = format!("only {ROW_ENCODING}N with N a multiple of 33 is known");
                Err(ConfigError::unusable(&keys.key(name), encoding, reason))
            }
        }
    }

    /// Factors by table, and the longest n-gram.
    fn read_multipliers(
        keys: &Keys<'_>,
        tables: usize,
        compressed: u64,
    ) -> Result<(Vec<Vec<u64>>, usize), ConfigError> {
        let name = "engram.multipliers";
        let flat = keys.uints(name)?;
        let order_max = flat.len() / tables;
        if flat.len() != tables * order_max || !(2..=16).contains(&order_max) {
            let reason = format!("{tables} tables need 2 to 16 multipliers each");
            return Err(ConfigError::unusable(&keys.key(name), flat.len(), reason));
        }
        let limit = i64::MAX as u64 / compressed;
        if let Some(bad) = flat.iter().find(|m| **m > limit || m.is_multiple_of(2)) {
            return Err(ConfigError::unusable(&keys.key(name), bad, format!("must be odd and at most {limit}")));
        }
        Ok((flat.chunks_exact(order_max).map(<[u64]>::to_vec).collect(), order_max))
    }

    /// First row of each column; the primes of a table sum to its rows.
    fn offsets(keys: &Keys<'_>, primes: &[Vec<u64>], rows: &[u64]) -> Result<Vec<Vec<u64>>, ConfigError> {
        let name = "engram.rows";
        if rows.len() != primes.len() {
            return Err(ConfigError::unusable(&keys.key(name), rows.len(), "one number a table is needed"));
        }
        let mut offsets = Vec::new();
        for (primes, rows) in primes.iter().zip(rows) {
            let mut next = 0u64;
            let mut starts = Vec::with_capacity(primes.len());
            for prime in primes {
                starts.push(next);
                next = match next.checked_add(*prime) {
                    Some(sum) if *prime > 0 => sum,
                    _ => return Err(ConfigError::unusable(&keys.key("engram.primes"), prime, "must be above zero")),
                };
            }
            if next != *rows {
                let reason = format!("the primes of this table sum to {next}");
                return Err(ConfigError::unusable(&keys.key(name), rows, reason));
            }
            offsets.push(starts);
        }
        Ok(offsets)
    }
}
