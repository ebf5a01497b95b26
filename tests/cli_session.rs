//! Sessions that outlive the process, at the prompt and on the command line.
//! Never compares texts that were not computed the long way too. Surprising fact: a full disk is made by a limit on the size of files, which
//! needs no privileges.

mod cli_rig;

use std::path::Path;
use std::process::Command;

use cli_rig::made_models::{a, b};
use cli_rig::{Live, command, ds4, ds4_b, finish, json, scratch};

fn session(args: &[&str]) -> Live {
    let mut live = Live::start(command().arg("-m").arg(b()).args(args));
    live.wait_for("type a message");
    live
}

fn say(live: &mut Live, line: &str) {
    live.say(line);
    live.wait_for("generation: ");
}

/// Tokens in the state, as `/status` says.
fn used(live: &mut Live) -> u64 {
    live.say("/status");
    let line = live.wait_for(" tokens used");
    line.rsplit(", ").next().unwrap().split(' ').next().unwrap().parse().unwrap()
}

const SEEDED: [&str; 6] = ["-n", "24", "--temp", "1", "--seed", "3"];

#[test]
fn a_saved_conversation_goes_on_as_if_never_interrupted() {
    let folder = scratch("go-on");
    let (saved, stats) = (folder.join("talk.ds4"), folder.join("stats.json"));
    let path = saved.to_str().unwrap();
    let mut whole = session(&SEEDED);
    say(&mut whole, "hello there");
    say(&mut whole, "and again");
    let want = whole.end().stdout;

    let mut first = session(&SEEDED);
    say(&mut first, "hello there");
    first.say(&format!("/save {path}"));
    first.wait_for("tokens saved to");
    let mut got = first.end().stdout;
    let mut second =
        session(&[&SEEDED[..], &["--load-session", path, "--stats-json", stats.to_str().unwrap()]].concat());
    assert!(used(&mut second) > 10);
    say(&mut second, "and again");
    got.extend(second.end().stdout);
    assert_eq!(String::from_utf8_lossy(&got), String::from_utf8_lossy(&want));
    let stats = json(&stats);
    assert!(stats["reused_tokens"].as_u64().unwrap() >= 5, "{}", stats["reused_tokens"]);
}

#[test]
fn sessions_of_v4_go_on_too() {
    let folder = scratch("v4");
    let (saved, stats) = (folder.join("talk.ds4"), folder.join("stats.json"));
    let (path, stats_path) = (saved.to_str().unwrap(), stats.to_str().unwrap());
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/deepseek_v4/a/model.gguf");
    let run = |args: &[&str]| finish(command().arg("-m").arg(&model).args(["-c", "256"]).args(args));
    let mut live = Live::start(command().arg("-m").arg(&model).args(["-c", "256", "-n", "6"]));
    live.wait_for("type a message");
    say(&mut live, "hello there");
    say(&mut live, "and again");
    let want = live.end();
    let first = run(&["-n", "6", "-p", "hello there", "--save-session", path]).ok();
    assert!(first.stderr.contains("tokens saved to"), "{}", first.stderr);
    let second = run(&["-n", "6", "-p", "and again", "--load-session", path, "--stats-json", stats_path]).ok();
    assert_eq!(first.text() + &second.text(), want.text());
    assert!(json(&stats)["reused_tokens"].as_u64().unwrap() > 5);
    let other = finish(command().arg("-m").arg(b()).args(["-p", "x", "--load-session", path]));
    other.failed(1, &["model.gguf", "b.gguf", "talk.ds4"]);
}

#[test]
fn one_answer_at_a_time() {
    let folder = scratch("one-shot");
    let (saved, stats) = (folder.join("s"), folder.join("stats.json"));
    let (path, stats_path) = (saved.to_str().unwrap(), stats.to_str().unwrap());
    let mut live = session(&["-n", "6", "--system", "Be brief."]);
    say(&mut live, "hello there");
    say(&mut live, "and again");
    let want = live.end();
    let first = ds4_b(&["-n", "6", "--system", "Be brief.", "-p", "hello there", "--save-session", path]).ok();
    assert!(first.stderr.contains("tokens saved to"), "{}", first.stderr);
    let second = ds4_b(&[
        "-n",
        "6",
        "--load-session",
        path,
        "--save-session",
        path,
        "-p",
        "and again",
        "--stats-json",
        stats_path,
    ])
    .ok();
    assert_eq!(first.text() + &second.text(), want.text());
    assert!(json(&stats)["reused_tokens"].as_u64().unwrap() > 5);
    assert!(second.stderr.contains("tokens were in the state already"), "{}", second.stderr);
    ds4_b(&["--system", "Be long.", "--load-session", path, "-p", "x"]).failed(2, &["system text of its own"]);
    let third = ds4_b(&["-n", "4", "--load-session", path, "-p", "once more"]).ok();
    assert!(!third.text().is_empty());
}

