//! LRU against a brute-force twin, and the directory against a model that scans everything.
//! Owns the twin; never shares code with what it checks. Surprising fact: the twin needs no list, only time stamps.

use cache_policy::policies::KNOWN;
use cache_policy::{ClassShape, sim};
use cache_policy::{Directory, Epoch, ExpertIdx, ExpertKey, LayerIdx, Lru, Placement, Policy, RouteError};
use proptest::prelude::*;

/// One line an entry: when it was used (a global count) and until which epoch it is pinned.
#[derive(Default)]
struct Twin {
    entries: Vec<(ExpertKey, i64, Epoch)>,
    clock: i64,
    latest: Epoch,
}

impl Twin {
    fn use_now(&mut self, key: ExpertKey, epoch: Epoch) {
        self.clock += 1;
        let stale = epoch < self.latest || epoch == Epoch(0);
        self.latest = self.latest.max(epoch);
        let oldest = self.entries.iter().map(|e| e.1).min().unwrap_or(0);
        match self.entries.iter_mut().find(|e| e.0 == key) {
            Some(e) => (e.1, e.2) = (self.clock, e.2.max(epoch)),
            None => self.entries.push((key, if stale { oldest - 1 } else { self.clock }, epoch)),
        }
    }

    fn victim(&mut self, now: Epoch, held: &[ExpertKey]) -> Option<ExpertKey> {
        let free: Vec<_> = self.entries.iter().filter(|e| !held.contains(&e.0)).copied().collect();
        let pick = free.iter().filter(|e| e.2 < now).min_by_key(|e| e.1).or(free.iter().min_by_key(|e| e.1))?.0;
        self.entries.retain(|e| e.0 != pick);
        Some(pick)
    }

    fn oldest_first(&self) -> Vec<ExpertKey> {
        let mut sorted = self.entries.clone();
        sorted.sort_by_key(|e| e.1);
        sorted.iter().map(|e| e.0).collect()
    }
}

#[derive(Clone, Debug)]
enum Step {
    Use(u16),
    Preload(u16),
    Pin(u16, u64),
    NextEpoch,
    Victim(Vec<u16>),
    Remove(u16),
}

fn step() -> impl Strategy<Value = Step> {
    let id = 0..24u16;
    prop_oneof![
        6 => id.clone().prop_map(Step::Use),
        1 => id.clone().prop_map(Step::Preload),
        1 => (id.clone(), 0..4u64).prop_map(|(i, e)| Step::Pin(i, e)),
        2 => Just(Step::NextEpoch),
        2 => prop::collection::vec(id.clone(), 0..4).prop_map(Step::Victim),
        1 => id.prop_map(Step::Remove),
    ]
}

const SLOTS: usize = 8;

fn key(id: u16) -> ExpertKey {
    ExpertKey::new(id / 8, id % 8)
}

proptest! {
    #[test]
    fn lru_equals_twin(steps in prop::collection::vec(step(), 1..200)) {
        let (mut lru, mut twin, mut epoch) = (Lru::new(SLOTS), Twin::default(), Epoch(1));
        for step in steps {
            match step {
                Step::Use(id) | Step::Preload(id) => {
                    let is_present = lru.contains(key(id));
                    let is_preload = matches!(step, Step::Preload(_));
                    let when = if is_preload { Epoch(0) } else { epoch };
                    if is_present && !is_preload {
                        lru.touch(key(id), when);
                        twin.use_now(key(id), when);
                    } else if !is_present && lru.len() < SLOTS {
                        lru.insert(key(id), when);
                        twin.use_now(key(id), when);
                    }
                }
                Step::Pin(id, more) if lru.contains(key(id)) => {
                    let until = Epoch(epoch.0 + more);
                    lru.pin(key(id), until);
                    let entry = twin.entries.iter_mut().find(|e| e.0 == key(id)).unwrap();
                    entry.2 = entry.2.max(until);
                }
                Step::Pin(..) => {}
                Step::NextEpoch => epoch.0 += 1,
                Step::Victim(held) => {
                    let held: Vec<_> = held.into_iter().map(key).collect();
                    let a = lru.victim(epoch, &mut |k| held.contains(&k));
                    prop_assert_eq!(a, twin.victim(epoch, &held));
                }
                Step::Remove(id) => {
                    let was = twin.entries.iter().any(|e| e.0 == key(id));
                    twin.entries.retain(|e| e.0 != key(id));
                    prop_assert_eq!(lru.remove(key(id)), was);
                }
            }
            prop_assert_eq!(lru.oldest_first(), twin.oldest_first());
            prop_assert_eq!(lru.len(), twin.entries.len());
        }
    }
}

