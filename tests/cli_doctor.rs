//! `ds4 --doctor`: what it finds of machine, drive and file, as table and as JSON. Owns no rates.
//! Surprising fact: a truncated file is told with everything else, and only the exit code is that of a failure.

mod cli_rig;

use std::path::{Path, PathBuf};

use cli_rig::made_models::b;
use cli_rig::{Ran, command, finish, scratch};
use serde_json::Value;

fn doctor(model: &Path, args: &[&str]) -> Ran {
    finish(command().env("XDG_CACHE_HOME", "/proc/none").arg("--doctor").arg("-m").arg(model).args(args))
}

/// Model b with a hole behind it that makes it large enough for the probe.
fn large(name: &str) -> PathBuf {
    let path = scratch(name).join("large.gguf");
    std::fs::copy(b(), &path).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(65 << 20).unwrap();
    path
}

#[test]
fn json_has_facts_rates_and_bounds() {
    let model = large("doctor-json");
    let found: Value = serde_json::from_str(&doctor(&model, &["--json"]).ok().text()).unwrap();
    let at = |path: &str| found.pointer(path).unwrap_or_else(|| panic!("{path}: {found:#}")).clone();
    assert!(at("/machine/kernel").as_str().unwrap().starts_with("Linux "));
    for number in ["/machine/processors", "/machine/memory_bytes", "/machine/usable_bytes", "/model/bytes"] {
        assert!(at(number).as_u64().unwrap() > 0, "{number}");
    }
    for yes in ["/model/file/is_ok", "/model/layout/is_ok", "/model/runs/is_ok"] {
        assert_eq!(at(yes), true, "{yes}");
    }
    assert!(!at("/drive/file_system").as_str().unwrap().is_empty());
    assert!(at("/drive/rates/bulk/gb_per_s").as_f64().unwrap() > 0.0);
    assert!(at("/drive/rates/bulk_points").as_array().unwrap().len() > 1);
    let bounds = at("/bounds");
    let bounds = bounds.as_array().unwrap();
    assert_eq!(bounds.last().unwrap()["budget"], "auto");
    // Ten experts a token, forty in all: the smallest budget, half, all, automatic.
    let slots: Vec<u64> = bounds.iter().map(|b| b["slots"].as_u64().unwrap()).collect();
    assert_eq!(slots, [10, 20, 40, 40]);
    for b in bounds {
        let tps = |key: &str| b[key].as_f64().unwrap();
        let rising = [tps("decode_tps_cold"), tps("decode_tps_share"), tps("decode_tps_hot")];
        assert!(rising.is_sorted() && tps("prefill_tps") > 0.0, "{b}");
    }
}

#[test]
fn the_table_has_all_sections() {
    let text = doctor(b(), &[]).ok().text();
    for part in [
        "Machine",
        "  kernel",
        "  memlock",
        "  GPU",
        "  GPU rates",
        "Drive under the model",
        "Model file",
        "Prediction",
        "auto",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    // The fixture is too small to measure a drive.
    assert!(text.contains("not measured: ") && text.contains("too small"), "{text}");
}

#[test]
fn a_truncated_file_is_told_last() {
    let model = scratch("doctor-cut").join("cut.gguf");
    let bytes = std::fs::read(b()).unwrap();
    std::fs::write(&model, &bytes[..bytes.len() - 5000]).unwrap();
    let ran = doctor(&model, &[]);
    ran.failed_late(1, &["cut.gguf", "past the end of the file"]);
    assert!(ran.text().contains("NO: ") && ran.text().contains("Machine"), "{}", ran.text());
    let json: Value = serde_json::from_slice(&doctor(&model, &["--json"]).stdout).unwrap();
    assert_eq!(json["model"]["file"]["is_ok"], false);
    doctor(Path::new("/no/such.gguf"), &[]).failed_late(1, &["/no/such.gguf"]);
}

#[test]
fn json_alone_is_refused() {
    finish(command().arg("--json")).failed(2, &["--doctor"]);
}
