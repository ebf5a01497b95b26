//! What a prompt's sweep leaves of a cache: the experts that decode used and those that the prompt used most.
//! Never counts on a policy's order among the experts that stay. Surprising fact: to every policy, what a sweep brings in unfavoured looks
//! like a preload that came late, so no policy had to learn about prompts.

use cache_policy::{ClassShape, Directory, ExpertIdx, ExpertKey, LayerIdx, Phase, Placement, by_name, policies};

const LAYERS: u16 = 4;
const EXPERTS: u16 = 32;
const SLOTS: usize = 40;

fn directory(policy: &str) -> Directory {
    let layers = (0..LAYERS).map(|l| (LayerIdx(l), EXPERTS)).collect();
    Directory::new(&[ClassShape { layers, slots: SLOTS }], &by_name(policy).unwrap())
}

fn ids(range: std::ops::Range<u16>) -> Vec<ExpertIdx> {
    range.map(ExpertIdx).collect()
}

/// Experts of `layer` that are present.
fn present(d: &Directory, layer: u16) -> Vec<u16> {
    (0..EXPERTS).filter(|e| d.contains(ExpertKey::new(layer, *e))).collect()
}

fn ask(d: &mut Directory, phase: Phase, layer: u16, list: &[ExpertIdx]) -> usize {
    let mut out = Vec::new();
    d.request_in(phase, LayerIdx(layer), list, &mut |_| false, &mut out).unwrap();
    out.iter().filter(|p| **p != Placement::Hit).count()
}

/// Decode that has used experts 0..10 of each layer, again and again.
fn warm(policy: &str) -> Directory {
    let mut d = directory(policy);
    for _ in 0..20 {
        for layer in 0..LAYERS {
            ask(&mut d, Phase::Decode, layer, &ids(0..5));
            ask(&mut d, Phase::Decode, layer, &ids(5..10));
        }
    }
    d
}

#[test]
fn a_sweep_without_favourites_takes_no_more_than_it_holds_at_a_time() {
    for (policy, _) in policies::KNOWN {
        let mut d = warm(policy);
        for layer in 0..LAYERS {
            d.favour(LayerIdx(layer), &[]);
            for first in (0..EXPERTS).step_by(4) {
                ask(&mut d, Phase::Prefill, layer, &ids(first..first + 4));
            }
        }
        assert!(hot(&d) >= SLOTS - 2 * 4, "{policy}: {} of the {SLOTS} that decode used are left", hot(&d));
    }
}

/// How many of those that `warm` used are left.
fn hot(d: &Directory) -> usize {
    (0..LAYERS).map(|l| present(d, l).iter().filter(|e| **e < 10).count()).sum()
}

#[test]
fn favourites_stay_beside_what_decode_used() {
    for (policy, _) in policies::KNOWN {
        let mut d = warm(policy);
        let mut misses = 0;
        for layer in 0..LAYERS {
            // More than the layer's share: half of the slots over four layers.
            d.favour(LayerIdx(layer), &ids(20..32));
            for first in (0..EXPERTS).step_by(4) {
                misses += ask(&mut d, Phase::Prefill, layer, &ids(first..first + 4));
            }
        }
        assert!(misses <= usize::from(LAYERS * EXPERTS), "{policy}: nothing is read twice");
        let stay: usize = (0..LAYERS).map(|l| present(&d, l).iter().filter(|e| (20..25).contains(*e)).count()).sum();
        assert_eq!(stay, 20, "{policy}: favourites that are left");
        assert!(hot(&d) >= SLOTS / 2 - 2 * 4, "{policy}: {} of the {SLOTS} that decode used are left", hot(&d));
    }
}

#[test]
fn favourites_get_what_decode_does_not_use() {
    for (policy, _) in policies::KNOWN {
        let mut d = directory(policy);
        for layer in 0..LAYERS {
            d.favour(LayerIdx(layer), &ids(20..32));
            for first in (0..EXPERTS).step_by(4) {
                ask(&mut d, Phase::Prefill, layer, &ids(first..first + 4));
            }
        }
        for layer in 0..LAYERS {
            let stay = present(&d, layer).iter().filter(|e| (20..30).contains(*e)).count();
            assert!(stay >= 8, "{policy}, layer {layer}: {stay} of ten favourites are left");
        }
    }
}

#[test]
fn requests_of_many_rows_count_as_uses_until_somebody_favours() {
    let (mut old, mut new) = (warm("lru"), warm("lru"));
    for layer in 0..LAYERS {
        let mut out = Vec::new();
        old.request(LayerIdx(layer), &ids(8..24), &mut |_| false, &mut out).unwrap();
        ask(&mut new, Phase::Prefill, layer, &ids(8..24));
    }
    for layer in 0..LAYERS {
        assert_eq!(present(&old, layer), present(&new, layer));
    }
}

#[test]
fn what_the_model_lacks_is_passed_over() {
    let mut d = warm("auto");
    d.favour(LayerIdx(99), &ids(0..4));
    d.favour(LayerIdx(1), &ids(30..40));
    assert_eq!(present(&d, 1), (0..10).collect::<Vec<_>>());
}

#[test]
fn slots_to_spare_hold_neither_decodes_nor_favourites() {
    for (policy, _) in policies::KNOWN {
        let mut d = directory(policy);
        assert_eq!(d.slots_to_spare(0), SLOTS, "{policy}: an empty cache is all to spare");
        d.favour(LayerIdx(0), &ids(0..3));
        ask(&mut d, Phase::Prefill, 0, &ids(0..8));
        assert_eq!(d.slots_to_spare(0), SLOTS - 3, "{policy}: what passes is to spare, favourites are not");
        d.favour(LayerIdx(0), &[]);
        assert_eq!(d.slots_to_spare(0), SLOTS, "{policy}: the next sweep has named others");
        assert_eq!(warm(policy).slots_to_spare(0), 0, "{policy}: decode has used all");
    }
}
