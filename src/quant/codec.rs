//! Rows in and out of block formats: checks lengths once, then hands whole blocks to the format's own file.
//! Never reads past a row or panics on its bytes. Surprising fact: decoding cannot fail on content, every bit pattern
//! of every format means something (possibly NaN or infinity, when a stored scale is).

use super::{QuantType, float, iq2_xxs, mxfp4, q2_k, q3_k, q4_k, q6_k, q8_0};
use thiserror::Error;

/// Why a row could not be converted.
#[derive(Clone, Copy, PartialEq, Debug, Error)]
pub enum QuantError {
    /// The two sides do not describe the same number of values.
    #[error(
        "{ty}: {values} values and {bytes} bytes do not match ({} bytes hold {} values); pass one whole row",
        ty.block_bytes(), ty.block_values()
    )]
    Length { ty: QuantType, values: usize, bytes: usize },
    /// The type holds bytes, not numbers.
    #[error("{ty} holds raw bytes, not numbers; choose a numeric type")]
    NotNumeric { ty: QuantType },
}

/// Fails unless `bytes` is exactly the storage of `values` values.
fn check_length(ty: QuantType, values: usize, bytes: usize) -> Result<(), QuantError> {
    if ty.row_bytes(values as u64) == Some(bytes as u64) {
        Ok(())
    } else {
        Err(QuantError::Length { ty, values, bytes })
    }
}

/// Decodes a row of `out.len()` values from exactly its bytes.
///
/// # Errors
/// [`QuantError::Length`] if `bytes` is not the storage of `out.len()` values, [`QuantError::NotNumeric`] for I8.
pub fn dequantize_row(ty: QuantType, bytes: &[u8], out: &mut [f32]) -> Result<(), QuantError> {
    check_length(ty, out.len(), bytes.len())?;
    match ty {
        QuantType::F32 => decode_blocks(bytes, out, float::f32_decode),
        QuantType::F16 => decode_blocks(bytes, out, float::f16_decode),
        QuantType::BF16 => decode_blocks(bytes, out, float::bf16_decode),
        QuantType::Q8_0 => decode_blocks(bytes, out, q8_0::decode),
        QuantType::Q2_K => decode_blocks(bytes, out, q2_k::decode),
        QuantType::Q3_K => decode_blocks(bytes, out, q3_k::decode),
        QuantType::Q4_K => decode_blocks(bytes, out, q4_k::decode),
        QuantType::Q6_K => decode_blocks(bytes, out, q6_k::decode),
        QuantType::IQ2_XXS => decode_blocks(bytes, out, iq2_xxs::decode),
        QuantType::MXFP4 => decode_blocks(bytes, out, mxfp4::decode),
        QuantType::I8 => return Err(QuantError::NotNumeric { ty }),
    }
    Ok(())
}

fn decode_blocks<const B: usize, const V: usize>(bytes: &[u8], out: &mut [f32], decode: fn(&[u8; B], &mut [f32; V])) {
    for (block, values) in bytes.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        decode(block, values);
    }
}
