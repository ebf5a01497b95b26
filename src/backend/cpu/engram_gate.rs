//! Gated addition of n-gram memory to the residual streams (spec 4.5).
//! Never mixes streams: each has its own key and gate, all share one value. Surprising fact: the gate takes the square
//! root of the similarity's magnitude and then puts its sign back.

use super::{CpuBackend, lanes, parts::parts2, pool::Pool};
use crate::backend::ops::EngramGate;

pub fn engram_gate(pool: &Pool, op: EngramGate<'_, CpuBackend>, streams: &mut [f32], gates: &mut [f32]) {
    let (n, hidden) = (op.stream_count, op.hidden);
    let norm = 1.0 / (hidden as f32).sqrt();
    let streams = (&mut streams[..op.rows * n * hidden], n * hidden);
    parts2(pool, streams, (&mut gates[..op.rows * n], n), 6 * n * hidden, |r, streams, gates| {
        let (keys, value) = op.keys_value[r * (n + 1) * hidden..][..(n + 1) * hidden].split_at(n * hidden);
        for (i, (stream, gate)) in streams.chunks_exact_mut(hidden).zip(gates).enumerate() {
            let part = i * hidden..(i + 1) * hidden;
            let key = &keys[part.clone()];
            let dot = lanes::dot4(stream, &op.q_norm[part.clone()], &op.k_norm[part], key);
            let d = dot * lanes::rms_factor(stream, op.rms_eps) * lanes::rms_factor(key, op.rms_eps) * norm;
            *gate = gate_of(d, op.floor);
            lanes::add_scaled(*gate, value, stream);
        }
    });
}

/// `sigmoid(copysign(sqrt(max(|d|, floor)), d))`.
fn gate_of(d: f32, floor: f32) -> f32 {
    lanes::sigmoid(d.abs().max(floor).sqrt().copysign(d))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spec appendix.
    #[test]
    fn gates_of_the_spec() {
        assert!((gate_of(0.0, 1e-6) - 0.50025).abs() < 1e-6);
        assert!((gate_of(-4.0, 1e-6) - 0.119_203).abs() < 1e-6);
    }
}
