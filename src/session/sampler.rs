//! Chooses the next token from logits. Owns the random numbers and scratch space; never changes the logits.
//! Order: temperature, top-k, top-p, min-p, each on what the one before left. Surprising fact: a seed keeps its meaning only as long
//! as every choice draws exactly one number, so even a choice among one candidate draws it (greedy choice never does). Who draws the token by
//! that number, this processor or a device, makes no difference: weights are whole numbers (`models::draw`).

use std::cmp::Ordering;

use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use thiserror::Error;

use crate::models::DrawRule;
use crate::models::draw::{Drawer, exp_down};
use crate::units::TokenId;

/// How to choose. [`SamplerParams::default`] is the publisher's advice for V4.1: temperature 1 and no filter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplerParams {
    /// 0 takes the most likely token; 1 follows the model.
    pub temperature: f32,
    /// Only this many of the most likely tokens; 0 is off.
    pub top_k: usize,
    /// Only the most likely tokens that together reach this probability; 1 is off.
    pub top_p: f32,
    /// Only tokens at least this fraction as likely as the most likely one; 0 is off.
    pub min_p: f32,
    /// Start of the random numbers.
    pub seed: u64,
}

impl Default for SamplerParams {
    fn default() -> Self {
        SamplerParams { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 }
    }
}

/// Parameters that mean nothing, or logits that cannot be chosen from.
#[derive(Debug, Error, PartialEq)]
pub enum SamplerError {
    #[error("{name} is {value}; use a number {range}")]
    Range { name: &'static str, value: f32, range: &'static str },
    #[error("the logit of token {id} is {value}; the model's output is broken, this is not a matter of sampling")]
    NotFinite { id: TokenId, value: f32 },
    #[error("every one of the {logits} logits is minus infinity; nothing can be chosen")]
    NoCandidate { logits: usize },
}

/// A token, chosen or a candidate, with its probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    pub id: TokenId,
    /// Natural logarithm of its probability under the model, before temperature and filters; NaN where it was not asked for.
    pub logprob: f32,
}

/// Best first: higher logit, then lower id. Adding zero makes the two zeros equal, as they are for [`greedy`].
fn rank((a_logit, a_id): (f32, TokenId), (b_logit, b_id): (f32, TokenId)) -> Ordering {
    (b_logit + 0.0).total_cmp(&(a_logit + 0.0)).then(a_id.cmp(&b_id))
}

/// Chooses tokens; one per conversation.
pub struct Sampler {
    params: SamplerParams,
    random: ChaCha12Rng,
    /// Kept between calls, so that only the first ones allocate.
    drawer: Drawer,
}

impl Sampler {
    /// A sampler at the start of its random numbers.
    ///
    /// # Errors
    /// [`SamplerError::Range`].
    pub fn new(params: SamplerParams) -> Result<Sampler, SamplerError> {
        let range = |name, value: f32, is_valid: bool, range| match is_valid {
            true => Ok(()),
            false => Err(SamplerError::Range { name, value, range }),
        };
        let SamplerParams { temperature, top_p, min_p, .. } = params;
        range("temperature", temperature, (0.0..=100.0).contains(&temperature), "from 0 to 100")?;
        range("top-p", top_p, top_p > 0.0 && top_p <= 1.0, "above 0, up to 1")?;
        range("min-p", min_p, (0.0..=1.0).contains(&min_p), "from 0 to 1")?;
        let random = ChaCha12Rng::seed_from_u64(params.seed);
        Ok(Sampler { params, random, drawer: Drawer::default() })
    }

    /// The parameters it was made with.
    pub fn params(&self) -> &SamplerParams {
        &self.params
    }

    /// How far the random numbers have been used up, in words of the generator.
    pub fn position(&self) -> u64 {
        // 2^64 words are out of reach.
        self.random.get_word_pos() as u64
    }

    /// Goes on at a position of the random numbers of the same seed.
    pub fn resume(&mut self, position: u64) {
        self.random.set_word_pos(u128::from(position));
    }

