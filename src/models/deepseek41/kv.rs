//! State of one sequence (spec 5.1): window rings, compressed rows, index keys, open pairs, last tokens.
//! Never changes what is at or before `len` until a chunk is complete, so a failed chunk leaves no trace. What can be gone back to, saved
//! and loaded is in `snapshot`. Surprising fact: an open pair is kept twice, since a pass reads the one that it found while it writes the
//! one that it leaves.

use super::config::Config;
use crate::backend::{Backend, BackendError};
use crate::models::RunnerOptions;
use crate::models::blocks::architecture::SequenceState;
use crate::models::blocks::ring::{Ring, RingShape};
use crate::models::blocks::spans::Spans;
use crate::models::state::ROLLBACK_ROWS;
use crate::units::TokenId;

/// Latest tokens whose values and gates are kept beside the open pair: going back over [`ROLLBACK_ROWS`] may open an older one.
pub const PAIR_ROWS: usize = ROLLBACK_ROWS + 1;

/// Values and gates of a token whose pair is not complete.
pub struct OpenPair<B: Backend> {
    pub values: B::Buf,
    pub gates: B::Buf,
}

impl<B: Backend> OpenPair<B> {
    /// Room for `len` values and as many gates.
    fn new(len: usize, backend: &B) -> Result<Self, BackendError> {
        Ok(Self { values: backend.alloc("open pair", len)?, gates: backend.alloc("open pair", len)? })
    }

    fn allocated(&self, backend: &B) -> usize {
        backend.len(&self.values) + backend.len(&self.gates)
    }
}

/// What one owner layer keeps of all tokens.
pub struct OwnerState<B: Backend> {
    /// `[ctx / ratio + 1, head_dim]`: rotated and rounded.
    pub rows: B::Buf,
    /// `[ctx / ratio + 1, index_dim]`, where the owner makes index keys.
    pub keys: Option<B::Buf>,
    /// Ratio 2: the pair as of `len`, and the one that the chunk under way leaves.
    pub open: Option<[OpenPair<B>; 2]>,
    /// Ratio 2: the pair as of `len`, while a sweep is under way.
    saved_open: Option<OpenPair<B>>,
    /// Ratio 2, `[PAIR_ROWS, head_dim]`: the latest tokens; position `p` is in slot `p mod PAIR_ROWS`.
    pub recent: Option<OpenPair<B>>,
}

/// State of one sequence.
pub struct KvState<B: Backend> {
    /// `head_dim` values a row, by layer.
    pub windows: Vec<Ring<B>>,
    /// Slots of a window.
    pub window_slots: usize,
    pub owners: Vec<OwnerState<B>>,
    /// Which of the two open pairs is the one as of `len`.
    pub open_now: usize,
    /// The last tokens, oldest first: as many as an n-gram looks back.
    pub tail: Vec<TokenId>,
    /// Complete tokens.
    pub len: usize,
    /// End of all that was ever written to the rings, failed sweeps and dropped tokens included.
    pub written: usize,
    /// Positions before this one are in no ring: the state was loaded.
    pub base: usize,
    /// First position that `recent` holds; all up to `len` follow.
    pub pairs_from: usize,
    /// Lengths around which every row was computed.
    pub spans: Spans,
}

fn window_shape(c: &Config) -> RingShape {
    RingShape { width: c.head_dim, look_back: c.window - 1 }
}

/// Values that one owner keeps: rows, index keys, and of an open pair (0 = not kept).
fn owner_lens(c: &Config, owner: usize, ctx: usize) -> [usize; 3] {
    let (plan, rows) = (c.layers[c.owners[owner]], c.owner_rows(owner, ctx));
    let keys = if plan.makes_keys { rows * c.index_dim } else { 0 };
    [rows * c.head_dim, keys, if plan.ratio == 2 { c.head_dim } else { 0 }]
}

/// Bytes of the state at these options.
pub fn kv_bytes(c: &Config, options: &RunnerOptions) -> u64 {
    let owner = |owner: usize| {
        let [rows, keys, open] = owner_lens(c, owner, options.ctx);
        // Values and gates of three pairs, two of them to take turns and one saved, and of the latest tokens.
        rows + keys + 2 * (3 + PAIR_ROWS) * open
    };
    let owners: usize = (0..c.owners.len()).map(owner).sum();
    c.layers.len() as u64 * window_shape(c).bytes(options) + 4 * owners as u64
}

