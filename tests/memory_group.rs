//! `ds4` inside a memory control group: a model four times the limit runs, stays within its plan and is not killed.
//! Never touches a group that it did not make. Surprising fact: whoever may not make groups learns nothing here but a notice, so this test
//! passes in a plain container; as root on Linux it does the real thing.

mod cli_rig;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use cli_rig::made_models::folder;
use cli_rig::{Ran, command, finish, json, scratch};

/// Limit of the group.
const LIMIT: u64 = 160 << 20;
/// Code and thread stacks, which no plan counts.
const CODE: u64 = 4 << 20;

/// A memory group, removed when dropped.
struct Group {
    dir: PathBuf,
    is_v2: bool,
}

impl Group {
    /// A group of `limit` bytes; `None` where the system permits none.
    fn new(limit: u64) -> Option<Self> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let name = format!("ds4-test-{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let text = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
        let v2 = Path::new("/sys/fs/cgroup");
        let candidates = [
            (Path::new("/sys/fs/cgroup/memory").join(&name), false),
            (v2.join(&name), text(&v2.join("cgroup.subtree_control")).contains("memory")),
        ];
        for (dir, is_v2) in candidates {
            if !dir.parent().is_some_and(|p| p.join("cgroup.procs").exists()) || std::fs::create_dir(&dir).is_err() {
                continue;
            }
            let group = Self { dir, is_v2 };
            let file = if is_v2 { "memory.max" } else { "memory.limit_in_bytes" };
            if std::fs::write(group.dir.join(file), limit.to_string()).is_ok() {
                return Some(group);
            }
        }
        None
    }

    fn text(&self, name: &str) -> String {
        std::fs::read_to_string(self.dir.join(name)).unwrap_or_default()
    }

    /// Processes that were killed for memory.
    fn killed(&self) -> u64 {
        let text = self.text(if self.is_v2 { "memory.events" } else { "memory.oom_control" });
        let line = text.lines().find_map(|l| l.strip_prefix("oom_kill ")).unwrap_or("0");
        line.trim().parse().unwrap()
    }

    /// Bytes that are in swap.
    fn swapped(&self) -> u64 {
        if self.is_v2 {
            return self.text("memory.swap.current").trim().parse().unwrap_or(0);
        }
        self.text("memory.stat").lines().find_map(|l| l.strip_prefix("swap ")?.parse().ok()).unwrap_or(0)
    }

    /// Runs a command inside.
    fn run(&self, command: &Command) -> Ran {
        let mut inside = Command::new("sh");
        inside.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(self.dir.join("cgroup.procs"));
        inside.arg(command.get_program()).args(command.get_args()).current_dir(folder()).env("HOME", folder());
        finish(&mut inside)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The last process may still be on its way out.
        for _ in 0..100 {
            if std::fs::remove_dir(&self.dir).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

/// A model of four times the limit: experts, and tables that are never loaded.
fn model() -> &'static Path {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    FILE.get_or_init(|| {
        let path = folder().join("large.gguf");
        let out = Command::new(env!("CARGO_BIN_EXE_ds4-gguf"))
            .args(["synth", "--shape", "small", "--layers", "24", "--experts", "520", "--table-rows", "200000"])
            .args(["--force", "-o"])
            .arg(&path)
            .output()
            .unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        assert!(path.metadata().unwrap().len() >= 4 * LIMIT);
        path
    })
}

#[test]
fn a_model_of_four_times_the_limit_runs_within_its_plan() {
    let Some(group) = Group::new(LIMIT) else {
        eprintln!("skipped: this system lets the test make no memory group");
        return;
    };
    let folder = scratch("group");
    for (name, more) in [("auto", &[][..]), ("pread", &["--io", "pread"]), ("rows", &["--row-cache", "0.004GB"])] {
        let stats = folder.join(format!("{name}.json"));
        let mut inside = command();
        inside
            .arg("-m")
            .arg(model())
            .args(["--ssd-streaming", "-p", "a long day", "-n", "48", "--ctx", "512"])
            .args(more);
        inside.arg("--stats-json").arg(&stats);
        let ran = group.run(&inside).ok();
        let stats = json(&stats);
        let number = |key: &str| stats[key].as_u64().unwrap();
        let (peak, planned) = (number("peak_rss_bytes"), number("planned_bytes"));
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        println!("{name}: limit {} MiB, planned {:.1} MiB, peak {:.1} MiB", LIMIT >> 20, mib(planned), mib(peak));
        assert!(planned <= LIMIT, "{name}: the plan {planned} ignores the limit: {}", ran.stderr);
        assert!(planned > LIMIT / 4, "{name}: the plan {planned} wastes the limit: {}", ran.stderr);
        assert!(peak as f64 <= 1.05 * planned as f64 + CODE as f64, "{name}: peak {peak}, planned {planned}");
        assert!(number("evictions") > 0, "{name}: everything fitted, so nothing was shown");
        assert_eq!((group.killed(), group.swapped()), (0, 0), "{name}");
        // The same answer as with all the memory of the machine.
        let mut outside = command();
        outside.arg("-m").arg(model()).args(["--ssd-streaming", "-p", "a long day", "-n", "48", "--ctx", "512"]);
        assert_eq!(finish(&mut outside).ok().stdout, ran.stdout, "{name}");
    }
}

#[test]
fn a_limit_that_is_too_small_is_refused_before_anything_is_read() {
    let Some(group) = Group::new(24 << 20) else {
        eprintln!("skipped: this system lets the test make no memory group");
        return;
    };
    let mut inside = command();
    inside.arg("-m").arg(model()).args(["--ssd-streaming", "-p", "x", "-n", "1"]);
    let ran = group.run(&inside);
    ran.failed(1, &["memory"]);
    assert_eq!(group.killed(), 0);
}
