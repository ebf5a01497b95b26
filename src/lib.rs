//! ds4: runs mixture-of-experts language models far larger than memory by streaming their experts from an SSD.
//! Owns the module tree; docs/ARCHITECTURE.md has the map and the direction of imports (tests/tidy.rs checks it).
//! Surprising fact: `engine` is the only module that sees both `models` and `storage`.
#![deny(unsafe_op_in_unsafe_fn)]

pub mod backend;
pub mod cli;
pub mod engine;
pub mod models;
pub mod obs;
pub mod quant;
pub mod session;
pub mod storage;
pub mod sys;
pub mod text;
pub mod units;
