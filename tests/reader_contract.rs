//! The contract of `Reader`, run on io_uring, pread and the fake alike. Owns the test image; knows nothing of models.
//! Surprising fact: /proc/self/mem gives a real EIO on any machine, so the error path of the real readers is tested too.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ds4::storage::layout::Extent;
use ds4::storage::reader::fake::{FakeFault, FakeOptions, FakeReader};
use ds4::storage::reader::*;
use ds4::units::{ExpertKey, LayerIdx};

const IMAGE_BYTES: usize = (5 << 20) + 1234;

fn image() -> Vec<u8> {
    (0..IMAGE_BYTES as u64).map(|i| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
}

/// Small pieces, so that most reads of the tests have several.
const LIMITS: PoolLimits = PoolLimits { piece_bytes: 64 << 10, queue_requests_max: 8192 };

struct Subject {
    name: &'static str,
    reader: Arc<dyn Reader>,
    path: Option<PathBuf>,
    _dir: tempfile::TempDir,
}

fn real(name: &'static str, io: ReaderChoice, direct: DirectChoice, limits: PoolLimits) -> Subject {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, image()).unwrap();
    let options = ReaderOptions { io, direct, limits, depth: 32, ..ReaderOptions::default() };
    let reader = open_reader(&path, &options).unwrap();
    Subject { name, reader, path: Some(path), _dir: dir }
}

fn fake(name: &'static str, options: FakeOptions) -> Subject {
    Subject { name, reader: FakeReader::new(image(), options), path: None, _dir: tempfile::tempdir().unwrap() }
}

fn rough() -> FakeOptions {
    FakeOptions { jitter: Duration::from_micros(300), short_of_256: 100, limits: LIMITS, ..FakeOptions::default() }
}

/// Every implementation in every mode. io_uring is left out, loudly, only where the system refuses it.
fn subjects_with(limits: PoolLimits) -> Vec<Subject> {
    let mut all = vec![
        real("pread buffered", ReaderChoice::Pread, DirectChoice::Off, limits),
        real("pread direct", ReaderChoice::Pread, DirectChoice::Auto, limits),
        fake("fake", FakeOptions { limits, ..FakeOptions::default() }),
        fake("fake buffered", FakeOptions { alignment: Alignment::NONE, limits, ..rough() }),
        fake("fake rough", FakeOptions { limits, ..rough() }),
    ];
    let auto = real("auto", ReaderChoice::Auto, DirectChoice::Auto, limits);
    if auto.reader.kind() == ReaderKind::Uring {
        all.push(real("uring buffered", ReaderChoice::Uring, DirectChoice::Off, limits));
        all.push(real("uring direct", ReaderChoice::Uring, DirectChoice::Auto, limits));
    } else {
        eprintln!("io_uring not tested here: {:?}", auto.reader.notices());
    }
    all
}

fn subjects() -> Vec<Subject> {
    subjects_with(LIMITS)
}

fn label() -> ReadLabel {
    ReadLabel::Expert { key: ExpertKey::new(3, 17), part: ExpertPart::Up }
}

fn request(reader: &dyn Reader, offset: u64, len: u64, tag: u64) -> ReadRequest {
    let bytes = reader.alignment().region_bytes_max(len).unwrap();
    ReadRequest {
        extent: Extent { offset, len },
        lane: if tag.is_multiple_of(2) { Lane::Bulk } else { Lane::Rows },
        class: ReadClass::Demand,
        label: label(),
        region: DestRegion::anonymous(bytes).unwrap(),
        tag,
    }
}

fn read_one(reader: &dyn Reader, offset: u64, len: u64) -> ReadResult {
    let gather = Gather::new();
    reader.submit(vec![request(reader, offset, len, 1)], gather.clone());
    gather.next().1
}

fn assert_right(reader: &dyn Reader, offset: u64, len: u64, name: &str) {
    let landed = read_one(reader, offset, len).unwrap_or_else(|e| panic!("{name}: {e}"));
    let expected = &image()[offset as usize..(offset + len) as usize];
    assert!(landed.bytes() == expected, "{name}: wrong bytes at {offset}+{len}");
    assert_eq!(
        landed.region.len(),
        reader.alignment().region_bytes_max(len).unwrap(),
        "{name}: region came back whole"
    );
}

/// Memory that must be aligned more coarsely than offsets, with pieces between the two: a piece or a resumed read that began at a
/// multiple of the finer one would be refused.
#[test]
fn memory_alignment_beyond_offset_alignment() {
    let limits = PoolLimits { piece_bytes: 1 << 10, queue_requests_max: 64 };
    for (offset, memory) in [(512, 4096), (512, 1024), (4096, 512), (1, 4096)] {
        let alignment = Alignment { offset, memory };
        for options in [FakeOptions { limits, ..FakeOptions::default() }, FakeOptions { limits, ..rough() }] {
            let s = fake("fake", FakeOptions { alignment, ..options });
            for (at, len) in [(0, 70_000), (5, 9000), (100_001, 33_333), (IMAGE_BYTES as u64 - 5000, 5000)] {
                assert_right(&*s.reader, at, len, &format!("{alignment:?}"));
            }
            assert!(s.reader.counters().snapshot().pieces > 20);
        }
    }
}

#[test]
fn any_range_lands_with_its_skew() {
    let end = IMAGE_BYTES as u64;
    for s in subjects() {
        let r = &*s.reader;
        for (offset, len) in [
            (0, 1),
            (0, 0),
            (0, end),
            (1, 511),
            (511, 2),
            (2048, 300_000),
            (65_535, 2),
            (end - 1, 1),
            (end - 264, 264),
            (end, 0),
        ] {
            assert_right(r, offset, len, s.name);
        }
        let c = r.counters().snapshot();
        assert_eq!((c.reads, c.failed), (10, 0), "{}", s.name);
        assert!(c.latency.samples >= c.pieces && c.pieces > 80, "{}: {c:?}", s.name);
        assert!(c.device_bytes >= c.read_bytes && c.busy_ms > 0.0, "{}: {c:?}", s.name);
    }
}

#[test]
fn a_large_batch_ends_each_read_once() {
    let image = image();
    for s in subjects() {
        let mut random = 12345u64;
        let mut extents = Vec::new();
        for _ in 0..1500 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let len = if random & 7 == 0 { 150_000 } else { 264 };
            extents.push((random >> 20) % (IMAGE_BYTES as u64 - len));
            extents.push(len);
        }
        let gather = Gather::new();
        let batch: Vec<_> = extents
            .chunks(2)
            .enumerate()
            .map(|(i, e)| {
                let class = [ReadClass::Demand, ReadClass::Lookahead, ReadClass::Preload][i % 3];
                ReadRequest { class, ..request(&*s.reader, e[0], e[1], i as u64) }
            })
            .collect();
        s.reader.submit(batch, gather.clone());
        let mut seen = vec![false; 1500];
        for _ in 0..1500 {
            let (tag, result) = gather.next();
            let landed = result.unwrap();
            assert!(!std::mem::replace(&mut seen[tag as usize], true), "{}: {tag} twice", s.name);
            let (offset, len) = (extents[2 * tag as usize] as usize, extents[2 * tag as usize + 1] as usize);
            assert!(landed.bytes() == &image[offset..offset + len], "{}: read {tag}", s.name);
        }
        assert_eq!(s.reader.counters().submissions.get(), 1);
    }
}

