//! What happens to a slot between being chosen and holding bytes: fills for requests and preloads, their ends, failures.
//! Owns every change of a slot's state; never holds a lease. Surprising fact: a fill ends only when all its reads have ended,
//! so a failed one cannot give away memory that another part of it is still being read into.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cache_policy::RouteError;

use super::{Came, Failure, Fill, FillEnd, FillFor, Filled, NO_SLOT, PreloadState, SlotIdx, State, Table};
use crate::storage::expert_cache::classes::slot_plan;
use crate::storage::expert_cache::fill::{Batch, PARTS, tag_of};
use crate::storage::reader::{ExpertPart, Lane, ReadError, ReadLabel, ReadRequest, ReadResult};
use crate::units::ExpertKey;

/// A reader lets go of a failed read's memory within microseconds. What is still away after this long was given up, because the kernel
/// may yet write to it.
const LOST_AFTER: Duration = Duration::from_secs(2);

const PART_NAMES: [ExpertPart; PARTS] = [ExpertPart::Gate, ExpertPart::Up, ExpertPart::Down];

impl Table {
    /// Takes a free slot for `key`, or the slot of `evict` with its memory made whole, and lists it under `key`.
    pub(super) fn free_slot(&mut self, key: ExpertKey, evict: Option<ExpertKey>) -> SlotIdx {
        let slot = match evict {
            None => {
                let class = self.directory.class_of(key.layer).expect("the directory placed the expert");
                self.classes[class].free.pop().expect("the directory counts free slots as the table does")
            }
            Some(victim) => {
                let index = self.index(victim).expect("a victim belongs to the model");
                let slot = std::mem::replace(&mut self.slot_of[index], NO_SLOT);
                let at = &mut self.slots[slot as usize];
                assert!(at.holds == 0 && at.key == victim, "{victim} was evicted while held");
                self.ledger.dropped(victim);
                let State::Valid(filled) = std::mem::replace(&mut at.state, State::Taken) else {
                    panic!("{victim} was evicted while its slot was not valid")
                };
                let filled = Arc::into_inner(filled).expect("leases drop the bytes before the hold");
                let Filled { parts, rest } = filled;
                drop(parts);
                at.state = State::Empty(rest.reunite().expect("all parts of a valid slot were at home"));
                slot
            }
        };
        let index = self.index(key).expect("the directory placed the expert");
        self.slot_of[index] = slot;
        slot
    }

    /// Cuts an empty slot's memory into the parts of `key` and adds their reads to `batch`.
    pub(super) fn begin_fill(&mut self, slot: SlotIdx, key: ExpertKey, purpose: FillFor, batch: &mut Batch) {
        let layer = self.layers[usize::from(key.layer.0)].as_ref().expect("the directory placed the expert");
        let plan =
            slot_plan(&layer.experts, key.expert, self.alignment).expect("checked for every expert at the start");
        let extents = layer.experts.extents(key.expert);
        let at = &mut self.slots[slot as usize];
        let was_busy = at.is_busy();
        let State::Empty(mut tail) = std::mem::replace(&mut at.state, State::Taken) else {
            panic!("a slot that is filled for {key} is not empty")
        };
        for (part, (extent, stride)) in extents.into_iter().zip(plan.strides).enumerate() {
            let after = tail.split_off(stride);
            batch.requests.push(ReadRequest {
                extent,
                lane: Lane::Bulk,
                class: purpose.into(),
                label: ReadLabel::Expert { key, part: PART_NAMES[part] },
                region: std::mem::replace(&mut tail, after),
                tag: tag_of(slot, part),
            });
        }
        self.serial += 1;
        (at.key, at.serial) = (key, self.serial);
        at.came = if purpose == FillFor::Preload { Came::Preloaded } else { Came::Asked };
        let fill = Fill {
            purpose,
            batch: None,
            is_wanted: false,
            is_cancelled: false,
            parts: [const { None }; PARTS],
            ended: 0,
            rest: tail,
            error: None,
        };
        at.state = State::Filling(Box::new(fill));
        batch.fills.push((slot, self.serial));
        self.recount(slot, was_busy);
    }

    /// Takes the end of one read.
    pub fn land(&mut self, slot: SlotIdx, part: usize, result: ReadResult) -> FillEnd {
        let State::Filling(fill) = &mut self.slots[slot as usize].state else {
            panic!("a read ended in slot {slot}, which is not being filled")
        };
        assert!(fill.ended & (1 << part) == 0, "part {part} of slot {slot} ended twice");
        fill.ended |= 1 << part;
        match result {
            Ok(landed) => fill.parts[part] = Some(landed),
            Err(error) => fill.error = fill.error.take().or(Some(error)),
        }
        if (fill.ended.count_ones() as usize) < PARTS { FillEnd::Pending } else { self.end_fill(slot) }
    }

    /// Ends the fill numbered `serial` if its reads were dropped without a result.
    pub fn abandon(&mut self, slot: SlotIdx, serial: u64) {
        let at = &mut self.slots[slot as usize];
        let State::Filling(fill) = &mut at.state else { return };
        if at.serial == serial {
            let label = ReadLabel::Expert { key: at.key, part: ExpertPart::Gate };
            fill.error = fill.error.take().or(Some(ReadError::Stopped(label)));
            self.end_fill(slot);
        }
    }

