//! What the reader does to the whole process: descriptors, threads, and what happens when the system refuses more of them.
//! Owns the process: its tests change limits and count descriptors, so they run one at a time.
//! Surprising fact: a low limit of open files refuses io_uring on any machine, which shows the fallback without a special kernel.

use std::sync::{Arc, Mutex};

use ds4::storage::layout::Extent;
use ds4::storage::reader::fake::{FakeFault, FakeOptions, FakeReader};
use ds4::storage::reader::*;
use ds4::units::LayerIdx;

static PROCESS: Mutex<()> = Mutex::new(());

fn entries(dir: &str) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

fn model() -> (std::path::PathBuf, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, vec![7; 1 << 20]).unwrap();
    (path, dir)
}

fn read(reader: &dyn Reader, offset: u64, len: u64) -> ReadResult {
    let gather = Gather::new();
    let request = ReadRequest {
        extent: Extent { offset, len },
        lane: Lane::Rows,
        class: ReadClass::Demand,
        label: ReadLabel::Row { layer: LayerIdx(1), row: 5 },
        region: DestRegion::anonymous(reader.alignment().region_bytes_max(len).unwrap()).unwrap(),
        tag: 0,
    };
    reader.submit(vec![request], gather.clone());
    gather.next().1
}

#[test]
fn refused_rings_fall_back_with_a_notice_or_fail_when_asked_for() {
    let _alone = PROCESS.lock().unwrap_or_else(|e| e.into_inner());
    let (path, _dir) = model();
    let rings = ReaderOptions { rings: 8, ..ReaderOptions::default() };
    let before = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    // Room for the model file's descriptors and the one that looks for its alignment, but not for rings and their bells.
    let tight = rustix::process::Rlimit { current: Some(limit_with_free(4)), maximum: before.maximum };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, tight).unwrap();
    let asked = open_reader(&path, &ReaderOptions { io: ReaderChoice::Uring, ..rings }).err();
    let auto = open_reader(&path, &rings);
    rustix::process::setrlimit(rustix::process::Resource::Nofile, before).unwrap();

    let asked = asked.expect("an explicit choice does not fall back").to_string();
    assert!(asked.contains("--io uring") && asked.contains("ulimit -n"), "{asked}");
    let auto = auto.unwrap();
    assert_eq!(auto.kind(), ReaderKind::Pread);
    let notices: Vec<String> = auto.notices().iter().map(ReaderNotice::to_string).collect();
    assert!(notices.iter().any(|n| n.contains("io_uring is refused") && n.contains("pread")), "{notices:?}");
    assert!(read(&*auto, 1000, 500).unwrap().bytes() == [7; 500]);
}

/// The limit of open files under which `free` more can be opened.
fn limit_with_free(free: usize) -> u64 {
    let used: Vec<u64> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    // The listing has itself a descriptor, which is free again now: one less to leave.
    (0..).filter(|n| !used.contains(n)).nth(free - 1).expect("numbers do not end")
}

#[test]
fn readers_come_and_go_without_a_trace() {
    let _alone = PROCESS.lock().unwrap_or_else(|e| e.into_inner());
    let (path, _dir) = model();
    let count = || (entries("/proc/self/fd"), entries("/proc/self/task"));
    let mut before = (0, 0);
    for round in 0..60 {
        for io in [ReaderChoice::Auto, ReaderChoice::Pread] {
            let reader = open_reader(&path, &ReaderOptions { io, ..ReaderOptions::default() }).unwrap();
            read(&*reader, round * 1000, 5000).unwrap();
            read(&*reader, 1 << 20, 1).unwrap_err();
        }
        // The first rounds may leave what the allocator and the test harness keep.
        if round == 5 {
            before = count();
        }
    }
    // Threads of the test harness come and go meanwhile; a leak would show once for each of the 108 readers since.
    let after = count();
    assert!(after.0 <= before.0 + 4 && after.1 <= before.1 + 4, "descriptors and threads {before:?}, then {after:?}");
}

#[test]
fn a_thousand_failed_reads_leave_no_memory_lent() {
    let _alone = PROCESS.lock().unwrap_or_else(|e| e.into_inner());
    let reader = FakeReader::new(vec![1; 1 << 20], FakeOptions { depth: 4, ..FakeOptions::default() });
    reader.add_fault(FakeFault { offset: 3000, errno: libc::EIO, times: u32::MAX });
    let before = resident_pages();
    for _ in 0..1000 {
        let gather = Gather::new();
        let request = |offset, tag| ReadRequest {
            extent: Extent { offset, len: 200_000 },
            lane: Lane::Bulk,
            class: ReadClass::Demand,
            label: ReadLabel::Tensor(Arc::from("t")),
            region: DestRegion::anonymous(reader.alignment().region_bytes_max(200_000).unwrap()).unwrap(),
            tag,
        };
        reader.submit(vec![request(2000, 0), request(300_000, 1)], gather.clone());
        for _ in 0..2 {
            let (tag, result) = gather.next();
            assert_eq!(result.is_ok(), tag == 1);
        }
    }
    let grown = resident_pages().saturating_sub(before) * rustix::param::page_size() as u64;
    assert!(grown < 16 << 20, "1,000 cycles of 400 KB kept {grown} bytes");
    let c = reader.counters().snapshot();
    assert_eq!((c.reads, c.failed, c.submissions), (1000, 1000, 1000));
}

fn resident_pages() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_whitespace().nth(1).unwrap().parse().unwrap()
}
