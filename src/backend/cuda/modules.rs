//! The kernels of this program on one device: compiled ones from the binary, else their text compiled by NVRTC and kept on disk.
//! Never falls back in silence: what was done is told by `origin`. Surprising fact: all kernels are loaded when the device is opened, so
//! that a driver which cannot run one says so before any weight is read.

use std::collections::HashMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Once;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use cudarc::nvrtc;
use xxhash_rust::xxh3::xxh3_128;

use super::device::text;
use super::faults::{self, Version};
use crate::sys::user_cache_dir;

/// One file of kernels.
pub(super) struct KernelFile {
    stem: &'static str,
    /// With its includes.
    text: &'static str,
    fatbin: Option<&'static [u8]>,
}

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// Shared memory that a kernel has without being asked for more.
const SHARED_DEFAULT: u32 = 48 << 10;

/// First driver (CUDA 12.4) that can be told to load a kernel before its first launch.
const FUNC_LOAD_FROM: i32 = 12040;

/// Why kernels cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(
        "the compiled kernels do not run on this driver ({reason}), and there is no NVRTC to compile them; update the driver or install libnvrtc"
    )]
    NoCompiler { reason: String },
    #[error("NVRTC does not compile kernels/{stem}.cu: {log}")]
    Compile { stem: &'static str, log: String },
    #[error("the driver does not load kernels/{stem}.cu: {reason}; update the driver")]
    Refused { stem: &'static str, reason: String },
    #[error("the device does not take kernels/{stem}.cu: {reason}; {hint}")]
    Device { stem: &'static str, reason: String, hint: &'static str },
}

/// A kernel.
#[derive(Clone, Copy)]
pub(super) struct Function {
    pub(super) handle: sys::CUfunction,
    /// Whether it may be set up while the one before it still runs.
    pub(super) may_overlap: bool,
}

/// Loaded kernels by name.
pub(super) struct Modules {
    functions: HashMap<String, Function>,
    modules: Vec<sys::CUmodule>,
    origin: &'static str,
    /// Whether the device sets kernels up while others run.
    can_overlap: bool,
}

// SAFETY: handles of a context that any thread may use once it has made the context current, which `Device` does.
unsafe impl Send for Modules {}
// SAFETY: as above; the driver locks its own tables.
unsafe impl Sync for Modules {}

impl Modules {
    /// Loads every kernel into the current context.
    pub(super) fn load(capability: (u32, u32), text_only: bool) -> Result<Self, LoadError> {
        let (functions, modules, can_overlap) = (HashMap::new(), Vec::new(), capability.0 >= 9);
        let mut all = Self { functions, modules, origin: "compiled with the program", can_overlap };
        let compiled: Option<Vec<_>> = KERNEL_FILES.iter().map(|file| file.fatbin).collect();
        let reason = match compiled.filter(|_| !text_only) {
            None => "they are not part of this program".to_owned(),
            Some(images) => match all.load_images(&images) {
                Ok(()) => return Ok(all),
                Err(LoadError::Refused { reason, .. }) => {
                    format!("{reason}; they are of CUDA {}, {}", COMPILED_BY.unwrap_or("?"), offer())
                }
                Err(other) => return Err(other),
            },
        };
        // SAFETY: only looks for the library.
        if !unsafe { nvrtc::sys::is_culib_present() } {
            return Err(LoadError::NoCompiler { reason });
        }
        all.origin = "compiled by NVRTC";
        let images = KERNEL_FILES.iter().map(|file| compiled_text(file, capability)).collect::<Result<Vec<_>, _>>()?;
        let loaded = all.load_images(&images.iter().map(Vec::as_slice).collect::<Vec<_>>());
        loaded.map(|()| all).map_err(|error| match error {
            LoadError::Refused { stem, reason } => {
                let (major, minor) = nvrtc_version();
                LoadError::Refused { stem, reason: format!("{reason}; NVRTC is of CUDA {major}.{minor}, {}", offer()) }
            }
            other => other,
        })
    }

    fn load_images(&mut self, images: &[&[u8]]) -> Result<(), LoadError> {
        let mut version = 0;
        // SAFETY: a pointer that is valid for the call. On an error the version stays 0.
        let _ = unsafe { sys::cuDriverGetVersion(&mut version) };
        let loads_late = version >= FUNC_LOAD_FROM;
        let can_overlap = self.can_overlap;
        for (file, image) in KERNEL_FILES.iter().zip(images) {
            // SAFETY: a fatbin, or PTX that ends with a zero byte; the driver copies what it needs.
            let module = unsafe { result::module::load_data(image.as_ptr().cast()) };
            let module = module.map_err(|e| refused(file.stem, text(e), e))?;
            self.modules.push(module);
            let may_overlap = can_overlap && all_wait(file.text);
            for name in kernel_names(file.text) {
                let c_name = std::ffi::CString::new(name.as_str()).expect("names hold no zero byte");
                // SAFETY: the module was loaded just above.
                let function = unsafe { result::module::get_function(module, c_name) };
                let handle = function.map_err(|e| refused(file.stem, format!("{name}: {}", text(e)), e))?;
                if loads_late {
                    // A kernel that is loaded at its first launch waits for all that run, and some of them wait for the host.
                    // SAFETY: a function of the module above. A failure shows again at its launch.
                    let _ = unsafe { sys::cuFuncLoad(handle) };
                }
                self.functions.insert(name, Function { handle, may_overlap });
            }
        }
        Ok(())
    }

    /// The kernel `name`, allowed to use `shared` bytes of dynamic shared memory.
    pub(super) fn function(&self, name: &str, shared: u32) -> Function {
        let function = *self.functions.get(name).unwrap_or_else(|| panic!("no kernel is called {name}"));
        if shared > SHARED_DEFAULT {
            let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: a function of a loaded module. A refusal shows as an error of the launch that follows.
            let _ = unsafe { result::function::set_function_attribute(function.handle, attribute, shared as i32) };
        }
        function
    }

    pub(super) fn origin(&self) -> &'static str {
        self.origin
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        for module in self.modules.drain(..) {
            // SAFETY: loaded by `load_images`, and no kernel of it is launched again.
            let _ = unsafe { result::module::unload(module) };
        }
    }
}

