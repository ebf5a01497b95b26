//! The optimum against exhaustive search, the miss curve against replays at every size, and both against the policies.
//! Owns the searches; never shares code with what it checks.
//! Surprising fact: on traces this small, trying every victim at every miss is still quick.

use std::collections::{BTreeMap, BTreeSet};

use cache_policy::policies::KNOWN;
use cache_policy::{ClassShape, Directory, ExpertIdx, LayerIdx, MissCurve, Recording, sim};
use proptest::prelude::*;

type Request = (u16, Vec<u16>);

const EXPERTS: u16 = 5;

fn class(layers: &[u16], slots: usize) -> ClassShape {
    ClassShape { layers: layers.iter().map(|&l| (LayerIdx(l), EXPERTS)).collect(), slots }
}

fn ids(list: &[u16]) -> Vec<ExpertIdx> {
    list.iter().map(|&e| ExpertIdx(e)).collect()
}

fn record(requests: &[Request], layers: u16) -> Recording {
    let mut recording = Recording::new(&(0..layers).map(|l| (LayerIdx(l), EXPERTS)).collect::<Vec<_>>());
    for (layer, list) in requests {
        recording.push(LayerIdx(*layer), &ids(list)).expect("a route of this model");
    }
    recording
}

/// Fewest misses by trying every victim that the pins allow. State: cached experts before each single use.
fn exhaustive(requests: &[Request], slots: usize) -> u64 {
    let mut states: BTreeMap<BTreeSet<(u16, u16)>, u64> = BTreeMap::from([(BTreeSet::new(), 0)]);
    let (mut pinned, mut last) = (BTreeSet::new(), None);
    for (layer, list) in requests {
        if last.is_none_or(|l| *layer <= l) {
            pinned.clear();
        }
        last = Some(*layer);
        let wanted: BTreeSet<_> = list.iter().map(|&e| (*layer, e)).collect();
        for &key in &wanted {
            let mut after: BTreeMap<BTreeSet<(u16, u16)>, u64> = BTreeMap::new();
            let mut reach = |state: BTreeSet<(u16, u16)>, cost: u64| {
                let best = after.entry(state).or_insert(u64::MAX);
                *best = (*best).min(cost);
            };
            for (state, cost) in states {
                let mut with = state.clone();
                with.insert(key);
                if with.len() <= slots {
                    let cost = cost + u64::from(!state.contains(&key));
                    reach(with, cost);
                    continue;
                }
                for victim in state.iter().filter(|v| !pinned.contains(*v) && !wanted.contains(v)) {
                    let mut left = with.clone();
                    left.remove(victim);
                    reach(left, cost + 1);
                }
            }
            states = after;
        }
        pinned.extend(wanted);
    }
    states.into_values().min().expect("the slots hold one token")
}

