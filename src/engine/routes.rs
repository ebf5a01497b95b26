//! The expert requests of a run: kept to say afterwards how well the best possible cache would have done, and written to a trace.
//! Never changes what the cache does. Surprising fact: the optimum starts empty, so a run that preloads can beat it.

use std::io::{self, Write};
use std::sync::Arc;

use cache_policy::sim::Tally;
use cache_policy::{ClassShape, MissCurve, Phase, Recording, TraceHeader};
use parking_lot::Mutex;

use crate::engine::route_trace::RouteTrace;
use crate::storage::expert_cache::RouteSink;
use crate::units::{ExpertIdx, ExpertKey, LayerIdx, TokenId};

/// Uses that are kept: 4 MiB of memory, about 4,300 tokens of V4.1 Flash. A longer run has no verdict, since a part of its requests
/// cannot be set beside the hit rate of all.
const USES_MAX: usize = 1 << 20;

#[derive(Default)]
struct State {
    /// `None` when there is no cache to judge, and once the requests were too many.
    kept: Option<Recording>,
    /// What the cache held before the first request, most wanted first.
    preload: Vec<ExpertKey>,
    has_requests: bool,
    trace: Option<RouteTrace>,
}

/// The routes of a run, shared with the supplies that feed it and the runners that know tokens. Lock order: cache, then this.
#[derive(Clone, Default)]
pub struct Routes(Arc<Mutex<State>>);

impl Routes {
    /// Nothing yet, and no verdict later: for a run without a cache.
    pub fn without_verdict() -> Self {
        Self::default()
    }

    /// Nothing yet, for a model with these routed layers and their numbers of experts.
    pub fn new(layers: &[(LayerIdx, u16)]) -> Self {
        Self(Arc::new(Mutex::new(State { kept: Some(Recording::new(layers)), ..State::default() })))
    }

    /// The sink to give to the cache.
    pub fn sink(&self) -> Box<dyn RouteSink> {
        Box::new(self.clone())
    }

    /// The fewest misses that any cache of these classes could have had on the run's requests, starting empty.
    pub fn optimum(&self, shapes: &[ClassShape]) -> Option<Tally> {
        self.0.lock().kept.as_ref().map(|recording| recording.optimum(shapes, 0))
    }

    /// Misses of LRU at every size, by class.
    pub fn miss_curves(&self, shapes: &[ClassShape]) -> Option<Vec<MissCurve>> {
        let state = self.0.lock();
        let kept = state.kept.as_ref().filter(|recording| recording.uses() > 0);
        kept.map(|recording| recording.miss_curves(shapes))
    }

    /// Writes what follows to `out`.
    ///
    /// # Errors
    /// After the first request, since a replay could not start where the run did; an `out` that cannot be written to.
    pub fn begin_trace(&self, header: &TraceHeader, out: Box<dyn Write + Send>) -> io::Result<()> {
        let mut state = self.0.lock();
        if state.has_requests {
            return Err(io::Error::other("experts were requested already; begin before the first pass"));
        }
        state.trace = Some(RouteTrace::new(header, &state.preload, out)?);
        Ok(())
    }

    /// Ends the trace, if one is being written.
    ///
    /// # Errors
    /// The first failure to write.
    pub fn end_trace(&self) -> io::Result<()> {
        let trace = self.0.lock().trace.take();
        trace.map_or(Ok(()), RouteTrace::finish)
    }

    /// A pass over `tokens` of `session` from `position` on begins.
    pub fn begin_pass(&self, session: u32, position: usize, tokens: &[TokenId]) {
        if let Some(trace) = &mut self.0.lock().trace {
            trace.begin_pass(session, position, tokens);
        }
    }

    /// A pass has ended.
    pub fn end_pass(&self, is_good: bool) {
        if let Some(trace) = &mut self.0.lock().trace {
            trace.end_pass(is_good);
        }
    }

    /// A request was served while `overlap` earlier ones held their experts.
    pub fn request(&self, phase: Phase, layer: LayerIdx, ids: &[ExpertIdx], overlap: usize) {
        let state = &mut *self.0.lock();
        state.has_requests = true;
        if let Some(trace) = &mut state.trace {
            trace.route(phase, layer, ids, overlap);
        }
        if state.kept.as_ref().is_some_and(|recording| recording.uses() + ids.len() > USES_MAX) {
            state.kept = None;
        }
        if let Some(recording) = &mut state.kept {
            recording.push(layer, ids).expect("the cache has checked the request");
        }
    }
}

impl RouteSink for Routes {
    fn favour(&mut self, layer: LayerIdx, ids: &[ExpertIdx]) {
        if let Some(trace) = &mut self.0.lock().trace {
            trace.favour(layer, ids);
        }
    }

    fn route(&mut self, phase: Phase, layer: LayerIdx, ids: &[ExpertIdx], overlap: usize) {
        self.request(phase, layer, ids, overlap);
    }

    fn preload(&mut self, keys: &[ExpertKey]) {
        let mut state = self.0.lock();
        if !state.has_requests {
            state.preload.extend_from_slice(keys);
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
            sink.route(Phase::Decode, LayerIdx(0), &[ExpertIdx((use_no % 2) as u16)], 0);
        }
        let best = routes.optimum(&shapes).unwrap();
        assert_eq!((best.misses, best.hits), (2, USES_MAX as u64 - 2));
        sink.route(Phase::Decode, LayerIdx(0), &[ExpertIdx(0)], 0);
        assert!(routes.optimum(&shapes).is_none());
    }
}
