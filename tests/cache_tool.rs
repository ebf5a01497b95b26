//! `ds4-cache` as a user meets it: what it prints, what it writes, what it refuses and how.
//! Owns small traces made by code; numbers are compared with the library, with live runs and with formulas.
//! Surprising fact: the line that `tune` recommends is pasted back into `ds4`, word by word.

mod cli_rig;

use std::path::{Path, PathBuf};

use assert_cmd::Command;
use cache_policy::policies::KNOWN;
use cache_policy::{Bytes, Directory, ExpertIdx, LayerIdx, Phase, TraceHeader, TraceLayer, TraceWriter, by_name, sim};
use cli_rig::made_models::b;
use cli_rig::{Live, command, ds4, ds4_b, finish, json, names_in, scratch};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const LAYERS: u16 = 3;
const EXPERTS: u16 = 8;
const TOP_K: u16 = 2;

/// Exit code, stdout, stderr.
fn tool(args: &[&str]) -> (i32, String, String) {
    let out = Command::new(env!("CARGO_BIN_EXE_ds4-cache")).env("HOME", scratch("home")).args(args).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (out.status.code().unwrap(), text(out.stdout), text(out.stderr))
}

#[track_caller]
fn good(args: &[&str]) -> String {
    let (code, stdout, stderr) = tool(args);
    assert_eq!(code, 0, "{args:?}: {stderr}");
    stdout
}

/// Fails with `code`, nothing on stdout, and a last line that has all of `parts`.
#[track_caller]
fn bad(args: &[&str], code: i32, parts: &[&str]) {
    let (found, stdout, stderr) = tool(args);
    assert_eq!(found, code, "{args:?}: {stderr}");
    assert!(stdout.is_empty() && !stderr.contains("panicked"), "{args:?}: {stdout}{stderr}");
    let said = if code == 2 { stderr.as_str() } else { stderr.lines().last().unwrap_or_default() };
    for part in parts {
        assert!(said.contains(part), "{args:?}: {part:?} is missing in {stderr:?}");
    }
}

fn header(model: u8) -> TraceHeader {
    let layer = |l| TraceLayer { layer: LayerIdx(l), experts: EXPERTS, top_k: TOP_K, expert_bytes: Bytes(1 << 20) };
    TraceHeader { model: [model; 32], layers: (0..LAYERS).map(layer).collect() }
}

/// Routes of token `t`: skewed, and different in every layer.
fn routes(t: u64) -> Vec<(LayerIdx, [ExpertIdx; 2])> {
    let one = |layer: u16| {
        let mixed = (t * 7 + u64::from(layer) * 3) * (t % 5 + 1);
        let first = (mixed % 11).min(7) as u16;
        (LayerIdx(layer), [ExpertIdx(first), ExpertIdx((first + 1 + (mixed % 3) as u16) % EXPERTS)])
    };
    (0..LAYERS).map(one).collect()
}

/// A trace of `prefill` and `decode` tokens.
fn trace_bytes(model: u8, prefill: u64, decode: u64) -> Vec<u8> {
    let mut writer = TraceWriter::new(&header(model)).unwrap();
    let mut bytes = Vec::new();
    writer.session(0);
    for t in 0..prefill + decode {
        match t {
            0 if prefill > 0 => writer.phase(Phase::Prefill),
            t if t == prefill => writer.phase(Phase::Decode),
            _ => {}
        }
        writer.token(t as u32, 1);
        for (layer, ids) in routes(t) {
            writer.route(layer, &ids).unwrap();
        }
    }
    writer.finish(&mut |part| bytes.extend_from_slice(part));
    bytes
}

fn put(folder: &Path, name: &str, bytes: &[u8]) -> String {
    std::fs::write(folder.join(name), bytes).unwrap();
    folder.join(name).to_str().unwrap().to_owned()
}

/// A scratch folder and a good trace in it.
fn with_trace(name: &str) -> (PathBuf, String) {
    let folder = scratch(name);
    let trace = put(&folder, "good.routes", &trace_bytes(1, 20, 200));
    (folder, trace)
}

