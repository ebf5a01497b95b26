//! What every converted file says of itself, and the `deepseek41.*` keys of a V4.1 file (spec 1.3), made from config.json.
//! Owns which keys are written and their types; reading them back is the model's business. V4's keys are in `dialect4`.
//! Surprising fact: three engram keys go beyond the published files, which leave head count, width and n-gram size to be
//! guessed from the numbers of primes.

use serde_json::json;

use super::checkpoint::{Checkpoint, Config};
use super::engram::EngramConstants;
use super::error::ConvertError;
use super::names::Arch;
use super::{Options, dialect4, vocabulary};
use crate::storage::gguf::{Metadata, Value};
use crate::storage::layout::engram_encoding;

const U32_KEYS: [&str; 26] = [
    "vocab_size",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "max_position_embeddings",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "candidate_source_layer_id",
    "candidate_topk_blocks",
    "candidate_block_size",
    "hc_mult",
    "hc_sinkhorn_iters",
    "rope_theta",
    "compress_rope_theta",
];
const F32_KEYS: [&str; 4] = ["rms_norm_eps", "hc_eps", "swiglu_limit", "routed_scaling_factor"];
const ROPE_KEYS: [&str; 4] = ["factor", "beta_fast", "beta_slow", "original_max_position_embeddings"];

/// Keys that say how a file was made, not what it computes.
pub(super) const PROVENANCE: [&str; 11] = [
    "general.name",
    "general.alignment",
    "general.source.url",
    "general.source.revision",
    FILE_TYPE,
    "deepseek41.quantization",
    "deepseek41.calibration",
    "deepseek41.attention_calibration",
    "deepseek4.quantization",
    "deepseek4.calibration",
    IMPORTANCE_FILE,
];
/// A number for a recipe of other tools.
const FILE_TYPE: &str = "general.file_type";
const IMPORTANCE_FILE: &str = "quantize.imatrix.file";

/// All metadata of a converted checkpoint.
pub(super) fn metadata(checkpoint: &Checkpoint, options: &Options) -> Result<Metadata, ConvertError> {
    let (arch, config) = (checkpoint.arch, &checkpoint.config);
    let mut m = Metadata::new();
    m.insert("general.architecture", arch.name());
    let folder = checkpoint.folder.canonicalize().ok();
    let name = folder.as_ref().and_then(|f| f.file_name()).map(|n| n.to_string_lossy().into_owned());
    m.insert("general.name", name.unwrap_or_else(|| arch.name().into()));
    m.insert("general.alignment", options.alignment);
    match arch {
        Arch::DeepSeek41 => add_keys(&mut m, checkpoint)?,
        Arch::DeepSeek4 => dialect4::add_keys(&mut m, config)?,
    }
    set_provenance(&mut m, arch, options);
    vocabulary::add(&mut m, config, &checkpoint.folder)?;
    Ok(m)
}

/// Keys of a V4.1 file.
fn add_keys(m: &mut Metadata, checkpoint: &Checkpoint) -> Result<(), ConvertError> {
    let config = &checkpoint.config;
    refuse_what_has_no_key(config)?;
    for key in U32_KEYS {
        m.insert(format!("deepseek41.{key}"), config.u32(key)?);
    }
    for key in F32_KEYS {
        m.insert(format!("deepseek41.{key}"), config.f32(key)?);
    }
    for key in ROPE_KEYS {
        m.insert(format!("deepseek41.rope_scaling.{key}"), config.nested_f32("rope_scaling", key)?);
    }
    m.insert("deepseek41.norm_topk_prob", config.bool("norm_topk_prob")?);
    m.insert("deepseek41.scoring_func", config.str("scoring_func")?);
    m.insert("deepseek41.hidden_act", config.str("hidden_act")?);
    let topk = if config.get("topk_method").is_some() { config.str("topk_method")? } else { "noaux_tc" };
    m.insert("deepseek41.topk_method", topk);
    m.insert("deepseek41.compress_ratios", config.compress_ratios()?);
    m.insert("deepseek41.kv_source_layer_ids", config.u32_array("kv_source_layer_ids")?);
    m.insert("deepseek41.index_source_layer_ids", config.u32_array("index_source_layer_ids")?);
    if let Some(engram) = EngramConstants::of_checkpoint(config, &checkpoint.folder)? {
        add_engram(m, &engram);
    }
    m.insert("deepseek41.config", config.text.clone());
    Ok(())
}

/// Settings whose only known value is implied by the architecture.
fn refuse_what_has_no_key(config: &Config) -> Result<(), ConvertError> {
    config.must_be("gate_temp", &json!(1.0))?;
    config.must_be("hc_pre_from_prev_sublayer", &json!(true))?;
    config.must_be("q_head_norm", &json!(false))?;
    config.must_be("attention_bias", &json!(false))?;
    config.must_be("tie_word_embeddings", &json!(false))
}

fn add_engram(m: &mut Metadata, engram: &EngramConstants) {
    m.insert("deepseek41.engram.encoding", engram_encoding(u64::from(engram.width)));
    m.insert("deepseek41.engram.layer_ids", engram.layers.clone());
    m.insert("deepseek41.engram.rows", narrow(&engram.rows));
    m.insert("deepseek41.engram.head_count", engram.heads);
    m.insert("deepseek41.engram.key_length", engram.width);
    m.insert("deepseek41.engram.max_ngram_size", engram.ngram_max);
    m.insert("deepseek41.engram.compressed_vocab_size", engram.compressed_vocab);
    m.insert("deepseek41.engram.pad_id", engram.pad_id);
    m.insert("deepseek41.engram.token_map", engram.token_map.clone());
    m.insert("deepseek41.engram.primes", narrow(&engram.primes));
    m.insert("deepseek41.engram.multipliers", engram.multipliers.clone());
}

/// u32 as in published files, u64 where a value needs it.
fn narrow(values: &[u64]) -> Value {
    match values.iter().map(|v| u32::try_from(*v)).collect::<Result<Vec<u32>, _>>() {
        Ok(narrow) => narrow.into(),
        Err(_) => values.to_vec().into(),
    }
}

/// Says by which recipe the tensors were made.
pub(super) fn set_provenance(m: &mut Metadata, arch: Arch, options: &Options) {
    m.insert(format!("{}.quantization", arch.name()), options.recipe.describe());
    let file = options.importance.and_then(|i| i.path().file_name());
    m.insert(format!("{}.calibration", arch.name()), if file.is_some() { "imatrix" } else { "none" });
    m.remove(FILE_TYPE);
    match file {
        Some(file) => {
            m.insert(IMPORTANCE_FILE, file.to_string_lossy().into_owned());
        }
        None => {
            m.remove(IMPORTANCE_FILE);
        }
    }
}
