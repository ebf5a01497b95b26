//! Clamped SwiGLU of experts and the shared expert (spec 3.9).
//! Never clamps the gate from below. Surprising fact: the clamps are part of the model, not a guard.

use super::{CpuBackend, lanes, parts::parts, pool::Pool};
use crate::backend::ops::SwiGlu;

/// Values of one task.
const PART: usize = 512;

pub fn swiglu(pool: &Pool, op: SwiGlu<'_, CpuBackend>, gate: &mut [f32]) {
    let apply = |gate: &mut [f32], up: &[f32]| {
        for (g, u) in gate.iter_mut().zip(up) {
            let x = g.min(op.limit);
            *g = x * lanes::sigmoid(x) * u.clamp(-op.limit, op.limit);
        }
    };
    let whole = op.values / PART * PART;
    let (whole_parts, tail) = gate[..op.values].split_at_mut(whole);
    parts(pool, whole_parts, PART, 40 * PART, |i, gate| apply(gate, &op.up[i * PART..][..PART]));
    apply(tail, &op.up[whole..op.values]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gate_is_clamped_above_only_and_up_on_both_sides() {
        let pool = Pool::new(1).unwrap();
        let up = vec![5.0, -5.0, 1.0];
        let mut gate = vec![3.0, -3.0, 0.0];
        swiglu(&pool, SwiGlu { up: &up, values: 3, limit: 2.0 }, &mut gate);
        let silu = |x: f32| x / (1.0 + (-x).exp());
        for (got, want) in gate.iter().zip([silu(2.0) * 2.0, silu(-3.0) * -2.0, 0.0]) {
            assert!((got - want).abs() < 1e-6, "{got} {want}");
        }
    }
}
