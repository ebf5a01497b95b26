//! Files that show what a run does, to other programs and to the next run: snapshots, traces, hotlists; and what is read ahead.
//! Owns no bad input that needs no file. Surprising fact: every number is compared with `--stats-json` of the same run.

mod cli_rig;

use std::path::Path;

use cache_policy::{Event, Phase, TraceHeader, TraceReader};
use cli_rig::drawing::drawn;
use cli_rig::made_models::b;
use cli_rig::{Live, command, ds4_b, finish, json, names_in, scratch};
use ds4::obs::snapshot::Snapshot;

#[test]
fn the_last_snapshot_agrees_with_the_counters() {
    let folder = scratch("snapshot");
    let (file, stats) = (folder.join("now.json"), folder.join("stats.json"));
    let args = ["-p", "hello there", "-n", "12", "--ssd-streaming", "--ssd-streaming-cache-experts", "14"];
    let mut command = command();
    command.arg("-m").arg(b()).args(args).arg("--stats-json").arg(&stats).arg("--snapshot-file").arg(&file);
    finish(&mut command).ok();
    let (now, stats) = (Snapshot::read(&file).unwrap(), json(&stats));
    let number = |key: &str| stats[key].as_u64().unwrap();
    assert!(now.is_last && now.pid > 0 && now.arch == "deepseek41" && now.model == b().to_str().unwrap());
    assert_eq!((now.hits, now.misses), (number("expert_hits"), number("expert_misses")));
    assert_eq!((now.evictions, now.decode_tokens), (number("evictions"), 11));
    assert_eq!(now.tokens, number("prompt_tokens") + 11);
    assert_eq!(now.decode_hit_rate, stats["decode_hit_rate"].as_f64());
    assert_eq!((now.reads_in_flight, now.read_bytes), (0, stats["reads"]["device_bytes"].as_u64().unwrap()));
    let slots = now.slots;
    assert_eq!((slots.total, slots.filling, slots.leased, slots.empty + slots.valid), (14, 0, 0, 14));
    assert_eq!(now.layers.iter().map(|l| (l.layer, l.experts)).collect::<Vec<_>>(), [0, 1, 2, 3, 4].map(|l| (l, 8)));
    assert_eq!(now.layers.iter().map(|l| l.cached.len() as u64).sum::<u64>(), slots.valid);
    let uses: u64 = now.layers.iter().flat_map(|l| &l.uses).map(|&u| u64::from(u)).sum();
    assert_eq!(uses, now.hits + now.misses);
    assert_eq!(names_in(&folder), ["now.json", "stats.json"], "nothing else is left behind");
}

