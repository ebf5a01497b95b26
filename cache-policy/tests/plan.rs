//! The memory plan on machines and files of the real sizes, and its refusals word by word.
//! Owns the numbers; never reads this machine. Surprising fact: the plan is the same on every machine it is tested on.

use cache_policy::Bytes;
use cache_policy::plan::{Budget, ClassRequest, Facts, PlanError, Request, plan};
use proptest::prelude::*;

const GIB: u64 = 1 << 30;
/// V4.1 Flash Q2 expert (spec 2.4) and one page of padding an extent.
const SLOT: u64 = 9_953_280 + 3 * 4096;

fn box_of(gib: u64) -> Facts {
    let all = Bytes::gib(gib);
    Facts { total: all, available: Bytes(all.0 - all.0 / 64), ..Facts::default() }
}

fn flash(budget: Budget) -> Request {
    Request {
        resident: Bytes(10_060_841_408),
        ctx: 32_768,
        kv: Bytes::mib(900),
        scratch: Bytes::mib(600),
        staging: Bytes::mib(64),
        classes: vec![ClassRequest {
            expert_bytes: Bytes(9_953_280),
            slot_bytes: Bytes(SLOT),
            layers: 40,
            experts: 15_360,
        }],
        top_k: 6,
        is_streaming: true,
        budget,
        ..Request::default()
    }
}

#[test]
fn automatic_budget_leaves_an_eighth() {
    let p = plan(&box_of(128), &flash(Budget::Auto)).unwrap();
    assert!(p.spare.0 >= 16 * GIB && p.spare.0 < 16 * GIB + SLOT, "spare {}", p.spare);
    assert_eq!(p.cache.0, p.cache_slots * SLOT);
    assert_eq!(p.token_experts, 240);
    assert_eq!(p.facts.usable().0, p.total().0 + p.spare.0);
    assert!(p.notes.is_empty(), "{:?}", p.notes);
}

#[test]
fn one_gigabyte_is_refused_with_the_way_out() {
    let err = plan(&box_of(96), &flash(Budget::Bytes(Bytes::gib(1)))).unwrap_err();
    let auto = plan(&box_of(96), &flash(Budget::Auto)).unwrap().cache;
    assert_eq!(
        err.to_string(),
        format!(
            "--ssd-streaming-cache-experts 1GB holds 107 experts, but one token routes 240 (40 layers x 6). \
             Use at least 3GB, or drop the flag for the automatic budget ({auto} here)."
        )
    );
    // The advice is true, and nothing smaller in whole GB is.
    assert!(plan(&box_of(96), &flash(Budget::Bytes(Bytes::gib(3)))).is_ok());
    assert!(plan(&box_of(96), &flash(Budget::Bytes(Bytes::gib(2)))).is_err());
}

#[test]
fn slots_are_exact_and_the_floor_is_240() {
    let p = plan(&box_of(96), &flash(Budget::Slots(240))).unwrap();
    assert_eq!(p.cache_slots, 240);
    assert!(p.notes[0].contains("less than two tokens"), "{:?}", p.notes);
    let err = plan(&box_of(96), &flash(Budget::Slots(239))).unwrap_err();
    assert!(matches!(err, PlanError::BudgetBelowToken { slots: 239, floor: 240, .. }), "{err}");
    let p = plan(&box_of(96), &flash(Budget::Slots(480))).unwrap();
    assert!(p.notes.is_empty(), "{:?}", p.notes);
}

#[test]
fn more_slots_than_experts_are_capped_with_a_note() {
    let p = plan(&box_of(512), &flash(Budget::Slots(99_999))).unwrap();
    assert_eq!(p.cache_slots, 15_360);
    assert!(p.notes[0].contains("99999 slots were asked"), "{:?}", p.notes);
}

#[test]
fn budget_above_memory_is_refused() {
    for budget in [Budget::Bytes(Bytes::gib(500)), Budget::Slots(15_360), Budget::Slots(u64::MAX)] {
        let err = plan(&box_of(64), &flash(budget)).unwrap_err();
        let PlanError::BudgetAboveMemory { most, .. } = &err else { panic!("{err}") };
        // The advice works.
        let budget = match most.strip_suffix("GB") {
            Some(gb) => Budget::Bytes(Bytes::gib(gb.parse().unwrap())),
            None => Budget::Slots(most.parse().unwrap()),
        };
        plan(&box_of(64), &flash(budget)).unwrap();
    }
    let mut tiny = flash(Budget::Bytes(Bytes::gib(500)));
    (tiny.classes[0].expert_bytes, tiny.classes[0].slot_bytes) = (Bytes(4096), Bytes(4096));
    assert!(matches!(plan(&box_of(64), &tiny), Err(PlanError::BudgetAboveMemory { .. })));
}

