//! Everything a user, a file or the system can get wrong, as `ds4` meets it: one line on stderr, code 1 or 2, no panic, nothing half done.
//! Owns no good run but as the starting point of a bad one. Surprising fact: damaged models are made from a good one by the project's own
//! writer where it agrees to write them, and by changing bytes where it does not.

mod cli_rig;

use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use cli_rig::made_models::{b, folder as made_folder};
use cli_rig::{command, ds4, ds4_b, finish, names_in, scratch};
use ds4::storage::gguf::{Array, GgufFile, GgufWriter, Metadata, TensorSpec, Value};
use ds4::storage::layout::Layout;

fn b_bytes() -> Vec<u8> {
    std::fs::read(b()).unwrap()
}

fn put(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Model b with other metadata or without some tensors.
fn rewrite(path: &Path, metadata: impl Fn(&mut Metadata), is_kept: impl Fn(&str) -> bool) {
    let (file, bytes) = (GgufFile::open(b()).unwrap(), b_bytes());
    let mut changed = file.metadata().clone();
    metadata(&mut changed);
    let kept: Vec<_> = file.tensors().iter().filter(|t| is_kept(&t.name)).collect();
    let specs: Vec<TensorSpec> =
        kept.iter().map(|t| TensorSpec { name: t.name.clone(), ty: t.ty, dims: t.dims.clone() }).collect();
    let mut out = GgufWriter::new(&changed, &specs).unwrap().create(path, true).unwrap();
    for tensor in kept {
        out.begin(&tensor.name).unwrap();
        out.append(&bytes[tensor.offset as usize..(tensor.offset + tensor.bytes) as usize]).unwrap();
    }
    out.finish().unwrap();
}

/// Answers from `path` fail with one line that has all of `parts` and the file's name.
#[track_caller]
fn refuses(path: &Path, parts: &[&str]) {
    let shown = path.to_str().unwrap();
    let parts = [&[shown], parts].concat();
    ds4(&["-m", shown, "-p", "x", "-n", "1"]).failed(1, &parts);
    ds4(&["-m", shown, "-p", "x", "-n", "1", "--ssd-streaming"]).failed(1, &parts);
}

#[test]
fn truncated_files() {
    let (folder, bytes) = (scratch("truncated"), b_bytes());
    let header = GgufFile::open(b()).unwrap().data_start() as usize;
    for len in [0, 3, 4, 7, 8, 16, 23, 24, 40, 1000, header / 2, header - 20_000] {
        refuses(&put(&folder, "x.gguf", &bytes[..len]), &["the download may be incomplete"]);
    }
    for len in [header + 1, bytes.len() / 2, bytes.len() - 20_000] {
        refuses(&put(&folder, "x.gguf", &bytes[..len]), &["tensor ", "past the end of the file"]);
    }
}

#[test]
fn flipped_bits_never_panic() {
    let (folder, bytes) = (scratch("flipped"), b_bytes());
    let header = GgufFile::open(b()).unwrap().data_start();
    let mut state = 7u64;
    let mut refused = 0;
    for round in 0..80 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // Mostly the header; every fourth anywhere.
        let range = if round % 4 == 0 { bytes.len() as u64 } else { header };
        let at = ((state >> 20) % range) as usize;
        let mut bytes = bytes.clone();
        bytes[at] ^= 1 << (state >> 61);
        let path = put(&folder, "x.gguf", &bytes);
        let ran = ds4(&["-m", path.to_str().unwrap(), "-p", "x", "-n", "2", "-c", "64", "--ssd-streaming"]);
        if ran.code == Some(0) {
            ran.ok();
        } else {
            refused += 1;
            // A changed chat template may make the prompt itself impossible, which counts as usage.
            ran.failed_late(if ran.code == Some(2) { 2 } else { 1 }, &[]);
        }
    }
    assert!((5..80).contains(&refused), "{refused} of 80 were noticed");
}

