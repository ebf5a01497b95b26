//! Going back, saving and loading of a sequence's state (spec 5.1, 5.4): what is within reach, and the pieces that leave and come back.
//! Never copies more than an open pair to go back. Surprising fact: of a pair that is complete the latest tokens are kept all the same, since
//! taking one back opens it again.

use super::config::Config;
use super::kv::{KvState, OpenPair, PAIR_ROWS};
use super::pass::Ctx;
use crate::backend::{Backend, BackendError};
use crate::models::blocks::architecture::SavedState;
use crate::models::blocks::saved::{
    LastRows, at_most, expect_shape, load_list, load_row, ring_parts, save_list, save_row,
};
use crate::models::state::{ROLLBACK_ROWS, StateError, StatePart, StateSink, StateSource};
use crate::units::TokenId;

const SHAPE: &str = "shape";
const EXTENT: &str = "extent";
const WINDOW: &str = "window rows";
const OPEN: &str = "open pair";
const RECENT: &str = "recent pairs";
const ROWS: &str = "compressed rows";
const KEYS: &str = "index keys";

/// Numbers and values of a frontier with so many window rows and recent pairs.
fn frontier_lens(config: &Config, window: usize, pairs: usize) -> (usize, usize) {
    let with_pairs = config.owners.iter().filter(|layer| config.layers[**layer].ratio == 2).count();
    let rows = config.layers.len() * window + with_pairs * 2 * (1 + pairs);
    (shape(config).len() + Extent::NUMBERS, rows * config.head_dim)
}

/// Most host memory of a frontier.
pub fn frontier_bytes(config: &Config) -> u64 {
    let (numbers, values) = frontier_lens(config, config.window - 1 + ROLLBACK_ROWS, PAIR_ROWS);
    (8 * numbers + 4 * values) as u64
}

/// What two models must have in common for a state of one to mean anything to the other.
fn shape(config: &Config) -> [u64; 6] {
    let ratios = config.owners.iter().fold(0, |all, layer| all * 256 + config.layers[*layer].ratio as u64);
    [config.layers.len(), config.window, config.head_dim, config.index_dim, config.owners.len(), ratios as usize]
        .map(|number| number as u64)
}

/// How much of the rings is in a saved state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Extent {
    /// Tokens of the state.
    len: usize,
    /// Of those, how many can be taken back after loading.
    reach: usize,
    /// Window rows before `len`.
    window: usize,
    /// Rows of `recent` before `len`.
    pairs: usize,
}

impl Extent {
    const NUMBERS: usize = 4;

    fn to_numbers(self) -> [u64; Self::NUMBERS] {
        [self.len, self.reach, self.window, self.pairs].map(|number| number as u64)
    }

    fn pair_rows(self, width: usize) -> LastRows {
        LastRows { slots: PAIR_ROWS, width, end: self.len, count: self.pairs }
    }

    /// Believes nothing that a state of this model could not have.
    fn from_numbers(numbers: [u64; Self::NUMBERS], config: &Config, ctx: usize) -> Result<Self, StateError> {
        let [len, reach, window, pairs] = numbers;
        let len = at_most("the number of tokens", len, ctx)?;
        let reach = at_most("the number of tokens that can be taken back", reach, ROLLBACK_ROWS.min(len))?;
        let pairs = at_most("the number of recent pairs", pairs, PAIR_ROWS.min(len))?;
        let expected = len.min(config.window - 1 + reach);
        if window != expected as u64 {
            return Err(StateError::mismatch("the number of window rows", window, expected));
        }
        Ok(Self { len, reach, window: expected, pairs })
    }
}

