//! `ds4-bench` as a user meets it: columns, regimes, budgets, appends, files that are whole after an interruption, bad input, comparison
//! and plots. Owns no speed: what is checked are counts, names and shapes. Surprising fact: the model is a random one of a few hundred
//! kilobytes, so a whole sweep takes a fraction of a second.

mod cli_rig;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use cli_rig::made_models::{b, b_rules, folder};
use cli_rig::{Live, Ran, finish, scratch};
use serde_json::Value;

/// `ds4-bench` in a folder of the test's own.
fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ds4-bench"));
    command.env("HOME", folder()).current_dir(folder()).stdin(Stdio::null());
    command
}

/// A text of a few thousand tokens.
fn text() -> &'static Path {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    FILE.get_or_init(|| {
        let path = folder().join("text.txt");
        let words = ["hello", "there", "expert", "cache", "drive", "token", "route", "layer"];
        let line = |i: usize| format!("{} {} {}.\n", words[i % 8], words[i / 8 % 8], i * i % 977);
        std::fs::write(&path, (0..400).map(line).collect::<String>()).unwrap();
        path
    })
}

fn bench<S: AsRef<OsStr>>(args: &[S]) -> Ran {
    finish(command().arg("-m").arg(b()).arg("--prompt-file").arg(text()).args(args))
}

/// A quick sweep: 8, 16 and 20 tokens, three generated at each.
const QUICK: [&str; 8] = ["--ctx-start", "8", "--ctx-max", "20", "--step-incr", "8", "--gen-tokens", "3"];

/// Rows as objects, by their column names.
#[track_caller]
fn rows(args: &[&str]) -> Vec<Value> {
    let ran = bench(&[&QUICK[..], args, &["-o", "jsonl"]].concat());
    assert_eq!(ran.code, Some(0), "{args:?}: {}", ran.stderr);
    ran.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn number(row: &Value, column: &str) -> f64 {
    row[column].as_f64().unwrap_or_else(|| panic!("{column} in {row}"))
}

fn numbers(rows: &[Value], column: &str) -> Vec<u64> {
    rows.iter().map(|row| number(row, column) as u64).collect()
}

fn words<'a>(rows: &'a [Value], column: &str) -> Vec<&'a str> {
    rows.iter().map(|row| row[column].as_str().unwrap()).collect()
}

/// Ended with `code` and one last line that has all of `parts`; nothing on stdout.
#[track_caller]
fn refused(ran: &Ran, code: i32, parts: &[&str]) {
    assert_eq!(ran.code, Some(code), "{}: {}", ran.what, ran.stderr);
    assert!(!ran.stderr.contains("panicked") && ran.stdout.is_empty(), "{}: {}{}", ran.what, ran.stderr, ran.text());
    let last = ran.stderr.lines().last().unwrap_or_default();
    assert!(last.starts_with("ds4-bench: "), "{}: {}", ran.what, ran.stderr);
    for part in parts {
        assert!(last.contains(part), "{}: {part:?} is missing in {last:?}", ran.what);
    }
}

#[test]
fn columns_are_those_of_the_known_tool_and_then_ours() {
    let ran = bench(&QUICK);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let text = ran.text();
    let header = "ctx_tokens,prefill_tokens,prefill_tps,gen_tokens,gen_tps,gen_first_ms,gen_steady_tokens,gen_steady_tps,\
        kvcache_bytes,cache_budget_bytes,cache_slots,cache_hits,cache_misses,cache_hit_rate,all_hit_layer_rate,evictions,\
        read_bytes,read_bytes_per_token,read_ms_p50,read_ms_p99,expert_wait_ms_per_token,row_wait_ms_per_token,rss_bytes,";
    assert!(text.starts_with(header), "{text}");
    let cells: Vec<Vec<&str>> = text.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!(cells.len(), 4);
    assert!(cells.iter().all(|row| row.len() == cells[0].len()), "{text}");
    assert_eq!(
        [1, 2, 3].map(|i| (cells[i][0], cells[i][1], cells[i][3], cells[i][6])),
        [("8", "8", "3", "2"), ("16", "8", "3", "2"), ("20", "4", "3", "2")]
    );
    // Nothing is streamed: counts are zero, rates are empty.
    let at = |name: &str| cells[0].iter().position(|c| *c == name).unwrap();
    assert_eq!([at("cache_slots"), at("cache_hit_rate"), at("read_bytes")].map(|i| cells[1][i]), ["0", "", "0"]);
}