fn rows<'a>(report: &'a Value, phase: &str, policy: &str) -> Vec<&'a Value> {
    let rows = report["rows"].as_array().unwrap();
    rows.iter().filter(|r| r["phase"] == phase && r["policy"] == policy).collect()
}

#[test]
fn replay_counts_what_the_library_counts() {
    let (_, trace) = with_trace("tool-replay");
    let flags = ["replay", &trace, "--policy", "all", "--budget", "100%,50%,6"];
    let report: Value = serde_json::from_str(&good(&[&flags[..], &["--json"]].concat())).unwrap();
    assert_eq!((report["prefill_tokens"].as_u64(), report["decode_tokens"].as_u64()), (Some(20), Some(200)));
    for (name, _) in KNOWN {
        let found = [rows(&report, "prefill", name), rows(&report, "decode", name)];
        for (at, slots) in [6, 12, 24].into_iter().enumerate() {
            let layers = (0..LAYERS).map(|l| (LayerIdx(l), EXPERTS)).collect();
            let shape = cache_policy::ClassShape { layers, slots };
            let mut directory = Directory::new(&[shape], &by_name(name).unwrap());
            let mut count = |tokens: std::ops::Range<u64>| {
                let all: Vec<_> = tokens.flat_map(routes).collect();
                sim::replay(&mut directory, all.iter().map(|(l, ids)| (*l, ids.as_slice()))).unwrap()
            };
            for (tally, rows) in [count(0..20), count(20..220)].iter().zip(&found) {
                let row = rows[at];
                let number = |key: &str| row[key].as_u64().unwrap();
                assert_eq!((number("slots"), number("misses")), (slots as u64, tally.misses), "{name}");
                assert_eq!((number("hits"), number("evictions")), (tally.hits, tally.evictions), "{name}");
                assert_eq!((number("requests"), number("all_hit_requests")), (tally.requests, tally.all_hit), "{name}");
                assert_eq!(number("cold_misses") + number("warm_misses"), tally.misses);
                assert_eq!((number("read_bytes"), number("cache_bytes")), (tally.misses << 20, (slots as u64) << 20));
                assert!(row["optimum_ratio"].as_f64().unwrap() >= 1.0 || row["phase"] == "decode", "{row}");
            }
        }
    }
    assert_eq!(rows(&report, "decode", "optimum").len(), 3);
    let csv = good(&[&flags[..], &["--csv"]].concat());
    assert_eq!(csv.lines().count(), 1 + report["rows"].as_array().unwrap().len());
    assert!(csv.starts_with("phase,budget,slots,share,cache_bytes,policy,"), "{csv}");
    let text = good(&flags);
    for part in ["20 prefill and 200 decode tokens", "\nprefill\n", "\ndecode\n", "x optimum", "100 %", "6 slots"] {
        assert!(text.contains(part), "{part:?} is missing in {text}");
    }
    assert!(text.contains("At 100 % (24 slots) nothing is ever read twice"), "{text}");
    let never = good(&["replay", &trace, "--optimum", "never"]);
    assert!(!never.contains("optimum  "), "{never}");
}

#[test]
fn a_replay_of_a_live_run_counts_what_the_run_counted() {
    let folder = scratch("tool-live");
    let (trace, stats) = (folder.join("t.routes"), folder.join("stats.json"));
    for policy in ["lru", "adaptive"] {
        let mut run = command();
        run.arg("-m").arg(b()).args(["-p", "hello there, how are you", "-n", "14", "--ssd-streaming"]);
        run.args(["--ssd-streaming-cache-experts", "13", "--ssd-streaming-cold", "--cache-policy", policy]);
        finish(run.arg("--trace-routes").arg(&trace).arg("--stats-json").arg(&stats)).ok();
        let trace = trace.to_str().unwrap();
        let report = good(&["replay", trace, "--policy", policy, "--budget", "13", "--json"]);
        let (report, stats): (Value, Value) = (serde_json::from_str(&report).unwrap(), json(&stats));
        for phase in ["prefill", "decode"] {
            let row = rows(&report, phase, policy)[0];
            for key in ["hits", "misses", "evictions"] {
                assert_eq!(row[key], stats["cache"][phase][key], "{policy} {phase} {key}");
            }
        }
        assert_eq!(report["decode_tokens"], 13, "the last of 14 tokens needs no pass");
        assert_eq!(report["prefill_tokens"], stats["prompt_tokens"]);
    }
}