#[test]
fn exact_tokens_go_on_too() {
    let folder = scratch("tokens");
    let (saved, short, long) = (folder.join("s"), folder.join("short"), folder.join("long"));
    let ids: Vec<u32> = (10..70).collect();
    std::fs::write(&short, serde_json::to_string(&ids[..50]).unwrap()).unwrap();
    std::fs::write(&long, serde_json::to_string(&ids).unwrap()).unwrap();
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let (saved, short, long) = (text(&saved), text(&short), text(&long));
    let stats = folder.join("stats.json");
    let want = ds4_b(&["-n", "5", "--tokens-file", &long]).ok().text();
    ds4_b(&["-n", "1", "--tokens-file", &short, "--save-session", &saved]).ok();
    let flags = ["-n", "5", "--tokens-file", &long, "--load-session", &saved, "--stats-json", stats.to_str().unwrap()];
    assert_eq!(ds4_b(&flags).ok().text(), want);
    assert_eq!(json(&stats)["reused_tokens"], 50);
    ds4_b(&["-p", "x", "--load-session", &saved]).failed(1, &["without a conversation", "--tokens-file"]);
    let other = folder.join("other.json");
    std::fs::write(&other, "[7]").unwrap();
    let flags = ["-n", "1", "--tokens-file", other.to_str().unwrap(), "--load-session", &saved];
    ds4_b(&flags).failed_late(1, &["does not begin as the session does"]);
}

#[test]
fn bad_sessions_end_a_run_with_one_line() {
    let folder = scratch("bad");
    let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let good = path("good");
    ds4_b(&["-n", "3", "-p", "hello there", "--save-session", &good]).ok();
    let bytes = std::fs::read(&good).unwrap();
    let put = |name: &str, bytes: &[u8]| {
        std::fs::write(path(name), bytes).unwrap();
        path(name)
    };
    let mut flipped = bytes.clone();
    flipped[bytes.len() / 2] ^= 4;
    let mut newer = bytes.clone();
    newer[8] = 9;
    for (file, parts) in [
        (put("short", &bytes[..bytes.len() - 1]), ["short", "cut short"]),
        (put("flipped", &flipped), ["flipped", "damaged"]),
        (put("newer", &newer), ["newer", "version 9"]),
        (put("empty", b""), ["empty", "not a saved session"]),
        (path("."), ["folder", "not a saved session"]),
        (path("absent"), ["absent", "cannot read"]),
    ] {
        ds4_b(&["-p", "x", "--load-session", &file]).failed(1, &parts);
    }
    let other = finish(command().arg("-m").arg(a()).args(["-p", "x", "--load-session", &good]));
    other.failed(1, &["b.gguf", "a.gguf", "good"]);
    ds4_b(&["-c", "8", "-p", "x", "--load-session", &good]).failed(1, &["the context holds 8", "--ctx"]);
    ds4_b(&["-p", "x", "--save-session", &path(".")]).failed(1, &["--save-session", "cannot write"]);
    ds4_b(&["-p", "x", "--save-session", "/nowhere/s"]).failed(1, &["--save-session", "/nowhere/s"]);
    for flags in [["--perplexity-file", "x"], ["--dump-logits", "x"]] {
        let ran = ds4(&[&flags[..], &["-p", "x", "--load-session", &good]].concat());
        assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    }
    assert_eq!(ds4(&["-p", "x", "--rewind-points", "2"]).code, Some(2));
}

