//! The interactive session over a pipe: every command, two turns, Ctrl-C in an answer, and mistakes that cost nothing.
//! Never needs a terminal. Surprising fact: what a command did is read from `/status` and the counters at the end, not from its wording.

mod cli_rig;

use cli_rig::made_models::{b, b_rules, folder};
use std::process::Command;
use std::time::{Duration, Instant};

use cli_rig::{Live, command, finish, json, names_in, scratch};
use rustix::process::{Pid, Signal, kill_process};

fn session(model: &std::path::Path, args: &[&str]) -> Live {
    let mut live = Live::start(command().arg("-m").arg(model).args(args));
    live.wait_for("type a message");
    live
}

/// Tokens in the state, as `/status` says.
fn used(live: &mut Live) -> u64 {
    live.say("/status");
    let line = live.wait_for(" tokens used");
    let number = line.rsplit(", ").next().unwrap().split(' ').next().unwrap();
    number.parse().unwrap_or_else(|_| panic!("{line}"))
}

#[test]
fn two_turns_and_every_command() {
    let folder = scratch("turns");
    let (stats, note) = (folder.join("stats.json"), folder.join("a note.txt"));
    std::fs::write(&note, "hello from a file").unwrap();
    let mut live = session(b(), &["-n", "8", "-c", "512", "--stats-json", stats.to_str().unwrap()]);
    live.say("/help");
    for command in ["/quit", "/think", "/nothink", "/ctx", "/read", "/status", "/stats", "/clear", "/regen"] {
        live.wait_for(command);
    }
    live.say("/regen");
    live.wait_for("there is no answer yet");
    assert_eq!(used(&mut live), 0);
    live.say("hello there");
    live.wait_for("generation: ");
    let first = used(&mut live);
    live.say("and again");
    live.wait_for("generation: ");
    let second = used(&mut live);
    assert!(first > 8 && second > first + 8, "{first}, then {second}");
    live.say("/regen");
    live.wait_for("generation: ");
    assert_eq!(used(&mut live), second, "the same answer at temperature 0");
    live.say(&format!("/read {}", note.display()));
    live.wait_for("generation: ");
    assert!(used(&mut live) > second);
    live.say("/stats");
    live.wait_for("prefill: ");
    live.say("/clear");
    live.wait_for("forgotten");
    assert_eq!(used(&mut live), 0);
    live.say("/ctx 40");
    live.wait_for("context of 40 tokens");
    live.say(&"hello ".repeat(60));
    live.wait_for("the context holds 40");
    live.say("hi");
    live.wait_for("generation: ");
    live.say("/nothink");
    live.wait_for("no reasoning");
    live.say("/quit");
    let ran = live.end();
    // Some of the lines above were refused, and this is a pipe.
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    let stats = json(&stats);
    // Answers end after 8 tokens, or before when the model says so.
    let generated = stats["generated_tokens"].as_u64().unwrap();
    assert!((5..=40).contains(&generated), "{generated} tokens in five answers");
    assert_eq!(stats["ctx"], 40);
    assert!(!ran.stdout.is_empty());
}

#[test]
fn the_state_of_a_conversation_is_reused() {
    let folder = scratch("reuse");
    let stats = folder.join("stats.json");
    let mut live = session(b_rules(), &["-n", "6", "--nothink", "--stats-json", stats.to_str().unwrap()]);
    for text in ["hello there", "and again", "once more"] {
        live.say(text);
        live.wait_for("generation: ");
    }
    live.say("/quit");
    assert_eq!(live.end().code, Some(0));
    let stats = json(&stats);
    let (prompt, generated) = (stats["prompt_tokens"].as_u64().unwrap(), stats["generated_tokens"].as_u64().unwrap());
    assert!(prompt > 30 && generated > 3, "{prompt}, {generated}");
}

