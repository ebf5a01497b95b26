//! What the expert cache decides, as pure functions and state machines: identifiers, eviction policies, memory plan.
//! Never touches files, clocks, threads or global randomness, so that a recorded run replays to the same bits.
//! Surprising fact: the live cache drives exactly the objects that the simulator drives.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod belady;
pub mod census;
mod chain;
pub mod curve;
mod decay;
pub mod directory;
mod echo;
pub mod ids;
mod key_table;
mod mix;
pub mod plan;
pub mod policies;
pub mod policy;
pub mod prefetch;
mod ranking;
pub mod replay;
pub mod route_memory;
pub mod score;
mod shadow;
pub mod sim;
pub mod speed;
pub mod trace;

pub use belady::Recording;
pub use census::Census;
pub use curve::MissCurve;
pub use directory::{ClassShape, Directory, Placement, RouteError};
pub use ids::{Bytes, ExpertIdx, ExpertKey, LayerIdx, Phase};

pub use policies::{Lru, UnknownPolicy, by_name};
pub use policy::{Epoch, Policy};
pub use prefetch::PrefetchLedger;
pub use replay::Replay;
pub use route_memory::RouteMemory;
pub use score::{Request, Score, ScoredReplay};
pub use sim::Tally;
pub use speed::Speed;
pub use trace::{Event, TraceError, TraceHeader, TraceLayer, TraceReader, TraceWriter};
