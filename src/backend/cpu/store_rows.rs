//! Copy of rows into a ring or a list.
//! Never touches other slots. Surprising fact: a list is a ring that is long enough never to wrap.

use super::CpuBackend;
use crate::backend::ops::StoreRows;

pub fn store_rows(op: StoreRows<'_, CpuBackend>, dst: &mut [f32]) {
    for (r, row) in op.src[..op.rows * op.width].chunks_exact(op.width).enumerate() {
        let slot = (op.first_slot + r) % op.slots;
        dst[slot * op.width..][..op.width].copy_from_slice(row);
    }
}
