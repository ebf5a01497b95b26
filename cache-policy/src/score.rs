//! What a replay costs, by phase: counts, and the bytes of the misses. Owns the sums; all decisions are the replay's.
//! Never counts a wave as a request. Surprising fact: experts of several sizes make bytes a count of their own, which
//! misses times an average size would get wrong.

use crate::directory::{ClassShape, Directory, RouteError};
use crate::ids::{Bytes, ExpertIdx, LayerIdx, Phase};
use crate::policies::MakePolicy;
use crate::replay::Replay;
use crate::sim::Tally;
use crate::trace::Event;

/// What a cache did in each phase, with the bytes it had to read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Score {
    /// Counts of prefill.
    pub prefill: Tally,
    /// Counts of decode.
    pub decode: Tally,
    /// Bytes of the misses of prefill.
    pub prefill_read: Bytes,
    /// Bytes of the misses of decode.
    pub decode_read: Bytes,
}

impl Score {
    /// Counts and bytes of `phase`.
    pub fn of(&self, phase: Phase) -> (&Tally, Bytes) {
        match phase {
            Phase::Prefill => (&self.prefill, self.prefill_read),
            Phase::Decode => (&self.decode, self.decode_read),
        }
    }

    /// Adds a request of `phase` whose experts have `expert_bytes` each.
    pub fn add(&mut self, phase: Phase, served: &Tally, expert_bytes: Bytes) {
        let (tally, read) = match phase {
            Phase::Prefill => (&mut self.prefill, &mut self.prefill_read),
            Phase::Decode => (&mut self.decode, &mut self.decode_read),
        };
        tally.add(served);
        read.0 += served.misses * expert_bytes.0;
    }
}

/// One request as a trace has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request<'a> {
    /// What it is for.
    pub phase: Phase,
    /// Layer.
    pub layer: LayerIdx,
    /// Experts in request order.
    pub experts: &'a [ExpertIdx],
    /// Nothing is requested: the experts are those that a prompt uses most, best first ([`Event::Favour`]).
    pub is_favour: bool,
    /// Requests before it that still held their experts.
    pub overlap: u32,
    /// Bytes of each expert.
    pub expert_bytes: Bytes,
}

/// A cache under replay that keeps score.
pub struct ScoredReplay {
    replay: Replay,
    lease_max: usize,
    phase: Option<Phase>,
    /// What it did so far.
    pub score: Score,
    /// Requests that were cut into waves, because they were recorded with a larger cache.
    pub split_requests: u64,
}

impl ScoredReplay {
    /// An empty cache of these classes.
    pub fn new(shapes: &[ClassShape], policy: MakePolicy) -> Self {
        let lease_max = shapes.iter().map(|s| s.slots).min().unwrap_or(0);
        Self {
            replay: Replay::new(Directory::new(shapes, &policy), lease_max),
            lease_max,
            phase: None,
            score: Score::default(),
            split_requests: 0,
        }
    }

    /// Serves one request.
    ///
    /// # Errors
    /// A route that does not fit the model.
    pub fn request(&mut self, request: &Request<'_>) -> Result<(), RouteError> {
        let Request { phase, layer, experts, is_favour, overlap, expert_bytes } = *request;
        if is_favour {
            return self.replay.event(&Event::Favour { layer, experts });
        }
        if self.phase.replace(phase) != Some(phase) {
            self.replay.event(&Event::Phase(phase))?;
        }
        if overlap > 0 {
            self.replay.event(&Event::Overlap(overlap))?;
        }
        let tally = |replay: &Replay| match phase {
            Phase::Prefill => replay.prefill(),
            Phase::Decode => replay.decode(),
        };
        let before = tally(&self.replay);
        self.replay.event(&Event::Route { layer, experts })?;
        let after = tally(&self.replay);
        let misses = after.misses - before.misses;
        let served = Tally {
            requests: 1,
            hits: after.hits - before.hits,
            misses,
            evictions: after.evictions - before.evictions,
            all_hit: u64::from(misses == 0),
        };
        self.split_requests += u64::from(experts.len() > self.lease_max);
        self.score.add(phase, &served, expert_bytes);
        Ok(())
    }
}