#[test]
fn a_row_is_consistent() {
    for row in rows(&["--ssd-streaming", "--ssd-streaming-cache-experts", "12", "-t", "1"]) {
        let n = |column| number(&row, column);
        assert!(
            n("prefill_tps") > 0.0 && n("gen_tps") > 0.0 && n("gen_first_ms") > 0.0 && n("gen_steady_tps") > 0.0,
            "{row}"
        );
        let near = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-3;
        assert!(near(n("prefill_tps"), n("prefill_tokens") / n("prefill_ms") * 1e3), "{row}");
        let steady_ms = n("gen_steady_tokens") / n("gen_steady_tps") * 1e3;
        assert!(near(n("gen_tokens") / n("gen_tps") * 1e3, n("gen_first_ms") + steady_ms), "{row}");
        // Three tokens of five layers of two experts.
        assert_eq!(n("cache_hits") + n("cache_misses"), 30.0, "{row}");
        assert!(near(n("cache_hit_rate") + 1.0, n("cache_hits") / 30.0 + 1.0), "{row}");
        assert!(n("cache_misses") > 0.0 && n("read_bytes") > 0.0 && n("prefill_misses") > 0.0, "{row}");
        let expert = n("read_bytes") / n("cache_misses");
        assert!(near(expert, n("prefill_read_bytes") / n("prefill_misses")), "experts have one size: {row}");
        assert!(near(n("read_bytes_per_token"), n("read_bytes") / 3.0), "{row}");
        assert!(n("read_ms_p50") > 0.0 && n("read_ms_p50") <= n("read_ms_p99") && n("gen_drive_ms") > 0.0, "{row}");
        assert!(n("cache_slots") == 12.0 && expert * 12.0 <= n("cache_budget_bytes") && n("rss_bytes") > 1e6, "{row}");
        assert_eq!((n("threads"), n("ctx_alloc")), (1.0, 23.0), "{row}");
        for column in ["model", "model_id", "build", "machine", "backend", "arithmetic", "io"] {
            assert!(row[column].as_str().unwrap().len() > 2, "{column} in {row}");
        }
    }
    let state = numbers(&rows(&[]), "kvcache_bytes");
    assert!(state[0] < state[1] && state[1] < state[2], "the state grows with the context: {state:?}");
}

#[test]
fn generation_does_not_move_the_sweep_on() {
    // The same lengths whatever is generated or appended: tokens come from the text, and going back is exact.
    let key = |rows: &[Value]| {
        let sweep = rows.iter().filter(|row| row["mode"] == "sweep");
        sweep.map(|row| (number(row, "prefill_misses"), number(row, "prefill_tokens"))).collect::<Vec<_>>()
    };
    let all = ["--ssd-streaming", "--ssd-streaming-cache-experts", "40"];
    let plain = rows(&[&all[..], &["--gen-tokens", "0"]].concat());
    assert!(plain.iter().all(|row| number(row, "gen_tokens") == 0.0 && row["cache_hit_rate"].is_null()), "{plain:?}");
    assert!(plain.iter().all(|row| number(row, "gen_tps") == 0.0 && number(row, "gen_steady_tokens") == 0.0));
    assert_eq!(key(&plain).len(), 3);
    let first = number(&plain[0], "prefill_misses");
    assert_eq!(first, number(&rows(&all)[0], "prefill_misses"), "the first prefill is the same");
    // Factors in place of steps.
    assert_eq!(numbers(&rows(&["--step-mul", "1.5"]), "ctx_tokens"), [8, 12, 18, 20]);
}

