//! What drives and systems do to a run: stalls, odd short reads, a header that cannot be read, refused system calls, full drives, kills.
//! Never tests a happy path for its own sake. Surprising fact: a filter of system calls on one test thread is inherited by the programs it
//! starts, so a refused io_uring needs no special kernel.

mod cli_rig;

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use cli_rig::made_models::{b, b_checkpoint, folder};
use cli_rig::{Live, command, ds4_b, finish, json, names_in, scratch};
use ds4::engine::Engine;
use ds4::engine::options::{EngineOptions, Preload};
use ds4::models::Want;
use ds4::obs::stall::STALL;
use ds4::session::timeline::{NoWatcher, SessionError, Timeline};
use ds4::storage::gguf::{GgufFile, parse};
use ds4::storage::layout::Layout;
use ds4::storage::reader::fake::{FakeFault, FakeOptions, FakeReader};
use ds4::storage::reader::{Alignment, Reader};
use ds4::units::{Budget, ExpertIdx, TokenId};
use rustix::process::Signal;

const STREAMED: [&str; 3] = ["--ssd-streaming", "--ssd-streaming-cache-experts", "10"];

fn engine(reader: &Arc<FakeReader>) -> Engine {
    let options = EngineOptions {
        ctx: Some(512),
        threads: Some(1),
        is_streaming: true,
        budget: Some(Budget::Slots(10)),
        preload: Preload::Cold,
        chunk: Some(16),
        reader: Some(Arc::clone(reader) as Arc<dyn Reader>),
        ..EngineOptions::new(b())
    };
    Engine::open(&options, &mut |_| {}, &|_, _, _| ControlFlow::Continue(())).unwrap_or_else(|e| panic!("{e}"))
}

fn fake(options: FakeOptions) -> Arc<FakeReader> {
    FakeReader::new(std::fs::read(b()).unwrap(), options)
}

/// Bits of the logits after a prompt of `tokens` tokens.
fn logits(timeline: &mut Timeline, tokens: usize) -> Result<Vec<u32>, SessionError> {
    let prompt: Vec<TokenId> = (0..tokens as u32).map(|i| 3 + i * 7919 % 600).collect();
    timeline.sync(&prompt, Want::Last, &mut NoWatcher)?;
    Ok(timeline.last_logits().iter().map(|v| v.to_bits()).collect())
}

#[test]
fn short_reads_of_any_length_change_nothing() {
    let calm = engine(&fake(FakeOptions::default()));
    let want = logits(&mut Timeline::new(calm.runner().unwrap()), 40).unwrap();
    for (alignment, short_of_256) in [(Alignment::NONE, 255), (Alignment { offset: 512, memory: 512 }, 255)] {
        let jitter = Duration::from_micros(200);
        let reader = fake(FakeOptions { alignment, short_of_256, jitter, ..FakeOptions::default() });
        let engine = engine(&reader);
        assert!(logits(&mut Timeline::new(engine.runner().unwrap()), 40).unwrap() == want, "{alignment:?}");
        assert!(engine.reader().counters().snapshot().short_reads > 0, "{alignment:?}: nothing came back short");
    }
}

/// Delivers `left` bytes, then fails like a broken drive.
struct Broken {
    bytes: Vec<u8>,
    at: usize,
    left: usize,
}

impl Read for Broken {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        // One byte less than asked for, and now and then nothing but an interruption.
        if self.at % 7 == 3 && self.left % 2 == 1 {
            self.left -= 1;
            return Err(io::Error::from_raw_os_error(libc::EINTR));
        }
        let count = out.len().div_ceil(2).min(self.left).min(self.bytes.len() - self.at);
        out[..count].copy_from_slice(&self.bytes[self.at..self.at + count]);
        self.at += count;
        self.left -= count;
        Ok(count)
    }
}

#[test]
fn a_header_that_cannot_be_read_is_an_error_of_the_drive() {
    let bytes = std::fs::read(b()).unwrap();
    let header = GgufFile::open(b()).unwrap().data_start() as usize;
    for left in [0, 1, 3, 8, 100, header / 2] {
        let reader = Broken { bytes: bytes.clone(), at: 0, left };
        let error = parse(reader, bytes.len() as u64).map(drop).unwrap_err().to_string();
        assert!(error.contains("cannot read the header") && error.contains("os error 5"), "{left}: {error}");
    }
}

