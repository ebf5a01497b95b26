//! Counters, latency histograms and their snapshots: the one source of the report, the JSON file, the bench table and the metrics.
//! Never prints and never decides. Surprising fact: a snapshot is not atomic; each number is right, their sum may be a read apart.

pub mod counters;
pub mod latency;
pub mod snapshot;
pub mod spans;
pub mod stall;

/// Target of events that are told to the user though nothing is wrong, such as a step that takes long.
pub const NOTICE: &str = "ds4::notice";

pub use counters::{Counter, ReadCounters, ReadSnapshot, RowCounters, RowSnapshot, VerifyCounters, VerifySnapshot};
pub use latency::{Latency, LatencyMark, LatencySummary};
