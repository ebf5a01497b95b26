//! Errors of GGUF files: one variant for each way a file can lie, and one for each way metadata can disappoint.
//! Owns the messages; never decides what to do about them.
//! Surprising fact: `GgufError::In` adds the path, because the parser itself also reads plain bytes.

use std::path::PathBuf;

use thiserror::Error;

use crate::quant::QuantType;

/// What is wrong with a GGUF file, or with a request to write one.
#[derive(Debug, Error)]
pub enum GgufError {
    /// Adds the file to an error of its content.
    #[error("{}: {source}", path.display())]
    In { path: PathBuf, source: Box<GgufError> },
    #[error("{doing}: {source}")]
    Io { doing: &'static str, source: std::io::Error },
    #[error("not a GGUF file: it starts with {found:02x?} instead of \"GGUF\"")]
    Magic { found: [u8; 4] },
    #[error("big-endian GGUF (version {version}): convert it to little endian first")]
    BigEndian { version: u32 },
    #[error("GGUF version {found}: versions 2 and 3 can be read")]
    Version { found: u32 },
    #[error("truncated: {what} at offset {offset} needs {need} bytes, {left} are left; the download may be incomplete")]
    Truncated { what: String, offset: u64, need: u64, left: u64 },
    #[error("header larger than {limit} bytes, reached while reading {what} at offset {offset}")]
    HeaderTooLarge { what: String, offset: u64, limit: u64 },
    #[error("{count} {what}: more than the limit of {limit}, so the file is damaged")]
    TooMany { what: String, count: u64, limit: u64 },
    #[error("{what} of {len} bytes at offset {offset}: longer than the limit of {limit}, so the file is damaged")]
    TooLong { what: String, offset: u64, len: u64, limit: u64 },
    #[error("{what} at offset {offset} is not UTF-8")]
    Utf8 { what: String, offset: u64 },
    #[error("an empty {what} at offset {offset}")]
    EmptyName { what: &'static str, offset: u64 },
    #[error("key {key}: unknown value type {found}")]
    ValueType { key: String, found: u32 },
    #[error("key {key}: an array of arrays, which no known model uses, is refused")]
    NestedArray { key: String },
    #[error("key {key}: a boolean is 0 or 1, found {found}")]
    Bool { key: String, found: u8 },
    #[error("key {key} occurs twice")]
    DuplicateKey { key: String },
    #[error("general.alignment is {found}: it must be a power of two up to {limit}")]
    Alignment { found: String, limit: u32 },
    #[error("tensor {tensor}: {found} dimensions, 1 to {limit} are possible")]
    DimCount { tensor: String, found: u32, limit: u32 },
    #[error("tensor {tensor}: dimension {dim} is zero")]
    ZeroDim { tensor: String, dim: usize },
    #[error("tensor {tensor}: dimensions {dims:?} overflow")]
    SizeOverflow { tensor: String, dims: Vec<u64> },
    #[error("tensor {tensor}: type {id}{known} is not supported; convert the file to one of the supported types")]
    TensorType { tensor: String, id: u32, known: &'static str },
    #[error("tensor {tensor}: rows of {columns} values are not whole blocks of {ty} ({block} values)")]
    RowBlocks { tensor: String, ty: QuantType, columns: u64, block: usize },
    #[error("tensor {tensor}: offset {offset} is not a multiple of the alignment {alignment}")]
    Misaligned { tensor: String, offset: u64, alignment: u32 },
    #[error(
        "tensor {tensor}: {bytes} bytes at offset {offset} end past the end of the file ({file_len} bytes); \
         the download may be incomplete"
    )]
    PastEnd { tensor: String, offset: u64, bytes: u64, file_len: u64 },
    #[error("tensors {first} and {second} overlap at offset {offset}")]
    Overlap { first: String, second: String, offset: u64 },
    #[error("tensor {tensor} occurs twice")]
    DuplicateTensor { tensor: String },
    #[error("{} exists already; use --force to replace it", path.display())]
    Exists { path: PathBuf },
    #[error("{}: {bytes} bytes do not fit on this file system: {source}", path.display())]
    NoSpace { path: PathBuf, bytes: u64, source: std::io::Error },
    #[error("tensor data out of order: expected {expected}, got {found}")]
    WriteOrder { expected: String, found: String },
    #[error("tensor {tensor}: {written} of {expected} bytes were written")]
    WriteLength { tensor: String, expected: u64, written: u64 },
}

impl GgufError {
    /// The error below any file names.
    pub fn root(&self) -> &GgufError {
        match self {
            GgufError::In { source, .. } => source.root(),
            other => other,
        }
    }
}

/// What is wrong with one metadata value.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum MetadataError {
    #[error("metadata key {key} is missing")]
    Missing { key: String },
    #[error("metadata key {key} is {found}, expected {expected}")]
    Type { key: String, expected: &'static str, found: &'static str },
    #[error("metadata key {key}: {value} does not fit {expected}")]
    Range { key: String, value: String, expected: &'static str },
}
