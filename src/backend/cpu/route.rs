//! Router (spec 3.9): which experts a row uses, and with which weights.
//! Never lets the bias into the weights. Surprising fact: experts come out by falling biased score, and that order is the
//! order in which their outputs are added.

use super::{CpuBackend, parts::parts2, pool::Pool, ranking};
use crate::backend::ops::{Route, router_score as score};

pub fn route(pool: &Pool, op: Route<'_, CpuBackend>, ids: &mut [i32], weights: &mut [f32]) {
    let (ids, weights) = (&mut ids[..op.rows * op.k], &mut weights[..op.rows * op.k]);
    let cost = op.experts * (40 + op.k);
    parts2(pool, (ids, op.k), (weights, op.k), cost, |r, ids, weights| {
        let logits = &op.logits[r * op.experts..][..op.experts];
        let biased: Vec<f32> = logits.iter().zip(&op.bias[..op.experts]).map(|(l, b)| score(*l) + b).collect();
        ranking::best_in_order(&biased, ids);
        for (weight, id) in weights.iter_mut().zip(ids.iter()) {
            *weight = score(logits[*id as usize]);
        }
        let sum = if op.normalise { weights.iter().sum::<f32>() + 1e-20 } else { 1.0 };
        weights.iter_mut().for_each(|w| *w = op.scale * *w / sum);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spec appendix.
    #[test]
    fn scores_of_the_spec() {
        for (logit, expected) in [(0.0, 0.832_555), (1.0, 1.145_976), (-1.0, 0.559_698)] {
            assert!((score(logit) - expected).abs() < 1e-6, "{logit}: {}", score(logit));
        }
        assert_eq!(score(200.0), 200.0f32.sqrt());
        assert!(score(-80.0) > 0.0);
    }

    #[test]
    fn bias_selects_but_does_not_weigh_and_ties_go_to_the_lower_expert() {
        let pool = Pool::new(1).unwrap();
        let logits = vec![0.5, 1.0, 1.0, -2.0];
        let bias = vec![0.0, 0.0, 0.0, 9.0];
        let (mut ids, mut weights) = (vec![0; 2], vec![0.0; 2]);
        let op = Route { logits: &logits, bias: &bias, rows: 1, experts: 4, k: 2, scale: 1.5, normalise: true };
        route(&pool, op, &mut ids, &mut weights);
        assert_eq!(ids, [3, 1]);
        let (a, b) = (score(-2.0), score(1.0));
        assert!((weights[0] - 1.5 * a / (a + b)).abs() < 1e-6 && (weights[1] - 1.5 * b / (a + b)).abs() < 1e-6);
    }
}
