//! Replays the events of a trace through a `Directory`, with the same starting content and the same holds as the live run.
//! Owns the last requests. Never decides anything. Surprising fact: with the slots of the recorded run, the counts equal the live
//! cache's exactly; with fewer, a request that no longer fits is cut in halves of what fits, as the engine would have cut it.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::directory::{Directory, Placement, RouteError};
use crate::ids::{ExpertIdx, ExpertKey, LayerIdx, Phase};
use crate::sim::Tally;
use crate::trace::Event;

/// Requests that may overlap: two waves of a chunk do; more only when sessions run side by side.
const OVERLAP_MAX: usize = 8;

/// A trace on its way through a directory.
pub struct Replay {
    directory: Directory,
    /// Most experts of one request.
    lease_max: usize,
    phase: Phase,
    preload: Vec<ExpertKey>,
    /// Requests before the next one that still hold their experts.
    overlap: usize,
    /// Experts of the last requests, newest last.
    recent: VecDeque<Vec<ExpertKey>>,
    placements: Vec<Placement>,
    prefill: Tally,
    decode: Tally,
}

impl Replay {
    /// Starts with an empty `directory` whose smallest class has `lease_max` slots.
    pub fn new(directory: Directory, lease_max: usize) -> Self {
        Self {
            directory,
            lease_max: lease_max.max(1),
            phase: Phase::Decode,
            preload: Vec::new(),
            overlap: 0,
            recent: VecDeque::with_capacity(OVERLAP_MAX),
            placements: Vec::new(),
            prefill: Tally::default(),
            decode: Tally::default(),
        }
    }

    /// Serves the next event of the trace.
    ///
    /// # Errors
    /// A route that does not fit the directory's model.
    pub fn event(&mut self, event: &Event<'_>) -> Result<(), RouteError> {
        match *event {
            Event::Preload(key) => self.preload.push(key),
            Event::Overlap(requests) => self.overlap = (requests as usize).min(OVERLAP_MAX),
            Event::Phase(phase) => self.phase = phase,
            Event::Favour { layer, experts } => {
                self.load();
                self.directory.favour(layer, experts);
            }
            Event::Session(_) | Event::Token { .. } => {}
            Event::Route { layer, experts } => {
                self.load();
                self.route(layer, experts)?;
            }
        }
        Ok(())
    }

    /// What the requests for many rows did.
    pub fn prefill(&self) -> Tally {
        self.prefill
    }

    /// What the requests for one token did.
    pub fn decode(&self) -> Tally {
        self.decode
    }

    /// The directory as it is now.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// Puts in what the run had preloaded, as far as it fits.
    fn load(&mut self) {
        let directory = &mut self.directory;
        let mut room: Vec<usize> = (0..directory.classes()).map(|c| directory.slots(c) - directory.len(c)).collect();
        let mut taken = Vec::with_capacity(self.preload.len());
        let mut is_present = alloc::vec![false; if self.preload.is_empty() { 0 } else { directory.experts_total() }];
        for key in self.preload.drain(..) {
            let (Some(index), Some(class)) = (directory.index_of(key), directory.class_of(key.layer)) else { continue };
            if room[class] > 0 && !directory.contains(key) && !core::mem::replace(&mut is_present[index], true) {
                room[class] -= 1;
                taken.push(key);
            }
        }
        if !taken.is_empty() {
            directory.preload(&taken);
        }
    }

    fn route(&mut self, layer: LayerIdx, experts: &[ExpertIdx]) -> Result<(), RouteError> {
        if experts.len() <= self.lease_max {
            let overlap = core::mem::take(&mut self.overlap);
            return self.request(layer, experts, overlap);
        }
        // Two waves share the lease: the next one is read while this one is computed.
        for (wave, ids) in experts.chunks((self.lease_max / 2).max(1)).enumerate() {
            let overlap = usize::from(wave > 0 && self.lease_max >= 2);
            self.request(layer, ids, overlap)?;
        }
        self.overlap = 0;
        Ok(())
    }

    fn request(&mut self, layer: LayerIdx, ids: &[ExpertIdx], overlap: usize) -> Result<(), RouteError> {
        let Self { directory, recent, placements, lease_max, phase, .. } = self;
        // Fewer slots than the recorded run had: what no longer fits beside the request was not held.
        let mut room = lease_max.saturating_sub(ids.len());
        let mut fits = |keys: &&Vec<ExpertKey>| {
            let is_room = keys.len() <= room;
            room = room.saturating_sub(keys.len());
            is_room
        };
        let held: Vec<&Vec<ExpertKey>> = recent.iter().rev().take(overlap).take_while(|keys| fits(keys)).collect();
        directory.request_in(*phase, layer, ids, &mut |key| held.iter().any(|keys| keys.contains(&key)), placements)?;
        let tally = match self.phase {
            Phase::Prefill => &mut self.prefill,
            Phase::Decode => &mut self.decode,
        };
        tally.count(placements);
        let mut keys = if recent.len() == OVERLAP_MAX { recent.pop_front().unwrap_or_default() } else { Vec::new() };
        keys.clear();
        keys.extend(ids.iter().map(|&expert| ExpertKey { layer, expert }));
        recent.push_back(keys);
        Ok(())
    }
}
