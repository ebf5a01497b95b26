//! Which experts the next layer's router would choose for the hidden state of this one (no section of a spec: it changes no result).
//! Owns the scores of one guess; never touches a device. Surprising fact: the next router is applied to this layer's normalised input,
//! before attention and experts have changed it; on trained models that is often right for the best few.

use crate::backend::ops::router_score;
use crate::units::ExpertIdx;

/// Host memory of a guess.
#[derive(Default)]
pub struct Guess {
    /// `[experts]`: logits, then scores.
    pub scores: Vec<f32>,
    /// `[experts]`.
    pub bias: Vec<f32>,
    /// `[experts]` at most, best first.
    pub ids: Vec<ExpertIdx>,
}

impl Guess {
    /// Room for `experts` experts.
    pub fn new(experts: usize) -> Self {
        Self {
            scores: Vec::with_capacity(experts),
            bias: Vec::with_capacity(experts),
            ids: Vec::with_capacity(experts),
        }
    }

    /// Bytes that [`Guess::new`] takes.
    pub fn bytes_for(experts: usize) -> u64 {
        (experts * (2 * size_of::<f32>() + size_of::<ExpertIdx>())) as u64
    }

    /// Leaves the `count` best experts in `ids`; the lower one of equals first.
    pub fn choose(&mut self, count: usize) {
        let Self { scores, bias, ids } = self;
        scores.iter_mut().zip(bias.iter()).for_each(|(score, bias)| *score = router_score(*score) + bias);
        ids.clear();
        ids.extend((0..scores.len()).map(|at| ExpertIdx(at as u16)));
        let better =
            |a: &ExpertIdx, b: &ExpertIdx| scores[usize::from(b.0)].total_cmp(&scores[usize::from(a.0)]).then(a.cmp(b));
        if ids.len() > count {
            ids.select_nth_unstable_by(count, better);
            ids.truncate(count);
        }
        ids.sort_unstable_by(better);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_by_biased_score_come_first() {
        let mut guess = Guess::new(5);
        guess.scores.extend([0.0, 1.0, 1.0, -3.0, 0.5]);
        guess.bias.extend([0.0, 0.0, 0.0, 9.0, 0.0]);
        guess.choose(3);
        assert_eq!(guess.ids, [3, 1, 2].map(ExpertIdx));
        assert!(guess.ids.capacity() >= 5);
    }
}
