//! Uploads ahead of the router: experts that the device names for the next layer are brought to GPU memory while this layer is computed.
//! Never lets one reach a sum before its router has chosen it, sends nobody away for one, and reads no file. Surprising fact: the bus has only
//! as long as a layer computes, about one expert's upload, so the first guess is queued behind what the router asked for and each further one when
//! the one before has arrived: a demand waits for one of them at most.

use crate::backend::BackendError;
use crate::backend::cpu::CpuBackend;
use crate::backend::cuda::{NAMED_MAX, SlotPass};
use crate::engine::gpu_experts::{GpuExperts, failed};
use crate::engine::lookahead::Share;
use crate::models::supply::{ExpertLease, SupplyError};
use crate::units::{ExpertIdx, ExpertKey};

/// Slots kept free for guesses: those of one layer.
const FREE_SLOTS: usize = 3;
/// One slot in this many, beyond one layer's experts, may be kept free.
const FREE_SHARE: usize = 16;
/// Naming costs the device about 10 us a layer, an upload that is not waited for saves up to 190 (H200): absent experts a token from which on, and
/// down to which, the next layer's are named.
const ABSENT_MIN: [f32; 2] = [8.0, 4.0];
/// Tokens between two tries when no rank of the guesses is right often enough.
const RETRY_TOKENS: u32 = 256;

/// Whether naming pays, from one token to the next.
#[derive(Default)]
pub(super) struct Worth {
    /// How often absent experts of each rank were chosen.
    ranks: [Share; NAMED_MAX],
    /// Experts a token that were absent or came by a guess, lately.
    absent: f32,
    is_on: bool,
    /// Tokens since naming was last given up.
    silent: u32,
}

impl Worth {
    /// Whether the next token should name experts.
    fn is_worth_it(&mut self) -> bool {
        self.is_on = self.absent >= ABSENT_MIN[usize::from(self.is_on)];
        if self.ranks.iter().any(Share::may_work) {
            self.silent = 0;
            return self.is_on;
        }
        self.silent += 1;
        if self.silent >= RETRY_TOKENS {
            self.ranks = Default::default();
        }
        false
    }

    /// A token is over, with so many experts that were absent or came by a guess.
    fn note_token(&mut self, absent: usize) {
        self.absent += (absent as f32 - self.absent) / 4.0;
    }
}

/// Slots to keep free of `slots` for `experts`, `k` of them a row: none where all have a place, and nobody has to leave.
fn slots_kept_free(slots: usize, experts: usize, k: usize) -> usize {
    if slots >= experts { 0 } else { FREE_SLOTS.min(slots.saturating_sub(k) / FREE_SHARE) }
}

/// What is on its way, or was named, for the layer behind the one under way.
pub(super) struct Guesses<'a> {
    owner: &'a GpuExperts,
    /// Experts that the device names a layer; 0 for none.
    wanted: usize,
    /// Whether slots are filled by guesses, and whether the lower tier reads by them.
    uploads: bool,
    reads: bool,
    /// Slots to keep free.
    free: usize,
    /// Layers, counted among those with experts, that are named; and the last one whose names were taken.
    named: Vec<bool>,
    taken: Option<usize>,
    /// Absent experts of that layer with their rank, best first, and how many of them were dealt with.
    absent: Vec<(usize, ExpertKey)>,
    dealt: usize,
    /// Experts and slots that were filled for that layer.
    open: Vec<(ExpertKey, usize)>,
    /// The upload under way.
    copying: Option<Box<dyn ExpertLease<CpuBackend> + 'a>>,
    /// Entries of the device's table that are to be cleared.
    stale: Vec<usize>,
    /// Experts of this token so far that were absent or came by a guess.
    missed: usize,
}

impl<'a> Guesses<'a> {
    /// For a pass over `owner` with `k` experts of a row.
    pub(super) fn new(owner: &'a GpuExperts, worth: &mut Worth, k: usize) -> Self {
        let uploads = owner.guesses && owner.is_registered() && worth.is_worth_it();
        let reads = owner.inner.guesses_wanted();
        let wanted = if uploads { NAMED_MAX } else { reads.min(NAMED_MAX) }.min(k);
        let experts = owner.layers.iter().map(|layer| usize::from(layer.experts)).sum();
        Self {
            owner,
            wanted,
            uploads,
            reads: reads > 0,
            free: slots_kept_free(owner.slots, experts, k),
            named: vec![false; owner.layers.len()],
            taken: None,
            absent: Vec::with_capacity(NAMED_MAX),
            dealt: 0,
            open: Vec::with_capacity(NAMED_MAX),
            copying: None,
            stale: Vec::new(),
            missed: 0,
        }
    }

