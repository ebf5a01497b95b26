//! Looks at a running engine from another thread. Owns the samples from which rates over the last seconds are made.
//! Never slows a pass down: the cache's lock is held for one copy. Surprising fact: an observer keeps cache and reader alive.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::engine::Engine;
use crate::engine::passes::Passes;
use crate::obs::snapshot::{self, Snapshot};
use crate::storage::expert_cache::{CacheView, ExpertCache};
use crate::storage::reader::Reader;

/// Rates are over this long.
const RATE_WINDOW: Duration = Duration::from_secs(2);

struct Sample {
    at: Instant,
    decode_tokens: u64,
    read_bytes: u64,
}

/// Makes [`Snapshot`]s of one engine.
pub struct Observer {
    model: String,
    arch: &'static str,
    opened: Instant,
    cache: Option<Arc<ExpertCache>>,
    reader: Arc<dyn Reader>,
    passes: Arc<Passes>,
    view: CacheView,
    samples: VecDeque<Sample>,
}

impl Engine {
    /// An observer that may go to another thread.
    pub fn observer(&self) -> Observer {
        Observer {
            model: self.prepared.file.path().display().to_string(),
            arch: self.prepared.config.arch(),
            opened: Instant::now(),
            cache: self.cache.clone(),
            reader: Arc::clone(&self.prepared.reader),
            passes: Arc::clone(&self.passes),
            view: CacheView::default(),
            samples: VecDeque::new(),
        }
    }
}

impl Observer {
    /// The engine now. Rates are from the samples of earlier calls.
    pub fn snapshot(&mut self, is_last: bool) -> Snapshot {
        let reader = Arc::clone(&self.reader);
        let counters = reader.counters();
        let now = Sample {
            at: Instant::now(),
            decode_tokens: self.passes.decode_tokens(),
            read_bytes: counters.device_bytes.get(),
        };
        let (decode_tps, read_gb_per_s) = self.rates(&now);
        let mut snapshot = Snapshot {
            format: snapshot::FORMAT.into(),
            version: snapshot::VERSION,
            pid: std::process::id(),
            model: self.model.clone(),
            arch: self.arch.into(),
            elapsed_ms: now.at.duration_since(self.opened).as_millis() as u64,
            is_last,
            tokens: self.passes.tokens(),
            decode_tokens: now.decode_tokens,
            decode_tps,
            reads_in_flight: counters.in_flight(),
            read_bytes: now.read_bytes,
            read_gb_per_s,
            ..Snapshot::default()
        };
        self.samples.push_back(now);
        if let Some(cache) = &self.cache {
            cache.look(&mut self.view);
            let both = self.view.phases.total();
            snapshot.slots = self.view.slots;
            (snapshot.hits, snapshot.misses, snapshot.evictions) = (both.hits, both.misses, both.evictions);
            snapshot.hit_rate = both.hit_rate();
            snapshot.decode_hit_rate = self.view.phases.decode.hit_rate();
            snapshot.wait_ms = both.wait_ns as f64 / 1e6;
            snapshot.layers = self.view.layers();
        }
        snapshot
    }

    /// Single tokens a second and GB a second since the oldest sample of the window.
    fn rates(&mut self, now: &Sample) -> (f64, f64) {
        while self.samples.len() > 1 && now.at - self.samples[0].at > RATE_WINDOW {
            self.samples.pop_front();
        }
        let Some(then) = self.samples.front() else { return (0.0, 0.0) };
        let seconds = (now.at - then.at).as_secs_f64().max(1e-3);
        let tokens = (now.decode_tokens - then.decode_tokens) as f64;
        (tokens / seconds, (now.read_bytes - then.read_bytes) as f64 / 1e9 / seconds)
    }
}