#[test]
fn context_larger_than_memory_says_what_fits() {
    let mut r = flash(Budget::Auto);
    (r.ctx, r.kv) = (1 << 20, Bytes::gib(200));
    let err = plan(&box_of(64), &r).unwrap_err();
    let PlanError::CtxTooLarge { ctx_fits, .. } = err else { panic!("{err}") };
    assert!(err.to_string().contains(&format!("use --ctx {ctx_fits} or less")), "{err}");
    r.kv = Bytes(r.kv.0 / r.ctx * ctx_fits);
    r.ctx = ctx_fits;
    plan(&box_of(64), &r).unwrap();
}

#[test]
fn weights_that_do_not_fit_are_named() {
    let err = plan(&box_of(8), &flash(Budget::Auto)).unwrap_err();
    assert!(matches!(err, PlanError::ResidentTooLarge { .. }), "{err}");
}

#[test]
fn resident_mode_suggests_streaming() {
    let mut r = flash(Budget::Auto);
    r.is_streaming = false;
    let err = plan(&box_of(64), &r).unwrap_err();
    assert!(err.to_string().ends_with("add --ssd-streaming to read experts from the drive"), "{err}");
    let p = plan(&box_of(256), &r).unwrap();
    assert_eq!((p.cache_slots, p.is_streaming), (15_360, false));
    assert_eq!(p.cache, Bytes(152_882_380_800), "no padding: spec 2.4");
}

#[test]
fn every_fact_bounds_the_plan() {
    let base = plan(&box_of(128), &flash(Budget::Auto)).unwrap();
    let check = |facts: Facts, lost: u64| {
        let p = plan(&facts, &flash(Budget::Auto)).unwrap();
        let diff = base.cache.0 - p.cache.0;
        assert!(diff.abs_diff(lost) <= SLOT, "lost {} of {}", Bytes(diff), Bytes(lost));
    };
    let full = box_of(128);
    check(Facts { simulated_used: Bytes::gib(20), ..full }, 20 * GIB);
    check(Facts { cma_free: Bytes::gib(4), ..full }, 4 * GIB);
    check(Facts { available: Bytes(full.available.0 - 7 * GIB), ..full }, 7 * GIB);
    // A group of 64 GiB with 10 used: 54 usable instead of 126, and an eighth of 64 held back instead of 16.
    check(Facts { group_limit: Some(Bytes::gib(64)), group_used: Bytes::gib(10), ..full }, (126 - 54 - 8) * GIB);
    // Addresses likewise; they cost nothing where memory is tighter.
    check(Facts { address_space: Some(Bytes::gib(54)), ..full }, (126 - 54) * GIB - (16 * GIB - 54 * GIB / 8));
    check(Facts { address_space: Some(Bytes::gib(200)), ..full }, 0);
}

#[test]
fn reserve_comes_out_of_a_byte_budget() {
    // Spec 7.1: 64 GB less 7.12 GiB of reserve = 56.88 GiB of slots.
    let mut r = flash(Budget::Bytes(Bytes::gib(64)));
    r.prefill_reserve = Bytes(2 * 384 * 9_953_280);
    let p = plan(&box_of(128), &r).unwrap();
    let want = 64 * GIB - r.prefill_reserve.0;
    assert!(p.cache.0 <= want && want - p.cache.0 < SLOT);
}

#[test]
fn notes_for_memlock_and_preload() {
    let mut r = flash(Budget::Slots(500));
    (r.locked, r.preload) = (Bytes::gib(10), Some(600));
    let p = plan(&Facts { lock_limit: Some(Bytes::mib(8)), ..box_of(96) }, &r).unwrap();
    assert_eq!(p.preload, 500);
    assert!(p.notes.iter().any(|n| n.contains("memlock limit is 8.00 MiB")), "{:?}", p.notes);
    assert!(p.notes.iter().any(|n| n.contains("600 experts were to be preloaded; 500 fit")), "{:?}", p.notes);
}

#[test]
fn small_models_get_small_advice() {
    let mut r = flash(Budget::Bytes(Bytes(GIB / 1000)));
    r.classes = vec![ClassRequest { expert_bytes: Bytes(80_000), slot_bytes: Bytes(81_920), layers: 4, experts: 128 }];
    (r.resident, r.top_k) = (Bytes::mib(9), 4);
    let err = plan(&box_of(16), &r).unwrap_err();
    let PlanError::BudgetBelowToken { least, slots, .. } = &err else { panic!("{err}") };
    assert_eq!((*slots, least.as_str()), (13, "0.003GB"));
    let thousandths: u64 = least.trim_end_matches("GB").trim_start_matches("0.").parse().unwrap();
    r.budget = Budget::Bytes(Bytes(thousandths * GIB / 1000));
    assert_eq!(plan(&box_of(16), &r).unwrap().cache_slots, 39);
}

