//! Where each class of weights lies in a file: resident tensors, routed experts, disk-only tables.
//! Owns the classification and the byte ranges; never reads a byte of tensor data.
//! Surprising fact: an expert is three extents in three tensors, and none of them need start on a page.

use std::collections::BTreeMap;

use thiserror::Error;

use super::gguf::{Directory, Metadata, MetadataError, TensorInfo, Value};
use crate::quant::QuantType;
use crate::units::{Bytes, ExpertIdx, LayerIdx};

/// A byte range of the model file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Absolute offset in the file, bytes.
    pub offset: u64,
    /// Length, bytes.
    pub len: u64,
}

/// One `*_exps` tensor: `experts` slices of the same size, one behind the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExpertTensor {
    pub ty: QuantType,
    /// Outputs of one expert's matrix.
    pub rows: usize,
    /// Inputs of one expert's matrix.
    pub cols: usize,
    /// Absolute file offset of expert 0.
    pub offset: u64,
    /// Bytes of one expert's slice.
    pub slice_bytes: u64,
}

impl ExpertTensor {
    /// The slice of `expert`. The caller keeps `expert` below the layer's count.
    pub fn slice(&self, expert: ExpertIdx) -> Extent {
        Extent { offset: self.offset + u64::from(expert.0) * self.slice_bytes, len: self.slice_bytes }
    }
}

/// The routed experts of one layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayerExperts {
    pub layer: LayerIdx,
    pub experts: u16,
    pub gate: ExpertTensor,
    pub up: ExpertTensor,
    pub down: ExpertTensor,
}

impl LayerExperts {
    /// Gate, up and down slices of `expert`, in this order.
    pub fn extents(&self, expert: ExpertIdx) -> [Extent; 3] {
        [self.gate.slice(expert), self.up.slice(expert), self.down.slice(expert)]
    }

    /// Bytes of one expert: the size class of this layer.
    pub fn expert_bytes(&self) -> Bytes {
        Bytes(self.gate.slice_bytes + self.up.slice_bytes + self.down.slice_bytes)
    }
}

/// A disk-only table of fixed-size rows (V4.1 Engram, spec 2.3).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TableLayout {
    pub layer: LayerIdx,
    /// Absolute file offset of row 0.
    pub offset: u64,
    pub row_bytes: u32,
    pub rows: u64,
}

impl TableLayout {
    /// The bytes of `row`. The caller keeps `row` below `rows`.
    pub fn row(&self, row: u64) -> Extent {
        Extent { offset: self.offset + row * u64::from(self.row_bytes), len: u64::from(self.row_bytes) }
    }
}

/// All classes of one file.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    /// Indices into the tensor directory of tensors that are read once and kept.
    pub resident: Vec<usize>,
    /// Sum of the resident tensors.
    pub resident_bytes: Bytes,
    /// Streamed experts, by rising layer.
    pub experts: Vec<LayerExperts>,
    /// Disk-only tables, by rising layer.
    pub tables: Vec<TableLayout>,
    /// Indices of tensors of blocks that only draft tokens: not loaded.
    pub drafting: Vec<usize>,
    /// Sum of those.
    pub drafting_bytes: Bytes,
}

/// Experts of the same byte size: one class of cache slots.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SizeClass {
    pub expert_bytes: Bytes,
    pub layers: u32,
    /// Experts of all these layers.
    pub experts: u64,
}

