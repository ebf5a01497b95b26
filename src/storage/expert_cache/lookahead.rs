//! Reads ahead of requests. Owns how they are begun, joined and taken back; what to read is the caller's guess.
//! Never lets a guess stall a request. Surprising fact: each expert is a batch of its own, so that it can be hurried or dropped alone.

use std::sync::Arc;

use cache_policy::prefetch::PrefetchScore;

use super::fill::FillGuard;
use super::table::SlotIdx;
use super::{ExpertCache, Lease, Shared};
use crate::storage::reader::{BatchId, ReadSink};
use crate::units::{ExpertKey, LayerIdx};

impl ExpertCache {
    /// A token begins; those of `keep` that are cached do not leave before it ends, as long as anything else can.
    pub fn begin_token(&self, keep: &[ExpertKey]) {
        self.shared.table.lock().begin_token(keep);
    }

    /// Begins to read the first of `keys` that are absent and pushes nobody wanted out, with at most `open_max` such reads under way.
    /// `reserve` slots of a class stay clear of it. Present ones are kept through the token. Returns how many of `keys` were dealt with.
    pub fn read_ahead(&self, keys: &[ExpertKey], open_max: usize, reserve: usize) -> usize {
        let mut table = self.shared.table.lock();
        let mut open = table.ahead_open();
        let (mut batches, mut taken) = (Vec::new(), 0);
        for &key in keys {
            if table.contains(key) {
                table.expect(key);
            } else if open >= open_max {
                break;
            } else if let Some(batch) = table.begin_ahead(key, reserve) {
                open += 1;
                batches.push(batch);
            }
            taken += 1;
        }
        drop(table);
        for batch in batches {
            let guard = FillGuard::new(Arc::clone(&self.shared), &batch);
            let id = self.reader.submit(batch.requests, Arc::new(guard) as Arc<dyn ReadSink>);
            self.note_batch(&batch.fills, id);
        }
        taken
    }

    /// Holds `key` for a copy ahead of its request, if it is in memory and that leaves `reserve` slots of its class to requests. Reads nothing.
    pub fn hold_present(&self, key: ExpertKey, reserve: usize) -> Option<Lease<'_>> {
        let mut table = self.shared.table.lock();
        let mut parts = table.take_lease_parts();
        let is_held = table.hold_present(key, reserve, &mut parts);
        if !is_held {
            table.keep_lease_parts(parts);
            return None;
        }
        drop(table);
        Some(Lease::of_copy(&self.shared, parts))
    }

    /// How many of `keys` are neither in memory nor on their way.
    pub fn absent(&self, keys: &[ExpertKey]) -> usize {
        let table = self.shared.table.lock();
        keys.iter().filter(|key| !table.contains(**key)).count()
    }

    /// Takes back the reads ahead that have not begun, of experts that are stale.
    pub fn cancel_ahead(&self, is_stale: &dyn Fn(ExpertKey) -> bool) {
        let batches = self.shared.table.lock().cancel_ahead(is_stale);
        for batch in batches {
            self.reader.cancel(batch);
        }
    }

    /// What became of the reads ahead for one layer.
    pub fn lookahead_score(&self, layer: LayerIdx) -> PrefetchScore {
        self.shared.table.lock().ledger.layer(layer)
    }

    /// Tells the table how the reader calls a batch, and hurries it if a request has come to wait for it meanwhile.
    pub(super) fn note_batch(&self, fills: &[(SlotIdx, u64)], batch: BatchId) {
        let shared: &Shared = &self.shared;
        let is_wanted = shared.table.lock().note_batch(fills, batch);
        if is_wanted {
            self.reader.promote(batch);
        }
    }
}
