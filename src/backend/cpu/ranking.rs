//! The k best of a list of scores.
//! Never depends on the order in which scores are looked at. Surprising fact: among equal scores the lower index wins
//! everywhere (experts, rows, blocks); coarse number formats make exact ties common.

use std::cmp::Ordering;

/// Falling score, then rising index. `+ 0.0` makes the two zeros equal.
fn better_first(scores: &[f32], a: u32, b: u32) -> Ordering {
    let (x, y) = (scores[a as usize] + 0.0, scores[b as usize] + 0.0);
    y.total_cmp(&x).then(a.cmp(&b))
}

/// Leaves the `k` best of `candidates` (indices into `scores`) in it, in rising index order.
pub fn keep_best(scores: &[f32], candidates: &mut Vec<u32>, k: usize) {
    if candidates.len() > k {
        if k > 0 {
            candidates.select_nth_unstable_by(k - 1, |a, b| better_first(scores, *a, *b));
        }
        candidates.truncate(k);
        candidates.sort_unstable();
    }
}

/// The `out.len()` best indices of `scores`, best first.
pub fn best_in_order(scores: &[f32], out: &mut [i32]) {
    for rank in 0..out.len() {
        let (done, rest) = out.split_at_mut(rank);
        let mut best: Option<u32> = None;
        for i in 0..scores.len() as u32 {
            if !done.contains(&(i as i32)) && best.is_none_or(|b| better_first(scores, i, b).is_lt()) {
                best = Some(i);
            }
        }
        rest[0] = best.map_or(-1, |b| b as i32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Few distinct values, so that ties are everywhere; a stable sort is the twin.
        #[test]
        fn equals_a_stable_sort(raw in prop::collection::vec(-3i8..3, 1..80), k in 0usize..90) {
            let scores: Vec<f32> = raw.iter().map(|v| if *v == -3 { -0.0 } else { f32::from(*v) }).collect();
            let mut sorted: Vec<u32> = (0..scores.len() as u32).collect();
            sorted.sort_by(|a, b| scores[*b as usize].partial_cmp(&scores[*a as usize]).unwrap());
            sorted.truncate(k);
            let mut ordered = vec![0i32; k.min(scores.len())];
            best_in_order(&scores, &mut ordered);
            prop_assert_eq!(&ordered, &sorted.iter().map(|v| *v as i32).collect::<Vec<_>>());
            let mut kept: Vec<u32> = (0..scores.len() as u32).collect();
            keep_best(&scores, &mut kept, k);
            sorted.sort_unstable();
            prop_assert_eq!(kept, sorted);
        }
    }
}
