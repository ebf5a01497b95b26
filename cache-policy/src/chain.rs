//! Linked queues over one slab of nodes: the shared shape of the list-based policies. Owns links, marks and pins.
//! Never decides who leaves. Surprising fact: queue 0 is the cold one, whose keys leave before all others.

use alloc::vec::Vec;

use crate::ids::ExpertKey;
use crate::key_table::KeyTable;
use crate::policy::Epoch;

const NIL: u32 = u32::MAX;

/// The queue of keys that came as a preload and were not used since.
pub(crate) const COLD: usize = 0;

#[derive(Clone, Debug)]
struct Node {
    key: ExpertKey,
    older: u32,
    newer: u32,
    queue: u32,
    mark: u8,
    /// Last use.
    used: Epoch,
    pinned_until: Epoch,
}

#[derive(Clone, Copy, Debug)]
struct Ends {
    oldest: u32,
    newest: u32,
    len: usize,
}

const EMPTY: Ends = Ends { oldest: NIL, newest: NIL, len: 0 };

/// Queues whose keys are disjoint.
pub(crate) struct Chains {
    nodes: Vec<Node>,
    free: Vec<u32>,
    at: KeyTable<u32>,
    ends: Vec<Ends>,
    /// Latest epoch seen; an insert before it is a preload.
    latest: Epoch,
}