/// What was logged by this thread.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_drive_that_stalls_is_mentioned_and_waited_for() {
    let reader = fake(FakeOptions::default());
    let engine = engine(&reader);
    let mut timeline = Timeline::new(engine.runner().unwrap());
    let want = logits(&mut timeline, 12).unwrap();
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).with_ansi(false).finish();
    timeline.clear();
    reader.hold();
    let since = Instant::now();
    let held = STALL + Duration::from_millis(600);
    let found = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(held);
            reader.release();
        });
        tracing::subscriber::with_default(subscriber, || logits(&mut timeline, 12))
    });
    assert!(found.unwrap() == want, "a stall changes nothing");
    assert!(since.elapsed() >= held);
    let stalls = engine.cache().unwrap().stats().total().stalls + engine.rows().unwrap().counters().snapshot().stalls;
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert!(stalls >= 1, "{text}");
    assert!(text.contains("the drive has given nothing for 2 s"), "{text}");
    assert!(text.contains("the drive answered after"), "{text}");
}

#[test]
fn a_thousand_failures_and_successes_leave_nothing_behind() {
    let reader = fake(FakeOptions { depth: 4, ..FakeOptions::default() });
    let engine = engine(&reader);
    let layout = Layout::from_gguf(&GgufFile::open(b()).unwrap()).unwrap();
    let mut timeline = Timeline::new(engine.runner().unwrap());
    let want = logits(&mut timeline, 2).unwrap();
    let entries = |dir: &str| std::fs::read_dir(dir).unwrap().count();
    let resident = || ds4::sys::process_memory().unwrap().resident.0;
    let mut before = (0, 0, 0);
    let mut failures = 0;
    for round in 0..1000 {
        let layer = layout.experts[round % layout.experts.len()];
        for expert in 0..layer.experts {
            let extent = layer.extents(ExpertIdx(expert))[round % 3];
            reader.add_fault(FakeFault { offset: extent.offset, errno: libc::EIO, times: u32::MAX });
        }
        if round % 5 == 0 {
            let table = layout.tables[round % layout.tables.len()];
            for offset in (table.offset..table.offset + table.rows * u64::from(table.row_bytes)).step_by(512) {
                reader.add_fault(FakeFault { offset, errno: libc::EIO, times: u32::MAX });
            }
        }
        timeline.clear();
        failures += usize::from(logits(&mut timeline, 2).is_err());
        reader.clear_faults();
        timeline.clear();
        assert!(logits(&mut timeline, 2).unwrap() == want, "round {round}");
        let stats = engine.cache().unwrap().stats();
        assert_eq!((stats.slots_held, stats.slots_filling), (0, 0), "round {round}");
        if round == 100 {
            before = (entries("/proc/self/fd"), entries("/proc/self/task"), resident());
        }
    }
    assert!(failures > 300, "only {failures} rounds met their fault");
    // Other tests of this program run meanwhile.
    let after = (entries("/proc/self/fd"), entries("/proc/self/task"), resident());
    assert!(after.0 <= before.0 + 40 && after.1 <= before.1 + 100, "{before:?}, then {after:?}");
    assert!(after.2 <= before.2 + (64 << 20), "{before:?}, then {after:?}");
    let total = engine.cache().unwrap().stats().total();
    assert!(total.failed > 0 && total.hits + total.misses > 0, "{total:?}");
}

/// Rules by system call; a call without a rule always matches.
type Calls = BTreeMap<i64, Vec<seccompiler::SeccompRule>>;

/// Runs `make` on a thread for which `calls` fail with `errno`, and so they do for any program that it starts.
fn refusing<T: Send>(calls: Calls, errno: i32, make: impl FnOnce() -> T + Send) -> T {
    let refuse = seccompiler::SeccompAction::Errno(errno as u32);
    let arch = std::env::consts::ARCH.try_into().unwrap();
    let filter = seccompiler::SeccompFilter::new(calls, seccompiler::SeccompAction::Allow, refuse, arch).unwrap();
    let program: seccompiler::BpfProgram = filter.try_into().unwrap();
    std::thread::scope(|scope| {
        let run = scope.spawn(move || {
            seccompiler::apply_filter(&program).unwrap();
            make()
        });
        run.join().unwrap()
    })
}