    /// Experts that the device should name a layer.
    pub(super) fn wanted(&self) -> usize {
        self.wanted
    }

    /// The naming for layer `row` was queued.
    pub(super) fn note_named(&mut self, row: usize) {
        self.named[row] = true;
    }

    /// Whether names for `row` will be told that the lower tier should read by, beside what is read for the layer before.
    pub(super) fn awaits_names(&self, row: usize) -> bool {
        self.reads && self.taken != Some(row) && self.named.get(row).is_some_and(|is_named| *is_named)
    }

    /// Takes what the device has named for `row`, if it has: those absent are looked at, and the lower tier hears of them that it lacks.
    pub(super) fn take(&mut self, row: usize, pass: &SlotPass<'_>) {
        if self.taken == Some(row) || !self.named.get(row).is_some_and(|is_named| *is_named) {
            return;
        }
        let Some(ids) = pass.guess(row) else { return };
        (self.taken, self.dealt) = (Some(row), 0);
        let layer = &self.owner.layers[row];
        let known = |id: i32| u16::try_from(id).ok().filter(|id| *id < layer.experts).map(ExpertIdx);
        let keys: Vec<ExpertKey> = ids[..self.wanted]
            .iter()
            .filter_map(|id| known(*id).map(|expert| ExpertKey { layer: layer.layer, expert }))
            .collect();
        let absent = self.owner.table.lock().absent(&keys);
        self.absent.clear();
        self.absent.extend(keys.into_iter().enumerate().filter(|(_, key)| absent.contains(key)));
        if self.reads && !absent.is_empty() {
            let lacks = |key: &&ExpertKey| !self.owner.inner.has(**key);
            let unread: Vec<ExpertIdx> = absent.iter().filter(lacks).map(|key| key.expert).collect();
            if !unread.is_empty() {
                self.owner.inner.guess(layer.layer, &unread);
            }
        }
    }

