//! Which probe point shows the input of which matrix: what the collection of quantisation statistics goes by.
//! Never looks at values. Surprising fact: compressors and index keys read the same input as the attention projections.

use super::config::Config;
use crate::models::blocks::matrices::MatrixList;
use crate::models::probe::{MatrixInput, Point};

/// Every matrix of the file but the embedding, which is never multiplied with.
pub fn matrix_inputs(c: &Config) -> Vec<MatrixInput> {
    let mut list = MatrixList::default();
    let widths = c.layer_widths();
    for (layer, plan) in c.layers.iter().enumerate() {
        list.begin(layer);
        list.every_layer(&widths);
        if plan.ratio > 0 {
            list.rows("attn_compressor_kv", Point::AttentionIn, c.hidden);
            list.rows("attn_compressor_gate", Point::AttentionIn, c.hidden);
        }
        if plan.has_indexer() {
            list.rows("indexer_compressor_kv", Point::AttentionIn, c.hidden);
            list.rows("indexer_compressor_gate", Point::AttentionIn, c.hidden);
            list.rows("indexer.attn_q_b", Point::QueryLatent, c.q_rank);
            list.rows("indexer.proj", Point::AttentionIn, c.hidden);
        }
    }
    list.head(c.layers.len(), "output_hc_fn", Point::HeadMixIn, c.streams * c.hidden);
    list.head(c.layers.len(), "output", Point::HeadIn, c.hidden);
    list.inputs
}
