//! Fills free slots ahead of the first request. Owns the order of reading and the progress; never evicts.
//! Surprising fact: callers name experts in order of worth, but they are read in the order of the file.

use std::ops::ControlFlow;
use std::sync::Arc;

use super::fill::FillGuard;
use super::{CacheError, ExpertCache};
use crate::storage::reader::ReadSink;
use crate::units::{Bytes, ExpertKey};

/// How far a preload has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PreloadProgress {
    /// Experts read (or failed) so far.
    pub experts_done: u64,
    /// Experts that are read in all.
    pub experts_total: u64,
}

/// What a preload did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PreloadReport {
    /// Experts loaded.
    pub experts: u64,
    /// Their bytes.
    pub bytes: Bytes,
    /// Whether `progress` ended it early.
    pub is_cut_short: bool,
}

/// Experts read between two calls of `progress`: enough for a deep queue, few enough to stop quickly.
const BATCH_EXPERTS: usize = 32;

impl ExpertCache {
    /// Reads those of `keys` that are absent into free slots, first keys first when not all fit, in file order.
    /// `progress` is called after each batch, and with `Break` ends the preload. Requests are served meanwhile.
    ///
    /// # Errors
    /// `Route` for a key that the model does not have (nothing is read); `Read` for the first read that failed, after
    /// all others have ended. The cache is consistent either way.
    pub fn preload(
        &self,
        keys: &[ExpertKey],
        progress: &mut dyn FnMut(PreloadProgress) -> ControlFlow<()>,
    ) -> Result<PreloadReport, CacheError> {
        let _one_at_a_time = self.preloading.lock();
        let (batches, before) = {
            let mut table = self.shared.table.lock();
            (table.begin_preload(keys, BATCH_EXPERTS)?, table.stats())
        };
        let experts_total = batches.iter().map(|b| b.fills.len() as u64).sum();
        // From here on each fill has its guard: those of batches that are never submitted undo themselves.
        let guarded: Vec<_> =
            batches.into_iter().map(|b| (Arc::new(FillGuard::new(Arc::clone(&self.shared), &b)), b.requests)).collect();
        let mut is_cut_short = progress(PreloadProgress { experts_done: 0, experts_total }).is_break();
        let mut experts_begun = 0;
        for (guard, requests) in guarded {
            let is_failed = self.shared.table.lock().preload.error.is_some();
            if is_cut_short || is_failed {
                // The reads go before the guard, so that the slots are whole when it gives them back.
                drop(requests);
                drop(guard);
                continue;
            }
            experts_begun += guard.experts() as u64;
            let fills = guard.fills().to_vec();
            let batch = self.reader.submit(requests, guard as Arc<dyn ReadSink>);
            self.note_batch(&fills, batch);
            // One batch stays behind in the queue while the next is built.
            let ahead = BATCH_EXPERTS as u64;
            let experts_done =
                self.wait_for_preload(experts_total - experts_begun.saturating_sub(ahead), experts_total);
            is_cut_short = progress(PreloadProgress { experts_done, experts_total }).is_break();
        }
        self.wait_for_preload(0, experts_total);
        let mut table = self.shared.table.lock();
        if let Some(error) = table.preload.error.take().filter(|_| !is_cut_short) {
            return Err(CacheError::Read(error));
        }
        let after = table.stats();
        drop(table);
        if !is_cut_short && experts_total > 0 {
            let _ = progress(PreloadProgress { experts_done: experts_total, experts_total });
        }
        Ok(PreloadReport {
            experts: after.preloaded - before.preloaded,
            bytes: Bytes(after.preload_bytes - before.preload_bytes),
            is_cut_short,
        })
    }

    /// Waits until at most `pending` preloads have not ended; returns how many have.
    fn wait_for_preload(&self, pending: u64, total: u64) -> u64 {
        let mut table = self.shared.table.lock();
        while table.preload.pending as u64 > pending {
            self.shared.landed.wait(&mut table);
        }
        total - table.preload.pending as u64
    }

    /// All experts of the model in file order: what a run without streaming preloads.
    pub fn all_keys(&self) -> Vec<ExpertKey> {
        self.shared.table.lock().all_keys()
    }
}
