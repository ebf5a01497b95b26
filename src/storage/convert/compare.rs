//! Two GGUF files side by side: which tensors and keys differ, and by how much after decoding.
//! Owns the measures; never judges which file is right.
//! Surprising fact: byte-equal tensors are not decoded, so comparing a file with a copy runs at the speed of the drive.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::Arc;

use rayon::prelude::*;

use super::dialect::PROVENANCE;
use super::error::ConvertError;
use super::part::{Part, Slice};
use super::pipeline::Watch;
use super::shard::SourceFile;
use crate::quant::QuantType;
use crate::storage::gguf::{GgufFile, TensorInfo};

/// Values decoded at a time.
const PIECE_VALUES: u64 = 4 << 20;
/// Bytes compared at a time.
const PIECE_BYTES: usize = 4 << 20;

/// A tensor that is not the same in both files.
#[derive(Clone, Debug, PartialEq)]
pub enum TensorDifference {
    /// Only in one file: true for the first.
    OnlyIn {
        first: bool,
        name: String,
    },
    Dims {
        name: String,
        dims: [Vec<u64>; 2],
    },
    /// Values differ.
    Values {
        name: String,
        types: [QuantType; 2],
        max_abs: f64,
        rms: f64,
        /// Sum of squared differences over sum of squares of the first.
        nmse: f64,
    },
    /// Raw bytes, or bytes against numbers.
    Raw {
        name: String,
        types: [QuantType; 2],
    },
    /// Values are equal, types are not.
    Type {
        name: String,
        types: [QuantType; 2],
    },
}

/// A metadata key that is not the same in both files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetadataDifference {
    pub key: String,
    /// Says how a file was made (recipe, calibration, name), not what it computes.
    pub is_provenance: bool,
    /// Present in the first, in the second file.
    pub present: [bool; 2],
}

/// All differences of two files.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Comparison {
    /// Tensors compared.
    pub tensors: usize,
    pub differences: Vec<TensorDifference>,
    pub metadata: Vec<MetadataDifference>,
}

impl Comparison {
    /// Whether the files compute the same: every tensor's NMSE at most `tolerance`, no other difference of tensors, no
    /// difference of keys but provenance.
    pub fn within(&self, tolerance: f64) -> bool {
        let tensor = |d: &TensorDifference| match d {
            TensorDifference::Values { nmse, .. } => *nmse <= tolerance,
            TensorDifference::Type { .. } => true,
            _ => false,
        };
        self.differences.iter().all(tensor) && self.metadata.iter().all(|d| d.is_provenance)
    }
}

/// Compares two files tensor by tensor.
///
/// # Errors
/// `Io` when a file cannot be read, `Stopped`.
pub fn compare(first: &GgufFile, second: &GgufFile, watch: &mut Watch) -> Result<Comparison, ConvertError> {
    let files = [SourceFile::open(first.path())?, SourceFile::open(second.path())?];
    let mut out = Comparison { metadata: metadata_differences(first, second), ..Comparison::default() };
    let total: u64 = first.tensors().iter().map(|t| t.bytes).sum();
    let mut done = 0;
    for a in first.tensors() {
        let name = a.name.clone();
        let Some(b) = second.tensor(&name) else {
            out.differences.push(TensorDifference::OnlyIn { first: true, name });
            continue;
        };
        out.tensors += 1;
        if a.dims == b.dims {
            out.differences.extend(tensor_difference(a, b, &files)?);
        } else {
            out.differences.push(TensorDifference::Dims { name, dims: [a.dims.clone(), b.dims.clone()] });
        }
        done += a.bytes;
        if let ControlFlow::Break(()) = watch(done, total) {
            return Err(ConvertError::Stopped);
        }
    }
    for b in second.tensors().iter().filter(|b| first.tensor(&b.name).is_none()) {
        out.differences.push(TensorDifference::OnlyIn { first: false, name: b.name.clone() });
    }
    Ok(out)
}

fn metadata_differences(first: &GgufFile, second: &GgufFile) -> Vec<MetadataDifference> {
    let (a, b) = (first.metadata(), second.metadata());
    let keys: BTreeSet<&str> = a.iter().chain(b.iter()).map(|(k, _)| k).collect();
    let differs = |key: &&str| a.get(key) != b.get(key);
    let describe = |key: &str| MetadataDifference {
        key: key.into(),
        is_provenance: PROVENANCE.contains(&key),
        present: [a.contains(key), b.contains(key)],
    };
    keys.into_iter().filter(differs).map(describe).collect()
}

