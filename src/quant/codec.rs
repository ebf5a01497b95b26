//! Rows in and out of block formats: checks lengths once, then hands whole blocks to the format's own file.
//! Never reads past a row or panics on its bytes. Surprising fact: decoding cannot fail on content, every bit pattern
//! of every format means something (possibly NaN or infinity, when a stored scale is).

use super::superblock::TooLarge;
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
    /// A value or an importance that cannot be encoded.
    #[error("{what} {value} at position {position} of the row cannot be stored as {ty}; repair the source tensor")]
    BadValue { ty: QuantType, what: &'static str, position: usize, value: f32 },
    /// The magnitude has no representation, not even a coarse one.
    #[error("value {value:e} at position {position} of the row is too large for {ty}; choose BF16 or F32")]
    TooLarge { ty: QuantType, position: usize, value: f32 },
    /// One importance a value is needed.
    #[error("{found} importances for a row of {values} values; collect them for this tensor's input width")]
    ImportanceLength { values: usize, found: usize },
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
        QuantType::I8 | QuantType::I32 => return Err(QuantError::NotNumeric { ty }),
    }
    Ok(())
}

fn decode_blocks<const B: usize, const V: usize>(bytes: &[u8], out: &mut [f32], decode: fn(&[u8; B], &mut [f32; V])) {
    for (block, values) in bytes.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        decode(block, values);
    }
}

/// Encodes a row into exactly `out`. `importance` holds one weight a value: how much its squared error counts. The
/// types without a search (F32, F16, BF16, Q8_0) do not look at it. The same input always gives the same bytes.
///
/// # Errors
/// [`QuantError::Length`] and [`QuantError::ImportanceLength`] for sides that do not match,
/// [`QuantError::BadValue`] for NaN, infinite values and unusable importances, [`QuantError::TooLarge`] beyond the
/// type's range, [`QuantError::NotNumeric`] for I8. After an error the content of `out` means nothing.
pub fn quantize_row(ty: QuantType, x: &[f32], importance: Option<&[f32]>, out: &mut [u8]) -> Result<(), QuantError> {
    check_length(ty, x.len(), out.len())?;
    check_values(ty, "value", x, |v| v.is_finite())?;
    if let Some(importance) = importance {
        if importance.len() != x.len() {
            return Err(QuantError::ImportanceLength { values: x.len(), found: importance.len() });
        }
        check_values(ty, "importance", importance, |w| w.is_finite() && w >= 0.0)?;
    }
    match ty {
        QuantType::F32 => encode_blocks(ty, x, out, float::f32_encode),
        QuantType::F16 => encode_blocks(ty, x, out, float::f16_encode),
        QuantType::BF16 => encode_blocks(ty, x, out, float::bf16_encode),
        QuantType::Q8_0 => encode_blocks(ty, x, out, q8_0::encode),
        QuantType::Q2_K => encode_weighted(ty, x, importance, out, q2_k::encode),
        QuantType::Q3_K => encode_weighted(ty, x, importance, out, q3_k::encode),
        QuantType::Q4_K => encode_weighted(ty, x, importance, out, q4_k::encode),
        QuantType::Q6_K => encode_weighted(ty, x, importance, out, q6_k::encode),
        QuantType::IQ2_XXS => encode_weighted(ty, x, importance, out, iq2_xxs::encode),
        QuantType::MXFP4 => encode_weighted(ty, x, importance, out, mxfp4::encode),
        QuantType::I8 | QuantType::I32 => Err(QuantError::NotNumeric { ty }),
    }
}

fn check_values(ty: QuantType, what: &'static str, x: &[f32], good: fn(f32) -> bool) -> Result<(), QuantError> {
    match x.iter().position(|v| !good(*v)) {
        Some(position) => Err(QuantError::BadValue { ty, what, position, value: x[position] }),
        None => Ok(()),
    }
}

fn encode_blocks<const B: usize, const V: usize>(
    ty: QuantType,
    x: &[f32],
    out: &mut [u8],
    encode: fn(&[f32; V], &mut [u8; B]) -> Result<(), TooLarge>,
) -> Result<(), QuantError> {
    for (i, (values, block)) in x.as_chunks().0.iter().zip(out.as_chunks_mut().0).enumerate() {
        encode(values, block).map_err(|TooLarge| too_large(ty, x, V * i, V))?;
    }
    Ok(())
}

/// Encoder of one block whose second argument weighs the squared errors.
type WeightedEncoder<const B: usize, const V: usize> =
    fn(&[f32; V], Option<&[f32; V]>, &mut [u8; B]) -> Result<(), TooLarge>;

fn encode_weighted<const B: usize, const V: usize>(
    ty: QuantType,
    x: &[f32],
    importance: Option<&[f32]>,
    out: &mut [u8],
    encode: WeightedEncoder<B, V>,
) -> Result<(), QuantError> {
    for (i, (values, block)) in x.as_chunks().0.iter().zip(out.as_chunks_mut().0).enumerate() {
        let weights = importance.map(|w| &w.as_chunks().0[i]);
        encode(values, weights, block).map_err(|TooLarge| too_large(ty, x, V * i, V))?;
    }
    Ok(())
}

/// Names the largest value of the block that starts at `start`.
fn too_large(ty: QuantType, x: &[f32], start: usize, values: usize) -> QuantError {
    let block = start..start + values;
    let position = block.fold(start, |best, i| if x[i].abs() > x[best].abs() { i } else { best });
    QuantError::TooLarge { ty, position, value: x[position] }
}