/// Tokens of `layers` layers with up to two experts each.
fn tokens(layers: u16, most: usize) -> impl Strategy<Value = Vec<Request>> {
    let route = prop::sample::subsequence((0..EXPERTS).collect::<Vec<_>>(), 1..=2);
    prop::collection::vec(prop::collection::vec(route, usize::from(layers)), 1..=most).prop_map(|all| {
        all.into_iter().flat_map(|token| token.into_iter().enumerate().map(|(l, r)| (l as u16, r))).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn optimum_equals_exhaustive_search(requests in tokens(2, 9), slots in 4..8usize) {
        let best = record(&requests, 2).optimum(&[class(&[0, 1], slots)], 0);
        prop_assert_eq!(best.misses, exhaustive(&requests, slots));
        let uses: usize = requests.iter().map(|r| r.1.len()).sum();
        prop_assert_eq!((best.hits + best.misses, best.requests), (uses as u64, requests.len() as u64));
    }

    /// Classes do not share slots: the optimum of two is the sum of the optimum of each alone.
    #[test]
    fn classes_are_solved_apart(requests in tokens(3, 12), slots in 4..7usize) {
        let both = record(&requests, 3).optimum(&[class(&[0, 2], slots), class(&[1], 2)], 0);
        let only = |layers: &[u16]| -> Vec<Request> {
            requests.iter().filter(|r| layers.contains(&r.0)).cloned().collect()
        };
        let first = exhaustive(&only(&[0, 2]), slots);
        let second = exhaustive(&only(&[1]), 2);
        prop_assert_eq!(both.misses, first + second);
    }

    #[test]
    fn no_policy_beats_the_optimum(requests in tokens(2, 60), slots in 4..9usize, skip in 0..40u64) {
        let shapes = [class(&[0, 1], slots)];
        let recording = record(&requests, 2);
        let best = recording.optimum(&shapes, 0);
        for (name, make) in KNOWN {
            let mut directory = Directory::new(&shapes, make);
            let routes: Vec<_> = requests.iter().map(|(l, r)| (LayerIdx(*l), ids(r))).collect();
            let tally = sim::replay(&mut directory, routes.iter().map(|(l, r)| (*l, r.as_slice()))).expect("fits");
            prop_assert!(tally.misses >= best.misses, "{name}: {} < {}", tally.misses, best.misses);
        }
        // Skipping changes what is counted, not what happens.
        let rest = recording.optimum(&shapes, skip);
        prop_assert!(rest.misses <= best.misses);
        prop_assert_eq!(rest.requests, (requests.len() as u64).saturating_sub(skip));
    }

    /// One pass gives what plain LRU misses at every size.
    #[test]
    fn curve_equals_lru_at_every_size(uses in prop::collection::vec(0..20usize, 1..400), warm in 0..100usize) {
        let mut curve = MissCurve::new(20);
        for (i, &number) in uses.iter().enumerate() {
            if i < warm { curve.warm(number) } else { curve.record(number) }
        }
        let all = curve.all();
        prop_assert_eq!(all.len(), 21);
        for (slots, &expected) in all.iter().enumerate() {
            let (mut newest_last, mut misses) = (Vec::new(), 0);
            for (i, &number) in uses.iter().enumerate() {
                let is_hit = newest_last.iter().rev().take(slots).any(|&n| n == number);
                misses += u64::from(!is_hit && i >= warm);
                newest_last.retain(|&n| n != number);
                newest_last.push(number);
            }
            prop_assert_eq!(curve.misses(slots), misses);
            prop_assert_eq!(expected, misses);
        }
    }
}

/// The live LRU moves hits before misses within a request; the curve does not. The difference must stay small.
#[test]
fn curve_is_close_to_the_directory() {
    let mut seed = 1u64;
    let mut draw = |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    let (layers, experts) = (4u16, 32u16);
    let mut requests: Vec<Request> = Vec::new();
    for _ in 0..4000 {
        for layer in 0..layers {
            let mut set = BTreeSet::new();
            while set.len() < 3 {
                let spread = draw(u64::from(experts)) + 1;
                set.insert(draw(spread) as u16);
            }
            requests.push((layer, set.into_iter().collect()));
        }
    }
    let mut curve = MissCurve::new(usize::from(layers * experts));
    for (layer, list) in &requests {
        list.iter().for_each(|e| curve.record(usize::from(layer * experts + e)));
    }
    for slots in [16, 32, 64, 96, 120] {
        let shape = ClassShape { layers: (0..layers).map(|l| (LayerIdx(l), experts)).collect(), slots };
        let mut directory = Directory::new(&[shape], &|n| Box::new(cache_policy::Lru::new(n)));
        let routes: Vec<_> = requests.iter().map(|(l, r)| (LayerIdx(*l), ids(r))).collect();
        let tally = sim::replay(&mut directory, routes.iter().map(|(l, r)| (*l, r.as_slice()))).expect("fits");
        let (curve, live) = (curve.misses(slots) as f64, tally.misses as f64);
        assert!((curve / live - 1.0).abs() < 0.02, "{slots} slots: curve {curve}, directory {live}");
    }
}

#[test]
fn unknown_routes_are_refused_and_not_recorded() {
    let mut recording = record(&[(0, vec![1])], 2);
    assert!(recording.push(LayerIdx(2), &ids(&[0])).is_err());
    assert!(recording.push(LayerIdx(1), &ids(&[0, EXPERTS])).is_err());
    assert_eq!((recording.requests(), recording.uses()), (1, 1));
}
