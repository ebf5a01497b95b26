//! Histograms of durations, recorded by many threads. Owns fixed memory taken at construction; never grows or allocates
//! while recording. Surprising fact: threads are spread over shards by their name's order of arrival, so recording hardly ever waits.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hdrhistogram::Histogram;
use parking_lot::Mutex;
use serde::Serialize;

const SHARDS: usize = 8;
/// Longest duration told apart; longer ones count as this (ten minutes).
const MAX_US: u64 = 600_000_000;

/// Durations with two significant digits from 1 microsecond to ten minutes.
#[derive(Debug)]
pub struct Latency {
    shards: [Mutex<Histogram<u64>>; SHARDS],
}

/// A histogram as it was at one moment, to subtract from a later one.
#[derive(Clone, Debug)]
pub struct LatencyMark(Histogram<u64>);

/// What a histogram held at one moment, in milliseconds.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct LatencySummary {
    pub samples: u64,
    pub ms_mean: f64,
    pub ms_p50: f64,
    pub ms_p99: f64,
    pub ms_max: f64,
}

impl Latency {
    /// An empty histogram.
    pub fn new() -> Self {
        let shard =
            || Mutex::new(Histogram::new_with_bounds(1, MAX_US, 2).expect("1 <= low, 2 * low <= high, 2 digits"));
        Self { shards: std::array::from_fn(|_| shard()) }
    }

    /// Adds one duration.
    pub fn record(&self, duration: Duration) {
        let us = u64::try_from(duration.as_micros()).unwrap_or(MAX_US).clamp(1, MAX_US);
        self.shards[shard_of_thread()].lock().saturating_record(us);
    }

    /// Percentiles over all shards.
    pub fn summary(&self) -> LatencySummary {
        summarise(&self.all())
    }

    /// All shards as they are now.
    pub fn mark(&self) -> LatencyMark {
        LatencyMark(self.all())
    }

    /// Percentiles of what was recorded after `mark` was taken from this histogram.
    pub fn since(&self, mark: &LatencyMark) -> LatencySummary {
        let mut all = self.all();
        all.subtract(&mark.0).expect("a histogram only grows, and all have the same bounds");
        summarise(&all)
    }

    fn all(&self) -> Histogram<u64> {
        let mut all = self.shards[0].lock().clone();
        for shard in &self.shards[1..] {
            all.add(&*shard.lock()).expect("all shards have the same bounds");
        }
        all
    }
}

fn summarise(all: &Histogram<u64>) -> LatencySummary {
    if all.is_empty() {
        return LatencySummary::default();
    }
    let ms = |us: u64| us as f64 / 1000.0;
    LatencySummary {
        samples: all.len(),
        ms_mean: all.mean() / 1000.0,
        ms_p50: ms(all.value_at_quantile(0.50)),
        ms_p99: ms(all.value_at_quantile(0.99)),
        ms_max: ms(all.max()),
    }
}

impl Default for Latency {
    fn default() -> Self {
        Self::new()
    }
}

fn shard_of_thread() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static SHARD: Cell<Option<usize>> = const { Cell::new(None) });
    SHARD.with(|shard| {
        shard.get().unwrap_or_else(|| {
            let mine = NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS;
            shard.set(Some(mine));
            mine
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_cover_all_threads() {
        let latency = Latency::new();
        assert_eq!(latency.summary(), LatencySummary::default());
        std::thread::scope(|scope| {
            for t in 0..10u64 {
                let latency = &latency;
                scope.spawn(move || (1..=100).for_each(|i| latency.record(Duration::from_micros(t * 100 + i))));
            }
        });
        let s = latency.summary();
        assert_eq!(s.samples, 1000);
        assert!((s.ms_p50 - 0.5).abs() < 0.01, "{s:?}");
        assert!((s.ms_p99 - 0.99).abs() < 0.02, "{s:?}");
        assert!((s.ms_max - 1.0).abs() < 0.01 && (s.ms_mean - 0.5).abs() < 0.01, "{s:?}");
    }

    #[test]
    fn a_mark_cuts_off_what_was_before() {
        let latency = Latency::new();
        (0..50).for_each(|_| latency.record(Duration::from_millis(80)));
        let mark = latency.mark();
        assert_eq!(latency.since(&mark), LatencySummary::default());
        std::thread::scope(|scope| {
            scope.spawn(|| (0..10).for_each(|_| latency.record(Duration::from_millis(2))));
        });
        let s = latency.since(&mark);
        assert!(s.samples == 10 && (s.ms_p99 - 2.0).abs() < 0.1 && (s.ms_max - 2.0).abs() < 0.1, "{s:?}");
        assert_eq!(latency.summary().samples, 60);
    }

    #[test]
    fn the_longest_and_the_shortest_are_kept() {
        let latency = Latency::new();
        latency.record(Duration::ZERO);
        latency.record(Duration::from_secs(1 << 40));
        let s = latency.summary();
        assert_eq!(s.samples, 2);
        assert!(s.ms_max >= 590_000.0, "{s:?}");
    }
}
