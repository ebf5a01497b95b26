//! What a trace says about a prepared model: its identity and the shape of its routed layers.
//! Never reads tensor data. Surprising fact: a plan is enough to check a trace; no weight need be loaded for that.

use std::io;

use cache_policy::{TraceHeader, TraceLayer};

use crate::engine::prepare::Prepared;
use crate::storage::layout::LayerExperts;

impl Prepared {
    /// What a trace says about this model.
    ///
    /// # Errors
    /// A model file that cannot be read.
    pub fn trace_header(&self) -> io::Result<TraceHeader> {
        let (_, _, top_k) = self.config.expert_shape();
        let layer = |l: &LayerExperts| TraceLayer {
            layer: l.layer,
            experts: l.experts,
            top_k: top_k as u16,
            expert_bytes: l.expert_bytes(),
        };
        Ok(TraceHeader { model: self.identity()?.0, layers: self.layout.experts.iter().map(layer).collect() })
    }
}
