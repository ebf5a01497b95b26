//! The `deepseek4.*` keys of a V4 file (spec deepseek-v4, 1.1), from config.json or from the sizes of a synthetic file.
//! Owns which keys are written and their types; reading them back is the model's business. Surprising fact: some keys are asked for by other
//! readers of such files only; without them a file would open here and nowhere else.

use serde_json::json;

use super::checkpoint::Config;
use super::error::ConvertError;
use super::names::OVERLAPPED;
use crate::storage::gguf::Metadata;

/// Tokens of a group of which every complete one is attended (spec 1.2).
pub(in crate::storage) const DENSE: u32 = 128;
/// `expert_gating_func` of sqrt(softplus).
const GATING: u32 = 4;

/// Keys that are sizes, and their names in config.json.
pub(in crate::storage) const SIZE_KEYS: [(&str, &str); 19] = [
    ("block_count", "num_hidden_layers"),
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("vocab_size", "vocab_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.key_length", "head_dim"),
    ("attention.value_length", "head_dim"),
    ("attention.q_lora_rank", "q_lora_rank"),
    ("attention.output_lora_rank", "o_lora_rank"),
    ("attention.output_group_count", "o_groups"),
    ("attention.sliding_window", "sliding_window"),
    ("attention.indexer.head_count", "index_n_heads"),
    ("attention.indexer.key_length", "index_head_dim"),
    ("attention.indexer.top_k", "index_topk"),
    ("rope.dimension_count", "qk_rope_head_dim"),
    ("expert_count", "n_routed_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("hyper_connection.sinkhorn_iterations", "hc_sinkhorn_iters"),
];
/// Likewise of numbers with a fraction.
const FLOAT_KEYS: [(&str, &str); 5] = [
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("hyper_connection.epsilon", "hc_eps"),
    ("expert_weights_scale", "routed_scaling_factor"),
    ("rope.freq_base", "rope_theta"),
    ("attention.compress_rope_freq_base", "compress_rope_theta"),
];
/// Likewise inside `rope_scaling`.
const YARN_KEYS: [(&str, &str); 3] =
    [("factor", "factor"), ("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")];

/// What does not follow from one size alone.
pub(in crate::storage) struct Rest<'a> {
    pub(in crate::storage) hidden: u32,
    pub(in crate::storage) streams: u32,
    pub(in crate::storage) layers: u32,
    pub(in crate::storage) hashed: u32,
    /// By layer; those of draft stages may follow.
    pub(in crate::storage) ratios: &'a [u32],
    /// Largest magnitude inside an expert.
    pub(in crate::storage) clamp: f32,
    pub(in crate::storage) yarn_positions: u32,
    pub(in crate::storage) normalise: bool,
}

/// Adds the keys of `rest` and those that are the same in every file.
pub(in crate::storage) fn add_rest(m: &mut Metadata, rest: &Rest<'_>) {
    let numbers = [
        ("embedding_length_out", rest.streams.saturating_mul(rest.hidden)),
        ("hyper_connection.count", rest.streams),
        ("hash_layer_count", rest.hashed),
        ("rope.scaling.original_context_length", rest.yarn_positions),
        ("attention.head_count_kv", 1),
        ("expert_shared_count", 1),
        ("expert_gating_func", GATING),
    ];
    for (name, value) in numbers {
        m.insert(format!("deepseek4.{name}"), value);
    }
    m.insert("deepseek4.rope.scaling.type", "yarn");
    m.insert("deepseek4.expert_weights_norm", rest.normalise);
    for name in ["swiglu_clamp_exp", "swiglu_clamp_shexp"] {
        m.insert(format!("deepseek4.{name}"), vec![rest.clamp; rest.layers as usize]);
    }
    m.insert("deepseek4.attention.compress_ratios", rest.ratios.to_vec());
}

/// Adds the keys of a checkpoint.
pub(super) fn add_keys(m: &mut Metadata, config: &Config) -> Result<(), ConvertError> {
    refuse_what_has_no_key(config)?;
    for (key, name) in SIZE_KEYS {
        m.insert(format!("deepseek4.{key}"), config.u32(name)?);
    }
    for (key, name) in FLOAT_KEYS {
        m.insert(format!("deepseek4.{key}"), config.f32(name)?);
    }
    for (key, name) in YARN_KEYS {
        m.insert(format!("deepseek4.rope.scaling.{key}"), config.nested_f32("rope_scaling", name)?);
    }
    let ratios = config.all_ratios()?;
    let layers = config.u32("num_hidden_layers")?;
    if let Some(ratio) = ratios[..layers as usize].iter().find(|r| ![0, OVERLAPPED, DENSE].contains(*r)) {
        let problem = format!("has a ratio of {ratio}; 0, {OVERLAPPED} and {DENSE} are known");
        return Err(Config::error("compress_ratios", problem));
    }
    add_rest(
        m,
        &Rest {
            hidden: config.u32("hidden_size")?,
            streams: config.u32("hc_mult")?,
            layers,
            hashed: config.u32("num_hash_layers")?,
            ratios: &ratios,
            clamp: config.f32("swiglu_limit")?,
            yarn_positions: config.nested_f32("rope_scaling", "original_max_position_embeddings")? as u32,
            normalise: config.bool("norm_topk_prob")?,
        },
    );
    Ok(())
}

/// Settings whose only known value is implied by the architecture.
fn refuse_what_has_no_key(config: &Config) -> Result<(), ConvertError> {
    config.must_be("scoring_func", &json!("sqrtsoftplus"))?;
    config.must_be("topk_method", &json!("noaux_tc"))?;
    config.must_be("hidden_act", &json!("silu"))?;
    config.must_be("num_key_value_heads", &json!(1))?;
    config.must_be("n_shared_experts", &json!(1))?;
    config.must_be("attention_bias", &json!(false))?;
    config.must_be("tie_word_embeddings", &json!(false))
}
