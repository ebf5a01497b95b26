//! The drive probe and its memory, over real files. Knows nothing of rates being right: any drive, however slow, passes.
//! Surprising fact: the file is sparse, so that a test does not write 64 MiB; what is measured is the speed of a hole.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use ds4::storage::probe::{FILE_BYTES_MIN, Memory, ProbeChoice, ProbeError, Source, drive_rates, measure_now};
use ds4::storage::reader::{DirectChoice, ReaderChoice, ReaderOptions};

fn hole(dir: &tempfile::TempDir, bytes: u64) -> PathBuf {
    let path = dir.path().join(format!("hole-{bytes}"));
    std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
    path
}

#[test]
fn a_drive_is_measured_once_and_remembered() {
    let dir = tempfile::tempdir().unwrap();
    let (path, other) = (hole(&dir, FILE_BYTES_MIN), hole(&dir, 2 * FILE_BYTES_MIN));
    let memory = Memory::in_dir(dir.path().join("cache"));
    let options = ReaderOptions::default();
    let ask = |path, choice| drive_rates(path, &options, choice, &memory).unwrap();
    assert_eq!(ask(&path, ProbeChoice::Off), None);
    assert!(!memory.file().unwrap().exists());

    let begun = Instant::now();
    let first = ask(&path, ProbeChoice::Auto).unwrap();
    // A second on a machine of one's own; threads start and memory is touched besides, and a busy machine takes some times as long.
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
    assert_eq!((first.source, &first.notice), (Source::Measured, &None));
    let rates = &first.rates;
    assert!(rates.bulk_points.contains(&rates.bulk) && rates.row_points.contains(&rates.rows), "{rates:?}");
    assert!(rates.probe_bytes > 0 && rates.probe_ms > 0.0 && rates.measured_unix_s > 1_700_000_000);

    // The same drive, whichever file.
    for path in [&path, &other] {
        let again = ask(path, ProbeChoice::Auto).unwrap();
        assert_eq!((again.source, again.rates), (Source::Remembered, first.rates.clone()));
    }
    assert_eq!(ask(&path, ProbeChoice::Force).unwrap().source, Source::Measured);

    // A week later, and from a clock that was set back.
    let text = std::fs::read_to_string(memory.file().unwrap()).unwrap();
    let measured = |seconds: i64| {
        let now = std::time::SystemTime::now().duration_since(std::time::SystemTime::UNIX_EPOCH).unwrap().as_secs();
        let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let drive = json["drives"].as_object_mut().unwrap().values_mut().next().unwrap();
        drive["measured_unix_s"] = now.saturating_add_signed(seconds).into();
        std::fs::write(memory.file().unwrap(), json.to_string()).unwrap();
        ask(&path, ProbeChoice::Auto).unwrap().source
    };
    assert_eq!(measured(-6 * 24 * 3600), Source::Remembered);
    assert_eq!(measured(-8 * 24 * 3600), Source::Measured);
    assert_eq!(measured(8 * 24 * 3600), Source::Measured);

    std::fs::write(memory.file().unwrap(), "{\"version\": 1, \"drives\": 7}").unwrap();
    assert_eq!(ask(&path, ProbeChoice::Auto).unwrap().source, Source::Measured);
    assert_eq!(ask(&path, ProbeChoice::Auto).unwrap().source, Source::Remembered);
}

#[test]
fn an_unwritable_memory_is_told_and_costs_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let path = hole(&dir, FILE_BYTES_MIN);
    for memory in [Memory::in_dir("/proc/no/such"), Memory::none()] {
        let probed = drive_rates(&path, &ReaderOptions::default(), ProbeChoice::Auto, &memory).unwrap().unwrap();
        assert!(probed.notice.as_deref().is_some_and(|n| n.contains("measured again")), "{probed:?}");
    }
}

#[test]
fn small_and_missing_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = hole(&dir, FILE_BYTES_MIN - 1);
    let (options, memory) = (ReaderOptions::default(), Memory::none());
    assert_eq!(drive_rates(&path, &options, ProbeChoice::Auto, &memory).unwrap(), None);
    let forced = drive_rates(&path, &options, ProbeChoice::Force, &memory);
    assert!(matches!(forced, Err(ProbeError::TooSmall { .. })), "{forced:?}");
    assert!(matches!(measure_now(&path, &options), Err(ProbeError::TooSmall { .. })));
    let error = drive_rates(&dir.path().join("none"), &options, ProbeChoice::Auto, &memory).unwrap_err();
    assert!(error.to_string().contains("none"), "{error}");
}

#[test]
fn every_way_of_reading_can_be_measured() {
    let dir = tempfile::tempdir().unwrap();
    let path = hole(&dir, FILE_BYTES_MIN);
    for (io, direct) in [
        (ReaderChoice::Pread, DirectChoice::Off),
        (ReaderChoice::Pread, DirectChoice::Auto),
        (ReaderChoice::Auto, DirectChoice::Off),
    ] {
        let rates = measure_now(&path, &ReaderOptions { io, direct, ..ReaderOptions::default() }).unwrap();
        assert!(rates.bulk.gb_per_s > 0.0 && rates.rows.reads_per_s > 0.0, "{io:?} {direct:?}: {rates:?}");
    }
}
