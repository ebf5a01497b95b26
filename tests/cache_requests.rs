//! What one caller sees of the expert cache: bytes, order, counters, equality with the simulator, preload.
//! Owns no model. Surprising fact: every test reads through the fake reader or a real file, none through a mock of the cache.

mod cache_rig;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use cache_policy::{Phase, sim};
use cache_rig::*;
use ds4::storage::expert_cache::*;
use ds4::storage::reader::fake::{FakeFault, FakeOptions};
use ds4::storage::reader::*;
use ds4::units::{ExpertIdx, ExpertKey, LayerIdx};
use proptest::prelude::*;

/// A walk over tokens as a model makes it: all layers in turn, `top_k` experts each; now and then a wide wave.
fn walk(seed: u64, tokens: usize, top_k: usize, wave: usize) -> Vec<(LayerIdx, Vec<ExpertIdx>, Phase)> {
    let mut random = Random(seed);
    let mut routes = Vec::new();
    for _ in 0..tokens {
        let (phase, count) = if random.below(5) == 0 { (Phase::Prefill, wave) } else { (Phase::Decode, top_k) };
        for layer in 0..LAYERS {
            routes.push((LayerIdx(layer), random.ids(count), phase));
        }
    }
    routes
}

fn check_walk(cache: &ExpertCache, image: &[u8], slots: (usize, usize), seed: u64) {
    let routes = walk(seed, 40, 3, 6);
    let mut twin = directory(slots.0, slots.1);
    let (mut prefill, mut decode) = (sim::Tally::default(), sim::Tally::default());
    for (layer, ids, phase) in &routes {
        take_all(cache, image, layer.0, ids, *phase).unwrap();
        let one = sim::replay(&mut twin, [(*layer, ids.as_slice())]).unwrap();
        let sum = if *phase == Phase::Prefill { &mut prefill } else { &mut decode };
        sum.requests += one.requests;
        sum.hits += one.hits;
        sum.misses += one.misses;
        sum.evictions += one.evictions;
        sum.all_hit += one.all_hit;
    }
    let stats = cache.stats();
    assert_eq!((stats.prefill.tally(), stats.decode.tally()), (prefill, decode));
    let total = stats.total();
    assert!(total.misses > 0 && total.hits > 0, "the walk must do both: {total:?}");
    for key in cache.all_keys() {
        assert_eq!(cache.contains(key), twin.contains(key), "{key}");
    }
    assert_at_rest(cache);
}

#[test]
fn live_equals_simulated_at_every_size_and_alignment() {
    let image = image();
    for alignment in [Alignment::NONE, Alignment { offset: 512, memory: 512 }, Alignment { offset: 4096, memory: 512 }]
    {
        for (large, small) in [(6, 9), (6, 20), (12, 40), (16, 48)] {
            let reader = fake(FakeOptions { alignment, ..rough(3) });
            let cache = cache(reader, large, small);
            check_walk(&cache, &image, (large as usize, small as usize), large * 100 + small);
        }
    }
}

