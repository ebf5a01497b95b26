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
    let (_, stats) = run(b(), &cache, &dir, &["--probe", "force"]);
    assert!(stats["drive"].is_null() && !cache.exists());
}