#[test]
fn curves_fall_and_speed_follows_from_misses() {
    let (folder, trace) = with_trace("tool-curve");
    let (csv, svg) = (folder.join("c.csv"), folder.join("c.svg"));
    let files = ["-o", csv.to_str().unwrap(), "--svg", svg.to_str().unwrap()];
    let speed = ["--drive-gbs", "0.5", "--step-ms", "4", "--policy", "lru", "--points", "19"];
    let text = good(&[&["curve", &trace][..], &files, &speed].concat());
    assert!(text.contains("Floor: 6 slots") && text.contains("t/s optimum"), "{text}");
    let mut reader = csv::Reader::from_path(&csv).unwrap();
    let (mut stack, mut replayed) = (Vec::new(), Vec::new());
    for record in reader.records() {
        let record = record.unwrap();
        let number = |at: usize| record[at].parse::<f64>().unwrap();
        let expected = 1.0 / (0.004 + number(5) / 0.5e9);
        assert!((number(6) - expected).abs() < 1e-3 * expected, "{record:?}");
        match &record[0] {
            // The first list is the stack distances', the second the replays'.
            "lru" if stack.len() < 19 => stack.push((number(1), number(4))),
            "lru" => replayed.push((number(1), number(4))),
            other => assert_eq!(other, "optimum"),
        }
    }
    assert!(stack.is_sorted_by(|a, b| a.0 < b.0 && a.1 >= b.1), "{stack:?}");
    assert_eq!((stack.len(), replayed.len()), (19, 19));
    for (a, b) in stack.iter().zip(&replayed) {
        assert!(a.0 == b.0 && (a.1 - b.1).abs() <= 0.05 * b.1.max(0.2), "stack {a:?}, replay {b:?}");
    }
    let picture = std::fs::read_to_string(&svg).unwrap();
    for part in ["<svg", "floor 6", "optimum (Belady)", "tokens/s at 0.5 GB/s", "misses a token, decode"] {
        assert!(picture.contains(part), "{part:?} is missing");
    }
    assert!(!good(&["curve", &trace]).contains("t/s"));
    bad(&["curve", &trace, "--drive-gbs", "2"], 2, &["both --drive-gbs and --step-ms"]);
    bad(&["curve", &trace, "--memory-gbs", "2"], 2, &["needs --model"]);
    bad(&["curve", &trace, "--step-ms", "0"], 2, &["above 0"]);
    bad(&["curve", &trace, "--svg", "/nowhere/x.svg"], 1, &["/nowhere/x.svg"]);
}

#[test]
fn pairs_of_one_model_are_compared() {
    let (folder, trace) = with_trace("tool-compare");
    let other = put(&folder, "other.routes", &trace_bytes(1, 0, 90));
    let text = good(&["compare", &trace, &other, "--budget", "50%,100%"]);
    for part in ["decode tokens", "200", "90", "Overlap of expert use", "B after A"] {
        assert!(text.contains(part), "{part:?} is missing in {text}");
    }
    // At 100 % everything that A used is there when B begins: B misses nothing.
    let last = text.lines().find(|l| l.starts_with("100 %")).unwrap();
    assert!(last.split_whitespace().rev().take(3).eq(["%", "100.0", "0"]), "{text}");
    let report = |name: &str, trace: &str| put(&folder, name, good(&["replay", trace, "--json"]).as_bytes());
    let (a, b) = (report("a.json", &trace), report("b.json", &other));
    let text = good(&["compare", &a, &b]);
    assert!(text.contains("The largest difference in decode") && !text.contains("prefill"), "{text}");
    assert!(good(&["compare", &a, &a]).contains("No difference in decode"));
    let stranger = put(&folder, "stranger.routes", &trace_bytes(2, 0, 9));
    bad(&["compare", &trace, &stranger], 1, &["0101010101010101", "0202020202020202", "one model file"]);
    bad(&["compare", &a, &report("s.json", &stranger)], 1, &["0202020202020202", "one model file"]);
    bad(&["compare", &a, &trace], 2, &["two of a kind"]);
    bad(&["compare", &a, &put(&folder, "x.json", b"{}")], 1, &["x.json", "not a result of ds4-cache replay"]);
}

