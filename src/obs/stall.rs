//! Waits for the drive that last too long: one notice when it happens, one when it is over.
//! Never gives up: a read ends with data or an error, and that is the reader's business. Surprising fact: sleeping in steps costs nothing,
//! because a step ends as soon as something lands.

use std::time::{Duration, Instant};

use crate::obs::spans::{self, Detail, Row};

/// A wait of this length is worth a word: two hundred times the slowest ordinary read, and less than a drive's own timeout.
pub const STALL: Duration = Duration::from_secs(2);

/// One wait.
#[derive(Debug)]
pub struct Patience {
    what: &'static str,
    since: Instant,
    told: bool,
}

impl Patience {
    /// Begins to wait for `what`.
    pub fn new(what: &'static str) -> Self {
        Self { what, since: Instant::now(), told: false }
    }

    /// Longest sleep before [`Patience::look`] is called again.
    pub fn step(&self) -> Duration {
        if self.told { Duration::from_secs(3600) } else { STALL.saturating_sub(self.since.elapsed()) }
    }

    /// Says so once, when the wait has become too long; returns whether it did.
    pub fn look(&mut self) -> bool {
        if self.told || self.since.elapsed() < STALL {
            return false;
        }
        self.told = true;
        tracing::warn!("waiting for {}: the drive has given nothing for {} s", self.what, STALL.as_secs());
        true
    }

    /// The wait is over; says so where a notice was given. Returns how long it was.
    pub fn end(self) -> Duration {
        spans::end(Row::Waits, self.what, self.since, Detail::default());
        let waited = self.since.elapsed();
        if self.told {
            tracing::warn!("the drive answered after {:.1} s", waited.as_secs_f64());
        }
        waited
    }
}