fn uring_calls() -> Calls {
    let calls = [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register];
    calls.into_iter().map(|call| (call, vec![])).collect()
}

/// Opening a file for direct reads: flags are the third argument of openat.
fn direct_opens() -> Calls {
    let flag = libc::O_DIRECT as u64;
    let (len, is_set) = (seccompiler::SeccompCmpArgLen::Dword, seccompiler::SeccompCmpOp::MaskedEq(flag));
    let condition = seccompiler::SeccompCondition::new(2, len, is_set, flag).unwrap();
    [(libc::SYS_openat, vec![seccompiler::SeccompRule::new(vec![condition]).unwrap()])].into()
}

#[test]
fn refused_direct_reads_are_announced_once_and_replaced() {
    let args = [&["-p", "hello", "-n", "6"][..], &STREAMED].concat();
    let want = ds4_b(&args).ok().stdout;
    let stats = scratch("no-direct").join("stats.json");
    let ran = refusing(direct_opens(), libc::EINVAL, || {
        finish(command().arg("-m").arg(b()).args(&args).arg("--stats-json").arg(&stats))
    });
    let ran = ran.ok();
    assert_eq!(ran.stdout, want);
    assert_eq!(ran.stderr.matches("direct reads are refused").count(), 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("does not support O_DIRECT"), "{}", ran.stderr);
    assert_eq!(json(&stats)["is_direct"], false);
    let asked = refusing(direct_opens(), libc::EINVAL, || {
        finish(command().arg("-m").arg(b()).args(&args).args(["--direct", "on"]))
    });
    asked.failed(1, &["O_DIRECT"]);
}

#[test]
fn a_refused_io_uring_is_announced_and_replaced() {
    let args = [&["-p", "hello", "-n", "6"][..], &STREAMED].concat();
    let want = ds4_b(&args).ok().stdout;
    let folder = scratch("seccomp");
    for errno in [libc::EPERM, libc::ENOSYS] {
        let stats = folder.join("stats.json");
        let ran = refusing(uring_calls(), errno, || {
            finish(command().arg("-m").arg(b()).args(&args).arg("--stats-json").arg(&stats))
        });
        let ran = ran.ok();
        assert_eq!(ran.stdout, want, "errno {errno}");
        assert!(ran.stderr.contains("io_uring is refused"), "{}", ran.stderr);
        assert_eq!(json(&stats)["io"], "pread", "errno {errno}");
        let asked =
            refusing(uring_calls(), errno, || finish(command().arg("-m").arg(b()).args(&args).args(["--io", "uring"])));
        asked.failed(1, &["--io uring"]);
    }
}

/// `ds4 -m b ARGS` under a limit that the shell sets.
fn limited(limit: &str, args: &[&str]) -> cli_rig::Ran {
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("ulimit {limit} && exec \"$0\" \"$@\"")]).arg(env!("CARGO_BIN_EXE_ds4"));
    finish(shell.arg("-m").arg(b()).args(args).env("HOME", folder()).current_dir(folder()))
}

#[test]
fn eight_mebibytes_of_lockable_memory_are_enough() {
    let args = [&["-p", "hello", "-n", "6"][..], &STREAMED].concat();
    let want = ds4_b(&args).ok().stdout;
    for limit in ["-l 8192", "-l 0"] {
        assert_eq!(limited(limit, &args).ok().stdout, want, "{limit}");
    }
}

#[test]
fn one_slot_more_or_less_than_a_token_needs() {
    // Five layers, two experts a token.
    let run =
        |slots: &str| ds4_b(&["-p", "hello", "-n", "6", "--ssd-streaming", "--ssd-streaming-cache-experts", slots]);
    let want = run("40").ok().stdout;
    run("9").failed(1, &["10"]);
    for slots in ["10", "11"] {
        assert_eq!(run(slots).ok().stdout, want, "{slots}");
    }
}

