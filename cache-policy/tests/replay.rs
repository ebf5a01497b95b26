//! Replay of trace events: starting content, overlaps, and requests that no longer fit. Owns small synthetic traces.
//! Never compares with a live run (the engine's tests do). Surprising fact: a hostile trace may preload an expert twice.

use cache_policy::{ClassShape, Directory, Event, ExpertIdx, ExpertKey, LayerIdx, Phase, Replay, by_name};

fn replay(policy: &str, slots: usize) -> Replay {
    let shape = ClassShape { layers: vec![(LayerIdx(0), 16), (LayerIdx(1), 16)], slots };
    Replay::new(Directory::new(&[shape], &by_name(policy).expect("known")), slots)
}

fn route(replay: &mut Replay, layer: u16, experts: &[u16]) {
    let experts: Vec<_> = experts.iter().map(|&e| ExpertIdx(e)).collect();
    replay.event(&Event::Route { layer: LayerIdx(layer), experts: &experts }).expect("fits the model");
}

#[test]
fn a_replay_starts_with_what_was_preloaded() {
    let mut replay = replay("lru", 4);
    for key in [(0, 3), (0, 3), (1, 9), (7, 0), (0, 99), (0, 1), (0, 2), (0, 4), (0, 5)] {
        replay.event(&Event::Preload(ExpertKey::new(key.0, key.1))).expect("ignored or taken");
    }
    replay.event(&Event::Phase(Phase::Decode)).expect("no route");
    route(&mut replay, 0, &[3, 1]);
    route(&mut replay, 1, &[9, 4]);
    let tally = replay.decode();
    assert_eq!((tally.hits, tally.misses, tally.evictions, tally.all_hit), (3, 1, 1, 1));
    assert!(!replay.directory().contains(ExpertKey::new(0, 2)), "the last one leaves first");
}

#[test]
fn overlapping_requests_are_no_victims() {
    for (overlap, stays) in [(0, ExpertKey::new(0, 0)), (1, ExpertKey::new(1, 1))] {
        let mut replay = replay("lfu", 2);
        for _ in 0..3 {
            route(&mut replay, 0, &[0]);
        }
        // Used once: the victim, unless its request still holds it.
        route(&mut replay, 1, &[1]);
        replay.event(&Event::Overlap(overlap)).expect("no route");
        route(&mut replay, 0, &[5]);
        assert!(replay.directory().contains(stays), "overlap {overlap}");
        assert_eq!((replay.decode().misses, replay.decode().evictions), (3, 1));
    }
}

#[test]
fn requests_that_no_longer_fit_are_cut() {
    for slots in [1, 2, 3, 5, 16] {
        let mut replay = replay("lru", slots);
        replay.event(&Event::Phase(Phase::Prefill)).expect("no route");
        let all: Vec<u16> = (0..10).collect();
        route(&mut replay, 0, &all);
        let tally = replay.prefill();
        assert_eq!((tally.misses, tally.hits), (10, 0), "{slots} slots");
        let waves = if slots >= 10 { 1 } else { 10usize.div_ceil((slots / 2).max(1)) };
        assert_eq!(tally.requests, waves as u64, "{slots} slots");
        replay.event(&Event::Overlap(u32::MAX)).expect("no route");
        route(&mut replay, 1, &[3]);
    }
}

#[test]
fn a_route_of_another_model_is_refused() {
    let mut replay = replay("lru", 4);
    let unknown = Event::Route { layer: LayerIdx(5), experts: &[ExpertIdx(0)] };
    assert!(replay.event(&unknown).is_err());
}
