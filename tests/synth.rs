//! Synthetic model files: written by the program, opened by the engine, run to logits.
//! Never trusts a file by its size. Surprising fact: a Zipf router is judged by counting what a running model really chose, since the
//! biases are derived from an assumption about its logits.

mod engine_rig;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use ds4::engine::options::EngineOptions;
use ds4::models::Want;
use ds4::models::probe::{Point, Probe};
use ds4::quant::QuantType;
use ds4::session::timeline::{Timeline, Watcher};
use ds4::storage::gguf::{GgufFile, SHARED_RANGES};
use ds4::storage::layout::Layout;
use ds4::units::Budget;
use engine_rig::made_models::folder;
use engine_rig::{fresh_trail, open, options, prompt};

const ARCHS: [&str; 2] = ["deepseek41", "deepseek4"];

fn ds4_gguf(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ds4-gguf")).args(args).output().unwrap()
}

/// `ds4-gguf synth --shape small ARGS -o NAME`, which must work.
fn synth(name: &str, args: &[&str]) -> PathBuf {
    let path = folder().join(name);
    let mut all = vec!["synth", "--shape", "small", "--force", "-o", path.to_str().unwrap()];
    all.extend(args);
    let out = ds4_gguf(&all);
    assert!(out.status.success(), "{all:?}: {}", String::from_utf8_lossy(&out.stderr));
    path
}

/// Ends with `code` and one line that has `part`; nothing is left in `at`.
fn refused(args: &[&str], code: i32, part: &str) {
    let at = folder().join("refused");
    let _ = std::fs::remove_dir_all(&at);
    std::fs::create_dir_all(&at).unwrap();
    let path = at.join("x.gguf");
    let mut all = vec!["synth", "--shape", "small", "-o", path.to_str().unwrap()];
    all.extend(args);
    let out = ds4_gguf(&all);
    let stderr = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(code), "{all:?}: {stderr}");
    assert!(stderr.contains(part) && !stderr.contains("panicked"), "{all:?} lacks {part:?}: {stderr}");
    assert_eq!(std::fs::read_dir(&at).unwrap().count(), 0, "{all:?} left something");
}

/// Counts the choices of the router.
#[derive(Default)]
struct Choices {
    /// By layer and expert.
    counts: HashMap<(usize, i32), u32>,
    /// Sets of the experts of a position at layer 0.
    sets: std::collections::HashSet<Vec<i32>>,
}

impl Probe for Choices {
    fn wants(&self, point: Point) -> bool {
        point == Point::RouterIds
    }

    fn ids(&mut self, _: Point, layer: usize, _: usize, width: usize, ids: &[i32]) {
        for row in ids.chunks_exact(width) {
            row.iter().for_each(|id| *self.counts.entry((layer, *id)).or_default() += 1);
            let mut set = row.to_vec();
            set.sort_unstable();
            self.sets.insert(set);
        }
    }
}

impl Watcher for Choices {
    fn has_probe(&self) -> bool {
        true
    }

    fn probe(&mut self) -> Option<&mut dyn Probe> {
        Some(self)
    }
}

/// Choices of `tokens` random tokens.
fn choices(model: &Path, tokens: usize) -> Choices {
    let engine = open(&EngineOptions { ctx: Some(tokens), ..options(model) });
    let vocab = engine.tokenizer().tokens_total();
    let mut timeline = Timeline::new(engine.runner().unwrap());
    let mut choices = Choices::default();
    timeline.sync(&prompt(tokens, vocab), Want::Last, &mut choices).unwrap();
    choices
}

/// Counts of a layer, most chosen first.
fn ranking(choices: &Choices, layer: usize) -> Vec<u32> {
    let mut counts: Vec<u32> = choices.counts.iter().filter(|((l, _), _)| *l == layer).map(|(_, n)| *n).collect();
    counts.sort_unstable_by_key(|n| std::cmp::Reverse(*n));
    counts
}

