//! The `ds4-gguf` binary as a user meets it: exit codes, messages, what lies on disk afterwards.
//! Owns no judgement of values; never calls the library. Surprising fact: the interrupt test needs a slow recipe, so it
//! converts more experts than any other test.

mod checkpoint;

use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use checkpoint::{fixture, wide};

fn ds4_gguf(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ds4-gguf")).args(args).output().unwrap()
}

fn check(args: &[&str], code: i32, text: &str) -> String {
    let out = ds4_gguf(args);
    let (stdout, stderr) = (String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap());
    assert_eq!(out.status.code(), Some(code), "{args:?}: {stdout}{stderr}");
    assert!(stdout.contains(text) || stderr.contains(text), "{args:?} lacks {text:?}:\n{stdout}{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    stdout
}

fn names_in(folder: &Path) -> Vec<String> {
    std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn a_checkpoint_becomes_files_that_can_be_inspected_and_compared() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (input, native, small) = (at("wide"), at("native.gguf"), at("small.gguf"));
    wide(2).save(Path::new(&input));
    check(&["convert", &input, "--recipe", "native", "-o", &native], 0, "native.gguf: 62 tensors");
    check(&["convert", &input, "--recipe", "native", "-o", &native], 1, "exists already; use --force");
    check(&["convert", &input, "--recipe", "native", "-o", &native, "--force", "-t", "1"], 0, "wrote");
    check(
        &["quantize", &native, "--recipe", "q2", "-o", &small, "--set", "head=Q6_K"],
        0,
        "note: types of 2 and 3 bits",
    );
    let text = check(&["inspect", &small, "--tensors"], 0, "blk.0.ffn_gate_exps.weight");
    for line in [
        "deepseek41.hidden_size = 256",
        "disk_only      1 tensors",
        "streamed       6 tensors",
        "4 experts in 2 layers",
    ] {
        assert!(text.contains(line), "{text} lacks {line}");
    }
    let json: serde_json::Value =
        serde_json::from_str(&check(&["inspect", &small, "--json", "--tensors"], 0, "")).unwrap();
    assert_eq!(json["metadata"]["deepseek41.hidden_size"], 256);
    assert_eq!(json["metadata"]["deepseek41.engram.token_map"]["len"], 64);
    assert_eq!(json["metadata"]["deepseek41.engram.primes"]["first"][1], 13);
    assert_eq!(json["classes"]["disk_only"]["bytes"], 60 * 33);
    assert_eq!(json["expert_sizes"][0]["experts"], 4);
    assert_eq!(json["tensors"].as_array().unwrap().len(), 62);
    check(&["compare", &native, &native], 0, "62 of 62 common tensors are identical");
    check(&["compare", &native, &small], 1, "tensor output.weight: BF16 and Q6_K, max abs");
    check(&["compare", &native, &small, "--tolerance", "1"], 0, "key deepseek41.quantization differs");
    let mut names = names_in(folder.path());
    names.sort();
    assert_eq!(names, ["native.gguf", "small.gguf", "wide"]);
}

#[test]
fn bad_requests_end_with_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("x.gguf");
    let (output, b) = (output.to_str().unwrap(), fixture("b"));
    let b = b.to_str().unwrap();
    check(&["convert", b, "--recipe", "q5", "-o", output], 2, "q5");
    check(&["convert", b, "--recipe", "q4", "-o", output, "--set", "router=F16"], 2, "unknown class; the classes are");
    check(
        &["convert", b, "--recipe", "q4", "-o", output],
        1,
        "rows of 128 values do not fit Q4_K; gate_up may be one of F32",
    );
    check(&["convert", b, "--recipe", "native", "-o", output, "--alignment", "48"], 1, "must be a power of two");
    check(&["convert", b, "--recipe", "native", "-o", "/nowhere/x.gguf"], 1, "/nowhere/x.gguf: cannot create");
    check(&["convert", "/nowhere", "--recipe", "native", "-o", output], 1, "config.json: is missing");
    check(
        &["convert", b, "--recipe", "native", "-o", output, "--imatrix", "/nowhere.st"],
        1,
        "/nowhere.st: cannot open",
    );
    check(&["inspect", "/nowhere.gguf"], 1, "/nowhere.gguf: cannot open");
    check(&["inspect", &format!("{b}/config.json")], 1, "not a GGUF file");
    assert!(names_in(folder.path()).is_empty());
}

/// A file of 1 TiB, nearly all of it a hole, that begins with these bytes.
fn sparse(path: &Path, start: &[u8]) {
    std::fs::write(path, start).unwrap();
    std::fs::File::options().write(true).open(path).unwrap().set_len(1 << 40).unwrap();
}

