//! The model file as readers hold it: two descriptors, the alignment of direct reads, and its identity.
//! Never caches a byte. Surprising fact: the stated alignment is tried with one real read before it is believed.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::storage::reader::align::{Alignment, DestRegion};
use crate::storage::reader::request::{FileChange, Lane};

/// Why a file cannot be read from.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("cannot open {}: {source}", path.display())]
    Open { path: PathBuf, source: std::io::Error },
    #[error("cannot use {}: it is not a regular file", path.display())]
    NotAFile { path: PathBuf },
    #[error("cannot use {}: {change} between two openings; start again when the file is at rest", path.display())]
    Changed { path: PathBuf, change: FileChange },
    #[error("--direct on: direct reads of {} are refused: {cause}; use --direct auto or off", path.display())]
    DirectRefused { path: PathBuf, cause: String },
    #[error("--io uring: io_uring is refused: {cause}; use --io auto or pread")]
    UringRefused { cause: String },
    #[error("cannot start reader threads: {source}")]
    Threads { source: std::io::Error },
}

/// What makes a file the same file: a change of any of these while it is in use makes its bytes suspect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileIdentity {
    pub device: u64,
    pub inode: u64,
    pub len: u64,
    /// Time of the last write, nanoseconds since 1970.
    pub modified_ns: i128,
}

impl FileIdentity {
    /// Identity behind an open descriptor.
    pub fn of(file: &File) -> std::io::Result<Self> {
        Ok(Self::from_metadata(&file.metadata()?))
    }

    fn from_metadata(m: &std::fs::Metadata) -> Self {
        let modified_ns = i128::from(m.mtime()) * 1_000_000_000 + i128::from(m.mtime_nsec());
        Self { device: m.dev(), inode: m.ino(), len: m.len(), modified_ns }
    }

    /// Whether `now` is the same file in the same state.
    pub fn compare(&self, now: &Self) -> Result<(), FileChange> {
        let (was_len, now_len) = (self.len, now.len);
        if (self.device, self.inode) != (now.device, now.inode) {
            Err(FileChange::Replaced)
        } else if now_len < was_len {
            Err(FileChange::Shortened { was: was_len, now: now_len })
        } else if now_len > was_len {
            Err(FileChange::Grew { was: was_len, now: now_len })
        } else if self.modified_ns != now.modified_ns {
            Err(FileChange::Modified)
        } else {
            Ok(())
        }
    }

    /// Whether the file at `path` is still this one, unchanged (one `stat`).
    pub fn check_path(&self, path: &Path) -> Result<(), FileChange> {
        match std::fs::metadata(path) {
            Ok(m) => self.compare(&Self::from_metadata(&m)),
            Err(_) => Err(FileChange::Deleted),
        }
    }
}

/// An open model file: one descriptor for bulk reads and one for row tables, both read-only and close-on-exec.
#[derive(Debug)]
pub struct ModelFile {
    pub path: Arc<Path>,
    bulk: File,
    rows: File,
    pub identity: FileIdentity,
    /// `Alignment::NONE` when reads are buffered.
    pub alignment: Alignment,
}

impl ModelFile {
    /// Opens for buffered reads.
    pub fn open_buffered(path: &Path) -> Result<Self, OpenError> {
        Self::open_both(path, 0, Alignment::NONE)
    }

    /// Opens for reads that bypass the page cache, or says why the system refuses them.
    pub fn open_direct(path: &Path) -> Result<Self, OpenError> {
        let refused = |cause: String| OpenError::DirectRefused { path: path.to_owned(), cause };
        let file = match open_with(path, libc::O_DIRECT) {
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                return Err(refused("the file system does not support O_DIRECT".into()));
            }
            Err(source) => return Err(OpenError::Open { path: path.to_owned(), source }),
            Ok(file) => file,
        };
        let alignment = direct_alignment(&file).map_err(refused)?;
        Self::open_both(path, libc::O_DIRECT, alignment)
    }

    fn open_both(path: &Path, flags: i32, alignment: Alignment) -> Result<Self, OpenError> {
        let fail = |source| OpenError::Open { path: path.to_owned(), source };
        let bulk = open_with(path, flags).map_err(fail)?;
        let metadata = bulk.metadata().map_err(fail)?;
        if metadata.is_dir() {
            return Err(OpenError::NotAFile { path: path.to_owned() });
        }
        let identity = FileIdentity::from_metadata(&metadata);
        let rows = open_with(path, flags).map_err(fail)?;
        // A second opening by name may meet another file; rows of one model in another would be silent nonsense.
        identity
            .compare(&FileIdentity::of(&rows).map_err(fail)?)
            .map_err(|change| OpenError::Changed { path: path.to_owned(), change })?;
        // Advice only: rows are random, so read-ahead would multiply the bytes read.
        let _ = rustix::fs::fadvise(&rows, 0, None, rustix::fs::Advice::Random);
        Ok(Self { path: path.into(), bulk, rows, identity, alignment })
    }

    /// The descriptor that serves `lane`.
    pub fn descriptor(&self, lane: Lane) -> &File {
        match lane {
            Lane::Bulk => &self.bulk,
            Lane::Rows => &self.rows,
        }
    }

    /// Whether the file is still the one that was opened: the descriptor's length and the name's target.
    pub fn check(&self) -> Result<(), FileChange> {
        match FileIdentity::of(&self.bulk) {
            Ok(now) => self.identity.compare(&now)?,
            Err(_) => return Err(FileChange::Deleted),
        }
        self.identity.check_path(&self.path)
    }
}

