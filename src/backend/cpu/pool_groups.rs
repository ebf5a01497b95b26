//! Gated pooling of groups of tokens (spec deepseek-v4, 3.7), with or without overlap.
//! Never reads a slot of a position before the text. Surprising fact: the first group of an overlapping kind has no group before it, so
//! its sums run over its own tokens only.

use super::{CpuBackend, lanes, parts::parts, pool::Pool};
use crate::backend::ops::PoolGroups;

pub fn pool_groups(pool: &Pool, op: PoolGroups<'_, CpuBackend>, out: &mut [f32]) {
    let (width, ratio) = (op.width, op.ratio);
    let row = if op.overlaps { 2 * width } else { width };
    let tokens = if op.overlaps { 2 * ratio } else { ratio };
    let first = op.groups.start;
    parts(pool, &mut out[..op.groups.len() * width], width, 40 * tokens * width, |at, out| {
        let group = first + at;
        // Slot and gate row of each token, and where its half begins.
        let list = |before: bool, half: usize| {
            let begin = (group - usize::from(before)) * ratio;
            (0..ratio).map(move |i| ((begin + i) % op.slots * row + half, i * row + half))
        };
        let own = list(false, row - width);
        let before = (op.overlaps && group > 0).then(|| list(true, 0)).into_iter().flatten();
        let tokens: Vec<(usize, usize)> = before.chain(own).collect();
        for (i, out) in out.iter_mut().enumerate() {
            let gate = |&(slot, bias): &(usize, usize)| op.gates[slot + i] + op.bias[bias + i];
            let most = tokens.iter().map(gate).fold(f32::NEG_INFINITY, f32::max);
            let (mut sum, mut weights) = (0.0f32, 0.0f32);
            for token in &tokens {
                let weight = lanes::exp(gate(token) - most);
                sum += weight * op.values[token.0 + i];
                weights += weight;
            }
            *out = sum / weights;
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pooled(
        values: &[f32],
        gates: &[f32],
        bias: &[f32],
        (slots, ratio, overlaps): (usize, usize, bool),
        groups: std::ops::Range<usize>,
    ) -> Vec<f32> {
        let pool = Pool::new(1).unwrap();
        let (values, gates, bias) = (values.to_vec(), gates.to_vec(), bias.to_vec());
        let mut out = vec![f32::NAN; groups.len()];
        let op = PoolGroups { values: &values, gates: &gates, bias: &bias, slots, width: 1, ratio, overlaps, groups };
        pool_groups(&pool, op, &mut out);
        out
    }

    #[test]
    fn even_gates_give_means_and_the_ring_wraps() {
        // Positions 3, 4, 5 are in slots 0, 1, 2 of the second lap.
        let values = [3.0, 4.0, 5.0];
        assert_eq!(pooled(&values, &[0.0; 3], &[0.0; 3], (3, 3, false), 1..2), [4.0]);
        // A bias on the last token of a group takes it all.
        assert_eq!(pooled(&values, &[0.0; 3], &[0.0, 0.0, 200.0], (3, 3, false), 1..2), [5.0]);
    }

    #[test]
    fn overlap_takes_first_halves_of_the_group_before() {
        // Four tokens, ratio 2: (for the next group, for the own group).
        let values = [10.0, 1.0, 20.0, 2.0, 30.0, 3.0, 40.0, 4.0];
        let found = pooled(&values, &[0.0; 8], &[0.0; 4], (4, 2, true), 0..2);
        assert_eq!(found, [1.5, (10.0 + 20.0 + 3.0 + 4.0) / 4.0]);
    }
}
