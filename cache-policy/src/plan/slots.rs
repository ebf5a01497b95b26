//! Turns bytes or a number of slots into slots by size class. Owns the floor and the sharing rule.
//! Never gives a class fewer slots than one token uses of it, nor more than it has experts.
//! Surprising fact: what rounding leaves over is handed out slot by slot at the end, so no division loses a slot.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::{Budget, Facts, PlanError, Request};
use crate::ids::Bytes;

/// Slots of one size class.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ClassPlan {
    /// Bytes of one slot.
    pub slot_bytes: Bytes,
    /// Number of slots.
    pub slots: u64,
    /// Experts that share them.
    pub experts: u64,
}

impl ClassPlan {
    /// Bytes of all slots of the class.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.slots * self.slot_bytes.0)
    }
}

/// Bytes of all slots.
pub(super) fn bytes(classes: &[ClassPlan]) -> u64 {
    classes.iter().map(|c| c.bytes().0).sum()
}

fn count(classes: &[ClassPlan]) -> u64 {
    classes.iter().map(|c| c.slots).sum()
}

/// One token's experts.
pub(super) fn floor(request: &Request) -> Vec<ClassPlan> {
    let slots = |layers: u64| layers * request.top_k;
    let plan = |c: &super::ClassRequest| ClassPlan {
        slot_bytes: c.slot_bytes,
        slots: slots(c.layers).min(c.experts),
        experts: c.experts,
    };
    request.classes.iter().map(plan).collect()
}

/// Every expert in memory, without the padding that reads into slots need.
pub(super) fn all(request: &Request) -> Vec<ClassPlan> {
    let plan = |c: &super::ClassRequest| ClassPlan { slot_bytes: c.expert_bytes, slots: c.experts, experts: c.experts };
    request.classes.iter().map(plan).collect()
}

/// `slots` slots shared by number of experts above the floor; `slots` lies between the floor and all experts.
fn share(request: &Request, slots: u64) -> Vec<ClassPlan> {
    let mut classes = floor(request);
    let floor_slots = count(&classes);
    let wanted = slots.saturating_sub(floor_slots);
    let open: u64 = classes.iter().map(|c| c.experts - c.slots).sum();
    if open == 0 {
        return classes;
    }
    for class in &mut classes {
        let part = u128::from(class.experts - class.slots) * u128::from(wanted) / u128::from(open);
        class.slots += u64::try_from(part).unwrap_or(u64::MAX).min(class.experts - class.slots);
    }
    classes
}

