//! Files that a run was asked for, when something else goes wrong: they are kept, and nothing half done is left.
//! Owns no content of files (see cli_observe, cli_session). Surprising fact: `ds4 | head` ends with code 0 and not a word, so whatever got lost
//! with it would be lost in silence.

mod cli_rig;

use std::path::{Path, PathBuf};
use std::process::Command;

use cli_rig::made_models::b;
use cli_rig::{Live, Ran, command, ds4_b, finish, json, names_in, scratch};

/// Slow enough that `head` has left long before the end.
const SLOW: [&str; 9] = ["--quality", "--simd", "scalar", "-t", "1", "--temp", "1", "-c", "1100"];

/// Runs `ds4 -m b.gguf` with `args` on `input` through `script`, in which it is "$0" "$@".
fn shell(script: &str, input: &str, args: &[&str]) -> Ran {
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("printf '{input}' | {script}")).arg(env!("CARGO_BIN_EXE_ds4"));
    finish(shell.env("HOME", cli_rig::made_models::folder()).arg("-m").arg(b()).args(args))
}

/// `flags` and a file in `folder` for each.
fn files(folder: &Path, flags: &[&str]) -> Vec<String> {
    let file = |flag: &&str| [(*flag).to_owned(), folder.join(&flag[2..]).to_str().unwrap().to_owned()];
    flags.iter().flat_map(file).collect()
}

fn pipe(folder: &Path) -> PathBuf {
    let path = folder.join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::from_raw_mode(0o600)).unwrap();
    path
}

/// What remains of a run whose text nobody reads to its end.
fn left_by_head(name: &str, input: &str, args: &[&str], flags: &[&str]) -> PathBuf {
    let folder = scratch(name);
    let files = files(&folder, flags);
    let code = scratch(&format!("{name}-code")).join("code");
    let all: Vec<&str> = SLOW.into_iter().chain(args.iter().copied()).chain(files.iter().map(String::as_str)).collect();
    let ran = shell(&format!("{{ \"$0\" \"$@\"; echo $? > {}; }} | head -c 1", code.display()), input, &all).ok();
    assert_eq!(ran.stdout.len(), 1);
    assert_eq!(std::fs::read_to_string(code).unwrap(), "0\n", "{}", ran.stderr);
    let mut expected: Vec<String> = flags.iter().map(|flag| flag[2..].to_owned()).collect();
    expected.sort();
    assert_eq!(names_in(&folder), expected);
    assert!(json(&folder.join("stats-json"))["generated_tokens"].as_u64().unwrap() < 1000);
    folder
}

#[test]
fn an_answer_that_nobody_reads_on_leaves_all_files() {
    let flags =
        ["--save-session", "--stats-json", "--trace-routes", "--trace-file", "--dump-logits", "--dump-logprobs"];
    let folder = left_by_head("head", "", &["-p", "x", "--ssd-streaming"], &flags);
    let session = folder.join("save-session");
    let more = ["-p", "and on", "-n", "1", "-c", "1100", "--load-session"];
    finish(command().arg("-m").arg(b()).args(more).arg(session)).ok();
}

#[test]
fn a_conversation_that_nobody_reads_on_is_saved() {
    let flags = ["--save-session", "--stats-json", "--trace-routes"];
    let folder = left_by_head("head-talk", "hello\\nand you\\n", &["--ssd-streaming"], &flags);
    let mut run = command();
    run.arg("-m").arg(b()).args(["-n", "1", "-c", "1100", "--load-session"]).arg(folder.join("save-session"));
    let mut live = Live::start(&mut run);
    live.wait_for("goes on");
    // The question whose answer was cut is part of it.
    live.say("/rewind 1");
    live.wait_for("questions left: 0");
    assert_eq!(live.end().code, Some(0));
}

#[test]
fn one_file_that_cannot_be_written_costs_no_other() {
    let folder = scratch("one-full");
    let files = files(&folder, &["--save-session", "--stats-json", "--trace-routes", "--dump-logprobs"]);
    let mut run = command();
    run.arg("-m").arg(b()).args(["-p", "x", "-n", "3", "--ssd-streaming"]).args(files);
    let ran = finish(run.args(["--dump-logits", "/dev/full"]));
    ran.failed_late(1, &["--dump-logits", "/dev/full", "No space left"]);
    assert_eq!(names_in(&folder), ["dump-logprobs", "save-session", "stats-json", "trace-routes"]);
}