    /// Chooses a token; `logits` is `[vocab]`.
    ///
    /// # Errors
    /// [`SamplerError::NotFinite`] or [`SamplerError::NoCandidate`]; no random number is drawn then.
    pub fn sample(&mut self, logits: &[f32]) -> Result<Choice, SamplerError> {
        let id = self.choose(logits)?;
        Ok(Choice { id, logprob: logprob(logits, id) })
    }

    /// As [`Self::sample`], without the probability, which takes longer than a choice.
    ///
    /// # Errors
    /// Likewise.
    pub fn choose(&mut self, logits: &[f32]) -> Result<TokenId, SamplerError> {
        let best = greedy(logits)?;
        let Some(rule) = self.next_rule() else { return Ok(best) };
        self.take_number();
        Ok(self.drawer.draw(logits, best as usize, &rule) as TokenId)
    }

    /// By which rule the next token is drawn; `None` if the most likely one is taken, by the rule of [`greedy`]. Whoever draws it by this rule says so
    /// ([`Self::take_number`]).
    pub fn next_rule(&self) -> Option<DrawRule> {
        let SamplerParams { temperature, top_k, top_p, min_p, .. } = self.params;
        let number = || self.random.clone().next_u64();
        (temperature > 0.0).then(|| DrawRule { temperature, top_k, top_p, min_p, number: number() })
    }

    /// The token of [`Self::next_rule`] was drawn: the next one has another number.
    pub fn take_number(&mut self) {
        if self.params.temperature > 0.0 {
            self.random.next_u64();
        }
    }
}

/// The most likely token; among equals the lowest id.
///
/// # Errors
/// [`SamplerError::NotFinite`] for NaN or plus infinity, [`SamplerError::NoCandidate`] when all are minus infinity or there are none.
pub fn greedy(logits: &[f32]) -> Result<TokenId, SamplerError> {
    // Written so that several values are compared at a time.
    let mut largest = [f32::NEG_INFINITY; 16];
    let mut is_finite = true;
    for chunk in logits.chunks(16) {
        for (lane, &value) in largest.iter_mut().zip(chunk) {
            is_finite &= value < f32::INFINITY;
            *lane = if value > *lane { value } else { *lane };
        }
    }
    if !is_finite {
        let place = logits.iter().position(|value| value.is_nan() || *value == f32::INFINITY).unwrap_or(0);
        return Err(SamplerError::NotFinite { id: place as TokenId, value: logits[place] });
    }
    let largest = largest.into_iter().fold(f32::NEG_INFINITY, f32::max);
    match logits.iter().position(|&value| value == largest && value > f32::NEG_INFINITY) {
        Some(place) => Ok(place as TokenId),
        None => Err(SamplerError::NoCandidate { logits: logits.len() }),
    }
}

/// Natural logarithm of the probability of `id` under finite `logits`; minus infinity for a masked or unknown id.
pub fn logprob(logits: &[f32], id: TokenId) -> f32 {
    let logit = logits.get(id as usize).map_or(f64::NEG_INFINITY, |&logit| f64::from(logit));
    (logit - log_sum_exp(logits)) as f32
}

/// The `count` most likely tokens, best first, with the logarithms of their probabilities.
pub fn top_logprobs(logits: &[f32], count: usize) -> Vec<Choice> {
    let mut ids: Vec<TokenId> = (0..logits.len() as TokenId).collect();
    let by_rank = |a: &TokenId, b: &TokenId| rank((logits[*a as usize], *a), (logits[*b as usize], *b));
    if count < ids.len() {
        ids.select_nth_unstable_by(count, by_rank);
        ids.truncate(count);
    }
    ids.sort_unstable_by(by_rank);
    let total = log_sum_exp(logits);
    let with_logprob = |id: TokenId| Choice { id, logprob: (f64::from(logits[id as usize]) - total) as f32 };
    ids.into_iter().map(with_logprob).collect()
}

/// Logarithm of the sum of the exponentials, in eight sums side by side.
fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let mut sums = [0.0; 8];
    for chunk in logits.chunks(8) {
        for (sum, &logit) in sums.iter_mut().zip(chunk) {
            *sum += exp_down(f64::from(logit) - largest);
        }
    }
    largest + sums.iter().sum::<f64>().ln()
}

#[cfg(test)]
mod tests {
    use rand_chacha::rand_core::RngCore as _;