#[test]
fn traces_that_are_none() {
    let (folder, trace) = with_trace("tool-bad");
    let bytes = std::fs::read(&trace).unwrap();
    let cut = put(&folder, "cut.routes", &bytes[..bytes.len() - 5]);
    bad(&["replay", &cut], 1, &["cut.routes", "without its closing block", "--partial"]);
    let (code, partial, said) = tool(&["replay", &cut, "--partial"]);
    assert!(
        code == 0 && partial.contains("200 decode tokens") && said.contains("what was read before is used"),
        "{said}"
    );
    for len in [1, 7, 30, 60] {
        let short = put(&folder, "short.routes", &bytes[..len]);
        bad(&["replay", &short], 1, &["short.routes", "without its closing block"]);
        bad(&["replay", &short, "--partial"], 1, &["short.routes"]);
    }
    let mut broken = bytes.clone();
    let middle = bytes.len() / 2;
    broken[middle] ^= 0x10;
    bad(
        &["replay", &put(&folder, "broken.routes", &broken)],
        1,
        &["broken.routes", "checksum", "record the trace again"],
    );
    bad(&["replay", &put(&folder, "broken.routes", &broken), "--partial"], 1, &["checksum"]);
    bad(&["replay", &put(&folder, "empty.routes", b"")], 1, &["empty.routes", "the trace is empty"]);
    bad(&["curve", &put(&folder, "text.routes", b"what is this")], 1, &["text.routes", "not a routing trace"]);
    bad(&["replay", "/nowhere.routes"], 1, &["/nowhere.routes", "No such file"]);
    bad(&["replay", folder.to_str().unwrap()], 1, &["directory"]);
    bad(&["replay", &put(&folder, "none.routes", &trace_bytes(1, 0, 0))], 1, &["none.routes", "has no routes"]);
    let joined = put(&folder, "joined.routes", &[&bytes[..], &bytes].concat());
    bad(&["replay", &joined], 1, &["two files were joined"]);
}

#[test]
fn flags_that_make_no_sense() {
    let (_, trace) = with_trace("tool-flags");
    let known = "lru, lfu, clock, s3-fifo, sieve, window-random, layer-aware, adaptive";
    bad(&["replay", &trace, "--policy", "lru,mru"], 2, &["unknown cache policy 'mru'", known]);
    bad(&["curve", &trace, "--policy", "mru"], 2, &["unknown cache policy 'mru'", known]);
    bad(&["compare", &trace, &trace, "--policy", "mru"], 2, &[known]);
    bad(
        &["replay", &trace, "--budget", "50%,5"],
        2,
        &["5 of 24 experts", "one token uses 6 (3 layers x 2)", "25% or 6"],
    );
    bad(&["replay", &trace, "--budget", "0.001GB"], 2, &["0.001GB", "one token uses 6"]);
    bad(&["replay", &trace, "--budget", "half"], 2, &["--budget half", "such as 25%"]);
    bad(&["replay", &trace, "--json", "--csv"], 2, &["--csv"]);
    bad(&["replay"], 2, &["TRACE"]);
    bad(&["unplan"], 2, &["unplan"]);
}