#[test]
fn the_end_of_the_file_is_an_error_that_names_everything() {
    for s in subjects() {
        let end = IMAGE_BYTES as u64;
        for (offset, len) in [(end - 10, 11), (end, 1), (end + 100_000, 5), (end - 200_000, 400_000)] {
            let error = read_one(&*s.reader, offset, len).unwrap_err();
            assert!(matches!(error, ReadError::EndOfFile { .. }), "{}: {error}", s.name);
            let text = error.to_string();
            for part in ["layer 3 expert 17 (up)", "gguf", &offset.to_string(), &format!("{len} bytes"), "shortened"] {
                assert!(text.contains(part), "{}: '{part}' missing in: {text}", s.name);
            }
        }
        let error = read_one(&*s.reader, u64::MAX - 3, 100).unwrap_err();
        assert!(matches!(error, ReadError::Io { errno: libc::EOVERFLOW, .. }), "{}: {error}", s.name);
        assert_right(&*s.reader, 4000, 100, s.name);
        assert_eq!(s.reader.counters().failed.get(), 5, "{}", s.name);
    }
}

#[test]
fn a_file_shortened_while_open_fails_only_what_is_gone() {
    for s in subjects() {
        let Some(path) = &s.path else { continue };
        assert_eq!(s.reader.check_file(), Ok(()));
        std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(1 << 20).unwrap();
        let change = FileChange::Shortened { was: IMAGE_BYTES as u64, now: 1 << 20 };
        assert_eq!(s.reader.check_file(), Err(change), "{}", s.name);
        match read_one(&*s.reader, 3 << 20, 1000) {
            Err(ReadError::Changed { change: found, .. }) => assert_eq!(found, change, "{}", s.name),
            other => panic!("{}: {other:?}", s.name),
        }
        assert_right(&*s.reader, 1000, 5000, s.name);
    }
    let fake = FakeReader::new(image(), rough());
    fake.truncate(1 << 20);
    let error = read_one(&*fake, 3 << 20, 1000).unwrap_err().to_string();
    assert!(error.contains("shortened from"), "{error}");
    fake.truncate(u64::MAX);
    assert_right(&*fake, 3 << 20, 1000, "fake restored");
}