    use super::*;

    fn sampler(params: SamplerParams) -> Sampler {
        Sampler::new(params).unwrap()
    }

    /// Logits of the given probabilities.
    fn logits_of(probabilities: &[f32]) -> Vec<f32> {
        probabilities.iter().map(|probability| probability.ln()).collect()
    }

    /// How often each token is chosen in `draws` draws.
    fn counts(params: SamplerParams, logits: &[f32], draws: usize) -> Vec<usize> {
        let mut sampler = sampler(params);
        let mut counts = vec![0; logits.len()];
        for _ in 0..draws {
            counts[sampler.sample(logits).unwrap().id as usize] += 1;
        }
        counts
    }

    /// Checks that tokens are drawn with the expected probabilities: within five standard deviations, never at 0.
    fn check(params: SamplerParams, probabilities: &[f32], expected: &[f64]) {
        let draws = 20_000;
        let counts = counts(params, &logits_of(probabilities), draws);
        for (id, (&count, &p)) in counts.iter().zip(expected).enumerate() {
            let allowed = 5.0 * (p * (1.0 - p) * draws as f64).sqrt();
            assert!(
                (count as f64 - p * draws as f64).abs() <= allowed,
                "token {id}: {counts:?}, expected {expected:?}"
            );
        }
    }

    const P: [f32; 5] = [0.1, 0.4, 0.05, 0.25, 0.2];

