//! Saving and loading of a sequence's state (spec 4): the pieces that leave and come back.
//! Never keeps more of a compressor's ring than the groups that are not complete need. Surprising fact: how much that is depends on where in
//! its group the sequence stands, and a token that is taken back may open a group again.

use super::config::{Config, LayerPlan};
use super::kv::{KvState, kinds};
use crate::backend::{Backend, BackendError};
use crate::models::blocks::architecture::SavedState;
use crate::models::blocks::saved::{at_most, expect_shape, load_list, save_list};
use crate::models::state::{ROLLBACK_ROWS, StateError, StatePart, StateSink, StateSource};
use crate::units::TokenId;

const SHAPE: &str = "shape";
const EXTENT: &str = "extent";
const WINDOW: &str = "window rows";
const VALUES: &str = "compressor values";
const GATES: &str = "compressor gates";
const ROWS: &str = "compressed rows";
const KEYS: &str = "index keys";

/// What two models must have in common for a state of one to mean anything to the other.
fn shape(c: &Config) -> Vec<u64> {
    let sizes = [c.layers.len(), c.window, c.head_dim, c.index_dim];
    sizes.into_iter().chain(c.layers.iter().map(|plan| plan.ratio)).map(|number| number as u64).collect()
}

/// How much of the rings is in a saved state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Extent {
    /// Tokens of the state.
    len: usize,
    /// Of those, how many can be taken back after loading.
    reach: usize,
}

impl Extent {
    const NUMBERS: usize = 2;

    /// Rows of a window ring.
    fn window(self, c: &Config) -> usize {
        self.len.min(c.window - 1 + self.reach)
    }

    /// Rows of a compressor's rings: the group that is open at the earliest length, and the one before it where groups overlap.
    fn inputs(self, plan: &LayerPlan) -> usize {
        let groups_before = if plan.overlaps() { 1 } else { 0 };
        let open = (self.len - self.reach) / plan.ratio;
        self.len - open.saturating_sub(groups_before) * plan.ratio
    }

    /// Complete groups.
    fn rows(self, plan: &LayerPlan) -> usize {
        self.len / plan.ratio
    }
}

/// Most host memory of a frontier.
pub fn frontier_bytes(c: &Config) -> u64 {
    let numbers = shape(c).len() + Extent::NUMBERS;
    let layer = |plan: &LayerPlan| -> usize {
        let kinds = kinds(c, plan).into_iter().flatten();
        // The earliest length is one token short of completing a group.
        let most = Extent { len: 2 * plan.ratio.max(1) - 1 + ROLLBACK_ROWS, reach: ROLLBACK_ROWS };
        let inputs: usize = kinds.map(|width| 2 * plan.parts() * width * most.inputs(plan)).sum();
        (c.window - 1 + ROLLBACK_ROWS) * c.head_dim + inputs
    };
    (8 * numbers + 4 * c.layers.iter().map(layer).sum::<usize>()) as u64
}

impl<B: Backend> KvState<B> {
    fn extent(&self) -> Extent {
        let is_reached = |back: usize| back <= self.len && self.is_within_reach(self.len - back);
        Extent { len: self.len, reach: (1..=ROLLBACK_ROWS).take_while(|back| is_reached(*back)).count() }
    }

    /// Forgets what follows the first `len` tokens, which are within reach.
    fn end_at(&mut self, len: usize) {
        assert!(self.is_within_reach(len), "a state of {} tokens cannot go back to {len}", self.len);
        self.len = len;
        self.spans.cut(len);
    }

    fn frontier_values(&self, extent: Extent, c: &Config) -> usize {
        let layers = self.layers.iter().zip(&c.layers).map(|(layer, plan)| {
            let kinds = layer.compressed.iter().chain(&layer.keys);
            let inputs: usize = kinds.map(|kind| 2 * extent.inputs(plan) * kind.values.width()).sum();
            extent.window(c) * layer.window.width() + inputs
        });
        layers.sum()
    }

    /// What is overwritten as the sequence moves on.
    fn load_rings(
        &mut self,
        extent: Extent,
        c: &Config,
        backend: &B,
        source: &mut dyn StateSource,
    ) -> Result<(), StateError> {
        let mut host = Vec::new();
        for (layer, plan) in self.layers.iter_mut().zip(&c.layers) {
            let last = layer.window.last(extent.len, extent.window(c));
            last.load(WINDOW, &mut layer.window.rows, backend, source, &mut host)?;
            for kind in layer.compressed.iter_mut().chain(&mut layer.keys) {
                for (name, ring) in [(VALUES, &mut kind.values), (GATES, &mut kind.gates)] {
                    let last = ring.last(extent.len, extent.inputs(plan));
                    last.load(name, &mut ring.rows, backend, source, &mut host)?;
                }
            }
        }
        Ok(())
    }