#[test]
fn hostile_headers() {
    let folder = scratch("hostile");
    let header = |tensors: u64, keys: u64, rest: &[u8]| {
        [b"GGUF\x03\0\0\0", &tensors.to_le_bytes()[..], &keys.to_le_bytes()[..], rest].concat()
    };
    let key =
        |value_type: u32, rest: &[u8]| [&1u64.to_le_bytes()[..], b"k", &value_type.to_le_bytes()[..], rest].concat();
    let array = |element: u32, count: u64| [element.to_le_bytes().to_vec(), count.to_le_bytes().to_vec()].concat();
    let nested: Vec<u8> = (0..1000).flat_map(|_| array(9, 1)).collect();
    let cases = [
        b"GGML\x03\0\0\0".to_vec(),
        b"PK\x03\x04 this is no model".to_vec(),
        [b"GGUF\x63\0\0\0", &[0u8; 64][..]].concat(),
        header(u64::MAX, 0, &[]),
        header(0, u64::MAX, &[]),
        header(1 << 16, 1 << 16, &[]),
        header(0, 1, &u64::MAX.to_le_bytes()),
        header(0, 1, &(1u64 << 40).to_le_bytes()),
        header(0, 1, &key(99, &[0; 8])),
        header(0, 1, &key(8, &u64::MAX.to_le_bytes())),
        header(0, 1, &key(9, &array(8, u64::MAX))),
        header(0, 1, &key(9, &array(10, 1 << 60))),
        header(0, 1, &key(9, &nested)),
        header(0, 1, &key(7, &[2])),
    ];
    for (number, bytes) in cases.iter().enumerate() {
        refuses(&put(&folder, &format!("{number}.gguf"), bytes), &[]);
    }
}

/// Where the directory entry of `tensor` begins: its name's bytes.
fn entry(bytes: &[u8], tensor: &str) -> usize {
    let wanted = [&(tensor.len() as u64).to_le_bytes()[..], tensor.as_bytes()].concat();
    bytes.windows(wanted.len()).position(|w| w == wanted).unwrap() + wanted.len()
}

#[test]
fn tensors_that_lie() {
    let (folder, good) = (scratch("tensors"), b_bytes());
    let name = "blk.1.attn_q_a.weight";
    // After the name: dimensions (u32), each (u64), type (u32), offset (u64).
    let at = entry(&good, name);
    assert_eq!(good[at], 2, "a matrix");
    let (dims, ty, offset) = (at + 4, at + 20, at + 24);
    let with = |at: usize, value: &[u8]| {
        let mut bytes = good.clone();
        bytes[at..at + value.len()].copy_from_slice(value);
        put(&folder, "x.gguf", &bytes)
    };
    refuses(&with(offset, &(1u64 << 40).to_le_bytes()), &[name, "past the end of the file"]);
    refuses(&with(offset, &u64::MAX.to_le_bytes()), &[name]);
    refuses(&with(offset, &1u64.to_le_bytes()), &[name]);
    refuses(&with(dims, &u64::MAX.to_le_bytes()), &[name]);
    refuses(&with(dims, &0u64.to_le_bytes()), &[name]);
    refuses(&with(at, &9u32.to_le_bytes()), &[name]);
    refuses(&with(ty, &4096u32.to_le_bytes()), &[name, "4096"]);
    // A type of the format that this program has no arithmetic for.
    refuses(&with(ty, &34u32.to_le_bytes()), &[name, "type"]);
}

#[test]
fn another_architecture() {
    let path = scratch("arch").join("x.gguf");
    rewrite(&path, |m| _ = m.insert("general.architecture", "llama"), |_| true);
    refuses(&path, &["llama", "deepseek41"]);
    rewrite(&path, |m| _ = m.remove("general.architecture"), |_| true);
    refuses(&path, &["no metadata key general.architecture"]);
}

#[test]
fn missing_keys() {
    let path = scratch("keys").join("x.gguf");
    let keys: Vec<String> = GgufFile::open(b()).unwrap().metadata().iter().map(|(k, _)| k.to_owned()).collect();
    let (mut required, mut unmissed) = (0, Vec::new());
    for key in &keys {
        rewrite(&path, |m| _ = m.remove(key), |_| true);
        let ran = ds4(&["-m", path.to_str().unwrap(), "-p", "x", "-n", "1", "-c", "64"]);
        if ran.code != Some(0) {
            required += 1;
            let code = if ran.code == Some(2) { 2 } else { 1 };
            // Without its template the vocabulary cannot write the built-in prompt.
            let named = if key == "tokenizer.chat_template" { "special token" } else { key };
            ran.failed(code, &[named]);
        } else {
            unmissed.extend(key.strip_prefix("deepseek41."));
        }
    }
    assert_eq!(unmissed, DESCRIPTIVE, "keys that nothing is computed from");
    assert!(required > 30, "{required} of {} keys are required", keys.len());
}