#[test]
fn every_recipe_runs_and_its_logits_are_sane() {
    for (arch, recipe) in ARCHS.into_iter().flat_map(|arch| ["q2", "q4", "native"].map(|recipe| (arch, recipe))) {
        let what = format!("{arch}, {recipe}");
        let path = synth(&format!("{arch}-{recipe}.gguf"), &["--arch", arch, "--recipe", recipe]);
        let mut engine = open(&options(&path));
        assert_eq!(engine.prepared.config.arch(), arch);
        let vocab = engine.tokenizer().tokens_total();
        let trail = fresh_trail(&mut engine, 64, &prompt(80, vocab), 16);
        let logits: Vec<f32> = trail.bits.iter().map(|b| f32::from_bits(*b)).collect();
        let square = logits.iter().map(|v| f64::from(*v) * f64::from(*v)).sum::<f64>() / logits.len() as f64;
        assert!((0.3..3.0).contains(&square.sqrt()), "{what}: spread of logits {}", square.sqrt());
        let distinct: std::collections::HashSet<_> = trail.chosen.iter().collect();
        assert!(distinct.len() > 4, "{what}: a model that says one thing: {:?}", trail.chosen);
    }
}

#[test]
fn streamed_equals_resident_on_a_synthetic_file() {
    for arch in ARCHS {
        let path = synth(&format!("streamed-{arch}.gguf"), &["--arch", arch, "--alias", "2"]);
        let mut plain = open(&options(&path));
        let vocab = plain.tokenizer().tokens_total();
        let prompt = prompt(40, vocab);
        let want = fresh_trail(&mut plain, 8, &prompt, 8);
        // One token holds 3 experts of 6 layers; twice that is less than the 96 experts.
        let streaming = EngineOptions { is_streaming: true, budget: Some(Budget::Slots(36)), ..options(&path) };
        let mut engine = open(&streaming);
        assert!(fresh_trail(&mut engine, 8, &prompt, 8) == want, "{arch}");
        assert!(engine.cache().unwrap().stats().decode.misses > 0, "{arch}");
        let known = engine.known().map(|known| known.uses);
        assert_eq!(known.is_some_and(|uses| uses > 0), arch == "deepseek4", "{arch}: {known:?}");
    }
}

/// Beside a file of the same architecture that another program's converter wrote.
#[test]
fn other_readers_of_v4_files_find_what_they_ask_for() {
    let made = GgufFile::open(synth("other-readers.gguf", &["--arch", "deepseek4"])).unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/deepseek_v4/c/model-mixed.gguf");
    let golden = GgufFile::open(&golden).unwrap();
    let (had, has) = (golden.metadata(), made.metadata());
    for (key, value) in
        had.iter().filter(|(key, _)| key.starts_with("deepseek4.") || key.starts_with("tokenizer.ggml."))
    {
        let found = has.get(key).unwrap_or_else(|| panic!("{key} is missing"));
        // Its writer signs some lists of positive numbers.
        assert_eq!(found.type_name().replace("i32", "u32"), value.type_name().replace("i32", "u32"), "{key}");
    }
    assert_eq!(has.str("tokenizer.ggml.pre"), had.str("tokenizer.ggml.pre"));
    // Blocks of ratio 4 and 128; the golden file's first one also has a table of experts instead of a bias.
    let stems = |file: &GgufFile, layer: &str| -> std::collections::BTreeSet<String> {
        let names = file.tensors().iter().filter_map(|t| t.name.strip_prefix(layer).map(str::to_owned));
        names.filter(|stem| !["exp_probs_b.bias", "ffn_gate_tid2eid.weight"].contains(&stem.as_str())).collect()
    };
    assert_eq!(stems(&made, "blk.2."), stems(&golden, "blk.0."));
    assert_eq!(stems(&made, "blk.3."), stems(&golden, "blk.1."));
    for (layer, is_hashed) in [(0, true), (1, true), (2, false)] {
        let has = |stem: &str| made.tensor(&format!("blk.{layer}.{stem}")).is_some();
        assert_eq!((has("ffn_gate_tid2eid.weight"), has("exp_probs_b.bias")), (is_hashed, !is_hashed), "{layer}");
    }
    let outside = |file: &GgufFile| -> std::collections::BTreeSet<String> {
        file.tensors().iter().map(|t| t.name.clone()).filter(|name| !name.starts_with("blk.")).collect()
    };
    assert_eq!(outside(&made), outside(&golden));
    assert_eq!(made.tensor("blk.0.ffn_gate_tid2eid.weight").unwrap().ty, QuantType::I32);
    // Data in the order of the list, each behind the padding of the one before.
    let mut end = made.data_start();
    for tensor in made.tensors() {
        assert_eq!(tensor.offset, end, "{}", tensor.name);
        end = (tensor.offset + tensor.bytes).next_multiple_of(16_384);
    }
}

