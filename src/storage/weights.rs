//! Tensors that stay in memory: read once at start into one anonymous mapping, 64-byte aligned each. Owns that memory;
//! never reads again later. Surprising fact: nothing is mapped from the file, so a file that shrinks afterwards cannot kill the process.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use memmap2::{Mmap, MmapMut};
use parking_lot::Mutex;

use crate::storage::layout::Extent;
use crate::storage::reader::{FileChange, FileIdentity, OpenError};
use crate::units::Bytes;

/// Every tensor starts at a multiple of this: a cache line, and the widest vector register.
pub const TENSOR_ALIGN: usize = 64;
/// Bytes of one read: large enough for the drive, small enough to share among threads and to show progress.
const CHUNK_BYTES: usize = 4 << 20;

/// Why the resident weights could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("the resident tensors need {bytes} bytes, which this machine cannot address")]
    TooLarge { bytes: u128 },
    #[error("no memory for {bytes} of resident tensors ({source}); free memory or use a smaller quantisation")]
    Memory { bytes: Bytes, source: std::io::Error },
    #[error("cannot read tensor {tensor} (offset {offset} of {}): {source}; check the drive (dmesg)", path.display())]
    Read { path: PathBuf, tensor: String, offset: u64, source: std::io::Error },
    #[error("tensor {tensor} is cut off: {} ends at byte {offset}; it was shortened or is incomplete, fetch it again", path.display())]
    EndOfFile { path: PathBuf, tensor: String, offset: u64 },
    #[error("{} changed while it was loaded: {change}; start again when the file is at rest", path.display())]
    Changed { path: PathBuf, change: FileChange },
    #[error("cannot start loading threads: {source}")]
    Threads { source: std::io::Error },
}

/// A tensor to load.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorExtent {
    pub name: String,
    pub extent: Extent,
}

/// How to load.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LoadOptions {
    /// Reads at once.
    pub threads: usize,
    /// Gives the file's pages back to the system as they are copied: for files larger than memory, where they would push
    /// out something useful.
    pub drop_page_cache: bool,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self { threads: 8, drop_page_cache: false }
    }
}

/// The resident tensors of one file.
pub struct ResidentWeights {
    arena: Mmap,
    /// Start and length in the arena, in the order given to `load`.
    spans: Vec<(usize, usize)>,
    by_name: HashMap<String, usize>,
    identity: FileIdentity,
}

/// A part of one tensor on its way.
struct Chunk<'a> {
    tensor: usize,
    offset: u64,
    bytes: &'a mut [u8],
}

impl ResidentWeights {
    /// Reads `tensors` of the file at `path`. `progress` is called with bytes done and bytes in all: first with 0, then from
    /// several threads (a smaller number may follow a larger one), last with all. Extents come from the file's directory and may lie anywhere, in any order.
    pub fn load(
        path: &Path,
        tensors: &[TensorExtent],
        options: &LoadOptions,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Self, WeightsError> {
        let open_error = |source| OpenError::Open { path: path.to_owned(), source };
        let file = File::open(path).map_err(open_error)?;
        let identity = FileIdentity::of(&file).map_err(open_error)?;
        // Before any memory is taken: a hostile directory must not make the process ask for more than the file holds.
        for TensorExtent { name, extent } in tensors {
            if extent.offset.checked_add(extent.len).is_none_or(|end| end > identity.len) {
                let (path, tensor) = (path.to_owned(), name.clone());
                return Err(WeightsError::EndOfFile { path, tensor, offset: identity.len });
            }
        }
        let (spans, arena_bytes) = place(tensors)?;
        let memory_error = |source| WeightsError::Memory { bytes: Bytes(arena_bytes as u64), source };
        let mut arena = MmapMut::map_anon(arena_bytes.max(1)).map_err(memory_error)?;
        // Advice only: fewer page faults and TLB misses where the system grants it.
        #[cfg(target_os = "linux")]
        let _ = arena.advise(memmap2::Advice::HugePage);

        let load = Load::new(path, &file, tensors, options, progress);
        load.run(chunks(&mut arena, tensors, &spans))?;
        let now = FileIdentity::of(&file).map_err(open_error)?;
        identity.compare(&now).map_err(|change| WeightsError::Changed { path: path.to_owned(), change })?;
        let by_name = tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
        Ok(Self { arena: arena.make_read_only().map_err(memory_error)?, spans, by_name, identity })
    }

    /// Bytes of tensor `name`; `None` when it was not among those loaded.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        self.by_name.get(name).map(|&index| self.tensor(index))
    }

