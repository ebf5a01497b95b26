//! Some experts on one row: the products and the SwiGLU one by one.
//! Never fuses anything: this is the definition that a device's fused kernels must equal. Surprising fact: it is generic, since it only
//! puts other ops in order.

use crate::backend::ops::{ExpertsOut, ExpertsRow, Matmul, MatmulPair, SwiGlu};
use crate::backend::{Backend, BackendError};

pub fn experts_row<B: Backend>(
    backend: &B,
    op: ExpertsRow<'_, '_, B>,
    out: ExpertsOut<'_, B>,
) -> Result<(), BackendError> {
    for expert in op.experts {
        backend.matmul_pair(MatmulPair { a: expert.gate, b: expert.up, x: op.x, rows: 1 }, out.gate, out.up)?;
        backend.swiglu(SwiGlu { up: out.up, values: op.width, limit: op.limit }, out.gate)?;
        backend.matmul(Matmul { w: expert.down, x: out.gate, rows: 1, groups: 1 }, out.y)?;
        backend.copy(out.y, 0, out.outputs, expert.place * op.hidden, op.hidden)?;
    }
    Ok(())
}
