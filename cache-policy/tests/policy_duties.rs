//! Every known policy against the duties of the trait, and the simple ones against brute-force twins.
//! Owns the twins; never shares code with what it checks. Surprising fact: two policies degenerate to LRU, which checks
//! their bookkeeping against a third implementation.

use std::collections::BTreeMap;

use cache_policy::policies::{self, Clock, KNOWN, Lfu, S3Fifo, Sieve, WindowRandom};
use cache_policy::{Epoch, ExpertKey, Lru, Policy, by_name};
use proptest::prelude::*;

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
        8 => id.clone().prop_map(Step::Use),
        1 => id.clone().prop_map(Step::Preload),
        1 => (id.clone(), 0..4u64).prop_map(|(i, e)| Step::Pin(i, e)),
        2 => Just(Step::NextEpoch),
        3 => prop::collection::vec(id.clone(), 0..4).prop_map(Step::Victim),
        1 => id.prop_map(Step::Remove),
    ]
}

const SLOTS: usize = 10;

fn key(id: u16) -> ExpertKey {
    ExpertKey::new(id / 8, id % 8)
}

fn keys(ids: &[u16]) -> Vec<ExpertKey> {
    ids.iter().map(|&i| key(i)).collect()
}

/// What the trait promises, kept as plainly as possible.
#[derive(Default)]
struct Ledger {
    /// Key, end of its pin, whether it is a preload that was never used.
    present: BTreeMap<ExpertKey, (Epoch, bool)>,
    latest: Epoch,
}

impl Ledger {
    fn enter(&mut self, k: ExpertKey, e: Epoch) {
        self.present.insert(k, (e, e < self.latest || e == Epoch(0)));
        self.latest = self.latest.max(e);
    }

    fn check_victim(&mut self, now: Epoch, held: &[ExpertKey], victim: Option<ExpertKey>) -> Result<(), String> {
        let free: Vec<_> = self.present.iter().filter(|(k, _)| !held.contains(k)).map(|(k, v)| (*k, *v)).collect();
        let unpinned: Vec<_> = free.iter().filter(|(_, v)| v.0 < now).collect();
        let Some(victim) = victim else {
            return if free.is_empty() { Ok(()) } else { Err("an unheld key stayed".into()) };
        };
        let Some(at) = self.present.remove(&victim) else { return Err(format!("{victim} was not present")) };
        if held.contains(&victim) {
            return Err(format!("{victim} was held"));
        }
        if at.0 >= now && !unpinned.is_empty() {
            return Err(format!("pinned {victim} left before unpinned ones"));
        }
        if !at.1 && unpinned.iter().any(|(_, v)| v.1) {
            return Err(format!("{victim} left before an unused preload"));
        }
        Ok(())
    }
}

/// Drives `policy` and whatever `after` keeps beside it through `steps`.
fn drive(
    policy: &mut dyn Policy,
    steps: &[Step],
    after: &mut dyn FnMut(&Step, Epoch, Option<ExpertKey>),
) -> Result<(), String> {
    let (mut ledger, mut epoch) = (Ledger::default(), Epoch(1));
    for step in steps {
        let mut victim = None;
        match *step {
            Step::Use(id) if policy.contains(key(id)) => {
                policy.touch(key(id), epoch);
                let pinned = ledger.present[&key(id)].0;
                ledger.present.insert(key(id), (pinned.max(epoch), false));
                ledger.latest = ledger.latest.max(epoch);
            }
            Step::Use(id) if policy.len() < SLOTS => {
                policy.insert(key(id), epoch);
                ledger.enter(key(id), epoch);
            }
            Step::Preload(id) if policy.len() < SLOTS && !policy.contains(key(id)) => {
                policy.insert(key(id), Epoch(0));
                ledger.enter(key(id), Epoch(0));
            }
            Step::Pin(id, more) if policy.contains(key(id)) => {
                policy.pin(key(id), Epoch(epoch.0 + more));
                let entry = ledger.present.get_mut(&key(id)).expect("present in both");
                entry.0 = entry.0.max(Epoch(epoch.0 + more));
            }
            Step::Use(_) | Step::Preload(_) | Step::Pin(..) => continue,
            Step::NextEpoch => epoch.0 += 1,
            Step::Victim(ref held) => {
                let held = keys(held);
                victim = policy.victim(epoch, &mut |k| held.contains(&k));
                ledger.check_victim(epoch, &held, victim)?;
            }
            Step::Remove(id) => {
                if policy.remove(key(id)) != ledger.present.remove(&key(id)).is_some() {
                    return Err(format!("remove of {} disagrees", key(id)));
                }
            }
        }
        if policy.len() != ledger.present.len()
            || (0..24).any(|i| policy.contains(key(i)) != ledger.present.contains_key(&key(i)))
        {
            return Err(format!("contents differ after {step:?}"));
        }
        after(step, epoch, victim);
    }
    Ok(())
}