#[test]
fn the_table_names_every_term() {
    let mut r = flash(Budget::Bytes(Bytes::gib(64)));
    (r.process, r.prefill_reserve) = (Bytes::mib(20), Bytes::gib(7));
    let facts = Facts {
        cma_free: Bytes::gib(1),
        group_limit: Some(Bytes::gib(120)),
        group_used: Bytes::gib(2),
        simulated_used: Bytes::gib(3),
        ..box_of(128)
    };
    let text = plan(&facts, &r).unwrap().to_string();
    for part in [
        "memory: 115.00 GiB usable of 128.00 GiB (126.00 GiB available, 1.00 GiB of it reserved for contiguous use, \
         control group 2.00 GiB of 120.00 GiB, 3.00 GiB taken as used)",
        "process at start    20.00 MiB",
        "resident weights     9.37 GiB",
        "key-value state    900.00 MiB  --ctx 32768",
        "prefill reserve      7.00 GiB",
        "6141 slots for 15360 experts (40.0 %), one token uses 240; asked 64GB",
        "leaves ",
    ] {
        assert!(text.contains(part), "{part:?} is missing in\n{text}");
    }
}

proptest! {
    /// Any plan keeps its promises: floor, cap, memory and budget; nothing panics.
    #[test]
    fn plans_keep_their_bounds(
        gib in 1..256u64,
        kv in 0..64u64,
        classes in prop::collection::vec((1..64u64, 1..64u64, 1..64u64), 0..4),
        top_k in 1..9u64,
        ask in 0..3u8,
        amount in any::<u64>(),
        is_streaming in any::<bool>(),
    ) {
        let amount = amount >> (amount % 64);
        let budget = [Budget::Auto, Budget::Slots(amount), Budget::Bytes(Bytes(amount))][usize::from(ask)];
        let class = |&(mib, layers, each): &(u64, u64, u64)| ClassRequest {
            expert_bytes: Bytes(mib << 19), slot_bytes: Bytes::mib(mib), layers, experts: layers * each.max(top_k),
        };
        let classes: Vec<_> = classes.iter().map(class).collect();
        let r = Request { kv: Bytes::gib(kv), top_k, classes, is_streaming, budget, ctx: 4096, ..Request::default() };
        let facts = box_of(gib);
        if let Ok(p) = plan(&facts, &r) {
            prop_assert!(p.total() <= facts.usable());
            prop_assert!(p.cache_slots >= p.token_experts && p.cache_slots <= p.experts_total);
            for (c, asked) in p.classes.iter().zip(&r.classes) {
                prop_assert!(c.slots >= asked.layers * top_k && c.slots <= asked.experts);
            }
            match (is_streaming, budget) {
                (true, Budget::Bytes(b)) => prop_assert!(p.cache <= b),
                (true, Budget::Slots(s)) => prop_assert_eq!(p.cache_slots, s.min(p.experts_total)),
                (true, Budget::Auto) => {}
                (false, _) => prop_assert_eq!(p.cache_slots, p.experts_total),
            }
            prop_assert!(!p.to_string().is_empty());
        }
    }

    #[test]
    fn hostile_numbers_do_not_panic(a in any::<[u64; 12]>(), ask in 0..3u8) {
        let b = |i: usize| Bytes(a[i]);
        let r = Request {
            process: b(0), resident: b(1), ctx: a[2], sweep: 0, kv: b(3), scratch: b(4), staging: b(5), prefill_reserve: b(6),
            classes: vec![ClassRequest { expert_bytes: b(0), slot_bytes: b(7), layers: a[8], experts: a[9] }],
            top_k: a[10], is_streaming: a[11] % 2 == 0,
            budget: [Budget::Auto, Budget::Slots(a[11]), Budget::Bytes(b(11))][usize::from(ask)],
            preload: Some(a[11]), locked: b(1),
        };
        let facts = Facts { total: b(11), available: b(10), cma_free: b(9), group_limit: Some(b(8)), group_used: b(7),
            address_space: Some(b(7)), lock_limit: Some(b(6)), simulated_used: b(5) };
        let _ = plan(&facts, &r).map(|p| p.to_string()).map_err(|e| e.to_string());
    }
}
