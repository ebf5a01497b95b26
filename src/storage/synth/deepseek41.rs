//! Schedule, n-gram tables and keys of a synthetic V4.1 file (spec 1, 4).
//! Never a shape or a value of a tensor. Surprising fact: the schedule of layers is the published one stretched to any number of layers, so
//! that few layers still have every kind.

use super::SynthError;
use super::dims::{Dims, FIRST_RATIO_LAYER, INDEX_SOURCE_EVERY, KV_SOURCE_EVERY, SECOND_TABLE_LAYER, TABLE_BASE};
use super::geometry::Geometry;
use crate::storage::convert::engram::{multipliers, primes_from};
use crate::storage::convert::names::Schedule;
use crate::storage::gguf::Metadata;
use crate::storage::layout::engram_encoding;

/// Layer of the first table.
const FIRST_TABLE_LAYER: u32 = 1;
/// Sizes from this one on have no key of their own in the file.
const FIRST_KEYLESS: &str = "engram_n_heads";
/// Compressed id that stands for what is before the text.
const PAD_ID: u32 = 2;

/// The n-gram tables.
pub(super) struct Tables {
    pub(super) layers: Vec<u32>,
    rows: Vec<u64>,
    primes: Vec<u64>,
    multipliers: Vec<u64>,
    /// Values of a row.
    pub(super) width: u64,
}

impl Tables {
    pub(super) fn new(dims: &Dims) -> Result<Option<Self>, SynthError> {
        dims.check("engram_n_heads", dims.get("engram_n_heads") <= 4096, "at most 4096")?;
        let width = dims.get("engram_head_dim");
        dims.check("engram_head_dim", width.is_multiple_of(32), "rows are groups of 32 values")?;
        let orders = dims.get("engram_max_ngram_size");
        dims.check("engram_max_ngram_size", (2..=16).contains(&orders), "must be between 2 and 16")?;
        let base = dims.get(TABLE_BASE);
        if base == 0 {
            return Ok(None);
        }
        let last = dims.get("num_hidden_layers") - 1;
        let mut layers = vec![FIRST_TABLE_LAYER.min(last), dims.get(SECOND_TABLE_LAYER).min(last)];
        layers.sort_unstable();
        layers.dedup();
        let columns = dims.get("engram_n_heads") as usize * (orders as usize - 1);
        let primes: Vec<u64> = primes_from(u64::from(base)).take(columns * layers.len()).collect();
        let multipliers = multipliers(&layers, orders, u64::from(compressed_vocab(dims)));
        let rows = primes.chunks_exact(columns).map(|p| p.iter().sum()).collect();
        Ok(Some(Self { layers, rows, primes, multipliers, width: u64::from(width) }))
    }

    /// Rows that one token reads of a table.
    pub(super) fn columns(&self) -> u64 {
        (self.primes.len() / self.layers.len()) as u64
    }

    /// Rows of the table of `layer`.
    pub(super) fn rows_of(&self, layer: u32) -> u64 {
        let at = self.layers.iter().position(|l| *l == layer).expect("this layer has a table");
        self.rows[at]
    }
}

/// Layers that make a decoder's rows: the first of the second half.
fn middle(dims: &Dims) -> u32 {
    let layers = dims.get("num_hidden_layers");
    (layers / 2).max(dims.get(FIRST_RATIO_LAYER).min(layers))
}

pub(super) fn schedule(dims: &Dims, tables: Option<&Tables>) -> Schedule {
    let layers = dims.get("num_hidden_layers");
    let (first, middle) = (dims.get(FIRST_RATIO_LAYER).min(layers), middle(dims));
    let ratios = (0..layers).map(|l| u32::from(l >= first) + u32::from(l >= first && l < middle)).collect();
    let mut kv_sources: Vec<u32> = (first..middle).step_by(dims.get(KV_SOURCE_EVERY) as usize).collect();
    let mut index_sources = kv_sources.clone();
    if middle < layers {
        kv_sources.push(middle);
        index_sources.extend((middle..layers).step_by(dims.get(INDEX_SOURCE_EVERY) as usize));
    }
    let engram = tables.map_or_else(Vec::new, |tables| tables.layers.clone());
    Schedule { ratios, kv_sources, index_sources, engram, hashed: 0 }
}

/// Adds the keys of spec 1.3.
pub(super) fn describe(g: &Geometry<'_>, m: &mut Metadata) {
    let dims = g.dims;
    for name in dims.names().take_while(|name| *name != FIRST_KEYLESS) {
        m.insert(format!("deepseek41.{name}"), dims.get(name));
    }
    m.insert("deepseek41.candidate_source_layer_id", middle(dims).min(g.layers() - 1));
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
    m.insert("deepseek41.compress_ratios", g.schedule.ratios.clone());
    m.insert("deepseek41.kv_source_layer_ids", g.schedule.kv_sources.clone());
    m.insert("deepseek41.index_source_layer_ids", g.schedule.index_sources.clone());
    if let Some(tables) = &g.tables {
        describe_tables(dims, tables, m);
    }
}

fn describe_tables(dims: &Dims, tables: &Tables, m: &mut Metadata) {
    let (vocab, compressed) = (u64::from(dims.get("vocab_size")), u64::from(compressed_vocab(dims)));
    m.insert("deepseek41.engram.encoding", engram_encoding(tables.width));
    m.insert("deepseek41.engram.layer_ids", tables.layers.clone());
    m.insert("deepseek41.engram.rows", tables.rows.clone());
    m.insert("deepseek41.engram.compressed_vocab_size", compressed as u32);
    m.insert("deepseek41.engram.pad_id", PAD_ID.min(compressed as u32 - 1));
    let map: Vec<u32> = (0..vocab).map(|id| (id * compressed / vocab) as u32).collect();
    m.insert("deepseek41.engram.token_map", map);
    m.insert("deepseek41.engram.primes", tables.primes.clone());
    m.insert("deepseek41.engram.multipliers", tables.multipliers.clone());
}

/// Distinct normalised tokens: the published vocabulary has 99,092 for 129,280 tokens.
fn compressed_vocab(dims: &Dims) -> u32 {
    (u64::from(dims.get("vocab_size")) * 99_092 / 129_280).max(1) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::convert::Arch;
    use crate::storage::synth::Shape;

    /// Spec 1.2, 1.3 and 2.
    #[test]
    fn the_full_shape_is_the_published_one() {
        let dims = Dims::of(Arch::DeepSeek41, Shape::Full);
        let g = Geometry::new(&dims).unwrap();
        assert_eq!(g.schedule.kv_sources, [2, 8, 14, 20]);
        assert_eq!(g.schedule.index_sources, [2, 8, 14, 20, 24, 28, 32, 36]);
        assert_eq!(middle(&dims), 20);
        let mut ratios = vec![0, 0];
        ratios.extend([2; 18]);
        ratios.extend([1; 20]);
        assert_eq!(g.schedule.ratios, ratios);
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
}
