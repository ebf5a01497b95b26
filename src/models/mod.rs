//! The architectures, one folder each, and what a graph asks of its surroundings (`supply`).
//! Never imports `storage`: where weights came from is not a model's business.

pub mod blocks;
pub mod deepseek41;
pub mod supply;
