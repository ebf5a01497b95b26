//! The cache at one moment, copied out under its lock so that it can be worked on without. Owns the copy, never the cache.
//! Surprising fact: the buffers are kept from look to look, so that the lock is never held for an allocation.

use super::stats::CacheStats;
use super::{ExpertCache, Table};
use crate::obs::snapshot::{LayerSnapshot, SlotStates};
use crate::units::LayerIdx;

/// A copy of the cache's state; make it once, fill it with [`ExpertCache::look`].
#[derive(Debug, Default)]
pub struct CacheView {
    /// Slots by state.
    pub slots: SlotStates,
    /// Counters of requests; those of slots are in `slots`.
    pub phases: CacheStats,
    /// Routed layers in order with their numbers of experts.
    pub(super) shape: Vec<(LayerIdx, u16)>,
    /// Requests by dense number of the expert.
    pub(super) uses: Vec<u32>,
    /// Whether the expert is in memory.
    pub(super) is_cached: Vec<bool>,
}

impl CacheView {
    /// The experts by layer, rising.
    pub fn layers(&self) -> Vec<LayerSnapshot> {
        let mut base = 0;
        let mut layers = Vec::with_capacity(self.shape.len());
        for &(layer, experts) in &self.shape {
            let range = base..base + usize::from(experts);
            let is_cached = &self.is_cached[range.clone()];
            let cached = (0..experts).filter(|&e| is_cached[usize::from(e)]).collect();
            base = range.end;
            layers.push(LayerSnapshot { layer: layer.0, experts, cached, uses: self.uses[range].to_vec() });
        }
        layers.sort_unstable_by_key(|l| l.layer);
        layers
    }
}

impl ExpertCache {
    /// Copies the state to `view`. Holds the lock for one pass over slots and experts: some ten microseconds for the largest model.
    pub fn look(&self, view: &mut CacheView) {
        let table: &Table = &self.shared.table.lock();
        if view.shape.is_empty() {
            view.shape = table.shape();
        }
        table.view(view);
    }
}
