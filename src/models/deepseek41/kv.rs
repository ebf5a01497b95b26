//! State of one sequence (spec 5.1): window rings, compressed rows, index keys, open pairs, last tokens.
//! Never changes what is at or before `len` until a chunk is complete, so a failed chunk leaves no trace.
//! Surprising fact: rings are longer than the window by one chunk. A whole chunk is written before it is attended, and
//! what it overwrites is older than anything that the rows at `len` still see. A sweep of several chunks overwrites more, so it begins
//! with a copy of what the rows at `len` see. What can be gone back to, saved and loaded is in `snapshot`.

use super::config::Config;
use crate::backend::{Backend, BackendError};
use crate::models::RunnerOptions;
use crate::models::blocks::architecture::SequenceState;
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

/// What one owner layer keeps of all tokens.
pub struct OwnerState<B: Backend> {
    /// `[ctx / ratio + 1, head_dim]`: rotated and rounded.
    pub rows: B::Buf,
    /// `[ctx / ratio + 1, index_dim]`, where the owner makes index keys.
    pub keys: Option<B::Buf>,
    /// Ratio 2: the pair as of `len`, and the one that the chunk under way leaves.
    pub open: Option<[OpenPair<B>; 2]>,
    /// Ratio 2, `[PAIR_ROWS, head_dim]`: the latest tokens; position `p` is in slot `p mod PAIR_ROWS`.
    pub recent: Option<OpenPair<B>>,
}