/// A file that the driver does not load, because of itself or of the device.
fn refused(stem: &'static str, reason: String, error: DriverError) -> LoadError {
    match faults::is_of_the_device(error.0) {
        true => LoadError::Device { stem, reason, hint: faults::use_hint(error.0) },
        false => LoadError::Refused { stem, reason },
    }
}

/// What the driver offers, in words.
fn offer() -> String {
    Version::of_driver().map_or_else(|| "the driver tells no version".to_owned(), |v| format!("the driver offers {v}"))
}

/// Names of the kernels in a text: those written out, and those that a macro makes (`NAME(a, ..)` after `#define NAME(..)`).
fn kernel_names(text: &str) -> Vec<String> {
    super::kernel_names::of(text)
}

/// Whether every kernel of a text begins with `previous_ended()`.
fn all_wait(text: &str) -> bool {
    let mut bodies = text.split("__global__").skip(1);
    let begins = |body: &str| {
        let inside = body.split_once('{').map_or("", |(_, inside)| inside);
        inside.trim_start_matches(|c: char| c.is_whitespace() || c == '\\').starts_with("previous_ended();")
    };
    bodies.all(begins)
}

/// The text of `file` as PTX for `capability`, from the cache of an earlier run if there is one.
fn compiled_text(file: &KernelFile, (major, minor): (u32, u32)) -> Result<Vec<u8>, LoadError> {
    let version = nvrtc_version();
    let key = xxh3_128(format!("{version:?} {major}{minor}\n{}", file.text).as_bytes());
    let kept = cache_folder().map(|folder| folder.join(format!("{}-{key:032x}.ptx", file.stem)));
    if let Some(image) = kept.as_ref().and_then(|path| fs::read(path).ok()).and_then(unsealed) {
        return Ok(image);
    }
    let options = nvrtc::CompileOptions {
        fmad: Some(false),
        // Lambdas carry no annotation; nvcc takes them for device code by themselves, NVRTC only so.
        options: vec![
            "--std=c++17".into(),
            "--device-as-default-execution-space".into(),
            format!("--gpu-architecture=compute_{major}{minor}"),
        ],
        name: Some(format!("{}.cu", file.stem)),
        ..Default::default()
    };
    let failed = |e: nvrtc::CompileError| {
        let log = match e {
            nvrtc::CompileError::CompileError { log, .. } => log.to_string_lossy().into_owned(),
            other => format!("{other:?}"),
        };
        LoadError::Compile { stem: file.stem, log: log.trim().replace('\n', "; ") }
    };
    let ptx = nvrtc::compile_ptx_with_opts(file.text, options).map_err(failed)?;
    let mut image = ptx.as_bytes().expect("a compiled text is an image").to_vec();
    if !image.ends_with(&[0]) {
        image.push(0);
    }
    let told = match kept {
        Some(path) => keep(&path, &image).map_err(|e| format!("{}: {e}", path.display())),
        None => Err("neither XDG_CACHE_HOME nor HOME is set".into()),
    };
    if let Err(reason) = told {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| tracing::warn!("compiled kernels are not kept, so each start compiles them again: {reason}"));
    }
    Ok(image)
}

