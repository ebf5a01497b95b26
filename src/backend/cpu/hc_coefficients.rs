//! Coefficients of the hyper-connections (spec 3.2): sigmoid weights and a Sinkhorn-normalised combination matrix.
//! Never touches the streams beyond their norm. Surprising fact: the norm factor is applied to the mixed values, so the
//! matrix product runs over raw streams; mathematically that is the same.

use super::{CpuBackend, lanes, parts::parts2, pool::Pool};
use crate::backend::ops::{HcCoefficients, HcOut};

pub fn hc_coefficients(pool: &Pool, op: HcCoefficients<'_, CpuBackend>, out: HcOut<'_, CpuBackend>) {
    let n = op.stream_count;
    let (row_len, mix_len) = (n * op.hidden, n * (n + 2));
    let (base, scale) = (&op.base[..mix_len], &op.scale[..3]);
    // One output row is (pre, post) beside comb; both are split over the rows alike.
    let mut weights = vec![0.0f32; op.rows * 2 * n];
    let comb = &mut out.comb[..op.rows * n * n];
    parts2(pool, (&mut weights, 2 * n), (comb, n * n), row_len, |r, weights, comb| {
        let factor = lanes::rms_factor(&op.streams[r * row_len..][..row_len], op.rms_eps);
        let mix = &op.mix[r * mix_len..][..mix_len];
        let value = |i: usize, group: usize| mix[i] * factor * scale[group] + base[i];
        for k in 0..n {
            weights[k] = lanes::sigmoid(value(k, 0)) + op.hc_eps;
            weights[n + k] = 2.0 * lanes::sigmoid(value(n + k, 1));
        }
        for (i, c) in comb.iter_mut().enumerate() {
            *c = value(2 * n + i, 2);
        }
        sinkhorn(comb, n, op.hc_eps, op.iterations);
    });
    for (r, weights) in weights.chunks_exact(2 * n).enumerate() {
        out.pre[r * n..][..n].copy_from_slice(&weights[..n]);
        out.post[r * n..][..n].copy_from_slice(&weights[n..]);
    }
}

/// Row softmax, then alternating column and row normalisation of an `n` x `n` matrix.
fn sinkhorn(c: &mut [f32], n: usize, eps: f32, iterations: usize) {
    for row in c.chunks_exact_mut(n) {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        row.iter_mut().for_each(|v| *v = lanes::exp(*v - max));
        let sum: f32 = row.iter().sum();
        row.iter_mut().for_each(|v| *v = *v / sum + eps);
    }
    for iteration in 0..iterations {
        if iteration > 0 {
            for row in c.chunks_exact_mut(n) {
                let sum = row.iter().sum::<f32>() + eps;
                row.iter_mut().for_each(|v| *v /= sum);
            }
        }
        for column in 0..n {
            let sum = (0..n).map(|row| c[row * n + column]).sum::<f32>() + eps;
            (0..n).for_each(|row| c[row * n + column] /= sum);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spec appendix: with mix and base 0, pre is 0.500001, post 1 and the combination 1/4 each.
    #[test]
    fn zero_mix_gives_even_coefficients() {
        let pool = Pool::new(1).unwrap();
        let (mut pre, mut post, mut comb) = (vec![0.0; 4], vec![0.0; 4], vec![0.0; 16]);
        let (streams, mix, base, scale) = (vec![1.0; 32], vec![0.0; 24], vec![0.0; 24], vec![1.0; 3]);
        let op = HcCoefficients {
            streams: &streams,
            mix: &mix,
            base: &base,
            scale: &scale,
            rows: 1,
            stream_count: 4,
            hidden: 8,
            rms_eps: 1e-20,
            hc_eps: 1e-6,
            iterations: 20,
        };
        hc_coefficients(&pool, op, HcOut { pre: &mut pre, post: &mut post, comb: &mut comb });
        assert!(pre.iter().all(|v| (v - 0.500001).abs() < 1e-7), "{pre:?}");
        assert!(post.iter().all(|v| (v - 1.0).abs() < 1e-7), "{post:?}");
        assert!(comb.iter().all(|v| (v - 0.25).abs() < 2e-6), "{comb:?}");
    }
}