impl<B: Backend> OwnerState<B> {
    fn new(c: &Config, owner: usize, ctx: usize, backend: &B) -> Result<Self, BackendError> {
        let [rows, keys, open] = owner_lens(c, owner, ctx);
        let pairs = |count: usize| (open > 0).then(|| OpenPair::new(count * open, backend)).transpose();
        Ok(Self {
            rows: backend.alloc("compressed rows", rows)?,
            keys: (keys > 0).then(|| backend.alloc("index keys", keys)).transpose()?,
            open: pairs(1)?.zip(pairs(1)?).map(<[_; 2]>::from),
            saved_open: pairs(1)?,
            recent: pairs(PAIR_ROWS)?,
        })
    }

    fn allocated(&self, backend: &B) -> usize {
        let pairs = self.open.iter().flatten().chain(&self.saved_open).chain(&self.recent);
        let keys = self.keys.as_ref().map_or(0, |keys| backend.len(keys));
        backend.len(&self.rows) + keys + pairs.map(|pair| pair.allocated(backend)).sum::<usize>()
    }
}

impl<B: Backend> KvState<B> {
    /// Keeps a copy of the open pairs, which a sweep of several rows may overwrite, or brings it back.
    fn copy_open(&mut self, width: usize, backend: &B, is_save: bool) -> Result<(), BackendError> {
        for owner in &mut self.owners {
            if let (Some(open), Some(saved)) = (&mut owner.open, &mut owner.saved_open) {
                let now = &mut open[self.open_now];
                let (from, to) = if is_save { (now, saved) } else { (saved, now) };
                backend.copy(&from.values, 0, &mut to.values, 0, width)?;
                backend.copy(&from.gates, 0, &mut to.gates, 0, width)?;
            }
        }
        Ok(())
    }

    /// Puts the open pair that a layer's last piece left where `commit` expects it: `pieces` went through `owner` in this sweep.
    pub fn settle_open(&mut self, owner: usize, pieces: usize, width: usize, backend: &B) -> Result<(), BackendError> {
        if let (Some([first, second]), true) = (&mut self.owners[owner].open, pieces.is_multiple_of(2)) {
            let (now, next) = if self.open_now == 0 { (first, second) } else { (second, first) };
            backend.copy(&now.values, 0, &mut next.values, 0, width)?;
            backend.copy(&now.gates, 0, &mut next.gates, 0, width)?;
        }
        Ok(())
    }
}

impl<B: Backend> SequenceState<B, Config> for KvState<B> {
    fn new(c: &Config, options: &RunnerOptions, backend: &B) -> Result<Self, BackendError> {
        let ring = |_| Ring::new("window rows", window_shape(c), options, backend);
        let owner = |owner| OwnerState::new(c, owner, options.ctx, backend);
        Ok(Self {
            windows: (0..c.layers.len()).map(ring).collect::<Result<_, _>>()?,
            window_slots: window_shape(c).slots(options),
            owners: (0..c.owners.len()).map(owner).collect::<Result<_, _>>()?,
            open_now: 0,
            tail: Vec::new(),
            len: 0,
            written: 0,
            base: 0,
            pairs_from: 0,
            spans: Spans::default(),
        })
    }

    fn complete(&self) -> usize {
        self.len
    }

    fn reset(&mut self) {
        (self.len, self.written, self.base, self.pairs_from) = (0, 0, 0, 0);
        self.tail.clear();
        self.spans.clear();
    }

    fn begin(&mut self, c: &Config, backend: &B, rows: usize) -> Result<(), BackendError> {
        let end = self.len + rows;
        self.written = self.written.max(end);
        self.pairs_from = self.pairs_from.max(end.saturating_sub(PAIR_ROWS));
        self.windows.iter_mut().try_for_each(|window| window.save(backend, self.len, rows))?;
        // A single row reads the pair that it found and writes another.
        if rows > 1 { self.copy_open(c.head_dim, backend, true) } else { Ok(()) }
    }

    fn commit(&mut self, c: &Config, tokens: &[TokenId], reach: usize) {
        let look_back = c.look_back();
        self.len += tokens.len();
        self.spans.commit(self.len, tokens.len(), reach);
        // An even length leaves no open pair; an odd one left it in the other buffer.
        self.open_now ^= 1;
        self.tail.extend_from_slice(&tokens[tokens.len().saturating_sub(look_back)..]);
        let old = self.tail.len().saturating_sub(look_back);
        self.tail.drain(..old);
    }

    fn restore(&mut self, c: &Config, backend: &B, rows: usize) -> Result<(), BackendError> {
        self.windows.iter_mut().try_for_each(|window| window.restore(backend, self.len, rows))?;
        if rows > 1 { self.copy_open(c.head_dim, backend, false) } else { Ok(()) }
    }

    fn allocated_bytes(&self, backend: &B) -> u64 {
        let owners: usize = self.owners.iter().map(|owner| owner.allocated(backend)).sum();
        self.windows.iter().map(|window| window.allocated_bytes(backend)).sum::<u64>() + 4 * owners as u64
    }
}