impl<B: Backend> KvState<B> {
    /// Keeps values and gates of a piece's last rows, in case that the pair behind one of them opens again.
    pub fn keep_pairs(
        &mut self,
        owner: usize,
        ctx: Ctx<'_, B>,
        (values, gates): (&B::Buf, &B::Buf),
    ) -> Result<(), BackendError> {
        let Some(recent) = &mut self.owners[owner].recent else {
            return Ok(());
        };
        let (end, width) = (ctx.first_pos + ctx.rows, ctx.config.head_dim);
        for (at, slot, count) in ring_parts(end - ctx.rows.min(PAIR_ROWS), end, PAIR_ROWS) {
            let from = (at - ctx.first_pos) * width;
            ctx.backend.copy(values, from, &mut recent.values, slot * width, count * width)?;
            ctx.backend.copy(gates, from, &mut recent.gates, slot * width, count * width)?;
        }
        Ok(())
    }

    fn has_pairs(&self) -> bool {
        self.owners.iter().any(|owner| owner.recent.is_some())
    }

    /// Whether the state can become that of its first `len` tokens.
    fn is_within_reach(&self, len: usize, window: usize) -> bool {
        let oldest = self.base.max(self.written.saturating_sub(self.window_slots));
        let has_window = len.saturating_sub(window - 1) >= oldest;
        let was_computed = self.spans.contains(len);
        let has_pair = len.is_multiple_of(2) || !self.has_pairs() || len > self.pairs_from;
        len == self.len || (len < self.len && has_window && was_computed && has_pair)
    }

    /// Makes the pair that is open at `len` the one that the next pass completes.
    fn open_pair_at(&mut self, len: usize, width: usize, backend: &B) -> Result<(), BackendError> {
        if len.is_multiple_of(2) {
            return Ok(());
        }
        let from = (len - 1) % PAIR_ROWS * width;
        for owner in &mut self.owners {
            if let (Some(open), Some(recent)) = (&mut owner.open, &owner.recent) {
                let now = &mut open[self.open_now];
                backend.copy(&recent.values, from, &mut now.values, 0, width)?;
                backend.copy(&recent.gates, from, &mut now.gates, 0, width)?;
            }
        }
        Ok(())
    }

    /// Forgets what follows `kept`.
    fn end_at(&mut self, kept: &[TokenId], look_back: usize) {
        self.len = kept.len();
        self.tail = kept[kept.len().saturating_sub(look_back)..].to_vec();
        self.spans.cut(kept.len());
    }

    fn extent(&self, config: &Config) -> Extent {
        let is_reached = |back: usize| back <= self.len && self.is_within_reach(self.len - back, config.window);
        let reach = (1..=ROLLBACK_ROWS).take_while(|back| is_reached(*back)).count();
        let pairs = if self.has_pairs() { self.len.saturating_sub(self.pairs_from).min(PAIR_ROWS) } else { 0 };
        Extent { len: self.len, reach, window: self.len.min(config.window - 1 + reach), pairs }
    }

    /// What is overwritten as the sequence moves on.
    fn load_rings(
        &mut self,
        extent: Extent,
        config: &Config,
        backend: &B,
        source: &mut dyn StateSource,
    ) -> Result<(), StateError> {
        let width = config.head_dim;
        let mut host = Vec::new();
        for window in &mut self.windows {
            window.last(extent.len, extent.window).load(WINDOW, &mut window.rows, backend, source, &mut host)?;
        }
        for owner in &mut self.owners {
            let (Some(open), Some(recent)) = (&mut owner.open, &mut owner.recent) else { continue };
            let OpenPair { values, gates } = &mut open[self.open_now];
            for (buf, ring) in [(values, &mut recent.values), (gates, &mut recent.gates)] {
                load_row(OPEN, (buf, width), backend, source, &mut host)?;
                extent.pair_rows(width).load(RECENT, ring, backend, source, &mut host)?;
            }
        }
        Ok(())
    }

    /// What is only ever appended to.
    fn load_lists(
        &mut self,
        extent: Extent,
        config: &Config,
        backend: &B,
        source: &mut dyn StateSource,
    ) -> Result<(), StateError> {
        let mut host = Vec::new();
        for (at, owner) in self.owners.iter_mut().enumerate() {
            let count = extent.len / config.layers[config.owners[at]].ratio;
            let keys = owner.keys.as_mut().map(|keys| (KEYS, keys, count * config.index_dim));
            for (name, buf, values) in [(ROWS, &mut owner.rows, count * config.head_dim)].into_iter().chain(keys) {
                load_list(name, (buf, values), backend, source, &mut host)?;
            }
        }
        Ok(())
    }
}