#[test]
fn real_files_give_the_same_bytes() {
    let image = image();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, &image).unwrap();
    for io in [ReaderChoice::Pread, ReaderChoice::Auto] {
        for direct in [DirectChoice::Off, DirectChoice::Auto] {
            let reader = open_reader(&path, &ReaderOptions { io, direct, ..ReaderOptions::default() }).unwrap();
            check_walk(&cache(reader, 6, 9), &image, (6, 9), 11);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_walk_equals_the_simulator(seed in any::<u64>(), large in 6..17u64, small in 6..49u64) {
        let cache = cache(fake(quick()), large, small);
        check_walk(&cache, &image(), (large as usize, small as usize), seed);
    }
}

#[test]
fn present_experts_come_first_then_landing_order() {
    let image = image();
    // One worker: reads land in the order in which they were submitted.
    let cache = cache(fake(FakeOptions { depth: 1, ..quick() }), 6, 12);
    take_all(&cache, &image, 0, &ids(&[7, 3]), Phase::Decode).unwrap();
    let order = take_all(&cache, &image, 0, &ids(&[9, 3, 1, 7, 2]), Phase::Decode).unwrap();
    assert_eq!(order, [1, 3, 0, 2, 4]);
}

#[test]
fn requests_for_the_same_expert_join_one_read() {
    let image = image();
    let reader = fake(quick());
    let cache = cache(reader.clone(), 6, 12);
    reader.hold();
    let (layer, wanted) = (LayerIdx(1), ids(&[5, 6]));
    let mut first = cache.request(layer, &wanted, Phase::Decode).unwrap();
    let mut second = cache.request(layer, &wanted, Phase::Prefill).unwrap();
    assert_eq!((first.pending(), second.pending()), (2, 2));
    reader.release();
    for lease in [&mut first, &mut second] {
        while let Some(position) = lease.next_ready().unwrap() {
            check_bytes(&image, layer, wanted[position], lease.slices(position));
        }
    }
    let stats = cache.stats();
    assert_eq!((stats.decode.misses, stats.prefill.hits, stats.prefill.joined), (2, 2, 2));
    assert_eq!(reader.counters().snapshot().reads, 6);
    assert_eq!(stats.decode.read_bytes, 2 * (1001 + 1001 + 1517));
    drop((first, second));
    assert_at_rest(&cache);
}

#[test]
fn a_lease_dropped_early_leaves_its_reads_to_the_next() {
    let image = image();
    let reader = fake(quick());
    let cache = cache(reader.clone(), 6, 12);
    reader.hold();
    drop(cache.request(LayerIdx(0), &ids(&[1, 2]), Phase::Decode).unwrap());
    assert_eq!((cache.stats().slots_held, cache.stats().slots_filling), (0, 2));
    reader.release();
    take_all(&cache, &image, 0, &ids(&[1, 2]), Phase::Decode).unwrap();
    let stats = cache.stats().decode;
    assert_eq!((stats.misses, stats.hits), (2, 2));
    assert_eq!(reader.counters().snapshot().reads, 6);
}

#[test]
fn slots_in_flight_and_held_are_never_victims() {
    let image = image();
    let reader = fake(quick());
    let cache = cache(reader.clone(), 6, 6);
    let wanted = ids(&[0, 1, 2]);
    let mut lease = cache.request(LayerIdx(0), &wanted, Phase::Decode).unwrap();
    for round in 0..40u16 {
        let other = ids(&[round % 16, (round + 5) % 16, (round + 9) % 16]);
        take_all(&cache, &image, 1, &other, Phase::Decode).unwrap();
    }
    while let Some(position) = lease.next_ready().unwrap() {
        check_bytes(&image, LayerIdx(0), wanted[position], lease.slices(position));
    }
    drop(lease);
    assert_at_rest(&cache);
}

#[test]
fn a_request_beyond_what_leases_leave_names_the_cause() {
    let image = image();
    let cache = cache_with(fake(quick()), 6, 6, Duration::from_millis(60));
    let lease = cache.request(LayerIdx(0), &ids(&[0, 1, 2, 3]), Phase::Decode).unwrap();
    let before = cache.stats();
    let err = cache.request(LayerIdx(1), &ids(&[0, 1, 2]), Phase::Decode).err().unwrap();
    assert!(matches!(err, CacheError::Crowded { asked: 3, held: 4, slots: 6, .. }), "{err}");
    assert_eq!(cache.stats().decode.tally(), before.decode.tally());
    take_all(&cache, &image, 1, &ids(&[0, 1]), Phase::Decode).unwrap();
    drop(lease);
    take_all(&cache, &image, 1, &ids(&[0, 1, 2, 3, 4, 5]), Phase::Decode).unwrap();
    let err = cache.request(LayerIdx(0), &ids(&[0, 1, 2, 3, 4, 5, 6]), Phase::Prefill).err().unwrap();
    assert!(err.to_string().contains("7 experts of layer 0 requested at once"), "{err}");
    let err = cache.request(LayerIdx(9), &ids(&[0]), Phase::Decode).err().unwrap();
    assert!(err.to_string().contains("layer 9 has no routed experts"), "{err}");
    assert_eq!(cache.lease_max(), 6);
}

#[test]
fn preload_takes_the_first_keys_and_the_last_leave_first() {
    let image = image();
    let reader = fake(quick());
    let cache = cache(reader.clone(), 6, 9);
    // Most wanted first; more than fit, one named twice.
    let mut keys = vec![ExpertKey::new(3, 15), ExpertKey::new(0, 2), ExpertKey::new(3, 15)];
    keys.extend(all_of(1));
    let mut seen = Vec::new();
    let report = cache
        .preload(&keys, &mut |p| {
            seen.push((p.experts_done, p.experts_total));
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!((report.experts, report.bytes.0, report.is_cut_short), (9, 9 * 3519, false));
    assert_eq!((seen.first(), seen.last()), (Some(&(0, 9)), Some(&(9, 9))));
    assert!(seen.is_sorted());
    assert!(cache.contains(ExpertKey::new(1, 6)) && !cache.contains(ExpertKey::new(1, 7)));
    // Two strangers push out the two least wanted.
    take_all(&cache, &image, 0, &ids(&[8, 9]), Phase::Decode).unwrap();
    for (expert, stays) in [(4, true), (5, false), (6, false)] {
        assert_eq!(cache.contains(ExpertKey::new(1, expert)), stays, "{expert}");
    }
    take_all(&cache, &image, 3, &ids(&[15]), Phase::Decode).unwrap();
    let stats = cache.stats();
    assert_eq!((stats.preloaded, stats.decode.hits, stats.decode.misses), (9, 1, 2));
    let again = cache.preload(&keys, &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(again, PreloadReport::default());
    let err = cache.preload(&[ExpertKey::new(0, 99)], &mut |_| ControlFlow::Continue(())).unwrap_err();
    assert!(err.to_string().contains("layer 0 expert 99 does not exist"), "{err}");
}

#[test]
fn everything_preloaded_never_reads_again() {
    let image = image();
    let reader = fake(rough(9));
    let cache = cache(reader.clone(), 16, 48);
    let report = cache.preload(&cache.all_keys(), &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(report.experts, 64);
    let reads = reader.counters().snapshot().reads;
    for (layer, ids, phase) in walk(5, 20, 3, 6) {
        take_all(&cache, &image, layer.0, &ids, phase).unwrap();
    }
    assert_eq!(reader.counters().snapshot().reads, reads);
    let total = cache.stats().total();
    assert_eq!((total.misses, total.all_hit), (0, total.requests));
}

#[test]
fn a_preload_can_be_ended_early_and_taken_up_again() {
    let image = image();
    let cache = cache(fake(quick()), 16, 48);
    let mut calls = 0;
    let stop_at = &mut |_: PreloadProgress| {
        calls += 1;
        if calls == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let report = cache.preload(&cache.all_keys(), stop_at).unwrap();
    assert!(report.is_cut_short && report.experts == 32, "{report:?}");
    assert_at_rest(&cache);
    assert_eq!(cache.stats().preload_failed, 0);
    let rest = cache.preload(&cache.all_keys(), &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(rest.experts, 32);
    take_all(&cache, &image, 2, &ids(&[0, 15]), Phase::Decode).unwrap();
    let none = cache.preload(&[], &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(none, PreloadReport::default());
}

#[test]
fn requests_are_served_while_a_preload_runs() {
    let image = image();
    let reader = fake(FakeOptions { delay: Duration::from_millis(1), depth: 2, ..quick() });
    let cache = cache(reader, 16, 48);
    std::thread::scope(|scope| {
        scope.spawn(|| cache.preload(&cache.all_keys(), &mut |_| ControlFlow::Continue(())).unwrap());
        for (layer, ids, phase) in walk(2, 10, 3, 6) {
            take_all(&cache, &image, layer.0, &ids, phase).unwrap();
        }
    });
    assert_at_rest(&cache);
    assert_eq!(cache.stats().slots_valid, 64);
}

#[test]
fn a_failed_preload_names_the_expert_and_leaves_the_cache_whole() {
    let image = image();
    let reader = fake(quick());
    let cache = cache(reader.clone(), 16, 48);
    let extent = layout()[2].extents(ExpertIdx(3))[1];
    reader.add_fault(FakeFault { offset: extent.offset + extent.len / 2, errno: libc::EIO, times: 1 });
    let err = cache.preload(&cache.all_keys(), &mut |_| ControlFlow::Continue(())).unwrap_err();
    let text = err.to_string();
    for part in ["layer 2 expert 3 (up)", "fake.gguf", &format!("offset {}", extent.offset)] {
        assert!(text.contains(part), "{part:?} is missing in {text:?}");
    }
    assert_at_rest(&cache);
    cache.preload(&cache.all_keys(), &mut |_| ControlFlow::Continue(())).unwrap();
    take_all(&cache, &image, 2, &ids(&[3]), Phase::Decode).unwrap();
    assert_eq!((cache.stats().preload_failed, cache.stats().decode.misses), (1, 0));
}

#[test]
fn routes_are_recorded_in_the_order_they_are_served() {
    type Routes = Vec<(LayerIdx, Vec<ExpertIdx>, Phase)>;
    struct Record(Arc<std::sync::Mutex<Routes>>);
    impl RouteSink for Record {
        fn route(&mut self, phase: Phase, layer: LayerIdx, ids: &[ExpertIdx], overlap: usize) {
            assert_eq!(overlap, 0, "every lease ends before the next begins");
            self.0.lock().unwrap().push((layer, ids.to_vec(), phase));
        }
    }
    let image = image();
    let cache = cache(fake(quick()), 6, 9);
    let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
    assert!(cache.set_route_sink(Some(Box::new(Record(seen.clone())))).is_none());
    let routes = walk(1, 5, 3, 6);
    for (layer, ids, phase) in &routes {
        take_all(&cache, &image, layer.0, ids, *phase).unwrap();
    }
    // Refused requests leave no trace.
    assert!(cache.request(LayerIdx(0), &ids(&[1, 1]), Phase::Decode).is_err());
    assert!(cache.set_route_sink(None).is_some());
    take_all(&cache, &image, 0, &ids(&[0]), Phase::Decode).unwrap();
    assert_eq!(*seen.lock().unwrap(), routes);
}

#[test]
fn waits_are_counted_where_they_happen() {
    let image = image();
    let cache = cache(fake(FakeOptions { delay: Duration::from_millis(3), ..quick() }), 6, 9);
    take_all(&cache, &image, 0, &ids(&[0, 1]), Phase::Decode).unwrap();
    let stats = cache.stats();
    assert!(stats.decode.waits >= 1 && stats.decode.wait_ns >= 2_000_000, "{:?}", stats.decode);
    assert_eq!((stats.prefill.waits, stats.prefill.wait_ns), (0, 0));
    let before = stats.decode;
    take_all(&cache, &image, 0, &ids(&[0, 1]), Phase::Decode).unwrap();
    let after = cache.stats().decode;
    assert_eq!((after.waits, after.wait_ns, after.all_hit), (before.waits, before.wait_ns, before.all_hit + 1));
}
