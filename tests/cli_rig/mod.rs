//! Runs of the built `ds4` for tests: exit code, stdout, stderr, and what an error may look like.
//! Owns no expectation about values. Surprising fact: HOME is moved to a scratch folder, so that no test writes a user's history.
#![allow(dead_code)] // Each test binary uses its own part of this.

pub mod drawing;
#[path = "../made_models/mod.rs"]
pub mod made_models;
#[cfg(feature = "cuda")]
pub mod stub;

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use made_models::{b, folder};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Longest that any run of a test may take on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// What a finished run left.
#[derive(Debug)]
pub struct Ran {
    /// `None` when a signal ended it.
    pub code: Option<i32>,
    pub stdout: Vec<u8>,
    pub stderr: String,
    pub what: String,
}

impl Ran {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Ended with code 0 and without an error line.
    #[track_caller]
    pub fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{}: {}", self.what, self.stderr);
        assert_eq!(self.error_lines(), Vec::<&str>::new(), "{}", self.what);
        self
    }

    /// Lines of stderr that are neither plan, notice nor report.
    pub fn error_lines(&self) -> Vec<&str> {
        self.stderr.lines().filter(|line| !is_known(line)).collect()
    }

    /// Ended with `code` and one line `ds4: ...`, the last one, that has all of `parts`; nothing on stdout.
    #[track_caller]
    pub fn failed(&self, code: i32, parts: &[&str]) {
        self.failed_late(code, parts);
        assert!(self.stdout.is_empty(), "{}: stdout has {:?}", self.what, self.text());
    }

    /// As [`Ran::failed`], but a part of the answer may have been written.
    #[track_caller]
    pub fn failed_late(&self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, Some(code), "{}: {}", self.what, self.stderr);
        assert!(!self.stderr.contains("panicked"), "{}: {}", self.what, self.stderr);
        let lines = self.error_lines();
        assert_eq!(lines.len(), 1, "{}: one line of error: {lines:#?}", self.what);
        assert_eq!(self.stderr.lines().last(), Some(lines[0]), "{}: the error comes last", self.what);
        assert!(lines[0].starts_with("ds4: ") && lines[0].len() > 10, "{}: {lines:?}", self.what);
        for part in parts {
            assert!(lines[0].contains(part), "{}: {part:?} is missing in {:?}", self.what, lines[0]);
        }
    }
}

/// Lines that belong to a good run: the plan, notices about it, progress, the closing report.
fn is_known(line: &str) -> bool {
    let Some(text) = line.strip_prefix("ds4: ") else { return false };
    let starts = [
        "  ",
        "memory: ",
        "note: ",
        "warning: ",
        "prefill: ",
        "expert cache: ",
        "expert reads: ",
        "waited for the drive: ",
        "n-gram rows: ",
        "preload: ",
        "lookahead (",
        "advice: ",
        "checksums: ",
        "prompt: ",
        "loading weights: ",
        "preloading experts: ",
        "io_uring is refused",
        "direct reads are refused",
        "cannot write /proc/none/ds4/drives.json",
        "decode bound: ",
        "decode: ",
        "reads go through the page cache",
        "type a message",
    ];
    starts.iter().any(|s| text.starts_with(s))
        || text.contains("), backend cpu: ")
        || text.contains("), backend cuda: ")
        || text.contains(" goes beyond the ")
}

/// `ds4`, in a scratch home, without a terminal.
pub fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ds4"));
    command.env("HOME", folder()).current_dir(folder()).stdin(Stdio::null());
    command
}

/// Runs `ds4` with `args`.
pub fn ds4<S: AsRef<OsStr>>(args: &[S]) -> Ran {
    finish(command().args(args))
}

/// Runs `ds4 -m b.gguf` with `args`.
pub fn ds4_b<S: AsRef<OsStr>>(args: &[S]) -> Ran {
    finish(command().arg("-m").arg(b()).args(args))
}

/// Runs a command to its end.
pub fn finish(command: &mut Command) -> Ran {
    let what = command.get_args().map(|a| a.to_string_lossy()).collect::<Vec<_>>().join(" ");
    let out = command.output().unwrap();
    Ran { code: out.status.code(), stdout: out.stdout, stderr: String::from_utf8(out.stderr).unwrap(), what }
}

/// A scratch folder of one test; emptied first.
pub fn scratch(name: &str) -> PathBuf {
    let path = folder().join(name);
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

/// Names in a folder.
pub fn names_in(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The object in a JSON file.
pub fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Runs on model b and returns `--stats-json`.
#[track_caller]
pub fn stats<S: AsRef<OsStr>>(name: &str, args: &[S]) -> Value {
    let path = scratch(name).join("stats.json");
    finish(command().arg("-m").arg(b()).args(args).arg("--stats-json").arg(&path)).ok();
    json(&path)
}

/// A `ds4` that is running, spoken to over pipes.
pub struct Live {
    child: Child,
    lines: Receiver<String>,
    seen: String,
    stdout: Arc<Mutex<Vec<u8>>>,
    reader: Option<JoinHandle<()>>,
}

impl Live {
    pub fn start(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (sender, lines) = channel();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        std::thread::spawn(move || stderr.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let mut out = child.stdout.take().unwrap();
        let stdout = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&stdout);
        let reader = std::thread::spawn(move || {
            let mut part = [0; 4096];
            while let Ok(count @ 1..) = out.read(&mut part) {
                kept.lock().unwrap().extend_from_slice(&part[..count]);
            }
        });
        Self { child, lines, seen: String::new(), stdout, reader: Some(reader) }
    }

    /// Bytes of stdout so far.
    pub fn written(&self) -> usize {
        self.stdout.lock().unwrap().len()
    }

    /// Waits until stdout has more than `count` bytes.
    #[track_caller]
    pub fn wait_for_output(&self, count: usize) {
        let deadline = Instant::now() + PATIENCE;
        while self.written() <= count {
            assert!(Instant::now() < deadline, "no output after:\n{}", self.seen);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn say(&mut self, line: &str) {
        self.type_bytes(format!("{line}\n").as_bytes());
    }

    /// Sends bytes as they are, such as a key of a terminal.
    pub fn type_bytes(&mut self, bytes: &[u8]) {
        let stdin = self.child.stdin.as_mut().unwrap();
        stdin.write_all(bytes).and_then(|()| stdin.flush()).unwrap();
    }

    /// Waits for a line of stderr with `part`.
    #[track_caller]
    pub fn wait_for(&mut self, part: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line =
                self.lines.recv_timeout(left).unwrap_or_else(|e| panic!("no {part:?} ({e}) after:\n{}", self.seen));
            self.seen.push_str(&line);
            self.seen.push('\n');
            if line.contains(part) {
                return line;
            }
        }
    }

    pub fn interrupt(&self) {
        self.signal(Signal::INT);
    }

    pub fn signal(&self, signal: Signal) {
        // It may have ended by itself.
        let _ = kill_process(Pid::from_child(&self.child), signal);
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Closes stdin and waits for the end.
    pub fn end(mut self) -> Ran {
        drop(self.child.stdin.take());
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break status,
                None if Instant::now() > deadline => {
                    self.child.kill().unwrap();
                    panic!("did not end; it said:\n{}", self.seen);
                }
                None => std::thread::sleep(Duration::from_millis(2)),
            }
        };
        self.reader.take().unwrap().join().unwrap();
        let stdout = std::mem::take(&mut *self.stdout.lock().unwrap());
        self.seen.extend(self.lines.iter().map(|line| line + "\n"));
        Ran { code: status.code(), stdout, stderr: self.seen, what: "a live run".into() }
    }
}
