//! Lists of the matrices of a model with the probe points of their inputs, and of the products of a pass.
//! Never looks at values. Surprising fact: the slices of the grouped output matrix share their columns, so statistics of it are taken over
//! all groups.

use std::collections::HashMap;

use crate::models::Product;
use crate::models::probe::{Feed, MatrixInput, Point};
use crate::models::weights::TensorSpec;

/// Input widths of the matrices that every layer has.
pub struct LayerWidths {
    /// All streams of a token.
    pub streams: usize,
    pub hidden: usize,
    pub q_rank: usize,
    /// All heads of a token.
    pub q: usize,
    pub o_groups: usize,
    /// Outputs of the first output matrix.
    pub o_mid: usize,
    pub expert: usize,
}

/// Matrices by layer.
#[derive(Default)]
pub struct MatrixList {
    layer: usize,
    pub inputs: Vec<MatrixInput>,
}

impl MatrixList {
    /// What follows belongs to `layer`.
    pub fn begin(&mut self, layer: usize) {
        self.layer = layer;
    }

    fn add(&mut self, tensor: &str, feed: Feed, width: usize) {
        let tensor = format!("blk.{}.{tensor}.weight", self.layer);
        self.inputs.push(MatrixInput { tensor, layer: self.layer, feed, width });
    }

    /// A matrix of the layer that takes all rows of `point`.
    pub fn rows(&mut self, tensor: &str, point: Point, width: usize) {
        self.add(tensor, Feed::Rows { point, slices: 1 }, width);
    }

    /// A matrix behind the layers.
    pub fn head(&mut self, layer: usize, tensor: &str, point: Point, width: usize) {
        let feed = Feed::Rows { point, slices: 1 };
        self.inputs.push(MatrixInput { tensor: format!("{tensor}.weight"), layer, feed, width });
    }

    /// Hyper-connections, attention projections and experts.
    pub fn every_layer(&mut self, w: &LayerWidths) {
        self.rows("hc_attn_fn", Point::AttentionMixIn, w.streams);
        self.rows("hc_ffn_fn", Point::MlpMixIn, w.streams);
        self.rows("attn_q_a", Point::AttentionIn, w.hidden);
        self.rows("attn_q_b", Point::QueryLatent, w.q_rank);
        self.rows("attn_kv", Point::AttentionIn, w.hidden);
        let heads = Feed::Rows { point: Point::HeadsOut, slices: w.o_groups };
        self.add("attn_output_a", heads, w.q / w.o_groups);
        self.rows("attn_output_b", Point::GroupsOut, w.o_mid);
        self.rows("ffn_gate_shexp", Point::MlpIn, w.hidden);
        self.rows("ffn_up_shexp", Point::MlpIn, w.hidden);
        self.rows("ffn_down_shexp", Point::SharedMid, w.expert);
        self.add("ffn_gate_exps", Feed::Routed(Point::MlpIn), w.hidden);
        self.add("ffn_up_exps", Feed::Routed(Point::MlpIn), w.hidden);
        self.add("ffn_down_exps", Feed::ExpertMid, w.expert);
    }
}

/// Every product of a pass: those of `inputs` and the routers, which stay as they are in the file and have no statistics. `rows` are those of
/// a chunk, and those of it that go through the output head together.
pub fn products(
    specs: &[TensorSpec],
    inputs: Vec<MatrixInput>,
    layers: usize,
    (rows, head_rows): (usize, usize),
) -> Vec<Product> {
    let dims: HashMap<&str, &[u64]> = specs.iter().map(|s| (s.name.as_str(), &s.dims[..])).collect();
    let routers = (0..layers).map(|layer| (format!("blk.{layer}.ffn_gate_inp.weight"), 1));
    let inputs = inputs.into_iter().map(|input| match input.feed {
        Feed::Rows { slices, .. } => (input.tensor, slices),
        Feed::Routed(_) | Feed::ExpertMid => (input.tensor, 1),
    });
    let product = |(tensor, groups): (String, usize)| {
        let dims = dims[tensor.as_str()];
        let rows = if tensor.starts_with("output") { head_rows } else { rows };
        Product { rows, groups, cols: dims[0] as usize, outputs: dims[1] as usize, tensor }
    };
    inputs.chain(routers).map(product).collect()
}