/// Whether one of the files defines a kernel of this name.
#[cfg(test)]
pub(super) fn defines(kernel: &str) -> bool {
    KERNEL_FILES.iter().any(|file| kernel_names(file.text).iter().any(|name| name == kernel))
}

fn nvrtc_version() -> (i32, i32) {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both pointers are valid for the call. On an error the version stays 0.0, which only widens the key.
    let _ = unsafe { nvrtc::sys::nvrtcVersion(&mut major, &mut minor) };
    (major, minor)
}

/// `$XDG_CACHE_HOME/ds4/kernels` or `~/.cache/ds4/kernels`.
fn cache_folder() -> Option<PathBuf> {
    Some(user_cache_dir()?.join("ds4/kernels"))
}

/// Without the file the next start compiles again. It appears whole or not at all, and whoever reads it sees whether it is what was written.
fn keep(path: &Path, image: &[u8]) -> io::Result<()> {
    let folder = path.parent().expect("a file in a folder");
    fs::create_dir_all(folder)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(&sealed(image))?;
    file.persist(path)?;
    Ok(())
}

/// `image` with its checksum behind it.
fn sealed(image: &[u8]) -> Vec<u8> {
    [image, &xxh3_128(image).to_le_bytes()].concat()
}

/// What was [`sealed`]; `None` of anything else.
fn unsealed(mut bytes: Vec<u8>) -> Option<Vec<u8>> {
    let sum = bytes.split_off(bytes.len().checked_sub(size_of::<u128>())?);
    (xxh3_128(&bytes).to_le_bytes() == *sum && bytes.ends_with(&[0])).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_that_do_not_wait_are_known() {
        let good = "extern \"C\" __global__ void a(int b) {\n    previous_ended();\n    b++;\n}\n\
            #define K(n) extern \"C\" __global__ void k_##n() { \\\n        previous_ended(); \\\n    }\n";
        assert!(all_wait(good));
        assert!(!all_wait(&format!("{good}extern \"C\" __global__ void c() {{\n    int i = 0;\n}}")));
    }

    /// One that does not wait would have to be launched alone, and slows down what is behind it.
    #[test]
    fn all_kernels_wait() {
        let late: Vec<_> = KERNEL_FILES.iter().filter(|file| !all_wait(file.text)).map(|file| file.stem).collect();
        assert!(late.is_empty(), "kernels that do not begin with previous_ended(): {late:?}");
    }
}
