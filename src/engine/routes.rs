//! The expert requests of a run, kept to say afterwards how well the best possible cache would have done.
//! Never changes what the cache does. Surprising fact: the optimum starts empty, so a run that preloads can beat it.

use std::sync::Arc;

use cache_policy::sim::Tally;
use cache_policy::{ClassShape, Phase, Recording};
use parking_lot::Mutex;

use crate::storage::expert_cache::RouteSink;
use crate::units::{ExpertIdx, LayerIdx};

/// Uses that are kept: 4 MiB of memory, about 4,300 tokens of V4.1 Flash. A longer run has no verdict, since a part of its requests
/// cannot be set beside the hit rate of all.
const USES_MAX: usize = 1 << 20;

/// The routes of a run, shared with the cache that feeds it; `None` once they were too many.
#[derive(Clone)]
pub struct Routes(Arc<Mutex<Option<Recording>>>);

impl Routes {
    /// Nothing yet, for a model with these routed layers and their numbers of experts.
    pub fn new(layers: &[(LayerIdx, u16)]) -> Self {
        Self(Arc::new(Mutex::new(Some(Recording::new(layers)))))
    }

    /// The sink to give to the cache.
    pub fn sink(&self) -> Box<dyn RouteSink> {
        Box::new(self.clone())
    }

    /// The fewest misses that any cache of these classes could have had on the run's requests, starting empty.
    pub fn optimum(&self, shapes: &[ClassShape]) -> Option<Tally> {
        self.0.lock().as_ref().map(|recording| recording.optimum(shapes, 0))
    }
}

impl RouteSink for Routes {
    fn route(&mut self, _phase: Phase, layer: LayerIdx, ids: &[ExpertIdx]) {
        let mut kept = self.0.lock();
        if kept.as_ref().is_some_and(|recording| recording.uses() + ids.len() > USES_MAX) {
            *kept = None;
        }
        if let Some(recording) = kept.as_mut() {
            recording.push(layer, ids).expect("the cache has checked the request");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_long_a_run_has_no_verdict() {
        let routes = Routes::new(&[(LayerIdx(0), 4)]);
        let shapes = [ClassShape { layers: vec![(LayerIdx(0), 4)], slots: 2 }];
        let mut sink = routes.sink();
        for use_no in 0..USES_MAX {
            sink.route(Phase::Decode, LayerIdx(0), &[ExpertIdx((use_no % 2) as u16)]);
        }
        let best = routes.optimum(&shapes).unwrap();
        assert_eq!((best.misses, best.hits), (2, USES_MAX as u64 - 2));
        sink.route(Phase::Decode, LayerIdx(0), &[ExpertIdx(0)]);
        assert!(routes.optimum(&shapes).is_none());
    }
}
