//! The parsed header of a file: metadata plus tensor directory with absolute offsets, and the identity of the file.
//! Owns lookup; never holds tensor data nor an open descriptor.
//! Surprising fact: the identity is taken from the descriptor that was parsed, so a later replacement is noticed.

use std::collections::HashMap;
use std::fs::File;
use std::io::BufReader;
use std::ops::Deref;
use std::path::{Path, PathBuf};

use super::error::GgufError;
use super::metadata::Metadata;
use super::read::parse;
use crate::quant::QuantType;
use crate::storage::reader::FileIdentity;

/// One tensor of the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    pub name: String,
    pub ty: QuantType,
    /// Fastest dimension first: `[in, out]` or `[in, out, experts]`.
    pub dims: Vec<u64>,
    /// Absolute offset in the file, bytes.
    pub offset: u64,
    /// Length, bytes.
    pub bytes: u64,
}

impl TensorInfo {
    /// Values in one row.
    pub fn columns(&self) -> u64 {
        self.dims[0]
    }

    /// Product of all dimensions but the first.
    pub fn rows(&self) -> u64 {
        self.dims[1..].iter().product()
    }
}

/// A parsed and checked header.
#[derive(Clone, Debug)]
pub struct Directory {
    pub(super) version: u32,
    pub(super) alignment: u32,
    pub(super) metadata: Metadata,
    pub(super) tensors: Vec<TensorInfo>,
    pub(super) index: HashMap<String, usize>,
    pub(super) data_start: u64,
    pub(super) file_len: u64,
}

impl Directory {
    /// GGUF version, 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Alignment of tensor offsets, bytes.
    pub fn alignment(&self) -> u32 {
        self.alignment
    }

    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// All tensors in file order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensor_index(name).map(|i| &self.tensors[i])
    }

    /// Position of the tensor of this name in [`Directory::tensors`].
    pub fn tensor_index(&self, name: &str) -> Option<usize> {
        self.index.get(name).copied()
    }

    /// Absolute offset of the first byte after header and padding.
    pub fn data_start(&self) -> u64 {
        self.data_start
    }

    /// Length of the file when it was parsed, bytes.
    pub fn file_len(&self) -> u64 {
        self.file_len
    }
}

/// A parsed file. Everything of its [`Directory`] is available on it.
#[derive(Clone, Debug)]
pub struct GgufFile {
    directory: Directory,
    path: PathBuf,
    identity: FileIdentity,
}

impl GgufFile {
    /// Parses the header of the file at `path`.
    ///
    /// # Errors
    /// `GgufError::In` with the path around what is wrong.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, GgufError> {
        let path = path.as_ref();
        let inside = |source: GgufError| GgufError::In { path: path.to_owned(), source: Box::new(source) };
        let io = |doing| move |source| inside(GgufError::Io { doing, source });
        // Opening a pipe would wait for its writer.
        if std::fs::metadata(path).is_ok_and(|m| !m.is_file() && !m.is_dir()) {
            return Err(io("cannot open")(std::io::Error::other("not a regular file")));
        }
        let file = File::open(path).map_err(io("cannot open"))?;
        let identity = FileIdentity::of(&file).map_err(io("cannot stat"))?;
        let directory = parse(BufReader::with_capacity(1 << 18, file), identity.len).map_err(inside)?;
        Ok(Self { directory, path: path.to_owned(), identity })
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file that was parsed.
    pub fn identity(&self) -> FileIdentity {
        self.identity
    }
}

impl Deref for GgufFile {
    type Target = Directory;

    fn deref(&self) -> &Directory {
        &self.directory
    }
}
