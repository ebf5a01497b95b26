//! What the system says about memory and processors: /proc, control groups, limits. Owns the parsers of those texts.
//! Never allocates for a guess: a missing limit is `None`, a missing fact is an error that names its file.
//! Surprising fact: the tightest control group is the one with the least room left, not the one with the least limit.

pub mod mount;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cache_policy::plan::Facts;

use crate::units::Bytes;

/// A fact that the system does not give.
#[derive(Debug, thiserror::Error)]
pub enum SysError {
    #[error("cannot read {file}: {source}; is /proc mounted?")]
    Unreadable { file: String, source: std::io::Error },
    #[error("{file} has no usable line {line:?}; the kernel may be too old (3.14 is needed)")]
    MissingLine { file: &'static str, line: &'static str },
}

/// Longest /proc or control group text that is read: far above any real one.
const TEXT_BYTES_MAX: u64 = 4 << 20;

fn read_text(file: &Path) -> Result<String, SysError> {
    let read = || -> std::io::Result<String> {
        let mut bytes = Vec::new();
        std::fs::File::open(file)?.take(TEXT_BYTES_MAX).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    read().map_err(|source| SysError::Unreadable { file: file.display().to_string(), source })
}

/// Everything the memory planner asks of the machine, with nothing simulated.
pub fn memory_facts() -> Result<Facts, SysError> {
    let info = parse_meminfo(&read_text(Path::new("/proc/meminfo"))?)?;
    let group = group_memory();
    Ok(Facts {
        total: info.total,
        available: info.available,
        cma_free: info.cma_free,
        group_limit: group.map(|g| g.limit),
        group_used: group.map_or(Bytes(0), |g| g.used),
        address_space: address_space_left(),
        lock_limit: lock_limit(),
        simulated_used: Bytes(0),
    })
}

/// Addresses that this process may still take (`ulimit -v`), or what it may write to among them (`ulimit -d`); `None` is unlimited.
pub fn address_space_left() -> Option<Bytes> {
    // Where nobody says how much is taken, the limit alone is still better than none.
    let taken = read_text(Path::new("/proc/self/statm")).ok().and_then(|text| parse_statm(&text)).unwrap_or_default();
    let left = address_limits().into_iter().zip(taken).filter_map(|(limit, pages)| {
        let bytes = pages.saturating_mul(page_bytes() as u64);
        limit.map(|limit| Bytes(limit.saturating_sub(bytes)))
    });
    left.min()
}

/// Limits on all addresses and on those that are written to.
fn address_limits() -> [Option<u64>; 2] {
    use rustix::process::Resource;
    [Resource::As, Resource::Data].map(|resource| rustix::process::getrlimit(resource).current)
}

/// Stack of the first thread; `None` is unlimited.
pub fn stack_limit() -> Option<Bytes> {
    rustix::process::getrlimit(rustix::process::Resource::Stack).current.map(Bytes)
}

/// Pages of the whole process, and of its data and stack: the first number and the sixth.
fn parse_statm(text: &str) -> Option<[u64; 2]> {
    let mut numbers = text.split_whitespace().map(|word| word.parse().ok());
    Some([numbers.next()??, numbers.nth(4)??])
}

/// Most bytes this process may lock; `None` is unlimited.
pub fn lock_limit() -> Option<Bytes> {
    rustix::process::getrlimit(rustix::process::Resource::Memlock).current.map(Bytes)
}

/// Where this user's programs keep what can be made again: XDG_CACHE_HOME, else .cache in HOME. `None` without either.
pub fn user_cache_dir() -> Option<PathBuf> {
    // The XDG rules: a path that is not absolute counts as unset.
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|dir| dir.is_absolute());
    absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")))
}

/// Bytes of a memory page.
pub fn page_bytes() -> usize {
    rustix::param::page_size()
}

/// Processors this process may keep busy: its affinity mask, cut by the quota of its control groups. At least 1.
pub fn cpu_count() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Resident memory of this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProcessMemory {
    /// Now.
    pub resident: Bytes,
    /// Peak since the start or since `reset_peak`.
    pub peak: Bytes,
}

/// Reads the resident memory of this process and its peak.
pub fn process_memory() -> Result<ProcessMemory, SysError> {
    parse_process_status(&read_text(Path::new("/proc/self/status"))?)
}