#[test]
fn a_real_eio_is_final_and_named() {
    let mut kinds = vec![ReaderChoice::Pread];
    if subjects().iter().any(|s| s.reader.kind() == ReaderKind::Uring) {
        kinds.push(ReaderChoice::Uring);
    }
    for io in kinds {
        let options = ReaderOptions { io, direct: DirectChoice::Off, ..ReaderOptions::default() };
        let reader = open_reader(Path::new("/proc/self/mem"), &options).unwrap();
        let error = read_one(&*reader, 4096, 100).unwrap_err();
        assert!(matches!(error, ReadError::Io { errno: libc::EIO, .. }), "{io:?}: {error}");
        assert!(error.to_string().contains("nput/output error"), "{error}");
        // Memory that is mapped still reads.
        let word = [0x5Au8; 64];
        let landed = read_one(&*reader, word.as_ptr().addr() as u64, 64).unwrap();
        assert_eq!(landed.bytes(), word, "{io:?}");
        assert_eq!(reader.counters().retries.get(), 0);
    }
}

#[test]
fn faults_of_the_fake_end_or_go_away_as_told() {
    let fake = FakeReader::new(image(), rough());
    for errno in [libc::EINTR, libc::EAGAIN] {
        fake.add_fault(FakeFault { offset: 70_000, errno, times: 5 });
        assert_right(&*fake, 60_000, 200_000, "interrupted");
    }
    assert_eq!(fake.counters().retries.get(), 10);
    fake.add_fault(FakeFault { offset: 70_000, errno: libc::EIO, times: 1 });
    let error = read_one(&*fake, 60_000, 200_000).unwrap_err();
    assert!(matches!(error, ReadError::Io { errno: libc::EIO, .. }), "{error}");
    assert_right(&*fake, 60_000, 200_000, "after a single error");
    fake.add_fault(FakeFault { offset: 70_000, errno: libc::EIO, times: u32::MAX });
    for _ in 0..3 {
        assert!(read_one(&*fake, 60_000, 200_000).is_err());
    }
    assert_right(&*fake, 200_000, 200_000, "elsewhere");
    fake.clear_faults();
    fake.add_fault(FakeFault { offset: 70_000, errno: libc::EAGAIN, times: u32::MAX });
    assert!(read_one(&*fake, 60_000, 20_000).is_err(), "endless EAGAIN ends");
}

