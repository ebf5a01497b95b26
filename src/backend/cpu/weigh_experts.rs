//! Weights of experts that a table names (spec deepseek-v4, 3.9): no choice, no bias.
//! Never looks at experts that were not named. Surprising fact: the sum runs in the order of the table.

use super::CpuBackend;
use crate::backend::ops::{WeighExperts, router_score};

pub fn weigh_experts(op: WeighExperts<'_, CpuBackend>, weights: &mut [f32]) {
    let len = op.rows * op.k;
    let rows = weights[..len].chunks_exact_mut(op.k).zip(op.ids[..len].chunks_exact(op.k));
    for (r, (weights, ids)) in rows.enumerate() {
        let logits = &op.logits[r * op.experts..][..op.experts];
        for (weight, id) in weights.iter_mut().zip(ids) {
            *weight = router_score(logits[*id as usize]);
        }
        let sum = if op.normalise { weights.iter().sum::<f32>() + 1e-20 } else { 1.0 };
        weights.iter_mut().for_each(|w| *w = op.scale * *w / sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_experts_share_the_scale_by_their_scores() {
        let (logits, ids) = (vec![0.5, 1.0, -2.0, 9.0, 1.0, 1.0, 1.0, 1.0], vec![2, 0, 3, 1]);
        let mut weights = vec![f32::NAN; 4];
        let (rows, experts, k, scale) = (2, 4, 2, 1.5);
        weigh_experts(
            WeighExperts { logits: &logits, ids: &ids, rows, experts, k, scale, normalise: true },
            &mut weights,
        );
        let (a, b) = (router_score(-2.0), router_score(0.5));
        let expected = [1.5 * a / (a + b), 1.5 * b / (a + b), 0.75, 0.75];
        assert!(weights.iter().zip(expected).all(|(w, e)| (w - e).abs() < 1e-6), "{weights:?}");
        weigh_experts(
            WeighExperts { logits: &logits, ids: &ids, rows, experts, k, scale, normalise: false },
            &mut weights,
        );
        assert_eq!(weights[1], 1.5 * b);
    }
}