proptest! {
    #[test]
    fn every_policy_keeps_the_duties(steps in prop::collection::vec(step(), 1..300)) {
        for (name, make) in KNOWN {
            let mut policy = make(SLOTS);
            let outcome = drive(policy.as_mut(), &steps, &mut |_, _, _| ());
            prop_assert!(outcome.is_ok(), "{name}: {}", outcome.unwrap_err());
        }
    }

    #[test]
    fn the_same_uses_give_the_same_victims(steps in prop::collection::vec(step(), 1..200)) {
        for (name, make) in KNOWN {
            let victims = || {
                let (mut policy, mut all) = (make(SLOTS), Vec::new());
                drive(policy.as_mut(), &steps, &mut |_, _, victim| all.extend(victim)).map(|()| all)
            };
            prop_assert_eq!(victims(), victims(), "{}", name);
        }
    }

    /// A window of one key leaves no choice: LRU.
    #[test]
    fn a_window_of_one_is_lru(uses in prop::collection::vec((0..24u16, any::<bool>()), 1..200)) {
        let (mut window, mut lru) = (WindowRandom::with_window(SLOTS, 1, 7), Lru::new(SLOTS));
        let mut epoch = Epoch(1);
        for (id, is_next) in uses {
            epoch.0 += u64::from(is_next);
            for policy in [&mut window as &mut dyn Policy, &mut lru] {
                serve(policy, key(id), epoch);
            }
            prop_assert_eq!(window.oldest_first(), lru.oldest_first());
        }
    }

    /// Victims of the decayed count equal a recount of the whole history.
    #[test]
    fn lfu_equals_a_recount(
        half_life in 1..9u32,
        uses in prop::collection::vec((0..24u16, any::<bool>()), 1..200),
    ) {
        let mut lfu = Lfu::with_half_life(SLOTS, half_life);
        let (mut history, mut cached, mut epoch) = (Vec::new(), Vec::new(), 1u64);
        for (id, is_next) in uses {
            epoch += u64::from(is_next);
            let score = |k: ExpertKey, history: &[(ExpertKey, u64)]| -> f64 {
                let own = history.iter().filter(|h| h.0 == k);
                own.map(|h| 0.5f64.powf((epoch - h.1) as f64 / f64::from(half_life))).sum()
            };
            if !cached.contains(&key(id)) {
                if cached.len() == SLOTS {
                    let victim = lfu.victim(Epoch(epoch), &mut |_| false).expect("nothing is held");
                    let used_now = |k: &ExpertKey| history.contains(&(*k, epoch));
                    let free: Vec<_> = cached.iter().filter(|k| !used_now(k)).copied().collect();
                    let pool = if free.is_empty() { cached.clone() } else { free };
                    let lowest = pool.iter().map(|&k| score(k, &history)).fold(f64::INFINITY, f64::min);
                    prop_assert!(pool.contains(&victim));
                    // The policy counts in f32: a victim within rounding of the lowest is as good.
                    prop_assert!(score(victim, &history) <= lowest * (1.0 + 1e-5));
                    cached.retain(|k| *k != victim);
                }
                lfu.insert(key(id), Epoch(epoch));
                cached.push(key(id));
            } else {
                lfu.touch(key(id), Epoch(epoch));
            }
            history.push((key(id), epoch));
            let recount = score(key(id), &history);
            prop_assert!((f64::from(lfu.uses(key(id))) / recount - 1.0).abs() < 1e-5);
        }
    }
}

/// One use of `key`, evicting when full.
fn serve(policy: &mut dyn Policy, key: ExpertKey, epoch: Epoch) -> Option<ExpertKey> {
    if policy.contains(key) {
        policy.touch(key, epoch);
        return None;
    }
    let victim = if policy.len() == SLOTS { policy.victim(epoch, &mut |_| false) } else { None };
    policy.insert(key, epoch);
    victim
}