/// Starts the peak anew from what is resident now.
pub fn reset_peak() -> Result<(), SysError> {
    // 5 resets the peak resident size alone (proc(5), clear_refs).
    let file = "/proc/self/clear_refs";
    std::fs::write(file, "5").map_err(|source| SysError::Unreadable { file: file.into(), source })
}

/// Blocks from this size on go back to the system when they are freed.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const RETURNED_BYTES_MIN: libc::c_int = 128 << 10;

/// Keeps freed blocks from piling up in the heaps of threads, one heap each: the allocator would otherwise keep
/// ever larger ones. For the start of a program.
pub fn return_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: mallopt takes two integers and may be called at any time; a refusal changes nothing.
    let _ = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, RETURNED_BYTES_MIN) };
}

/// Whether all threads allocate from one heap.
static IS_ONE_HEAP: AtomicBool = AtomicBool::new(false);

/// Addresses that a thread may take: a heap of the C library reserves 64 MiB, and a stack has 2 MiB and a guard.
const HEAP_ADDRESSES: u64 = 64 << 20;
const STACK_ADDRESSES: u64 = 3 << 20;

/// Where the user limits addresses (`ulimit -v`, `-d`), lets all threads allocate from one heap. The C library would otherwise reserve one for each,
/// of which next to nothing is used. For the start of a program.
pub fn save_addresses() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    if address_limits().iter().any(Option::is_some) {
        // SAFETY: mallopt takes two integers and may be called at any time; a refusal changes nothing.
        let is_done = unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) } == 1;
        IS_ONE_HEAP.store(is_done, Ordering::Relaxed);
    }
}

/// Addresses that one more thread may take.
pub fn thread_addresses() -> Bytes {
    let heap = if IS_ONE_HEAP.load(Ordering::Relaxed) { 0 } else { HEAP_ADDRESSES };
    Bytes(heap + STACK_ADDRESSES)
}

/// Whether stdout was missing when the process began: the standard library puts /dev/null there before `main`, and every write succeeds.
static STDOUT_WAS_CLOSED: AtomicBool = AtomicBool::new(false);

#[cfg(target_os = "linux")]
#[used]
// SAFETY: the loader calls the functions of this section once each, before `main` and on one thread; this one makes a system call and
// sets an atomic flag, for which nothing of the standard library needs to be ready.
#[unsafe(link_section = ".init_array")]
static LOOK_AT_STDOUT: extern "C" fn() = look_at_stdout;

#[cfg(target_os = "linux")]
extern "C" fn look_at_stdout() {
    // SAFETY: F_GETFD takes no pointer and changes nothing.
    let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) };
    STDOUT_WAS_CLOSED.store(flags < 0, Ordering::Relaxed);
}

/// Whether the process was started with stdout closed, so that an answer would go nowhere without an error.
pub fn stdout_was_closed() -> bool {
    STDOUT_WAS_CLOSED.load(Ordering::Relaxed)
}

/// Makes a write beyond the user's limit on the size of files (`ulimit -f`) an error, as a full drive is one, where the signal would end the
/// process and leave half a file. For the start of a program.
pub fn outlive_file_size_limit() {
    // A handler that is never looked at: once the signal has one, the write returns EFBIG. A refusal leaves things as they were.
    let _ = signal_hook::flag::register(libc::SIGXFSZ, Arc::default());
}

/// Lines of /proc/meminfo that matter here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemInfo {
    pub total: Bytes,
    pub available: Bytes,
    pub cma_free: Bytes,
}

/// Parses /proc/meminfo. `CmaFree` may be absent.
pub fn parse_meminfo(text: &str) -> Result<MemInfo, SysError> {
    let line = |name: &'static str| SysError::MissingLine { file: "/proc/meminfo", line: name };
    Ok(MemInfo {
        total: kib_line(text, "MemTotal").ok_or(line("MemTotal"))?,
        available: kib_line(text, "MemAvailable").ok_or(line("MemAvailable"))?,
        cma_free: kib_line(text, "CmaFree").unwrap_or_default(),
    })
}

/// Parses /proc/self/status.
pub fn parse_process_status(text: &str) -> Result<ProcessMemory, SysError> {
    let line = |name: &'static str| SysError::MissingLine { file: "/proc/self/status", line: name };
    Ok(ProcessMemory {
        resident: kib_line(text, "VmRSS").ok_or(line("VmRSS"))?,
        peak: kib_line(text, "VmHWM").ok_or(line("VmHWM"))?,
    })
}

