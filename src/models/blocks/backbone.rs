//! Sizes and constants that every architecture of this family has, and what follows from them alone.
//! Never reads metadata: each architecture has keys and limits of its own. Surprising fact: where compressed rows are made, and how many, is
//! not among them: that is what the architectures differ in.

use super::hyper_connections::HcShape;
use super::matrices::LayerWidths;
use super::moe::MoeSizes;
use super::rotary::{Yarn, plain_freqs, yarn_freqs};

/// Sizes of attention, experts and streams.
#[derive(Clone, PartialEq, Debug)]
pub struct Backbone {
    pub vocab: usize,
    pub hidden: usize,
    pub expert_width: usize,
    pub heads: usize,
    pub head_dim: usize,
    pub rotary: usize,
    pub q_rank: usize,
    pub o_rank: usize,
    pub o_groups: usize,
    pub experts: usize,
    pub experts_per_token: usize,
    /// Length that the model was trained for.
    pub positions_max: usize,
    pub window: usize,
    pub index_heads: usize,
    pub index_dim: usize,
    pub index_top_k: usize,
    pub streams: usize,
    pub sinkhorn_iterations: usize,
    pub rope_theta: f32,
    pub yarn: Yarn,
    pub rms_eps: f32,
    pub hc_eps: f32,
    pub routed_scale: f32,
    pub normalise_top_k: bool,
}

impl Backbone {
    /// Width of all query heads side by side.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of all output groups side by side.
    pub fn o_width(&self) -> usize {
        self.o_groups * self.o_rank
    }

    /// Coefficients of one hyper-connection mix.
    pub fn mix_width(&self) -> usize {
        self.streams * (self.streams + 2)
    }

    /// Angle per position of each rotated pair: plain in layers with a window only, YaRN in those with compressed rows.
    pub fn rope_freqs(&self, compressed: bool) -> Vec<f32> {
        if compressed { yarn_freqs(&self.yarn, self.rotary) } else { plain_freqs(self.rope_theta, self.rotary) }
    }

    /// Sizes and constants of the hyper-connections.
    pub fn hc_shape(&self) -> HcShape {
        HcShape {
            streams: self.streams,
            hidden: self.hidden,
            rms_eps: self.rms_eps,
            hc_eps: self.hc_eps,
            iterations: self.sinkhorn_iterations,
        }
    }

    /// Sizes of the expert half for buffers of `rows` rows.
    pub fn moe_sizes(&self, rows: usize) -> MoeSizes {
        let (experts, k) = (self.experts, self.experts_per_token);
        MoeSizes { hidden: self.hidden, experts, k, width: self.expert_width, rows }
    }

    /// Input widths of the matrices that every layer has.
    pub fn layer_widths(&self) -> LayerWidths {
        LayerWidths {
            streams: self.streams * self.hidden,
            hidden: self.hidden,
            q_rank: self.q_rank,
            q: self.q_width(),
            o_groups: self.o_groups,
            o_mid: self.o_width(),
            expert: self.expert_width,
        }
    }
}
