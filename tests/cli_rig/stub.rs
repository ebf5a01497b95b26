//! Runs of `ds4` on a driver library without a GPU, built here by the C compiler.
//! Owns no expectation. Surprising fact: without a C compiler there is none, and whoever asks for a run gets nothing.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use super::made_models::{b, folder};
use super::{command, scratch};

/// The folders of the driver's library and of the run-time compiler's; `None` where nothing compiles C.
pub fn stubs() -> Option<&'static [PathBuf; 2]> {
    static STUBS: OnceLock<Option<[PathBuf; 2]>> = OnceLock::new();
    STUBS.get_or_init(build).as_ref()
}

fn build() -> Option<[PathBuf; 2]> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu_stub/driver.c");
    let compile = |name: &str, more: &[&str]| {
        let place = scratch(&format!("stub-{name}"));
        let out = place.join(format!("lib{name}.so"));
        let mut cc = Command::new("cc");
        match cc.args(["-shared", "-fPIC", "-O1"]).args(more).arg("-o").arg(out).arg(&source).output() {
            Ok(done) => {
                assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
                Some(place)
            }
            Err(error) => {
                eprintln!("skipped: cc does not run ({error})");
                None
            }
        }
    };
    Some([compile("cuda", &[])?, compile("nvrtc", &["-DNVRTC"])?])
}

/// `ds4 -m b.gguf` with `args` on the stub, which goes wrong as `faults` say; `None` without one.
pub fn on_stub(faults: &[(&str, &str)], args: &[&str]) -> Option<Command> {
    on_stub_with(b(), faults, args)
}

/// The same with another model.
pub fn on_stub_with(model: &Path, faults: &[(&str, &str)], args: &[&str]) -> Option<Command> {
    let [cuda, nvrtc] = stubs()?;
    let mut command = command();
    let path = std::env::join_paths([cuda, nvrtc]).unwrap();
    // Kernels that the stub "compiles" must not be found by a real driver.
    command.env("LD_LIBRARY_PATH", path).env("XDG_CACHE_HOME", folder().join("stub-kernels"));
    command.envs(faults.iter().copied()).arg("-m").arg(model).args(args);
    Some(command)
}
