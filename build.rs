//! Puts the CUDA kernels into the program: as source text, and compiled as well where nvcc is found.
//! Never needs a toolkit or a GPU: without nvcc the driver machine compiles the text at first use.
//! Surprising fact: includes are pasted in here, since the run-time compiler has no folder to look into.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

/// Targets of the compiled form: Hopper, GB10, and PTX for everything since Ampere.
const TARGETS: [&str; 3] =
    ["arch=compute_90a,code=sm_90a", "arch=compute_121a,code=sm_121a", "arch=compute_80,code=compute_80"];
/// Compilers run at the same time.
const PARALLEL: usize = 2;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    for name in ["DS4_NVCC", "CUDA_HOME", "PATH"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    println!("cargo::rerun-if-changed=kernels");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let stems = kernel_stems();
    for stem in &stems {
        let mut pasted = Vec::new();
        let text = with_includes(&Path::new("kernels").join(format!("{stem}.cu")), &mut pasted);
        fs::write(out.join(format!("{stem}.cu")), text).expect("OUT_DIR can be written");
    }
    let nvcc = find_nvcc();
    if let Some(nvcc) = &nvcc {
        compile_all(nvcc, &stems, &out);
    }
    let release = nvcc.as_deref().map(release_of);
    fs::write(out.join("kernels.rs"), table(&stems, release.as_deref())).expect("OUT_DIR can be written");
}

/// The kernel files by name, without their ending.
fn kernel_stems() -> Vec<String> {
    let files = fs::read_dir("kernels").expect("the folder kernels is part of the sources");
    let paths = files.flatten().map(|f| f.path()).filter(|p| p.extension().is_some_and(|e| e == "cu"));
    let mut stems: Vec<String> = paths.filter_map(|p| Some(p.file_stem()?.to_str()?.to_owned())).collect();
    stems.sort();
    stems
}

/// The text of `path` with each included file pasted in at its first mention.
fn with_includes(path: &Path, pasted: &mut Vec<String>) -> String {
    let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut all = String::with_capacity(text.len());
    for line in text.lines() {
        match line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"')) {
            Some(name) if pasted.iter().any(|p| p == name) => {}
            Some(name) => {
                pasted.push(name.to_owned());
                all += &with_includes(&Path::new("kernels").join(name), pasted);
            }
            // Files are pasted once anyway, and the pragma means nothing in a main file.
            None if line == "#pragma once" => {}
            None => {
                all += line;
                all.push('\n');
            }
        }
    }
    all
}

/// nvcc as DS4_NVCC, CUDA_HOME or PATH give it, if it knows all targets.
fn find_nvcc() -> Option<PathBuf> {
    let named = env::var_os("DS4_NVCC").filter(|v| !v.is_empty()).map(PathBuf::from);
    if let Some(path) = &named {
        assert!(path.is_file(), "DS4_NVCC is {}, which is no file; unset it or name the compiler", path.display());
    }
    let home = env::var_os("CUDA_HOME").map(|home| Path::new(&home).join("bin/nvcc"));
    let on_path = env::var_os("PATH").into_iter().flat_map(|p| env::split_paths(&p).collect::<Vec<_>>());
    let candidates = named.into_iter().chain(home).chain(on_path.map(|dir| dir.join("nvcc")));
    let nvcc = candidates.into_iter().find(|path| path.is_file())?;
    let known = Command::new(&nvcc).arg("--list-gpu-arch").output().ok()?;
    let known = String::from_utf8_lossy(&known.stdout).into_owned();
    if known.contains("compute_90") && known.contains("compute_121") {
        return Some(nvcc);
    }
    println!("cargo::warning={} does not know compute_121: kernels are compiled at first use instead", nvcc.display());
    None
}

/// The version of CUDA that `nvcc` belongs to, as "13.0".
fn release_of(nvcc: &Path) -> String {
    let told = Command::new(nvcc).arg("--version").output().map(|out| out.stdout).unwrap_or_default();
    let told = String::from_utf8_lossy(&told).into_owned();
    let number = told.split("release ").nth(1).and_then(|rest| rest.split(',').next());
    number.unwrap_or("of unknown version").to_owned()
}

fn compile_all(nvcc: &Path, stems: &[String], out: &Path) {
    let share = stems.len().div_ceil(PARALLEL);
    thread::scope(|scope| {
        for stems in stems.chunks(share) {
            scope.spawn(|| stems.iter().for_each(|stem| compile(nvcc, stem, out)));
        }
    });
}

/// Compiles one file, unless the same text was compiled by the same compiler before.
fn compile(nvcc: &Path, stem: &str, out: &Path) {
    let text = fs::read_to_string(out.join(format!("{stem}.cu"))).expect("written above");
    let (key, key_path) = (format!("{} {TARGETS:?}\n{text}", nvcc.display()), out.join(format!("{stem}.key")));
    if fs::read_to_string(&key_path).is_ok_and(|kept| kept == key) {
        return;
    }
    let mut command = Command::new(nvcc);
    command.args(["-fatbin", "-std=c++17", "-O3", "-fmad=false", "-Werror", "all-warnings"]);
    TARGETS.iter().for_each(|target| _ = command.args(["-gencode", target]));
    command.arg("-o").arg(out.join(format!("{stem}.fatbin"))).arg(format!("kernels/{stem}.cu"));
    let done = command.output().unwrap_or_else(|e| panic!("{}: {e}", nvcc.display()));
    assert!(done.status.success(), "kernels/{stem}.cu:\n{}", String::from_utf8_lossy(&done.stderr));
    fs::write(key_path, key).expect("OUT_DIR can be written");
}

/// The table that `backend::cuda::modules` includes.
fn table(stems: &[String], release: Option<&str>) -> String {
    let mut text = format!("/// The CUDA that compiled the kernels.\nconst COMPILED_BY: Option<&str> = {release:?};\n");
    text += "pub(super) static KERNEL_FILES: &[KernelFile] = &[\n";
    for stem in stems {
        let fatbin = match release.is_some() {
            true => format!("Some(include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{stem}.fatbin\")))"),
            false => "None".to_owned(),
        };
        text += &format!(
            "    KernelFile {{ stem: \"{stem}\", text: include_str!(concat!(env!(\"OUT_DIR\"), \"/{stem}.cu\")), fatbin: {fatbin} }},\n"
        );
    }
    text + "];\n"
}
