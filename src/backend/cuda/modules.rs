//! The kernels of this program on one device: compiled ones from the binary, else their text compiled by NVRTC and kept on disk.
//! Never falls back in silence: what was done is told by `origin`. Surprising fact: all kernels are loaded when the device is opened, so
//! that a driver which cannot run one says so before any weight is read.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;

use cudarc::driver::{result, sys};
use cudarc::nvrtc;
use xxhash_rust::xxh3::xxh3_128;

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
}

/// Loaded kernels by name.
pub(super) struct Modules {
    functions: HashMap<String, sys::CUfunction>,
    modules: Vec<sys::CUmodule>,
    origin: &'static str,
}

// SAFETY: handles of a context that any thread may use once it has made the context current, which `Device` does.
unsafe impl Send for Modules {}
// SAFETY: as above; the driver locks its own tables.
unsafe impl Sync for Modules {}

impl Modules {
    /// Loads every kernel into the current context.
    pub(super) fn load(capability: (u32, u32), text_only: bool) -> Result<Self, LoadError> {
        let mut all = Self { functions: HashMap::new(), modules: Vec::new(), origin: "compiled with the program" };
        let compiled: Option<Vec<_>> = KERNEL_FILES.iter().map(|file| file.fatbin).collect();
        let reason = match compiled.filter(|_| !text_only) {
            None => "they are not part of this program".to_owned(),
            Some(images) => match all.load_images(&images) {
                Ok(()) => return Ok(all),
                Err(LoadError::Refused { reason, .. }) => reason,
                Err(other) => return Err(other),
            },
        };
        // SAFETY: only looks for the library.
        if !unsafe { nvrtc::sys::is_culib_present() } {
            return Err(LoadError::NoCompiler { reason });
        }
        all.origin = "compiled by NVRTC";
        let images = KERNEL_FILES.iter().map(|file| compiled_text(file, capability)).collect::<Result<Vec<_>, _>>()?;
        all.load_images(&images.iter().map(Vec::as_slice).collect::<Vec<_>>())?;
        Ok(all)
    }

    fn load_images(&mut self, images: &[&[u8]]) -> Result<(), LoadError> {
        let mut version = 0;
        // SAFETY: a pointer that is valid for the call. On an error the version stays 0.
        let _ = unsafe { sys::cuDriverGetVersion(&mut version) };
        let loads_late = version >= FUNC_LOAD_FROM;
        for (file, image) in KERNEL_FILES.iter().zip(images) {
            // SAFETY: a fatbin, or PTX that ends with a zero byte; the driver copies what it needs.
            let module = unsafe { result::module::load_data(image.as_ptr().cast()) };
            let module = module.map_err(|e| LoadError::Refused { stem: file.stem, reason: format!("{e:?}") })?;
            self.modules.push(module);
            for name in kernel_names(file.text) {
                let c_name = std::ffi::CString::new(name.as_str()).expect("names hold no zero byte");
                // SAFETY: the module was loaded just above.
                let function = unsafe { result::module::get_function(module, c_name) };
                let function =
                    function.map_err(|e| LoadError::Refused { stem: file.stem, reason: format!("{name}: {e:?}") })?;
                if loads_late {
                    // A kernel that is loaded at its first launch waits for all that run, and some of them wait for the host.
                    // SAFETY: a function of the module above. A failure shows again at its launch.
                    let _ = unsafe { sys::cuFuncLoad(function) };
                }
                self.functions.insert(name, function);
            }
        }
        Ok(())
    }

    /// The kernel `name`, allowed to use `shared` bytes of dynamic shared memory.
    pub(super) fn function(&self, name: &str, shared: u32) -> sys::CUfunction {
        let function = *self.functions.get(name).unwrap_or_else(|| panic!("no kernel is called {name}"));
        if shared > SHARED_DEFAULT {
            let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: a function of a loaded module. A refusal shows as an error of the launch that follows.
            let _ = unsafe { result::function::set_function_attribute(function, attribute, shared as i32) };
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

/// Names of the kernels in a text: those written out, and those that a macro makes (`NAME(a, ..)` after `#define NAME(..)`).
fn kernel_names(text: &str) -> Vec<String> {
    super::kernel_names::of(text)
}

/// The text of `file` as PTX for `capability`, from the cache of an earlier run if there is one.
fn compiled_text(file: &KernelFile, (major, minor): (u32, u32)) -> Result<Vec<u8>, LoadError> {
    let version = nvrtc_version();
    let key = xxh3_128(format!("{version:?} {major}{minor}\n{}", file.text).as_bytes());
    let kept = cache_folder().map(|folder| folder.join(format!("{}-{key:032x}.ptx", file.stem)));
    if let Some(image) = kept.as_ref().and_then(|path| fs::read(path).ok()).filter(|image| image.ends_with(&[0])) {
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
    if let Some(path) = kept {
        keep(&path, &image);
    }
    Ok(image)
}

fn nvrtc_version() -> (i32, i32) {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both pointers are valid for the call. On an error the version stays 0.0, which only widens the key.
    let _ = unsafe { nvrtc::sys::nvrtcVersion(&mut major, &mut minor) };
    (major, minor)
}

/// `$XDG_CACHE_HOME/ds4/kernels` or `~/.cache/ds4/kernels`.
fn cache_folder() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?;
    Some(cache.join("ds4/kernels"))
}

/// Best effort: without the file the next start compiles again. It appears whole or not at all.
fn keep(path: &std::path::Path, image: &[u8]) {
    let Some(folder) = path.parent() else { return };
    if fs::create_dir_all(folder).is_err() {
        return;
    }
    if let Ok(mut file) = tempfile::NamedTempFile::new_in(folder)
        && std::io::Write::write_all(&mut file, image).is_ok()
    {
        let _ = file.persist(path);
    }
}