#[test]
fn two_processes_share_a_file() {
    let args = [&["-p", "hello", "-n", "40"][..], &STREAMED].concat();
    let want = ds4_b(&args).ok().stdout;
    let runs = [0, 1].map(|_| Live::start(command().arg("-m").arg(b()).args(&args)));
    for run in runs {
        let ran = run.end();
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        assert_eq!(ran.stdout, want);
    }
}

#[test]
fn a_killed_run_harms_no_later_one() {
    let args = [&["-p", "hello", "-n", "400", "--temp", "1", "--seed", "5"][..], &STREAMED].concat();
    let want = ds4_b(&args).ok().stdout;
    let stats = scratch("killed").join("stats.json");
    for (signal, delay_ms) in [(Signal::KILL, 10), (Signal::KILL, 40), (Signal::KILL, 90), (Signal::INT, 40)] {
        let run = Live::start(command().arg("-m").arg(b()).args(&args).arg("--stats-json").arg(&stats));
        std::thread::sleep(Duration::from_millis(delay_ms));
        run.signal(signal);
        let _ = run.end();
        for name in names_in(stats.parent().unwrap()) {
            assert!(name == "stats.json", "{name} was left behind");
        }
        assert_eq!(ds4_b(&args).ok().stdout, want, "after {signal:?} at {delay_ms} ms");
    }
}

/// A file system of one mebibyte; unmounted when dropped. `None` where the system permits none.
struct Tiny(PathBuf);

impl Tiny {
    fn new(name: &str) -> Option<Self> {
        let at = scratch(name);
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"]).arg(&at).output();
        mounted.is_ok_and(|out| out.status.success()).then_some(Self(at))
    }
}

impl Drop for Tiny {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).output();
    }
}

#[test]
fn a_full_drive_is_named_and_keeps_nothing_half_written() {
    let Some(tiny) = Tiny::new("full") else {
        eprintln!("skipped: this system lets the test mount nothing");
        return;
    };
    let at = |name: &str| tiny.0.join(name).to_str().unwrap().to_owned();
    let gguf = |args: &[&str]| {
        let out = Command::new(env!("CARGO_BIN_EXE_ds4-gguf")).args(args).output().unwrap();
        let stderr = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(1), "{args:?}: {stderr}");
        assert!(stderr.contains("No space left") && !stderr.contains("panicked"), "{args:?}: {stderr}");
        assert_eq!(names_in(&tiny.0), ["filler"], "{args:?} left something");
    };
    let checkpoint = folder().join("full-input");
    b_checkpoint().save(&checkpoint);
    // The program sees a drive that is full but for a few pages.
    std::fs::write(tiny.0.join("filler"), vec![1; (1 << 20) - 24 * 1024]).unwrap();
    gguf(&["synth", "--shape", "small", "-o", &at("x.gguf")]);
    gguf(&["convert", checkpoint.to_str().unwrap(), "--recipe", "native", "-o", &at("x.gguf")]);
    gguf(&["quantize", b().to_str().unwrap(), "--recipe", "native", "-o", &at("x.gguf")]);
    let large = folder().join("many.gguf");
    let made = Command::new(env!("CARGO_BIN_EXE_ds4-gguf"))
        .args(["synth", "--shape", "small", "--experts", "300", "--force", "-o"])
        .arg(&large)
        .output()
        .unwrap();
    assert!(made.status.success());
    gguf(&["checksum", large.to_str().unwrap(), "-o", &at("x.ds4sum")]);
    std::fs::write(tiny.0.join("filler"), vec![1; 1 << 20]).unwrap();
    let ran = ds4_b(&["-p", "x", "-n", "1", "--stats-json", &at("stats.json")]);
    ran.failed_late(1, &["stats.json", "No space left"]);
}

#[test]
fn a_model_on_a_file_system_in_memory_runs() {
    let home = Path::new("/dev/shm");
    if !home.is_dir() {
        eprintln!("skipped: there is no /dev/shm");
        return;
    }
    let at = tempfile::tempdir_in(home).unwrap();
    let path = at.path().join("b.gguf");
    std::fs::copy(b(), &path).unwrap();
    let args = [&["-p", "hello", "-n", "6"][..], &STREAMED].concat();
    let want = ds4_b(&args).ok().stdout;
    assert_eq!(finish(command().arg("-m").arg(&path).args(&args)).ok().stdout, want);
}
