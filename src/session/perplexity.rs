//! How well a model predicts a text: windows of tokens, each from a fresh state, mean negative log-likelihood.
//! Never carries state across windows. Surprising fact: the begin token opens every window and is not itself predicted, so the
//! number does not depend on where the text was cut beyond the loss of context there.

use crate::models::Want;
use crate::session::sampler::logprob;
use crate::session::timeline::{Flow, SessionError, StopAsked, Timeline, Watcher};
use crate::units::TokenId;

/// Sum over all predicted tokens.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Likelihood {
    /// Sum of negative log-probabilities, nats.
    pub nll_sum: f64,
    pub predicted: u64,
    pub windows: u64,
    /// Tokens whose most likely prediction was right.
    pub top1: u64,
}

impl Likelihood {
    /// Mean negative log-likelihood, nats a token; NaN when nothing was predicted.
    pub fn nll(&self) -> f64 {
        self.nll_sum / self.predicted as f64
    }

    /// Its exponential.
    pub fn perplexity(&self) -> f64 {
        self.nll().exp()
    }
}

struct Scorer<'a, 'w> {
    window: &'a [TokenId],
    sum: &'a mut Likelihood,
    outer: &'w mut dyn Watcher,
}

impl Watcher for Scorer<'_, '_> {
    fn prefill(&mut self, _done: usize, _total: usize) -> Flow {
        Flow::Continue
    }

    fn stop_asked(&self) -> Option<StopAsked> {
        self.outer.stop_asked()
    }

    fn has_probe(&self) -> bool {
        self.outer.has_probe()
    }

    fn probe(&mut self) -> Option<&mut dyn crate::models::probe::Probe> {
        self.outer.probe()
    }

    fn logits(&mut self, position: usize, logits: &[f32]) {
        let Some(&next) = self.window.get(position + 1) else { return };
        let score = logprob(logits, next);
        self.sum.nll_sum -= f64::from(score);
        self.sum.predicted += 1;
        let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        self.sum.top1 += u64::from(logits[next as usize] == best);
    }
}

/// Scores `tokens` in windows of `window` tokens (the begin token included, when there is one).
///
/// # Errors
/// A failed pass; `Interrupted` when the watcher stops it; `EmptyPrompt` for fewer than two tokens.
pub fn measure(
    timeline: &mut Timeline,
    tokens: &[TokenId],
    bos: Option<TokenId>,
    window: usize,
    watcher: &mut dyn Watcher,
) -> Result<Likelihood, SessionError> {
    let mut sum = Likelihood::default();
    let text_tokens = window.saturating_sub(usize::from(bos.is_some())).max(1);
    let mut done = 0;
    for part in tokens.chunks(text_tokens) {
        if watcher.prefill(done, tokens.len()) == Flow::Stop {
            return Err(SessionError::Interrupted);
        }
        done += part.len();
        let window: Vec<TokenId> = bos.iter().chain(part).copied().collect();
        if window.len() < 2 {
            continue;
        }
        timeline.clear();
        let mut scorer = Scorer { window: &window, sum: &mut sum, outer: watcher };
        timeline.sync(&window, Want::All, &mut scorer)?;
        sum.windows += 1;
    }
    if sum.predicted == 0 {
        return Err(SessionError::EmptyPrompt);
    }
    Ok(sum)
}