fn open_with(path: &Path, flags: i32) -> std::io::Result<File> {
    OpenOptions::new().read(true).custom_flags(flags | libc::O_CLOEXEC).open(path)
}

/// The alignment of direct reads: as the file system states it, else the smallest that a trial read accepts.
fn direct_alignment(file: &File) -> Result<Alignment, String> {
    let page = rustix::param::page_size() as u32;
    let mut candidates = Vec::with_capacity(3);
    if let Some((offset, memory)) = stated_alignment(file) {
        if offset == 0 {
            return Err("the file system states that this file takes no direct reads".into());
        }
        candidates.push(Alignment { offset, memory });
    }
    candidates.extend([512, 4096].map(|align| Alignment { offset: align, memory: align }));
    let mut cause = String::from("no alignment up to a page was accepted");
    for alignment in candidates {
        let (offset, memory) = (alignment.offset, alignment.memory);
        if !offset.is_power_of_two() || !memory.is_power_of_two() || memory > page || offset > 1 << 16 {
            cause = format!("it asks for an alignment of {offset} bytes in the file and {memory} in memory");
            continue;
        }
        match try_direct_read(file, alignment) {
            Ok(()) => return Ok(alignment),
            Err(e) => cause = e.to_string(),
        }
    }
    Err(cause)
}

/// `statx` alignment of direct reads: `(file offset, memory)`; `None` where kernel or file system do not state it.
#[cfg(target_os = "linux")]
fn stated_alignment(file: &File) -> Option<(u32, u32)> {
    use rustix::fs::{AtFlags, StatxFlags};
    let stat = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    if stat.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return None;
    }
    Some((stat.stx_dio_offset_align, stat.stx_dio_mem_align.max(1)))
}

#[cfg(not(target_os = "linux"))]
fn stated_alignment(_file: &File) -> Option<(u32, u32)> {
    None
}

/// Reads one block at the first offset that tells this alignment from a coarser one.
fn try_direct_read(file: &File, alignment: Alignment) -> std::io::Result<()> {
    let block = alignment.offset as usize;
    let mut region = DestRegion::anonymous(2 * 4096 + block)?;
    // An address that is a multiple of the stated memory alignment and of nothing coarser.
    let at = (alignment.memory as usize).min(4096);
    file.read_at(&mut region.bytes_mut()[at..at + block], u64::from(alignment.offset)).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_pseudo_file_refuses_direct_reads_by_name() {
        // procfs files have no direct read path.
        let error = ModelFile::open_direct(Path::new("/proc/version")).unwrap_err();
        assert!(matches!(error, OpenError::DirectRefused { .. }), "{error}");
        assert!(error.to_string().contains("/proc/version"));
    }

    #[test]
    fn missing_files_and_directories_are_named() {
        for (path, open) in [
            ("/no/such/file", ModelFile::open_buffered as fn(&Path) -> _),
            ("/proc", ModelFile::open_buffered),
            ("/no/such/file", ModelFile::open_direct),
        ] {
            let error = open(Path::new(path)).unwrap_err().to_string();
            assert!(error.contains(path), "{error}");
        }
    }

    #[test]
    fn changes_of_the_file_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model");
        let write = |bytes: &[u8]| std::fs::write(&path, bytes).unwrap();
        write(&[1; 5000]);
        let file = ModelFile::open_buffered(&path).unwrap();
        assert_eq!(file.check(), Ok(()));

        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(4000).unwrap();
        assert_eq!(file.check(), Err(FileChange::Shortened { was: 5000, now: 4000 }));
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(6000).unwrap();
        assert_eq!(file.check(), Err(FileChange::Grew { was: 5000, now: 6000 }));

        let file = ModelFile::open_buffered(&path).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20));
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().write_all(&[9]).unwrap();
        assert_eq!(file.check(), Err(FileChange::Modified));

        let file = ModelFile::open_buffered(&path).unwrap();
        std::fs::rename(&path, dir.path().join("away")).unwrap();
        assert_eq!(file.check(), Err(FileChange::Deleted));
        write(&[1; 6000]);
        assert_eq!(file.check(), Err(FileChange::Replaced));
    }
}