impl Chains {
    /// Room for `slots` keys in the cold queue and `queues` others, numbered from 1.
    pub(crate) fn new(slots: usize, queues: usize) -> Self {
        Self {
            nodes: Vec::with_capacity(slots),
            free: Vec::new(),
            at: KeyTable::new(NIL),
            ends: alloc::vec![EMPTY; queues + 1],
            latest: Epoch(0),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.nodes.len() - self.free.len()
    }

    pub(crate) fn queues(&self) -> usize {
        self.ends.len()
    }

    /// Makes sure that `queue` exists.
    pub(crate) fn grow(&mut self, queue: usize) {
        if queue >= self.ends.len() {
            self.ends.resize(queue + 1, EMPTY);
        }
    }

    pub(crate) fn queue_len(&self, queue: usize) -> usize {
        self.ends[queue].len
    }

    #[inline]
    pub(crate) fn find(&self, key: ExpertKey) -> Option<u32> {
        let node = self.at.get(key);
        (node != NIL).then_some(node)
    }

    /// Node of a key that must be present; pins it for `epoch`, which becomes the latest.
    #[inline]
    pub(crate) fn used(&mut self, key: ExpertKey, epoch: Epoch) -> u32 {
        let node = self.find(key).expect("touch of an expert that is not cached");
        self.latest = self.latest.max(epoch);
        self.nodes[node as usize].used = epoch;
        self.pin(node, epoch);
        node
    }

    #[inline]
    pub(crate) fn pin(&mut self, node: u32, until: Epoch) {
        let pinned = &mut self.nodes[node as usize].pinned_until;
        *pinned = (*pinned).max(until);
    }

    #[inline]
    pub(crate) fn key(&self, node: u32) -> ExpertKey {
        self.nodes[node as usize].key
    }

    #[inline]
    pub(crate) fn queue(&self, node: u32) -> usize {
        self.nodes[node as usize].queue as usize
    }

    #[inline]
    pub(crate) fn mark(&mut self, node: u32) -> &mut u8 {
        &mut self.nodes[node as usize].mark
    }

    #[inline]
    pub(crate) fn is_pinned(&self, node: u32, now: Epoch) -> bool {
        self.nodes[node as usize].pinned_until >= now
    }

    #[inline]
    pub(crate) fn is_used_in(&self, node: u32, now: Epoch) -> bool {
        self.nodes[node as usize].used >= now
    }

    #[inline]
    pub(crate) fn oldest(&self, queue: usize) -> Option<u32> {
        let node = self.ends[queue].oldest;
        (node != NIL).then_some(node)
    }

    #[inline]
    pub(crate) fn newer(&self, node: u32) -> Option<u32> {
        let newer = self.nodes[node as usize].newer;
        (newer != NIL).then_some(newer)
    }

    /// Adds an absent key as the newest of `queue`, or to the cold queue when `epoch` is past or zero.
    pub(crate) fn insert(&mut self, key: ExpertKey, epoch: Epoch, queue: usize) -> u32 {
        let fresh = Node { key, older: NIL, newer: NIL, queue: 0, mark: 0, used: epoch, pinned_until: epoch };
        let node = match self.free.pop() {
            Some(node) => {
                self.nodes[node as usize] = fresh;
                node
            }
            None => {
                self.nodes.push(fresh);
                u32::try_from(self.nodes.len() - 1).expect("fewer than 2^32 slots")
            }
        };
        let before = core::mem::replace(self.at.at(key), node);
        assert!(before == NIL, "insert of {key}, which is present");
        let is_preload = epoch < self.latest || epoch == Epoch(0);
        self.latest = self.latest.max(epoch);
        self.link_newest(node, if is_preload { COLD } else { queue });
        node
    }

    #[inline]
    pub(crate) fn move_to_newest(&mut self, node: u32, queue: usize) {
        self.unlink(node);
        self.link_newest(node, queue);
    }

    pub(crate) fn take(&mut self, node: u32) -> ExpertKey {
        self.unlink(node);
        let key = self.key(node);
        *self.at.at(key) = NIL;
        self.free.push(node);
        key
    }

    /// The last preload that may leave: they come by falling popularity.
    pub(crate) fn cold(&self, now: Epoch, is_held: &mut dyn FnMut(ExpertKey) -> bool) -> Option<u32> {
        let newest = self.ends[COLD].newest;
        let mut newest_first = core::iter::successors((newest != NIL).then_some(newest), |&n| {
            let older = self.nodes[n as usize].older;
            (older != NIL).then_some(older)
        });
        newest_first.find(|&n| !self.is_pinned(n, now) && !is_held(self.key(n)))
    }

    /// Last resort: the oldest unheld key, pinned or not.
    pub(crate) fn any_unheld(&self, is_held: &mut dyn FnMut(ExpertKey) -> bool) -> Option<u32> {
        (0..self.ends.len()).find_map(|q| self.nodes_of(q).find(|&n| !is_held(self.key(n))))
    }

    pub(crate) fn nodes_of(&self, queue: usize) -> impl Iterator<Item = u32> + '_ {
        core::iter::successors(self.oldest(queue), |&n| self.newer(n))
    }

    /// Keys with their marks, oldest first: what tests look at.
    pub(crate) fn state(&self, queue: usize) -> Vec<(ExpertKey, u8)> {
        self.nodes_of(queue).map(|n| (self.key(n), self.nodes[n as usize].mark)).collect()
    }

    #[inline]
    fn unlink(&mut self, node: u32) {
        let Node { older, newer, queue, .. } = self.nodes[node as usize];
        let ends = &mut self.ends[queue as usize];
        ends.len -= 1;
        if older == NIL {
            ends.oldest = newer;
        }
        if newer == NIL {
            ends.newest = older;
        }
        if older != NIL {
            self.nodes[older as usize].newer = newer;
        }
        if newer != NIL {
            self.nodes[newer as usize].older = older;
        }
    }

    #[inline]
    fn link_newest(&mut self, node: u32, queue: usize) {
        let ends = &mut self.ends[queue];
        let before = ends.newest;
        ends.newest = node;
        ends.len += 1;
        if before == NIL {
            ends.oldest = node;
        } else {
            self.nodes[before as usize].newer = node;
        }
        let n = &mut self.nodes[node as usize];
        // At most a queue a layer: the cast cannot lose bits.
        (n.older, n.newer, n.queue) = (before, NIL, queue as u32);
    }
}
