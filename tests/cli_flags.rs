//! Every flag of `ds4` has an effect that a counter or the output shows, and docs/FLAGS.md lists them all.
//! Owns no bad input (see cli_bad_input). Surprising fact: the fixtures are random models, so texts are nonsense; what is compared is
//! whether two runs agree.

mod cli_rig;

use std::collections::BTreeSet;
use std::path::Path;

use clap::CommandFactory;
use cli_rig::made_models::{b, b_rules};
use cli_rig::{command, ds4, ds4_b, finish, json, scratch, stats};
use ds4::cli::args::Cli;
use ds4::engine::Engine;
use ds4::engine::options::EngineOptions;
use ds4::models::Want;
use ds4::session::timeline::{Timeline, Watcher};
use safetensors::SafeTensors;
use serde_json::Value;

/// Answer of model b.
#[track_caller]
fn answer(args: &[&str]) -> String {
    ds4_b(args).ok().text()
}

fn ids(text: &str) -> Vec<u32> {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

/// Tokens and logits of a dump, as bits.
struct Dump {
    tokens: Vec<u32>,
    vocab: usize,
    bits: Vec<u32>,
}

fn read_dump(path: &Path) -> Dump {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: &str| -> Vec<u32> {
        file.tensor(name).unwrap().data().chunks(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    let shape = file.tensor("logits").unwrap().shape().to_vec();
    let dump = Dump { tokens: words("tokens"), vocab: shape[1], bits: words("logits") };
    assert_eq!(shape[0], dump.tokens.len());
    dump
}

#[track_caller]
fn dump(name: &str, args: &[&str]) -> Dump {
    let path = scratch(name).join("logits");
    finish(command().arg("-m").arg(b()).args(args).arg("--dump-logits").arg(&path)).ok();
    read_dump(&path)
}

fn number(stats: &Value, key: &str) -> f64 {
    stats[key].as_f64().unwrap_or_else(|| panic!("{key} in {stats}"))
}

/// The tier of memory between a GPU and the drive, under the name that goes with --gpu-cache.
#[test]
fn the_cache_has_a_second_name() {
    let slots = |flag: &str| {
        let name = format!("name{flag}");
        number(&stats(&name, &["-p", "hello", "-n", "2", "--ssd-streaming", flag, "13"]), "cache_slots")
    };
    assert_eq!((slots("--host-cache"), slots("--ssd-streaming-cache-experts")), (13.0, 13.0));
}

#[test]
fn stats_have_all_keys_and_sane_values() {
    let prompt = ["-p", "hello there", "--ssd-streaming", "--ssd-streaming-cache-experts", "12"];
    let args = [&prompt[..], &["-n", "20", "-c", "128", "--temp", "1"]].concat();
    let stats = stats("stats", &args);
    let keys = "model arch backend ctx prompt_tokens generated_tokens prefill_tps decode_tps cache_slots cache_bytes \
                expert_hits expert_misses expert_hit_rate all_hit_layer_rate evictions expert_read_bytes expert_reads \
                read_ms_p50 read_ms_p99 expert_wait_ms row_reads row_read_bytes row_wait_ms planned_bytes peak_rss_bytes";
    for key in keys.split_whitespace() {
        assert!(!stats[key].is_null(), "{key} is missing in {stats}");
    }
    let prompt_tokens = ids(&answer(&["-p", "hello there", "--dump-tokens"])).len() as f64;
    assert_eq!(stats["model"], b().to_str().unwrap());
    assert_eq!((stats["arch"].as_str(), stats["backend"].as_str()), (Some("deepseek41"), Some("cpu")));
    assert_eq!((number(&stats, "ctx"), number(&stats, "prompt_tokens")), (128.0, prompt_tokens));
    assert_eq!((number(&stats, "generated_tokens"), number(&stats, "cache_slots")), (20.0, 12.0));
    for key in ["prefill_tps", "decode_tps", "expert_hits", "expert_misses", "evictions", "row_reads", "read_ms_p50"] {
        assert!(number(&stats, key) > 0.0, "{key}");
    }
    let (hits, misses) = (number(&stats, "expert_hits"), number(&stats, "expert_misses"));
    // 19 passes of 5 layers x 2 experts; the prompt asks for each expert of a layer once.
    assert!((190.0 + 10.0..=190.0 + 40.0).contains(&(hits + misses)), "{hits} hits, {misses} misses");
    assert!((number(&stats, "expert_hit_rate") - hits / (hits + misses)).abs() < 1e-9);
    assert!((0.0..=1.0).contains(&number(&stats, "all_hit_layer_rate")));
    assert_eq!(number(&stats, "expert_reads"), misses);
    let expert_bytes = number(&stats, "expert_read_bytes") / misses;
    assert!(expert_bytes > 1000.0 && expert_bytes * 12.0 <= number(&stats, "cache_bytes"), "{expert_bytes}");
    assert!(number(&stats, "read_ms_p50") <= number(&stats, "read_ms_p99"));
    // Reads that land before anybody waits for them are no wait.
    assert!(number(&stats, "expert_wait_ms") >= 0.0 && number(&stats, "row_wait_ms") >= 0.0);
    // Rows of 33 bytes (32 codes and a scale), 24 a token, shared ones read once.
    let row_bytes = number(&stats, "row_read_bytes");
    assert!(row_bytes % 33.0 == 0.0 && row_bytes <= 33.0 * 24.0 * (prompt_tokens + 19.0), "{row_bytes}");
    // Code that is first run after planning counts as resident too: some MiB that a real model does not notice.
    let (peak, planned) = (number(&stats, "peak_rss_bytes"), number(&stats, "planned_bytes"));
    let code = 4.0 * f64::from(1 << 20);
    assert!(peak > planned / 2.0 && peak < 1.05 * planned + code, "peak memory {peak}, planned {planned}");
}

#[test]
fn the_closing_lines() {
    let ran = ds4_b(&["-p", "hello", "-n", "5", "--ssd-streaming", "--ssd-streaming-cache-experts", "10"]).ok();
    let at = ran.stderr.lines().position(|l| l.starts_with("ds4: prefill: ")).unwrap();
    let lines: Vec<&str> = ran.stderr.lines().skip(at).collect();
    let first = regex::Regex::new(r"^ds4: prefill: \d+\.\d\d t/s, generation: \d+\.\d\d t/s$").unwrap();
    assert!(first.is_match(lines[0]), "{}", lines[0]);
    let starts = [
        "prompt: ",
        "expert cache: 10 slots",
        "expert reads: ",
        "waited for the drive: ",
        "preload: 10 experts",
        "n-gram rows: ",
        "decode: ",
        "memory: peak ",
    ];
    assert_eq!(lines.len(), 1 + starts.len(), "{lines:#?}");
    for (line, start) in lines[1..].iter().zip(starts) {
        assert!(line.starts_with(&format!("ds4: {start}")), "{line}");
    }
    let resident = ds4_b(&["-p", "hello", "-n", "5"]).ok();
    assert!(!resident.stderr.contains("expert cache: 10") && !resident.stderr.contains("expert reads: "));
}

#[test]
fn preloading() {
    let run = |name: &str, more: &[&str]| stats(name, &[&["-p", "x", "-n", "4", "--ssd-streaming"], more].concat());
    let cold = run("cold", &["--ssd-streaming-cold"]);
    assert_eq!((number(&cold, "preloaded_experts"), number(&cold, "preload_bytes")), (0.0, 0.0));
    assert!(number(&cold, "expert_misses") > 0.0);
    let all = run("all", &[]);
    assert_eq!((number(&all, "preloaded_experts"), number(&all, "expert_misses")), (40.0, 0.0));
    let some = run("some", &["--ssd-streaming-preload-experts", "7"]);
    assert_eq!(number(&some, "preloaded_experts"), 7.0);
    assert!((1.0..number(&cold, "expert_misses") + 1.0).contains(&number(&some, "expert_misses")));
    let none = run("resident", &[]);
    assert_eq!(none["is_streaming"], true);
    let resident = stats("no-streaming", &["-p", "x", "-n", "4"]);
    assert_eq!((resident["is_streaming"].as_bool(), number(&resident, "cache_slots")), (Some(false), 0.0));
}

#[test]
fn cache_budgets() {
    let run = |name: &str, budget: &str| {
        stats(name, &["-p", "x", "-n", "4", "--ssd-streaming", "--ssd-streaming-cache-experts", budget])
    };
    assert_eq!(number(&run("slots", "13"), "cache_slots"), 13.0);
    let bytes = run("bytes", "0.0003GB");
    let (slots, cache) = (number(&bytes, "cache_slots"), number(&bytes, "cache_bytes"));
    assert!((10.0..40.0).contains(&slots) && cache <= 0.0003 * f64::from(1 << 30), "{slots} slots of {cache} bytes");
    assert!(cache + cache / slots > 0.0003 * f64::from(1 << 30), "one more slot would have fitted");
    assert_eq!(number(&run("large", "1GB"), "cache_slots"), 40.0);
}

#[test]
fn policies() {
    let text = answer(&["-p", "x", "-n", "30"]);
    let misses: BTreeSet<u64> = cache_policy::policies::KNOWN
        .iter()
        .map(|(name, _)| {
            let path = scratch(name).join("stats.json");
            let args = ["-p", "x", "-n", "30", "--ssd-streaming", "--ssd-streaming-cache-experts", "20"];
            let ran = finish(
                command().arg("-m").arg(b()).args(args).args(["--cache-policy", name, "--stats-json"]).arg(&path),
            );
            assert_eq!(ran.ok().text(), text, "{name}");
            number(&json(&path), "expert_misses") as u64
        })
        .collect();
    assert!(misses.len() > 1, "the policies decide alike: {misses:?}");
    let ran = ds4_b(&["-p", "x", "--ssd-streaming", "--cache-policy", "best"]);
    assert_eq!(ran.code, Some(2));
    assert!(ran.stderr.contains("known: lru, lfu"), "{}", ran.stderr);
}

#[test]
fn readers() {
    let text = answer(&["-p", "x", "-n", "4"]);
    for io in ["auto", "uring", "pread"] {
        let path = scratch(io).join("stats.json");
        let args = ["-p", "x", "-n", "4", "--ssd-streaming", "--io", io, "--stats-json"];
        let ran = finish(command().arg("-m").arg(b()).args(args).arg(&path));
        if io == "uring" && ran.code == Some(1) && ran.stderr.contains("io_uring") {
            println!("notice: io_uring is refused here: {}", ran.stderr);
            continue;
        }
        assert_eq!(ran.ok().text(), text);
        let used = json(&path)["io"].as_str().unwrap().to_owned();
        assert!(used == io || io == "auto" && ["uring", "pread"].contains(&used.as_str()), "{io} gave {used}");
    }
}

#[test]
fn the_plan() {
    let usable = |args: &[&str]| -> f64 {
        let plan = answer(&[&["--plan"], args].concat());
        assert!(plan.contains("resident weights") && plan.contains("planned"), "{plan}");
        let word = plan.split("memory: ").nth(1).or(plan.strip_prefix("memory: ")).unwrap_or(&plan);
        let mut words = word.split_whitespace();
        let value: f64 = words.next().unwrap().parse().unwrap_or_else(|_| panic!("{plan}"));
        assert_eq!(words.next(), Some("GiB"), "{plan}");
        value
    };
    let free = usable(&[]);
    let taken = format!("{}GB", (free / 2.0).floor());
    let left = usable(&["--simulate-used-memory", &taken]);
    assert!(left < 0.8 * free, "{free} GiB, {left} GiB with {taken} taken");
    let streaming = answer(&["--plan", "--ssd-streaming", "--ssd-streaming-cache-experts", "20", "-c", "300"]);
    assert!(streaming.contains("20 slots for 40 experts (50.0 %)") && streaming.contains("--ctx 300"), "{streaming}");
    let ran = ds4_b(&["--plan", "-p", "x"]).ok();
    assert!(!ran.stderr.contains("generation"), "nothing is generated: {}", ran.stderr);
}

#[test]
fn inspection() {
    let text = answer(&["--inspect"]);
    for part in ["GGUF v3", "general.architecture = \"deepseek41\"", "resident", "streamed", "disk_only", "40 experts"]
    {
        assert!(text.contains(part), "{part:?} is missing in {text}");
    }
    let version = ds4(&["--version"]).ok().text();
    assert_eq!(version.trim(), format!("ds4 {}", env!("CARGO_PKG_VERSION")));
}

#[test]
fn prompts_as_tokens_text_and_file() {
    let folder = scratch("tokens");
    let tokens = answer(&["-p", "hello there", "--dump-tokens"]);
    assert_eq!(
        ids(&tokens).len() as f64,
        number(&stats("tokens-count", &["-p", "hello there", "-n", "1"]), "prompt_tokens")
    );
    let (token_file, text_file) = (folder.join("t.json"), folder.join("t.txt"));
    std::fs::write(&token_file, &tokens).unwrap();
    std::fs::write(&text_file, "hello there").unwrap();
    let (token_file, text_file) = (token_file.to_str().unwrap(), text_file.to_str().unwrap());
    assert_eq!(answer(&["--tokens-file", token_file, "--dump-tokens"]), tokens);
    assert_eq!(answer(&["--prompt-file", text_file, "--dump-tokens"]), tokens);
    let text = answer(&["-p", "hello there", "-n", "12"]);
    assert!(text.ends_with('\n') && text.len() > 5);
    for args in [["--tokens-file", token_file], ["--prompt-file", text_file]] {
        assert_eq!(answer(&[&args[..], &["-n", "12"]].concat()), text);
    }
    // System text, in both spellings, comes before the message.
    let system = ids(&answer(&["-p", "hello there", "-sys", "be kind", "--dump-tokens"]));
    assert_eq!(system, ids(&answer(&["-p", "hello there", "--system", "be kind", "--dump-tokens"])));
    let plain = ids(&tokens);
    assert!(system.len() > plain.len() && system.ends_with(&plain[1..]) && system[0] == plain[0], "{system:?}");
}

#[test]
fn thinking_levels_shape_the_prompt() {
    let prompt = |flags: &[&str]| {
        let args = [&["-p", "hello", "--dump-tokens"], flags].concat();
        ids(&finish(command().arg("-m").arg(b_rules()).args(args)).ok().text())
    };
    let flags: [&[&str]; 4] = [&["--nothink"], &["--think"], &["--think-max"], &["--think-level", "30"]];
    let prompts: BTreeSet<Vec<u32>> = flags.iter().map(|f| prompt(f)).collect();
    assert_eq!(prompts.len(), flags.len(), "each flag has its own prompt");
    assert_eq!(prompt(&["--think-level", "0"]), prompt(&["--nothink"]));
    assert_eq!(prompt(&["--think-level", "75"]), prompt(&["--think"]));
    assert_eq!(prompt(&["--think-level", "100"]), prompt(&["--think-max"]));
    // A template without a switch is told apart from one that was ignored.
    for flag in [&["--think"][..], &["--think-max"], &["--think-level", "30"]] {
        ds4_b(&[&["-p", "hello", "--dump-tokens"], flag].concat()).failed(2, &["no reasoning switch"]);
    }
    assert_eq!(answer(&["-p", "hello", "--nothink", "--dump-tokens"]), answer(&["-p", "hello", "--dump-tokens"]));
}

#[derive(Default)]
struct Bits(Vec<u32>);

impl Watcher for Bits {
    fn logits(&mut self, _position: usize, logits: &[f32]) {
        self.0.extend(logits.iter().map(|v| v.to_bits()));
    }
}

#[test]
fn dumped_logits_are_those_of_the_library() {
    let prompt = ids(&answer(&["-p", "hello there", "--dump-tokens"]));
    let args = ["-p", "hello there", "-n", "9", "--temp", "1", "--seed", "5", "-t", "2", "--ssd-streaming"];
    let found = dump("logits", &args);
    assert_eq!((found.tokens.len(), found.vocab), (prompt.len() + 9, 640));
    assert!(found.tokens.starts_with(&prompt));
    let options = EngineOptions { ctx: Some(256), ..EngineOptions::new(b()) };
    let engine = Engine::open(&options, &mut |_| {}, &|_, _, _| std::ops::ControlFlow::Continue(())).unwrap();
    let mut want = Bits::default();
    Timeline::new(engine.runner().unwrap()).sync(&found.tokens, Want::All, &mut want).unwrap();
    assert!(found.bits == want.0, "the dump differs from the library");
}

/// Log-probability of `token` in a row of logits, in double precision.
fn logprob(row: &[u32], token: u32) -> f64 {
    let values: Vec<f64> = row.iter().map(|b| f64::from(f32::from_bits(*b))).collect();
    let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    values[token as usize] - max - values.iter().map(|v| (v - max).exp()).sum::<f64>().ln()
}

#[test]
fn dumped_logprobs_follow_from_the_logits() {
    let folder = scratch("logprobs");
    let path = folder.join("logprobs.json");
    let logits = dump(
        "logprobs-logits",
        &["-p", "hello", "-n", "7", "--dump-logprobs", path.to_str().unwrap(), "--logprobs-top-k", "3"],
    );
    // `dump` empties only its own folder.
    let tokens = json(&path)["tokens"].as_array().unwrap().clone();
    assert_eq!(tokens.len(), 7);
    let first = logits.tokens.len() - 7;
    for (step, token) in tokens.iter().enumerate() {
        let row = &logits.bits[(first + step - 1) * logits.vocab..][..logits.vocab];
        let id = token["id"].as_u64().unwrap() as u32;
        assert_eq!(id, logits.tokens[first + step]);
        let top = token["top"].as_array().unwrap();
        assert_eq!((top.len(), &top[0]["id"]), (3, &token["id"]), "greedy takes the best");
        for choice in [token].into_iter().chain(top) {
            let want = logprob(row, choice["id"].as_u64().unwrap() as u32);
            let found = choice["logprob"].as_f64().unwrap();
            assert!((found - want).abs() < 1e-4, "{found} is not {want}");
        }
        assert!(top.windows(2).all(|w| w[0]["logprob"].as_f64() >= w[1]["logprob"].as_f64()));
    }
    let default = folder.join("default.json");
    ds4_b(&["-p", "hello", "-n", "1", "--dump-logprobs", default.to_str().unwrap()]).ok();
    assert_eq!(json(&default)["tokens"][0]["top"].as_array().unwrap().len(), 5);
}

#[test]
fn perplexity_follows_from_the_logits() {
    let folder = scratch("perplexity");
    let text = "hello there, this is a text with some words and numbers 12 345.";
    let (path, tokens) = (folder.join("text"), folder.join("tokens"));
    std::fs::write(&path, text).unwrap();
    let engine = ds4::engine::prepare::tokenizer(b()).unwrap().0;
    let all: Vec<u32> = [engine.bos().unwrap()].into_iter().chain(engine.encode(text).unwrap()).collect();
    std::fs::write(&tokens, serde_json::to_string(&all).unwrap()).unwrap();
    let dump = dump("perplexity-logits", &["--tokens-file", tokens.to_str().unwrap(), "-n", "0", "--quality"]);
    let sum: f64 = dump.bits.chunks(dump.vocab).zip(&all[1..]).map(|(row, next)| -logprob(row, *next)).sum();
    let want = sum / (all.len() - 1) as f64;
    let line = answer(&["--perplexity-file", path.to_str().unwrap(), "--quality"]);
    let found: f64 = line.split("nll: ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    assert!((found - want).abs() < 2e-5, "{line} but {want}");
    assert!(line.contains(&format!("{} tokens in 1 windows", all.len() - 1)), "{line}");
    // Shorter windows lose context.
    let short = answer(&["--perplexity-file", path.to_str().unwrap(), "--quality", "-c", "9"]);
    assert!(short.contains("windows of 9") && short != line, "{short}");
}

#[test]
fn decode_consistency() {
    let text = answer(&["-p", "hello there, hello again", "--decode-consistency", "5"]);
    assert_eq!(text, "decode consistency: 0 of 5 positions differ, largest difference 0e0\n");
    let all = answer(&["-p", "hello", "--decode-consistency", "500", "--ssd-streaming"]);
    let prompt = ids(&answer(&["-p", "hello", "--dump-tokens"])).len();
    assert!(all.starts_with(&format!("decode consistency: 0 of {prompt} ")), "{all}");
}

#[test]
fn sampling() {
    let run = |args: &[&str]| answer(&[&["-p", "hello", "-n", "16"], args].concat());
    let greedy = run(&[]);
    assert_eq!(greedy, run(&["--seed", "9"]), "the seed does not matter at temperature 0");
    let first = run(&["--temp", "1", "--seed", "1"]);
    assert_eq!(first, run(&["--temp", "1", "--seed", "1", "-t", "1", "--ssd-streaming"]));
    assert_ne!(first, run(&["--temp", "1", "--seed", "2"]));
    assert_ne!(first, run(&["--temp", "3", "--seed", "1"]));
    for only_best in [["--top-k", "1"], ["--top-p", "0.000001"], ["--min-p", "1"]] {
        assert_eq!(greedy, run(&[&["--temp", "1", "--seed", "1"], &only_best[..]].concat()), "{only_best:?}");
    }
    assert_ne!(greedy, first);
    for (tokens, want) in [("0", 0.0), ("1", 1.0), ("11", 11.0)] {
        assert_eq!(number(&stats("count", &["-p", "hello", "-n", tokens]), "generated_tokens"), want);
    }
}

#[test]
fn arithmetic() {
    let run = |name: &str, more: &[&str]| dump(name, &[&["-p", "hello there", "-n", "2"], more].concat()).bits;
    let fast = run("fast", &[]);
    let quality = run("quality", &["--quality"]);
    assert!(fast != quality, "--quality computes otherwise");
    assert!(run("exact", &["--quality", "--kv-exact"]) != quality, "--kv-exact leaves the rounding out");
    assert!(run("scalar", &["--simd", "scalar"]) == fast && run("threads", &["-t", "1"]) == fast);
    let ran = ds4_b(&["-p", "x", "-n", "1", "-t", "1", "--simd", "scalar", "--quality"]).ok();
    assert!(ran.stderr.contains("backend cpu: 1 threads, scalar, f32 activations"), "{}", ran.stderr);
    for flags in [&["--cpu"][..], &["--backend", "cpu"], &["--backend", "auto"]] {
        let stats = stats("backend", &[&["-p", "x", "-n", "1"], flags].concat());
        let is_free = flags.ends_with(&["auto"]) && stats["backend"] == "cuda";
        assert!(stats["backend"] == "cpu" || is_free, "{flags:?}");
        assert_eq!(stats["gpu"].is_null(), !is_free);
    }
    // Without a GPU the reason for the processor is told, unless the processor was asked for.
    let ran = ds4_b(&["-p", "x", "-n", "1"]).ok();
    assert!(ran.stderr.contains("(no GPU: ") || ran.stderr.contains("backend cuda: "), "{}", ran.stderr);
    assert!(!ds4_b(&["-p", "x", "-n", "1", "--cpu"]).ok().stderr.contains("no GPU"));
}

#[test]
fn sweeps() {
    let args = ["-p", "hello there, hello again, and once more", "-n", "2", "--prefill-chunk", "4"];
    let prompt = ids(&answer(&[&args[..], &["--dump-tokens"]].concat())).len();
    let run = |more: &[&str]| {
        let args = [&args[..], more].concat();
        (stats("sweeps", &args)["sweeps"].clone(), answer(&args))
    };
    let (one, text) = run(&["--sweep-rows", "auto"]);
    assert_eq!((number(&one, "sweeps"), number(&one, "rows")), (1.0, prompt as f64));
    assert!(number(&one, "layer_rows_skipped") > 0.0);
    let (all, same) = run(&["--no-decoder-suffix"]);
    assert_eq!((number(&all, "layer_rows_skipped"), &same), (0.0, &text));
    let (many, same) = run(&["--sweep-rows", "8"]);
    // A single row that is left over is no sweep.
    assert_eq!((number(&many, "sweeps") as usize, &same), (prompt / 8 + usize::from(prompt % 8 > 1), &text));
    let plan = answer(&["--plan", "--sweep-rows", "100", "-c", "64"]);
    assert!(plan.contains("--sweep-rows 64"), "{plan}");
}

#[test]
fn chunks_and_context() {
    let args = ["-p", "hello there, hello again", "-n", "1"];
    let prompt = ids(&answer(&[&args[..], &["--dump-tokens"]].concat())).len();
    for chunk in [1, 4, 1000] {
        let cut = ["--prefill-chunk", &chunk.to_string(), "--sweep-rows", "1"];
        let stats = stats("chunks", &[&args[..], &cut].concat());
        assert_eq!(number(&stats, "row_submissions") as usize, prompt.div_ceil(chunk), "chunks of {chunk}");
    }
    // A sweep of several chunks asks for the rows of both tables chunk by chunk.
    let cut = stats("chunks", &[&args[..], &["--prefill-chunk", "4"]].concat());
    assert_eq!(number(&cut, "row_submissions") as usize, 2 * prompt.div_ceil(4));
    assert_eq!(number(&stats("ctx", &[&args[..], &["-c", "99"]].concat()), "ctx"), 99.0);
    let default = stats("ctx-default", &args);
    assert_eq!(number(&default, "ctx"), 4096.0, "the trained length");
    let beyond = ds4_b(&[&args[..], &["-c", "5000"]].concat()).ok();
    assert_eq!(beyond.stderr.matches("goes beyond the 4096 positions").count(), 1, "{}", beyond.stderr);
    // A full context ends the answer.
    let full = stats("full", &["-p", "hello", "-c", "20", "--temp", "1", "--seed", "1"]);
    let tokens = number(&full, "prompt_tokens") + number(&full, "generated_tokens");
    assert!((20.0..=21.0).contains(&tokens), "{tokens}");
}

#[test]
fn the_default_model() {
    let folder = scratch("default");
    std::os::unix::fs::symlink(b(), folder.join("ds4flash.gguf")).unwrap();
    let ran = finish(command().current_dir(&folder).args(["-p", "x", "-n", "4"])).ok();
    assert_eq!(ran.text(), answer(&["-p", "x", "-n", "4"]));
    assert!(ran.stderr.contains("ds4: ds4flash.gguf (deepseek41)"), "{}", ran.stderr);
}

/// Tables of flags as clap knows them, one a heading; only those that `keep` says.
fn flags_tables(command: &clap::Command, keep: impl Fn(&clap::Arg) -> bool) -> String {
    let mut text = String::new();
    let mut heading = None;
    for arg in command.get_arguments().filter(|arg| keep(arg)) {
        if arg.get_help_heading() != heading {
            heading = arg.get_help_heading();
            text += &format!("\n## {}\n\n| Flag | Default | What it does |\n|---|---|---|\n", heading.unwrap());
        }
        let mut flag: String = arg.get_short().map(|s| format!("`-{s}`, ")).unwrap_or_default();
        let value = match arg.get_value_names() {
            Some(names) if arg.get_action().takes_values() => format!(" {}", names[0].replace('|', "\\|")),
            _ => String::new(),
        };
        flag += &format!("`--{}{value}`", arg.get_long().unwrap());
        let help = arg.get_help().unwrap().to_string().replace('|', "\\|");
        let (what, default) = match help.split_once(" [default: ") {
            Some((what, default)) => (what.to_owned(), default.trim_end_matches(']').to_owned()),
            None if arg.get_action().takes_values() => {
                let values: Vec<_> = arg.get_default_values().iter().map(|v| v.to_string_lossy()).collect();
                (help.clone(), values.join(" "))
            }
            None => (help.clone(), String::new()),
        };
        text += &format!("| {flag} | {default} | {what} |\n");
    }
    text
}

/// The tables below the heading of `program` in docs/FLAGS.md.
fn page_tables(program: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/FLAGS.md");
    let page = format!("\n{}", std::fs::read_to_string(&path).unwrap());
    let heading = format!("\n# Flags of `{program}`\n");
    let section = page.split_once(&heading).unwrap_or_else(|| panic!("docs/FLAGS.md lacks {heading}")).1;
    let section = section.split("\n# ").next().unwrap();
    section.find("\n## ").map_or(String::new(), |at| section[at..].trim_end().to_owned() + "\n")
}

#[test]
fn the_table_of_flags_is_complete() {
    let want = flags_tables(&Cli::command(), |_| true);
    assert!(page_tables("ds4") == want, "docs/FLAGS.md must have for ds4:\n{want}");
    let help = ds4(&["--help"]).ok().text();
    for arg in Cli::command().get_arguments() {
        assert!(help.contains(&format!("--{}", arg.get_long().unwrap())), "--help lacks {arg}");
    }
}

#[test]
fn the_table_of_bench_flags_is_complete() {
    let is_shared = |arg: &clap::Arg| matches!(arg.get_help_heading(), Some("Model" | "Streaming"));
    let is_own = |arg: &clap::Arg| arg.get_id() == "ctx" || !is_shared(arg);
    let want = flags_tables(&ds4::cli::bench::args::command(), is_own);
    assert!(page_tables("ds4-bench") == want, "docs/FLAGS.md must have for ds4-bench:\n{want}");
}
