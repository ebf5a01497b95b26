//! Replays routes through a `Directory` as if every read were instant. Owns the counting rules of hits and misses.
//! Never decides anything: all decisions are the directory's.
//! Surprising fact: a live cache that joins a read in flight counts a hit too, since the policy saw a present key.

use alloc::vec::Vec;

use crate::directory::{ClassShape, Directory, Placement, RouteError};
use crate::ids::{ExpertIdx, LayerIdx};

/// What requests did to a cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    /// Requests (one layer of one token or wave each).
    pub requests: u64,
    /// Requested experts that were cached or already being read.
    pub hits: u64,
    /// Requested experts that had to be read.
    pub misses: u64,
    /// Experts that left for others.
    pub evictions: u64,
    /// Requests without a miss.
    pub all_hit: u64,
}

impl Tally {
    /// Counts one request by its placements.
    pub fn count(&mut self, placements: &[Placement]) {
        let before = self.misses;
        for placement in placements {
            match placement {
                Placement::Hit => self.hits += 1,
                Placement::Fill { evict } => {
                    self.misses += 1;
                    self.evictions += u64::from(evict.is_some());
                }
            }
        }
        self.requests += 1;
        self.all_hit += u64::from(self.misses == before);
    }

    /// Adds the counts of `other`.
    pub fn add(&mut self, other: &Tally) {
        self.requests += other.requests;
        self.hits += other.hits;
        self.misses += other.misses;
        self.evictions += other.evictions;
        self.all_hit += other.all_hit;
    }

    /// Share of the uses that hit; `None` without uses.
    pub fn hit_rate(&self) -> Option<f64> {
        let uses = self.hits + self.misses;
        (uses > 0).then(|| self.hits as f64 / uses as f64)
    }
}

/// How many experts of a request of `len` go together: all of them if the smallest class holds them, else half of what it
/// holds, since the engine reads one wave while it computes the one before.
pub fn wave_len(shapes: &[ClassShape]) -> impl Fn(usize) -> usize + use<> {
    let lease_max = shapes.iter().map(|s| s.slots).min().unwrap_or(0);
    move |len| if len <= lease_max { len.max(1) } else { (lease_max / 2).max(1) }
}

/// Serves every `(layer, ids)` of `routes` in order.
///
/// # Errors
/// The first route that does not fit the directory's model.
pub fn replay<'a>(
    directory: &mut Directory,
    routes: impl IntoIterator<Item = (LayerIdx, &'a [ExpertIdx])>,
) -> Result<Tally, RouteError> {
    let mut tally = Tally::default();
    let mut placements = Vec::new();
    for (layer, ids) in routes {
        directory.request(layer, ids, &mut |_| false, &mut placements)?;
        tally.count(&placements);
    }
    Ok(tally)
}