/// Keys that are checked when they are there, follow from others, or only describe.
const DESCRIPTIVE: &[&str] = &[
    "scoring_func",
    "hidden_act",
    "topk_method",
    "engram.head_count",
    "engram.key_length",
    "engram.max_ngram_size",
    "config",
    "quantization",
    "calibration",
];

#[test]
fn keys_of_the_wrong_type() {
    let path = scratch("types").join("x.gguf");
    for key in ["deepseek41.hidden_size", "tokenizer.ggml.tokens", "deepseek41.engram.primes"] {
        for value in [Value::Str("seven".into()), Value::F32(f32::NAN), Value::Bool(true), Value::I32(-1)] {
            rewrite(&path, |m| _ = m.insert(key, value.clone()), |_| true);
            refuses(&path, &[key]);
        }
    }
    rewrite(&path, |m| _ = m.insert("deepseek41.scoring_func", "softmax"), |_| true);
    refuses(&path, &["deepseek41.scoring_func", "softmax", "sqrtsoftplus"]);
    rewrite(&path, |m| _ = m.insert("deepseek41.hidden_size", u32::MAX), |_| true);
    refuses(&path, &[]);
}

#[test]
fn missing_tensors() {
    let path = scratch("missing").join("x.gguf");
    for tensor in [
        "token_embd.weight",
        "output.weight",
        "blk.0.attn_q_a.weight",
        "blk.2.ffn_gate_inp.weight",
        "blk.2.ffn_gate_exps.weight",
        "blk.4.ffn_down_exps.weight",
        "blk.3.engram_embd.weight",
    ] {
        rewrite(&path, |_| {}, |name| name != tensor);
        refuses(&path, &[tensor]);
    }
}

#[test]
fn primes_that_do_not_sum_to_the_rows() {
    let path = scratch("primes").join("x.gguf");
    let key = "deepseek41.engram.primes";
    let primes = GgufFile::open(b()).unwrap().metadata().u32_array(key).unwrap();
    for change in [2i64, -2] {
        let mut primes = primes.clone();
        primes[3] = (i64::from(primes[3]) + change) as u32;
        rewrite(&path, |m| _ = m.insert(key, Value::Array(Array::U32(primes.clone()))), |_| true);
        refuses(&path, &["primes"]);
    }
    rewrite(&path, |m| _ = m.insert(key, Value::Array(Array::U32(primes[1..].to_vec()))), |_| true);
    refuses(&path, &["primes"]);
}

#[test]
fn a_nan_in_a_row() {
    let folder = scratch("nan");
    let mut bytes = b_bytes();
    let layout = Layout::from_gguf(&GgufFile::open(b()).unwrap()).unwrap();
    let table = layout.tables[1];
    for row in 0..table.rows {
        // E4M3 has two NaN codes.
        bytes[table.row(row).offset as usize + 5] = if row % 2 == 0 { 0x7f } else { 0xff };
    }
    let layer = format!("layer {}", table.layer.0);
    refuses(&put(&folder, "x.gguf", &bytes), &[]);
    let path = folder.join("x.gguf");
    ds4(&["-m", path.to_str().unwrap(), "-p", "x"]).failed(1, &["n-gram table", &layer, "row ", "is not finite"]);
}

#[test]
fn models_that_cannot_be_read() {
    let folder = scratch("unreadable");
    refuses(&folder, &["directory"]);
    refuses(&folder.join("nowhere.gguf"), &["No such file"]);
    refuses(&folder.join("no/such/folder.gguf"), &["No such file"]);
    refuses(Path::new("/dev/zero"), &["not a regular file"]);
    let pipe = folder.join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::from_raw_mode(0o600)).unwrap();
    refuses(&pipe, &["not a regular file"]);
    let mut command = command();
    command.current_dir(&folder);
    let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/ds41-mini.gguf");
    if !bundled.exists() {
        finish(command.args(["-p", "x"])).failed(2, &["no model", "-m"]);
    }
}