/// The value of `Name:   123 kB`, in bytes.
fn kib_line(text: &str, name: &str) -> Option<Bytes> {
    let rest = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'))?;
    let mut words = rest.split_ascii_whitespace();
    let kib: u64 = words.next()?.parse().ok()?;
    (words.next() == Some("kB")).then_some(())?;
    kib.checked_mul(1024).map(Bytes)
}

/// Limit and use of one control group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupMemory {
    pub limit: Bytes,
    /// Without file pages, which the kernel drops before it refuses memory.
    pub used: Bytes,
}

impl GroupMemory {
    fn room(&self) -> u64 {
        self.limit.0.saturating_sub(self.used.0)
    }
}

/// The tightest memory limit above this process, if any.
pub fn group_memory() -> Option<GroupMemory> {
    let groups = read_text(Path::new("/proc/self/cgroup")).ok()?;
    let mounts = read_text(Path::new("/proc/self/mountinfo")).ok()?;
    tightest_group(&groups, &mounts, &|file| read_text(file).ok())
}

/// The same over given texts; `read` opens the files of the groups.
pub fn tightest_group(groups: &str, mounts: &str, read: &dyn Fn(&Path) -> Option<String>) -> Option<GroupMemory> {
    let mut tightest: Option<GroupMemory> = None;
    for mount in mounts.lines().filter_map(parse_group_mount) {
        let Some(group) = group_path(groups, mount.version) else { continue };
        for dir in dirs_upward(&mount, group) {
            let found = match mount.version {
                GroupVersion::One => group_memory_v1(&dir, read),
                GroupVersion::Two => group_memory_v2(&dir, read),
            };
            if let Some(found) = found.filter(|f| tightest.is_none_or(|t| f.room() < t.room())) {
                tightest = Some(found);
            }
        }
    }
    tightest
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum GroupVersion {
    One,
    Two,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct GroupMount {
    version: GroupVersion,
    /// The group that is visible at `at`.
    root: String,
    at: PathBuf,
}

/// Parses one line of /proc/self/mountinfo; `None` unless it mounts memory groups.
fn parse_group_mount(line: &str) -> Option<GroupMount> {
    // id parent major:minor root mount-point options optional-fields... - type source super-options (proc(5))
    let (left, right) = line.split_once(" - ")?;
    let mut left = left.split(' ').skip(3);
    let (root, at) = (unescape(left.next()?), unescape(left.next()?));
    let mut right = right.split(' ');
    let version = match right.next()? {
        "cgroup2" => GroupVersion::Two,
        "cgroup" if right.nth(1)?.split(',').any(|option| option == "memory") => GroupVersion::One,
        _ => return None,
    };
    Some(GroupMount { version, root, at: at.into() })
}

/// Undoes the octal escapes (`\040` is a space) of mountinfo.
fn unescape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        let code = rest.get(at + 1..at + 4).filter(|digits| digits.bytes().all(|b| b.is_ascii_digit()));
        match code.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                out.push(char::from(byte));
                rest = &rest[at + 4..];
            }
            None => {
                out.push('\\');
                rest = &rest[at + 1..];
            }
        }
    }
    out + rest
}

/// This process's memory group in a hierarchy of `version`, from /proc/self/cgroup (`id:controllers:path`).
fn group_path(groups: &str, version: GroupVersion) -> Option<&str> {
    groups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (id, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let is_ours = match version {
            GroupVersion::One => controllers.split(',').any(|c| c == "memory"),
            GroupVersion::Two => id == "0" && controllers.is_empty(),
        };
        is_ours.then_some(path)
    })
}

/// Deepest nesting that is walked; real hierarchies have a handful of levels.
const LEVELS_MAX: usize = 64;

/// Directories of the group and of all groups above it that the mount shows.
fn dirs_upward(mount: &GroupMount, group: &str) -> Vec<PathBuf> {
    // A group outside the mount's root (a container with the host's path names) is seen as the root itself.
    let below = Path::new(group).strip_prefix(&mount.root).unwrap_or(Path::new(""));
    let is_plain = below.components().all(|c| matches!(c, std::path::Component::Normal(_)));
    let below = if is_plain { below } else { Path::new("") };
    below.ancestors().take(LEVELS_MAX).map(|part| mount.at.join(part)).collect()
}

/// Version 1 writes "no limit" as the largest multiple of a page; nothing real comes near.
const V1_UNLIMITED: u64 = 1 << 60;