#[test]
fn an_error_stops_the_rest_of_its_read() {
    let options = FakeOptions { depth: 1, limits: LIMITS, ..FakeOptions::default() };
    let fake = FakeReader::new(image(), options);
    fake.add_fault(FakeFault { offset: 0, errno: libc::EIO, times: u32::MAX });
    assert!(read_one(&*fake, 0, 4 << 20).is_err());
    assert_eq!(fake.reads_begun(), 1, "63 more pieces were not read");
}

#[test]
fn cancelled_reads_end_once_and_the_rest_lands() {
    for s in subjects() {
        let gather = Gather::new();
        let batch = (0..600).map(|i| {
            let class = ReadClass::Lookahead;
            ReadRequest { class, ..request(&*s.reader, i * 7000, 200_000, i) }
        });
        let id = s.reader.submit(batch.collect(), gather.clone());
        let cancelled = s.reader.cancel(id);
        let ends: Vec<_> = (0..600).map(|_| gather.next()).collect();
        let gone = ends.iter().filter(|(_, r)| matches!(r, Err(ReadError::Cancelled(_)))).count();
        let landed = ends.iter().filter(|(_, r)| r.is_ok()).count();
        assert_eq!((gone, landed), (cancelled, 600 - cancelled), "{}", s.name);
        assert_eq!(s.reader.counters().cancelled.get(), cancelled as u64, "{}", s.name);
        assert_eq!(s.reader.cancel(id), 0);
        assert_right(&*s.reader, 77, 100_000, s.name);
    }
}