#[test]
fn the_same_seed_gives_the_same_bytes() {
    for arch in ARCHS {
        let read = |seed: &str, threads: &str| {
            let args = ["--arch", arch, "--seed", seed, "-t", threads];
            std::fs::read(synth(&format!("seed-{arch}-{seed}-{threads}.gguf"), &args)).unwrap()
        };
        let first = read("5", "1");
        assert!(first == read("5", "3"), "{arch}: threads are visible in the bytes");
        assert!(first != read("6", "1"), "{arch}");
    }
}

#[test]
fn aliased_layers_share_ranges_and_only_those() {
    let (whole, shared) = (synth("whole.gguf", &[]), synth("alias.gguf", &["--alias", "2"]));
    let file = GgufFile::open(&shared).unwrap();
    assert!(file.metadata().bool(SHARED_RANGES).unwrap());
    let layout = Layout::from_gguf(&file).unwrap();
    for layer in &layout.experts {
        let twin = &layout.experts[usize::from(layer.layer.0 % 2)];
        assert_eq!((layer.gate, layer.up, layer.down), (twin.gate, twin.up, twin.down));
    }
    assert_ne!(layout.experts[0].gate, layout.experts[1].gate);
    let saved = layout.experts.len() as u64 - 2;
    let layer_bytes = layout.experts[0].expert_bytes().0 * u64::from(layout.experts[0].experts);
    let lengths = [&whole, &shared].map(|p| p.metadata().unwrap().len());
    assert!(lengths[0] - lengths[1] >= saved * layer_bytes - saved * 3 * 16_384, "{lengths:?}");
    // All that is not an expert is the same in both files.
    let out = ds4_gguf(&["compare", whole.to_str().unwrap(), shared.to_str().unwrap()]);
    let text = String::from_utf8(out.stdout).unwrap();
    let differing: Vec<&str> = text.lines().filter(|l| l.starts_with("tensor ")).collect();
    assert_eq!(differing.len() as u64, 3 * saved, "{text}");
    assert!(differing.iter().all(|l| l.contains("_exps.")), "{text}");
}

/// The permission is taken from the file and nothing else: without the key the same file is damaged.
#[test]
fn ranges_are_shared_only_where_the_file_says_so() {
    let path = synth("permission.gguf", &["--alias", "1"]);
    let mut bytes = std::fs::read(&path).unwrap();
    let at = bytes.windows(SHARED_RANGES.len()).position(|w| w == SHARED_RANGES.as_bytes()).unwrap();
    // The value of a bool stands behind key and type.
    let value = at + SHARED_RANGES.len() + 4;
    assert_eq!(bytes[value], 1);
    bytes[value] = 0;
    std::fs::write(&path, &bytes).unwrap();
    let error = GgufFile::open(&path).unwrap_err().to_string();
    assert!(error.contains("blk.0.ffn_") && error.contains("overlap"), "{error}");
}

#[test]
fn uniform_routing_uses_all_experts_and_many_sets() {
    let path = synth("uniform.gguf", &["--experts", "32", "--layers", "4"]);
    let found = choices(&path, 400);
    for layer in 0..4 {
        let counts = ranking(&found, layer);
        assert_eq!(counts.len(), 32, "layer {layer}: {counts:?}");
        // 37 choices an expert; the share of the first few would be near one of a degenerate router.
        let top: u32 = counts[..4].iter().sum();
        assert!(top < 400 * 3 / 2, "layer {layer}: {counts:?}");
    }
    assert!(found.sets.len() > 400, "{} sets", found.sets.len());
}

/// Of V4, the first two layers choose by a table and the others by a router.
#[test]
fn zipf_routing_is_skewed_as_asked() {
    for arch in ARCHS {
        let args = ["--arch", arch, "--experts", "64", "--layers", "4", "--routing", "zipf:1.2"];
        let found = choices(&synth(&format!("zipf-{arch}.gguf"), &args), 600);
        // Wanted shares of 3 choices a token: c / rank^1.2.
        let weights: Vec<f64> = (1..=64).map(|r| f64::from(r).powf(-1.2)).collect();
        let top_wanted = 3.0 * weights[..8].iter().sum::<f64>() / weights.iter().sum::<f64>();
        let mut hottest = Vec::new();
        for layer in 0..4 {
            let counts = ranking(&found, layer);
            let top = f64::from(counts[..8].iter().sum::<u32>()) / 600.0;
            assert!(
                (top / top_wanted - 1.0).abs() < 0.15,
                "{arch}, layer {layer}: {top} of 3 choices, wanted {top_wanted}: {counts:?}"
            );
            let of_layer = found.counts.iter().filter(|((l, _), _)| *l == layer);
            hottest.push(of_layer.max_by_key(|(_, n)| **n).unwrap().0.1);
        }
        hottest.dedup();
        assert!(hottest.len() > 1, "{arch}: every layer favours expert {hottest:?}");
    }
}