#[test]
fn a_model_of_somebody_else() {
    let folder = scratch("locked");
    let path = put(&folder, "x.gguf", &b_bytes());
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o000)).unwrap();
    let mut command = command();
    command.args(["-p", "x", "-m"]).arg(&path);
    if rustix::process::geteuid().is_root() {
        // Nothing is locked for root: be nobody, with a copy of the program where nobody may run it.
        let program = tempfile::Builder::new().permissions(PermissionsExt::from_mode(0o755)).tempdir().unwrap();
        let (exe, model) = (program.path().join("ds4"), program.path().join("x.gguf"));
        std::fs::copy(env!("CARGO_BIN_EXE_ds4"), &exe).unwrap();
        std::fs::copy(&path, &model).unwrap();
        std::fs::set_permissions(&model, PermissionsExt::from_mode(0o000)).unwrap();
        let mut nobody = std::process::Command::new(&exe);
        nobody.uid(65534).current_dir("/").stdin(Stdio::null()).args(["-p", "x", "-m"]).arg(&model);
        finish(&mut nobody).failed(1, &["Permission denied"]);
    } else {
        finish(&mut command).failed(1, &["Permission denied"]);
    }
}

#[test]
fn contexts_and_budgets_beyond_the_machine() {
    for streaming in [&["--ssd-streaming"][..], &[]] {
        for ctx in ["2000000000", "4294967295"] {
            let args = [&["-p", "x", "-c", ctx], streaming].concat();
            ds4_b(&args).failed(1, &["--ctx ", ctx, "free memory"]);
        }
    }
    let budget = |text: &str| ds4_b(&["-p", "x", "--ssd-streaming", "--ssd-streaming-cache-experts", text]);
    budget("500GB").failed(1, &["500GB", "Use at most"]);
    budget("9").failed(1, &["9 experts", "routes 10 (5 layers x 2)", "Use at least 10"]);
    budget("1").failed(1, &["Use at least 10"]);
    budget("0.0001GB").failed(1, &["routes 10", "Use at least 0.", "GB"]);
    for text in ["0", "0GB", "-1", "-1GB", "NaNGB", "infGB", "8 GB", "8gb", "", "eight", "1e3", "99999999999999999999"]
    {
        budget(text).failed(2, &["--ssd-streaming-cache-experts"]);
    }
    for text in ["0", "-1", "-1GB", "NaNGB", "8 GB", "", "12"] {
        ds4_b(&["-p", "x", "--simulate-used-memory", text]).failed(2, &["--simulate-used-memory"]);
    }
    ds4_b(&["-p", "x", "--simulate-used-memory", "500GB"]).failed(1, &["usable", "give it less"]);
    ds4_b(&["-p", "x", "--simulate-used-memory", "500GB", "--ssd-streaming"]).failed(1, &["usable", "give it less"]);
}

