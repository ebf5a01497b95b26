//! Plans for a GPU that has no memory of its own: one cache, in the GPU's slots, and a few host slots where reads land.
//! Never measures; it divides what the planner found. Surprising fact: kernels do not multiply experts where the drive put them, though they could:
//! they want the blocks in planes (kernels/arrange.cuh), so an expert is arranged once on its way, within the same memory (`gpu_uploads`).

use cache_policy::plan::{self, Budget, Facts, Plan, Request};

/// Tokens whose experts fit the slots where reads land: those of a token and of what is read ahead for the next.
const LANDING_TOKENS: u64 = 2;
/// Share of the cache that these slots take at most, if one token's experts fit in it.
const LANDING_SHARE: u64 = 4;

/// `request` with as many host slots as reads need to land; unchanged where the number was given, or where nothing is streamed.
pub(super) fn landing(facts: &Facts, request: Request) -> Request {
    if !request.is_streaming || request.budget != Budget::Auto {
        return request;
    }
    // The planner's refusals are worded for the whole request.
    let Ok(whole) = plan::plan(facts, &request) else { return request };
    let slots = (LANDING_TOKENS * whole.token_experts).min(whole.cache_slots / LANDING_SHARE).max(whole.token_experts);
    let narrow = Request { budget: Budget::Slots(slots), ..request.clone() };
    if plan::plan(facts, &narrow).is_ok() { narrow } else { request }
}

/// Of `room` bytes that the GPU says are free: how many slots may take at most, and how many they take by themselves. `plan` counts the weights
/// as the process's, and `margin` bytes are not in it.
#[cfg(any(feature = "cuda", test))]
pub(super) fn room(room: u64, plan: &Plan, margin: u64) -> (u64, u64) {
    let (comfortable, least) = plan.headroom();
    let beyond = |kept: u64| plan.spare.0.saturating_sub(kept.saturating_add(margin)).min(room);
    (beyond(least.0), beyond(comfortable.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Bytes;
    use cache_policy::plan::ClassRequest;

    fn facts(total: u64) -> Facts {
        Facts {
            total: Bytes::gib(total),
            available: Bytes::gib(total - 4),
            cma_free: Bytes(0),
            group_limit: None,
            group_used: Bytes(0),
            lock_limit: None,
            address_space: None,
            simulated_used: Bytes(0),
        }
    }

    /// 10 GiB of weights, 80 GiB of experts.
    fn request(budget: Budget) -> Request {
        let class =
            ClassRequest { expert_bytes: Bytes::mib(8), slot_bytes: Bytes::mib(8), layers: 40, experts: 10_240 };
        Request {
            resident: Bytes::gib(10),
            ctx: 4096,
            classes: vec![class],
            top_k: 6,
            is_streaming: true,
            budget,
            ..Request::default()
        }
    }

    #[test]
    fn reads_land_in_few_slots_and_the_gpu_takes_the_rest() {
        let facts = facts(64);
        let all = plan::plan(&facts, &request(Budget::Auto)).unwrap();
        let few = plan::plan(&facts, &landing(&facts, request(Budget::Auto))).unwrap();
        assert_eq!((all.token_experts, few.cache_slots), (240, 480));
        // Both tiers together are what one would have been, and weights are counted once.
        let (most, automatic) = room(Bytes::gib(64).0, &few, 0);
        assert_eq!(automatic / Bytes::mib(8).0 + few.cache_slots, all.cache_slots);
        assert_eq!(few.total().0 + automatic, all.total().0);
        assert!(most > automatic);
        assert_eq!(room(Bytes::gib(64).0, &few, 1 << 20).1, automatic - (1 << 20));
        // The GPU may know of less.
        assert_eq!(room(1 << 30, &few, 0), (1 << 30, 1 << 30));
    }

    #[test]
    fn small_memories_keep_a_token_and_given_numbers_stay() {
        let facts = facts(24);
        let few = plan::plan(&facts, &landing(&facts, request(Budget::Auto))).unwrap();
        let all = plan::plan(&facts, &request(Budget::Auto)).unwrap();
        assert!(all.cache_slots < 4 * 480 && few.cache_slots >= 240, "{} {}", all.cache_slots, few.cache_slots);
        assert_eq!(few.cache_slots, (all.cache_slots / 4).max(240));
        for budget in [Budget::Slots(700), Budget::Bytes(Bytes::gib(3))] {
            assert_eq!(landing(&facts, request(budget)), request(budget));
        }
        let resident = Request { is_streaming: false, ..request(Budget::Auto) };
        assert_eq!(landing(&facts, resident.clone()), resident);
        // More than there is: nothing is left for slots, and nothing wraps around.
        assert_eq!(room(0, &few, u64::MAX), (0, 0));
    }
}
