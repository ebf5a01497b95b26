//! Counters, latency histograms and their snapshots: the one source of the report, the JSON file, the bench table and the metrics.
//! Never prints and never decides. Surprising fact: a snapshot is not atomic; each number is right, their sum may be a read apart.

pub mod counters;
pub mod latency;
pub mod snapshot;
pub mod spans;
pub mod stall;

pub use counters::{Counter, ReadCounters, ReadSnapshot, RowCounters, RowSnapshot, VerifyCounters, VerifySnapshot};
pub use latency::{Latency, LatencyMark, LatencySummary};
