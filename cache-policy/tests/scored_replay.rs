//! Replays by phase, waves and the census, against counting that is as plain as possible.
//! Owns the plain twins; never shares code with what it checks.
//! Surprising fact: a request that is larger than the cache may still hit, since its waves follow each other.

use std::collections::BTreeSet;

use cache_policy::policies::KNOWN;
use cache_policy::sim::wave_len;
use cache_policy::{
    Bytes, Census, ClassShape, Directory, Event, ExpertIdx, ExpertKey, LayerIdx, MissCurve, Phase, Placement,
    Recording, Request, Score, ScoredReplay, Tally, TraceHeader, TraceLayer, sim,
};
use proptest::prelude::*;

const EXPERTS: u16 = 9;
/// Layers 0 and 1 are one size class, layer 2 another.
const BYTES: [u64; 3] = [10, 10, 7];

type Route = (Phase, u16, Vec<ExpertIdx>);

fn shapes(slots: usize) -> Vec<ClassShape> {
    let class =
        |layers: &[u16], slots| ClassShape { layers: layers.iter().map(|&l| (LayerIdx(l), EXPERTS)).collect(), slots };
    vec![class(&[0, 1], slots), class(&[2], slots.min(usize::from(EXPERTS)))]
}

fn phase() -> impl Strategy<Value = Phase> {
    prop_oneof![Just(Phase::Prefill), Just(Phase::Decode)]
}

/// Requests of any layer in any order, from none to all experts.
fn requests() -> impl Strategy<Value = Vec<Route>> {
    let ids = prop::sample::subsequence((0..EXPERTS).map(ExpertIdx).collect::<Vec<_>>(), 0..=usize::from(EXPERTS));
    prop::collection::vec((phase(), 0..3u16, ids.prop_shuffle()), 1..60)
}

fn replay(requests: &[Route], slots: usize, policy: usize) -> (Score, u64) {
    let mut replay = ScoredReplay::new(&shapes(slots), KNOWN[policy].1);
    for (phase, layer, experts) in requests.iter().filter(|r| !r.2.is_empty()) {
        let expert_bytes = Bytes(BYTES[usize::from(*layer)]);
        let request =
            Request { phase: *phase, layer: LayerIdx(*layer), experts, is_favour: false, overlap: 0, expert_bytes };
        replay.request(&request).expect("a route of this model");
    }
    (replay.score, replay.split_requests)
}

fn record(requests: &[Route]) -> Recording {
    let mut recording = Recording::new(&(0..3).map(|l| (LayerIdx(l), EXPERTS)).collect::<Vec<_>>());
    for (_, layer, ids) in requests {
        recording.push(LayerIdx(*layer), ids).expect("a route of this model");
    }
    recording
}

fn misses(score: &Score) -> u64 {
    score.prefill.misses + score.decode.misses
}