#[test]
fn a_full_disk_leaves_the_older_session() {
    let folder = scratch("full");
    let saved = folder.join("s");
    ds4_b(&["-n", "3", "-p", "hello there", "--save-session", saved.to_str().unwrap()]).ok();
    let before = std::fs::read(&saved).unwrap();
    // Blocks of 512 or 1024 bytes, less than a session; without the signal, a write beyond the limit is an error.
    let script = "trap '' XFSZ; ulimit -f 8; exec \"$0\" \"$@\"";
    let mut shell = Command::new("sh");
    shell.args(["-c", script]).arg(command().get_program()).arg("-m").arg(b());
    shell
        .env("HOME", folder.join("home"))
        .args(["--probe", "off", "-n", "3", "-p", "something else", "--save-session"])
        .arg(&saved);
    let ran = finish(&mut shell);
    ran.failed_late(1, &["cannot write the session", "s: "]);
    assert!(std::fs::read(&saved).unwrap() == before, "the older file changed");
    assert_eq!(cli_rig::names_in(&folder), ["s"], "no part of a file stays");
}

#[test]
fn the_prompt_survives_failed_saves_and_loads() {
    let folder = scratch("survives");
    let text = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    std::fs::write(text("junk"), "no session").unwrap();
    let mut live = session(&["-n", "4", "-c", "256"]);
    live.say(&format!("/save {}", text("nothing-yet")));
    live.wait_for("nothing to save yet");
    say(&mut live, "hello there");
    let before = used(&mut live);
    for (line, answer) in [
        ("/save".into(), "/save takes a file name"),
        ("/save /nowhere/x".into(), "cannot write the session /nowhere/x"),
        (format!("/save {}", folder.display()), "cannot write the session"),
        (format!("/load {}", text("junk")), "is not a saved session"),
        (format!("/load {}", text("absent")), "cannot read the session"),
        ("/rewind 5".into(), "there are 1 questions"),
    ] {
        live.say(&line);
        live.wait_for(answer);
        assert_eq!(used(&mut live), before, "{line}");
    }
    live.say(&format!("/save {}", text("good")));
    live.wait_for("tokens saved");
    say(&mut live, "more of it");
    assert!(used(&mut live) > before);
    live.say(&format!("/load {}", text("good")));
    live.wait_for("a session of ");
    assert_eq!(used(&mut live), before);
    live.say("/ctx 8");
    live.wait_for("context of 8");
    live.say(&format!("/load {}", text("good")));
    live.wait_for("the context holds 8");
    assert_eq!(used(&mut live), 0);
    assert_eq!(live.end().code, Some(1), "a script is told that lines of it failed");
}

#[test]
fn questions_can_be_taken_back() {
    let folder = scratch("back");
    let stats = folder.join("stats.json");
    let run = |points: &str| {
        let flags =
            ["-n", "40", "--temp", "1", "--seed", "2", "--prefill-chunk", "8", "--sweep-rows", "8", "-c", "1024"];
        // A drive that answers otherwise the second time would change the plan, too.
        let more = ["--rewind-points", points, "--probe", "off", "--stats-json", stats.to_str().unwrap()];
        let mut live = session(&[&flags[..], &more].concat());
        say(&mut live, "hello there, this is a question of some length");
        let one = used(&mut live);
        say(&mut live, "and this one is the second of them");
        let two = used(&mut live);
        live.say("/rewind");
        live.wait_for("1 questions are left");
        assert!(used(&mut live) <= one && one < two);
        say(&mut live, "something else this time");
        live.say("/regen");
        live.wait_for("generation: ");
        assert_eq!(live.end().code, Some(0));
        let stats = json(&stats);
        (stats["reused_tokens"].as_u64().unwrap(), stats["planned_bytes"].as_u64().unwrap())
    };
    let ((none, planned), (some, more)) = (run("0"), run("4"));
    assert!(some > none, "{some} tokens reused with images, {none} without");
    assert!(more > planned, "images are part of the plan: {more}, {planned}");
}

#[test]
fn a_session_is_saved_when_it_ends() {
    let folder = scratch("ends");
    let (saved, empty) = (folder.join("s"), folder.join("e"));
    let mut live = session(&["-n", "4", "--save-session", empty.to_str().unwrap()]);
    live.say("/quit");
    let ran = live.end();
    assert!(ran.code == Some(0) && ran.stderr.contains("no session is saved") && !empty.exists(), "{}", ran.stderr);
    let mut live = session(&["-n", "4", "--save-session", saved.to_str().unwrap()]);
    say(&mut live, "hello there");
    assert_eq!(live.end().code, Some(0));
    assert!(saved.exists());
    let mut live = session(&["-n", "4", "--load-session", saved.to_str().unwrap()]);
    assert!(used(&mut live) > 5);
    assert_eq!(live.end().code, Some(0));
}