fn shape(layers: u16, experts: u16, slots: usize) -> ClassShape {
    ClassShape { layers: (0..layers).map(|l| (LayerIdx(l), experts)).collect(), slots }
}

fn directory(shapes: &[ClassShape]) -> Directory {
    Directory::new(shapes, &|slots| Box::new(Lru::new(slots)))
}

fn ids(list: &[u16]) -> Vec<ExpertIdx> {
    list.iter().map(|&i| ExpertIdx(i)).collect()
}

#[test]
fn victims_are_never_part_of_the_request() {
    // Three slots; expert 0 is the oldest, and must survive because the same request names it.
    let mut d = directory(&[shape(1, 8, 3)]);
    let mut out = Vec::new();
    let mut serve = |list: &[u16]| {
        d.request(LayerIdx(0), &ids(list), &mut |_| false, &mut out).unwrap();
        out.clone()
    };
    serve(&[0, 1, 2]);
    let got = serve(&[3, 0, 4]);
    let evict = |e| Placement::Fill { evict: Some(ExpertKey::new(0, e)) };
    assert_eq!(got, [evict(1), Placement::Hit, evict(2)]);
}

#[test]
fn held_experts_stay() {
    let mut d = directory(&[shape(1, 8, 2)]);
    let mut out = Vec::new();
    d.request(LayerIdx(0), &ids(&[0, 1]), &mut |_| false, &mut out).unwrap();
    d.request(LayerIdx(0), &ids(&[2]), &mut |k| k.expert.0 == 0, &mut out).unwrap();
    assert_eq!(out, [Placement::Fill { evict: Some(ExpertKey::new(0, 1)) }]);
}

#[test]
fn experts_of_the_running_token_outlive_older_ones() {
    // Layers 0..2 of one token, two experts each, six slots: the seventh expert must come from the token before.
    let mut d = directory(&[shape(3, 8, 6)]);
    let mut out = Vec::new();
    for layer in 0..3 {
        d.request(LayerIdx(layer), &ids(&[0, 1]), &mut |_| false, &mut out).unwrap();
    }
    assert_eq!(d.epoch(), Epoch(1));
    d.request(LayerIdx(0), &ids(&[2, 3]), &mut |_| false, &mut out).unwrap();
    assert_eq!(d.epoch(), Epoch(2));
    d.request(LayerIdx(1), &ids(&[2, 3]), &mut |_| false, &mut out).unwrap();
    for e in [2, 3] {
        assert!(d.contains(ExpertKey::new(0, e)) && d.contains(ExpertKey::new(1, e)));
    }
}

#[test]
fn refusals_change_nothing() {
    let mut d = directory(&[shape(2, 4, 3)]);
    let mut out = Vec::new();
    let mut ask = |layer, list: &[u16]| d.request(LayerIdx(layer), &ids(list), &mut |_| false, &mut out);
    assert_eq!(ask(7, &[0]), Err(RouteError::UnknownLayer { layer: LayerIdx(7) }));
    let key = ExpertKey::new(1, 4);
    assert_eq!(ask(1, &[0, 4]), Err(RouteError::UnknownExpert { key, experts: 4 }));
    assert_eq!(ask(1, &[1, 1]), Err(RouteError::Duplicate { key: ExpertKey::new(1, 1) }));
    assert_eq!(ask(0, &[0, 1, 2, 3]), Err(RouteError::TooMany { layer: LayerIdx(0), asked: 4, slots: 3 }));
    assert!(d.is_empty());
    assert_eq!(d.epoch(), Epoch(0));
}

#[test]
fn classes_do_not_take_each_others_slots() {
    let mut small = shape(1, 4, 2);
    small.layers = vec![(LayerIdx(1), 4)];
    let mut d = directory(&[shape(1, 4, 2), small]);
    let routes: Vec<(LayerIdx, Vec<ExpertIdx>)> =
        vec![(LayerIdx(0), ids(&[0, 1])), (LayerIdx(1), ids(&[0, 1])), (LayerIdx(1), ids(&[2, 3]))];
    let tally = sim::replay(&mut d, routes.iter().map(|(l, i)| (*l, i.as_slice()))).unwrap();
    assert_eq!((tally.misses, tally.evictions), (6, 2));
    assert!(d.contains(ExpertKey::new(0, 0)) && d.contains(ExpertKey::new(0, 1)));
}

