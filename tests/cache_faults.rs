//! The expert cache when reads fail, when the reader misbehaves, and under several threads at once.
//! Owns no happy path. Surprising fact: after every fault the same cache serves the same request, which is the real test.

mod cache_rig;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cache_policy::Phase;
use cache_rig::*;
use ds4::obs::ReadCounters;
use ds4::storage::expert_cache::*;
use ds4::storage::reader::fake::{FakeFault, FakeOptions, FakeReader};
use ds4::storage::reader::request::ReadSink;
use ds4::storage::reader::*;
use ds4::units::{ExpertIdx, LayerIdx};

/// A fault in the middle of one part of an expert.
fn fault(layer: u16, expert: u16, part: usize, times: u32) -> FakeFault {
    let extent = layout()[usize::from(layer)].extents(ExpertIdx(expert))[part];
    FakeFault { offset: extent.offset + extent.len / 2, errno: libc::EIO, times }
}

#[test]
fn a_failed_read_fails_its_request_and_no_other() {
    let image = image();
    let reader = fake(quick());
    let cache = cache(reader.clone(), 6, 9);
    for part in 0..3 {
        reader.add_fault(fault(1, 4, part, 1));
        let err = take_all(&cache, &image, 1, &ids(&[4, 6]), Phase::Decode).unwrap_err();
        let text = err.to_string();
        let offset = layout()[1].extents(ExpertIdx(4))[part].offset;
        let name = ["gate", "up", "down"][part];
        for want in [&format!("layer 1 expert 4 ({name})"), "fake.gguf", &format!("offset {offset}"), "os error 5"] {
            assert!(text.contains(want), "{want:?} is missing in {text:?}");
        }
        // The same request works in the same process.
        take_all(&cache, &image, 1, &ids(&[4, 6]), Phase::Decode).unwrap();
        take_all(&cache, &image, 1, &ids(&[7, 8, 9, 10, 11, 12, 13, 14, 15]), Phase::Decode).unwrap();
        assert_at_rest(&cache);
    }
    assert_eq!(cache.stats().decode.failed, 3);
}

#[test]
fn all_parts_failing_still_gives_the_slot_back() {
    let image = image();
    let reader = fake(quick());
    let cache = cache(reader.clone(), 6, 6);
    for round in 0..50 {
        (0..3).for_each(|part| reader.add_fault(fault(0, 1, part, u32::MAX)));
        let err = take_all(&cache, &image, 0, &ids(&[1]), Phase::Decode).unwrap_err();
        assert!(matches!(err, CacheError::Read(_)), "{err}");
        reader.clear_faults();
        // All six slots are needed at once: a lost one would show.
        let wave: Vec<ExpertIdx> = (0..6).map(|i| ExpertIdx((round + i) % EXPERTS)).collect();
        take_all(&cache, &image, 3, &wave, Phase::Prefill).unwrap();
    }
    assert_at_rest(&cache);
}

#[test]
fn a_thousand_failures_leak_nothing() {
    let image = image();
    let reader = fake(FakeOptions { depth: 3, ..quick() });
    let cache = cache(reader.clone(), 6, 6);
    let mut random = Random(4);
    for _ in 0..1000 {
        let wanted = random.ids(4);
        let layer = random.below(4) as u16;
        reader.clear_faults();
        reader.add_fault(fault(layer, wanted[0].0, random.below(3) as usize, 1));
        let was_present = cache.contains(ds4::units::ExpertKey { layer: LayerIdx(layer), expert: wanted[0] });
        let result = take_all(&cache, &image, layer, &wanted, Phase::Decode);
        assert_eq!(result.is_ok(), was_present);
        reader.clear_faults();
        take_all(&cache, &image, layer, &wanted, Phase::Decode).unwrap();
    }
    for layer in [0, 2] {
        take_all(&cache, &image, layer, &ids(&[0, 1, 2, 3, 4, 5]), Phase::Prefill).unwrap();
    }
    assert_at_rest(&cache);
    let stats = cache.stats();
    assert_eq!(stats.slots_valid, stats.slots);
}

#[test]
fn every_lease_that_joined_hears_of_the_failure() {
    let image = image();
    let reader = fake(quick());
    let cache = cache(reader.clone(), 6, 9);
    reader.add_fault(fault(0, 2, 0, 1));
    reader.hold();
    let wanted = ids(&[2, 3]);
    let mut leases: Vec<Lease> = (0..3).map(|_| cache.request(LayerIdx(0), &wanted, Phase::Decode).unwrap()).collect();
    let never_looks = cache.request(LayerIdx(0), &wanted, Phase::Decode).unwrap();
    reader.release();
    for lease in &mut leases {
        let (mut errors, mut given) = (0, Vec::new());
        loop {
            match lease.next_ready() {
                Ok(Some(position)) => given.push(position),
                Ok(None) => break,
                Err(CacheError::Read(ReadError::Io { errno: libc::EIO, .. })) => errors += 1,
                Err(other) => panic!("{other}"),
            }
        }
        assert_eq!((errors, given.as_slice()), (1, [1].as_slice()));
        check_bytes(&image, LayerIdx(0), wanted[1], lease.slices(1));
    }
    drop(never_looks);
    // One lease still holds expert 3 while the failed expert is read again.
    take_all(&cache, &image, 0, &wanted, Phase::Decode).unwrap();
    drop(leases);
    assert_at_rest(&cache);
}