#[test]
fn regimes_are_marked_and_measured_apart() {
    let streaming = ["--ssd-streaming", "--ssd-streaming-cache-experts", "40", "-r", "2"];
    let rows = rows(&[&streaming[..], &["--regimes", "new-text,cold,warm-repeat,preloaded"]].concat());
    assert_eq!(rows.len(), 4 * 2 * 3);
    let order: Vec<&str> = words(&rows, "regime").chunks(6).map(|six| six[0]).collect();
    assert_eq!(order, ["cold", "preloaded", "warm-repeat", "new-text"], "in order of time");
    for (regime, six) in order.iter().zip(rows.chunks(6)) {
        assert!(words(six, "regime").iter().all(|r| r == regime));
        assert_eq!(numbers(six, "rep"), [1, 1, 1, 2, 2, 2]);
        assert_eq!(numbers(six, "ctx_tokens"), [8, 16, 20, 8, 16, 20]);
        let misses = numbers(six, "prefill_misses");
        match *regime {
            // Opened anew each time: the same misses again.
            "cold" => assert!(misses[0] > 0 && misses[..3] == misses[3..], "{misses:?}"),
            // All 40 experts fit, and were read before.
            "preloaded" | "warm-repeat" => assert!(misses.iter().all(|m| *m == 0), "{regime}: {misses:?}"),
            _ => assert_eq!(numbers(six, "text_offset"), [20, 20, 20, 40, 40, 40]),
        }
        assert_eq!(numbers(six, "text_offset")[0], if *regime == "new-text" { 20 } else { 0 });
    }
}

#[test]
fn a_warm_up_is_not_recorded() {
    let args = ["--ssd-streaming", "--ssd-streaming-cache-experts", "40", "--regimes", "warm-repeat"];
    let rows = rows(&args);
    assert_eq!((rows.len(), numbers(&rows, "prefill_misses")), (3, vec![0, 0, 0]));
}

#[test]
fn budgets_in_one_run() {
    let rows = rows(&["--ssd-streaming", "--budgets", "10,20,0.0003GB"]);
    let slots = numbers(&rows, "cache_slots");
    assert_eq!((rows.len(), &slots[..6]), (9, &[10, 10, 10, 20, 20, 20][..]));
    assert!(slots[6] > 20 && slots[6] < 40, "{slots:?}");
    let bytes = numbers(&rows, "cache_budget_bytes");
    assert!(bytes[0] < bytes[3] && bytes[3] < bytes[6] && bytes[6] as f64 <= 0.0003 * f64::from(1 << 30), "{bytes:?}");
}

#[test]
fn appends_at_every_length() {
    let rows = rows(&["--append", "1,5,9", "--ssd-streaming", "--gen-tokens", "1"]);
    assert_eq!(words(&rows, "mode"), ["sweep", "append", "append", "append"].repeat(3));
    assert_eq!(numbers(&rows, "ctx_tokens"), [8, 9, 13, 17, 16, 17, 21, 25, 20, 21, 25, 29]);
    assert_eq!(numbers(&rows, "prefill_tokens"), [8, 1, 5, 9, 8, 1, 5, 9, 4, 1, 5, 9]);
    for row in rows.iter().filter(|row| row["mode"] == "append") {
        assert!(number(row, "prefill_ms") > 0.0 && number(row, "gen_tokens") == 0.0, "{row}");
        // Each layer asks for two experts of each appended token, eight at most.
        let asked = number(row, "prefill_hits") + number(row, "prefill_misses");
        assert!(asked >= 10.0 && asked <= 5.0 * (2.0 * number(row, "prefill_tokens")).min(8.0), "{row}");
    }
}

