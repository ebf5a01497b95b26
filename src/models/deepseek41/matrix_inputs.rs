//! Which probe point shows the input of which matrix: what the collection of quantisation statistics goes by.
//! Never looks at values. Surprising fact: the slices of the grouped output matrix share their columns, so its statistics
//! are taken over all groups.

use std::collections::HashMap;

use super::config::Config;
use super::weights::tensor_specs;
use super::workspace::LOGIT_ROWS_MAX;
use crate::models::probe::{Feed, MatrixInput, Point};
use crate::models::{Product, RunnerOptions};

/// Every matrix of the file but the embedding, which is never multiplied with.
pub fn matrix_inputs(c: &Config) -> Vec<MatrixInput> {
    let mut list = List { layer: 0, inputs: Vec::new() };
    for layer in 0..c.layers.len() {
        list.layer = layer;
        list.every_layer(c);
        list.some_layers(c);
    }
    list.layer = c.layers.len();
    let feed = Feed::Rows { point: Point::HeadIn, slices: 1 };
    list.inputs.push(MatrixInput { tensor: "output.weight".into(), layer: list.layer, feed, width: c.hidden });
    list.inputs
}

/// Every product of a pass: those above and the routers, which stay as they are in the file and have no statistics.
pub fn products(c: &Config, options: &RunnerOptions) -> Vec<Product> {
    let specs = tensor_specs(c);
    let dims: HashMap<&str, &[u64]> = specs.iter().map(|s| (s.name.as_str(), &s.dims[..])).collect();
    let routers = (0..c.layers.len()).map(|layer| (format!("blk.{layer}.ffn_gate_inp.weight"), 1));
    let inputs = matrix_inputs(c).into_iter().map(|input| match input.feed {
        Feed::Rows { slices, .. } => (input.tensor, slices),
        Feed::Routed(_) | Feed::ExpertMid => (input.tensor, 1),
    });
    let product = |(tensor, groups): (String, usize)| {
        let dims = dims[tensor.as_str()];
        let rows = if tensor == "output.weight" { options.chunk.min(LOGIT_ROWS_MAX) } else { options.chunk };
        Product { rows, groups, cols: dims[0] as usize, outputs: dims[1] as usize, tensor }
    };
    inputs.chain(routers).map(product).collect()
}

struct List {
    layer: usize,
    inputs: Vec<MatrixInput>,
}

impl List {
    fn add(&mut self, tensor: &str, feed: Feed, width: usize) {
        let tensor = format!("blk.{}.{tensor}.weight", self.layer);
        self.inputs.push(MatrixInput { tensor, layer: self.layer, feed, width });
    }

    fn rows(&mut self, tensor: &str, point: Point, width: usize) {
        self.add(tensor, Feed::Rows { point, slices: 1 }, width);
    }

    fn every_layer(&mut self, c: &Config) {
        self.rows("hc_attn_fn", Point::AttentionMixIn, c.streams * c.hidden);
        self.rows("hc_ffn_fn", Point::MlpMixIn, c.streams * c.hidden);
        self.rows("attn_q_a", Point::AttentionIn, c.hidden);
        self.rows("attn_q_b", Point::QueryLatent, c.q_rank);
        self.rows("attn_kv", Point::AttentionIn, c.hidden);
        let heads = Feed::Rows { point: Point::HeadsOut, slices: c.o_groups };
        self.add("attn_output_a", heads, c.q_width() / c.o_groups);
        self.rows("attn_output_b", Point::GroupsOut, c.o_groups * c.o_rank);
        self.rows("ffn_gate_shexp", Point::MlpIn, c.hidden);
        self.rows("ffn_up_shexp", Point::MlpIn, c.hidden);
        self.rows("ffn_down_shexp", Point::SharedMid, c.expert_width);
        self.add("ffn_gate_exps", Feed::Routed(Point::MlpIn), c.hidden);
        self.add("ffn_up_exps", Feed::Routed(Point::MlpIn), c.hidden);
        self.add("ffn_down_exps", Feed::ExpertMid, c.expert_width);
    }

    fn some_layers(&mut self, c: &Config) {
        let plan = c.layers[self.layer];
        if plan.makes_rows {
            self.rows("attn_compressor_kv", Point::AttentionIn, c.hidden);
            if plan.ratio == 2 {
                self.rows("attn_compressor_gate", Point::AttentionIn, c.hidden);
            }
        }
        if plan.makes_keys {
            self.rows("indexer.attn_k", Point::IndexKeyIn, c.head_dim);
        }
        if plan.selects_by.is_some() {
            self.rows("indexer.attn_q_b", Point::QueryLatent, c.q_rank);
            self.rows("indexer.proj", Point::AttentionIn, c.hidden);
        }
        if let (Some(_), Some(engram)) = (plan.table, &c.engram) {
            self.rows("engram_kv", Point::EngramEmbedding, engram.columns() * engram.width);
        }
    }
}