/// Serves `ids`, each in its own epoch, and returns who left.
fn serve_all(policy: &mut dyn Policy, ids: &[u16]) -> Vec<ExpertKey> {
    ids.iter().enumerate().filter_map(|(i, &id)| serve(policy, key(id), Epoch(1 + i as u64))).collect()
}

fn marked(list: &[(u16, u8)]) -> Vec<(ExpertKey, u8)> {
    list.iter().map(|&(id, mark)| (key(id), mark)).collect()
}

#[test]
fn clock_spares_used_keys_once() {
    let mut clock = Clock::new(SLOTS);
    let left = serve_all(&mut clock, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 2, 10, 11]);
    assert_eq!(left, keys(&[1, 3]));
    let ring = [(4, 0), (5, 0), (6, 0), (7, 0), (8, 0), (9, 0), (0, 0), (10, 0), (2, 0), (11, 0)];
    assert_eq!(clock.from_hand(), marked(&ring));
}

#[test]
fn sieve_spares_used_keys_in_place() {
    let mut sieve = Sieve::new(SLOTS);
    let left = serve_all(&mut sieve, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 2, 9, 10, 11]);
    assert_eq!(left, keys(&[1, 3]));
    let queue = [(0, 0), (2, 0), (4, 0), (5, 0), (6, 0), (7, 0), (8, 0), (9, 1), (10, 0), (11, 0)];
    assert_eq!(sieve.oldest_first(), marked(&queue));
    assert_eq!(sieve.hand(), Some(key(4)));
    // The hand stays where it is when its key is taken away.
    assert!(sieve.remove(key(4)));
    assert_eq!(sieve.hand(), Some(key(5)));
}

#[test]
fn s3_fifo_promotes_by_two_uses_and_by_return() {
    let mut s3 = S3Fifo::new(SLOTS);
    // 0 is used twice more on probation; 1 is not; both meet the full cache.
    let left = serve_all(&mut s3, &[0, 1, 0, 0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
    assert_eq!(left, keys(&[1, 2]));
    assert_eq!(s3.main(), marked(&[(0, 0)]));
    let small = [(3, 0), (4, 0), (5, 0), (6, 0), (7, 0), (8, 0), (9, 0), (10, 0), (11, 0)];
    assert_eq!(s3.small(), marked(&small));
    assert!(s3.is_ghost(key(1)) && s3.is_ghost(key(2)) && !s3.is_ghost(key(3)));
    // A ghost returns straight to the main queue.
    let mut epoch = Epoch(100);
    assert_eq!(serve(&mut s3, key(1), epoch), Some(key(3)));
    assert_eq!(s3.main(), marked(&[(0, 0), (1, 0)]));
    // Ghosts are forgotten after as many departures as the main queue has slots (9).
    for id in 12..21 {
        epoch.0 += 1;
        serve(&mut s3, key(id), epoch);
    }
    assert!(!s3.is_ghost(key(2)) && !s3.is_ghost(key(3)));
}

#[test]
fn window_random_draws_from_the_oldest_only() {
    let mut window = WindowRandom::with_window(SLOTS, 3, 42);
    let ids: Vec<u16> = (0..24).collect();
    let left = serve_all(&mut window, &ids);
    assert_eq!(left.len(), 14);
    // The i-th victim is among the three oldest of what remained: its id is at most i + 2.
    assert!(left.iter().enumerate().all(|(i, k)| (0..i + 3).any(|id| key(id as u16) == *k)));
    assert_ne!(left, keys(&(0..14).collect::<Vec<_>>()), "a draw that is always the oldest is no draw");
}

#[test]
fn names_are_found_and_unknown_ones_are_told_the_list() {
    for (name, make) in KNOWN {
        assert_eq!(make(4).name(), *name);
        assert_eq!(by_name(name).expect("known")(4).name(), *name);
    }
    assert_eq!(by_name("auto").expect("known")(4).name(), policies::DEFAULT);
    let told = by_name("mru").map(|_| ()).expect_err("unknown").to_string();
    let list = "lru, lfu, clock, s3-fifo, sieve, window-random, layer-aware, adaptive";
    assert_eq!(told, format!("unknown cache policy 'mru'; known: {list}"));
}