    /// What is only ever appended to.
    fn load_lists(
        &mut self,
        extent: Extent,
        c: &Config,
        backend: &B,
        source: &mut dyn StateSource,
    ) -> Result<(), StateError> {
        let mut host = Vec::new();
        for (layer, plan) in self.layers.iter_mut().zip(&c.layers) {
            let lists = [(ROWS, &mut layer.compressed, c.head_dim), (KEYS, &mut layer.keys, c.index_dim)];
            for (name, kind, width) in lists {
                if let Some(kind) = kind {
                    load_list(name, (&mut kind.rows, extent.rows(plan) * width), backend, source, &mut host)?;
                }
            }
        }
        Ok(())
    }
}

impl<B: Backend> SavedState<B, Config> for KvState<B> {
    fn reach(&self, _c: &Config, len: usize) -> usize {
        let oldest = self.written.saturating_sub(self.slack).max(1);
        (oldest..=len.min(self.len)).rev().find(|len| self.is_within_reach(*len)).unwrap_or(0)
    }

    /// Costs nothing: rings are by position.
    fn rewind(&mut self, _c: &Config, _backend: &B, kept: &[TokenId]) -> Result<bool, BackendError> {
        let is_possible = self.is_within_reach(kept.len());
        if is_possible {
            self.end_at(kept.len());
        }
        Ok(is_possible)
    }

    fn save_to(&self, part: StatePart, c: &Config, backend: &B, sink: &mut dyn StateSink) -> Result<(), StateError> {
        let (extent, shape, mut host) = (self.extent(), shape(c), Vec::new());
        sink.room(shape.len() + Extent::NUMBERS, self.frontier_values(extent, c));
        sink.numbers(SHAPE, &shape)?;
        sink.numbers(EXTENT, &[extent.len, extent.reach].map(|number| number as u64))?;
        for (layer, plan) in self.layers.iter().zip(&c.layers) {
            let last = layer.window.last(extent.len, extent.window(c));
            last.save(WINDOW, &layer.window.rows, backend, sink, &mut host)?;
            for kind in layer.compressed.iter().chain(&layer.keys) {
                for (name, ring) in [(VALUES, &kind.values), (GATES, &kind.gates)] {
                    ring.last(extent.len, extent.inputs(plan)).save(name, &ring.rows, backend, sink, &mut host)?;
                }
            }
        }
        if part == StatePart::Frontier {
            return Ok(());
        }
        for (layer, plan) in self.layers.iter().zip(&c.layers) {
            let lists = [(ROWS, &layer.compressed, c.head_dim), (KEYS, &layer.keys, c.index_dim)];
            for (name, kind, width) in lists {
                if let Some(kind) = kind {
                    save_list(name, (&kind.rows, extent.rows(plan) * width), backend, sink, &mut host)?;
                }
            }
        }
        Ok(())
    }

    fn load_from(
        &mut self,
        (part, kept, ctx): (StatePart, &[TokenId], usize),
        c: &Config,
        backend: &B,
        source: &mut dyn StateSource,
    ) -> Result<(), StateError> {
        let kept = kept.len();
        expect_shape(SHAPE, &shape(c), source)?;
        let mut numbers = [0; Extent::NUMBERS];
        source.numbers(EXTENT, &mut numbers)?;
        let len = at_most("the number of tokens", numbers[0], ctx)?;
        let reach = at_most("the number of tokens that can be taken back", numbers[1], ROLLBACK_ROWS.min(len))?;
        if !(len - reach..=len).contains(&kept) {
            return Err(StateError::mismatch("the number of tokens", kept, len));
        }
        let extent = Extent { len, reach };
        self.load_rings(extent, c, backend, source)?;
        match part {
            StatePart::Frontier => assert!(kept <= self.len, "what a frontier ends is no longer there"),
            StatePart::Whole => self.load_lists(extent, c, backend, source)?,
        }
        (self.len, self.written) = (len, len);
        self.spans.reset_to(len - reach, len);
        self.end_at(kept);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_groups_and_what_they_overlap_are_kept() {
        let plan = |ratio| LayerPlan { ratio, is_hashed: false, limit: 1.0, shared_limit: 1.0 };
        let inputs = |ratio, len, reach| Extent { len, reach }.inputs(&plan(ratio));
        // All of a short text; the open group; from its first token on when it is just complete.
        assert_eq!((inputs(128, 5, 0), inputs(128, 130, 0), inputs(128, 256, 0)), (5, 2, 0));
        assert_eq!(inputs(128, 130, 8), 130, "taking three back opens the first group again");
        assert_eq!((inputs(4, 8, 0), inputs(4, 11, 0), inputs(4, 11, 8)), (4, 7, 11));
        // Never more than what is looked back on and what can be taken back.
        for (ratio, most) in [(4, 7 + 8), (128, 127 + 8)] {
            let found = (0..1000).flat_map(|len: usize| (0..=8.min(len)).map(move |reach| (len, reach)));
            assert_eq!(found.map(|(len, reach)| inputs(ratio, len, reach)).max(), Some(most));
        }
    }
}
