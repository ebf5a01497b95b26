//! The writer: header from metadata and tensor list, then tensor data in order, then one rename.
//! Owns the temporary file beside the target; must never put half a file under the final name.
//! Surprising fact: the header it makes is read back by the parser before a byte is written, so both share one rule book.

use std::fs::File;
use std::io::{BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use tempfile::NamedTempFile;

use super::directory::{Directory, TensorInfo};
use super::error::GgufError;
use super::metadata::Metadata;
use super::read::parse;
use super::value::{Scalar, put_name};
use super::{DEFAULT_ALIGNMENT, MAGIC, VERSION};
use crate::quant::QuantType;
use crate::storage::part_file;

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    pub name: String,
    pub ty: QuantType,
    /// Fastest dimension first.
    pub dims: Vec<u64>,
}

impl TensorSpec {
    /// Bytes of the whole tensor, `None` if rows are not whole blocks or the size overflows.
    fn bytes(&self) -> Option<u64> {
        let (columns, rest) = self.dims.split_first()?;
        rest.iter().try_fold(self.ty.row_bytes(*columns)?, |a, &d| a.checked_mul(d))
    }
}

/// A planned file: the header is done, no byte is on disk.
#[derive(Debug)]
pub struct GgufWriter {
    header: Vec<u8>,
    directory: Directory,
    /// By tensor: whether it is written itself, not through the tensor whose range it shares.
    is_stored: Vec<bool>,
}

impl GgufWriter {
    /// Lays out a file of these tensors in this order. `general.alignment` in `metadata` sets the alignment.
    ///
    /// # Errors
    /// Whatever the parser would refuse in such a file.
    pub fn new(metadata: &Metadata, tensors: &[TensorSpec]) -> Result<Self, GgufError> {
        Self::with_shared(metadata, tensors, &vec![None; tensors.len()])
    }

    /// As [`GgufWriter::new`]; a tensor with an entry in `shared` takes the range of that earlier tensor and is not written
    /// itself. `metadata` says so with [`SHARED_RANGES`](super::SHARED_RANGES).
    ///
    /// # Errors
    /// As [`GgufWriter::new`]; `Overlap` where the two tensors differ in type or dimensions.
    pub fn with_shared(
        metadata: &Metadata,
        tensors: &[TensorSpec],
        shared: &[Option<usize>],
    ) -> Result<Self, GgufError> {
        assert_eq!(tensors.len(), shared.len(), "one entry a tensor");
        // A bad alignment is reported by the parser below; any value serves until then.
        let alignment = match metadata.u32("general.alignment") {
            Ok(0) | Err(_) => u64::from(DEFAULT_ALIGNMENT),
            Ok(a) => u64::from(a),
        };
        let mut header = Vec::new();
        header.extend_from_slice(&MAGIC);
        VERSION.put(&mut header);
        (tensors.len() as u64).put(&mut header);
        (metadata.len() as u64).put(&mut header);
        for (key, value) in metadata.iter() {
            put_name(key, &mut header);
            value.put(&mut header);
        }
        let mut data_len = 0u64;
        let mut offsets = Vec::with_capacity(tensors.len());
        for (tensor, shared) in tensors.iter().zip(shared) {
            put_name(&tensor.name, &mut header);
            (tensor.dims.len() as u32).put(&mut header);
            tensor.dims.iter().for_each(|d| d.put(&mut header));
            tensor.ty.ggml_id().put(&mut header);
            let offset = shared.map_or(data_len, |earlier| offsets[earlier]);
            offset.put(&mut header);
            offsets.push(offset);
            if shared.is_some() {
                continue;
            }
            let overflow = || GgufError::SizeOverflow { tensor: tensor.name.clone(), dims: tensor.dims.clone() };
            // Rows that are not whole blocks: reported by the parser below with the better message.
            let bytes = tensor.bytes().unwrap_or(0);
            let end = data_len.checked_add(bytes).and_then(|e| e.checked_next_multiple_of(alignment));
            data_len = end.ok_or_else(overflow)?;
        }
        let data_start = (header.len() as u64).next_multiple_of(alignment);
        header.resize(data_start as usize, 0);
        let file_len = data_start.saturating_add(data_len);
        let directory = parse(header.as_slice(), file_len)?;
        Ok(Self { header, directory, is_stored: shared.iter().map(Option::is_none).collect() })
    }

    /// What a reader of the finished file will see.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// All bytes before the tensor data.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// Opens a temporary file beside `path` and writes the header.
    ///
    /// # Errors
    /// `Exists` unless `force`, `NoSpace` when the file system cannot hold the whole file, `Io`.
    pub fn create(self, path: &Path, force: bool) -> Result<GgufOutput, GgufError> {
        if !force && path.symlink_metadata().is_ok() {
            return Err(GgufError::Exists { path: path.to_owned() });
        }
        let io = |source| in_file(path, "cannot create", source);
        let folder = match path.parent() {
            Some(p) if !p.as_os_str().is_empty() => p,
            _ => Path::new("."),
        };
        let temporary = part_file::begin(path).map_err(io)?;
        reserve(temporary.as_file(), path, self.directory.file_len)?;
        let stored = self.directory.tensors.into_iter().zip(self.is_stored).filter(|(_, is_stored)| *is_stored);
        let mut out = GgufOutput {
            file: BufWriter::with_capacity(1 << 20, temporary),
            path: path.to_owned(),
            folder: folder.to_owned(),
            force,
            tensors: stored.map(|(tensor, _)| tensor).collect(),
            next: 0,
            written: 0,
            position: 0,
            file_len: self.directory.file_len,
        };
        out.put(&self.header)?;
        Ok(out)
    }
}

