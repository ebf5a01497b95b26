//! Counters between two moments: what one prefill or one generation asked of cache and drive.
//! Owns differences only; never resets a counter. Surprising fact: the counters are those of the closing report and `--stats-json`, so the
//! three can never disagree.

use crate::cli::bench::row::{Row, per, round, share};
use crate::engine::Engine;
use crate::obs::LatencyMark;
use crate::storage::expert_cache::PhaseStats;

/// The counters at one moment.
pub struct Mark {
    cache: PhaseStats,
    drive_ms: f64,
    row_wait_ms: f64,
    latency: LatencyMark,
}

/// What happened between two moments.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Interval {
    pub requests: u64,
    pub all_hit: u64,
    pub hits: u64,
    pub misses: u64,
    pub evictions: u64,
    pub read_bytes: u64,
    /// Time that the model waited for experts, in whatever way.
    pub wait_ms: f64,
    pub row_wait_ms: f64,
    /// Time with at least one read under way.
    pub drive_ms: f64,
    /// Of single reads; absent where there was none.
    pub read_ms: Option<(f64, f64)>,
}

impl Mark {
    /// The counters of `engine` now.
    pub fn now(engine: &Engine) -> Self {
        let counters = engine.reader().counters();
        let cache = engine.cache().map(|c| c.stats()).unwrap_or_default();
        let total = cache.total();
        Self {
            // Whoever asked: a read ahead costs the drive as much as one on demand.
            cache: PhaseStats { read_bytes: total.read_bytes + cache.lookahead_bytes, ..total },
            drive_ms: counters.busy_ns.get() as f64 / 1e6,
            row_wait_ms: engine.rows().map_or(0.0, |rows| rows.counters().wait_ns.get() as f64 / 1e6),
            latency: counters.latency.mark(),
        }
    }

    /// What happened since.
    pub fn interval(&self, engine: &Engine) -> Interval {
        let now = Self::now(engine);
        let (a, b) = (&self.cache, &now.cache);
        let reads = engine.reader().counters().latency.since(&self.latency);
        Interval {
            requests: b.requests - a.requests,
            all_hit: b.all_hit - a.all_hit,
            hits: b.hits - a.hits,
            misses: b.misses - a.misses,
            evictions: b.evictions - a.evictions,
            read_bytes: b.read_bytes - a.read_bytes,
            wait_ms: (b.wait_ns + b.room_wait_ns - a.wait_ns - a.room_wait_ns) as f64 / 1e6,
            row_wait_ms: now.row_wait_ms - self.row_wait_ms,
            drive_ms: now.drive_ms - self.drive_ms,
            read_ms: (reads.samples > 0).then_some((reads.ms_p50, reads.ms_p99)),
        }
    }
}

impl Row {
    /// Fills in a prefill or append of `tokens` that took `ms`.
    pub(super) fn set_prefill(&mut self, tokens: usize, ms: f64, seen: &Interval) {
        self.prefill_tokens = tokens as u64;
        self.prefill_tps = per(tokens as f64, ms / 1e3);
        self.prefill_ms = round(ms);
        self.prefill_hits = seen.hits;
        self.prefill_misses = seen.misses;
        self.prefill_read_bytes = seen.read_bytes;
        self.prefill_drive_ms = round(seen.drive_ms);
        self.prefill_wait_ms = round(seen.wait_ms);
    }

    /// Fills in a generation, one entry of `ms` a token.
    pub(super) fn set_generation(&mut self, ms: &[f64], seen: &Interval) {
        let (tokens, total) = (ms.len() as f64, ms.iter().sum::<f64>());
        let first = ms.first().copied().unwrap_or(0.0);
        self.gen_tokens = ms.len() as u64;
        self.gen_tps = per(tokens, total / 1e3);
        self.gen_first_ms = round(first);
        self.gen_steady_tokens = self.gen_tokens.saturating_sub(1);
        self.gen_steady_tps = per(self.gen_steady_tokens as f64, (total - first) / 1e3);
        self.cache_hits = seen.hits;
        self.cache_misses = seen.misses;
        self.cache_hit_rate = share(seen.hits as f64, (seen.hits + seen.misses) as f64);
        self.all_hit_layer_rate = share(seen.all_hit as f64, seen.requests as f64);
        self.evictions = seen.evictions;
        self.read_bytes = seen.read_bytes;
        self.gen_drive_ms = round(seen.drive_ms);
        self.row_wait_ms_per_token = share(seen.row_wait_ms, tokens);
        if self.cache_slots > 0 {
            self.read_bytes_per_token = share(seen.read_bytes as f64, tokens);
            self.expert_wait_ms_per_token = share(seen.wait_ms, tokens);
        }
        if let (true, Some((p50, p99))) = (tokens > 0.0, seen.read_ms) {
            (self.read_ms_p50, self.read_ms_p99) = (Some(round(p50)), Some(round(p99)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_leave_the_first_token_out() {
        let mut row = Row { cache_slots: 4, ..Row::default() };
        let seen = Interval {
            requests: 8,
            all_hit: 2,
            hits: 3,
            misses: 1,
            read_bytes: 100,
            wait_ms: 8.0,
            ..Interval::default()
        };
        row.set_prefill(50, 25.0, &seen);
        row.set_generation(&[60.0, 10.0, 10.0, 20.0], &seen);
        assert_eq!((row.prefill_tps, row.prefill_misses, row.prefill_wait_ms), (2000.0, 1, 8.0));
        assert_eq!((row.gen_tps, row.gen_first_ms, row.gen_steady_tokens, row.gen_steady_tps), (40.0, 60.0, 3, 75.0));
        assert_eq!((row.cache_hit_rate, row.all_hit_layer_rate), (Some(0.75), Some(0.25)));
        assert_eq!(
            (row.read_bytes_per_token, row.expert_wait_ms_per_token, row.read_ms_p50),
            (Some(25.0), Some(2.0), None)
        );
    }

    #[test]
    fn nothing_generated_is_zeros_and_empty_cells() {
        let mut row = Row::default();
        row.set_generation(&[], &Interval::default());
        assert_eq!(row, Row::default());
        row.set_generation(&[5.0], &Interval::default());
        assert_eq!((row.gen_tps, row.gen_steady_tokens, row.gen_steady_tps), (200.0, 0, 0.0));
    }
}
