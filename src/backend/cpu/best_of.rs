//! The place of the largest value: the greedy choice of a token.
//! Never chooses from broken values. Surprising fact: both zeros are equal, so the lower place wins among them.

use super::CpuBackend;
use crate::backend::ops::BestOf;

pub fn best_of(op: BestOf<'_, CpuBackend>) -> i32 {
    let mut best = (f32::NEG_INFINITY, -1);
    for (&value, place) in op.values[..op.count].iter().zip(0..) {
        if value.is_nan() || value == f32::INFINITY {
            return -1;
        }
        if value > best.0 {
            best = (value, place);
        }
    }
    best.1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(values: &[f32], expected: i32) {
        let values = values.to_vec();
        assert_eq!(best_of(BestOf { values: &values, count: values.len() }), expected, "{values:?}");
    }

    #[test]
    fn the_lowest_place_of_equals_wins_and_broken_values_have_no_best() {
        check(&[1.0, 3.0, 3.0, -1.0], 1);
        check(&[-0.0, 0.0], 0);
        check(&[f32::NEG_INFINITY, -5.0], 1);
        check(&[f32::NEG_INFINITY; 2], -1);
        check(&[1.0, f32::NAN], -1);
        check(&[f32::INFINITY, 1.0], -1);
        check(&[], -1);
    }
}