fn in_file(path: &Path, doing: &'static str, source: std::io::Error) -> GgufError {
    GgufError::In { path: path.to_owned(), source: Box::new(GgufError::Io { doing, source }) }
}

/// Takes the space up front, so that a full disk is known before hours of work.
fn reserve(file: &File, path: &Path, bytes: u64) -> Result<(), GgufError> {
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
        Ok(()) => Ok(()),
        // File systems that cannot reserve simply fail later, at the write.
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Ok(()),
        Err(source) => Err(GgufError::NoSpace { path: path.to_owned(), bytes, source: source.into() }),
    }
}

/// A file being written. Dropped before [`GgufOutput::finish`], it removes what it wrote.
#[derive(Debug)]
pub struct GgufOutput {
    file: BufWriter<NamedTempFile>,
    path: PathBuf,
    folder: PathBuf,
    force: bool,
    tensors: Vec<TensorInfo>,
    /// Tensors begun so far.
    next: usize,
    /// Bytes of the current tensor.
    written: u64,
    /// Bytes of the file.
    position: u64,
    file_len: u64,
}

impl GgufOutput {
    fn put(&mut self, bytes: &[u8]) -> Result<(), GgufError> {
        self.file.write_all(bytes).map_err(|source| in_file(&self.path, "cannot write", source))?;
        self.position += bytes.len() as u64;
        Ok(())
    }

    fn pad_to(&mut self, offset: u64) -> Result<(), GgufError> {
        const ZEROS: [u8; 4096] = [0; 4096];
        while self.position < offset {
            let n = (offset - self.position).min(ZEROS.len() as u64) as usize;
            self.put(&ZEROS[..n])?;
        }
        Ok(())
    }

    fn check_complete(&self) -> Result<(), GgufError> {
        match self.next.checked_sub(1).map(|i| &self.tensors[i]) {
            Some(t) if t.bytes != self.written => {
                Err(GgufError::WriteLength { tensor: t.name.clone(), expected: t.bytes, written: self.written })
            }
            _ => Ok(()),
        }
    }

    /// Starts the next tensor, which must be `name`.
    ///
    /// # Errors
    /// `WriteOrder`, `WriteLength` when the tensor before it is not complete, `Io`.
    pub fn begin(&mut self, name: &str) -> Result<(), GgufError> {
        self.check_complete()?;
        match self.tensors.get(self.next) {
            Some(t) if t.name == name => self.pad_to(t.offset)?,
            other => {
                let expected = other.map_or("the end", |t| &t.name).to_owned();
                return Err(GgufError::WriteOrder { expected, found: name.into() });
            }
        }
        self.next += 1;
        self.written = 0;
        Ok(())
    }

    /// Appends data of the current tensor.
    ///
    /// # Errors
    /// `WriteLength` when it would grow past its size, `Io`.
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), GgufError> {
        let Some(tensor) = self.next.checked_sub(1).map(|i| &self.tensors[i]) else {
            return Err(GgufError::WriteOrder { expected: "begin".into(), found: "data".into() });
        };
        let written = self.written + bytes.len() as u64;
        if written > tensor.bytes {
            return Err(GgufError::WriteLength { tensor: tensor.name.clone(), expected: tensor.bytes, written });
        }
        self.put(bytes)?;
        self.written = written;
        Ok(())
    }

    /// Pads, flushes to disk and gives the file its final name.
    ///
    /// # Errors
    /// `WriteLength` or `WriteOrder` when data is missing, `Exists`, `Io`. The target is untouched then.
    pub fn finish(mut self) -> Result<(), GgufError> {
        self.check_complete()?;
        if let Some(t) = self.tensors.get(self.next) {
            return Err(GgufError::WriteOrder { expected: t.name.clone(), found: "the end".into() });
        }
        self.pad_to(self.file_len)?;
        let path = self.path;
        let io = |source| in_file(&path, "cannot finish", source);
        let temporary = self.file.into_inner().map_err(|e| io(e.into_error()))?;
        temporary.as_file().sync_all().map_err(io)?;
        let renamed = if self.force { temporary.persist(&path) } else { temporary.persist_noclobber(&path) };
        renamed.map_err(|e| match e.error.kind() {
            ErrorKind::AlreadyExists => GgufError::Exists { path: path.clone() },
            _ => io(e.error),
        })?;
        // The rename itself is only safe once the folder is on disk too.
        File::open(&self.folder).and_then(|f| f.sync_all()).map_err(io)
    }
}