fn tensor_difference(
    a: &TensorInfo,
    b: &TensorInfo,
    files: &[Arc<SourceFile>; 2],
) -> Result<Option<TensorDifference>, ConvertError> {
    let (name, types) = (a.name.clone(), [a.ty, b.ty]);
    if a.ty == b.ty && bytes_equal(a, b, files)? {
        return Ok(None);
    }
    if types.iter().any(|ty| !ty.is_numeric()) {
        return Ok(Some(TensorDifference::Raw { name, types }));
    }
    let sums = decoded_sums(a, b, files)?;
    if sums.error == 0.0 {
        return Ok(Some(TensorDifference::Type { name, types }));
    }
    let nmse = if sums.energy > 0.0 { sums.error / sums.energy } else { f64::INFINITY };
    let rms = (sums.error / (a.rows() * a.columns()) as f64).sqrt();
    Ok(Some(TensorDifference::Values { name, types, max_abs: sums.max_abs, rms, nmse }))
}

fn bytes_equal(a: &TensorInfo, b: &TensorInfo, files: &[Arc<SourceFile>; 2]) -> Result<bool, ConvertError> {
    let mut buffers = [vec![0u8; PIECE_BYTES], vec![0u8; PIECE_BYTES]];
    let mut at = 0;
    while at < a.bytes {
        let len = (a.bytes - at).min(PIECE_BYTES as u64) as usize;
        for ((buffer, file), start) in buffers.iter_mut().zip(files).zip([a.offset, b.offset]) {
            file.read(start + at, &mut buffer[..len])?;
        }
        if buffers[0][..len] != buffers[1][..len] {
            return Ok(false);
        }
        at += len as u64;
    }
    Ok(true)
}

/// Sums over the values of a tensor.
#[derive(Clone, Copy, Default)]
struct Sums {
    max_abs: f64,
    error: f64,
    energy: f64,
}

impl Sums {
    fn of_rows(x: &[f32], y: &[f32]) -> Self {
        let mut sums = Self::default();
        for (x, y) in x.iter().zip(y) {
            let (x, d) = (f64::from(*x), f64::from(*x) - f64::from(*y));
            sums.max_abs = sums.max_abs.max(d.abs());
            sums.error += d * d;
            sums.energy += x * x;
        }
        sums
    }

    /// Added in row order, so that the result does not depend on threads.
    fn add(&mut self, other: Sums) {
        self.max_abs = self.max_abs.max(other.max_abs);
        self.error += other.error;
        self.energy += other.energy;
    }
}

fn decoded_sums(a: &TensorInfo, b: &TensorInfo, files: &[Arc<SourceFile>; 2]) -> Result<Sums, ConvertError> {
    let part = |t: &TensorInfo, file: &Arc<SourceFile>| Part::Blocks {
        ty: t.ty,
        at: Slice { file: Arc::clone(file), offset: t.offset },
    };
    let parts = [part(a, &files[0]), part(b, &files[1])];
    let (columns, rows) = (a.columns(), a.rows());
    let step = (PIECE_VALUES / columns).max(1);
    let mut sums = Sums::default();
    let mut start = 0;
    while start < rows {
        let range = start..rows.min(start + step);
        start = range.end;
        let count = (range.end - range.start) as usize;
        let loaded = [parts[0].load(columns, range.clone())?, parts[1].load(columns, range)?];
        let row_sums = |values: &mut [Vec<f32>; 2], i: usize| {
            for (values, loaded) in values.iter_mut().zip(&loaded) {
                // A value that is not finite makes the sums NaN, which no tolerance accepts: that is report enough.
                let _ = loaded.decode_row(i, values);
            }
            Sums::of_rows(&values[0], &values[1])
        };
        let buffers = || [vec![0f32; columns as usize], vec![0f32; columns as usize]];
        let of_rows: Vec<Sums> = (0..count).into_par_iter().with_min_len(16).map_init(buffers, row_sums).collect();
        of_rows.into_iter().for_each(|s| sums.add(s));
    }
    Ok(sums)
}