#[test]
fn a_trace_of_another_model_is_refused() {
    let (_, trace) = with_trace("tool-stranger");
    let model = b().to_str().unwrap();
    let parts = ["good.routes", "the trace is of model 0101010101010101", "record a trace with this file"];
    bad(&["curve", &trace, "--model", model], 1, &parts);
    bad(&["plan", model, "--trace", &trace, "--drive-gbs", "1"], 1, &parts);
}

/// A trace of model b.
fn record_b(folder: &Path) -> String {
    let trace = folder.join("b.routes");
    let path = trace.to_str().unwrap();
    let stream = ["--ssd-streaming", "--ssd-streaming-cache-experts", "20", "--trace-routes", path];
    ds4_b(&[&["-p", "hello there, how are you", "-n", "40"][..], &stream].concat()).ok();
    path.to_owned()
}

#[test]
fn plans_say_what_they_do_not_know() {
    let folder = scratch("tool-plan");
    let (trace, model) = (record_b(&folder), b().to_str().unwrap());
    let speed = ["--drive-gbs", "0.001", "--step-ms", "2"];
    let text = good(&[&["plan", model][..], &speed].concat());
    for part in
        ["automatic cache", "floor", "all hits", "hit rate is worth", "is unknown without routes", "--trace-routes"]
    {
        assert!(part == "all hits" || text.contains(part), "{part:?} is missing in {text}");
    }
    // With every expert cached the step is all there is.
    assert!(text.lines().any(|l| l.trim().starts_with("100.0 %") && l.trim().ends_with("500")), "{text}");
    assert!(!text.contains("ds4 -m"), "no advice without a trace: {text}");
    let text = good(&[&["plan", model, "--trace", &trace][..], &speed].concat());
    for part in ["hit rate", "t/s optimum", "Use ", "ds4 -m ", "--ssd-streaming-cache-experts "] {
        assert!(text.contains(part), "{part:?} is missing in {text}");
    }
    let far = good(&[&["plan", model, "--trace", &trace, "--target-tps", "501"][..], &speed].concat());
    assert!(far.contains("501 t/s is out of reach here") && far.contains("no cache can give it"), "{far}");
    let near = good(&[&["plan", model, "--trace", &trace, "--target-tps", "0.001"][..], &speed].concat());
    assert!(near.contains("Use 10 slots, the smallest that gives"), "{near}");
    bad(&["plan", model], 1, &["rate of the drive is not known", "--drive-gbs"]);
    bad(&["plan", model, "--target-tps", "3"], 2, &["--trace"]);
    bad(&["plan", "/nowhere.gguf", "--drive-gbs", "1"], 1, &["/nowhere.gguf"]);
    bad(&["plan", model, "--drive-gbs", "1", "--simulate-used-memory", "5"], 2, &["--simulate-used-memory"]);
    let curve = good(&[&["curve", &trace, "--model", model][..], &speed].concat());
    assert!(curve.contains("t/s optimum"), "{curve}");
}

