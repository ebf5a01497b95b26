//! Host memory of a model whose weights move to a GPU: they pass through memory that the expert cache takes afterwards.
//! Never plans anything itself: it words the request to the planner. Surprising fact: a cache smaller than the weights would leave the peak
//! of the start above the plan, so there the weights are counted as if they stayed.

use cache_policy::plan::{self, Facts, Request};

use crate::units::Bytes;

/// `request` for a run whose resident weights leave the host before the cache is taken; unchanged where they need more than the cache.
pub(super) fn without_weights(facts: &Facts, request: Request) -> Request {
    let moved = Request { resident: Bytes(0), ..request.clone() };
    // The planner's refusals are worded for the whole request.
    match request.is_streaming.then(|| plan::plan(facts, &moved)) {
        Some(Ok(plan)) if plan.cache >= request.resident => moved,
        _ => request,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cache_policy::plan::{Budget, ClassRequest};

    const FACTS: Facts = Facts {
        total: Bytes::gib(24),
        available: Bytes::gib(22),
        cma_free: Bytes(0),
        group_limit: None,
        group_used: Bytes(0),
        address_space: None,
        lock_limit: None,
        simulated_used: Bytes(0),
    };

    /// 10 GiB of weights, 64 GiB of experts.
    fn request(budget: Budget) -> Request {
        let class = ClassRequest { expert_bytes: Bytes::mib(8), slot_bytes: Bytes::mib(8), layers: 40, experts: 8192 };
        Request {
            resident: Bytes::gib(10),
            ctx: 4096,
            kv: Bytes::mib(100),
            scratch: Bytes::mib(100),
            classes: vec![class],
            top_k: 6,
            is_streaming: true,
            budget,
            ..Request::default()
        }
    }

    #[test]
    fn the_cache_takes_the_room_of_weights_that_leave() {
        let all = request(Budget::Auto);
        let stays = plan::plan(&FACTS, &all).unwrap();
        let leaves = plan::plan(&FACTS, &without_weights(&FACTS, all)).unwrap();
        assert_eq!(leaves.resident, Bytes(0));
        assert!(leaves.cache.0 >= stays.cache.0 + Bytes::gib(9).0, "{} before, {} after", stays.cache, leaves.cache);
    }

    #[test]
    fn weights_that_need_more_than_the_cache_are_counted() {
        for budget in [Budget::Slots(500), Budget::Bytes(Bytes::gib(9))] {
            let all = request(budget);
            assert_eq!(without_weights(&FACTS, all.clone()), all);
        }
        let wide = request(Budget::Slots(1300));
        assert_eq!(without_weights(&FACTS, wide).resident, Bytes(0), "10.2 GiB of slots hold the weights on their way");
    }

    #[test]
    fn without_streaming_the_experts_stay_where_the_weights_are() {
        let all = Request { is_streaming: false, ..request(Budget::Auto) };
        assert_eq!(without_weights(&FACTS, all.clone()), all);
    }
}