#[test]
fn any_geometry_opens() {
    let check = |name: &str, args: &[&str]| {
        let path = synth(&format!("{name}.gguf"), args);
        let mut engine = open(&options(&path));
        let vocab = engine.tokenizer().tokens_total();
        assert!(!fresh_trail(&mut engine, 16, &prompt(20, vocab), 2).bits.is_empty());
    };
    check("one-layer", &["--layers", "1"]);
    check("no-tables", &["--table-rows", "0", "--layers", "3"]);
    check("wider", &["--dim", "hidden_size=512", "--vocab", "2000", "--experts", "5", "--layers", "5"]);
    check("mixed", &["--set", "gate_up=Q3_K", "--set", "down=Q6_K", "--layers", "7"]);
    for layers in ["1", "3", "5"] {
        check(&format!("v4-{layers}"), &["--arch", "deepseek4", "--layers", layers]);
    }
    // As in the larger sibling: no layer without compressed rows; and no layer with a table of experts.
    check("v4-all", &["--arch", "deepseek4", "--dim", "first_compressed_layer=0", "--dim", "num_hash_layers=0"]);
}

#[test]
fn bad_requests_end_with_one_line_and_no_file() {
    refused(&["--layers", "0"], 2, "num_hidden_layers=0: must be between 1");
    refused(&["--dim", "width=3"], 2, "unknown size; the sizes are vocab_size");
    refused(&["--dim", "hidden_size"], 2, "write NAME=N");
    refused(&["--dim", "hidden_size=100"], 1, "do not fit");
    refused(&["--dim", "head_dim=48"], 2, "head_dim");
    refused(&["--experts", "2"], 2, "num_experts_per_tok");
    refused(&["--alias", "7"], 2, "--alias 7: must be between 1 and the 6 layers");
    refused(&["--routing", "zipf:x"], 2, "write uniform or zipf:S");
    refused(&["--vocab", "100"], 2, "a vocabulary of 100 is too small");
    refused(&["--table-rows", "5"], 2, "two rows a column");
    refused(&["--arch", "deepseek4", "--table-rows", "0"], 2, "deepseek4 models have no n-gram tables");
    refused(&["--arch", "deepseek4", "--dim", "engram_n_heads=4"], 2, "unknown size; the sizes are vocab_size");
    refused(&["--arch", "deepseek4", "--dim", "index_head_dim=48"], 2, "deepseek4.attention.indexer.key_length");
    refused(&["--arch", "deepseek5"], 2, "possible values: deepseek41, deepseek4");
    refused(&["--set", "down=Q9"], 2, "unknown type");
    refused(&["--alignment", "3"], 1, "power of two");
    refused(
        &["--experts", "60000", "--dim", "hidden_size=1048576", "--dim", "moe_intermediate_size=4096"],
        2,
        "larger",
    );
}

/// More than any drive holds is refused before a byte is made.
#[test]
fn a_drive_that_is_too_small_is_refused_at_once() {
    let started = Instant::now();
    refused(&["--table-rows", "300000000000"], 2, "more rows than can be numbered");
    refused(
        &["--experts", "60000", "--layers", "400", "--dim", "hidden_size=4096"],
        1,
        "do not fit on this file system",
    );
    assert!(started.elapsed() < Duration::from_secs(60));
}

#[test]
fn an_interrupted_run_leaves_nothing() {
    let at = folder().join("interrupted");
    let _ = std::fs::remove_dir_all(&at);
    std::fs::create_dir_all(&at).unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_ds4-gguf"))
        .args(["synth", "--shape", "small", "--experts", "4000", "--layers", "20", "-o"])
        .arg(at.join("x.gguf"))
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let started = Instant::now();
    while std::fs::read_dir(&at).unwrap().count() == 0 && started.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(2));
    }
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), rustix::process::Signal::INT).unwrap();
    let status = child.wait().unwrap();
    let mut stderr = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut stderr).unwrap();
    assert_eq!(status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("stopped; nothing was written"), "{stderr}");
    assert_eq!(std::fs::read_dir(&at).unwrap().count(), 0);
}
