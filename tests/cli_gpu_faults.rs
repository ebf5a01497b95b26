//! Each call of the driver failing in turn, as `ds4` meets it: one line, one request, no panic, no hang.
//! Owns no number that a kernel computes. Surprising fact: the calls are not listed here; a run without faults tells their names, so a new one is
//! walked over as soon as it exists.
#![cfg(feature = "cuda")]

mod cli_rig;

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use cli_rig::made_models::b;
use cli_rig::stub::{on_stub, on_stub_with};
use cli_rig::{Live, Ran, finish, names_in, scratch};

const LOST: &str = "719";
const FULL: &str = "2";

const ASK: [&str; 8] = ["-p", "hello there", "-n", "3", "--backend", "cuda", "--ssd-streaming", "--lookahead=off"];

/// Numbers of calls, by name.
type Calls = BTreeMap<String, Vec<usize>>;

/// The calls of a run with `args` that has no faults, and what it wrote.
fn calls(name: &str, args: &[&str]) -> Option<(Calls, Vec<u8>)> {
    let path = scratch(name).join("calls");
    let ran = finish(&mut on_stub(&[("STUB_CALLS", path.to_str().unwrap())], args)?);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let mut by_name = Calls::new();
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().enumerate().for_each(|(at, name)| by_name.entry(name.to_owned()).or_default().push(at + 1));
    assert!(by_name.len() > 40, "{by_name:?}");
    Some((by_name, ran.stdout))
}

/// Fails the call `name` with `error`, the n-th of its name: how many others there are in front of it may differ from run to run.
fn failing<'a>(name: &'a str, nth: &'a str, error: &'a str) -> [(&'a str, &'a str); 3] {
    [("STUB_FAIL_NAME", name), ("STUB_FAIL_AT", nth), ("STUB_FAIL_WITH", error)]
}

/// Either nothing was lost by the failure, or one line at the end tells it.
#[track_caller]
fn is_one_failure(ran: &Ran, good: &[u8], what: &str) {
    let told: Vec<&str> = ran.stderr.lines().filter(|line| line.contains("CUDA_ERROR_")).collect();
    assert!(!ran.stderr.contains("panicked"), "{what}: {}", ran.stderr);
    match ran.code {
        Some(0) => assert_eq!(ran.stdout, good, "{what}: {}", ran.stderr),
        Some(1) => {
            let last = ran.stderr.lines().last().unwrap_or("");
            assert!(told.len() <= 1 && last.starts_with("ds4: "), "{what}: {}", ran.stderr);
            assert!(told.first().is_none_or(|line| *line == last), "{what}: {}", ran.stderr);
            // Full memory alone does not name a kernel: it says what would need less.
            let hints = ["start ds4 again", "start again", "--gpu-cache", "nvidia-smi", "update the driver"];
            assert!(hints.iter().any(|hint| last.contains(hint)), "{what}: {last}");
        }
        code => panic!("{what}: {code:?}: {}", ran.stderr),
    }
}

#[test]
fn each_call_that_fails_ends_the_run_with_one_line() {
    let Some((by_name, good)) = calls("faults-one", &ASK) else { return };
    for (turn, (name, numbers)) in by_name.iter().enumerate() {
        // Another time of each call for each of the two errors.
        let error = [LOST, FULL][turn % 2];
        let nth = (1 + numbers.len() * (1 + turn % 3) / 4).min(numbers.len()).to_string();
        let ran = finish(&mut on_stub(&failing(name, &nth, error), &ASK).unwrap());
        is_one_failure(&ran, &good, &format!("{name}, number {nth}, error {error}"));
    }
}

