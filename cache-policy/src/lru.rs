//! Least recently used, on the list of the `lru` crate. Owns the recency order of one size class.
//! Never evicts by itself: the list is created one entry larger than the owner fills it.
//! Surprising fact: the victim search stops at the first key of the current epoch, because all newer keys share it.

use core::num::NonZeroUsize;

use lru::LruCache;

use crate::ids::ExpertKey;
use crate::policy::{Epoch, Policy};

/// When a key was last used and until when it is pinned.
#[derive(Clone, Copy, Debug)]
struct Stamp {
    used: Epoch,
    pinned_until: Epoch,
}

/// Evicts the key whose last use is longest ago.
pub struct Lru {
    order: LruCache<ExpertKey, Stamp>,
    /// Latest epoch seen; keeps `used` rising from the oldest key to the newest.
    latest: Epoch,
}

impl Lru {
    /// An empty policy for at most `slots` keys; all its memory for lookups is taken here.
    pub fn new(slots: usize) -> Self {
        let room = NonZeroUsize::new(slots.saturating_add(1)).unwrap_or(NonZeroUsize::MIN);
        Self { order: LruCache::new(room), latest: Epoch(0) }
    }

    /// Keys from the oldest to the newest.
    pub fn oldest_first(&self) -> impl Iterator<Item = ExpertKey> + '_ {
        self.order.iter().rev().map(|(key, _)| *key)
    }
}

impl Policy for Lru {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn len(&self) -> usize {
        self.order.len()
    }

    fn contains(&self, key: ExpertKey) -> bool {
        self.order.contains(&key)
    }

    fn touch(&mut self, key: ExpertKey, epoch: Epoch) {
        let stamp = self.order.get_mut(&key).expect("touch of an expert that is not cached");
        stamp.used = epoch;
        self.latest = self.latest.max(epoch);
        stamp.pinned_until = stamp.pinned_until.max(epoch);
    }

    fn insert(&mut self, key: ExpertKey, epoch: Epoch) {
        assert!(self.order.len() < self.order.cap().get() - 1, "insert of {key} into a full policy");
        let before = self.order.put(key, Stamp { used: epoch, pinned_until: epoch });
        assert!(before.is_none(), "insert of {key}, which is present");
        if epoch < self.latest {
            self.order.demote(&key);
        }
        self.latest = self.latest.max(epoch);
    }

    fn pin(&mut self, key: ExpertKey, until: Epoch) {
        let stamp = self.order.peek_mut(&key).expect("pin of an expert that is not cached");
        stamp.pinned_until = stamp.pinned_until.max(until);
    }

    fn victim(&mut self, now: Epoch, is_held: &mut dyn FnMut(ExpertKey) -> bool) -> Option<ExpertKey> {
        let mut oldest_unheld = None;
        let mut chosen = None;
        for (&key, stamp) in self.order.iter().rev() {
            // Epochs rise with recency: from here on every key is pinned by its own use.
            if stamp.used >= now && oldest_unheld.is_some() {
                break;
            }
            if is_held(key) {
                continue;
            }
            if stamp.pinned_until < now {
                chosen = Some(key);
                break;
            }
            oldest_unheld = oldest_unheld.or(Some(key));
        }
        let key = chosen.or(oldest_unheld)?;
        self.order.pop(&key);
        Some(key)
    }

    fn remove(&mut self, key: ExpertKey) -> bool {
        self.order.pop(&key).is_some()
    }
}
