//! Which probe point shows the input of which matrix: what the collection of quantisation statistics goes by.
//! Never looks at values. Surprising fact: the input of the index key matrix has a row for each group that a pass completes, not for each
//! token.

use super::config::Config;
use crate::models::blocks::matrices::MatrixList;
use crate::models::probe::{MatrixInput, Point};

/// Every matrix of the file but the embedding, which is never multiplied with.
pub fn matrix_inputs(c: &Config) -> Vec<MatrixInput> {
    let mut list = MatrixList::default();
    let widths = c.layer_widths();
    for layer in 0..c.layers.len() {
        list.begin(layer);
        list.every_layer(&widths);
        some_layers(&mut list, c, layer);
    }
    list.head(c.layers.len(), "output", Point::HeadIn, c.hidden);
    list.inputs
}

fn some_layers(list: &mut MatrixList, c: &Config, layer: usize) {
    let plan = c.layers[layer];
    if plan.makes_rows {
        list.rows("attn_compressor_kv", Point::AttentionIn, c.hidden);
        if plan.ratio == 2 {
            list.rows("attn_compressor_gate", Point::AttentionIn, c.hidden);
        }
    }
    if plan.makes_keys {
        list.rows("indexer.attn_k", Point::IndexKeyIn, c.head_dim);
    }
    if plan.selects_by.is_some() {
        list.rows("indexer.attn_q_b", Point::QueryLatent, c.q_rank);
        list.rows("indexer.proj", Point::AttentionIn, c.hidden);
    }
    if let (Some(_), Some(engram)) = (plan.table, &c.engram) {
        list.rows("engram_kv", Point::EngramEmbedding, engram.columns() * engram.width);
    }
}