#[test]
fn formats() {
    let json: Value = serde_json::from_str(&bench(&[&QUICK[..], &["-o", "json"]].concat()).text()).unwrap();
    assert_eq!(json["rows"].as_array().unwrap().len(), 3);
    let conditions = json["conditions"].to_string();
    for part in ["machine: ", "build: ", "model: b.gguf (", "command: ds4-bench -m "] {
        assert!(conditions.contains(part), "{conditions}");
    }
    let md = bench(&[&QUICK[..], &["-o", "md"]].concat()).text();
    assert!(
        md.contains("* machine: ") && md.lines().filter(|l| l.starts_with("| sweep | cold | 1 |")).count() == 3,
        "{md}"
    );
    // A file, and nothing or what is asked for on stdout.
    let path = scratch("formats").join("rows.csv");
    let to_file = [&QUICK[..], &["--csv", path.to_str().unwrap()]].concat();
    let silent = bench(&to_file);
    assert!(silent.code == Some(0) && silent.stdout.is_empty());
    assert_eq!(silent.stderr.matches("row 3 of 3: cold sweep, 20 tokens").count(), 1, "{}", silent.stderr);
    assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 4);
    assert_eq!(bench(&[&to_file[..], &["-o", "jsonl"]].concat()).text().lines().count(), 3);
}

#[test]
fn an_interrupted_run_keeps_its_rows() {
    let path = scratch("interrupted").join("rows.csv");
    let mut long = command();
    long.arg("-m").arg(b()).arg("--prompt-file").arg(text()).arg("--csv").arg(&path);
    // Thousands of rows: it cannot end by itself within the test.
    long.args(["--ctx-start", "2", "--ctx-max", "400", "--step-incr", "2", "--gen-tokens", "2", "-r", "1000"]);
    let mut live = Live::start(long.args(["--regimes", "warm-repeat"]));
    live.wait_for("row 5 of ");
    live.interrupt();
    let ran = live.end();
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    let last = ran.stderr.lines().last().unwrap();
    assert!(last.starts_with("ds4-bench: interrupted; the ") && last.contains("rows.csv"), "{last}");
    let said: usize = last.split_whitespace().nth(3).unwrap().parse().unwrap();
    let read: Vec<csv::StringRecord> = csv::Reader::from_path(&path).unwrap().records().map(Result::unwrap).collect();
    assert!(read.len() == said && said >= 5, "{said} rows were promised, {} are there", read.len());
    for (i, row) in read.iter().enumerate() {
        assert_eq!(row[0].parse::<usize>().unwrap(), 2 * i + 2);
    }
    // What is left is good for the other commands.
    let name = path.to_str().unwrap();
    assert_eq!(finish(command().args(["compare", name, name])).code, Some(0));
}

#[test]
fn an_interrupted_run_still_prints_its_table() {
    let mut long = command();
    long.arg("-m").arg(b()).arg("--prompt-file").arg(text()).args(["-o", "json"]);
    let mut live = Live::start(long.args(["--ctx-start", "2", "--ctx-max", "400", "--step-incr", "2", "-r", "1000"]));
    live.wait_for("row 2 of ");
    std::thread::sleep(Duration::from_millis(5));
    live.interrupt();
    let ran = live.end();
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    let json: Value = serde_json::from_str(&ran.text()).unwrap();
    assert!(json["rows"].as_array().unwrap().len() >= 2);
}