#[test]
fn full_memory_says_what_needs_less_wherever_it_shows() {
    let Some((by_name, _)) = calls("faults-full", &ASK) else { return };
    let fails = |name: &str, parts: &[&str]| {
        let numbers = by_name.get(name).unwrap_or_else(|| panic!("{name} is not called"));
        let nth = numbers.len().to_string();
        let ran = finish(&mut on_stub(&failing(name, &nth, FULL), &ASK).unwrap());
        assert_eq!(ran.code, Some(1), "{name}: {}", ran.stderr);
        let last = ran.stderr.lines().last().unwrap();
        assert!(parts.iter().all(|part| last.contains(part)), "{name}: {last}");
        assert!(!last.contains("CUDA_LAUNCH_BLOCKING") && !last.contains("DriverError"), "{name}: {last}");
    };
    fails("cuMemAlloc_v2", &["cannot allocate ", " bytes for ", "--gpu-cache", "nvidia-smi"]);
    fails("cuMemHostAlloc", &["allocating ", " bytes of host memory", "--gpu-cache"]);
    fails("rms_norm", &["a launch failed: out of memory", "--gpu-cache", "rms_norm"]);
    fails("cuModuleLoadData", &["the device does not take kernels/", "out of memory", "nvidia-smi lists them"]);
}

#[test]
fn a_conversation_outlives_a_failure_that_does_not_last() {
    let args = ["-n", "3", "--backend", "cuda", "--ssd-streaming", "--lookahead=off"];
    let Some((by_name, _)) = calls("faults-talk", &ASK) else { return };
    // Calls of the first answer, and of nothing that is left out where it fails.
    for name in
        ["rms_norm", "cuGraphLaunch", "resolve_experts", "await_experts", "cuStreamEndCapture", "cuMemsetD8Async"]
    {
        let nth = by_name[name].len().to_string();
        let mut command = on_stub(&failing(name, &nth, "1"), &args).unwrap();
        let mut live = Live::start(&mut command);
        live.wait_for("type a message");
        live.say("hello there");
        live.wait_for("CUDA_ERROR_INVALID_VALUE");
        live.say("hello there");
        live.wait_for("ds4: prefill: ");
        let ran = live.end();
        assert!(ran.code == Some(1) && !ran.stderr.contains("panicked"), "{name}: {}", ran.stderr);
    }
}

/// Reads that fail while kernels stand at a closed gate: nobody is left waiting.
#[test]
fn a_drive_that_fails_in_the_middle_of_a_token_ends_it() {
    let model = scratch("faults-drive").join("live.gguf");
    for more in [&[][..], &["--lookahead", "both"], &["--no-graph"], &["--io", "pread"]] {
        std::fs::copy(b(), &model).unwrap();
        let args = ["-p", "hello", "-n", "30000", "-c", "32768", "--backend", "cuda", "--ssd-streaming"];
        let Some(mut command) = on_stub_with(&model, &[], &args) else { return };
        let live = Live::start(command.args(["--host-cache", "11", "--gpu-cache", "11"]).args(more));
        live.wait_for_output(20);
        let file = std::fs::File::options().write(true).open(&model).unwrap();
        file.set_len(std::fs::metadata(&model).unwrap().len() / 4).unwrap();
        live.end().failed_late(1, &["live.gguf", "changed while in use", "restart with the file in place"]);
    }
}

#[test]
fn a_session_that_meets_a_full_gpu_is_not_called_damaged() {
    let saved = scratch("faults-session").join("talk.ds4s");
    let saved = saved.to_str().unwrap();
    let begin = ["-p", "hello", "-n", "2", "--backend", "cuda", "--save-session", saved];
    let Some(mut command) = on_stub(&[], &begin) else { return };
    assert_eq!(finish(&mut command).code, Some(0));
    let go_on = ["-p", "and", "-n", "2", "--backend", "cuda", "--load-session", saved];
    let (by_name, _) = calls("faults-load", &go_on).unwrap();
    // The last upload before anything is computed is of the state.
    let embeds = by_name.iter().filter(|(name, _)| name.starts_with("embed_")).flat_map(|(_, numbers)| numbers);
    let first = *embeds.min().unwrap();
    let upload = "cuMemcpyHtoDAsync_v2";
    let nth = by_name[upload].iter().filter(|number| **number < first).count().to_string();
    let ran = finish(&mut on_stub(&failing(upload, &nth, FULL), &go_on).unwrap());
    ran.failed_late(1, &["an upload failed: out of memory", "--gpu-cache"]);
    assert!(!ran.stderr.contains("damaged"), "{}", ran.stderr);
}