/// Why a directory is no consistent model file.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LayoutError {
    #[error("architecture {found} is not supported here; this build reads {expected}")]
    Architecture { found: String, expected: &'static str },
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    #[error("metadata key {key} is {found}, but {limit} is the limit")]
    TooMany { key: &'static str, found: u32, limit: u32 },
    #[error("tensor {tensor} is missing")]
    MissingTensor { tensor: String },
    #[error("tensor {tensor} has dimensions {found:?}, expected {expected:?}")]
    Dims { tensor: String, found: Vec<u64>, expected: Vec<u64> },
    #[error("tensor {tensor} is {found}, expected {expected}")]
    Type { tensor: String, found: QuantType, expected: QuantType },
    #[error("tensor {tensor} belongs to layer {layer}, but the model has {layers} layers")]
    LayerRange { tensor: String, layer: u64, layers: u32 },
    #[error("tensor {tensor} is an n-gram table of a layer that {key} does not list")]
    UnlistedTable { tensor: String, key: &'static str },
    #[error("metadata key {key} has {found} entries, expected {expected}")]
    Length { key: &'static str, found: usize, expected: usize },
    #[error("n-gram table of layer {layer}: its primes sum to {primes}, but it has {rows} rows")]
    PrimeSum { layer: u32, primes: u64, rows: u64 },
    #[error("n-gram row encoding {found} is unknown; rows of {row_bytes} bytes are {expected}")]
    Encoding { found: String, expected: String, row_bytes: u64 },
    #[error(
        "the n-gram tables of this file are being converted (deepseek41.engram.conversion_underway is set); finish that first"
    )]
    ConversionUnderway,
}

/// Name of the n-gram row format for rows of `width` values: e4m3 codes, then one e8m0 scale per 32 of them
/// (spec 4.4 names the one of width 256).
pub fn engram_encoding(width: u64) -> String {
    format!("e4m3_e8m0_32_row{}", engram_row_bytes(width))
}

/// Bytes of such a row. `width` is a multiple of 32.
pub fn engram_row_bytes(width: u64) -> u64 {
    width + width / 32
}

/// What the metadata of an architecture calls the numbers that the layout depends on.
struct Names {
    arch: &'static str,
    layers: &'static str,
    /// Layers at the end that only draft tokens, where the file may have some; their tensors are left on the drive.
    drafting: Option<&'static str>,
    experts: &'static str,
    hidden: &'static str,
    inner: &'static str,
}

const DIALECTS: [Names; 2] = [
    Names {
        arch: "deepseek41",
        layers: "deepseek41.num_hidden_layers",
        drafting: None,
        experts: "deepseek41.n_routed_experts",
        hidden: "deepseek41.hidden_size",
        inner: "deepseek41.moe_intermediate_size",
    },
    Names {
        arch: "deepseek4",
        layers: "deepseek4.block_count",
        drafting: Some("deepseek4.nextn_predict_layers"),
        experts: "deepseek4.expert_count",
        hidden: "deepseek4.embedding_length",
        inner: "deepseek4.expert_feed_forward_length",
    },
];

/// Tensors of blocks that only draft tokens, in files that number them apart.
const DRAFTING: &str = "mtp.";
const ROUTED: [&str; 3] = ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"];
const TABLE: &str = "engram_embd";
const ENGRAM_LAYERS: &str = "deepseek41.engram.layer_ids";
const ENGRAM_ROWS: &str = "deepseek41.engram.rows";
const ENGRAM_PRIMES: &str = "deepseek41.engram.primes";

/// Layer and stem of `blk.L.STEM.weight`.
fn layer_weight(name: &str) -> Option<(u64, &str)> {
    let (layer, stem) = name.strip_prefix("blk.")?.strip_suffix(".weight")?.split_once('.')?;
    Some((layer.parse().ok()?, stem))
}

/// Layer of `blk.L.*`.
fn layer_tensor(name: &str) -> Option<u64> {
    name.strip_prefix("blk.")?.split_once('.')?.0.parse().ok()
}

fn expect_dims(tensor: &TensorInfo, expected: &[u64]) -> Result<(), LayoutError> {
    if tensor.dims == expected {
        return Ok(());
    }
    let (tensor, found) = (tensor.name.clone(), tensor.dims.clone());
    Err(LayoutError::Dims { tensor, found, expected: expected.to_vec() })
}

impl Layout {
    /// Classifies the tensors of a file and checks that they agree with its metadata.
    ///
    /// # Errors
    /// A [`LayoutError`] that names the key or tensor at fault.
    pub fn from_gguf(file: &Directory) -> Result<Self, LayoutError> {
        let found = file.metadata().str("general.architecture")?;
        let Some(names) = DIALECTS.iter().find(|names| names.arch == found) else {
            let expected = "deepseek41, deepseek4";
            return Err(LayoutError::Architecture { found: found.into(), expected });
        };
        let blocks = file.metadata().u32(names.layers)?;
        if blocks > u32::from(u16::MAX) {
            return Err(LayoutError::TooMany { key: names.layers, found: blocks, limit: u16::MAX.into() });
        }
        let drafting = match names.drafting.filter(|key| file.metadata().contains(key)) {
            Some(key) => file.metadata().u32(key)?,
            None => 0,
        };
        let layers = blocks.saturating_sub(drafting);
        let mut layout = Layout::default();
        let mut tables = Vec::new();
        for (i, tensor) in file.tensors().iter().enumerate() {
            let layer = layer_tensor(&tensor.name);
            if let Some(layer) = layer.filter(|layer| *layer >= u64::from(blocks)) {
                return Err(LayoutError::LayerRange { tensor: tensor.name.clone(), layer, layers });
            }
            if tensor.name.starts_with(DRAFTING) || layer.is_some_and(|layer| layer >= u64::from(layers)) {
                layout.drafting.push(i);
                layout.drafting_bytes.0 += tensor.bytes;
                continue;
            }
            let streamed = match layer_weight(&tensor.name) {
                Some((layer, TABLE)) => {
                    tables.push((layer as u32, tensor));
                    true
                }
                Some((_, stem)) => ROUTED.contains(&stem),
                None => false,
            };
            if !streamed {
                layout.resident.push(i);
                layout.resident_bytes.0 += tensor.bytes;
            }
        }
        layout.experts = (0..layers).map(|l| layer_experts(file, names, l)).collect::<Result<_, _>>()?;
        layout.tables = engram_tables(file, tables)?;
        Ok(layout)
    }

    /// Bytes of all routed experts.
    pub fn expert_bytes_total(&self) -> Bytes {
        Bytes(self.experts.iter().map(|l| l.expert_bytes().0 * u64::from(l.experts)).sum())
    }

    /// Bytes of all disk-only tables.
    pub fn table_bytes_total(&self) -> Bytes {
        Bytes(self.tables.iter().map(|t| t.rows * u64::from(t.row_bytes)).sum())
    }

    /// Classes of equal expert size, smallest first.
    pub fn size_classes(&self) -> Vec<SizeClass> {
        let mut classes = BTreeMap::<u64, SizeClass>::new();
        for layer in &self.experts {
            let expert_bytes = layer.expert_bytes();
            let empty = SizeClass { expert_bytes, layers: 0, experts: 0 };
            let class = classes.entry(expert_bytes.0).or_insert(empty);
            class.layers += 1;
            class.experts += u64::from(layer.experts);
        }
        classes.into_values().collect()
    }
}

fn layer_experts(file: &Directory, names: &Names, layer: u32) -> Result<LayerExperts, LayoutError> {
    let experts = file.metadata().u32(names.experts)?;
    let Ok(experts_u16) = u16::try_from(experts) else {
        return Err(LayoutError::TooMany { key: names.experts, found: experts, limit: u16::MAX.into() });
    };
    let hidden = u64::from(file.metadata().u32(names.hidden)?);
    let inner = u64::from(first_u32(file.metadata(), names.inner)?);
    let tensor = |stem: &str, cols: u64, rows: u64| {
        let name = format!("blk.{layer}.{stem}.weight");
        let Some(t) = file.tensor(&name) else { return Err(LayoutError::MissingTensor { tensor: name }) };
        expect_dims(t, &[cols, rows, u64::from(experts)])?;
        // Whole rows of whole blocks, so the division is exact.
        let slice_bytes = t.bytes / u64::from(experts);
        Ok(ExpertTensor { ty: t.ty, rows: rows as usize, cols: cols as usize, offset: t.offset, slice_bytes })
    };
    Ok(LayerExperts {
        layer: LayerIdx(layer as u16),
        experts: experts_u16,
        gate: tensor(ROUTED[0], hidden, inner)?,
        up: tensor(ROUTED[1], hidden, inner)?,
        down: tensor(ROUTED[2], inner, hidden)?,
    })
}

/// A number, or the first of a list of them: some writers give one for each layer. That they are equal is checked with the tensors.
fn first_u32(metadata: &Metadata, key: &str) -> Result<u32, MetadataError> {
    match metadata.get(key) {
        Some(Value::Array(_)) => Ok(metadata.u32_array(key)?.first().copied().unwrap_or(0)),
        _ => metadata.u32(key),
    }
}

/// Checks tables against the `deepseek41.engram.*` keys (spec 4.2); a file without tables needs none of them.
fn engram_tables(file: &Directory, mut found: Vec<(u32, &TensorInfo)>) -> Result<Vec<TableLayout>, LayoutError> {
    let metadata = file.metadata();
    if metadata.contains("deepseek41.engram.conversion_underway") {
        return Err(LayoutError::ConversionUnderway);
    }
    let mut layers = Vec::new();
    if metadata.contains(ENGRAM_LAYERS) || !found.is_empty() {
        layers = metadata.u32_array(ENGRAM_LAYERS)?;
    }
    if layers.is_empty() && found.is_empty() {
        return Ok(Vec::new());
    }
    let rows = metadata.u64_array(ENGRAM_ROWS)?;
    let primes = metadata.u64_array(ENGRAM_PRIMES)?;
    let encoding = metadata.str("deepseek41.engram.encoding")?;
    if rows.len() != layers.len() {
        return Err(LayoutError::Length { key: ENGRAM_ROWS, found: rows.len(), expected: layers.len() });
    }
    if layers.is_empty() || primes.is_empty() || !primes.len().is_multiple_of(layers.len()) {
        let expected = primes.len().next_multiple_of(layers.len().max(1)).max(layers.len());
        return Err(LayoutError::Length { key: ENGRAM_PRIMES, found: primes.len(), expected });
    }
    found.sort_by_key(|(layer, _)| *layer);
    if let Some((_, t)) = found.iter().find(|(layer, _)| !layers.contains(layer)) {
        return Err(LayoutError::UnlistedTable { tensor: t.name.clone(), key: ENGRAM_LAYERS });
    }
    let columns = primes.len() / layers.len();
    let mut tables = Vec::with_capacity(layers.len());
    for ((&layer, &rows), primes) in layers.iter().zip(&rows).zip(primes.chunks_exact(columns)) {
        let Some((_, tensor)) = found.iter().find(|(l, _)| *l == layer) else {
            return Err(LayoutError::MissingTensor { tensor: format!("blk.{layer}.{TABLE}.weight") });
        };
        let sum = primes.iter().fold(0u64, |a, &p| a.saturating_add(p));
        if sum != rows {
            return Err(LayoutError::PrimeSum { layer, primes: sum, rows });
        }
        tables.push(table(tensor, layer, rows, encoding)?);
    }
    tables.sort_by_key(|t| t.layer);
    Ok(tables)
}

fn table(tensor: &TensorInfo, layer: u32, rows: u64, encoding: &str) -> Result<TableLayout, LayoutError> {
    if tensor.ty != QuantType::I8 {
        let (found, expected) = (tensor.ty, QuantType::I8);
        return Err(LayoutError::Type { tensor: tensor.name.clone(), found, expected });
    }
    let row_bytes = tensor.columns();
    expect_dims(tensor, &[row_bytes, rows])?;
    // 33 bytes hold 32 values and their scale.
    let expected = engram_encoding(row_bytes / 33 * 32);
    if !row_bytes.is_multiple_of(33) || encoding != expected || row_bytes > u64::from(u32::MAX) {
        return Err(LayoutError::Encoding { found: encoding.into(), expected, row_bytes });
    }
    Ok(TableLayout { layer: LayerIdx(layer as u16), offset: tensor.offset, row_bytes: row_bytes as u32, rows })
}