#[test]
fn prompts_that_are_none() {
    let folder = scratch("prompts");
    let file = |name: &str, bytes: &[u8]| put(&folder, name, bytes).to_str().unwrap().to_owned();
    ds4_b(&["-p", ""]).failed(2, &["prompt is empty", "give -p something"]);
    ds4_b(&["--prompt-file", &file("empty", b"")]).failed(2, &["prompt is empty", "give --prompt-file something"]);
    ds4_b(&["--tokens-file", &file("none", b"[]")]).failed(2, &["prompt is empty", "give --tokens-file something"]);
    // Refused by its bytes: encoding it would take minutes here and a gigabyte that is in no plan.
    let far = file("far", &vec![b'a'; 8 << 20]);
    ds4_b(&["--prompt-file", &far, "-c", "64"])
        .failed(2, &["8388608 bytes, at least", "the context holds 64", "--ctx"]);
    ds4_b(&["-p", &"hello ".repeat(40), "-c", "20"]).failed(2, &["the context holds 20", "--ctx"]);
    ds4_b(&["--prompt-file", &file("latin", b"caf\xe9")]).failed(1, &["latin", "not UTF-8", "at 3"]);
    ds4_b(&["--prompt-file", "/nowhere.txt"]).failed(1, &["/nowhere.txt", "No such file"]);
    ds4_b(&["--prompt-file", folder.to_str().unwrap()]).failed(1, &["directory"]);
    ds4_b(&["--perplexity-file", &file("bad", b"\xff\xfe")]).failed(1, &["not UTF-8"]);
    ds4_b(&["--perplexity-file", &file("nothing", b"")]).failed(2, &["empty"]);
    for (name, text) in [("text", "hello"), ("minus", "[1,-2]"), ("deep", "[[1]]"), ("half", "[1,"), ("real", "[1.5]")]
    {
        ds4_b(&["--tokens-file", &file(name, text.as_bytes())]).failed(1, &[name, "JSON array of token ids"]);
    }
    ds4_b(&["--tokens-file", &file("high", b"[1, 640]")]).failed(1, &["token id 640", "640"]);
    ds4_b(&["--dump-tokens"]).failed(2, &["needs a prompt"]);
    ds4_b(&["--decode-consistency", "2"]).failed(2, &["needs a prompt"]);
    ds4_b(&["-p", "x", "--think"]).failed(2, &["no reasoning switch"]);
    ds4_b(&["-p", "x", "--backend", "cpu", "--gpu-cache", "8"]).failed(2, &["--gpu-cache", "--backend cpu"]);
    ds4_b(&["-p", "x", "--gpu-cache", "8 pieces"]).failed(2, &["--gpu-cache"]);
    ds4_b(&["-p", "x", "--backend", "cpu", "--gpu-devices", "0"]).failed(2, &["--gpu-devices", "--backend cpu"]);
    ds4_b(&["-p", "x", "--cpu", "--gpu-devices", "0"]).failed(2, &["--gpu-devices", "--cpu"]);
    ds4_b(&["-p", "x", "--gpu-devices", "0,1"]).failed(2, &["--gpu-devices", "a list is refused", "name one device"]);
    for text in ["first", "-1", "", "70000", "0 "] {
        ds4_b(&["-p", "x", "--gpu-devices", text]).failed(2, &["--gpu-devices"]);
    }
    ds4_b(&["-p", "x", "--cpu", "--gpu-uploads", "direct"]).failed(2, &["--gpu-uploads needs a GPU", "--cpu"]);
    ds4_b(&["-p", "x", "--gpu-uploads", "fast"]).failed(2, &["--gpu-uploads", "direct"]);
    ds4_b(&["-p", "x", "--cpu", "--no-graph"]).failed(2, &["--no-graph", "--cpu"]);
    ds4_b(&["-p", "x", "--cpu", "--gpu-sums", "fast"]).failed(2, &["--gpu-sums", "--cpu"]);
    ds4_b(&["-p", "x", "--gpu-sums", "loose"]).failed(2, &["--gpu-sums", "exact", "fast"]);
    if !has_gpu() {
        ds4_b(&["-p", "x", "--backend", "cuda"]).failed(1, &["no GPU", "--backend cpu"]);
        ds4_b(&["-p", "x", "--gpu-cache", "8"]).failed(1, &["--gpu-cache needs a GPU", "no GPU"]);
        // A GPU that was named is never replaced by the processor.
        ds4_b(&["-p", "x", "--gpu-devices", "0"]).failed(1, &["no GPU", "--backend cpu"]);
        ds4_b(&["-p", "x", "--gpu-uploads", "copy"]).failed(1, &["--gpu-uploads needs a GPU", "no GPU"]);
        ds4_b(&["-p", "x", "--no-graph"]).failed(1, &["--no-graph needs a GPU", "no GPU"]);
        ds4_b(&["-p", "x", "--gpu-sums", "exact"]).failed(1, &["--gpu-sums needs a GPU", "no GPU"]);
    }
}

/// Whether the CUDA backend would find a device here.
fn has_gpu() -> bool {
    #[cfg(feature = "cuda")]
    return ds4::backend::cuda::Device::open(0, false).is_ok();
    #[cfg(not(feature = "cuda"))]
    false
}