fn group_memory_v1(dir: &Path, read: &dyn Fn(&Path) -> Option<String>) -> Option<GroupMemory> {
    let limit = number(&read(&dir.join("memory.limit_in_bytes"))?).filter(|&l| l < V1_UNLIMITED)?;
    let used = number(&read(&dir.join("memory.usage_in_bytes"))?)?;
    let stat = read(&dir.join("memory.stat")).unwrap_or_default();
    let files = stat_value(&stat, "total_active_file").saturating_add(stat_value(&stat, "total_inactive_file"));
    Some(GroupMemory { limit: Bytes(limit), used: Bytes(used.saturating_sub(files)) })
}

fn group_memory_v2(dir: &Path, read: &dyn Fn(&Path) -> Option<String>) -> Option<GroupMemory> {
    // Above `memory.high` the kernel throttles the group nearly to a halt: as good as a limit. "max" is no number.
    let limits = ["memory.max", "memory.high"].map(|name| read(&dir.join(name)).and_then(|text| number(&text)));
    let limit = limits.into_iter().flatten().min()?;
    let used = number(&read(&dir.join("memory.current"))?)?;
    let stat = read(&dir.join("memory.stat")).unwrap_or_default();
    let files = stat_value(&stat, "active_file").saturating_add(stat_value(&stat, "inactive_file"));
    Some(GroupMemory { limit: Bytes(limit), used: Bytes(used.saturating_sub(files)) })
}

