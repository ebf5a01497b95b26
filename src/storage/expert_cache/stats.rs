//! Counters of the expert cache as plain numbers. Owns their meaning; never their printing.
//! Surprising fact: an expert that was already on its way counts as a hit and as joined, since the policy saw it present.

use cache_policy::{Phase, prefetch::PrefetchScore, sim::Tally};
use serde::Serialize;

/// Counters of one phase.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct PhaseStats {
    /// Requests (one layer of one token or wave each).
    pub requests: u64,
    /// Requests without a miss.
    pub all_hit: u64,
    /// Requested experts that were in memory or on their way.
    pub hits: u64,
    /// Of the hits, those still on their way.
    pub joined: u64,
    /// Requested experts that had to be read.
    pub misses: u64,
    /// Experts that left for others.
    pub evictions: u64,
    /// Bytes of experts that landed for misses.
    pub read_bytes: u64,
    /// Waits for a landing.
    pub waits: u64,
    /// Time spent in them.
    pub wait_ns: u64,
    /// Waits that were long enough for a notice.
    pub stalls: u64,
    /// Time spent waiting for slots that other leases held.
    pub room_wait_ns: u64,
    /// Misses whose read failed.
    pub failed: u64,
}

impl PhaseStats {
    /// What a simulator counts, for comparison.
    pub fn tally(&self) -> Tally {
        Tally {
            requests: self.requests,
            hits: self.hits,
            misses: self.misses,
            evictions: self.evictions,
            all_hit: self.all_hit,
        }
    }

    /// Share of requested experts that were hits; `None` before the first request.
    pub fn hit_rate(&self) -> Option<f64> {
        let all = self.hits + self.misses;
        (all > 0).then(|| self.hits as f64 / all as f64)
    }

    pub(super) fn add_tally(&mut self, tally: &Tally) {
        self.requests += tally.requests;
        self.hits += tally.hits;
        self.misses += tally.misses;
        self.evictions += tally.evictions;
        self.all_hit += tally.all_hit;
    }

    /// Sum of both.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            requests: self.requests + other.requests,
            all_hit: self.all_hit + other.all_hit,
            hits: self.hits + other.hits,
            joined: self.joined + other.joined,
            misses: self.misses + other.misses,
            evictions: self.evictions + other.evictions,
            read_bytes: self.read_bytes + other.read_bytes,
            waits: self.waits + other.waits,
            wait_ns: self.wait_ns + other.wait_ns,
            stalls: self.stalls + other.stalls,
            room_wait_ns: self.room_wait_ns + other.room_wait_ns,
            failed: self.failed + other.failed,
        }
    }
}

/// All counters and the state of the slots at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct CacheStats {
    /// Requests for many rows at once.
    pub prefill: PhaseStats,
    /// Requests for one token.
    pub decode: PhaseStats,
    /// Experts loaded by preload.
    pub preloaded: u64,
    /// Their bytes.
    pub preload_bytes: u64,
    /// Preloads whose read failed.
    pub preload_failed: u64,
    /// Preloaded experts that were requested before they left: each saved a miss.
    pub preload_used: u64,
    /// Hits on preloaded experts before they left.
    pub preload_hits: u64,
    /// What became of the experts that were read ahead of their request.
    pub lookahead: LookaheadCounts,
    /// Bytes of experts that landed for them.
    pub lookahead_bytes: u64,
    /// Those taken back before they landed; part of the wasted ones.
    pub lookahead_cancelled: u64,
    /// Those whose read failed; part of the wasted ones.
    pub lookahead_failed: u64,
    /// Slots of all classes.
    pub slots: u64,
    /// Slots with an expert.
    pub slots_valid: u64,
    /// Slots being filled, or whose failed read still has a piece of their memory.
    pub slots_filling: u64,
    /// Slots that a lease holds.
    pub slots_held: u64,
    /// Slots given up because a failed read kept their memory.
    pub slots_lost: u64,
}

/// What became of reads ahead; see `cache_policy::prefetch`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct LookaheadCounts {
    /// Reads begun ahead of their request.
    pub issued: u64,
    /// Requested after they had landed.
    pub useful: u64,
    /// Requested while under way.
    pub late: u64,
    /// Left unused.
    pub wasted: u64,
}

impl From<PrefetchScore> for LookaheadCounts {
    fn from(score: PrefetchScore) -> Self {
        Self { issued: score.issued, useful: score.useful, late: score.late, wasted: score.wasted }
    }
}

impl CacheStats {
    /// Both phases together.
    pub fn total(&self) -> PhaseStats {
        self.prefill.plus(&self.decode)
    }

    pub(super) fn phase(&mut self, phase: Phase) -> &mut PhaseStats {
        match phase {
            Phase::Prefill => &mut self.prefill,
            Phase::Decode => &mut self.decode,
        }
    }
}