    /// Queues the upload of the next expert that was named, once the one before has arrived.
    pub(super) fn advance(&mut self, worth: &Worth, pass: &SlotPass<'_>) -> Result<(), BackendError> {
        if self.copying.is_some() && !self.let_go(pass)? {
            return Ok(());
        }
        while self.uploads && self.dealt < self.absent.len() {
            let (rank, key) = self.absent[self.dealt];
            self.dealt += 1;
            if worth.ranks[rank].may_work() && self.upload(key, pass)? {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Ends the hold on what was uploaded, if it has arrived.
    pub(super) fn let_go(&mut self, pass: &SlotPass<'_>) -> Result<bool, BackendError> {
        if self.copying.is_some() && pass.has_copied()? {
            self.copying = None;
        }
        Ok(self.copying.is_none())
    }

    /// Queues the upload of `key`; `false` where it is not in host memory, or no slot is free.
    fn upload(&mut self, key: ExpertKey, pass: &SlotPass<'_>) -> Result<bool, BackendError> {
        let owner = self.owner;
        let Some(mut lease) = owner.inner.hold_present(key.layer, key.expert) else { return Ok(false) };
        if !matches!(lease.next_ready(), Ok(Some(0))) {
            return Ok(false);
        }
        let mats = lease.mats(0);
        let bytes = [mats.gate, mats.up, mats.down].iter().map(|mat| mat.bytes.len() as u64).sum();
        let Some(slot) = owner.table.lock().guess(key, bytes) else { return Ok(false) };
        self.open.push((key, slot));
        let row = owner.row(key.layer);
        owner.backend.device().name_upload(key.layer.0, key.expert.0);
        // From here on the device reads the host's slot.
        let queued = owner.upload(&owner.layers[row], slot, [mats.gate, mats.up, mats.down], owner.aside());
        self.copying = Some(lease);
        queued?;
        pass.mark_copy()?;
        let mut changes: Vec<(usize, u64)> = self.stale.drain(..).map(|entry| (entry, 0)).collect();
        changes.push((owner.entry(key), owner.address(slot)));
        pass.change(&changes)?;
        Ok(true)
    }

    /// The router of `row` has chosen `ids`: wrong guesses leave. What was right is held until [`Self::confirm`].
    pub(super) fn settle(&mut self, worth: &mut Worth, row: usize, ids: &[ExpertIdx]) {
        if self.taken == Some(row) {
            for (rank, key) in self.absent.drain(..) {
                worth.ranks[rank].count(ids.contains(&key.expert));
            }
        }
        let owner = self.owner;
        let mut table = owner.table.lock();
        self.open.retain(|(key, slot)| {
            let is_right = ids.contains(&key.expert);
            if !is_right {
                table.forget(*key, *slot);
                self.stale.push(owner.entry(*key));
            }
            is_right
        });
    }

    /// A lease holds what was guessed right; it also lacked `missing` experts.
    pub(super) fn confirm(&mut self, missing: usize) {
        self.missed += self.open.len() + missing;
        let mut table = self.owner.table.lock();
        self.open.drain(..).for_each(|(_, slot)| table.confirm(slot));
    }

    /// The device stands at a closed gate: makes room for the guesses of the next layers. Returns the entries of the device's table that are to be
    /// cleared beside those of experts that leave.
    pub(super) fn make_room(&mut self) -> Vec<usize> {
        if self.uploads {
            self.owner.table.lock().keep_free(self.free);
        }
        std::mem::take(&mut self.stale)
    }

    /// All layers have chosen. Returns when nothing is on its way.
    pub(super) fn finish(&mut self, worth: &mut Worth, pass: &SlotPass<'_>) -> Result<(), SupplyError> {
        worth.note_token(self.missed);
        if !self.stale.is_empty() {
            let changes: Vec<(usize, u64)> = self.stale.drain(..).map(|entry| (entry, 0)).collect();
            pass.change(&changes).map_err(failed)?;
        }
        while !self.let_go(pass).map_err(failed)? {
            std::hint::spin_loop();
        }
        Ok(())
    }
}

impl Drop for Guesses<'_> {
    /// Of a pass that was given up, which has waited for the device.
    fn drop(&mut self) {
        let mut table = self.owner.table.lock();
        if !self.open.is_empty() || !self.stale.is_empty() {
            table.distrust();
        }
        self.open.drain(..).for_each(|(key, slot)| table.forget(key, slot));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(worth: &mut Worth, count: usize, absent: usize) -> usize {
        let mut on = 0;
        for _ in 0..count {
            on += usize::from(worth.is_worth_it());
            worth.note_token(absent);
        }
        on
    }

    #[test]
    fn naming_begins_where_much_is_absent_and_ends_where_little_is() {
        let mut worth = Worth::default();
        assert_eq!(tokens(&mut worth, 50, 5), 0);
        assert!(tokens(&mut worth, 50, 60) > 45);
        assert_eq!(tokens(&mut worth, 50, 5), 50, "between both marks it goes on");
        tokens(&mut worth, 50, 1);
        assert_eq!(tokens(&mut worth, 50, 5), 0, "and stays off");
    }

    #[test]
    fn nobody_leaves_where_all_have_a_place() {
        assert_eq!([18, 100, 239, 240, 500].map(|slots| slots_kept_free(slots, 240, 4)), [0, 3, 3, 0, 0]);
        assert_eq!(slots_kept_free(2, 240, 4), 0);
    }

    #[test]
    fn ranks_that_are_wrong_are_left_out_and_tried_again_later() {
        let mut worth = Worth::default();
        tokens(&mut worth, 20, 60);
        for _ in 0..40 {
            worth.ranks[..2].iter_mut().for_each(|rank| rank.count(false));
            worth.ranks[2..].iter_mut().for_each(|rank| rank.count(true));
        }
        assert!(worth.is_worth_it() && !worth.ranks[0].may_work());
        for _ in 0..100 {
            worth.ranks.iter_mut().for_each(|rank| rank.count(false));
        }
        assert_eq!(tokens(&mut worth, RETRY_TOKENS as usize, 60), 0);
        assert!(worth.is_worth_it());
    }
}
