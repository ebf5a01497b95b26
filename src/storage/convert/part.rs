//! Where the rows of a tensor come from: blocks as in a GGUF file, FP8 with tile scales, packed FP4, n-gram rows.
//! Owns reading and decoding of a range of rows; never encodes and never touches another row.
//! Surprising fact: rows whose bytes already mean the same in the target are moved, not decoded: that is what makes
//! `native` exact by construction.

use std::ops::Range;
use std::sync::Arc;

use super::error::ConvertError;
use super::names::{Arch, TensorClass};
use super::shard::{Entry, SourceFile};
use crate::quant::minifloat::{E2M1, E4M3, E8M0};
use crate::quant::{QuantType, dequantize_row};
use crate::storage::gguf::{GgufFile, TensorInfo};

/// The start of stored data.
#[derive(Clone, Debug)]
pub(super) struct Slice {
    pub(super) file: Arc<SourceFile>,
    /// Absolute offset, bytes.
    pub(super) offset: u64,
}

impl Slice {
    pub(super) fn of(entry: &Entry) -> Self {
        Self { file: Arc::clone(&entry.file), offset: entry.offset }
    }

    fn read(&self, rows: &Range<u64>, row_bytes: u64) -> Result<Vec<u8>, ConvertError> {
        let mut out = vec![0u8; ((rows.end - rows.start) * row_bytes) as usize];
        self.file.read(self.offset + rows.start * row_bytes, &mut out)?;
        Ok(out)
    }
}

/// The source of one matrix.
#[derive(Clone, Debug)]
pub(super) enum Part {
    /// Rows of blocks of `ty`.
    Blocks { ty: QuantType, at: Slice },
    /// E4M3 codes [rows, columns], E8M0 scales of tiles [rows / tile, columns / tile], rounded up.
    Fp8 { codes: Slice, scales: Slice, tile: [u64; 2] },
    /// E2M1 codes [rows, columns / 2], low nibble first; E8M0 scales [rows, columns / 32].
    Fp4 { codes: Slice, scales: Slice },
    /// E4M3 codes [rows, width], E8M0 scales [rows, width / 32], to lie side by side in one row.
    TableRows { codes: Slice, scales: Slice, width: u64 },
    /// Whole numbers of so many bytes each, all `below` a limit.
    Ids { at: Slice, bytes_each: u64, below: u32 },
}

/// One tensor to be written.
#[derive(Clone, Debug)]
pub(super) struct TensorPlan {
    pub(super) name: String,
    pub(super) class: TensorClass,
    /// Fastest dimension first.
    pub(super) dims: Vec<u64>,
    /// One source, or one an expert.
    pub(super) parts: Vec<Part>,
}

impl TensorPlan {
    pub(super) fn columns(&self) -> u64 {
        self.dims[0]
    }

    /// Rows of one part.
    pub(super) fn part_rows(&self) -> u64 {
        self.dims[1..].iter().product::<u64>() / self.parts.len() as u64
    }
}

/// Bytes of consecutive rows, loaded.
pub(super) enum Loaded {
    Blocks { ty: QuantType, bytes: Vec<u8> },
    Fp8 { codes: Vec<u8>, scales: Vec<u8>, tile: [u64; 2], first_row: u64, scale_columns: usize },
    Fp4 { codes: Vec<u8>, scales: Vec<u8> },
    TableRows { codes: Vec<u8>, scales: Vec<u8>, width: usize },
    Ids { bytes: Vec<u8>, bytes_each: usize, below: u32 },
}

/// A value that cannot be stored: its column and what is wrong with it.
pub(super) struct BadValue {
    pub(super) column: usize,
    pub(super) value: f32,
    pub(super) problem: &'static str,
}

impl Part {
    /// The type that holds the values of this source exactly.
    pub(super) fn native(&self) -> QuantType {
        match self {
            Part::Blocks { ty, .. } => *ty,
            Part::Fp8 { .. } => QuantType::BF16,
            Part::Fp4 { .. } => QuantType::MXFP4,
            Part::TableRows { .. } => QuantType::I8,
            Part::Ids { .. } => QuantType::I32,
        }
    }

