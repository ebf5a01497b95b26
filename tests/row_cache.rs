//! `--row-cache`: n-gram rows that were read before come from memory; answers stay the same and the budget holds.
//! Never looks at times. Surprising fact: a generated text asks for few new rows, so even a tiny cache is hit.

mod cli_rig;

use std::ffi::OsStr;

use cli_rig::made_models::{a, b};
use cli_rig::{command, finish, json, scratch};
use serde_json::Value;

/// Runs model b on a prompt of repeating tokens; stdout and counters.
fn run(name: &str, args: &[&str]) -> (Vec<u8>, Value) {
    let folder = scratch(name);
    let (tokens, stats) = (folder.join("tokens.json"), folder.join("stats.json"));
    let ids: Vec<u32> = (0..300).map(|i| 3 + (i % 37) * 7 + (i / 150) * 300).collect();
    std::fs::write(&tokens, serde_json::to_string(&ids).unwrap()).unwrap();
    let mut command = command();
    command.arg("-m").arg(b()).arg("--tokens-file").arg(&tokens).args(["-n", "24", "--prefill-chunk", "16"]).args(args);
    let ran = finish(command.arg("--stats-json").arg(&stats)).ok();
    (ran.stdout, json(&stats))
}

#[test]
fn the_same_bytes_come_out_and_fewer_rows_are_read() {
    let number = |stats: &Value, key: &str| stats["rows"][key].as_u64().unwrap();
    for mode in [&[][..], &["--ssd-streaming", "--ssd-streaming-cache-experts", "10"]] {
        let (text, plain) = run("plain", mode);
        assert_eq!(number(&plain, "rows_cached"), 0, "off by default");
        // The last holds a few sets of rows only, so that rows leave.
        for budget in ["1GB", "0.01GB", "0.00001GB"] {
            let (cached_text, cached) = run("cached", &[mode, &["--row-cache", budget]].concat());
            assert_eq!(cached_text, text, "{mode:?} {budget}");
            assert!(number(&cached, "rows_cached") > 0, "{mode:?} {budget}: {cached}");
            let (all, read) = (number(&plain, "rows_read"), number(&cached, "rows_read"));
            assert_eq!(number(&cached, "rows_cached") + read, all, "{mode:?} {budget}");
            let planned = |stats: &Value| stats["planned_bytes"].as_u64().unwrap();
            // The larger ones hold all tables, 1.2 MiB; what a process has at its start differs by 0.2 MiB from run to run.
            if mode.is_empty() && budget != "0.00001GB" {
                let more = planned(&cached).saturating_sub(planned(&plain));
                assert!(more > 512 << 10, "{budget}: the plan does not count the cache: {more} bytes");
            }
        }
    }
}

#[test]
fn amounts_that_make_no_sense_are_refused() {
    let fails = |model: &OsStr, budget: &str, code: i32, parts: &[&str]| {
        let mut command = command();
        finish(command.arg("-m").arg(model).args(["-p", "x", "-n", "1", "--row-cache", budget])).failed(code, parts);
    };
    fails(b().as_os_str(), "lots", 2, &["--row-cache", "lots"]);
    fails(b().as_os_str(), "12", 2, &["--row-cache"]);
    fails(b().as_os_str(), "0.00000001GB", 1, &["--row-cache", "too small"]);
    fails(a().as_os_str(), "1GB", 1, &["no n-gram tables"]);
    // Zero is off, for any model.
    let mut command = command();
    finish(command.arg("-m").arg(b()).args(["-p", "x", "-n", "1", "--row-cache", "0GB"])).ok();
}

/// The tables of model b are small: a large budget takes no more than they could fill.
#[test]
fn a_budget_beyond_memory_is_cut_to_the_tables() {
    let (_, stats) = run("huge", &["--row-cache", "100000GB"]);
    assert!(stats["rows"]["rows_cached"].as_u64().unwrap() > 0);
    assert!(stats["planned_bytes"].as_u64().unwrap() < 1 << 30);
}