impl<B: Backend> SavedState<B, Config> for KvState<B> {
    fn reach(&self, config: &Config, len: usize) -> usize {
        let oldest = self.base.max(self.written.saturating_sub(self.window_slots));
        (oldest.max(1)..=len).rev().find(|len| self.is_within_reach(*len, config.window)).unwrap_or(0)
    }

    /// At most an open pair of each owner is copied.
    fn rewind(&mut self, config: &Config, backend: &B, kept: &[TokenId]) -> Result<bool, BackendError> {
        assert!(kept.len() <= self.len, "a state of {} tokens cannot go back to {}", self.len, kept.len());
        if !self.is_within_reach(kept.len(), config.window) {
            return Ok(false);
        }
        if kept.len() < self.len {
            self.open_pair_at(kept.len(), config.head_dim, backend)?;
        }
        self.end_at(kept, config.look_back());
        Ok(true)
    }

    fn save_to(
        &self,
        part: StatePart,
        config: &Config,
        backend: &B,
        sink: &mut dyn StateSink,
    ) -> Result<(), StateError> {
        let (extent, width) = (self.extent(config), config.head_dim);
        let (numbers, values) = frontier_lens(config, extent.window, extent.pairs);
        sink.room(numbers, values);
        sink.numbers(SHAPE, &shape(config))?;
        sink.numbers(EXTENT, &extent.to_numbers())?;
        let mut host = Vec::new();
        for window in &self.windows {
            window.last(extent.len, extent.window).save(WINDOW, &window.rows, backend, sink, &mut host)?;
        }
        for owner in &self.owners {
            let (Some(open), Some(recent)) = (&owner.open, &owner.recent) else { continue };
            let OpenPair { values, gates } = &open[self.open_now];
            for (buf, ring) in [(values, &recent.values), (gates, &recent.gates)] {
                save_row(OPEN, (buf, width), backend, sink, &mut host)?;
                extent.pair_rows(width).save(RECENT, ring, backend, sink, &mut host)?;
            }
        }
        if part == StatePart::Frontier {
            return Ok(());
        }
        for (at, owner) in self.owners.iter().enumerate() {
            let count = extent.len / config.layers[config.owners[at]].ratio;
            let keys = owner.keys.as_ref().map(|keys| (KEYS, keys, count * config.index_dim));
            for (name, buf, values) in [(ROWS, &owner.rows, count * width)].into_iter().chain(keys) {
                save_list(name, (buf, values), backend, sink, &mut host)?;
            }
        }
        Ok(())
    }

    fn load_from(
        &mut self,
        (part, kept, ctx): (StatePart, &[TokenId], usize),
        config: &Config,
        backend: &B,
        source: &mut dyn StateSource,
    ) -> Result<(), StateError> {
        expect_shape(SHAPE, &shape(config), source)?;
        let mut numbers = [0; Extent::NUMBERS];
        source.numbers(EXTENT, &mut numbers)?;
        let extent = Extent::from_numbers(numbers, config, ctx)?;
        if !(extent.len - extent.reach..=extent.len).contains(&kept.len()) {
            return Err(StateError::mismatch("the number of tokens", kept.len(), extent.len));
        }
        self.load_rings(extent, config, backend, source)?;
        match part {
            StatePart::Frontier => assert!(kept.len() <= self.len, "what a frontier ends is no longer there"),
            StatePart::Whole => self.load_lists(extent, config, backend, source)?,
        }
        (self.len, self.written, self.base) = (extent.len, extent.len, extent.len - extent.window);
        self.pairs_from = extent.len - extent.pairs;
        self.spans.reset_to(extent.len - extent.reach, extent.len);
        if kept.len() < extent.len {
            self.open_pair_at(kept.len(), config.head_dim, backend)?;
        }
        self.end_at(kept, config.look_back());
        Ok(())
    }
}