#[test]
fn preloaded_experts_leave_first_and_the_least_wanted_before_all() {
    for ((policy, make), is_early) in KNOWN.iter().flat_map(|known| [(known, true), (known, false)]) {
        let mut d = Directory::new(&[shape(1, 8, 4)], make);
        let mut out = Vec::new();
        let mut serve = |d: &mut Directory, list: &[u16]| {
            d.request(LayerIdx(0), &ids(list), &mut |_| false, &mut out).unwrap();
            out.clone()
        };
        let wanted_most_first = [5, 6, 7].map(|e| ExpertKey::new(0, e));
        if is_early {
            d.preload(&wanted_most_first);
            serve(&mut d, &[0]);
        } else {
            serve(&mut d, &[0]);
            d.preload(&wanted_most_first);
        }
        for (newcomer, leaves) in [(1, 7), (2, 6), (3, 5)] {
            let evict = Some(ExpertKey::new(0, leaves));
            assert_eq!(serve(&mut d, &[newcomer]), [Placement::Fill { evict }], "{policy}, early: {is_early}");
        }
        d.forget(ExpertKey::new(0, 3));
        assert!(!d.contains(ExpertKey::new(0, 3)) && d.len(0) == 3, "{policy}");
    }
}

#[test]
fn choosing_a_victim_looks_at_few_keys_however_many_there_are() {
    for slots in [1_000, 100_000] {
        let mut lru = Lru::new(slots);
        let key = |i: usize| ExpertKey::new((i / 1000) as u16, (i % 1000) as u16);
        (0..slots).for_each(|i| lru.insert(key(i), Epoch(1)));
        let mut looks = 0;
        // Nothing is pinned: the first key is taken.
        let first = lru.victim(Epoch(2), &mut |_| {
            looks += 1;
            false
        });
        assert_eq!((first, looks), (Some(key(0)), 1));
        // Everything is pinned: the search ends at the first key of the running epoch that is free.
        looks = 0;
        let second = lru.victim(Epoch(1), &mut |k| {
            looks += 1;
            k == key(1)
        });
        assert_eq!((second, looks), (Some(key(2)), 2));
    }
}

proptest! {
    /// Contents after any routes equal what a scan over the whole history says.
    #[test]
    fn directory_equals_history_scan(
        slots in 4..20usize,
        routes in prop::collection::vec((0..3u16, prop::collection::btree_set(0..8u16, 1..5)), 1..60),
    ) {
        let mut d = directory(&[shape(3, 8, slots)]);
        let mut cached: Vec<ExpertKey> = Vec::new(); // oldest use first
        let mut expect = sim::Tally::default();
        let mut token: Vec<ExpertKey> = Vec::new();
        let mut last = None;
        for (layer, set) in &routes {
            if last.is_none_or(|l| layer <= l) { token.clear(); }
            last = Some(layer);
            let keys: Vec<_> = set.iter().map(|&e| ExpertKey::new(*layer, e)).collect();
            let (hit, missed): (Vec<_>, Vec<_>) = keys.iter().copied().partition(|k| cached.contains(k));
            cached.retain(|k| !hit.contains(k));
            cached.extend(&hit);
            token.extend(&hit);
            for &k in &missed {
                if cached.len() == slots {
                    let free = |c: &&ExpertKey| !keys.contains(c);
                    let leaves = cached.iter().filter(free).find(|c| !token.contains(c));
                    let leaves = *leaves.or(cached.iter().find(free)).unwrap();
                    cached.retain(|c| *c != leaves);
                    expect.evictions += 1;
                }
                cached.push(k);
                token.push(k);
            }
            expect.requests += 1;
            expect.hits += hit.len() as u64;
            expect.misses += missed.len() as u64;
            expect.all_hit += u64::from(missed.is_empty());
        }
        let ids: Vec<(LayerIdx, Vec<ExpertIdx>)> =
            routes.iter().map(|(l, s)| (LayerIdx(*l), s.iter().map(|&e| ExpertIdx(e)).collect())).collect();
        let tally = sim::replay(&mut d, ids.iter().map(|(l, i)| (*l, i.as_slice()))).unwrap();
        prop_assert_eq!(tally, expect);
        for layer in 0..3 {
            for expert in 0..8 {
                let key = ExpertKey::new(layer, expert);
                prop_assert_eq!(d.contains(key), cached.contains(&key));
            }
        }
    }
}
