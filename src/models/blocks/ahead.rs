//! The experts of one layer on their way to a sweep: asked for ahead of use, handed out by rising id.
//! Never holds more experts than the supply lends to sweeps. Surprising fact: experts are asked for before rows have chosen: those that a
//! part of the rows is known to need, and, where nearly all will be, the first ones of the next layer while this one is still computed.

use std::collections::VecDeque;

use crate::backend::Backend;
use crate::models::supply::{ExpertLease, ExpertMats, ExpertSupply, Phase, SupplyError};
use crate::units::{ExpertIdx, LayerIdx};

/// Experts that were asked for together.
struct Group<'a, B: Backend> {
    ids: Vec<ExpertIdx>,
    lease: Box<dyn ExpertLease<B> + 'a>,
    is_ready: Vec<bool>,
    /// Experts that are still to be used.
    unused: usize,
}

/// Experts of one layer, for one sweep.
pub struct Ahead<'a, B: Backend> {
    supply: &'a dyn ExpertSupply<B>,
    layer: LayerIdx,
    held: VecDeque<Group<'a, B>>,
    held_experts: usize,
    /// Most experts to hold at a time.
    most: usize,
    /// By expert: whether it is held.
    is_asked: Vec<bool>,
}

impl<'a, B: Backend> Ahead<'a, B> {
    /// Nothing asked for yet, of a layer with `experts`.
    pub fn new(supply: &'a dyn ExpertSupply<B>, layer: usize, experts: usize) -> Self {
        let (held, is_asked) = (VecDeque::new(), vec![false; experts]);
        Self { supply, layer: LayerIdx(layer as u16), held, held_experts: 0, most: supply.sweep_max(), is_asked }
    }

    /// Asks for the first of `active` (by rising id) while the other rows choose theirs. Takes half of what may be held at most, so that
    /// experts in front of them still find room.
    pub fn ask_early(&mut self, active: &[ExpertIdx]) -> Result<(), SupplyError> {
        let room = (self.most / 2).saturating_sub(self.held_experts);
        let unasked = active.iter().filter(|id| !self.is_asked[id.0 as usize]).copied();
        let wanted: Vec<ExpertIdx> = unasked.take(room).collect();
        for ids in wanted.chunks(self.group_len()) {
            self.ask(ids)?;
        }
        Ok(())
    }

    /// Before anybody has chosen: asks for the experts that lie first in the file, as far as the layer in front, which has asked for all
    /// of its own, leaves room beside its `held`. No expert in front of them can be missed, since they are the first.
    pub fn ask_unseen(&mut self, held: usize) -> Result<(), SupplyError> {
        let count = self.group_len();
        loop {
            let room = self.most.saturating_sub(held).saturating_sub(self.held_experts);
            let unasked = (0..self.is_asked.len()).filter(|id| !self.is_asked[*id]);
            let ids: Vec<ExpertIdx> = unasked.take(count).map(|id| ExpertIdx(id as u16)).collect();
            // Whole groups only: few large requests keep the drive busier than many small ones.
            if room < count || ids.is_empty() {
                return Ok(());
            }
            self.ask(&ids)?;
        }
    }

    /// Experts that are held now.
    pub fn held(&self) -> usize {
        self.held_experts
    }

    /// The rows have chosen `active` (by rising id): what was asked for in vain is not waited for.
    pub fn settle(&mut self, active: &[ExpertIdx]) {
        for group in &mut self.held {
            group.unused = group.ids.iter().filter(|id| active.binary_search(id).is_ok()).count();
        }
        self.give_back_used();
    }

    /// Whether all of `active` were asked for.
    pub fn has_asked(&self, active: &[ExpertIdx]) -> bool {
        active.iter().all(|id| self.is_asked[id.0 as usize])
    }

    /// Makes sure that `active[at]` is asked for, and asks for as many of those behind it as there is room for. `active` is by rising id.
    pub fn ask_from(&mut self, active: &[ExpertIdx], at: usize) -> Result<(), SupplyError> {
        loop {
            let room = self.most.saturating_sub(self.held_experts);
            let unasked = active[at..].iter().filter(|id| !self.is_asked[id.0 as usize]).copied();
            let wanted: Vec<ExpertIdx> = unasked.take(room + 1).collect();
            // All in one go where they fit; else whole groups, so that reads keep their depth.
            let count = if wanted.len() <= room { wanted.len() } else { self.group_len() };
            if count > 0 && count <= room {
                self.ask(&wanted[..count])?;
            } else if active.get(at).is_none_or(|id| self.is_asked[id.0 as usize]) {
                return Ok(());
            } else {
                // Experts that were asked for early stand in the way of those in front of them.
                self.give_back();
            }
        }
    }

    /// Experts of one request when not all fit at once: a quarter of what may be held, so that three quarters are read or waited for
    /// while one is computed.
    fn group_len(&self) -> usize {
        (self.most / 4).max(1)
    }

    fn ask(&mut self, ids: &[ExpertIdx]) -> Result<(), SupplyError> {
        let lease = self.supply.request(self.layer, ids, Phase::Prefill)?;
        ids.iter().for_each(|id| self.is_asked[id.0 as usize] = true);
        self.held_experts += ids.len();
        self.held.push_back(Group { ids: ids.to_vec(), lease, is_ready: vec![false; ids.len()], unused: ids.len() });
        Ok(())
    }

    /// Waits for the first of `experts` (by rising id, asked for at least that one) and hands it to `f`, together with those next to it that
    /// need no wait, `most` at most; gives back what is not needed any more. Returns how many there were.
    pub fn with<E: From<SupplyError>>(
        &mut self,
        experts: &[ExpertIdx],
        most: usize,
        f: impl FnOnce(&[(ExpertIdx, ExpertMats<'_, B>)]) -> Result<(), E>,
    ) -> Result<usize, E> {
        let (at, index) = self.find(experts[0]).expect("experts are asked for before they are used");
        let group = &mut self.held[at];
        let mut landed = Vec::new();
        while !group.is_ready[index] {
            landed.clear();
            group.lease.next_batch(&mut landed)?;
            assert!(!landed.is_empty(), "every expert of a lease is handed out");
            landed.iter().for_each(|index| group.is_ready[*index] = true);
        }
        let ready = experts.iter().map_while(|id| self.find(*id).filter(|(at, index)| self.held[*at].is_ready[*index]));
        let places: Vec<_> = ready.take(most).collect();
        let mats: Vec<_> =
            experts.iter().zip(&places).map(|(id, (at, index))| (*id, self.held[*at].lease.mats(*index))).collect();
        f(&mats)?;
        drop(mats);
        places.iter().for_each(|(at, _)| self.held[*at].unused -= 1);
        self.give_back_used();
        Ok(places.len())
    }

    /// The group that holds `expert`, and its place there.
    fn find(&self, expert: ExpertIdx) -> Option<(usize, usize)> {
        self.held.iter().enumerate().find_map(|(at, group)| Some((at, group.ids.binary_search(&expert).ok()?)))
    }

    /// Groups go in the order in which they came: a trace tells only how many of the last requests are held.
    fn give_back_used(&mut self) {
        while self.held.front().is_some_and(|group| group.unused == 0) {
            self.give_back();
        }
    }

    /// Gives the oldest group back; its experts that were not used have to be asked for again.
    fn give_back(&mut self) {
        let Some(group) = self.held.pop_front() else { return };
        self.held_experts -= group.ids.len();
        group.ids.iter().for_each(|id| self.is_asked[id.0 as usize] = false);
    }
}