#[test]
fn flags_that_make_no_sense() {
    let cases: &[(&[&str], &str)] = &[
        (&["--no-such-flag"], "--no-such-flag"),
        (&["-p"], "value is required"),
        (&["stray"], "stray"),
        (&["--ctx", "0"], "--ctx"),
        (&["--ctx", "many"], "--ctx"),
        (&["--threads", "0"], "--threads"),
        (&["--prefill-chunk", "0"], "--prefill-chunk"),
        (&["--temp", "-1"], "--temp -1: the value must not be negative"),
        (&["--row-cache", "-1GB"], "--row-cache -1GB: the value must not be negative"),
        (&["--temp", "nan"], "at least 0"),
        (&["--top-p", "2"], "between 0 and 1"),
        (&["--min-p", "-0.1"], "-0"),
        (&["--seed", "x"], "--seed"),
        (&["-n", "-5"], "-n -5: the value must not be negative"),
        (&["--io", "mmap"], "auto, uring, pread"),
        (&["--simd", "sse"], "scalar"),
        (&["--think", "--nothink"], "cannot be used with"),
        (&["--think-level", "101"], "--think-level"),
        (&["--cpu", "--backend", "cpu"], "cannot be used with"),
        (&["--ssd-streaming-cold"], "--ssd-streaming"),
        (&["--ssd-streaming-cache-experts", "9"], "--ssd-streaming"),
        (&["-p", "x", "--prompt-file", "y"], "cannot be used with"),
    ];
    for (args, part) in cases {
        ds4_b(args).failed(2, &[part, "--help"]);
    }
}

#[test]
fn a_full_disk_is_told_and_devices_stay_devices() {
    let is_device = || {
        use std::os::unix::fs::FileTypeExt;
        std::fs::metadata("/dev/full").unwrap().file_type().is_char_device()
    };
    assert!(is_device());
    for flag in ["--dump-logits", "--stats-json", "--dump-logprobs", "--trace-routes"] {
        ds4_b(&["-p", "x", "-n", "2", flag, "/dev/full"]).failed_late(1, &[flag, "No space left"]);
        assert!(is_device(), "{flag} replaced the device");
        ds4_b(&["-p", "x", "-n", "2", flag, "/nowhere/x"]).failed_late(1, &[flag, "no folder /nowhere"]);
    }
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let ran = finish(command().arg("-m").arg(b()).args(["-p", "x", "-n", "2"]).stdout(full));
    ran.failed(1, &["cannot write the answer", "No space left"]);
}

#[test]
fn a_closed_standard_output_is_no_error() {
    let folder = scratch("closed");
    let text = put(&folder, "text", "hello there, hello again".as_bytes());
    let (text, logits) = (text.to_str().unwrap(), folder.join("logits"));
    let tasks: [&[&str]; 7] = [
        &["-p", "x", "-n", "50"],
        &["-p", "x", "-n", "50", "--dump-logits", logits.to_str().unwrap()],
        &["--plan"],
        &["--inspect"],
        &["-p", "x", "--dump-tokens"],
        &["--perplexity-file", text],
        &["--help"],
    ];
    for task in tasks {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        finish(command().arg("-m").arg(b()).args(task).stdout(writer)).ok();
    }
    // What was asked for in a file is there, and whole; no part of one is left.
    assert_eq!(names_in(&folder), ["logits", "text"]);
    safetensors::SafeTensors::deserialize(&std::fs::read(logits).unwrap()).unwrap();
}

/// `ds4 -m b.gguf` with `args`, started by a shell that has run `first`.
fn after(first: &str, args: &[&str]) -> std::process::Command {
    let ds4 = command();
    let mut shell = std::process::Command::new("sh");
    shell.arg("-c").arg(format!("{first}; exec \"$0\" \"$@\"")).arg(ds4.get_program()).arg("-m").arg(b()).args(args);
    shell.env("HOME", made_folder()).current_dir(made_folder()).stdin(Stdio::null());
    shell
}

#[test]
fn arguments_that_are_no_text_are_told_or_taken_as_names() {
    let strange = std::ffi::OsStr::from_bytes(b"a\xffb.gguf");
    for args in [&["-1", "-p"][..], &["-n", "-1", "-p"], &["--system"]] {
        finish(command().args(args).arg(strange)).failed(2, &["ds4 --help"]);
    }
    let model = scratch("strange-names").join(strange);
    std::fs::copy(b(), &model).unwrap();
    finish(command().args(["-p", "x", "-n", "1", "-m"]).arg(&model)).ok();
    let mut bench = std::process::Command::new(env!("CARGO_BIN_EXE_ds4-bench"));
    bench.args(["--cpu", "--random-tokens", "1", "--ctx-start", "8", "--ctx-max", "8", "--gen-tokens", "1", "-m"]);
    let ran = finish(bench.arg(&model).args(["-o", "json"]).env("HOME", made_folder()));
    assert!(ran.code == Some(0) && ran.text().contains("ds4-bench"), "{}", ran.stderr);
}