#[test]
fn hostile_headers_take_bounded_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.gguf");
    let header = |tensors: u64, keys: u64| {
        [b"GGUF\x03\0\0\0".to_vec(), tensors.to_le_bytes().to_vec(), keys.to_le_bytes().to_vec()].concat()
    };
    let array = |element: u32, count: u64| {
        let key = [1u64.to_le_bytes().to_vec(), b"k".to_vec(), 9u32.to_le_bytes().to_vec()].concat();
        [header(0, 2), key, element.to_le_bytes().to_vec(), count.to_le_bytes().to_vec()].concat()
    };
    let cases = [
        (array(10, 1 << 24), "an empty metadata key"),
        (array(8, 1 << 24), "an empty metadata key"),
        (array(8, u64::MAX), "more than the limit"),
        (header(1 << 17, 0), "an empty tensor name"),
        (header(0, 1 << 16), "an empty metadata key"),
        (header(u64::MAX, 0), "more than the limit"),
    ];
    for (start, text) in cases {
        sparse(&path, &start);
        let script = "ulimit -v 700000; exec \"$0\" inspect \"$1\"";
        let args = ["-c", script, env!("CARGO_BIN_EXE_ds4-gguf"), path.to_str().unwrap()];
        let out = Command::new("sh").args(args).output().unwrap();
        let stderr = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains(text), "{stderr} lacks {text}");
    }
}

#[test]
fn a_closed_standard_output_is_no_error() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("x.gguf");
    let (path, b) = (output.to_str().unwrap(), fixture("b"));
    check(&["convert", b.to_str().unwrap(), "--recipe", "native", "-o", path], 0, "wrote");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = Command::new(env!("CARGO_BIN_EXE_ds4-gguf"));
    let out = command.args(["inspect", path, "--tensors"]).stdout(writer).stderr(Stdio::piped()).output().unwrap();
    assert_eq!(String::from_utf8(out.stderr).unwrap(), "");
    assert!(out.status.success());
}

/// Starts a conversion of some seconds into `folder` and ends it in the middle with `signal`.
fn end_midway(folder: &Path, signal: rustix::process::Signal) -> (Child, ExitStatus) {
    let (input, target) = (folder.join("wide"), folder.join("out"));
    wide(48).save(&input);
    std::fs::create_dir(&target).unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_ds4-gguf"))
        .args(["convert", "--recipe", "q2", "-t", "1", "-o"])
        .args([&target.join("x.gguf"), &input])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while names_in(&target).is_empty() {
        assert!(Instant::now() < deadline, "no temporary file appeared");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(names_in(&target)[0].ends_with(".part"));
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, signal).unwrap();
    let status = child.wait().unwrap();
    (child, status)
}

#[test]
fn the_next_conversion_clears_away_what_a_killed_one_left() {
    let folder = tempfile::tempdir().unwrap();
    let (_, status) = end_midway(folder.path(), rustix::process::Signal::KILL);
    assert_eq!(status.code(), None);
    let (target, b) = (folder.path().join("out"), fixture("b"));
    let left = names_in(&target);
    assert!(left.len() == 1 && left[0].starts_with(".ds4-x.gguf"), "{left:?}");
    // A fresh part may be about to be locked; make it as old as one that is found some time later.
    let part = std::fs::File::options().write(true).open(target.join(&left[0])).unwrap();
    part.set_modified(std::time::SystemTime::now() - Duration::from_secs(3600)).unwrap();
    drop(part);
    let convert = |name: &str| {
        let output = target.join(name);
        check(&["convert", b.to_str().unwrap(), "--recipe", "native", "-o", output.to_str().unwrap()], 0, "wrote");
        let mut names = names_in(&target);
        names.sort();
        names
    };
    // Another name is another file's business.
    assert_eq!(convert("y.gguf"), [left[0].as_str(), "y.gguf"]);
    assert_eq!(convert("x.gguf"), ["x.gguf", "y.gguf"]);
}

#[test]
fn an_interrupt_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("out");
    let (mut child, status) = end_midway(folder.path(), rustix::process::Signal::INT);
    let mut message = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut message).unwrap();
    assert_eq!(status.code(), Some(1), "{message}");
    assert!(message.contains("stopped; nothing was written"), "{message}");
    assert!(names_in(&target).is_empty());
}

#[test]
fn usage_errors_are_one_line() {
    for args in
        [&["inspect"][..], &["no-such-command"], &["inspect", "a", "--no-such-flag"], &["convert", "a", "-t", "-2"]]
    {
        let out = ds4_gguf(args);
        let said = String::from_utf8(out.stderr).unwrap();
        assert_eq!((out.status.code(), said.lines().count()), (Some(2), 1), "{args:?}: {said}");
        assert!(said.starts_with("ds4-gguf: ") && said.contains("ds4-gguf --help"), "{args:?}: {said}");
    }
    check(&["--help"], 0, "Usage:");
}