#[test]
fn a_drawing_that_meets_a_limit_leaves_nothing() {
    let folder = scratch("drawing");
    let files = files(&folder, &["--trace-file"]);
    let args: Vec<&str> = ["-p", "x", "-n", "20"].into_iter().chain(files.iter().map(String::as_str)).collect();
    let ran = shell("{ ulimit -f 8; exec \"$0\" \"$@\"; }", "", &args);
    ran.failed_late(1, &["--trace-file", "File too large"]);
    assert!(!ran.stderr.contains(".part"), "{}", ran.stderr);
    assert_eq!(names_in(&folder), Vec::<String>::new());
}

#[test]
fn a_named_pipe_gets_the_file() {
    for flag in ["--stats-json", "--trace-file", "--dump-logprobs"] {
        let path = pipe(&scratch("named-pipe"));
        let read = std::thread::spawn({
            let path = path.clone();
            move || std::fs::read(path).unwrap()
        });
        let mut run = command();
        // Ended by force if it waits for a reader that has left.
        Live::start(run.arg("-m").arg(b()).args(["-p", "x", "-n", "2", flag]).arg(&path)).end().ok();
        serde_json::from_slice::<serde_json::Value>(&read.join().unwrap()).unwrap();
    }
}

#[test]
fn a_pipe_that_is_no_input_is_refused_at_once() {
    let path = pipe(&scratch("input-pipe"));
    let mut run = command();
    run.arg("-m").arg(b()).args(["-p", "x", "--ssd-streaming", "--verify-reads", "--checksums"]).arg(&path);
    Live::start(&mut run).end().failed(1, &[path.to_str().unwrap(), "not a regular file"]);
    let mut live = Live::start(command().arg("-m").arg(b()).args(["-n", "1"]));
    live.wait_for("type a message");
    live.say(&format!("/read {}", path.display()));
    live.wait_for("is no regular file");
    live.say("hello");
    live.wait_for("generation: ");
    assert_eq!(live.end().code, Some(1), "a line of the input failed");
}

#[test]
fn files_that_a_task_never_writes_are_refused() {
    let folder = scratch("unwritten");
    let text = scratch("unwritten-text").join("text");
    std::fs::write(&text, "hello there").unwrap();
    let text = text.to_str().unwrap();
    let all = [
        "--stats-json",
        "--trace-file",
        "--snapshot-file",
        "--save-hotlist",
        "--trace-routes",
        "--dump-logits",
        "--dump-logprobs",
        "--save-session",
    ];
    let tasks: [(&[&str], &[&str]); 6] = [
        (&["--inspect"], &[]),
        (&["--plan"], &[]),
        (&["--doctor"], &[]),
        (&["--dump-tokens", "-p", "x"], &[]),
        (&["--perplexity-file", text], &["--stats-json", "--trace-file", "--snapshot-file", "--save-hotlist"]),
        (&["--decode-consistency", "2", "-p", "x"], &["--trace-file", "--snapshot-file", "--save-hotlist"]),
    ];
    for (task, writes) in tasks {
        for flag in all {
            let path = folder.join("file");
            let mut run = command();
            run.arg("-m").arg(b()).arg("--ssd-streaming").args(task).arg(flag).arg(&path);
            let ran = finish(&mut run);
            if writes.contains(&flag) {
                assert_eq!(ran.code, Some(0), "{task:?} {flag}: {}", ran.stderr);
                std::fs::remove_file(path).unwrap();
            } else {
                ran.failed(2, &[flag]);
                assert_eq!(names_in(&folder), Vec::<String>::new(), "{task:?} {flag}");
            }
        }
    }
    for two in [["--inspect", "--plan"], ["--plan", "--doctor"], ["--dump-tokens", "--inspect"]] {
        ds4_b(&two).failed(2, &[two[0], two[1], "one at a time"]);
    }
    ds4_b(&["--perplexity-file", text, "-p", "x"]).failed(2, &["--perplexity-file", "-p"]);
    std::fs::write(text, "").unwrap();
    ds4_b(&["--perplexity-file", text]).failed(2, &["--perplexity-file is empty"]);
}
