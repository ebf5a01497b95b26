//! GGUF files: header, metadata, tensor directory, and a writer that never leaves half a file behind.
//! Owns the byte format and its limits; never reads tensor data and never interprets an architecture's keys.
//! Surprising fact: tensor offsets in the file are relative to the end of the header; everything here is absolute.

mod directory;
mod error;
mod metadata;
mod read;
mod value;
mod write;

pub use directory::{Directory, GgufFile, TensorInfo};
pub use error::{GgufError, MetadataError};
pub use metadata::Metadata;
pub use read::parse;
pub use value::{Array, StringArray, Value};
pub use write::{GgufOutput, GgufWriter, TensorSpec};

/// Limits of a header. Each is a few hundred times what the largest published file needs, and small enough that a
/// lying count cannot make the process take memory that matters.
pub mod limits {
    /// Bytes of the whole header (V4.1 with its vocabulary: 11 MiB).
    pub const HEADER_BYTES_MAX: u64 = 256 << 20;
    /// Metadata entries.
    pub const KEYS_MAX: u64 = 1 << 16;
    /// Bytes of a metadata key (the format's own limit).
    pub const KEY_BYTES_MAX: u64 = 65_535;
    /// Bytes of one string value.
    pub const STRING_BYTES_MAX: u64 = 16 << 20;
    /// Elements of an array.
    pub const ARRAY_LEN_MAX: u64 = 1 << 24;
    /// Tensors in the directory.
    pub const TENSORS_MAX: u64 = 1 << 17;
    /// Bytes of a tensor name.
    pub const NAME_BYTES_MAX: u64 = 256;
    /// Dimensions of a tensor (the format's own limit).
    pub const DIMS_MAX: u32 = 4;
    /// Largest `general.alignment`.
    pub const ALIGNMENT_MAX: u32 = 1 << 20;
}

/// Alignment of tensor data in a file without `general.alignment`.
pub const DEFAULT_ALIGNMENT: u32 = 32;

/// Key (bool) of a file whose tensors may share a range of the file, if they agree in type and dimensions. Without it any
/// overlap is damage.
pub const SHARED_RANGES: &str = "ds4.shared_ranges";

pub(crate) const MAGIC: [u8; 4] = *b"GGUF";
pub(crate) const VERSION: u32 = 3;