#[test]
fn an_error_stream_that_is_full_costs_words_only() {
    let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
    let code = |command: &mut std::process::Command| command.stderr(full()).output().unwrap().status.code();
    assert_eq!(code(command().arg("-m").arg(b()).args(["-p", "x", "-n", "2"])), Some(0));
    assert_eq!(code(command().arg("-m").arg(b()).args(["-p", "x", "-n", "x"])), Some(2));
    let model = scratch("full-stderr").join("x.gguf");
    std::fs::copy(b(), &model).unwrap();
    let gguf = |args: &[&str]| {
        code(std::process::Command::new(env!("CARGO_BIN_EXE_ds4-gguf")).args(args).stdout(Stdio::null()))
    };
    assert_eq!(gguf(&["checksum", model.to_str().unwrap()]), Some(0));
    assert_eq!(gguf(&["checksum", model.to_str().unwrap()]), Some(1), "it is there already");
    let cache = |args: &[&str]| code(std::process::Command::new(env!("CARGO_BIN_EXE_ds4-cache")).args(args));
    assert_eq!(cache(&["replay", "/no/such/trace"]), Some(1));
}

#[test]
fn an_output_that_was_never_open_is_an_error() {
    for task in [&["-p", "x", "-n", "2"][..], &["--plan"], &["-p", "x", "--dump-tokens"]] {
        finish(&mut after("exec >&-", task)).failed(1, &["cannot write the answer", "stdout is closed"]);
    }
    finish(&mut after("exec >/dev/null", &["-p", "x", "-n", "2"])).ok();
}

#[test]
fn a_limit_on_file_sizes_is_told_like_a_full_drive() {
    let folder = scratch("limited");
    for flag in ["--save-session", "--dump-logits"] {
        let path = folder.join("x");
        let ran = finish(&mut after("ulimit -f 1", &["-p", "hello there", "-n", "8", flag, path.to_str().unwrap()]));
        ran.failed_late(1, &[path.to_str().unwrap(), "File too large"]);
        assert_eq!(names_in(&folder), Vec::<String>::new(), "{flag}: nothing half-written stays");
    }
}

#[test]
fn a_message_without_end_is_refused() {
    let endless = std::fs::File::open("/dev/zero").unwrap();
    let ran = finish(command().arg("-m").arg(b()).args(["-n", "2"]).stdin(endless));
    ran.failed(1, &["a line has more than 67108864 bytes"]);
}

#[test]
fn outputs_never_replace_a_model_an_input_or_each_other() {
    let folder = scratch("clashes");
    let (model, text) = (folder.join("live.gguf"), folder.join("t.txt"));
    std::fs::copy(b(), &model).unwrap();
    std::fs::write(&text, "hello there").unwrap();
    let before = std::fs::read(&model).unwrap();
    let (m, t) = (model.to_str().unwrap(), text.to_str().unwrap());
    for flag in [
        "--stats-json",
        "--save-session",
        "--trace-routes",
        "--trace-file",
        "--dump-logits",
        "--dump-logprobs",
        "--snapshot-file",
    ] {
        let mut run = command();
        run.args(["-m", m, "-p", "hi", "-n", "1", "--ssd-streaming", flag, m]);
        finish(&mut run).failed(2, &[flag, "live.gguf", "-m"]);
        // Whatever model runs, no other is replaced.
        if flag != "--snapshot-file" {
            ds4_b(&["-p", "hi", "-n", "1", "--ssd-streaming", flag, m]).failed(1, &["model file"]);
        }
    }
    ds4_b(&["--prompt-file", t, "-n", "1", "--stats-json", t]).failed(2, &["--stats-json", "--prompt-file"]);
    let both = folder.join("x.json");
    let both = both.to_str().unwrap();
    ds4_b(&["-p", "hi", "-n", "1", "--stats-json", both, "--dump-logprobs", both])
        .failed(2, &["--stats-json", "--dump-logprobs"]);
    assert_eq!(std::fs::read(&model).unwrap(), before);
    assert_eq!(std::fs::read_to_string(&text).unwrap(), "hello there");
}