fn number(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

/// Value of `name 123` in a memory.stat text; 0 when absent.
fn stat_value(text: &str, name: &str) -> u64 {
    let value = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(' '));
    value.and_then(number).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn meminfo_as_kernels_write_it() {
        let text = "MemTotal:       24684084 kB\nMemFree:  1 kB\nMemAvailable:   24175828 kB\nCmaFree:   2048 kB\n";
        let info = parse_meminfo(text).unwrap();
        assert_eq!(info.total, Bytes(24_684_084 * 1024));
        assert_eq!(info.available, Bytes(24_175_828 * 1024));
        assert_eq!(info.cma_free, Bytes::mib(2));
        let without = text.replace("CmaFree", "Cma");
        assert_eq!(parse_meminfo(&without).unwrap().cma_free, Bytes(0));
    }

    #[test]
    fn pages_of_a_process() {
        assert_eq!(parse_statm("1207 171 148 7 0 92 0\n"), Some([1207, 92]));
        for text in ["", "1207", "1207 171 148 7 0", "1207 171 148 7 0 x 0", "-1 171 148 7 0 92 0"] {
            assert_eq!(parse_statm(text), None, "{text:?}");
        }
    }

    #[test]
    fn hostile_meminfo_is_refused() {
        let good = "MemTotal: 5 kB\nMemAvailable: 4 kB\n";
        assert!(parse_meminfo(good).is_ok());
        for (from, to) in [
            ("5 kB", "-5 kB"),
            ("5 kB", ""),
            ("5 kB", "5"),
            ("5 kB", "5 MB"),
            ("5 kB", "18446744073709551615 kB"),
            ("5 kB", "99999999999999999999 kB"),
            ("MemTotal:", "MemTotal"),
            ("MemTotal:", "XMemTotal:"),
            ("MemAvailable:", "MemAvailableX:"),
        ] {
            let text = good.replace(from, to);
            assert!(parse_meminfo(&text).is_err(), "{text:?}");
        }
        assert!(parse_meminfo("").is_err());
        assert!(parse_meminfo("\u{0}\u{ff}: :::\n\n kB").is_err());
    }

    /// Files of a made-up system.
    fn files(list: &[(&str, &str)]) -> impl Fn(&Path) -> Option<String> {
        let map: HashMap<PathBuf, String> = list.iter().map(|(p, t)| (PathBuf::from(p), t.to_string())).collect();
        move |path| map.get(path).cloned()
    }

    const V2_MOUNT: &str = "31 23 0:28 / /sys/fs/cgroup rw shared:9 master:1 - cgroup2 cgroup2 rw,nsdelegate";
    const V1_MOUNT: &str = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory";

    #[test]
    fn version_two_walks_up_to_the_tightest() {
        let read = files(&[
            ("/sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("/sys/fs/cgroup/a/b/memory.current", "100\n"),
            ("/sys/fs/cgroup/a/memory.max", "5000\n"),
            ("/sys/fs/cgroup/a/memory.high", "4000\n"),
            ("/sys/fs/cgroup/a/memory.current", "1500\n"),
            ("/sys/fs/cgroup/a/memory.stat", "anon 9\ninactive_file 200\nactive_file 300\nfile 7\n"),
        ]);
        let found = tightest_group("0::/a/b\n", V2_MOUNT, &read);
        assert_eq!(found, Some(GroupMemory { limit: Bytes(4000), used: Bytes(1000) }));
    }

    #[test]
    fn least_room_wins_over_least_limit() {
        let read = files(&[
            ("/sys/fs/cgroup/a/memory.max", "1000"),
            ("/sys/fs/cgroup/a/memory.current", "10"),
            ("/sys/fs/cgroup/memory.max", "2000"),
            ("/sys/fs/cgroup/memory.current", "1900"),
        ]);
        let found = tightest_group("0::/a", V2_MOUNT, &read);
        assert_eq!(found, Some(GroupMemory { limit: Bytes(2000), used: Bytes(1900) }));
    }

    #[test]
    fn version_one_in_a_container() {
        // The mount shows the container's own group as its root, while the path is the host's.
        let mount = V1_MOUNT.replace("0:32 /", "0:32 /docker/abc");
        let read = files(&[
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n"),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "500\n"),
            ("/sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 300\n"),
        ]);
        let want = Some(GroupMemory { limit: Bytes::gib(1), used: Bytes(200) });
        assert_eq!(tightest_group("4:memory:/docker/abc\n1:cpu:/x", &mount, &read), want);
        assert_eq!(tightest_group("4:cpu,memory:/elsewhere\n", &mount, &read), want);
        let unlimited = files(&[
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "500\n"),
        ]);
        assert_eq!(tightest_group("4:memory:/docker/abc\n", &mount, &unlimited), None);
    }

    #[test]
    fn hostile_group_texts_give_no_limit() {
        let read = files(&[
            ("/sys/fs/cgroup/memory.max", "-5"),
            ("/sys/fs/cgroup/x/memory.max", "1e9"),
            ("/sys/fs/cgroup/x/memory.current", "3"),
        ]);
        for groups in ["", "0::", "0::/x", "0:/x", "::::", "0::../../etc", "0::/../../x", "4:memory", "\u{0}"] {
            assert_eq!(tightest_group(groups, V2_MOUNT, &read), None, "{groups:?}");
        }
        for mounts in ["", " - ", "a b - cgroup2", "1 2 3 / - cgroup2 x y", "35 31 0:32 / /m rw - cgroup cgroup", "\\"]
        {
            assert_eq!(tightest_group("0::/x", mounts, &read), None, "{mounts:?}");
        }
        let deep = format!("0::{}", "/d".repeat(100_000));
        assert_eq!(tightest_group(&deep, V2_MOUNT, &read), None);
    }

    #[test]
    fn group_paths_stay_below_the_mount() {
        let mount = parse_group_mount(V2_MOUNT).unwrap();
        assert_eq!(dirs_upward(&mount, "/../secret"), [PathBuf::from("/sys/fs/cgroup")]);
        assert_eq!(dirs_upward(&mount, "/a"), [PathBuf::from("/sys/fs/cgroup/a"), PathBuf::from("/sys/fs/cgroup/")]);
    }

    #[test]
    fn mount_points_with_escapes() {
        assert_eq!(unescape(r"/a\040b"), "/a b");
        for text in [r"\", r"\04", r"\999", r"\0400", "\\\u{e9}\u{e9}"] {
            unescape(text);
        }
        let mount = parse_group_mount(r"1 2 0:1 / /my\040groups rw - cgroup2 none rw").unwrap();
        assert_eq!(mount.at, Path::new("/my groups"));
    }

    #[test]
    fn this_machine_answers() {
        let facts = memory_facts().unwrap();
        assert!(facts.total.0 > 0 && facts.available <= facts.total);
        assert!(facts.usable() <= facts.available);
        assert!(cpu_count() >= 1 && page_bytes().is_power_of_two());
        lock_limit();
    }

    #[test]
    fn hostile_status_is_refused() {
        assert!(parse_process_status("VmHWM:\t 1728 kB\nVmRSS:\t 1000 kB\n").is_ok());
        for text in ["", "VmHWM: 1 kB", "VmRSS: 1 kB\nVmHWM: one kB", "VmRSS: 1 kB\nVmHWM: 18014398509481985 kB"] {
            assert!(parse_process_status(text).is_err(), "{text:?}");
        }
    }
}