/// Submits reads of these classes and lanes to a fake whose only worker holds the first of them; the order in which they land.
fn landing_order(reads: &[(ReadClass, Lane)], promoted: Option<usize>) -> Vec<u64> {
    let options = FakeOptions { depth: 1, limits: LIMITS, ..FakeOptions::default() };
    let fake = FakeReader::new(image(), options);
    fake.hold();
    let gather = Gather::new();
    let mut batches = Vec::new();
    for (tag, &(class, lane)) in reads.iter().enumerate() {
        let read = ReadRequest { class, lane, ..request(&*fake, 0, 1 << 20, tag as u64) };
        batches.push(fake.submit(vec![read], gather.clone()));
        // The worker takes the first piece of the first read and is held there.
        while fake.counters().pieces.get() == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    if let Some(index) = promoted {
        assert_eq!(fake.promote(batches[index]), 1);
        assert_eq!(fake.promote(batches[index]), 0, "it is of the demand class now");
    }
    fake.release();
    reads.iter().map(|_| gather.next()).map(|(tag, result)| result.map(|_| tag).unwrap()).collect()
}

#[test]
fn demand_passes_between_two_pieces_and_rows_pass_bulk() {
    use ReadClass::{Demand, Lookahead, Preload};
    let reads = [
        (Preload, Lane::Bulk),
        (Lookahead, Lane::Bulk),
        (Demand, Lane::Bulk),
        (Demand, Lane::Bulk),
        (Demand, Lane::Rows),
    ];
    assert_eq!(landing_order(&reads, None), [4, 2, 3, 1, 0]);
    assert_eq!(landing_order(&reads, Some(1)), [4, 2, 3, 1, 0]);
    assert_eq!(landing_order(&reads[..3], Some(0)), [2, 0, 1]);
}

#[test]
fn full_queues_refuse_lookahead_and_hold_back_demand() {
    let limits = PoolLimits { queue_requests_max: 4, ..LIMITS };
    for s in subjects_with(limits) {
        for class in [ReadClass::Demand, ReadClass::Preload] {
            let gather = Gather::new();
            let batch = (0..300).map(|i| ReadRequest { class, ..request(&*s.reader, i * 100, 70_000, i) }).collect();
            s.reader.submit(batch, gather.clone());
            (0..300).for_each(|_| drop(gather.next().1.unwrap()));
        }
    }
    let fake = FakeReader::new(image(), FakeOptions { depth: 2, limits, ..FakeOptions::default() });
    fake.hold();
    let gather = Gather::new();
    let (class, lane) = (ReadClass::Lookahead, Lane::Bulk);
    let batch = (0..100).map(|i| ReadRequest { class, lane, ..request(&*fake, 0, 10, i) }).collect();
    fake.submit(batch, gather.clone());
    let refused = fake.counters().refused.get();
    assert!((94..=96).contains(&refused), "{refused}");
    fake.release();
    let full = (0..100).filter(|_| matches!(gather.next().1, Err(ReadError::QueueFull(_)))).count();
    assert_eq!(full as u64, refused);

    fake.hold();
    std::thread::scope(|scope| {
        let (fake, gather) = (&*fake, &gather);
        scope.spawn(move || {
            let batch = (0..50).map(|i| request(fake, i * 10, 10, i)).collect();
            fake.submit(batch, gather.clone());
        });
        std::thread::sleep(Duration::from_millis(50));
        fake.release();
    });
    (0..50).for_each(|_| drop(gather.next().1.unwrap()));
    let c = fake.counters().snapshot();
    assert!(c.queue_full_waits >= 1 && c.queue_full_wait_ms >= 20.0, "{c:?}");
}

#[test]
fn a_caller_that_leaves_early_leaves_the_memory_lent() {
    for s in subjects() {
        for round in 0..20 {
            let gather = Gather::new();
            let batch = (0..40).map(|i| request(&*s.reader, i * 5000, 100_000, i)).collect();
            let id = s.reader.submit(batch, gather.clone());
            drop(gather);
            if round % 2 == 0 {
                s.reader.cancel(id);
            }
        }
        assert_right(&*s.reader, 0, 1 << 20, s.name);
    }
}

#[test]
fn dropping_the_reader_ends_every_read() {
    for s in subjects() {
        let gather = Gather::new();
        let batch = (0..500).map(|i| request(&*s.reader, i * 5000, 200_000, i)).collect();
        s.reader.submit(batch, gather.clone());
        let name = s.name;
        drop(s);
        for _ in 0..500 {
            match gather.next().1 {
                Ok(landed) => assert_eq!(landed.len, 200_000, "{name}"),
                Err(ReadError::Stopped(_)) => {}
                Err(other) => panic!("{name}: {other}"),
            }
        }
    }
}

/// Reads the image front to back, each read handed out when the one before lands.
struct Chain {
    left: AtomicUsize,
    done: Gather,
}

impl ReadSink for Chain {
    fn landed(&self, tag: u64, result: ReadResult) -> Option<ReadRequest> {
        let landed = result.expect("no faults here");
        if self.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.done.landed(tag, Ok(landed));
            return None;
        }
        Some(ReadRequest {
            extent: Extent { offset: tag + 1000, len: 264 },
            lane: Lane::Rows,
            class: ReadClass::Demand,
            label: ReadLabel::Row { layer: LayerIdx(1), row: tag },
            region: landed.region,
            tag: tag + 1000,
        })
    }
}

#[test]
fn a_sink_may_hand_out_the_next_read_in_the_same_memory() {
    for s in subjects_with(PoolLimits { queue_requests_max: 1, ..LIMITS }) {
        let chain = Arc::new(Chain { left: AtomicUsize::new(1001), done: Gather::default() });
        s.reader.submit(vec![request(&*s.reader, 0, 264, 0)], chain.clone());
        let (tag, result) = chain.done.next();
        assert_eq!(tag, 1_000_000);
        assert!(result.unwrap().bytes() == &image()[1_000_000..1_000_264], "{}", s.name);
    }
}

