//! Reads the project's own sources and refuses what the style forbids: long files, arrows that point up, `unsafe`
//! outside its folders or without a reason, missing head comments, stray binaries.
//! Never looks at generated files. Surprising fact: the rules are data at the top, so a change of rule is one line.

use std::fs;
use std::path::{Path, PathBuf};

const LINES_MAX: usize = 800;
const BINARY_BYTES_MAX: u64 = 64 * 1024;
/// Folders whose files may be large: golden data and the bundled model.
const LARGE_ALLOWED: &[&str] = &["tests/golden/", "models/", "benches/"];
const UNSAFE_ALLOWED: &[&str] = &[
    "src/sys.rs",
    "src/storage/reader/uring.rs",
    "src/storage/reader/align.rs",
    "src/storage/weights.rs",
    "src/engine/slabs.rs",
    "src/backend/cuda/",
    "src/backend/cpu/simd/",
];
const NAMES_BANNED: &[&str] = &["utils", "util", "helpers", "helper", "misc", "manager", "common_stuff"];

/// Which top-level modules each one may import. Leaves may be imported by all.
const LEAVES: &[&str] = &["error", "units", "quant", "obs", "text", "sys"];
const ARROWS: &[(&str, &[&str])] = &[
    ("bin", &["cli", "session", "engine", "models", "storage", "backend"]),
    ("cli", &["session", "engine", "models", "storage", "backend"]),
    ("session", &["engine", "models"]),
    ("engine", &["models", "storage", "backend"]),
    ("models", &["backend"]),
    ("storage", &[]),
    ("backend", &[]),
    ("text", &[]),
    ("quant", &[]),
    ("obs", &[]),
    ("sys", &[]),
    ("units", &[]),
];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn walk(dir: &Path, found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with('.') || name == "target" || name == "corpus" || name == "artifacts" {
            continue;
        }
        if path.is_dir() {
            walk(&path, found);
        } else {
            found.push(path);
        }
    }
}

/// Every source file as (path from the root, text).
fn sources() -> Vec<(String, String)> {
    let root = root();
    let mut files = Vec::new();
    walk(&root, &mut files);
    let mut sources: Vec<_> = files
        .into_iter()
        .filter(|p| p.extension().is_some_and(|e| e == "rs" || e == "cu" || e == "cuh"))
        .map(|p| {
            let text = fs::read_to_string(&p).unwrap_or_else(|e| panic!("{}: {e}", p.display()));
            (p.strip_prefix(&root).unwrap().to_string_lossy().into_owned(), text)
        })
        .collect();
    sources.sort();
    assert!(sources.len() > 10, "the walk found almost nothing: wrong root {}", root.display());
    sources
}

fn fail_with(faults: Vec<String>) {
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn files_stay_short() {
    let faults = sources()
        .iter()
        .filter(|(_, text)| text.lines().count() > LINES_MAX)
        .map(|(path, text)| format!("{path}: {} lines, at most {LINES_MAX}; split it", text.lines().count()))
        .collect();
    fail_with(faults);
}

#[test]
fn files_open_with_a_head_comment() {
    let faults = sources()
        .iter()
        .filter(|(path, text)| {
            let first = text.lines().find(|l| !l.trim().is_empty() && !l.starts_with("#!")).unwrap_or("");
            let head = if path.ends_with(".rs") { "//!" } else { "//" };
            !first.starts_with(head)
        })
        .map(|(path, _)| format!("{path}: must open with what it owns, what it must never do, one surprising fact"))
        .collect();
    fail_with(faults);
}

#[test]
fn names_say_what_they_hold() {
    let faults = sources()
        .iter()
        .filter(|(path, _)| {
            Path::new(path).iter().any(|part| {
                let stem = part.to_string_lossy();
                NAMES_BANNED.contains(&stem.trim_end_matches(".rs"))
            })
        })
        .map(|(path, _)| format!("{path}: the name says nothing"))
        .collect();
    fail_with(faults);
}

/// Calls that panic where a stream is full or closed, or where an argument is no text.
const PANICS_OUTSIDE: [&str; 5] = ["println!(", "eprintln!(", "print!(", "eprint!(", "env::args()"];

#[test]
fn streams_and_arguments_do_not_panic() {
    let mut faults = Vec::new();
    for (path, text) in sources().iter().filter(|(path, _)| path.starts_with("src/") && path.ends_with(".rs")) {
        let code = text.lines().enumerate().take_while(|(_, line)| !line.starts_with("#[cfg(test)]"));
        let code = code.filter(|(_, line)| !line.trim_start().starts_with("//"));
        for (at, _) in code.filter(|(_, line)| PANICS_OUTSIDE.iter().any(|call| line.contains(call))) {
            faults.push(format!("{path}:{}: use cli/output.rs, or cli::args::words", at + 1));
        }
    }
    fail_with(faults);
}

/// The top-level module of a source below src/, `bin` for binaries.
fn module_of(path: &str) -> Option<&str> {
    let rest = path.strip_prefix("src/")?;
    let first = rest.split('/').next()?;
    match first {
        "lib.rs" => None,
        _ => Some(first.trim_end_matches(".rs")),
    }
}

/// Names that follow `prefix` in code lines, with their line numbers.
fn imports<'a>(text: &'a str, prefix: &str) -> Vec<(usize, &'a str)> {
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let code = line.split("//").next().unwrap_or("");
        for (at, _) in code.match_indices(prefix) {
            let name = &code[at + prefix.len()..];
            let end = name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len());
            if end > 0 {
                found.push((number + 1, &name[..end]));
            }
        }
    }
    found
}