    /// Reads rows of `columns` values (bytes, for table rows) each.
    pub(super) fn load(&self, columns: u64, rows: Range<u64>) -> Result<Loaded, ConvertError> {
        Ok(match self {
            Part::Blocks { ty, at } => {
                let row_bytes = ty.row_bytes(columns).expect("a source has whole blocks");
                Loaded::Blocks { ty: *ty, bytes: at.read(&rows, row_bytes)? }
            }
            Part::Fp8 { codes, scales, tile } => {
                let scale_columns = columns.div_ceil(tile[1]);
                let tiles = rows.start / tile[0]..rows.end.div_ceil(tile[0]);
                Loaded::Fp8 {
                    codes: codes.read(&rows, columns)?,
                    first_row: rows.start - tiles.start * tile[0],
                    scales: scales.read(&tiles, scale_columns)?,
                    tile: *tile,
                    scale_columns: scale_columns as usize,
                }
            }
            Part::Fp4 { codes, scales } => {
                Loaded::Fp4 { codes: codes.read(&rows, columns / 2)?, scales: scales.read(&rows, columns / 32)? }
            }
            Part::TableRows { codes, scales, width } => Loaded::TableRows {
                codes: codes.read(&rows, *width)?,
                scales: scales.read(&rows, width / 32)?,
                width: *width as usize,
            },
            Part::Ids { at, bytes_each, below } => {
                let bytes = at.read(&rows, columns * bytes_each)?;
                Loaded::Ids { bytes, bytes_each: *bytes_each as usize, below: *below }
            }
        })
    }
}

/// Row `i` of `bytes` cut into rows of `len`.
fn row(bytes: &[u8], i: usize, len: usize) -> &[u8] {
    &bytes[i * len..(i + 1) * len]
}

