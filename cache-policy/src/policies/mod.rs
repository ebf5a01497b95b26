//! The known eviction policies, one file each, and the list of their names.
//! Never holds a decision of its own. Surprising fact: a new policy is one file and one line in `KNOWN`.

mod adaptive;
mod clock;
mod layer_aware;
mod lfu;
mod lru;
mod s3_fifo;
mod sieve;
mod window_random;

use alloc::boxed::Box;
use alloc::string::String;

pub use adaptive::Adaptive;
pub use clock::Clock;
pub use layer_aware::LayerAware;
pub use lfu::{HALF_LIFE_EPOCHS, Lfu};
pub use lru::Lru;
pub use s3_fifo::S3Fifo;
pub use sieve::Sieve;
pub use window_random::WindowRandom;

use crate::policy::Policy;

/// Makes a policy for a number of slots.
pub type MakePolicy = fn(usize) -> Box<dyn Policy>;

/// Name of the policy that a user gets without asking: never worse than LRU on the recorded routes, closest to the
/// optimum overall (docs/CACHE_TUNING.md).
pub const DEFAULT: &str = "adaptive";

/// Name and constructor of every policy, baseline first.
pub const KNOWN: &[(&str, MakePolicy)] = &[
    ("lru", |slots| Box::new(Lru::new(slots))),
    ("lfu", |slots| Box::new(Lfu::new(slots))),
    ("clock", |slots| Box::new(Clock::new(slots))),
    ("s3-fifo", |slots| Box::new(S3Fifo::new(slots))),
    ("sieve", |slots| Box::new(Sieve::new(slots))),
    ("window-random", |slots| Box::new(WindowRandom::new(slots))),
    ("layer-aware", |slots| Box::new(LayerAware::new(slots))),
    ("adaptive", |slots| Box::new(Adaptive::new(slots))),
];

/// The name is none of the known ones.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("unknown cache policy '{asked}'; known: {}", known_names())]
pub struct UnknownPolicy {
    /// As typed.
    pub asked: String,
}

fn known_names() -> String {
    KNOWN.iter().map(|(name, _)| *name).collect::<alloc::vec::Vec<_>>().join(", ")
}

/// Constructor of the policy called `name`; "auto" is the default policy.
///
/// # Errors
/// `UnknownPolicy`, whose message lists the known names.
pub fn by_name(name: &str) -> Result<MakePolicy, UnknownPolicy> {
    let wanted = if name == "auto" { DEFAULT } else { name };
    let found = KNOWN.iter().find(|(known, _)| *known == wanted);
    found.map(|(_, make)| *make).ok_or_else(|| UnknownPolicy { asked: name.into() })
}
