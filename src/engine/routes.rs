//! The expert requests of a run, kept to say afterwards how well the best possible cache would have done.
//! Never changes what the cache does. Surprising fact: the optimum starts empty, so a run that preloads can beat it.

use std::sync::Arc;

use cache_policy::sim::Tally;
use cache_policy::{ClassShape, Phase, Recording};
use parking_lot::Mutex;

use crate::storage::expert_cache::RouteSink;
use crate::units::{ExpertIdx, LayerIdx};

/// Uses that are kept: 8 MiB of memory, about 4,300 tokens of V4.1 Flash. A longer run is judged by its beginning.
const USES_MAX: usize = 1 << 20;

/// The routes of a run, shared with the cache that feeds it.
#[derive(Clone)]
pub struct Routes(Arc<Mutex<Recording>>);

impl Routes {
    /// Nothing yet, for a model with these routed layers and their numbers of experts.
    pub fn new(layers: &[(LayerIdx, u16)]) -> Self {
        Self(Arc::new(Mutex::new(Recording::new(layers))))
    }

    /// The sink to give to the cache.
    pub fn sink(&self) -> Box<dyn RouteSink> {
        Box::new(self.clone())
    }

    /// The fewest misses that any cache of these classes could have had on what was recorded, starting empty.
    pub fn optimum(&self, shapes: &[ClassShape]) -> Tally {
        self.0.lock().optimum(shapes, 0)
    }
}

impl RouteSink for Routes {
    fn route(&mut self, _phase: Phase, layer: LayerIdx, ids: &[ExpertIdx]) {
        let mut recording = self.0.lock();
        if recording.uses() + ids.len() <= USES_MAX {
            recording.push(layer, ids).expect("the cache has checked the request");
        }
    }
}
