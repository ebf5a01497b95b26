//! Reads ahead of requests: joined, hurried, taken back, refused; and what becomes of a slot whose memory a reader keeps.
//! Owns no predictor. Surprising fact: most tests hold the fake drive still, so that what is "under way" is certain.

mod cache_rig;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cache_policy::Phase;
use cache_rig::*;
use ds4::obs::ReadCounters;
use ds4::storage::reader::fake::{FakeFault, FakeOptions, FakeReader};
use ds4::storage::reader::*;
use ds4::units::{ExpertKey, LayerIdx};

const RESERVE: usize = 2;

fn key(expert: u16) -> ExpertKey {
    ExpertKey::new(0, expert)
}

/// One worker that takes 2 ms a read.
fn slow() -> FakeOptions {
    FakeOptions { depth: 1, delay: Duration::from_millis(2), ..quick() }
}

fn settle(cache: &ds4::storage::expert_cache::ExpertCache) {
    while cache.stats().slots_filling > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn what_was_read_ahead_is_a_hit_and_counted_once() {
    let (image, reader) = (image(), fake(quick()));
    let cache = cache(reader.clone(), 6, 12);
    cache.begin_token(&[]);
    assert_eq!(cache.read_ahead(&[key(3), key(4), key(5)], 8, RESERVE), 3);
    settle(&cache);
    take_all(&cache, &image, 0, &ids(&[3, 4, 9]), Phase::Decode).unwrap();
    let stats = cache.stats();
    assert_eq!((stats.decode.hits, stats.decode.joined, stats.decode.misses), (2, 0, 1));
    let ahead = stats.lookahead;
    assert_eq!((ahead.issued, ahead.useful, ahead.late, ahead.wasted), (3, 2, 0, 0), "the third is still open");
    assert_eq!(stats.lookahead_bytes, 3 * 3519);
    assert_eq!(reader.counters().snapshot().reads, 12);
    // Strangers push the unused one out first.
    let others: Vec<u16> = (0..9).collect();
    take_all(&cache, &image, 1, &ids(&others), Phase::Prefill).unwrap();
    assert!(!cache.contains(key(5)) && cache.contains(key(3)));
    assert_eq!(cache.stats().lookahead.wasted, 1);
    assert_at_rest(&cache);
}

#[test]
fn a_request_that_joins_a_read_ahead_hurries_it() {
    let (image, reader) = (image(), fake(slow()));
    let cache = cache(reader.clone(), 6, 20);
    reader.hold();
    cache.begin_token(&[]);
    let keys: Vec<ExpertKey> = (0..8).map(key).collect();
    assert_eq!(cache.read_ahead(&keys, 8, RESERVE), 8);
    let wanted = ids(&[7]);
    let mut lease = cache.request(LayerIdx(0), &wanted, Phase::Decode).unwrap();
    assert_eq!(lease.pending(), 1);
    reader.release();
    lease.next_ready().unwrap();
    check_bytes(&image, LayerIdx(0), wanted[0], lease.slices(0));
    assert!(cache.stats().slots_filling >= 5, "it passed the others: {:?}", cache.stats());
    drop(lease);
    settle(&cache);
    let stats = cache.stats();
    assert_eq!((stats.lookahead.issued, stats.lookahead.late, stats.decode.joined), (8, 1, 1));
    assert_at_rest(&cache);
}

#[test]
fn a_request_that_joins_a_preload_hurries_it() {
    let (image, reader) = (image(), fake(slow()));
    let cache = Arc::new(cache(reader.clone(), 6, 48));
    reader.hold();
    let loading = std::thread::spawn({
        let cache = Arc::clone(&cache);
        // Two batches: the second one is behind the first in the queue.
        move || {
            cache.preload(&all_of(0).into_iter().chain(all_of(1)).chain(all_of(3)).collect::<Vec<_>>(), &mut |_| {
                std::ops::ControlFlow::Continue(())
            })
        }
    });
    while cache.stats().slots_filling < 48 {
        std::thread::sleep(Duration::from_millis(1));
    }
    // Let both batches reach the reader.
    std::thread::sleep(Duration::from_millis(30));
    let wanted = ids(&[15]);
    let mut lease = cache.request(LayerIdx(1), &wanted, Phase::Decode).unwrap();
    reader.release();
    lease.next_ready().unwrap();
    check_bytes(&image, LayerIdx(1), wanted[0], lease.slices(0));
    assert_eq!(reader.counters().snapshot().failed, 0);
    drop(lease);
    let report = loading.join().unwrap().unwrap();
    assert_eq!((report.experts, cache.stats().preload_used, cache.stats().preload_hits), (48, 1, 1));
    assert_at_rest(&cache);
}

#[test]
fn stale_reads_are_taken_back_and_may_be_asked_for_again() {
    let (image, reader) = (image(), fake(slow()));
    let cache = Arc::new(cache(reader.clone(), 6, 20));
    reader.hold();
    cache.begin_token(&[]);
    let keys: Vec<ExpertKey> = (0..6).map(key).collect();
    cache.read_ahead(&keys, 8, RESERVE);
    // One is wanted by now, the others are not.
    let mut joined = cache.request(LayerIdx(0), &ids(&[5]), Phase::Decode).unwrap();
    cache.cancel_ahead(&|k| k != key(4));
    // A request for what is being taken back waits and reads it anew.
    let asked = std::thread::spawn({
        let (cache, image) = (Arc::clone(&cache), image.clone());
        move || take_all(&cache, &image, 0, &ids(&[0, 1, 2]), Phase::Decode).map(|order| order.len())
    });
    std::thread::sleep(Duration::from_millis(20));
    reader.release();
    assert_eq!(asked.join().unwrap().unwrap(), 3);
    joined.next_ready().unwrap();
    check_bytes(&image, LayerIdx(0), ids(&[5])[0], joined.slices(0));
    drop(joined);
    settle(&cache);
    let stats = cache.stats();
    assert!(stats.lookahead_cancelled >= 3 && stats.lookahead_cancelled <= 4, "{stats:?}");
    assert_eq!((stats.lookahead.issued, stats.lookahead.late, stats.lookahead_failed), (6, 1, 0));
    assert_eq!(stats.decode.failed, 0);
    assert!(cache.contains(key(4)) && !cache.contains(key(3)));
    assert_at_rest(&cache);
}

#[test]
fn a_read_ahead_leaves_room_for_requests() {
    let reader = fake(quick());
    let cache = cache(reader.clone(), 6, 6);
    reader.hold();
    cache.begin_token(&[]);
    let keys: Vec<ExpertKey> = (0..6).map(key).collect();
    assert_eq!(cache.read_ahead(&keys, 100, 4), 6, "all were dealt with");
    assert_eq!(cache.stats().slots_filling, 2, "four slots stay clear");
    assert_eq!(cache.read_ahead(&[key(9)], 2, 0), 0, "two under way are enough");
    let lease = cache.request(LayerIdx(1), &ids(&[0, 1, 2, 3]), Phase::Decode).unwrap();
    reader.release();
    drop(lease);
    settle(&cache);
    assert_at_rest(&cache);
}

#[test]
fn a_failed_read_ahead_is_only_counted() {
    let (image, reader) = (image(), fake(quick()));
    let cache = cache(reader.clone(), 6, 12);
    let offset = layout()[0].extents(ids(&[2])[0])[1].offset;
    reader.add_fault(FakeFault { offset, errno: libc::EIO, times: 1 });
    cache.begin_token(&[]);
    cache.read_ahead(&[key(2)], 8, RESERVE);
    settle(&cache);
    let stats = cache.stats();
    assert_eq!((stats.lookahead_failed, stats.lookahead.wasted), (1, 1));
    take_all(&cache, &image, 0, &ids(&[2]), Phase::Decode).unwrap();
    assert_eq!(cache.stats().decode.misses, 1);
    assert_at_rest(&cache);
}

#[test]
fn guesses_and_requests_of_several_threads_give_the_right_bytes() {
    let image = image();
    for seed in 0..3 {
        let cache = cache(fake(rough(seed)), 8, 14);
        std::thread::scope(|scope| {
            for thread in 0..2u64 {
                let (cache, image) = (&cache, &image);
                scope.spawn(move || {
                    let mut random = Random(seed * 10 + thread);
                    for _ in 0..60 {
                        cache.begin_token(&[ExpertKey::new(1, random.below(16) as u16)]);
                        for layer in 0..LAYERS {
                            let guess: Vec<ExpertKey> =
                                random.ids(3).into_iter().map(|e| ExpertKey::new(layer, e.0)).collect();
                            cache.read_ahead(&guess, 4, 4);
                            if random.below(3) == 0 {
                                cache.cancel_ahead(&|k| k.layer.0 < layer);
                            }
                            take_all(cache, image, layer, &random.ids(2), Phase::Decode).unwrap();
                        }
                    }
                });
            }
        });
        settle(&cache);
        let stats = cache.stats();
        assert!(stats.lookahead.issued > 0 && stats.decode.failed == 0, "{stats:?}");
        assert_at_rest(&cache);
    }
}

/// A reader that keeps the memory of the next read and reports an error, as a ring does that broke with reads under way.
struct Keeping {
    inner: Arc<FakeReader>,
    is_armed: AtomicBool,
}

impl Reader for Keeping {
    fn submit(&self, mut batch: Vec<ReadRequest>, sink: Arc<dyn ReadSink>) -> BatchId {
        let kept = self.is_armed.swap(false, Ordering::Relaxed).then(|| batch.remove(0));
        if let Some(ReadRequest { extent, label, region, tag, .. }) = kept {
            std::mem::forget(region);
            let at = ReadAt { path: self.path().into(), offset: extent.offset, len: extent.len, label };
            let _ = sink.landed(tag, Err(ReadError::Io { at, errno: libc::EIO }));
        }
        self.inner.submit(batch, sink)
    }

    fn cancel(&self, batch: BatchId) -> usize {
        self.inner.cancel(batch)
    }

    fn promote(&self, batch: BatchId) -> usize {
        self.inner.promote(batch)
    }

    fn alignment(&self) -> Alignment {
        self.inner.alignment()
    }

    fn kind(&self) -> ReaderKind {
        self.inner.kind()
    }

    fn is_direct(&self) -> bool {
        self.inner.is_direct()
    }

    fn notices(&self) -> &[ReaderNotice] {
        self.inner.notices()
    }

    fn counters(&self) -> &ReadCounters {
        self.inner.counters()
    }

    fn check_file(&self) -> Result<(), FileChange> {
        self.inner.check_file()
    }

    fn path(&self) -> &Path {
        self.inner.path()
    }
}

#[test]
fn a_slot_whose_memory_is_kept_is_given_up() {
    let image = image();
    let reader = Arc::new(Keeping { inner: fake(quick()), is_armed: AtomicBool::new(true) });
    let cache = cache(reader, 6, 9);
    assert_eq!(cache.lease_max(), 6);
    // Layer 2 has the class of six slots.
    let error = take_all(&cache, &image, 2, &ids(&[4, 5]), Phase::Decode).unwrap_err().to_string();
    assert!(error.contains("layer 2 expert 4"), "{error}");
    // The same expert again: read into another slot as soon as it is sure that the first one is gone.
    take_all(&cache, &image, 2, &ids(&[4, 5]), Phase::Decode).unwrap();
    let stats = cache.stats();
    assert_eq!((stats.slots_lost, stats.slots, cache.lease_max()), (1, 6 + 9, 5));
    take_all(&cache, &image, 2, &ids(&[0, 1, 2, 3, 4]), Phase::Prefill).unwrap();
    let error = cache.request(LayerIdx(2), &ids(&[0, 1, 2, 3, 4, 5]), Phase::Prefill).err().unwrap().to_string();
    assert!(error.contains("their class has 5 slots"), "{error}");
    assert_at_rest(&cache);
}

#[test]
fn a_hold_for_a_copy_keeps_an_expert_and_counts_nothing() {
    let (image, reader) = (image(), fake(quick()));
    let cache = cache(reader.clone(), 6, 8);
    assert!(cache.hold_present(key(1), 0).is_none(), "it is not there");
    take_all(&cache, &image, 0, &ids(&[0, 1, 2, 3]), Phase::Decode).unwrap();
    let before = cache.stats();
    assert!(cache.hold_present(key(1), 8).is_none(), "requests would be left too few slots");
    let mut held = cache.hold_present(key(1), 7).unwrap();
    assert_eq!((held.next_ready().unwrap(), held.len()), (Some(0), 1));
    let expected = cache.request(LayerIdx(0), &ids(&[1]), Phase::Decode).unwrap();
    let mut expected = expected;
    expected.next_ready().unwrap();
    assert_eq!(held.slices(0), expected.slices(0));
    drop(expected);
    // Strangers push all others out.
    take_all(&cache, &image, 1, &ids(&[0, 1, 2, 3]), Phase::Prefill).unwrap();
    take_all(&cache, &image, 1, &ids(&[4, 5, 6, 7]), Phase::Prefill).unwrap();
    assert!(cache.contains(key(1)) && !cache.contains(key(0)));
    let after = cache.stats();
    assert_eq!(after.decode.requests, before.decode.requests + 1, "the request above");
    drop(held);
    // What was read ahead has been of use once it was copied.
    cache.begin_token(&[]);
    cache.read_ahead(&[key(5)], 8, RESERVE);
    settle(&cache);
    drop(cache.hold_present(key(5), 0).unwrap());
    assert_eq!((cache.stats().lookahead.issued, cache.stats().lookahead.useful), (1, 1));
    assert_at_rest(&cache);
}