/// State of one sequence.
pub struct KvState<B: Backend> {
    /// `[window_slots, head_dim]` a layer; position `p` is in slot `p mod window_slots`.
    pub windows: Vec<B::Buf>,
    pub window_slots: usize,
    pub owners: Vec<OwnerState<B>>,
    /// Which of the two open pairs is the one as of `len`.
    pub open_now: usize,
    /// `[layers][window - 1, head_dim]` as of `len`, while a sweep of several chunks is under way; not kept without such sweeps.
    saved_windows: Vec<B::Buf>,
    /// Open pairs as of `len`, while a sweep is under way, by owner.
    saved_open: Vec<Option<OpenPair<B>>>,
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

/// Name and values of one buffer of the state.
type Span = (&'static str, usize);

/// Buffers of one owner: rows, index keys, open pairs (0 = not kept).
fn owner_spans(config: &Config, owner: usize, ctx: usize) -> [Span; 3] {
    let plan = config.layers[config.owners[owner]];
    let rows = config.owner_rows(owner, ctx);
    [
        ("compressed rows", rows * config.head_dim),
        ("index keys", if plan.makes_keys { rows * config.index_dim } else { 0 }),
        ("open pair", if plan.ratio == 2 { config.head_dim } else { 0 }),
    ]
}

/// Bytes of the state at these options.
pub fn kv_bytes(config: &Config, options: &RunnerOptions) -> u64 {
    let windows = config.layers.len() * window_slots(config, options) * config.head_dim;
    let owners: usize = (0..config.owners.len())
        .map(|owner| {
            let [rows, keys, open] = owner_spans(config, owner, options.ctx);
            rows.1 + keys.1 + (4 + 2 * PAIR_ROWS) * open.1
        })
        .sum();
    let saved_open: usize =
        (0..config.owners.len()).map(|owner| 2 * owner_spans(config, owner, options.ctx)[2].1).sum();
    let saved = config.layers.len() * saved_window_values(config, options);
    4 * (windows + owners + saved_open + saved) as u64
}

/// Rows of a window ring: a chunk, or what may be taken back, behind the window.
fn window_slots(config: &Config, options: &RunnerOptions) -> usize {
    config.window + options.chunk.max(ROLLBACK_ROWS)
}

/// Values of one layer's window that a sweep may overwrite.
fn saved_window_values(config: &Config, options: &RunnerOptions) -> usize {
    if options.sweep_rows() > options.chunk { (config.window - 1) * config.head_dim } else { 0 }
}

impl<B: Backend> KvState<B> {
    /// Keeps a copy of what a sweep of `rows` rows may overwrite and a failure must bring back, or brings it back. A single row overwrites
    /// nothing of it.
    fn copy_saved(&mut self, config: &Config, backend: &B, rows: usize, is_save: bool) -> Result<(), BackendError> {
        if rows == 1 {
            return Ok(());
        }
        let copy = |from: &mut B::Buf, from_at: usize, to: &mut B::Buf, to_at: usize, len: usize| match is_save {
            true => backend.copy(from, from_at, to, to_at, len),
            false => backend.copy(to, to_at, from, from_at, len),
        };
        for (owner, saved) in self.owners.iter_mut().zip(&mut self.saved_open) {
            if let (Some(open), Some(saved)) = (&mut owner.open, saved) {
                let now = &mut open[self.open_now];
                copy(&mut now.values, 0, &mut saved.values, 0, config.head_dim)?;
                copy(&mut now.gates, 0, &mut saved.gates, 0, config.head_dim)?;
            }
        }
        let seen = self.len.min(config.window - 1);
        if rows + seen <= self.window_slots {
            return Ok(());
        }
        let first = self.len - seen;
        for (window, saved) in self.windows.iter_mut().zip(&mut self.saved_windows) {
            // The ring wraps once at most.
            let before_end = seen.min(self.window_slots - first % self.window_slots);
            let width = config.head_dim;
            copy(window, first % self.window_slots * width, saved, 0, before_end * width)?;
            copy(window, 0, saved, before_end * width, (seen - before_end) * width)?;
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
    fn new(config: &Config, options: &RunnerOptions, backend: &B) -> Result<Self, BackendError> {
        let window_slots = window_slots(config, options);
        let windows = (0..config.layers.len())
            .map(|_| backend.alloc("window rows", window_slots * config.head_dim))
            .collect::<Result<_, _>>()?;
        let owners = (0..config.owners.len())
            .map(|owner| {
                let [rows, keys, open] = owner_spans(config, owner, options.ctx);
                let pairs = |count: usize| -> Result<OpenPair<B>, BackendError> {
                    let len = count * open.1;
                    Ok(OpenPair { values: backend.alloc(open.0, len)?, gates: backend.alloc(open.0, len)? })
                };
                Ok(OwnerState {
                    rows: backend.alloc(rows.0, rows.1)?,
                    keys: (keys.1 > 0).then(|| backend.alloc(keys.0, keys.1)).transpose()?,
                    open: if open.1 > 0 { Some([pairs(1)?, pairs(1)?]) } else { None },
                    recent: (open.1 > 0).then(|| pairs(PAIR_ROWS)).transpose()?,
                })
            })
            .collect::<Result<_, BackendError>>()?;
        let saved = saved_window_values(config, options);
        let saved_windows = (0..if saved > 0 { config.layers.len() } else { 0 })
            .map(|_| backend.alloc("saved window rows", saved))
            .collect::<Result<_, _>>()?;
        let saved_open = (0..config.owners.len())
            .map(|owner| match owner_spans(config, owner, options.ctx)[2] {
                (_, 0) => Ok(None),
                (what, len) => {
                    Ok(Some(OpenPair { values: backend.alloc(what, len)?, gates: backend.alloc(what, len)? }))
                }
            })
            .collect::<Result<_, BackendError>>()?;
        Ok(Self {
            windows,
            window_slots,
            owners,
            open_now: 0,
            saved_windows,
            saved_open,
            tail: Vec::new(),
            len: 0,
            written: 0,
            base: 0,
            pairs_from: 0,
            spans: Spans::default(),
        })
    }

    fn len(&self) -> usize {
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
        self.copy_saved(c, backend, rows, true)
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
        self.copy_saved(c, backend, rows, false)
    }

    fn allocated_bytes(&self, backend: &B) -> u64 {
        let mut values: usize = self.windows.iter().map(|w| backend.len(w)).sum();
        for owner in &self.owners {
            values += backend.len(&owner.rows) + owner.keys.as_ref().map_or(0, |k| backend.len(k));
            for pair in owner.open.iter().flatten().chain(&owner.recent) {
                values += backend.len(&pair.values) + backend.len(&pair.gates);
            }
        }
        values += self.saved_windows.iter().map(|w| backend.len(w)).sum::<usize>();
        for pair in self.saved_open.iter().flatten() {
            values += backend.len(&pair.values) + backend.len(&pair.gates);
        }
        4 * values as u64
    }
}
