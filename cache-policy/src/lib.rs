//! What the expert cache decides, as pure functions and state machines: identifiers, eviction policies, memory plan.
//! Never touches files, clocks, threads or global randomness, so that a recorded run replays to the same bits.
//! Surprising fact: the live cache drives exactly the objects that the simulator drives.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod ids;

pub use ids::{Bytes, ExpertIdx, ExpertKey, LayerIdx};
