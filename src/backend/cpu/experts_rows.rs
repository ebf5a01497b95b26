//! Some experts on rows of their own, one expert and a roomful of its rows after the other.
//! Never fuses anything: this is the definition that a device's fused kernels must equal. Surprising fact: it is generic, since it only
//! puts other ops in order.

use crate::backend::ops::{CombineExperts, ExpertsRows, Matmul, MatmulPair, MoveRows, SweptWork, SwiGlu};
use crate::backend::{Backend, BackendError};

/// `seen(i, rows, mid)` is told of the SwiGLU output (`[rows, width]`) of rows of expert `i` of the op.
pub fn experts_rows<B: Backend>(
    backend: &B,
    op: &ExpertsRows<'_, '_, B>,
    work: SweptWork<'_, B>,
    sums: &mut B::Buf,
    mut seen: impl FnMut(usize, usize, &B::Buf) -> Result<(), BackendError>,
) -> Result<(), BackendError> {
    let hidden = op.hidden;
    for (i, expert) in op.experts.iter().enumerate() {
        for first in expert.assigned.clone().step_by(op.room) {
            let range = first..expert.assigned.end.min(first + op.room);
            let rows = range.len();
            let x = MoveRows { src: op.x, indices: op.rows, range: range.clone(), width: hidden };
            backend.gather_rows(x, work.x)?;
            let pair = MatmulPair { a: expert.gate, b: expert.up, x: work.x, rows };
            backend.matmul_pair(pair, work.gate, work.up)?;
            backend.swiglu(SwiGlu { up: work.up, values: rows * op.width, limit: op.limit }, work.gate)?;
            seen(i, rows, work.gate)?;
            backend.matmul(Matmul { w: expert.down, x: work.gate, rows, groups: 1 }, work.y)?;
            let weights = MoveRows { src: op.weights, indices: op.places, range: range.clone(), width: 1 };
            backend.gather_rows(weights, work.weights)?;
            let before = MoveRows { src: &*sums, indices: op.rows, range: range.clone(), width: hidden };
            backend.gather_rows(before, work.before)?;
            // Exactly how a single row adds one output more.
            let (outputs, weights, shared) = (&*work.y, &*work.weights, &*work.before);
            let add = CombineExperts { outputs, weights, shared, rows, k: 1, width: hidden };
            backend.combine_experts(add, work.after)?;
            let back = MoveRows { src: &*work.after, indices: op.rows, range, width: hidden };
            backend.scatter_rows(back, sums)?;
        }
    }
    Ok(())
}
