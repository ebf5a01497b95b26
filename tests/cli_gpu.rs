//! What a GPU, its driver and its memory can refuse, as `ds4` meets it: on a driver library without a GPU, built here by the C compiler.
//! Owns no number that a kernel computes: kernels of that library do nothing. Surprising fact: without a C compiler, or in a program without
//! CUDA, everything here is left out with a notice.
#![cfg(feature = "cuda")]

mod cli_rig;

use std::path::Path;
use std::process::Command;

use cli_rig::drawing::drawn;
use cli_rig::made_models::b;
use cli_rig::stub::{on_stub, on_stub_with};
use cli_rig::{Live, Ran, finish, json, scratch};
use serde_json::Value;

const ASK: [&str; 6] = ["-p", "x", "-n", "1", "--backend", "cuda"];

#[track_caller]
fn refuses(faults: &[(&str, &str)], parts: &[&str]) {
    if let Some(mut command) = on_stub(faults, &ASK) {
        finish(&mut command).failed(1, parts);
    }
}

#[test]
fn drivers_that_do_not_start() {
    refuses(&[("STUB_INIT", "100")], &["no GPU", "CUDA_ERROR_NO_DEVICE", "nvidia-smi -L", "--backend cpu"]);
    refuses(&[("STUB_INIT", "803")], &["CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "restart the machine"]);
    refuses(&[("STUB_INIT", "999")], &["does not start", "see whether nvidia-smi works"]);
    refuses(&[("STUB_COUNT", "0")], &["no CUDA device 0", "the driver shows 0"]);
    // Both versions are named.
    refuses(&[("STUB_VERSION", "11040")], &["the driver offers CUDA 11.4", "needs 12.8", "update the driver"]);
}

#[test]
fn a_driver_that_is_no_use_leaves_the_processor() {
    let args = ["-p", "x", "-n", "1"];
    if let Some(mut command) = on_stub(&[("STUB_VERSION", "11040")], &args) {
        let ran = finish(&mut command).ok();
        assert!(ran.stderr.contains("(no GPU: the driver offers CUDA 11.4"), "{}", ran.stderr);
    }
}

#[test]
fn devices_without_the_instructions_of_the_kernels() {
    let parts = ["CUDA device 0 (Stub GPU 0)", "compute capability 7.5", "need 8.0 or later", "--gpu-devices"];
    refuses(&[("STUB_CAPABILITY", "75")], &parts);
    // Nothing was compiled for it, and the processor serves whoever did not ask for a GPU.
    if let Some(mut command) = on_stub(&[("STUB_CAPABILITY", "75")], &["-p", "x", "-n", "1"]) {
        let ran = finish(&mut command).ok();
        assert!(
            ran.stderr.contains("(no GPU: CUDA device 0 (Stub GPU 0) has compute capability 7.5"),
            "{}",
            ran.stderr
        );
    }
    // The oldest that has them gets as far as the kernel that fails here.
    let at_least = [("STUB_CAPABILITY", "80"), ("STUB_KERNEL", "rms_norm")];
    if let Some(mut command) = on_stub(&at_least, &ASK) {
        finish(&mut command).failed_late(1, &["CUDA_ERROR_LAUNCH_FAILED"]);
    }
}

#[test]
fn kernels_that_the_driver_does_not_load() {
    let old = [("STUB_LOAD", "222"), ("STUB_VERSION", "12080")];
    let parts =
        ["CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "NVRTC is of CUDA 13.1", "the driver offers 12.8", "update the driver"];
    refuses(&old, &parts);
}

#[test]
fn devices_that_others_hold() {
    refuses(
        &[("STUB_RETAIN", "46")],
        &["CUDA device 0", "CUDA_ERROR_DEVICE_UNAVAILABLE", "another process", "--gpu-devices"],
    );
    refuses(&[("STUB_RETAIN", "2")], &["CUDA_ERROR_OUT_OF_MEMORY", "nvidia-smi lists them"]);
}

#[test]
fn the_device_that_is_named_is_used() {
    // The kernel that fails ends the run once the place of the model has been told.
    let run = |device: &str| {
        let faults = [("STUB_COUNT", "2"), ("STUB_KERNEL", "rms_norm")];
        let mut command = on_stub(&faults, &["-p", "x", "-n", "1", "--gpu-devices", device])?;
        Some(finish(&mut command))
    };
    let Some(second) = run("1") else { return };
    assert!(second.stderr.contains("backend cuda: Stub GPU 1 (device 1)"), "{}", second.stderr);
    let first = run("0").unwrap();
    assert!(first.stderr.contains("backend cuda: Stub GPU 0 (device 0)"), "{}", first.stderr);
    run("2").unwrap().failed(1, &["no CUDA device 2", "the driver shows 2, counted from 0"]);
}

#[test]
fn memory_that_is_not_enough() {
    // Less than what is always there; then room for the model that another process takes in between.
    refuses(&[("STUB_FREE", "67108864")], &["of GPU memory without any expert", "64.0", "are free", "--backend cpu"]);
    refuses(&[("STUB_ALLOC", "4096")], &["cannot allocate", "bytes for"]);
    let more = ["-p", "x", "--backend", "cuda", "--gpu-cache", "1"];
    if let Some(mut command) = on_stub(&[], &more) {
        finish(&mut command).failed(1, &["--gpu-cache: 1 experts", "one token uses"]);
    }
}

#[test]
fn a_device_that_is_lost_ends_the_request_with_the_kernel() {
    let parts = ["CUDA_ERROR_LAUNCH_FAILED", "rms_norm", "start ds4 again"];
    if let Some(mut command) = on_stub(&[("STUB_KERNEL", "rms_norm")], &ASK) {
        finish(&mut command).failed_late(1, &parts);
    }
}

#[test]
fn a_session_says_that_the_device_is_lost_and_goes_on_listening() {
    let Some(mut command) = on_stub(&[("STUB_KERNEL", "rms_norm")], &["--backend", "cuda"]) else { return };
    let mut live = Live::start(&mut command);
    live.wait_for("type a message");
    live.say("hello");
    let first = live.wait_for("CUDA_ERROR_LAUNCH_FAILED");
    assert!(first.contains("rms_norm") && first.contains("start ds4 again"), "{first}");
    live.say("are you there");
    let second = live.wait_for("the GPU is lost");
    assert!(second.contains("start ds4 again"), "{second}");
    live.say("/help");
    live.wait_for("/quit");
    let Ran { code, stderr, .. } = live.end();
    assert_eq!(code, Some(1), "{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
}

#[test]
fn a_gpu_in_the_hosts_memory_has_one_cache() {
    // A session that nobody says anything to: sizes are all that counts.
    let slots = |name: &str, integrated: &str, more: &[&str]| {
        let path = scratch(name).join("stats.json");
        let args = [&["--backend", "cuda", "--ssd-streaming", "--stats-json", path.to_str().unwrap()], more].concat();
        let ran = finish(&mut on_stub(&[("STUB_INTEGRATED", integrated)], &args)?);
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        assert_eq!(ran.stderr.contains("in the host's memory"), integrated == "1", "{}", ran.stderr);
        let stats = json(&path);
        Some((stats["cache_slots"].as_u64().unwrap(), stats["gpu"]["cache_slots"].as_u64().unwrap()))
    };
    // Five layers of eight experts, two a token.
    let Some(apart) = slots("apart", "0", &[]) else { return };
    assert_eq!(apart, (40, 40));
    assert_eq!(slots("one", "1", &[]), Some((10, 40)), "a token's experts land, all stay with the GPU");
    assert_eq!(
        slots("given", "1", &["--host-cache", "25", "--gpu-cache", "12"]),
        Some((25, 12)),
        "given sizes are kept"
    );
}

#[test]
fn attention_runs_on_tensor_cores_unless_sums_are_exact() {
    let place = scratch("gpu-sums");
    let model = place.join("wide.gguf");
    let mut synth = Command::new(env!("CARGO_BIN_EXE_ds4-gguf"));
    synth.args(["synth", "--shape", "small", "--dim", "head_dim=512", "--dim", "num_attention_heads=16", "-o"]);
    assert!(synth.arg(&model).output().unwrap().status.success());
    // Attentions, and those on tensor cores.
    let counts = |name: &str, model: &Path, more: &[&str]| {
        let path = place.join(format!("{name}.json"));
        let mut command = on_stub_with(model, &[], &ASK)?;
        command.args(["--no-graph", "--stats-json", path.to_str().unwrap()]).args(more);
        let ran = finish(&mut command);
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        let gpu = &json(&path)["gpu"];
        let [all, on_tensor_cores] = ["attentions", "tensor_attentions"].map(|name| gpu[name].as_u64().unwrap());
        let sums = gpu["sums"].as_str().unwrap().to_owned();
        let told = format!("{on_tensor_cores} of {all} attentions on tensor cores (sums: {sums})");
        assert!(ran.stderr.contains(&told), "{}", ran.stderr);
        Some((all, on_tensor_cores, sums))
    };
    let Some((all, on_tensor_cores, sums)) = counts("default", &model, &[]) else { return };
    assert_eq!((on_tensor_cores, sums.as_str()), (all, "fast"));
    assert!(all > 0);
    assert_eq!(counts("exact", &model, &["--gpu-sums", "exact"]), Some((all, 0, "exact".into())));
    // Rows of more bits, and heads of another width.
    assert_eq!(counts("unrounded", &model, &["--kv-exact"]), Some((all, 0, "fast".into())));
    let (_, narrow, _) = counts("narrow", b(), &["--gpu-sums", "fast"]).unwrap();
    assert_eq!(narrow, 0);
}

#[test]
fn a_gpu_takes_wider_chunks_where_its_memory_allows() {
    let chunk = |name: &str, more: &[&str]| {
        let path = scratch(name).join("stats.json");
        let args = [&["-c", "4096", "--stats-json", path.to_str().unwrap()], more].concat();
        let ran = finish(&mut on_stub(&[], &args)?);
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        Some(json(&path)["prefill_chunk"].as_u64().unwrap())
    };
    let Some(wide) = chunk("chunk-gpu", &["--backend", "cuda"]) else { return };
    assert_eq!(wide, 2048);
    assert_eq!(chunk("chunk-cpu", &["--backend", "cpu"]), Some(512), "the processor keeps its own");
    assert_eq!(chunk("chunk-given", &["--backend", "cuda", "--prefill-chunk", "64"]), Some(64));
}

/// One run on the stub with `args`: `--stats-json` and, if it was drawn, the rows.
type Told = (serde_json::Value, std::collections::HashMap<String, Vec<cli_rig::drawing::Drawn>>);

/// More rows than go one by one.
const PROMPT: &str = "hello there, how are you, and what is it that the tall man in the black coat wants of you";

fn decoded(name: &str, is_drawn: bool, args: &[&str]) -> Option<Told> {
    decoded_behind(&["-p", PROMPT], name, is_drawn, args)
}

fn decoded_behind(prompt: &[&str], name: &str, is_drawn: bool, args: &[&str]) -> Option<Told> {
    let folder = scratch(name);
    let (stats, file) = (folder.join("stats.json"), folder.join("run.json"));
    let mut command = on_stub(&[], &["-n", "12", "--backend", "cuda", "--ssd-streaming"])?;
    command.args(prompt).args(args).arg("--stats-json").arg(&stats);
    if is_drawn {
        command.arg("--trace-file").arg(&file);
    }
    let ran = finish(&mut command);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    Some((json(&stats), if is_drawn { drawn(&file) } else { Default::default() }))
}

#[test]
fn both_routes_of_a_token_count_the_same() {
    let Some((found, _)) = decoded("found", false, &[]) else { return };
    let (asked, _) = decoded("asked", false, &["--no-graph"]).unwrap();
    for key in ["expert_hits", "expert_misses", "evictions", "cache_slots"] {
        assert_eq!(found["gpu"][key], asked["gpu"][key], "{key}");
        assert_eq!(found[key], asked[key], "{key} of the host's cache");
    }
    // Eleven tokens behind the prompt; the first one warms the way up. Five layers in two graphs, and what follows them.
    let count = |stats: &serde_json::Value, key: &str| stats["gpu"][key].as_u64().unwrap();
    assert_eq!((count(&found, "found_rows"), count(&found, "graphs")), (10, 30));
    assert_eq!((count(&asked, "found_rows"), count(&asked, "graphs")), (0, 0));
    assert!(count(&found, "expert_misses") > 0 && count(&found, "waits") < count(&asked, "waits"));
}

#[test]
fn a_token_whose_experts_are_there_waits_for_its_id_alone() {
    let counted = |tokens: &str| {
        let stats = scratch(&format!("waits-{tokens}")).join("stats.json");
        let args = ["-p", PROMPT, "-n", tokens, "--backend", "cuda"];
        let mut command = on_stub(&[("STUB_BUSY", "1")], &args)?;
        let ran = finish(command.arg("--stats-json").arg(&stats));
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        let count = |key: &str| json(&stats)["gpu"][key].as_u64().unwrap();
        Some((count("waits"), count("expert_misses"), count("found_rows")))
    };
    let Some((waits, misses, found)) = counted("12") else { return };
    let more = counted("20").unwrap();
    assert_eq!((more.1, more.2), (misses, found + 8), "the prompt has brought all experts");
    assert_eq!(more.0 - waits, 8);
}

#[test]
fn two_rows_go_one_by_one_and_three_together() {
    let found = |name: &str, tokens: &str, args: &[&str]| {
        let file = scratch(&format!("{name}-tokens")).join("tokens.json");
        std::fs::write(&file, tokens).unwrap();
        let (stats, _) = decoded_behind(&["--tokens-file", file.to_str().unwrap()], name, false, args)?;
        Some(stats["gpu"]["found_rows"].as_u64().unwrap())
    };
    let Some(rows) = found("few-two", "[40, 41]", &[]) else { return };
    assert_eq!(rows, 2 + 11 - 1, "the prompt's rows and those of eleven tokens, less the first");
    assert_eq!(found("few-three", "[40, 41, 42]", &[]), Some(11 - 1));
    assert_eq!(found("few-asked", "[40, 41]", &["--no-graph"]), Some(0));
}

#[test]
fn experts_of_few_rows_share_launches() {
    let counted = |name: &str, tokens: &str| {
        let file = scratch(&format!("{name}-tokens")).join("tokens.json");
        std::fs::write(&file, tokens).unwrap();
        let prompt = ["--tokens-file", file.to_str().unwrap()];
        let (stats, _) = decoded_behind(&prompt, name, false, &["--no-graph"])?;
        let number = |key: &str| stats["gpu"][key].as_u64().unwrap();
        Some((number("launches"), number("expert_hits") + number("expert_misses")))
    };
    let Some(few) = counted("share-three", "[40, 41, 42]") else { return };
    let more = counted("share-eight", "[40, 41, 42, 43, 44, 45, 46, 47]").unwrap();
    let (launches, experts) = (more.0 - few.0, more.1 - few.1);
    // One alone takes five, or eleven op by op.
    assert!(experts > 10 && launches < 6 * experts, "{launches} launches for {experts} experts more");
}

/// Eighteen slots for ten experts a token, none of which comes back before the third one: all are absent. The first graph of a token ends behind its first
/// layer, whose guess for the second one is uploaded.
#[test]
fn experts_go_to_the_gpu_ahead_of_their_router() {
    let run = |name: &str, wrong: &str, args: &[&str]| {
        let path = scratch(name).join("stats.json");
        let all = ["-p", "hello there", "-n", "32", "--backend", "cuda", "--ssd-streaming", "--gpu-cache", "18"];
        let mut command = on_stub(&[("STUB_GUESS", wrong)], &[&all[..], args].concat())?;
        let ran = finish(command.arg("--stats-json").arg(&path));
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        let stats = json(&path);
        let count = |key: &str| stats["gpu"][key].as_u64().unwrap_or_else(|| panic!("{key}: {stats}"));
        assert_eq!(ran.stderr.contains("uploads ahead of the router"), count("guessed_uploads") > 0, "{}", ran.stderr);
        let guesses = ["guessed_uploads", "guessed_used", "guessed_wasted", "guessed_bytes"].map(count);
        Some((guesses, count("expert_misses"), count("expert_hits"), ran.stdout))
    };
    let Some((none, misses, hits, text)) = run("ahead-off", "0", &["--lookahead", "off"]) else { return };
    assert_eq!(none, [0; 4]);
    let ([uploads, used, wasted, bytes], fewer, more, same) = run("ahead-right", "0", &[]).unwrap();
    assert!(uploads > 10 && used == uploads && wasted == 0 && bytes > uploads, "{uploads} {used} {wasted} {bytes}");
    assert_eq!((fewer + used, more, &same), (misses, hits + used, &text), "what came ahead is a hit and no miss");
    // Wrong ones cost no expert its slot, and end: names of the other layers count as well.
    let ([uploads, used, wasted, _], no_fewer, no_more, same) = run("ahead-wrong", "5", &[]).unwrap();
    assert!((2..=16).contains(&uploads) && used == 0 && wasted == uploads, "{uploads} {used} {wasted}");
    assert_eq!((no_fewer, no_more, &same), (misses, hits, &text));
    let (graphless, ..) = run("ahead-asked", "0", &["--no-graph"]).unwrap();
    assert_eq!(graphless, [0; 4]);
}

/// Where every expert has a slot nobody leaves for a guess, and what was brought once is never brought again.
#[test]
fn experts_that_all_fit_stay() {
    for lookahead in ["auto", "off"] {
        let args = ["-p", "hello there", "-n", "40", "--backend", "cuda", "--ssd-streaming", "--lookahead", lookahead];
        let path = scratch(&format!("fit-{lookahead}")).join("stats.json");
        let Some(mut command) = on_stub(&[], &args) else { return };
        let ran = finish(command.arg("--stats-json").arg(&path));
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        let gpu = &json(&path)["gpu"];
        let count = |key: &str| gpu[key].as_u64().unwrap();
        assert_eq!(
            (count("evictions"), count("expert_misses") + count("guessed_used")),
            (0, count("cache_slots")),
            "{gpu}"
        );
    }
}

/// Fewer slots than experts, and more than a token uses: some leave while later layers of the same token are still to be looked up.
#[test]
fn what_leaves_in_the_middle_of_a_token_is_missed_by_its_later_layers() {
    for (slots, lookahead) in
        [("39", "off"), ("39", "auto"), ("25", "auto"), ("11", "router"), ("10", "both"), ("2", "off")]
    {
        let name = format!("leave-{slots}-{lookahead}");
        let both = ["", "--no-graph"].map(|graphs| {
            let path = scratch(&format!("{name}{graphs}")).join("stats.json");
            let args =
                ["-p", "hello there", "-n", "24", "--backend", "cuda", "--ssd-streaming", "--lookahead", lookahead];
            let mut command = on_stub(&[], &args)?;
            command.args(["--gpu-cache", slots]).args((!graphs.is_empty()).then_some(graphs));
            let ran = finish(command.arg("--stats-json").arg(&path));
            assert_eq!(ran.code, Some(0), "{name}: {}", ran.stderr);
            let gpu = &json(&path)["gpu"];
            let asked: u64 = ["expert_hits", "expert_misses"].iter().map(|key| gpu[key].as_u64().unwrap()).sum();
            Some((asked, ran.stdout, gpu["found_rows"].as_u64().unwrap() > 20))
        });
        let [Some(found), Some(routed)] = both else { return };
        assert_eq!((found.0, &found.1), (routed.0, &routed.1), "{name}");
        assert!(found.2 && !routed.2, "{name}");
    }
}

#[test]
fn a_tokens_time_adds_up_on_both_routes() {
    for (name, args) in [("timed", &[][..]), ("timed-asked", &["--no-graph"])] {
        let Some((stats, _)) = decoded(name, false, args) else { return };
        let time = &stats["token_time"];
        let ms = |key: &str| time[key].as_f64().unwrap_or_else(|| panic!("{key}: {time}"));
        // The fifth and the tenth of eleven tokens.
        assert_eq!(time["tokens"], 2, "{time}");
        let stalled = time["stalled_ms"].as_f64();
        assert_eq!(stalled.is_some(), args.is_empty(), "{time}");
        let device = ms("kernels_ms") + stalled.unwrap_or(0.0) + ms("idle_ms");
        let host = ms("host_ms") + ms("gpu_wait_ms") + ms("drive_wait_ms");
        for sum in [device, host] {
            assert!((sum - ms("token_ms")).abs() < 1e-6 && ms("host_ms") > 0.0, "{sum}: {time}");
        }
        let (wait_ms, waits) = (stats["gpu"]["wait_ms"].as_f64().unwrap(), stats["gpu"]["waits"].as_u64().unwrap());
        assert!(wait_ms > 0.0 && waits > 0, "{wait_ms} ms, {waits} waits");
        let achieved = &stats["achieved"];
        let share = |key: &str| achieved[key].as_f64().unwrap_or_else(|| panic!("{key}: {achieved}"));
        let all = share("drive") + share("bus") + share("slots") + share("compute");
        assert!((all - 1.0).abs() < 1e-6 && share("bus") >= 0.0, "{achieved}");
        // The bound is that of the GPU's own memory.
        assert_eq!(stats["forecast"]["gpu"]["slots"], stats["gpu"]["cache_slots"]);
        assert_eq!(stats["forecast"]["memory_gb_per_s"], stats["gpu"]["own_read_gb_per_s"]);
        assert!(stats["forecast"]["memory_gb_per_s"].as_f64().is_some_and(|rate| rate > 0.0), "{}", stats["forecast"]);
    }
}

#[test]
fn what_a_gpu_does_is_drawn() {
    let Some((stats, rows)) = decoded("drawn-found", true, &[]) else { return };
    assert_eq!(stats["token_time"]["tokens"], 10, "all but the first");
    let (_, asked) = decoded("drawn-asked", true, &["--no-graph"]).unwrap();
    for rows in [&rows, &asked] {
        // One thing at a time in each of them.
        assert!(
            ["gpu", "uploads", "arranging", "passes"]
                .iter()
                .filter_map(|row| rows.get(*row))
                .all(|row| row.iter().all(|s| s.lane == 1))
        );
        // Each expert is missed once, and is one upload at most for each of its matrices.
        let bytes: u64 = rows["uploads"].iter().map(|s| s.args["bytes"].as_u64().unwrap()).sum();
        assert!(bytes > 0 && rows["uploads"].iter().all(|s| s.args["layer"].is_u64() && s.args["expert"].is_u64()));
        let mut experts: Vec<_> = rows["uploads"].iter().map(|s| (&s.args["layer"], &s.args["expert"])).collect();
        experts.sort_by_key(|(layer, expert)| (layer.as_u64(), expert.as_u64()));
        experts.dedup();
        assert_eq!(experts.len() as u64, stats["gpu"]["expert_misses"].as_u64().unwrap());
        assert!(rows["host-waits"].iter().any(|s| s.what == "waiting for kernels"));
        assert!(rows["gpu"].iter().any(|s| s.what == "route") && !rows["clock"].is_empty());
        // Ops lie in passes: from 1 ms before, since the clocks are tied together with less doubt than that.
        let passes = &rows["passes"];
        let inside = |at: f64| passes.iter().any(|p| p.at - 1000.0 <= at && at <= p.at + p.took + 1000.0);
        assert!(rows["gpu"].iter().all(|s| inside(s.at) && inside(s.at + s.took)));
    }
    let segments = |rows: &std::collections::HashMap<String, Vec<cli_rig::drawing::Drawn>>| {
        let of = |name: &str| rows["gpu"].iter().filter(|s| s.what == name).count();
        [of("layer 0"), of("layers 1 to 4"), of("after layer 4")]
    };
    assert_eq!((segments(&rows), segments(&asked)), ([10; 3], [0; 3]));
    // Ten tokens of five layers, each behind a router and behind a gate.
    let halves = |name: &str| rows["gpu-layers"].iter().filter(|s| s.what == name).count();
    assert_eq!((halves("start to router"), halves("gate to router"), halves("router to gate")), (10, 40, 50));
    // Gates that were closed are opened behind what was arranged.
    let opened = rows["arranging"].iter().filter(|s| s.what == "open_gate" && s.args["layer"].is_u64()).count();
    assert!(opened > 0 && !asked.contains_key("arranging"));
    assert!(!asked.contains_key("gpu-layers") && !asked.contains_key("gpu-waits"));
}

/// Statistics of an answer whose experts go through the host's slots, and what was said.
fn streamed(name: &str, faults: &[(&str, &str)], more: &[&str]) -> Option<(Value, String)> {
    let path = scratch(name).join("stats.json");
    let args = ["-p", "x", "-n", "2", "--backend", "cuda", "--ssd-streaming", "--stats-json", path.to_str().unwrap()];
    let ran = finish(&mut on_stub(faults, &[&args[..], more].concat())?);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    Some((json(&path)["gpu"].clone(), ran.stderr))
}

#[test]
fn the_way_of_experts_is_chosen_and_counted() {
    let ways = |name: &str, integrated: &str, more: &[&str]| {
        let (gpu, _) = streamed(name, &[("STUB_INTEGRATED", integrated)], more)?;
        let number = |key: &str| gpu[key].as_u64().unwrap();
        assert!(number("registered_bytes") > 0 && number("expert_misses") > 0, "{gpu}");
        Some((number("in_place_bytes"), number("upload_bytes")))
    };
    let Some((in_place, copied)) = ways("way-apart", "0", &[]) else { return };
    assert_eq!(in_place, 0);
    assert_eq!(ways("way-copy", "1", &["--gpu-uploads", "copy"]).unwrap().0, 0);
    // What kernels read in place is not copied.
    for (name, integrated, more) in [("way-one", "1", &[][..]), ("way-direct", "0", &["--gpu-uploads", "direct"])] {
        let (in_place, copied_less) = ways(name, integrated, more).unwrap();
        assert!(
            in_place > 0 && copied_less + in_place <= copied,
            "{name}: {in_place} in place, {copied_less} of {copied} copied"
        );
    }
}

#[test]
fn host_memory_that_the_driver_does_not_take() {
    let known = |gpu: &Value| (gpu["registered_bytes"].as_u64().unwrap() > 0, gpu["in_place_bytes"].as_u64().unwrap());
    let Some((gpu, said)) = streamed("unregistered", &[("STUB_REGISTER", "801")], &[]) else { return };
    assert!(
        said.contains("host memory known to the GPU: operation not supported (CUDA_ERROR_NOT_SUPPORTED)"),
        "{said}"
    );
    assert!(said.contains("several times slower"), "{said}");
    assert_eq!(known(&gpu), (false, 0));
    // Known to uploads, but not to kernels: what was chosen gives way, what was asked for does not.
    let unmapped = [("STUB_MAP", "801"), ("STUB_INTEGRATED", "1")];
    let (gpu, said) = streamed("unmapped", &unmapped, &[]).unwrap();
    assert!(said.contains("CUDA_ERROR_NOT_SUPPORTED") && said.contains("experts are copied on their way"), "{said}");
    assert_eq!(known(&gpu), (true, 0));
    let direct = ["-p", "x", "-n", "1", "--backend", "cuda", "--gpu-uploads", "direct"];
    let parts = ["--gpu-uploads direct: ", "CUDA_ERROR_NOT_SUPPORTED", "use --gpu-uploads copy"];
    finish(&mut on_stub(&unmapped, &[&direct[..], &["--ssd-streaming"]].concat()).unwrap()).failed_late(1, &parts);
    let parts = ["--gpu-uploads direct: ", "without --ssd-streaming", "use --gpu-uploads copy"];
    finish(&mut on_stub(&[], &direct).unwrap()).failed_late(1, &parts);
}

#[test]
fn the_doctor_measures_what_kernels_read() {
    let Some(mut command) = on_stub(&[], &["--doctor", "--json"]) else { return };
    let found: Value = serde_json::from_str(&finish(&mut command).ok().text()).unwrap();
    let rates = &found["machine"]["gpu_rates"];
    assert_eq!(rates["name"], "Stub GPU 0", "{found:#}");
    assert!(rates["host_gb_per_s"].as_f64().unwrap() > 0.0 && rates["own_gb_per_s"].as_f64().unwrap() > 0.0);
    // They are what a token is predicted from.
    assert_eq!(found["forecast"]["memory_gb_per_s"], rates["own_gb_per_s"], "{found:#}");
    assert_eq!(found["forecast"]["gpu"]["bus_gb_per_s"], rates["host_gb_per_s"], "{found:#}");
    let text = finish(&mut on_stub(&[], &["--doctor"]).unwrap()).ok().text();
    assert!(text.contains(" t/s with every expert in GPU memory"), "{text}");
    assert!(text.contains("GPU rates     kernels read ") && text.contains("of the GPU's own (Stub GPU 0)"), "{text}");
    let text = finish(&mut on_stub(&[("STUB_MAP", "801")], &["--doctor"]).unwrap()).ok().text();
    assert!(text.contains("GPU rates     not measured: ") && text.contains("CUDA_ERROR_NOT_SUPPORTED"), "{text}");
}