#[test]
fn several_threads_submit_at_once() {
    let image = image();
    for s in subjects() {
        let reader = &*s.reader;
        std::thread::scope(|scope| {
            for t in 0..4u64 {
                let image = &image;
                scope.spawn(move || {
                    for round in 0..20 {
                        let gather = Gather::new();
                        let offset = |i: u64| (t * 1_000_003 + round * 7919 + i * 31_337) % 4_000_000;
                        reader.submit((0..10).map(|i| request(reader, offset(i), 80_000, i)).collect(), gather.clone());
                        for _ in 0..10 {
                            let (tag, result) = gather.next();
                            let from = offset(tag) as usize;
                            assert!(result.unwrap().bytes() == &image[from..from + 80_000]);
                        }
                    }
                });
            }
        });
        assert_eq!(reader.counters().reads.get(), 800, "{}", s.name);
    }
}

struct Panics;

impl ReadSink for Panics {
    fn landed(&self, _tag: u64, _result: ReadResult) -> Option<ReadRequest> {
        panic!("a sink that panics on purpose");
    }
}

#[test]
fn a_sink_that_panics_leaves_nobody_waiting() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, image()).unwrap();
    for io in [ReaderChoice::Auto, ReaderChoice::Pread] {
        let options = ReaderOptions { io, rings: 1, pread_threads: 1, limits: LIMITS, ..ReaderOptions::default() };
        let reader = open_reader(&path, &options).unwrap();
        let gather = Gather::new();
        reader.submit((0..100).map(|i| request(&*reader, i * 9000, 100_000, i)).collect(), gather.clone());
        reader.submit(vec![request(&*reader, 0, 10, 0)], Arc::new(Panics));
        reader.submit((0..100).map(|i| request(&*reader, i * 9000, 100_000, i)).collect(), gather.clone());
        let ends: Vec<ReadResult> = (0..200).map(|_| gather.next().1).collect();
        assert!(ends.iter().any(Result::is_err), "{io:?}: the only worker is gone");
        assert!(matches!(read_one(&*reader, 0, 10), Err(ReadError::Stopped(_))), "{io:?}");
    }
}

#[test]
fn reads_overlap_up_to_the_depth() {
    let delay = Duration::from_millis(20);
    let fake = FakeReader::new(image(), FakeOptions { delay, depth: 32, ..FakeOptions::default() });
    let gather = Gather::new();
    let wave = || {
        let begun = Instant::now();
        fake.submit((0..64).map(|i| request(&*fake, i * 600, 264, i)).collect(), gather.clone());
        (0..64).for_each(|_| drop(gather.next().1.unwrap()));
        begun.elapsed()
    };
    // The best of some, since other programs take the processors away.
    let best = (0..20).map(|_| wave()).find(|took| *took < 10 * delay).unwrap_or_else(wave);
    assert!(best >= 2 * delay && best < 10 * delay, "two waves of 32, not 64 delays: {best:?}");
}

#[test]
fn explicit_choices_that_are_refused_are_errors_and_auto_says_so() {
    let options = ReaderOptions { direct: DirectChoice::On, ..ReaderOptions::default() };
    let error = open_reader(Path::new("/proc/version"), &options).err().expect("refused").to_string();
    assert!(error.contains("--direct on"), "{error}");
    let options = ReaderOptions { io: ReaderChoice::Pread, ..ReaderOptions::default() };
    let reader = open_reader(Path::new("/proc/version"), &options).unwrap();
    let notices: Vec<String> = reader.notices().iter().map(ReaderNotice::to_string).collect();
    assert!(notices.len() == 1 && notices[0].contains("page cache"), "{notices:?}");
    assert!(!reader.is_direct() && reader.kind() == ReaderKind::Pread);
    for (text, good) in [("auto", true), ("uring", true), ("pread", true), ("", false), ("mmap", false)] {
        assert_eq!(text.parse::<ReaderChoice>().is_ok(), good);
    }
    for (text, good) in [("auto", true), ("on", true), ("off", true), ("1", false)] {
        assert_eq!(text.parse::<DirectChoice>().is_ok(), good);
    }
}