#[test]
fn imports_point_downward() {
    let mut faults = Vec::new();
    for (path, text) in sources() {
        let Some(module) = module_of(&path) else { continue };
        let Some((_, allowed)) = ARROWS.iter().find(|(m, _)| *m == module) else {
            faults.push(format!("{path}: module {module} has no place in the map of arrows"));
            continue;
        };
        let prefix = if module == "bin" { "ds4::" } else { "crate::" };
        for (line, name) in imports(&text, prefix) {
            let known = LEAVES.contains(&name) || ARROWS.iter().any(|(m, _)| *m == name);
            if known && name != module && !LEAVES.contains(&name) && !allowed.contains(&name) {
                faults.push(format!("{path}:{line}: {module} must not import {name}"));
            }
        }
        if text.contains("use crate::{") {
            faults.push(format!("{path}: write one `use crate::module::...` a module, so that arrows can be read"));
        }
    }
    fail_with(faults);
}

fn is_unsafe_code(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or("");
    ["unsafe {", "unsafe impl", "unsafe fn", "unsafe extern"].iter().any(|mark| code.contains(mark))
}

#[test]
fn unsafe_stays_in_its_folders_and_gives_reasons() {
    let mut faults = Vec::new();
    for (path, text) in sources() {
        if path == "tests/tidy.rs" {
            continue;
        }
        let lines: Vec<&str> = text.lines().collect();
        for (i, line) in lines.iter().enumerate() {
            if !is_unsafe_code(line) {
                continue;
            }
            if !UNSAFE_ALLOWED.iter().any(|allowed| path.starts_with(allowed)) {
                faults.push(format!("{path}:{}: unsafe outside its folders", i + 1));
                continue;
            }
            let is_fn = line.contains("unsafe fn");
            let mark = if is_fn { "# Safety" } else { "SAFETY" };
            // Doc comments of unsafe functions may be long; blocks carry their reason just above.
            let reach = if is_fn { 30 } else { 8 };
            let reasoned = lines[i.saturating_sub(reach)..=i].iter().any(|l| l.contains(mark));
            if !reasoned {
                faults.push(format!("{path}:{}: no `{mark}` above", i + 1));
            }
        }
    }
    fail_with(faults);
}

#[test]
fn ignored_tests_say_why() {
    let faults = sources()
        .iter()
        .filter(|(path, _)| path != "tests/tidy.rs")
        .flat_map(|(path, text)| {
            text.lines()
                .enumerate()
                .filter(|(_, line)| line.contains("#[ignore]"))
                .map(move |(i, _)| format!("{path}:{}: #[ignore] without a reason", i + 1))
                .collect::<Vec<_>>()
        })
        .collect();
    fail_with(faults);
}

#[test]
fn large_files_lie_where_data_belongs() {
    let root = root();
    let mut files = Vec::new();
    walk(&root, &mut files);
    let faults = files
        .iter()
        .filter_map(|path| {
            let name = path.strip_prefix(&root).unwrap().to_string_lossy().into_owned();
            let bytes = fs::metadata(path).ok()?.len();
            let text = [".rs", ".md", ".lock", ".toml"].iter().any(|e| name.ends_with(e));
            let placed = LARGE_ALLOWED.iter().any(|folder| name.starts_with(folder));
            (bytes > BINARY_BYTES_MAX && !text && !placed).then(|| format!("{name}: {bytes} bytes"))
        })
        .collect();
    fail_with(faults);
}

#[test]
fn kernels_have_a_launcher_and_a_cpu_twin() {
    let root = root();
    let mut faults = Vec::new();
    for (path, _) in sources().iter().filter(|(p, _)| p.starts_with("kernels/") && p.ends_with(".cu")) {
        let stem = Path::new(path).file_stem().unwrap().to_string_lossy().into_owned();
        for twin in [format!("src/backend/cuda/launch/{stem}.rs"), format!("src/backend/cpu/{stem}.rs")] {
            if !root.join(&twin).exists() {
                faults.push(format!("{path}: {twin} is missing"));
            }
        }
    }
    fail_with(faults);
}
