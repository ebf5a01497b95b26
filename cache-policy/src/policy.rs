//! The duties of an eviction policy: one trait, one file a policy.
//! Never knows slots, sizes or files: a policy orders the keys of one size class and names victims.
//! Surprising fact: a pin by epoch needs no release; it lapses when the owner moves on to the next epoch.

use crate::ids::ExpertKey;

/// Serial number of a step (one token in decode, one wave in prefill). Rises only.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Epoch(pub u64);

/// Orders the cached experts of one size class and chooses which one leaves.
///
/// Two kinds of protection exist. A *hold* (a lease, a read in flight) is known to the owner alone and asked through
/// `is_held`; a held key is never a victim. A *pin* is an epoch stored with the key; a key pinned for the current epoch
/// or a later one leaves only when every unheld key is pinned.
pub trait Policy: Send {
    /// Name as the user types it.
    fn name(&self) -> &'static str;

    /// Number of keys present.
    fn len(&self) -> usize;

    /// Whether no key is present.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether `key` is present.
    fn contains(&self, key: ExpertKey) -> bool;

    /// Records a use of `key` in `epoch` and pins it for that epoch. The key must be present.
    fn touch(&mut self, key: ExpertKey, epoch: Epoch);

    /// Adds an absent `key`, used in and pinned for `epoch`. The owner has made room. An epoch earlier than the latest
    /// one seen (a preload beside running requests) makes the key the first to leave.
    fn insert(&mut self, key: ExpertKey, epoch: Epoch);

    /// Pins a present `key` up to and including `until` without counting a use. Pins never shrink.
    fn pin(&mut self, key: ExpertKey, until: Epoch);

    /// Chooses the key that leaves in epoch `now` and takes it out. `None` when every key is held.
    fn victim(&mut self, now: Epoch, is_held: &mut dyn FnMut(ExpertKey) -> bool) -> Option<ExpertKey>;

    /// Takes `key` out as if it had never come (its read failed). Returns whether it was present.
    fn remove(&mut self, key: ExpertKey) -> bool;
}