    /// Position of tensor `name` in the list given to `load`, if it was there.
    pub fn index(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// Bytes of the tensor at `index` of the list given to `load`. Panics when there are fewer.
    pub fn tensor(&self, index: usize) -> &[u8] {
        let (start, len) = self.spans[index];
        &self.arena[start..start + len]
    }

    /// Everything that was loaded, in file order, padding included.
    pub fn all(&self) -> &[u8] {
        &self.arena
    }

    /// Number of tensors.
    pub fn tensors(&self) -> usize {
        self.spans.len()
    }

    /// Memory held, padding included.
    pub fn memory(&self) -> Bytes {
        Bytes(self.arena.len() as u64)
    }

    /// The file they came from, to be compared with what a reader has open.
    pub fn identity(&self) -> &FileIdentity {
        &self.identity
    }
}

/// Where each tensor lies in the arena, and the arena's bytes.
fn place(tensors: &[TensorExtent]) -> Result<(Vec<(usize, usize)>, usize), WeightsError> {
    let align = TENSOR_ALIGN as u128;
    let total: u128 = tensors.iter().map(|t| u128::from(t.extent.len).next_multiple_of(align)).sum();
    if total > isize::MAX as u128 {
        return Err(WeightsError::TooLarge { bytes: total });
    }
    let mut at = 0usize;
    let spans = tensors
        .iter()
        .map(|t| {
            let span = (at, t.extent.len as usize);
            at += span.1.next_multiple_of(TENSOR_ALIGN);
            span
        })
        .collect();
    Ok((spans, at))
}

/// Cuts the arena into chunks, none across two tensors, by rising file offset.
fn chunks<'a>(arena: &'a mut [u8], tensors: &[TensorExtent], spans: &[(usize, usize)]) -> Vec<Chunk<'a>> {
    let mut chunks = Vec::new();
    let mut rest = arena;
    for (tensor, (t, &(_, len))) in tensors.iter().zip(spans).enumerate() {
        let (padded, behind) = rest.split_at_mut(len.next_multiple_of(TENSOR_ALIGN));
        rest = behind;
        let mut offset = t.extent.offset;
        for bytes in padded[..len].chunks_mut(CHUNK_BYTES) {
            let len = bytes.len() as u64;
            chunks.push(Chunk { tensor, offset, bytes });
            offset += len;
        }
    }
    chunks.sort_by_key(|chunk| chunk.offset);
    chunks
}

/// One load under way: what its threads share.
struct Load<'a> {
    path: &'a Path,
    file: &'a File,
    tensors: &'a [TensorExtent],
    options: &'a LoadOptions,
    progress: &'a (dyn Fn(u64, u64) + Sync),
    done_bytes: AtomicU64,
    total_bytes: u64,
    failed: AtomicBool,
}

impl<'a> Load<'a> {
    fn new(
        path: &'a Path,
        file: &'a File,
        tensors: &'a [TensorExtent],
        options: &'a LoadOptions,
        progress: &'a (dyn Fn(u64, u64) + Sync),
    ) -> Self {
        let total_bytes = tensors.iter().map(|t| t.extent.len).sum();
        let (done_bytes, failed) = (AtomicU64::new(0), AtomicBool::new(false));
        Self { path, file, tensors, options, progress, done_bytes, total_bytes, failed }
    }

    fn run(&self, chunks: Vec<Chunk<'_>>) -> Result<(), WeightsError> {
        (self.progress)(0, self.total_bytes);
        let threads = self.options.threads.clamp(1, chunks.len().max(1));
        let queue = Mutex::new(chunks.into_iter());
        std::thread::scope(|scope| {
            let mut workers = Vec::with_capacity(threads);
            for index in 0..threads {
                let queue = &queue;
                let builder = std::thread::Builder::new().name(format!("ds4-load-{index}"));
                let spawned = builder.spawn_scoped(scope, move || self.work(queue));
                workers.push(spawned.map_err(|source| {
                    self.failed.store(true, Ordering::Relaxed);
                    WeightsError::Threads { source }
                })?);
            }
            let ends = workers.into_iter().map(|worker| worker.join().expect("loading does not panic"));
            ends.fold(Ok(()), Result::and)
        })?;
        (self.progress)(self.total_bytes, self.total_bytes);
        Ok(())
    }

    fn work(&self, queue: &Mutex<std::vec::IntoIter<Chunk<'_>>>) -> Result<(), WeightsError> {
        while !self.failed.load(Ordering::Relaxed) {
            let Some(chunk) = queue.lock().next() else { break };
            let len = chunk.bytes.len() as u64;
            if let Err(error) = self.read(chunk) {
                self.failed.store(true, Ordering::Relaxed);
                return Err(error);
            }
            let done = self.done_bytes.fetch_add(len, Ordering::Relaxed) + len;
            if done < self.total_bytes {
                (self.progress)(done, self.total_bytes);
            }
        }
        Ok(())
    }

    fn read(&self, chunk: Chunk<'_>) -> Result<(), WeightsError> {
        let Chunk { tensor, offset: start, bytes } = chunk;
        let name = || (self.path.to_owned(), self.tensors[tensor].name.clone());
        let mut done = 0;
        while done < bytes.len() {
            let offset = start + done as u64;
            match rustix::io::pread(self.file, &mut bytes[done..], offset) {
                Ok(0) => {
                    let (path, tensor) = name();
                    return Err(WeightsError::EndOfFile { path, tensor, offset });
                }
                Ok(count) => done += count,
                Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
                Err(errno) => {
                    let (path, tensor) = name();
                    return Err(WeightsError::Read { path, tensor, offset, source: errno.into() });
                }
            }
        }
        if self.options.drop_page_cache {
            let len = std::num::NonZeroU64::new(bytes.len() as u64);
            // Advice only: the copy is made either way.
            let _ = rustix::fs::fadvise(self.file, start, len, rustix::fs::Advice::DontNeed);
        }
        Ok(())
    }
}
