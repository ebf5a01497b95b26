//! Ctrl-C at any moment of a one-shot run: code 1, one line, no half file.
//! Owns no conversation (see cli_repl). Surprising fact: before the program listens a signal simply ends it, as it ends any program; that
//! moment is told apart by the missing exit code.

mod cli_rig;

use std::path::Path;
use std::time::Duration;

use cli_rig::made_models::b;
use cli_rig::{Live, command, names_in, scratch};

/// Tokens for a long prompt.
fn long_prompt(folder: &Path, count: usize) -> String {
    let path = folder.join("tokens");
    let ids: Vec<usize> = (0..count).map(|i| 3 + i * 37 % 600).collect();
    std::fs::write(&path, format!("{ids:?}")).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Every file that a run can write, in `folder`.
fn dumps(folder: &Path) -> Vec<String> {
    ["--dump-logits", "--dump-logprobs", "--stats-json"]
        .iter()
        .flat_map(|flag| [(*flag).to_owned(), folder.join(&flag[2..]).to_str().unwrap().to_owned()])
        .collect()
}

#[test]
fn in_prefill() {
    let folder = scratch("prefill");
    let tokens = long_prompt(&folder, 4000);
    let slow =
        ["--quality", "--simd", "scalar", "-t", "1", "--prefill-chunk", "1", "-n", "1", "--tokens-file", &tokens];
    let mut run = Live::start(command().arg("-m").arg(b()).args(slow).args(dumps(&folder)));
    run.wait_for(" of 4000 tokens");
    run.interrupt();
    let ran = run.end();
    ran.failed(1, &["interrupted"]);
    assert_eq!(names_in(&folder), ["stats-json", "tokens"], "dumps of what never came are not written");
}

#[test]
fn in_the_only_window_of_a_text() {
    let text = scratch("window").join("text");
    std::fs::write(&text, "a tall man in a black coat ".repeat(100)).unwrap();
    let slow = ["--quality", "--simd", "scalar", "-t", "1", "--prefill-chunk", "32768", "-c", "4096"];
    let mut run = Live::start(command().arg("-m").arg(b()).args(slow).arg("--perplexity-file").arg(&text));
    run.wait_for("decode bound");
    std::thread::sleep(Duration::from_millis(50));
    run.interrupt();
    // A pass that nobody can stop would be followed by its result.
    run.end().failed(1, &["interrupted"]);
}

#[test]
fn in_decode() {
    let folder = scratch("decode");
    let args = ["--quality", "--simd", "scalar", "-t", "1", "-p", "x", "--temp", "1", "--seed", "3"];
    let run = Live::start(command().arg("-m").arg(b()).args(args).args(dumps(&folder)));
    run.wait_for_output(200);
    run.interrupt();
    let ran = run.end();
    ran.failed_late(1, &["interrupted"]);
    // The answer so far is whole, and so is all that was dumped of it.
    let stats = cli_rig::json(&folder.join("stats-json"));
    let generated = stats["generated_tokens"].as_u64().unwrap();
    assert!(generated > 10, "{generated}");
    assert_eq!(cli_rig::json(&folder.join("dump-logprobs"))["tokens"].as_array().unwrap().len() as u64, generated);
    let logits = std::fs::read(folder.join("dump-logits")).unwrap();
    let rows = safetensors::SafeTensors::deserialize(&logits).unwrap().tensor("tokens").unwrap().shape()[0] as u64;
    assert_eq!(rows, stats["prompt_tokens"].as_u64().unwrap() + generated);
    assert_eq!(names_in(&folder).len(), 3, "{:?}", names_in(&folder));
}

/// Whether these tests were started with SIGINT ignored, as background jobs of a shell script are: then one that comes before the
/// program listens is dropped by the system.
fn is_interrupt_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() & 2 != 0
}

#[test]
fn at_any_moment() {
    let folder = scratch("moment");
    let args = ["--ssd-streaming", "-p", "x", "--temp", "1", "--seed", "3", "--quality", "--simd", "scalar", "-t", "1"];
    let mut answered = 0;
    for delay_ms in (0..60).step_by(3) {
        let run = Live::start(command().arg("-m").arg(b()).args(args).args(dumps(&folder)));
        std::thread::sleep(Duration::from_millis(delay_ms));
        run.interrupt();
        let ran = run.end();
        if ran.code == Some(0) && is_interrupt_ignored() {
            continue;
        }
        if ran.code.is_none() {
            assert!(ran.stdout.is_empty() && ran.error_lines().is_empty(), "{ran:?}");
        } else {
            ran.failed_late(1, &["interrupted"]);
            answered += 1;
        }
        for name in names_in(&folder) {
            assert!(!name.starts_with('.'), "{name} is half a file");
        }
    }
    assert!(answered > 0, "no signal came while the program listened");
}

#[test]
fn termination_is_an_interrupt_too() {
    let run = Live::start(command().arg("-m").arg(b()).args([
        "-p",
        "x",
        "--temp",
        "1",
        "--seed",
        "3",
        "--quality",
        "--simd",
        "scalar",
    ]));
    run.wait_for_output(20);
    run.signal(rustix::process::Signal::TERM);
    run.end().failed_late(1, &["interrupted"]);
}

#[test]
fn termination_while_waiting_for_a_line_saves_the_session() {
    for signal in [rustix::process::Signal::TERM, rustix::process::Signal::HUP] {
        let file = scratch("signal-save").join("talk.ds4");
        let mut run = command();
        run.arg("-m").arg(b()).args(["-n", "4", "--save-session"]).arg(&file);
        let mut live = Live::start(&mut run);
        live.wait_for("type a message");
        live.say("hello");
        live.wait_for("generation: ");
        // Until it waits for the next line a signal is one of those above.
        std::thread::sleep(std::time::Duration::from_millis(300));
        live.signal(signal);
        live.wait_for("saved to");
        live.end().failed_late(1, &["interrupted"]);
        assert!(std::fs::metadata(&file).unwrap().len() > 0);
    }
}
