//! Hyperparameters, read from the `deepseek4.*` keys (spec 1.1, 1.2).
//! Never assumes the published geometry: every size comes from the file and is checked against the others. Surprising fact: the list of
//! ratios is longer than the model has layers; what is behind them describes blocks that draft tokens.

use std::ops::Deref;

use crate::models::blocks::backbone::Backbone;
use crate::models::blocks::rotary::Yarn;
use crate::models::metadata::{ConfigError, Keys, MetaValue, MetadataView};

/// `general.architecture` of these files.
pub const ARCH: &str = "deepseek4";

/// Largest width, count or length that is believed; products of two stay far inside 64 bits.
const DIM_MAX: u64 = 1 << 20;
/// Ratio at which groups overlap and are chosen by an indexer.
pub const RATIO_CHOSEN: usize = 4;
/// Ratio at which every complete group is attended.
pub const RATIO_DENSE: usize = 128;
/// `expert_gating_func` of sqrt(softplus).
const GATING: u64 = 4;
/// Clamps at or below this are none (spec 3.10).
const LIMIT_MIN: f32 = 1e-6;

/// What one layer does besides window attention and experts.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LayerPlan {
    /// Tokens of a compressed row: 0 (none), 4 or 128.
    pub ratio: usize,
    /// Experts follow from the token id.
    pub is_hashed: bool,
    /// Clamp of routed experts; infinite for none.
    pub limit: f32,
    /// Clamp of the shared expert, likewise.
    pub shared_limit: f32,
}

impl LayerPlan {
    /// Whether the layer has index keys and chooses among its compressed rows.
    pub fn has_indexer(&self) -> bool {
        self.ratio == RATIO_CHOSEN
    }

    /// Parts of a token's projection, each for a group of its own.
    pub fn parts(&self) -> usize {
        if self.overlaps() { 2 } else { 1 }
    }

    /// Whether a group also takes the tokens of the one before it.
    pub fn overlaps(&self) -> bool {
        self.ratio == RATIO_CHOSEN
    }
}

/// Everything the graph needs to know about one model.
#[derive(Clone, PartialEq, Debug)]
pub struct Config {
    pub backbone: Backbone,
    pub layers: Vec<LayerPlan>,
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
        let keys = Keys::new(view, ARCH);
        refuse_unknown(&keys)?;
        let dim = |name: &str| keys.uint(name, 1, DIM_MAX);
        let head_dim = dim("attention.key_length")?;
        keys.uint("attention.value_length", head_dim as u64, head_dim as u64)?;
        let backbone = Backbone {
            vocab: vocabulary(view, &keys)?,
            hidden: dim("embedding_length")?,
            expert_width: expert_width(&keys)?,
            heads: dim("attention.head_count")?,
            head_dim,
            rotary: dim("rope.dimension_count")?,
            q_rank: dim("attention.q_lora_rank")?,
            o_rank: dim("attention.output_lora_rank")?,
            o_groups: dim("attention.output_group_count")?,
            experts: keys.uint("expert_count", 1, u64::from(u16::MAX))?,
            experts_per_token: dim("expert_used_count")?,
            positions_max: keys.uint_or("context_length", 1, 1 << 30, DIM_MAX as usize)?,
            window: dim("attention.sliding_window")?,
            index_heads: dim("attention.indexer.head_count")?,
            index_dim: dim("attention.indexer.key_length")?,
            index_top_k: dim("attention.indexer.top_k")?,
            streams: keys.uint("hyper_connection.count", 1, 8)?,
            sinkhorn_iterations: keys.uint("hyper_connection.sinkhorn_iterations", 1, 1000)?,
            rope_theta: keys.positive("rope.freq_base")?,
            yarn: Yarn {
                theta: keys.positive("attention.compress_rope_freq_base")?,
                factor: keys.positive_or("rope.scaling.factor", 16.0)?,
                original_positions: keys.positive_or("rope.scaling.original_context_length", 65_536.0)?,
                beta_fast: keys.positive_or("rope.scaling.yarn_beta_fast", 32.0)?,
                beta_slow: keys.positive_or("rope.scaling.yarn_beta_slow", 1.0)?,
            },
            rms_eps: keys.float("attention.layer_norm_rms_epsilon")?,
            hc_eps: keys.positive("hyper_connection.epsilon")?,
            routed_scale: keys.positive("expert_weights_scale")?,
            normalise_top_k: if keys.get("expert_weights_norm").is_some() {
                keys.bool("expert_weights_norm")?
            } else {
                true
            },
        };
        let config = Self { backbone, layers: plans(&keys)? };
        config.check(&keys)?;
        Ok(config)
    }

    /// Sizes that have to fit each other.
    fn check(&self, keys: &Keys<'_>) -> Result<(), ConfigError> {
        let has_indexer = self.layers.iter().any(LayerPlan::has_indexer);
        keys.expect(&[
            (self.rotary.is_multiple_of(2), "rope.dimension_count", self.rotary, "rotation works on pairs"),
            (self.rotary < self.head_dim, "rope.dimension_count", self.rotary, "must be below attention.key_length"),
            (
                self.rotary <= self.index_dim,
                "rope.dimension_count",
                self.rotary,
                "wider than attention.indexer.key_length",
            ),
            (
                !has_indexer || (self.index_dim.is_power_of_two() && self.index_dim >= 32),
                "attention.indexer.key_length",
                self.index_dim,
                "index rows are transformed in powers of two from 32 on",
            ),
            (
                self.heads.is_multiple_of(self.o_groups),
                "attention.output_group_count",
                self.o_groups,
                "must divide attention.head_count",
            ),
            (
                self.experts_per_token <= self.experts,
                "expert_used_count",
                self.experts_per_token,
                "more than expert_count",
            ),
            (self.rms_eps >= 0.0, "attention.layer_norm_rms_epsilon", 0, "must not be negative"),
            (self.window > 1, "attention.sliding_window", self.window, "a window of one token sees nothing"),
        ])
    }

    /// Compressed rows that a layer of `ratio` may hold at a context of `ctx` tokens.
    pub fn compressed_rows(ratio: usize, ctx: usize) -> usize {
        ctx / ratio + 1
    }

    /// Most compressed rows that a token attends in a layer of `ratio` at a context of `ctx` tokens.
    pub fn selected(&self, ratio: usize, ctx: usize) -> usize {
        match ratio {
            RATIO_CHOSEN => self.index_top_k,
            ratio => Self::compressed_rows(ratio, ctx),
        }
    }

    /// Most compressed rows that a token attends in any layer.
    pub fn selected_max(&self, ctx: usize) -> usize {
        let ratios = self.layers.iter().map(|plan| plan.ratio).filter(|ratio| *ratio > 0);
        ratios.map(|ratio| self.selected(ratio, ctx)).max().unwrap_or(0)
    }

    /// Most rows that an indexer scores for a token.
    pub fn scored_max(&self, ctx: usize) -> usize {
        let has_indexer = self.layers.iter().any(LayerPlan::has_indexer);
        if has_indexer { Self::compressed_rows(RATIO_CHOSEN, ctx) } else { 0 }
    }
}