#[test]
fn bad_input_of_a_run() {
    let missing = folder().join("none/rows.csv");
    let missing = missing.to_str().unwrap();
    for (args, code, parts) in [
        (&["--ctx-max", "40", "--ctx-alloc", "30"][..], 2, &["--ctx-max 40", "--ctx-alloc 30", "--ctx-alloc 43"][..]),
        (&["--ctx-max", "40", "--ctx-alloc", "41"], 2, &["3 tokens", "--ctx-alloc 43"]),
        (&["--ctx-max", "70000"], 2, &["the prompt file has ", "the sweep needs 70000", "longer file"]),
        (&["--regimes", "new-text", "-r", "900"], 2, &["the sweep needs 18020", "900 stretches", "fewer repetitions"]),
        (&["--step-incr", "0"], 2, &["--step-incr 0"]),
        (&["--step-mul", "0"], 2, &["--step-mul 0"]),
        (&["--ctx-start", "0"], 2, &["--ctx-start 0"]),
        (&["-r", "0"], 2, &["--repetitions 0"]),
        (&["--append", "0"], 2, &["--append 0"]),
        (&["--append", "x"], 2, &["--append", "x"]),
        (&["--budgets", "8"], 2, &["--ssd-streaming"]),
        (&["--ssd-streaming", "--budgets", "20,x"], 2, &["--budgets", "x"]),
        (&["--ssd-streaming", "--budgets", "20,3"], 1, &["3"]),
        (&["--ssd-streaming", "--budgets", "8", "--ssd-streaming-cache-experts", "9"], 2, &["cannot be used with"]),
        (&["--regimes", "hot"], 2, &["hot", "cold"]),
        (&["--csv", missing], 1, &["--csv: cannot write", "none/rows.csv"]),
        (&["--csv", folder().to_str().unwrap()], 1, &["--csv: cannot write"]),
        (&["-o", "xml"], 2, &["xml", "jsonl"]),
        (&["--ctx", "9"], 2, &["--ctx", "ds4-bench --help"]),
    ] {
        refused(&bench(&[&QUICK[..], args].concat()), code, parts);
    }
    let run = |args: &[&str]| finish(command().args(args));
    let (model, text) = (b().to_str().unwrap(), text().to_str().unwrap());
    refused(&run(&["-m", model]), 2, &["--prompt-file"]);
    refused(&run(&["-m", model, "--prompt-file", "nowhere.txt"]), 1, &["nowhere.txt"]);
    refused(&run(&["-m", text, "--prompt-file", text]), 1, &["text.txt"]);
    refused(&run(&["-m", "nowhere.gguf", "--prompt-file", text]), 1, &["nowhere.gguf"]);
    // A full disk ends the run with its reason.
    let full = bench(&[&QUICK[..], &["--csv", "/dev/full"]].concat());
    refused(&full, 1, &["--csv: cannot write /dev/full"]);
}

