//! Block formats of stored weights: sizes here, one file a format for the scalar decoder and encoder.
//! Never depends on files or backends. Surprising fact: a row of `n` values needs `n` to be a whole number of blocks,
//! so which types a tensor may take depends on its innermost dimension.

mod affine_fit;
mod codec;
pub mod fake;
mod float;
mod iq2_grid;
mod iq2_search;
pub mod iq2_xxs;
pub mod minifloat;
pub mod mxfp4;
pub mod q2_k;
pub mod q3_k;
pub mod q4_k;
pub mod q6_k;
pub mod q8_0;
mod signed_fit;
mod superblock;

pub use codec::{QuantError, dequantize_row, quantize_row};

use std::fmt;

/// Storage type of a tensor, a subset of the GGML types (numbers as in GGUF files).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
#[allow(non_camel_case_types)]
pub enum QuantType {
    F32,
    F16,
    BF16,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q6_K,
    IQ2_XXS,
    MXFP4,
    /// Raw bytes: n-gram table rows. Never decoded as numbers by the generic decoders.
    I8,
    /// Ids: tables that map a token to experts. Never decoded as numbers by the generic decoders.
    I32,
}

impl QuantType {
    /// Every type, in the order of the enum.
    pub const ALL: [QuantType; 12] = [
        QuantType::F32,
        QuantType::F16,
        QuantType::BF16,
        QuantType::Q8_0,
        QuantType::Q2_K,
        QuantType::Q3_K,
        QuantType::Q4_K,
        QuantType::Q6_K,
        QuantType::IQ2_XXS,
        QuantType::MXFP4,
        QuantType::I8,
        QuantType::I32,
    ];

    /// Whether values of this type are weights.
    pub const fn is_numeric(self) -> bool {
        !matches!(self, QuantType::I8 | QuantType::I32)
    }

    /// Type number in a GGUF file.
    pub const fn ggml_id(self) -> u32 {
        match self {
            QuantType::F32 => 0,
            QuantType::F16 => 1,
            QuantType::Q8_0 => 8,
            QuantType::Q2_K => 10,
            QuantType::Q3_K => 11,
            QuantType::Q4_K => 12,
            QuantType::Q6_K => 14,
            QuantType::IQ2_XXS => 16,
            QuantType::I8 => 24,
            QuantType::I32 => 26,
            QuantType::BF16 => 30,
            QuantType::MXFP4 => 39,
        }
    }

    /// The type with this GGUF number, if ds4 can read it.
    pub fn from_ggml_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|t| t.ggml_id() == id)
    }

    /// Values in one block.
    pub const fn block_values(self) -> usize {
        match self {
            QuantType::F32 | QuantType::F16 | QuantType::BF16 | QuantType::I8 | QuantType::I32 => 1,
            QuantType::Q8_0 | QuantType::MXFP4 => 32,
            QuantType::Q2_K | QuantType::Q3_K | QuantType::Q4_K | QuantType::Q6_K | QuantType::IQ2_XXS => 256,
        }
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        match self {
            QuantType::F32 | QuantType::I32 => 4,
            QuantType::F16 | QuantType::BF16 => 2,
            QuantType::I8 => 1,
            QuantType::Q8_0 => 34,
            QuantType::MXFP4 => 17,
            QuantType::Q2_K => 84,
            QuantType::Q3_K => 110,
            QuantType::Q4_K => 144,
            QuantType::Q6_K => 210,
            QuantType::IQ2_XXS => 66,
        }
    }

    /// Bytes of a row of `values`, or `None` if that is not a whole number of blocks or overflows.
    pub const fn row_bytes(self, values: u64) -> Option<u64> {
        let block = self.block_values() as u64;
        if !values.is_multiple_of(block) {
            return None;
        }
        (values / block).checked_mul(self.block_bytes() as u64)
    }

    /// The name used in tables and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            QuantType::F32 => "F32",
            QuantType::F16 => "F16",
            QuantType::BF16 => "BF16",
            QuantType::Q8_0 => "Q8_0",
            QuantType::Q2_K => "Q2_K",
            QuantType::Q3_K => "Q3_K",
            QuantType::Q4_K => "Q4_K",
            QuantType::Q6_K => "Q6_K",
            QuantType::IQ2_XXS => "IQ2_XXS",
            QuantType::MXFP4 => "MXFP4",
            QuantType::I8 => "I8",
            QuantType::I32 => "I32",
        }
    }
}

impl fmt::Display for QuantType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
