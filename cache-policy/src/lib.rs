//! What the expert cache decides, as pure functions and state machines: identifiers, eviction policies, memory plan.
//! Never touches files, clocks, threads or global randomness, so that a recorded run replays to the same bits.
//! Surprising fact: the live cache drives exactly the objects that the simulator drives.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod chain;
mod decay;
pub mod directory;
mod echo;
pub mod ids;
mod key_table;
pub mod lru;
pub mod plan;
pub mod policies;
pub mod policy;
mod ranking;
mod shadow;
pub mod sim;

pub use directory::{ClassShape, Directory, Placement, RouteError};
pub use ids::{Bytes, ExpertIdx, ExpertKey, LayerIdx, Phase};
pub use lru::Lru;
pub use policies::{UnknownPolicy, by_name};
pub use policy::{Epoch, Policy};