    #[test]
    fn draws_follow_the_model_and_each_filter() {
        let all = SamplerParams { seed: 7, ..SamplerParams::default() };
        check(all, &P, &[0.1, 0.4, 0.05, 0.25, 0.2]);
        let squares: f64 = P.iter().map(|&p| f64::from(p * p)).sum();
        let squared: Vec<f64> = P.iter().map(|&p| f64::from(p * p) / squares).collect();
        check(SamplerParams { temperature: 0.5, ..all }, &P, &squared);
        check(SamplerParams { top_k: 2, ..all }, &P, &[0.0, 0.4 / 0.65, 0.0, 0.25 / 0.65, 0.0]);
        check(SamplerParams { top_k: 9, ..all }, &P, &[0.1, 0.4, 0.05, 0.25, 0.2]);
        // 0.4 + 0.25 does not reach 0.7, the third one does.
        check(SamplerParams { top_p: 0.7, ..all }, &P, &[0.0, 0.4 / 0.85, 0.0, 0.25 / 0.85, 0.2 / 0.85]);
        check(SamplerParams { top_p: 0.01, ..all }, &P, &[0.0, 1.0, 0.0, 0.0, 0.0]);
        // At least 0.24 of 0.4.
        check(SamplerParams { min_p: 0.6, ..all }, &P, &[0.0, 0.4 / 0.65, 0.0, 0.25 / 0.65, 0.0]);
        check(SamplerParams { min_p: 1.0, ..all }, &P, &[0.0, 1.0, 0.0, 0.0, 0.0]);
        // Top-p counts what top-k left: 0.4 of 0.65 reaches 0.6.
        check(SamplerParams { top_k: 2, top_p: 0.6, ..all }, &P, &[0.0, 1.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn a_seed_repeats_and_another_one_differs() {
        let logits: Vec<f32> = (0..1000).map(|id| (id % 7) as f32 * 0.1).collect();
        let run = |seed| -> Vec<TokenId> {
            let mut sampler = sampler(SamplerParams { seed, ..SamplerParams::default() });
            (0..32).map(|_| sampler.sample(&logits).unwrap().id).collect()
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
        // Fixed for ever: a seed that users wrote down must keep its text.
        assert_eq!(run(42)[..6], RUN_42);
    }

    #[test]
    fn a_resumed_sampler_goes_on_where_the_other_stopped() {
        let logits: Vec<f32> = (0..1000).map(|id| (id % 7) as f32 * 0.1).collect();
        let params = SamplerParams { seed: 9, ..SamplerParams::default() };
        let mut first = sampler(params);
        for drawn in 0..70 {
            let mut second = sampler(params);
            second.resume(first.position());
            let mut again = sampler(params);
            (0..drawn).for_each(|_| drop(again.sample(&logits)));
            assert_eq!(second.sample(&logits), again.sample(&logits), "after {drawn}");
            first.sample(&logits).unwrap();
        }
    }

    const RUN_42: [TokenId; 6] = [526, 543, 636, 405, 34, 415];

    #[test]
    fn one_number_is_drawn_for_each_choice() {
        let wide = vec![0.0; 100];
        let narrow = [0.0, -50.0];
        let mut mixed = sampler(SamplerParams { top_k: 1, ..SamplerParams::default() });
        let mut pure = sampler(SamplerParams { top_k: 1, ..SamplerParams::default() });
        assert_eq!(mixed.sample(&narrow).unwrap().id, 0);
        pure.sample(&wide).unwrap();
        assert!(mixed.sample(&[f32::NAN]).is_err());
        assert_eq!(mixed.random.next_u64(), pure.random.next_u64());
    }

    #[test]
    fn greedy_takes_the_lowest_id_of_equals() {
        assert_eq!(greedy(&[1.0, 3.0, 3.0, -1.0]), Ok(1));
        assert_eq!(greedy(&[-0.0, 0.0]), Ok(0));
        assert_eq!(top_logprobs(&[-0.0, 0.0], 1)[0].id, 0);
        assert_eq!(greedy(&[f32::NEG_INFINITY, -5.0]), Ok(1));
        let mut zero = sampler(SamplerParams { temperature: 0.0, top_k: 1, ..SamplerParams::default() });
        assert_eq!(zero.sample(&[1.0, 3.0, 3.0]).unwrap().id, 1);
    }

    #[test]
    fn masked_tokens_are_never_drawn() {
        let logits = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY, 0.0];
        let counts = counts(SamplerParams { temperature: 100.0, ..SamplerParams::default() }, &logits, 500);
        assert!(counts[0] == 0 && counts[2] == 0 && counts[1] > 0 && counts[3] > 0);
    }

    #[test]
    fn broken_logits_and_parameters_are_named() {
        let mut any = sampler(SamplerParams::default());
        assert!(matches!(any.sample(&[0.0, f32::NAN]), Err(SamplerError::NotFinite { id: 1, .. })));
        assert_eq!(any.sample(&[f32::INFINITY]), Err(SamplerError::NotFinite { id: 0, value: f32::INFINITY }));
        assert_eq!(any.sample(&[f32::NEG_INFINITY; 2]), Err(SamplerError::NoCandidate { logits: 2 }));
        assert_eq!(any.sample(&[]), Err(SamplerError::NoCandidate { logits: 0 }));
        let all = SamplerParams::default();
        for (params, expected) in [
            (SamplerParams { temperature: -1.0, ..all }, "temperature"),
            (SamplerParams { temperature: f32::NAN, ..all }, "temperature"),
            (SamplerParams { top_p: 0.0, ..all }, "top-p"),
            (SamplerParams { top_p: 1.1, ..all }, "top-p"),
            (SamplerParams { min_p: -0.1, ..all }, "min-p"),
            (SamplerParams { min_p: f32::NAN, ..all }, "min-p"),
        ] {
            assert!(matches!(Sampler::new(params), Err(SamplerError::Range { name, .. }) if name == expected));
        }
    }

    #[test]
    fn logprobs_are_those_of_the_model() {
        let logits = logits_of(&P);
        for (id, p) in (0..).zip(P) {
            assert!((logprob(&logits, id) - p.ln()).abs() < 1e-6);
        }
        let top = top_logprobs(&logits, 3);
        assert_eq!(top.iter().map(|choice| choice.id).collect::<Vec<_>>(), [1, 3, 4]);
        assert!((top[1].logprob - 0.25f32.ln()).abs() < 1e-6);
        assert_eq!(top_logprobs(&[1.0, 1.0, 1.0], 2).iter().map(|choice| choice.id).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(top_logprobs(&logits, 99).len(), 5);
        assert_eq!(logprob(&logits, 99), f32::NEG_INFINITY);
        let mut cold = sampler(SamplerParams { temperature: 0.1, top_k: 1, ..SamplerParams::default() });
        assert!((cold.sample(&logits).unwrap().logprob - 0.4f32.ln()).abs() < 1e-6);
    }
}