#[test]
fn slots_beyond_all_numbers_are_refused_with_numbers() {
    for slots in [u64::MAX.to_string(), (u64::MAX / 4096).to_string()] {
        let Some(mut command) = on_stub(&[], &["-p", "x", "--backend", "cuda", "--gpu-cache", &slots]) else { return };
        finish(&mut command).failed(1, &[&format!("--gpu-cache: {slots} experts ("), "one token uses"]);
    }
}

/// A run with its own place for compiled kernels.
fn compiling(cache: &Path) -> Option<Ran> {
    let mut command = on_stub_with(b(), &[], &["-p", "x", "-n", "1", "--backend", "cuda"])?;
    let ran = finish(command.env("XDG_CACHE_HOME", cache));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    Some(ran)
}

#[test]
fn kept_kernels_that_were_damaged_are_compiled_again() {
    let cache = scratch("kernels-damaged");
    let Some(first) = compiling(&cache) else { return };
    if first.stderr.contains("kernels compiled with the program") {
        eprintln!("skipped: this program compiles no kernels");
        return;
    }
    let kernels = cache.join("ds4/kernels");
    let files: Vec<_> = names_in(&kernels).iter().map(|name| kernels.join(name)).collect();
    let good = std::fs::read(&files[0]).unwrap();
    assert!(files.len() > 10 && files.iter().all(|file| std::fs::metadata(file).unwrap().len() > 16));
    // Compiling takes a while, and is announced; what is kept needs none.
    let announced = |ran: &Ran| ran.stderr.matches("ds4: note: compiling the kernels for this GPU").count();
    assert_eq!((announced(&first), announced(&compiling(&cache).unwrap())), (1, 0), "{}", first.stderr);
    let damages = [&good[..good.len() - 1], &[], &[good[0] ^ 4; 5], &[&[good[0], good[1] ^ 1], &good[2..]].concat()];
    for damaged in damages {
        std::fs::write(&files[0], damaged).unwrap();
        let ran = compiling(&cache).unwrap();
        assert!(!ran.stderr.contains("warning"), "{}", ran.stderr);
        assert_eq!(std::fs::read(&files[0]).unwrap(), good);
    }
    assert_eq!(names_in(&kernels).len(), files.len(), "nothing else is left there");
}

#[test]
fn kernels_that_cannot_be_kept_are_told_once() {
    let place = scratch("kernels-unkept");
    let file = place.join("file");
    std::fs::write(&file, "no folder").unwrap();
    let Some(ran) = compiling(&file) else { return };
    if ran.stderr.contains("kernels compiled with the program") {
        eprintln!("skipped: this program compiles no kernels");
        return;
    }
    let warnings = |ran: &Ran| {
        let told = ran.stderr.lines().filter(|line| line.contains("compiled kernels cannot be kept")).count();
        assert!(!ran.stderr.contains('\x1b'), "no colours where no terminal is: {:?}", ran.stderr);
        assert!(ran.stderr.lines().all(|line| line.starts_with("ds4: ")), "{}", ran.stderr);
        told
    };
    assert_eq!(warnings(&ran), 1, "{}", ran.stderr);
    let mut command = on_stub_with(b(), &[], &["-p", "x", "-n", "1", "--backend", "cuda"]).unwrap();
    let homeless = finish(command.env_remove("XDG_CACHE_HOME").env_remove("HOME"));
    assert_eq!(homeless.code, Some(0), "{}", homeless.stderr);
    assert!(homeless.stderr.contains("neither XDG_CACHE_HOME nor HOME is set"), "{}", homeless.stderr);
    // Root may write wherever it wants.
    let locked = place.join("locked");
    std::fs::create_dir(&locked).unwrap();
    std::fs::set_permissions(&locked, std::fs::Permissions::from_mode(0o555)).unwrap();
    let expected = usize::from(std::fs::create_dir(locked.join("try")).is_err());
    assert_eq!(warnings(&compiling(&locked).unwrap()), expected);
}
