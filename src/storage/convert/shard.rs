//! One safetensors file: its header, and reads of tensor bytes by position.
//! Owns the checks of that header; never loads a tensor as a whole unless asked to, never maps the file.
//! Surprising fact: only the header is parsed by the safetensors crate's types, since its own reader wants all bytes.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::Dtype;
use safetensors::tensor::TensorInfo;

use super::error::ConvertError;

/// Largest header read into memory; the format's own limit is 100 MB.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// A file that parts of tensors are read from.
#[derive(Debug)]
pub(super) struct SourceFile {
    file: File,
    path: PathBuf,
}

impl SourceFile {
    pub(super) fn open(path: &Path) -> Result<Arc<Self>, ConvertError> {
        let io = |source| ConvertError::Io { path: path.to_owned(), doing: "cannot open", source };
        // Opening a pipe would wait for a writer.
        if !path.metadata().map_err(io)?.is_file() {
            return Err(io(std::io::Error::other("it is no regular file")));
        }
        Ok(Arc::new(Self { file: File::open(path).map_err(io)?, path: path.to_owned() }))
    }

    /// Fills `out` from `offset`.
    pub(super) fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), ConvertError> {
        self.file.read_exact_at(out, offset).map_err(|source| ConvertError::Io {
            path: self.path.clone(),
            doing: "cannot read tensor data",
            source,
        })
    }
}

/// One tensor of a safetensors file.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) file: Arc<SourceFile>,
    pub(super) dtype: Dtype,
    /// Slowest dimension first, as the format has it.
    pub(super) shape: Vec<u64>,
    /// Absolute offset, bytes.
    pub(super) offset: u64,
    /// Length, bytes.
    pub(super) bytes: u64,
}

/// A parsed safetensors header.
#[derive(Debug)]
pub(super) struct Shard {
    pub(super) tensors: BTreeMap<String, Entry>,
    /// The `__metadata__` strings.
    pub(super) metadata: BTreeMap<String, String>,
}

impl Shard {
    pub(super) fn open(path: &Path) -> Result<Self, ConvertError> {
        let file = SourceFile::open(path)?;
        let header = |problem: String| ConvertError::Header { path: path.to_owned(), problem };
        let len = file.file.metadata().map_err(|e| header(e.to_string()))?.len();
        let mut raw = [0u8; 8];
        file.read(0, &mut raw)?;
        let header_len = u64::from_le_bytes(raw);
        if header_len > HEADER_BYTES_MAX || header_len > len.saturating_sub(8) {
            return Err(header(format!("it claims {header_len} bytes in a file of {len}")));
        }
        let mut text = vec![0u8; header_len as usize];
        file.read(8, &mut text)?;
        let mut json: serde_json::Map<String, serde_json::Value> =
            serde_json::from_slice(&text).map_err(|e| header(e.to_string()))?;
        let metadata = match json.remove("__metadata__") {
            Some(value) => serde_json::from_value(value).map_err(|e| header(e.to_string()))?,
            None => BTreeMap::new(),
        };
        let data_start = 8 + header_len;
        let mut tensors = BTreeMap::new();
        for (name, value) in json {
            let info: TensorInfo = serde_json::from_value(value).map_err(|e| header(format!("{name}: {e}")))?;
            let entry = place(&file, info, data_start, len).map_err(|problem| header(format!("{name}: {problem}")))?;
            tensors.insert(name, entry);
        }
        Ok(Self { tensors, metadata })
    }
}

fn place(file: &Arc<SourceFile>, info: TensorInfo, data_start: u64, len: u64) -> Result<Entry, String> {
    let shape: Vec<u64> = info.shape.iter().map(|&d| d as u64).collect();
    let bits = shape.iter().try_fold(info.dtype.bitsize() as u64, |a, &d| a.checked_mul(d));
    let (begin, end) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
    let bytes = end.checked_sub(begin).ok_or("its end lies before its start")?;
    if bits != bytes.checked_mul(8) {
        return Err(format!("{bytes} bytes do not hold {} values of shape {shape:?}", info.dtype));
    }
    match end.checked_add(data_start) {
        Some(end) if end <= len => {}
        _ => return Err(format!("its data end at {end}, past the end of the file; the download may be incomplete")),
    }
    Ok(Entry { file: Arc::clone(file), dtype: info.dtype, shape, offset: data_start + begin, bytes })
}