#[test]
fn tune_recommends_flags_that_work() {
    let folder = scratch("tool-tune");
    let prompt = put(&folder, "prompt.txt", b"hello there, how are you");
    let (model, kept) = (b().to_str().unwrap(), folder.join("kept.routes"));
    let flags = ["--prompt-file", &prompt, "-n", "30", "--temp", "0", "--keep-trace", kept.to_str().unwrap()];
    let text = good(&[&["tune", model, "--run-budget", "15", "--drive-gbs", "1"][..], &flags].concat());
    let line = text.lines().find(|l| l.trim().starts_with("ds4 -m ")).unwrap_or_else(|| panic!("no flags in {text}"));
    let words: Vec<&str> = line.split_whitespace().skip(1).chain(["--plan"]).collect();
    let plan = ds4(&words).ok();
    let slots = words[words.iter().position(|w| *w == "--ssd-streaming-cache-experts").unwrap() + 1];
    assert!(plan.text().contains(&format!("asked {slots} slots")), "{}", plan.text());
    assert!(text.contains("29 tokens were decoded") || text.contains("30 generated tokens"), "{text}");
    let decoded: Value =
        serde_json::from_str(&good(&["replay", kept.to_str().unwrap(), "--budget", "15", "--json"])).unwrap();
    assert_eq!(decoded["decode_tokens"], 29);
    assert_eq!(names_in(&folder), ["kept.routes", "prompt.txt"]);
    bad(&["tune", model, "--prompt-file", "/nowhere.txt"], 1, &["/nowhere.txt"]);
    bad(&["tune", model, "--prompt-file", &put(&folder, "blank.txt", b" \n")], 2, &["blank.txt is empty"]);
    bad(&["tune", model, "--prompt-file", &prompt, "--run-budget", "9"], 1, &["9 experts", "routes 10"]);
    bad(&["tune", model, "--prompt-file", &prompt, "--temp=-1"], 2, &["temp"]);
    let nowhere = ["tune", model, "--prompt-file", &prompt, "--keep-trace", "/nowhere/t"];
    bad(&nowhere, 1, &["--keep-trace: cannot write /nowhere/t", "no folder /nowhere"]);
    let full = ["tune", model, "--prompt-file", &prompt, "-n", "3", "--keep-trace", "/dev/full"];
    bad(&full, 1, &["--keep-trace: cannot write /dev/full"]);
}

#[test]
fn top_shows_the_last_record_of_a_run() {
    let folder = scratch("tool-top");
    let file = folder.join("now.json");
    let path = file.to_str().unwrap();
    let stream = ["--ssd-streaming", "--ssd-streaming-cache-experts", "14", "--snapshot-file", path];
    ds4_b(&[&["-p", "hello there", "-n", "6"][..], &stream].concat()).ok();
    let text = good(&["top", path, "--once"]);
    for part in ["(deepseek41), process ", "14: ", "hits ", "drive ", "a cell is one expert", "/8"] {
        assert!(text.contains(part), "{part:?} is missing in {text}");
    }
    assert_eq!(text.lines().filter(|l| l.ends_with("/8")).count(), 5, "a row for every layer: {text}");
    bad(&["top", path], 2, &["needs a terminal", "--once"]);
    bad(&["top", "/nowhere.json", "--once"], 1, &["/nowhere.json", "--snapshot-file"]);
    bad(&["top", &put(&folder, "x.json", b"{\"a\":1}"), "--once"], 1, &["x.json", "not a snapshot"]);
}

/// A view that is ended from outside leaves neither its picture nor a terminal without echo behind.
#[test]
fn top_gives_the_terminal_back_when_it_is_ended() {
    let folder = scratch("tool-top-ended");
    let (file, pid) = (folder.join("now.json"), folder.join("pid"));
    ds4_b(&["-p", "x", "-n", "2", "--ssd-streaming", "--snapshot-file", file.to_str().unwrap()]).ok();
    if std::process::Command::new("script").arg("--version").output().is_err() {
        println!("notice: no program script here, which would give ds4-cache a terminal");
        return;
    }
    let view = format!("exec '{}' top '{}'", env!("CARGO_BIN_EXE_ds4-cache"), file.display());
    let line = format!("echo $$ > '{}'; {view}", pid.display());
    for signal in [Signal::TERM, Signal::HUP, Signal::INT] {
        let mut script = std::process::Command::new("script");
        let live = Live::start(script.args(["-qefc", &line, "/dev/null"]).env("TERM", "xterm"));
        live.wait_for_output(200);
        let number = std::fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
        kill_process(Pid::from_raw(number).unwrap(), signal).unwrap();
        let ran = live.end();
        assert_eq!(ran.code, Some(1), "{signal:?}: {:?}", ran.text());
        // Out of the other screen, and the cursor is seen.
        let text = ran.text();
        let (_, after) = text.rsplit_once("\x1b[?1049l").unwrap_or_else(|| panic!("{signal:?}: {text:?}"));
        assert!(after.contains("\x1b[?25h") && after.contains("ds4-cache: interrupted"), "{signal:?}: {after:?}");
    }
}
