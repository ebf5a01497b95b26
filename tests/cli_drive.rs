//! How `ds4` meets a drive: the probe and its flag, through the program. Owns no rates; any drive passes.
//! Surprising fact: the fixture is a model with a hole of 64 MiB behind its last tensor, which makes it large enough to be measured.

mod cli_rig;

use std::path::{Path, PathBuf};

use cli_rig::made_models::b;
use cli_rig::{Ran, command, finish, scratch};
use serde_json::Value;

/// Model b in a file that is large enough for the probe.
fn large(dir: &Path) -> PathBuf {
    let path = dir.join("large.gguf");
    std::fs::copy(b(), &path).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(65 << 20).unwrap();
    path
}

/// A short streamed run with its counters; `cache` is the user's cache directory.
fn run(model: &Path, cache: &Path, dir: &Path, args: &[&str]) -> (Ran, Value) {
    let stats = dir.join("stats.json");
    let base = ["-p", "x", "-n", "2", "-c", "128", "--ssd-streaming", "--stats-json"];
    let ran =
        finish(command().env("XDG_CACHE_HOME", cache).arg("-m").arg(model).args(base).arg(&stats).args(args)).ok();
    (ran, serde_json::from_slice(&std::fs::read(&stats).unwrap()).unwrap())
}

#[test]
fn the_drive_is_measured_once() {
    let dir = scratch("drive-probe");
    let (model, cache) = (large(&dir), dir.join("cache"));
    let kept = cache.join("ds4/drives.json");
    let (_, off) = run(&model, &cache, &dir, &["--probe", "off"]);
    assert!(off["drive"].is_null() && !kept.exists());
    let (_, first) = run(&model, &cache, &dir, &[]);
    assert!(first["drive"]["bulk"]["gb_per_s"].as_f64().unwrap() > 0.0 && kept.exists(), "{}", first["drive"]);
    let (_, again) = run(&model, &cache, &dir, &[]);
    assert_eq!(again["drive"], first["drive"], "remembered");
    let (_, forced) = run(&model, &cache, &dir, &["--probe", "force"]);
    assert_ne!(forced["drive"]["probe_ms"], first["drive"]["probe_ms"]);
    // A damaged memory is no reason to fail.
    std::fs::write(&kept, b"\xff{]").unwrap();
    assert!(!run(&model, &cache, &dir, &[]).1["drive"].is_null());
}

#[test]
fn a_memory_that_cannot_be_written_is_told_once() {
    let dir = scratch("drive-unwritable");
    let (ran, stats) = run(&large(&dir), Path::new("/proc/none"), &dir, &[]);
    assert!(!stats["drive"].is_null());
    let told = ran.stderr.matches("the drive will be measured again at the next start").count();
    assert_eq!(told, 1, "{}", ran.stderr);
}

#[test]
fn small_models_are_not_measured() {
    let dir = scratch("drive-small");
    let cache = dir.join("cache");
    for (choice, is_told) in [("auto", false), ("force", true)] {
        let (ran, stats) = run(b(), &cache, &dir, &["--probe", choice]);
        assert!(stats["drive"].is_null() && !cache.exists());
        assert_eq!(ran.stderr.contains("too small to measure its drive"), is_told, "{}", ran.stderr);
    }
}

/// Resident, and without n-gram tables: nothing is read once the weights are there.
#[test]
fn a_run_that_reads_nothing_says_that_nothing_was_measured() {
    let dir = scratch("drive-nothing");
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/deepseek_v4/a/model.gguf");
    std::fs::write(dir.join("tokens.json"), "[1, 2, 3]").unwrap();
    let told = |choice: &str| {
        let mut run = command();
        run.current_dir(&dir).arg("-m").arg(&model).args([
            "--tokens-file",
            "tokens.json",
            "-n",
            "1",
            "--probe",
            choice,
        ]);
        let ran = finish(&mut run).ok();
        ran.stderr.matches("note: --probe force measures nothing here: this run reads neither").count()
    };
    assert_eq!((told("force"), told("auto")), (1, 0));
}

/// `is_direct` of a streamed run of model b.
fn is_direct(name: &str, args: &[&str]) -> (bool, String) {
    let dir = scratch(name);
    let (ran, stats) = run(b(), &dir, &dir, args);
    (stats["is_direct"].as_bool().unwrap(), ran.stderr)
}

#[test]
fn direct_reads_as_asked() {
    let (on, text) = is_direct("direct-on", &["--direct", "on"]);
    assert!(on && !text.contains("page cache"), "{text}");
    let (off, text) = is_direct("direct-off", &["--direct", "off"]);
    assert!(!off && !text.contains("page cache"), "{text}");
}

/// The fixture fits in memory many times over, unless that is taken.
#[test]
fn small_models_go_through_the_page_cache() {
    let (auto, text) = is_direct("direct-auto", &[]);
    assert!(!auto && text.matches("reads go through the page cache").count() == 1, "{text}");
}

#[test]
fn the_forecast_comes_first_and_the_verdict_last() {
    let dir = scratch("forecast");
    let (ran, stats) = run(&large(&dir), &dir.join("cache"), &dir, &["--direct", "on"]);
    let at = |start: &str| ran.stderr.lines().position(|l| l.starts_with(start));
    let (bound, report) = (at("ds4: decode bound: ").unwrap(), at("ds4: prefill: ").unwrap());
    assert!(bound < report && at("ds4: decode: ").unwrap() > report, "{}", ran.stderr);
    let number =
        |object: &str, key: &str| stats[object][key].as_f64().unwrap_or_else(|| panic!("{object}.{key}: {stats}"));
    // Five layers of two experts a token.
    assert_eq!(number("forecast", "experts_per_token"), 10.0);
    assert!(number("forecast", "drive_gb_per_s") == stats["drive"]["bulk"]["gb_per_s"].as_f64().unwrap());
    let shares = number("achieved", "drive") + number("achieved", "slots") + number("achieved", "compute");
    assert!((shares - 1.0).abs() < 1e-9, "{shares}");
    let of_bound = number("achieved", "of_bound") * number("achieved", "bound_tps");
    assert!((of_bound / stats["decode_tps"].as_f64().unwrap() - 1.0).abs() < 1e-6);
}
