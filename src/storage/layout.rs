//! Where each class of weights lies in a file: resident tensors, routed experts, disk-only tables.
//! Owns the classification and the byte ranges; never reads a byte of tensor data.
//! Surprising fact: an expert is three extents in three tensors, and none of them need start on a page.

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
}