/// The most slots that `room` bytes hold; at least the floor, whatever `room` is.
pub(super) fn fill(request: &Request, room: u64) -> Vec<ClassPlan> {
    let (mut low, mut high) = (count(&floor(request)), request.experts_total());
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if bytes(&share(request, middle)) <= room {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    let mut classes = share(request, low);
    let mut left = room.saturating_sub(bytes(&classes));
    for class in &mut classes {
        let more = (left / class.slot_bytes.0).min(class.experts - class.slots);
        class.slots += more;
        left -= more * class.slot_bytes.0;
    }
    classes
}

/// Exactly `slots` slots, between the floor and all experts.
fn exact(request: &Request, slots: u64) -> Vec<ClassPlan> {
    let mut classes = share(request, slots);
    let mut missing = slots.saturating_sub(count(&classes));
    for class in &mut classes {
        let more = missing.min(class.experts - class.slots);
        class.slots += more;
        missing -= more;
    }
    classes
}

/// What a refusal of an explicit budget compares with.
pub(super) struct Ask {
    /// Bytes left for slots, the least headroom kept.
    pub room: u64,
    /// Automatic budget, reserve included.
    pub auto: Bytes,
}

/// Slots for an explicit budget.
pub(super) fn asked(
    facts: &Facts,
    request: &Request,
    fixed: u64,
    headroom: u64,
    ask: &Ask,
    notes: &mut Vec<String>,
) -> Result<Vec<ClassPlan>, PlanError> {
    let reserve = request.prefill_reserve.0;
    let room = ask.room.saturating_add(reserve);
    let too_much = |asked: String, wanted: u64, most: String| PlanError::BudgetAboveMemory {
        asked,
        wanted: Bytes(wanted),
        room: Bytes(room),
        usable: facts.usable(),
        fixed: Bytes(fixed - reserve),
        headroom: Bytes(headroom),
        most,
        auto: ask.auto,
    };
    let least = floor(request);
    let below = |asked: String, slots: u64, least: String| PlanError::BudgetBelowToken {
        asked,
        slots,
        floor: request.layers_total() * request.top_k,
        layers: request.layers_total(),
        top_k: request.top_k,
        least,
        auto: ask.auto,
    };
    match request.budget {
        Budget::Auto => Ok(fill(request, ask.room)),
        Budget::Slots(slots) => {
            if slots < count(&least) {
                return Err(below(slots.to_string(), slots, count(&least).to_string()));
            }
            let given = slots.min(request.experts_total());
            if given < slots {
                notes.push(alloc::format!(
                    "{slots} slots were asked; the model has {given} experts, so {given} are used"
                ));
            }
            let classes = exact(request, given);
            if bytes(&classes) > ask.room {
                return Err(too_much(slots.to_string(), bytes(&classes), count(&fill(request, ask.room)).to_string()));
            }
            Ok(classes)
        }
        Budget::Bytes(budget) => {
            let text = typed(budget.0);
            if budget.0 > room {
                return Err(too_much(text, budget.0, gigabytes(floor_to(room))));
            }
            let for_slots = budget.0.saturating_sub(reserve);
            if for_slots < bytes(&least) {
                let slots = slots_below_floor(&least, for_slots);
                return Err(below(text, slots, gigabytes(ceil_to(bytes(&least) + reserve))));
            }
            let classes = fill(request, for_slots);
            if count(&classes) == request.experts_total() {
                notes.push(alloc::format!(
                    "{text} holds all {} experts; {} are used",
                    count(&classes),
                    Bytes(bytes(&classes))
                ));
            }
            Ok(classes)
        }
    }
}

/// How many of one token's slots `room` bytes hold, class by class: only for the message of a refusal.
fn slots_below_floor(least: &[ClassPlan], room: u64) -> u64 {
    let mut left = room;
    let mut slots = 0;
    for class in least {
        let some = (left / class.slot_bytes.0).min(class.slots);
        slots += some;
        left -= some * class.slot_bytes.0;
    }
    slots
}

const GIB: u64 = 1 << 30;
/// Advice is given in whole GB above one, else in thousandths, so that small models get usable numbers.
const FINE: u64 = GIB / 1000;

fn ceil_to(bytes: u64) -> u64 {
    if bytes > GIB { bytes.div_ceil(GIB) * GIB } else { (bytes.div_ceil(FINE) + 1) * FINE }
}

fn floor_to(bytes: u64) -> u64 {
    if bytes >= GIB { bytes / GIB * GIB } else { bytes / FINE * FINE }
}

/// As the user has typed it: the fewest decimals, at most nine, that are read as so many bytes.
fn typed(bytes: u64) -> String {
    // A billionth of a GB is a little more than a byte and was rounded down, so rounding up finds it again.
    let nanos = (u128::from(bytes % GIB) * 1_000_000_000).div_ceil(u128::from(GIB));
    let text = alloc::format!("{}.{nanos:09}", bytes / GIB);
    alloc::format!("{}GB", text.trim_end_matches('0').trim_end_matches('.'))
}

/// As advice is given: `64GB`, `1.5GB`, `0.012GB`.
pub(super) fn gigabytes(bytes: u64) -> String {
    if bytes.is_multiple_of(GIB) {
        return alloc::format!("{}GB", bytes / GIB);
    }
    // Rounded to the nearest thousandth; `ceil_to` and `floor_to` stay on their side of it.
    let thousandths = (u128::from(bytes) * 1000 + u128::from(GIB) / 2) / u128::from(GIB);
    let text = alloc::format!("{}.{:03}", thousandths / 1000, thousandths % 1000);
    alloc::format!("{}GB", text.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_are_echoed_as_typed() {
        // Bytes as `units::parse_gigabytes` reads the text.
        for (whole, nanos, text) in [
            (64u64, 0u128, "64GB"),
            (1, 500_000_000, "1.5GB"),
            (0, 300_000, "0.0003GB"),
            (0, 1, "0.000000001GB"),
            (0, 123_456_789, "0.123456789GB"),
            (7, 999_999_999, "7.999999999GB"),
        ] {
            let bytes = whole * GIB + ((nanos << 30) / 1_000_000_000) as u64;
            assert_eq!(typed(bytes), text);
        }
    }
}
