//! Guesses which experts the next layer will route, from the hidden state of this one (no section of the spec: it changes no result).
//! Owns the scores of one guess; never touches a buffer that the pass still needs. Surprising fact: the next router is applied to this
//! layer's normalised input, before attention and experts have changed it; on trained models that is often right for the best few.

use super::pass::Pass;
use crate::backend::ops::router_score;
use crate::backend::{Backend, BackendError};
use crate::models::supply::ExpertSupply;
use crate::units::{ExpertIdx, LayerIdx};

/// Host memory of a guess.
#[derive(Default)]
pub struct Guess {
    /// `[experts]`.
    scores: Vec<f32>,
    /// `[experts]`.
    bias: Vec<f32>,
    /// `[experts]` at most, best first.
    ids: Vec<ExpertIdx>,
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
    fn choose(&mut self, count: usize) {
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

impl<B: Backend> Pass<'_, B> {
    /// Tells `supply` what the layer after `layer` will probably request, if it wants to know. For steps of one token, between the
    /// routing of `layer` and its sum.
    pub fn guess_next(
        &mut self,
        layer: usize,
        supply: &dyn ExpertSupply<B>,
        guess: &mut Guess,
    ) -> Result<(), BackendError> {
        let (ctx, next) = (self.ctx, layer + 1);
        let wanted = if ctx.rows == 1 && next < ctx.config.layers.len() { supply.guesses_wanted() } else { 0 };
        if wanted == 0 {
            return Ok(());
        }
        let (weights, w) = (&ctx.layer(next).moe, &mut *self.work);
        // The logits of this layer have been used up by its routing.
        ctx.matmul(&weights.router, &w.x, &mut w.router_logits)?;
        guess.scores.resize(ctx.config.experts, 0.0);
        guess.bias.resize(ctx.config.experts, 0.0);
        ctx.backend.download(&w.router_logits, 0, &mut guess.scores)?;
        ctx.backend.download(&weights.bias, 0, &mut guess.bias)?;
        guess.choose(wanted);
        supply.guess(LayerIdx(next as u16), &guess.ids);
        Ok(())
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