    fn end_fill(&mut self, slot: SlotIdx) -> FillEnd {
        let at = &mut self.slots[slot as usize];
        let was_busy = at.is_busy();
        let State::Filling(fill) = std::mem::replace(&mut at.state, State::Taken) else {
            unreachable!("callers have seen the fill")
        };
        let Fill { purpose, parts, rest, error, .. } = *fill;
        let key = at.key;
        let end = match (parts, error) {
            ([Some(gate), Some(up), Some(down)], None) => {
                let bytes = (gate.len + up.len + down.len) as u64;
                self.landings += 1;
                at.landing = self.landings;
                at.state = State::Valid(Arc::new(Filled { parts: [gate, up, down], rest }));
                self.ledger.landed(key);
                self.count_filled(purpose, bytes);
                FillEnd::Valid
            }
            (parts, error) => {
                let error = error.expect("a part is missing only after an error");
                drop(parts);
                let (serial, waiters) = (at.serial, std::mem::take(&mut at.holds));
                at.state = State::Draining(rest, Instant::now());
                self.draining.push(slot);
                self.count_failed(purpose, &error);
                if waiters > 0 {
                    self.failures.push(Failure { serial, waiters, error });
                }
                FillEnd::Failed
            }
        };
        if purpose == FillFor::Preload {
            self.preload.pending -= 1;
        }
        self.recount(slot, was_busy);
        if end == FillEnd::Failed {
            self.drain();
        }
        end
    }

    fn count_filled(&mut self, purpose: FillFor, bytes: u64) {
        match purpose {
            FillFor::Request(phase) => self.stats.phase(phase).read_bytes += bytes,
            FillFor::Lookahead => self.stats.lookahead_bytes += bytes,
            FillFor::Preload => {
                self.stats.preloaded += 1;
                self.stats.preload_bytes += bytes;
            }
        }
    }

    fn count_failed(&mut self, purpose: FillFor, error: &ReadError) {
        match purpose {
            FillFor::Request(phase) => self.stats.phase(phase).failed += 1,
            FillFor::Lookahead => match error {
                ReadError::Cancelled(_) => self.stats.lookahead_cancelled += 1,
                ReadError::QueueFull(_) | ReadError::Stopped(_) => {}
                _ => self.stats.lookahead_failed += 1,
            },
            FillFor::Preload => {
                // A preload that was cut short has not failed.
                self.stats.preload_failed += u64::from(!matches!(error, ReadError::Stopped(_)));
                self.preload.error.get_or_insert_with(|| error.clone());
            }
        }
    }

    /// Gives back the slots of failed fills whose memory is whole again, and gives up those whose memory will not return.
    pub fn drain(&mut self) {
        for at in (0..self.draining.len()).rev() {
            let slot = self.draining[at];
            let entry = &mut self.slots[slot as usize];
            let State::Draining(rest, since) = std::mem::replace(&mut entry.state, State::Taken) else {
                unreachable!("only draining slots are listed")
            };
            match rest.reunite() {
                Ok(whole) => {
                    entry.state = State::Empty(whole);
                    let (key, class) = (entry.key, entry.class as usize);
                    self.draining.swap_remove(at);
                    self.recount(slot, true);
                    self.classes[class].free.push(slot);
                    self.unlist(key);
                }
                Err(_) if since.elapsed() >= LOST_AFTER => {
                    entry.state = State::Lost;
                    let (key, class) = (entry.key, entry.class as usize);
                    self.draining.swap_remove(at);
                    self.classes[class].busy -= 1;
                    self.classes[class].total -= 1;
                    self.unlist(key);
                    self.directory.lose_slot(class);
                }
                Err(rest) => entry.state = State::Draining(rest, since),
            }
        }
    }

    /// Takes an expert out whose bytes did not arrive.
    fn unlist(&mut self, key: ExpertKey) {
        self.directory.forget(key);
        self.ledger.dropped(key);
        let index = self.index(key).expect("it was filled");
        self.slot_of[index] = NO_SLOT;
    }

    pub fn is_draining(&self) -> bool {
        !self.draining.is_empty()
    }

    /// Begins the fill of each of `keys` that is absent and for which a slot is free, the first keys first. Returns the
    /// reads in file order, in batches of at most `batch_experts`. The last keys are the first to leave the cache.
    pub fn begin_preload(&mut self, keys: &[ExpertKey], batch_experts: usize) -> Result<Vec<Batch>, RouteError> {
        for &key in keys {
            if self.directory.class_of(key.layer).is_none() {
                return Err(RouteError::UnknownLayer { layer: key.layer });
            }
            if self.index(key).is_none() {
                let experts = self.layers[usize::from(key.layer.0)].as_ref().map_or(0, |l| l.experts.experts);
                return Err(RouteError::UnknownExpert { key, experts });
            }
        }
        let mut chosen = Vec::new();
        for &key in keys {
            let class = self.directory.class_of(key.layer).expect("checked above");
            // Listing a chosen key at once makes a key that is named twice count once.
            if self.slot(key).is_none() && !self.classes[class].free.is_empty() {
                self.free_slot(key, None);
                chosen.push(key);
            }
        }
        self.directory.preload(&chosen);
        if let Some(routes) = &mut self.routes {
            routes.preload(&chosen);
        }
        chosen.sort_unstable();
        self.preload = PreloadState { pending: chosen.len(), error: None };
        let mut batches = Vec::new();
        for keys in chosen.chunks(batch_experts) {
            let mut batch = Batch::default();
            for &key in keys {
                let slot = self.slot(key).expect("it was listed above");
                self.begin_fill(slot, key, FillFor::Preload, &mut batch);
            }
            batches.push(batch);
        }
        Ok(batches)
    }
}