#[test]
fn random_tokens_are_those_of_the_seed() {
    let run = |args: &[&str]| -> Vec<Value> {
        let slots = ["--ssd-streaming", "--ssd-streaming-cache-experts", "12", "-o", "jsonl"];
        let ran = finish(command().arg("-m").arg(b()).args(QUICK).args(slots).args(args));
        assert_eq!(ran.code, Some(0), "{args:?}: {}", ran.stderr);
        ran.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let seen = |rows: &[Value]| [numbers(rows, "prefill_misses"), numbers(rows, "cache_misses")].concat();
    let (first, again) = (run(&["--random-tokens", "5"]), run(&["--random-tokens", "5"]));
    assert_eq!(words(&first, "tokens"), ["random 5"; 3]);
    assert_eq!(numbers(&first, "gen_tokens"), [3; 3]);
    assert_eq!(seen(&first), seen(&again));
    // Other ids ask for other experts.
    assert!((6..10).any(|seed| seen(&run(&["--random-tokens", &seed.to_string()])) != seen(&first)));
    let both = ["-m", b().to_str().unwrap(), "--prompt-file", text().to_str().unwrap(), "--random-tokens", "1"];
    refused(&finish(command().args(both)), 2, &["--random-tokens", "--prompt-file"]);
    let endless = ["-m", b().to_str().unwrap(), "--random-tokens", "1", "--regimes", "new-text", "-r", "60000"];
    refused(&finish(command().args(endless)), 2, &["random tokens", "fewer repetitions"]);
    assert_eq!(words(&rows(&[]), "tokens"), ["text"; 3]);
}

/// A CSV file of a quick run.
fn measured(name: &str, args: &[&str]) -> String {
    let path = folder().join(name);
    let ran = bench(&[&QUICK[..], &["--csv", path.to_str().unwrap()], args].concat());
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    path.to_str().unwrap().to_owned()
}

#[test]
fn comparisons() {
    let (a, c) = (measured("cmp-a.csv", &["-r", "3"]), measured("cmp-c.csv", &["-r", "3", "-t", "1"]));
    let ran = finish(command().args(["compare", &a, &c]));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let text = ran.text();
    for part in ["prefill_tps (sweep, cold)", "gen_steady_tps (sweep, cold)", "| 20 | 4 | 3 |", "| all | all | 9 |"] {
        assert!(text.contains(part), "{part} is missing in {text}");
    }
    assert!(ran.stderr.contains("threads: ") && !ran.stderr.contains("machine"), "{}", ran.stderr);
    // A file equals itself.
    let same = finish(command().args(["compare", &a, &a, "-o", "jsonl"]));
    let lines: Vec<Value> = same.text().lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(lines.len(), 3 * 4);
    for line in &lines {
        assert_eq!((number(line, "ratio"), number(line, "low"), number(line, "high")), (1.0, 1.0, 1.0), "{line}");
    }
    assert_eq!(finish(command().args(["compare", &a, &a, "-o", "csv"])).text().lines().count(), 13);
}

#[test]
fn comparisons_that_make_no_sense() {
    let a = measured("sense-a.csv", &[]);
    let longer = measured("sense-longer.csv", &["--ctx-max", "24"]);
    let run = |args: &[&str]| finish(command().arg("compare").args(args));
    refused(&run(&[&a, &longer]), 1, &["unlike rows", "--common", "20 tokens"]);
    let common = run(&["--common", &a, &longer]);
    assert!(common.code == Some(0) && common.stderr.contains("left out: \"sweep cold"), "{}", common.stderr);
    let other = folder().join("sense-model.csv");
    let mut of_other = command();
    of_other.arg("-m").arg(b_rules()).arg("--prompt-file").arg(text()).args(QUICK).arg("--csv").arg(&other);
    assert_eq!(finish(&mut of_other).code, Some(0));
    let other = other.to_str().unwrap();
    refused(&run(&[&a, other]), 1, &["different models", "b.gguf", "one model file"]);
    let cut = folder().join("sense-cut.csv");
    let whole = std::fs::read_to_string(&a).unwrap();
    std::fs::write(&cut, &whole[..whole.len() - 60]).unwrap();
    refused(&run(&[&a, cut.to_str().unwrap()]), 1, &["sense-cut.csv", "cells"]);
    std::fs::write(&cut, whole.lines().next().unwrap()).unwrap();
    refused(&run(&[&a, cut.to_str().unwrap()]), 1, &["sense-cut.csv", "no rows"]);
    refused(&run(&[&a, text().to_str().unwrap()]), 1, &["text.txt", "no column ctx_tokens"]);
    refused(&run(&[&a, "nowhere.csv"]), 1, &["nowhere.csv"]);
    refused(&run(&[&a]), 2, &["B.csv"]);
    // The known tool says nothing about models; that is told and believed.
    let known = folder().join("sense-known.csv");
    let first_nine = |line: &str| line.split(',').take(9).collect::<Vec<_>>().join(",") + "\n";
    std::fs::write(&known, whole.lines().map(first_nine).collect::<String>()).unwrap();
    let known = known.to_str().unwrap();
    assert!(run(&[known, known]).stderr.contains("does not say which model"));
}

/// Whether every element of an XML text is closed in order and no bare `<` or `&` stands in it.
fn assert_well_formed(text: &str) {
    let mut open = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find('<') {
        let words = &rest[..at];
        for (i, _) in words.match_indices('&') {
            assert!(words[i..].find(';').is_some_and(|end| end < 8), "a bare & in {words:?}");
        }
        let end = rest[at..].find('>').unwrap_or_else(|| panic!("no end of {:?}", &rest[at..]));
        let tag = &rest[at + 1..at + end];
        assert!(!tag.contains('<') && tag.matches('"').count().is_multiple_of(2), "{tag:?}");
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name), "in {text}");
        } else if !tag.ends_with('/') && !tag.starts_with('?') && !tag.starts_with('!') {
            open.push(tag.split_whitespace().next().unwrap());
        }
        rest = &rest[at + end + 1..];
    }
    assert!(open.is_empty() && rest.trim().is_empty(), "{open:?} {rest:?}");
}