impl Loaded {
    /// Moves row `i` into `out` if its bytes already are, or are only packed differently from, `ty`.
    ///
    /// # Errors
    /// A code that is NaN.
    pub(super) fn move_row(&self, i: usize, ty: QuantType, out: &mut [u8]) -> Result<bool, BadValue> {
        match self {
            Loaded::Blocks { ty: stored, bytes } if *stored == ty => {
                let len = out.len();
                out.copy_from_slice(row(bytes, i, len));
            }
            Loaded::Fp4 { codes, scales } if ty == QuantType::MXFP4 => {
                let blocks = out.len() / 17;
                let (codes, scales) = (row(codes, i, blocks * 16), row(scales, i, blocks));
                repack_fp4(codes, scales, out)?;
            }
            Loaded::TableRows { codes, scales, width } => {
                let (code_out, scale_out) = out.split_at_mut(*width);
                code_out.copy_from_slice(row(codes, i, *width));
                scale_out.copy_from_slice(row(scales, i, width / 32));
                if let Some(column) = code_out.iter().position(|c| c & 0x7f == 0x7f) {
                    return Err(BadValue { column, value: f32::NAN, problem: "in an n-gram row" });
                }
                refuse_nan_scale(scale_out, 32)?;
            }
            Loaded::Ids { bytes, bytes_each, below } => {
                let ids = row(bytes, i, out.len() / 4 * bytes_each).chunks_exact(*bytes_each);
                for (column, (id, out)) in ids.zip(out.chunks_exact_mut(4)).enumerate() {
                    out.copy_from_slice(&narrow_id(id, *below).map_err(|bad| BadValue { column, ..bad })?);
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Decodes row `i`.
    ///
    /// # Errors
    /// A value that is not finite.
    pub(super) fn decode_row(&self, i: usize, out: &mut [f32]) -> Result<(), BadValue> {
        match self {
            Loaded::Blocks { ty, bytes } => {
                let len = ty.row_bytes(out.len() as u64).expect("a source has whole blocks") as usize;
                dequantize_row(*ty, row(bytes, i, len), out).map_err(|_| BadValue {
                    column: 0,
                    value: f32::NAN,
                    problem: "is raw bytes, not a number",
                })?;
            }
            Loaded::Fp8 { codes, scales, tile, first_row, scale_columns } => {
                let tile_row = ((first_row + i as u64) / tile[0]) as usize;
                let scales = row(scales, tile_row, *scale_columns);
                let codes = row(codes, i, out.len());
                let tiles = out.chunks_mut(tile[1] as usize).zip(codes.chunks(tile[1] as usize));
                for ((out, codes), &scale) in tiles.zip(scales) {
                    let scale = E8M0[usize::from(scale)];
                    out.iter_mut().zip(codes).for_each(|(v, &c)| *v = E4M3[usize::from(c)] * scale);
                }
            }
            Loaded::Fp4 { codes, scales } => {
                let (codes, scales) = (row(codes, i, out.len() / 2), row(scales, i, out.len() / 32));
                for ((out, codes), &scale) in out.chunks_exact_mut(32).zip(codes.chunks_exact(16)).zip(scales) {
                    let scale = E8M0[usize::from(scale)];
                    for (pair, &byte) in out.chunks_exact_mut(2).zip(codes) {
                        pair[0] = E2M1[usize::from(byte & 15)] * scale;
                        pair[1] = E2M1[usize::from(byte >> 4)] * scale;
                    }
                }
            }
            Loaded::TableRows { .. } | Loaded::Ids { .. } => {
                return Err(BadValue { column: 0, value: f32::NAN, problem: "is raw bytes, not a number" });
            }
        }
        match out.iter().position(|v| !v.is_finite()) {
            Some(column) => Err(BadValue { column, value: out[column], problem: "in the source" }),
            None => Ok(()),
        }
    }
}

/// A number of four or eight bytes as one of four.
fn narrow_id(bytes: &[u8], below: u32) -> Result<[u8; 4], BadValue> {
    let id = match bytes.try_into() {
        Ok(wide) => i64::from_le_bytes(wide),
        Err(_) => i64::from(i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])),
    };
    if !(0..i64::from(below)).contains(&id) {
        return Err(BadValue { column: 0, value: id as f32, problem: "is no expert of this model" });
    }
    Ok((id as i32).to_le_bytes())
}

/// From pairs of neighbours to pairs 16 apart, which is how MXFP4 blocks pack their nibbles.
fn repack_fp4(codes: &[u8], scales: &[u8], out: &mut [u8]) -> Result<(), BadValue> {
    refuse_nan_scale(scales, 32)?;
    for ((block, codes), &scale) in out.chunks_exact_mut(17).zip(codes.chunks_exact(16)).zip(scales) {
        block[0] = scale;
        let nibble = |n: usize| (codes[n / 2] >> (4 * (n % 2))) & 15;
        for (j, byte) in block[1..].iter_mut().enumerate() {
            *byte = nibble(j) | nibble(j + 16) << 4;
        }
    }
    Ok(())
}

fn refuse_nan_scale(scales: &[u8], columns_each: usize) -> Result<(), BadValue> {
    match scales.iter().position(|&s| s == 0xff) {
        Some(i) => Err(BadValue { column: i * columns_each, value: f32::NAN, problem: "as a scale" }),
        None => Ok(()),
    }
}

/// The tensors of a GGUF file as sources, in file order.
pub(super) fn tensors_of_gguf(file: &GgufFile, arch: Arch) -> Result<Vec<TensorPlan>, ConvertError> {
    let source = SourceFile::open(file.path())?;
    let plan = |t: &TensorInfo| {
        // A tensor this version has no name for keeps its type, like the n-gram rows.
        let class = arch.class_of(&t.name).unwrap_or(TensorClass::Rows);
        // Only expert tensors are cut: their third dimension is known to be small.
        let is_routed = matches!(class, TensorClass::GateUp | TensorClass::Down);
        let experts = t.dims.get(2).copied().filter(|_| is_routed).unwrap_or(1);
        let slice_bytes = t.bytes / experts;
        let part = |e: u64| {
            let at = Slice { file: Arc::clone(&source), offset: t.offset + e * slice_bytes };
            Part::Blocks { ty: t.ty, at }
        };
        TensorPlan { name: t.name.clone(), class, dims: t.dims.clone(), parts: (0..experts).map(part).collect() }
    };
    Ok(file.tensors().iter().map(plan).collect())
}