#[test]
fn a_running_process_shows_itself() {
    let file = scratch("snapshot-live").join("now.json");
    let mut command = command();
    command.arg("-m").arg(b()).args(["--ssd-streaming", "--snapshot-file"]).arg(&file);
    let mut live = Live::start(&mut command);
    live.wait_for("type a message");
    let begin = Snapshot::read(&file).unwrap();
    assert!(!begin.is_last && begin.tokens == 0, "{begin:?}");
    live.say("hello");
    live.wait_for("generation: ");
    let deadline = std::time::Instant::now() + cli_rig::PATIENCE;
    while Snapshot::read(&file).unwrap().tokens == 0 {
        assert!(std::time::Instant::now() < deadline, "no snapshot after the answer");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    live.end().ok();
    assert!(Snapshot::read(&file).unwrap().is_last);
}

#[test]
fn snapshots_need_a_file_that_can_be_made() {
    for path in ["/nonexistent/now.json", "/dev/null", "/tmp"] {
        let ran = ds4_b(&["-p", "x", "-n", "1", "--snapshot-file", path]);
        ran.failed(1, &["--snapshot-file", path]);
    }
}

#[test]
fn the_drawn_run_agrees_with_the_counters() {
    let folder = scratch("drawn");
    let (file, stats) = (folder.join("run.json"), folder.join("stats.json"));
    let args = ["-p", "hello there", "-n", "12", "--ssd-streaming", "--ssd-streaming-cache-experts", "14"];
    let mut command = command();
    command.arg("-m").arg(b()).args(args).arg("--stats-json").arg(&stats).arg("--trace-file").arg(&file);
    finish(&mut command).ok();
    let (rows, stats) = (drawn(&file), json(&stats));
    let count = |row: &str, name: &str| rows[row].iter().filter(|r| r.what == name).count() as u64;
    assert_eq!((count("passes", "prefill"), count("passes", "token")), (1, 11));
    // Five layers, each in two halves, in one sweep and eleven steps.
    assert_eq!((count("layers", "attention"), count("layers", "experts")), (60, 60));
    assert_eq!(rows["reads"].len() as u64, stats["reads"]["pieces"].as_u64().unwrap());
    let bytes: u64 = rows["reads"].iter().filter_map(|r| r.args["bytes"].as_u64()).sum();
    assert!(bytes <= stats["reads"]["device_bytes"].as_u64().unwrap() && bytes > 0);
    let whole: f64 = rows["passes"].iter().map(|r| r.took).sum();
    let halves: f64 = rows["layers"].iter().map(|r| r.took).sum();
    assert!(halves <= whole && halves > 0.0, "{halves} us of {whole}");
    assert_eq!(names_in(&folder), ["run.json", "stats.json"], "nothing else is left behind");
}

#[test]
fn a_drawing_needs_a_file_that_can_be_made_and_outlives_a_failure() {
    for path in ["/nonexistent/run.json", "/tmp"] {
        ds4_b(&["-p", "x", "-n", "1", "--trace-file", path]).failed(1, &["--trace-file", path]);
    }
    let file = scratch("drawn-failed").join("run.json");
    let ran = ds4_b(&["-p", "x", "-n", "1", "--ctx", "1", "--trace-file", file.to_str().unwrap()]);
    assert_ne!(ran.code, Some(0), "{}", ran.stderr);
    assert!(json(&file)["traceEvents"].is_array());
}

/// Everything in a trace: header, and events with tokens as (session, position, id, phase of the first route after it).
struct Trace {
    header: TraceHeader,
    sessions: Vec<u32>,
    tokens: Vec<(u32, u32)>,
    preloads: usize,
    prefill_routes: usize,
    decode_routes: Vec<usize>,
}

fn read_trace(path: &Path) -> Trace {
    let mut reader = TraceReader::new();
    reader.feed(&std::fs::read(path).unwrap());
    let (mut sessions, mut tokens, mut preloads) = (Vec::new(), Vec::new(), 0);
    let (mut prefill_routes, mut decode_routes, mut phase) = (0, Vec::new(), None);
    while let Some(event) = reader.next().unwrap() {
        match event {
            Event::Session(number) => sessions.push(number),
            Event::Token { position, id } => tokens.push((position, id)),
            Event::Preload(_) => preloads += 1,
            Event::Phase(now) => phase = Some(now),
            Event::Overlap(_) => assert_eq!(phase, Some(Phase::Prefill)),
            Event::Favour { .. } => {}
            Event::Route { .. } if phase == Some(Phase::Prefill) => prefill_routes += 1,
            Event::Route { experts, .. } => decode_routes.push(experts.len()),
        }
    }
    let header = reader.header().unwrap().clone();
    reader.finish().unwrap();
    Trace { header, sessions, tokens, preloads, prefill_routes, decode_routes }
}

#[test]
fn traces_hold_every_token_and_request() {
    let folder = scratch("trace");
    let (path, stats) = (folder.join("run.trace"), folder.join("stats.json"));
    for more in [&["--ssd-streaming", "--ssd-streaming-cache-experts", "13"][..], &[]] {
        let mut command = command();
        command.arg("-m").arg(b()).args(["-p", "hello there", "-n", "5", "--trace-routes"]).arg(&path);
        finish(command.args(more).arg("--stats-json").arg(&stats)).ok();
        let (trace, stats) = (read_trace(&path), json(&stats));
        let prompt = stats["prompt_tokens"].as_u64().unwrap() as usize;
        assert_eq!(trace.header.layers.len(), 5);
        assert!(trace.header.layers.iter().all(|l| (l.experts, l.top_k) == (8, 2) && l.expert_bytes.0 > 1000));
        assert_eq!(trace.sessions, [0]);
        assert_eq!(trace.tokens.iter().map(|t| t.0 as usize).collect::<Vec<_>>(), (0..prompt + 4).collect::<Vec<_>>());
        assert_eq!(trace.preloads as u64, stats["preloaded_experts"].as_u64().unwrap());
        assert_eq!(trace.decode_routes, [2; 20], "four passes through five layers");
        if !more.is_empty() {
            let requests = stats["cache"]["prefill"]["requests"].as_u64().unwrap();
            assert_eq!(trace.prefill_routes as u64, requests);
        }
    }
    assert_eq!(names_in(&folder), ["run.trace", "stats.json"]);
}

#[test]
fn a_conversation_is_traced_until_its_end() {
    let path = scratch("trace-repl").join("run.trace");
    let mut command = command();
    command.arg("-m").arg(b()).args(["--ssd-streaming", "-n", "3", "-c", "200", "--trace-routes"]).arg(&path);
    let mut live = Live::start(&mut command);
    for line in ["hello", "and again"] {
        live.say(line);
        live.wait_for("generation: ");
        live.say("/clear");
        live.wait_for("forgotten");
    }
    assert!(!path.exists(), "the file has its name when it is whole");
    assert_eq!(live.end().code, Some(0));
    let trace = read_trace(&path);
    assert_eq!(trace.sessions, [0, 1]);
    assert_eq!(trace.tokens.iter().filter(|t| t.0 == 0).count(), 2, "both sessions begin at position 0");
}

#[test]
fn identity_follows_the_header_and_not_the_name() {
    let folder = scratch("identity");
    let copy = folder.join("copy.gguf");
    std::fs::copy(b(), &copy).unwrap();
    let identity = |model: &Path| {
        let path = folder.join("x.trace");
        finish(command().arg("-m").arg(model).args(["-p", "x", "-n", "1", "--trace-routes"]).arg(&path)).ok();
        read_trace(&path).header.model
    };
    let first = identity(b());
    assert_eq!(identity(&copy), first);
    assert_ne!(identity(cli_rig::made_models::b_rules()), first);
}

#[test]
fn hotlists_are_learned_merged_and_preloaded() {
    let folder = scratch("hotlist");
    let (hot, stats) = (folder.join("hot.json"), folder.join("stats.json"));
    let run = |args: &[&str], files: &[(&str, &Path)]| {
        let mut command = command();
        command.arg("-m").arg(b()).args(["-p", "hello there", "-n", "16", "--ssd-streaming"]).args(args);
        for (flag, path) in files {
            command.arg(flag).arg(path);
        }
        let ran = finish(command.arg("--stats-json").arg(&stats)).ok();
        (ran, json(&stats))
    };
    let few = ["--ssd-streaming-cache-experts", "40", "--ssd-streaming-preload-experts", "12"];
    let cold = ["--ssd-streaming-cache-experts", "40", "--ssd-streaming-cold"];
    run(&cold, &[("--save-hotlist", &hot)]);
    let first = json(&hot);
    assert_eq!((first["format"].as_str(), first["version"].as_u64()), (Some("ds4-hotlist"), Some(1)));
    let weights = |list: &serde_json::Value| -> Vec<f64> {
        let layers = list["layers"].as_array().unwrap();
        layers.iter().flat_map(|l| l["weights"].as_array().unwrap()).map(|w| w.as_f64().unwrap()).collect()
    };
    let mut sorted = weights(&first);
    sorted.sort_by(|a, b| b.total_cmp(a));
    let (_, plain) = run(&few, &[]);
    let (ran, by_list) = run(&few, &[("--hotlist", &hot)]);
    let number = |stats: &serde_json::Value, key: &str| stats[key].as_u64().unwrap();
    assert_eq!((number(&plain, "preloaded_experts"), number(&by_list, "preloaded_experts")), (12, 12));
    // The same text again: the twelve most popular get all their requests as hits.
    assert_eq!(number(&by_list, "preload_used"), 12);
    assert_eq!(number(&by_list, "preload_hits") as f64, sorted[..12].iter().sum::<f64>());
    assert!(number(&by_list, "preload_hits") > number(&plain, "preload_hits"), "{plain} {by_list}");
    assert!(
        ran.stderr.contains("preload: 12 experts") && ran.stderr.contains("12 of them were used"),
        "{}",
        ran.stderr
    );
    // Saved over an earlier one, the counts add up but for the fading of a few tokens.
    run(&cold, &[("--save-hotlist", &hot)]);
    for (once, twice) in weights(&first).iter().zip(weights(&json(&hot))) {
        assert!((twice - 2.0 * once).abs() <= 0.001 * once, "{once}, then {twice}");
    }
    // A cold start does not load it.
    let (ran, stats) = run(&cold, &[("--hotlist", &hot)]);
    assert!(ran.stderr.contains("the hotlist is not loaded") && number(&stats, "preloaded_experts") == 0);
    assert_eq!(names_in(&folder), ["hot.json", "stats.json"]);
}

#[test]
fn hotlists_of_other_files_are_refused() {
    let folder = scratch("hotlist-bad");
    let (hot, junk) = (folder.join("hot.json"), folder.join("junk"));
    std::fs::write(&junk, "[1, 2").unwrap();
    let rules = cli_rig::made_models::b_rules();
    let args = ["-p", "x", "-n", "1", "--ssd-streaming"];
    finish(command().arg("-m").arg(rules).args(args).arg("--save-hotlist").arg(&hot)).ok();
    for flag in ["--hotlist", "--save-hotlist"] {
        let run = |path: &Path| finish(command().arg("-m").arg(b()).args(args).arg(flag).arg(path));
        run(&hot).failed(1, &["hot.json belongs to another model file"]);
        run(&junk).failed(1, &["junk is not a hotlist"]);
    }
    ds4_b(&["-p", "x", "--ssd-streaming", "--hotlist", "/nonexistent/hot"])
        .failed(1, &["/nonexistent/hot", "make one"]);
    ds4_b(&["-p", "x", "--hotlist", "h"]).failed(2, &["--ssd-streaming"]);
    ds4_b(&["-p", "x", "--ssd-streaming", "--save-hotlist", "/nonexistent/hot"])
        .failed(1, &["--save-hotlist", "no folder /nonexistent"]);
}

#[test]
fn lookahead_reads_ahead_and_changes_no_word() {
    let folder = scratch("lookahead");
    let stats = folder.join("stats.json");
    let args =
        ["-p", "hello there", "-n", "120", "--temp", "1", "--ssd-streaming", "--ssd-streaming-cache-experts", "20"];
    let text = ds4_b(&args).ok().text();
    for mode in ["off", "memory", "router", "both", "auto"] {
        let mut command = command();
        command.arg("-m").arg(b()).args(args).args(["--lookahead", mode, "--stats-json"]).arg(&stats);
        let ran = finish(&mut command).ok();
        assert_eq!(ran.text(), text, "{mode}");
        let found = &json(&stats)["lookahead"];
        if ["off", "auto"].contains(&mode) {
            continue;
        }
        assert_eq!(found["mode"], *mode);
        assert!(ran.stderr.contains(&format!("lookahead ({mode}): ")), "{}", ran.stderr);
        let number = |value: &serde_json::Value, key: &str| value[key].as_u64().unwrap();
        let total = &found["total"];
        let settled = number(total, "useful") + number(total, "late") + number(total, "wasted");
        assert!(number(total, "issued") >= settled, "{found}");
        for (predictor, is_asked) in [("memory", mode != "router"), ("router", mode != "memory")] {
            let recall = &found[predictor];
            assert_eq!(number(recall, "uses") > 0, is_asked, "{mode}: {found}");
            assert!(number(recall, "named") <= number(recall, "uses"), "{found}");
        }
        let layers = found["layers"].as_array().unwrap();
        assert_eq!(layers.iter().map(|l| number(l, "issued")).sum::<u64>(), number(total, "issued"));
        assert!(mode == "memory" || number(total, "issued") > 0, "{mode}: {found}");
    }
    assert_eq!(ds4_b(&["-p", "x", "--ssd-streaming", "--lookahead", "always"]).code, Some(2));
}
