//! What several test programs share: checkpoints as weight sources, golden files, supplies over memory.
//! Never used outside tests. Surprising fact: each test program compiles its own copy, so parts may be unused in one.
#![allow(dead_code)]

pub mod checkpoint;
pub mod gguf_file;
pub mod golden;
pub mod memory_supply;
pub mod recorder;
pub mod setup;