fn header() -> TraceHeader {
    let layer = |l: u16| TraceLayer {
        layer: LayerIdx(l),
        experts: EXPERTS,
        top_k: 1,
        expert_bytes: Bytes(BYTES[usize::from(l)]),
    };
    TraceHeader { model: [7; 32], layers: (0..3).map(layer).collect() }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn phases_add_up_to_a_plain_replay(requests in requests(), slots in 9..20usize, policy in 0..KNOWN.len()) {
        let (score, split) = replay(&requests, slots, policy);
        prop_assert_eq!(split, 0, "every class holds a whole layer");
        let mut directory = Directory::new(&shapes(slots), &KNOWN[policy].1);
        let named = requests.iter().filter(|r| !r.2.is_empty());
        let plain = sim::replay(&mut directory, named.map(|(_, l, ids)| (LayerIdx(*l), ids.as_slice())));
        let mut sum = score.prefill;
        sum.add(&score.decode);
        prop_assert_eq!(Ok(sum), plain);
        prop_assert_eq!(sum.hit_rate().is_none(), sum.requests == 0);
    }

    /// Bytes and counts by phase from the placements alone, waves cut by hand.
    #[test]
    fn waves_are_cut_as_the_engine_cuts_them(requests in requests(), slots in 2..9usize, policy in 0..KNOWN.len()) {
        let (score, split) = replay(&requests, slots, policy);
        let mut directory = Directory::new(&shapes(slots), &KNOWN[policy].1);
        let (mut expected, mut cut, mut out) = (Score::default(), 0, Vec::new());
        for (phase, layer, ids) in requests.iter().filter(|r| !r.2.is_empty()) {
            let len = if ids.len() <= slots { ids.len() } else { slots / 2 };
            cut += u64::from(ids.len() > slots);
            let mut served = Tally { requests: 1, ..Tally::default() };
            // The wave before is held while the next one is asked for.
            let mut held: Vec<ExpertKey> = Vec::new();
            for wave in ids.chunks(len) {
                let keys: Vec<_> = wave.iter().map(|id| ExpertKey::new(*layer, id.0)).collect();
                if held.len() + keys.len() > slots {
                    held.clear();
                }
                directory.request(LayerIdx(*layer), wave, &mut |key| held.contains(&key), &mut out).expect("fits");
                held = keys;
                for placement in &out {
                    served.hits += u64::from(*placement == Placement::Hit);
                    served.misses += u64::from(*placement != Placement::Hit);
                    served.evictions += u64::from(matches!(placement, Placement::Fill { evict: Some(_) }));
                }
            }
            served.all_hit = u64::from(served.misses == 0);
            expected.add(*phase, &served, Bytes(BYTES[usize::from(*layer)]));
        }
        prop_assert_eq!(score, expected);
        prop_assert_eq!(split, cut);
    }

    #[test]
    fn no_policy_beats_the_optimum_by_request(requests in requests(), slots in 2..20usize) {
        let recording = record(&requests);
        let named: Vec<_> = requests.iter().filter(|r| !r.2.is_empty()).collect();
        let (mut score, mut at) = (Score::default(), 0);
        recording.optimum_by_request(&shapes(slots), &mut |layer, served| {
            let (phase, expected, ids) = named[at];
            assert_eq!((layer.0, served.hits + served.misses, served.requests), (*expected, ids.len() as u64, 1));
            assert_eq!(served.all_hit == 1, served.misses == 0);
            score.add(*phase, served, Bytes(BYTES[usize::from(layer.0)]));
            at += 1;
        });
        prop_assert_eq!(at, named.len());
        let mut sum = score.prefill;
        sum.add(&score.decode);
        prop_assert_eq!(recording.optimum(&shapes(slots), 0), sum);
        for (policy, (name, _)) in KNOWN.iter().enumerate() {
            prop_assert!(sum.misses <= misses(&replay(&requests, slots, policy).0), "{}", name);
        }
    }

    /// A stack kept as a list: a request hits what lies in its first `slots` entries when the request begins.
    #[test]
    fn curves_of_requests_equal_a_list_at_every_size(requests in requests()) {
        let experts = usize::from(3 * EXPERTS);
        let mut curve = MissCurve::new(experts);
        let (mut stack, mut misses) = (Vec::<usize>::new(), vec![0u64; experts + 1]);
        for (phase, layer, ids) in &requests {
            let numbers: Vec<usize> = ids.iter().map(|id| usize::from(layer * EXPERTS + id.0)).collect();
            let is_counted = *phase == Phase::Decode;
            for number in &numbers {
                let depth = stack.iter().position(|n| n == number).unwrap_or(usize::MAX);
                for (slots, count) in misses.iter_mut().enumerate() {
                    *count += u64::from(is_counted && depth >= slots);
                }
            }
            for number in &numbers {
                stack.retain(|n| n != number);
                stack.insert(0, *number);
            }
            curve.record_request(numbers.iter().copied(), is_counted);
        }
        prop_assert_eq!(curve.all(), misses);
    }

    #[test]
    fn the_census_counts_what_is_there(requests in requests(), tokens in prop::collection::vec(0..3u32, 1..9)) {
        let mut census = Census::new(&header());
        let (mut seen, mut uses) = (BTreeSet::new(), [0u64; 3 * EXPERTS as usize]);
        let mut expected = [(0u64, 0u64, 0u64, 0u64, 0u64); 2];
        for ((phase, layer, ids), named) in requests.iter().zip(tokens.iter().cycle()) {
            // Named before their phase is told, as a live recorder does.
            (0..*named).for_each(|position| census.count(&Event::Token { position, id: 1 }));
            census.count(&Event::Phase(*phase));
            census.count(&Event::Route { layer: LayerIdx(*layer), experts: ids });
            let e = &mut expected[usize::from(*phase == Phase::Decode)];
            e.0 += u64::from(!ids.is_empty());
            for id in ids {
                e.1 += 1;
                e.2 += BYTES[usize::from(*layer)];
                e.3 += u64::from(seen.insert((*layer, *id)));
                uses[usize::from(*layer * EXPERTS + id.0)] += 1;
            }
            e.4 += u64::from(*named);
        }
        for (phase, e) in [Phase::Prefill, Phase::Decode].into_iter().zip(expected) {
            let found = census.of(phase);
            prop_assert_eq!((found.requests, found.uses, found.use_bytes, found.first_uses), (e.0, e.1, e.2, e.3));
            if census.has_tokens() {
                prop_assert_eq!(found.tokens, e.4);
            }
        }
        prop_assert_eq!((census.expert_uses(), census.experts_used()), (&uses[..], seen.len()));
    }
}

#[test]
fn steps_stand_for_tokens_that_are_not_named() {
    let mut census = Census::new(&header());
    for layer in [0, 1, 2, 0, 1, 2, 0, 0] {
        census.count(&Event::Route { layer: LayerIdx(layer), experts: &[ExpertIdx(1)] });
    }
    assert_eq!(census.decode.tokens, 4);
    assert_eq!(census.number(LayerIdx(2), ExpertIdx(3)), Some(21));
    assert_eq!((census.number(LayerIdx(3), ExpertIdx(0)), census.expert_bytes(LayerIdx(2))), (None, Bytes(7)));
}

#[test]
fn a_wave_is_half_of_what_the_smallest_class_holds() {
    let len = wave_len(&shapes(8));
    assert_eq!((len(1), len(8), len(9), len(0)), (1, 8, 4, 1));
    assert_eq!(wave_len(&shapes(1))(5), 1);
}