#[test]
fn plots() {
    let out = scratch("plots").join("p.svg");
    let a = measured("plot-a.csv", &["--ssd-streaming", "--budgets", "10,20", "--append", "2,6", "-r", "2"]);
    let c = measured("plot & <c>.csv", &["--ssd-streaming", "--ssd-streaming-cache-experts", "15"]);
    let run = |args: &[&str]| finish(command().arg("plot").args(args).arg("-o").arg(&out));
    let ran = run(&[&a]);
    assert!(ran.code == Some(0) && ran.stderr.contains("(5 panels)"), "{}", ran.stderr);
    let text = std::fs::read_to_string(&out).unwrap();
    assert_well_formed(&text);
    // Two rates at three lengths, two appends at three lengths, two panels of the longest length; 2 budgets x 2 repetitions each.
    assert_eq!(text.matches("<circle").count(), 4 * (2 * 3 + 2 * 3 + 2));
    for part in
        ["b.gguf on ", "prefill, tokens a second", "cold, 10 slots", "tokens appended", "expert cache, GiB", "hit rate"]
    {
        assert!(text.contains(part), "{part} is missing");
    }
    let ran = run(&[&a, &c, "--title", "two & <more>"]);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let text = std::fs::read_to_string(&out).unwrap();
    assert_well_formed(&text);
    assert!(
        text.contains("two &amp; &lt;more&gt;")
            && text.contains("plot-a, cold")
            && text.contains("plot &amp; &lt;c&gt;, cold")
    );
    // Bad input leaves the picture that is there alone.
    refused(&run(&["nowhere.csv"]), 1, &["nowhere.csv"]);
    assert_eq!(std::fs::read_to_string(&out).unwrap(), text);
    let nowhere = finish(command().args(["plot", &a, "-o", "none/p.svg"]));
    refused(&nowhere, 1, &["cannot write none/p.svg"]);
}

/// Runs a script of benches/scripts on the small model.
fn script(name: &str, args: &[&str]) -> Ran {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/scripts").join(name);
    let mut script = Command::new(path);
    script
        .env("HOME", folder())
        .env("BENCH", env!("CARGO_BIN_EXE_ds4-bench"))
        .env("MODEL", b())
        .env("TEXT_FILE", text());
    finish(script.current_dir(folder()).stdin(Stdio::null()).args(args))
}

#[test]
fn scripts_say_and_do_what_they_promise() {
    let folder = scratch("scripts");
    let out = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let lines = |path: String| std::fs::read_to_string(path).unwrap().lines().count() - 1;
    let small = ["--ctx-start", "8", "--ctx-max", "16", "--gen-tokens", "2", "-r", "1"];
    let prefill = script("prefill_sweep.sh", &[&[&out("p")[..]], &small[..]].concat());
    assert_eq!(prefill.code, Some(0), "{}", prefill.stderr);
    for part in ["# processor: ", "# load before: ", "# model: ", " --regimes cold,warm-repeat,new-text ", "+ "] {
        assert!(prefill.stderr.contains(part), "{part} is missing in {}", prefill.stderr);
    }
    assert_eq!(lines(out("p.csv")), 3 * 2);
    let append = script("append_sweep.sh", &[&[&out("a")[..]], &small[..], &["--append", "1,3"]].concat());
    assert_eq!((append.code, lines(out("a.csv"))), (Some(0), 2 * 3), "{}", append.stderr);
    let budget = script("budget_sweep.sh", &[&[&out("b")[..], "10,20"], &small[..]].concat());
    assert_eq!(budget.code, Some(0), "{}", budget.stderr);
    for svg in ["p.svg", "a.svg", "b.svg"] {
        assert_well_formed(&std::fs::read_to_string(out(svg)).unwrap());
    }
    let program = env!("CARGO_BIN_EXE_ds4-bench");
    let ab = script("ab.sh", &[&[program, program, "3", &out("ab")], &small[..]].concat());
    assert_eq!(ab.code, Some(0), "{}", ab.stderr);
    assert_eq!((lines(out("ab-a.csv")), lines(out("ab-b.csv"))), (6, 6));
    assert!(ab.text().contains("| 16 | 8 | 3 |"), "three pairs: {}", ab.text());
    assert_eq!(script("ab.sh", &[program, program, "x", &out("ab")]).code, Some(2));
    assert_eq!(script("ab.sh", &["none", program, "1", &out("ab")]).code, Some(2));
}