/// Refuses files that need what is not there.
fn refuse_unknown(keys: &Keys<'_>) -> Result<(), ConfigError> {
    keys.expect_text("rope.scaling.type", "yarn")?;
    keys.uint("attention.head_count_kv", 1, 1)?;
    keys.uint("expert_shared_count", 1, 1)?;
    let gating = keys.uint_or("expert_gating_func", 0, DIM_MAX, GATING as usize)?;
    if gating as u64 != GATING {
        let reason = format!("only {GATING}, sqrt(softplus), is known");
        return Err(ConfigError::unusable(&keys.key("expert_gating_func"), gating, reason));
    }
    for name in ["expert_group_count", "expert_group_used_count"] {
        let groups = keys.uint_or(name, 0, DIM_MAX, 0)?;
        if groups > 1 {
            return Err(ConfigError::unusable(&keys.key(name), groups, "groups of experts are not supported"));
        }
    }
    Ok(())
}

/// Tokens, from a key of its own or from the tokenizer.
fn vocabulary(view: &dyn MetadataView, keys: &Keys<'_>) -> Result<usize, ConfigError> {
    const TOKENS: &str = "tokenizer.ggml.tokens";
    if keys.get("vocab_size").is_some() {
        return keys.uint("vocab_size", 1, DIM_MAX);
    }
    match view.get(TOKENS) {
        Some(MetaValue::Texts(count)) if count > 0 && count as u64 <= DIM_MAX => Ok(count),
        Some(other) => Err(ConfigError::unusable(TOKENS, other, "a list of tokens is needed")),
        None => Err(ConfigError::Missing { key: keys.key("vocab_size") }),
    }
}

/// Width of an expert: a number, or the same number for each layer.
fn expert_width(keys: &Keys<'_>) -> Result<usize, ConfigError> {
    const NAME: &str = "expert_feed_forward_length";
    match keys.get(NAME) {
        Some(MetaValue::Uints(widths)) => match widths.as_slice() {
            [first, rest @ ..] if (1..=DIM_MAX).contains(first) && rest.iter().all(|w| w == first) => {
                Ok(*first as usize)
            }
            _ => Err(ConfigError::unusable(&keys.key(NAME), widths, "all layers must have the same width above 0")),
        },
        _ => keys.uint(NAME, 1, DIM_MAX),
    }
}

/// The plans of all layers but those that only draft tokens.
fn plans(keys: &Keys<'_>) -> Result<Vec<LayerPlan>, ConfigError> {
    const RATIOS: &str = "attention.compress_ratios";
    let blocks = keys.uint("block_count", 1, 4096)?;
    let count = blocks - keys.uint_or("nextn_predict_layers", 0, blocks as u64 - 1, 0)?;
    let ratios = keys.uints(RATIOS)?;
    if ratios.len() < count {
        let reason = format!("shorter than the {count} layers of the model");
        return Err(ConfigError::unusable(&keys.key(RATIOS), ratios, reason));
    }
    let known = [0, RATIO_CHOSEN as u64, RATIO_DENSE as u64];
    if let Some(ratio) = ratios[..count].iter().find(|ratio| !known.contains(ratio)) {
        let reason = format!("only {}, {} and {} are known", known[0], known[1], known[2]);
        return Err(ConfigError::unusable(&keys.key(RATIOS), ratio, reason));
    }
    let hashed = keys.uint("hash_layer_count", 0, count as u64)?;
    let limits = keys.floats_by_layer("swiglu_clamp_exp", count)?;
    let shared = match keys.get("swiglu_clamp_shexp") {
        Some(_) => keys.floats_by_layer("swiglu_clamp_shexp", count)?,
        None => limits.clone(),
    };
    let clamp = |limit: f32| if limit > LIMIT_MIN { limit } else { f32::INFINITY };
    let plan = |layer: usize| LayerPlan {
        ratio: ratios[layer] as usize,
        is_hashed: layer < hashed,
        limit: clamp(limits[layer]),
        shared_limit: clamp(shared[layer]),
    };
    Ok((0..count).map(plan).collect())
}