#[test]
fn a_file_cut_short_is_named_and_works_again_when_restored() {
    let image = image();
    let reader = fake(quick());
    let cache = cache(reader.clone(), 6, 9);
    take_all(&cache, &image, 3, &ids(&[0]), Phase::Decode).unwrap();
    reader.truncate(layout()[3].down.offset + 100);
    let err = take_all(&cache, &image, 3, &ids(&[15]), Phase::Decode).unwrap_err();
    assert!(err.to_string().contains("shortened"), "{err}");
    take_all(&cache, &image, 3, &ids(&[0]), Phase::Decode).unwrap();
    reader.truncate(u64::MAX);
    take_all(&cache, &image, 3, &ids(&[15]), Phase::Decode).unwrap();
    assert_at_rest(&cache);
}

/// Drops batches without a word while `is_deaf`, as a reader would that panics in `submit`.
struct DeafReader {
    inner: Arc<FakeReader>,
    is_deaf: AtomicBool,
}

impl Reader for DeafReader {
    fn submit(&self, batch: Vec<ReadRequest>, sink: Arc<dyn ReadSink>) -> BatchId {
        if self.is_deaf.load(Ordering::Relaxed) {
            drop(batch);
            return self.inner.submit(Vec::new(), sink);
        }
        self.inner.submit(batch, sink)
    }
    fn cancel(&self, batch: BatchId) -> usize {
        self.inner.cancel(batch)
    }

    fn promote(&self, _: BatchId) -> usize {
        0
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
fn reads_dropped_without_a_word_undo_themselves() {
    let image = image();
    let reader = Arc::new(DeafReader { inner: fake(quick()), is_deaf: AtomicBool::new(true) });
    let cache = cache(reader.clone(), 6, 9);
    for _ in 0..20 {
        let err = take_all(&cache, &image, 0, &ids(&[1, 2, 3]), Phase::Decode).unwrap_err();
        assert!(matches!(err, CacheError::Read(ReadError::Stopped(_))), "{err}");
        assert_at_rest(&cache);
    }
    reader.is_deaf.store(false, Ordering::Relaxed);
    take_all(&cache, &image, 0, &ids(&[1, 2, 3]), Phase::Decode).unwrap();
    assert_at_rest(&cache);
}

#[test]
fn the_cache_may_go_before_its_reads() {
    let reader = fake(FakeOptions { delay: Duration::from_millis(5), ..quick() });
    let cache = cache(reader.clone(), 6, 9);
    drop(cache.request(LayerIdx(0), &ids(&[1, 2, 3]), Phase::Decode).unwrap());
    drop(cache);
    drop(reader);
}

/// Eight threads, failures, short reads, reorder, leases dropped early: bytes are right or an error is told, and at the end
/// every slot is back.
#[test]
fn stress() {
    let image = image();
    for seed in 0..4 {
        let reader = fake(FakeOptions { depth: 8, jitter: Duration::from_micros(60), ..rough(seed) });
        let cache = cache(reader.clone(), 10, 14);
        let (served, failed) = (&std::sync::atomic::AtomicU64::new(0), &std::sync::atomic::AtomicU64::new(0));
        let (cache_ref, image_ref, reader_ref) = (&cache, &image, &reader);
        std::thread::scope(|scope| {
            for thread in 0..8u64 {
                scope.spawn(move || {
                    let mut random = Random(seed * 100 + thread);
                    for round in 0..150 {
                        let layer = LayerIdx(random.below(4) as u16);
                        let count = 1 + random.below(5) as usize;
                        let wanted = random.ids(count);
                        if thread == 0 && round % 5 == 0 {
                            let part = random.below(3) as usize;
                            reader_ref.add_fault(fault(layer.0, random.below(16) as u16, part, 1));
                        }
                        let mut lease = cache_ref.request(layer, &wanted, Phase::Decode).unwrap();
                        if random.below(6) == 0 {
                            continue;
                        }
                        loop {
                            match lease.next_ready() {
                                Ok(Some(position)) => {
                                    check_bytes(image_ref, layer, wanted[position], lease.slices(position));
                                    served.fetch_add(1, Ordering::Relaxed);
                                }
                                Ok(None) => break,
                                Err(CacheError::Read(_)) => {
                                    failed.fetch_add(1, Ordering::Relaxed);
                                }
                                Err(other) => panic!("{other}"),
                            }
                        }
                    }
                });
            }
        });
        reader.clear_faults();
        // Reads of leases that were dropped early may still be under way; full waves need every slot.
        for layer in [0, 1, 2, 3] {
            let wave: Vec<ExpertIdx> = (0..10).map(ExpertIdx).collect();
            take_all(&cache, &image, layer, &wave, Phase::Prefill).unwrap();
        }
        let four_more: Vec<ExpertIdx> = (0..14).map(ExpertIdx).collect();
        take_all(&cache, &image, 1, &four_more, Phase::Prefill).unwrap();
        assert_at_rest(&cache);
        assert!(served.load(Ordering::Relaxed) > 1000 && failed.load(Ordering::Relaxed) > 0);
        let stats = cache.stats();
        assert_eq!(stats.slots_valid, stats.slots);
        assert!(stats.decode.joined > 0, "{stats:?}");
    }
}