#[test]
fn an_interrupt_stops_the_answer_and_the_session_goes_on() {
    let slow = ["--temp", "1", "--seed", "3", "--quality", "--simd", "scalar", "-t", "1", "-c", "4096"];
    let mut live = session(b(), &slow);
    for _ in 0..2 {
        let before = live.written();
        live.say("hello there");
        live.wait_for_output(before + 50);
        live.interrupt();
        live.wait_for("stopped; the conversation goes on");
        assert!(live.is_running());
        assert!(used(&mut live) > 10);
    }
    live.say("/quit");
    assert_eq!(live.end().code, Some(0));
}

#[test]
fn termination_ends_the_session_in_the_middle_of_an_answer() {
    let mut live =
        session(b(), &["--temp", "1", "--seed", "3", "--quality", "--simd", "scalar", "-t", "1", "-c", "4096"]);
    live.say("hello there");
    live.wait_for_output(50);
    live.signal(Signal::TERM);
    live.wait_for("stopped; the conversation goes on");
    assert_eq!(live.end().code, Some(1));
}

/// `ds4 -m b.gguf` with `args` on a terminal, in a home of its own, and what it says on stderr; `None` with a notice where nothing gives it one.
fn on_terminal(name: &str, (term, home): (&str, &str), args: &str) -> Option<(Live, impl Fn(&str, usize))> {
    let (program, place) = (command().get_program().to_owned(), scratch(name));
    let log = place.join("stderr");
    let run = format!("exec '{}' -m '{}' {args} 2>'{}'", program.display(), b().display(), log.display());
    let line = format!("echo $$ > '{}'; {run}", place.join("pid").display());
    let Ok(found) = Command::new("script").arg("--version").output() else {
        println!("notice: no program script here, which would give ds4 a terminal");
        return None;
    };
    assert!(found.status.success());
    let said = move |part: &str, times: usize| {
        let deadline = Instant::now() + Duration::from_secs(60);
        while std::fs::read_to_string(&log).unwrap_or_default().matches(part).count() < times {
            assert!(Instant::now() < deadline, "no {part:?} in {:?}", std::fs::read_to_string(&log));
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let mut script = Command::new("script");
    script.args(["-qefc", &line, "/dev/null"]).env("TERM", term).env("HOME", home).current_dir(place);
    let live = Live::start(&mut script);
    said("type a message", 1);
    // Lets the editor take the terminal before keys are pressed.
    std::thread::sleep(Duration::from_millis(200));
    Some((live, said))
}

/// On a terminal the line editor has handlers of its own, which must not take the signal away.
#[test]
fn ctrl_c_on_a_terminal_stops_the_answer_and_the_session_goes_on() {
    let slow = "--temp 1 --seed 3 --quality --simd scalar -t 1 -c 4096";
    let home = scratch("terminal-home");
    let Some((mut live, said)) = on_terminal("terminal", ("xterm", home.to_str().unwrap()), slow) else { return };
    for turn in 1..=2 {
        let before = live.written();
        live.type_bytes(b"hello there\r");
        live.wait_for_output(before + 300);
        live.type_bytes(b"\x03");
        said("stopped; the conversation goes on", turn);
        assert!(live.is_running());
        std::thread::sleep(Duration::from_millis(200));
    }
    live.type_bytes(b"/quit\r");
    assert_eq!(live.end().code, Some(0));
    assert!(home.join(".ds4_history").exists());
}

/// Lines and the beginning of one that come together, from hasty fingers or a paste that is not marked as one.
#[test]
fn what_was_typed_ahead_is_not_lost() {
    let Some((mut live, said)) = on_terminal("ahead", ("xterm", ""), "-n 4 -c 256") else { return };
    live.type_bytes(b"hello there\r/rewind\rand th");
    said("questions left: 0", 1);
    live.type_bytes(b"en\r/rewind\r/nothink\r/qu");
    said("questions left: 0", 2);
    said("no reasoning", 1);
    live.type_bytes(b"it\r");
    let ran = live.end();
    assert_eq!(ran.code, Some(0));
    assert!(ran.text().contains("and then"), "{:?}", ran.text());
    // A home that is nowhere gets no history, and neither does the place where the program was started.
    assert_eq!(names_in(&folder().join("ahead")), ["pid", "stderr"]);
}

/// Nobody is at the keyboard: what comes is a signal, once.
#[test]
fn termination_ends_a_session_that_waits_on_a_terminal() {
    // The last one writes its answers to a file, where nothing else belongs.
    let xterm = [(Signal::TERM, ""), (Signal::HUP, ""), (Signal::TERM, ">answers")];
    let cases = xterm.map(|(signal, to)| ("xterm", signal, to)).into_iter().chain([("dumb", Signal::TERM, "")]);
    for (turn, (term, signal, to)) in cases.enumerate() {
        let name = format!("ended-{turn}");
        let args = format!("-n 4 -c 256 --save-session saved {to}");
        let Some((mut live, said)) = on_terminal(&name, (term, ""), &args) else { return };
        live.type_bytes(b"hello there\r");
        said("generation: ", 1);
        std::thread::sleep(Duration::from_millis(200));
        let place = folder().join(&name);
        let pid = std::fs::read_to_string(place.join("pid")).unwrap().trim().parse().unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
        assert_eq!(live.end().code, Some(1), "{name}");
        said("ds4: interrupted", 1);
        assert!(place.join("saved").exists(), "{name}: the session is saved");
        if !to.is_empty() {
            let answers = std::fs::read_to_string(place.join("answers")).unwrap();
            let is_clean = !answers.contains(['\x1b', '>']) && !answers.contains("hello there");
            assert!(is_clean && answers.ends_with('\n'), "{answers:?}");
        }
    }
}

#[test]
fn a_line_that_is_no_text_does_not_end_the_session() {
    let mut live = session(b(), &["-n", "4", "-c", "256"]);
    live.say("hello there");
    live.wait_for("generation: ");
    let before = used(&mut live);
    live.type_bytes(b"\xff\xfe\n");
    live.wait_for("not UTF-8 text");
    assert_eq!(used(&mut live), before);
    live.signal(Signal::TERM);
    assert_eq!(live.end().code, Some(1), "waiting for a line, one SIGTERM is enough");
}

#[test]
fn files_of_one_answer_are_refused() {
    for flag in ["--dump-logits", "--dump-logprobs"] {
        let path = scratch(flag).join("x");
        let ran = finish(command().arg("-m").arg(b()).arg(flag).arg(&path));
        ran.failed(2, &[flag, "needs a prompt"]);
    }
}

#[test]
fn mistakes_cost_nothing() {
    let mut live = session(b(), &["-n", "4", "-c", "256"]);
    live.say("hello there");
    live.wait_for("generation: ");
    let before = used(&mut live);
    for (line, answer) in [
        ("/quti", "no command /quti"),
        ("/ctx", "/ctx takes a number"),
        ("/ctx 0", "/ctx takes a number"),
        ("/think 101", "/think takes a level"),
        ("/read", "/read takes a file name"),
        ("/read /nowhere.txt", "cannot read /nowhere.txt"),
        ("/clear now", "takes no argument"),
    ] {
        live.say(line);
        live.wait_for(answer);
    }
    live.say("/think");
    live.wait_for("reasoning level 75");
    live.say("more");
    live.wait_for("no reasoning switch");
    live.say("/nothink");
    live.say("//ctx is a command");
    live.wait_for("generation: ");
    assert!(used(&mut live) > before);
    live.say("/ctx 4000000000");
    live.wait_for("use a smaller context");
    assert!(live.is_running());
    // The end of input is a way to leave.
    assert_eq!(live.end().code, Some(1), "a script is told that lines of it failed");
}

#[test]
fn reasoning_can_be_switched() {
    let mut live = session(b_rules(), &["-n", "3", "-c", "512"]);
    let mut lengths = Vec::new();
    for level in ["/nothink", "/think", "/think 30"] {
        live.say(level);
        live.say("/clear");
        live.wait_for("forgotten");
        live.say("hello");
        live.wait_for("generation: ");
        lengths.push(used(&mut live));
    }
    lengths.dedup();
    assert!(lengths.len() > 1, "every level gives the same prompt: {lengths:?}");
    live.say("/quit");
    assert_eq!(live.end().code, Some(0));
}