/// The comparison with llama.cpp, with a stand-in for it that knows its rates and refuses rearranged weights.
#[cfg(unix)]
#[test]
fn the_script_of_the_comparison_reports_every_run() {
    use std::os::unix::fs::PermissionsExt;
    let folder = scratch("llama");
    let (other, out) = (folder.join("rate"), folder.join("out"));
    let words = "#!/bin/sh\n[ \"$7\" = 0 ] || exit 134\necho '{\"prefill_tps\":2.5,\"gen_tokens\":2,\"gen_tps\":4.0,\"system\":\"CPU : 1\"}'\n";
    std::fs::write(&other, words).unwrap();
    std::fs::set_permissions(&other, std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/scripts/llama_cpp.sh");
    let run = |parts: &str| {
        let mut command = Command::new(&path);
        command.arg(&folder).arg(&out).env("BENCH", env!("CARGO_BIN_EXE_ds4-bench")).env("MODEL", b());
        command
            .env("LLAMA", &other)
            .env("PARTS", parts)
            .env("TOKENS", "2")
            .env("ROUNDS", "3")
            .env("HOME", folder.as_os_str());
        finish(&mut command)
    };
    let ran = run("resident");
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stderr.contains("# llama.cpp aborts"), "{}", ran.stderr);
    let csv = std::fs::read_to_string(folder.join("out.csv")).unwrap();
    assert_eq!(csv.lines().count(), 1 + 3 * 2 * 2, "{csv}");
    assert!(csv.contains("resident,llama.cpp,decode of 2 behind 512,3,4.0"), "{csv}");
    assert!(ran.text().contains("| 2.50 2.50 2.50 | 2.50 |") && ran.text().lines().count() == 4, "{}", ran.text());
    assert_eq!(run("nowhere").code, Some(2));
}

#[test]
fn help_and_version() {
    let version = finish(command().arg("--version")).text();
    assert_eq!(version.trim(), format!("ds4-bench {}", env!("CARGO_PKG_VERSION")));
    let help = finish(command().arg("--help")).text();
    for part in ["--ctx-alloc", "--budgets", "--regimes", "compare", "plot", "--ssd-streaming"] {
        assert!(help.contains(part), "{part} is missing in {help}");
    }
    assert!(!help.contains("--ctx <"), "{help}");
}

#[test]
fn a_csv_never_replaces_a_model_or_its_text() {
    let folder = scratch("bench-clash");
    let (model, words) = (folder.join("m.gguf"), folder.join("t.txt"));
    std::fs::copy(b(), &model).unwrap();
    std::fs::copy(text(), &words).unwrap();
    let before = std::fs::read(&model).unwrap();
    let run = |of: &Path, csv: &Path| {
        let sweep = ["--ctx-start", "8", "--ctx-max", "8", "--gen-tokens", "1"];
        finish(command().arg("-m").arg(of).arg("--prompt-file").arg(&words).args(sweep).arg("--csv").arg(csv))
    };
    refused(&run(&model, &model), 2, &["--csv", "m.gguf"]);
    refused(&run(b(), &model), 1, &["--csv", "m.gguf", "model file"]);
    refused(&run(b(), &words), 2, &["--csv", "--prompt-file"]);
    assert_eq!(std::fs::read(&model).unwrap(), before);
    assert_eq!(std::fs::read(&words).unwrap(), std::fs::read(text()).unwrap());
}
