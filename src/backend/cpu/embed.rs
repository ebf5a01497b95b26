//! Gather of embedding rows.
//! Never decodes more than the rows asked for. Surprising fact: each row is written once a residual stream.

use super::CpuBackend;
use crate::backend::{BackendError, ops::Embed};
use crate::quant::dequantize_row;

pub fn embed(op: Embed<'_, CpuBackend>, out: &mut [f32]) -> Result<(), BackendError> {
    let (table, copies) = (op.table, op.copies);
    let row_bytes = table.bytes.len() / table.rows;
    for (id, part) in op.ids[..op.rows].iter().zip(out.chunks_exact_mut(copies * table.cols)) {
        let at = *id as usize * row_bytes;
        let (first, rest) = part.split_at_mut(table.cols);
        dequantize_row(table.ty, &table.bytes[at..at + row_bytes], first)
            .map_err(|_| BackendError::UnsupportedType { backend: "cpu", op: "embed", ty: table.ty })?;
        rest.chunks_exact_mut(table.cols).for_each(|copy| copy.copy_from_slice(first));
    }
    Ok(())
}
