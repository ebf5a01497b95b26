//! How often the router is to choose each expert, as biases of its scores.
//! Owns the arithmetic from wanted frequencies to biases; never looks at a token. Surprising fact: the bias follows in closed form,
//! because scores of random weights are known: the logit of an expert is normal with variance one.

use std::fmt;
use std::str::FromStr;

use super::SynthError;

/// Largest frequency that is asked of one expert: in every token would need an endless bias.
const FREQUENCY_MAX: f64 = 0.97;

/// Shares of the experts in the choices of a layer.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Routing {
    /// All alike.
    Uniform,
    /// The expert of rank `r` is chosen in proportion to `r` to the power of `-s`; every layer has ranks of its own.
    Zipf(f64),
}

impl FromStr for Routing {
    type Err = SynthError;

    fn from_str(text: &str) -> Result<Self, SynthError> {
        let exponent = text.strip_prefix("zipf:").and_then(|s| s.parse::<f64>().ok());
        match (text, exponent) {
            ("uniform", _) => Ok(Self::Uniform),
            (_, Some(s)) if (0.0..=8.0).contains(&s) => Ok(Self::Zipf(s)),
            _ => Err(SynthError::Routing { given: text.into() }),
        }
    }
}

impl fmt::Display for Routing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uniform => f.write_str("uniform"),
            Self::Zipf(s) => write!(f, "zipf:{s}"),
        }
    }
}

impl Routing {
    /// Biases by rank, for `experts` of which a token uses `k`.
    pub(super) fn biases(self, experts: usize, k: usize) -> Vec<f32> {
        match self {
            Self::Uniform => vec![0.0; experts],
            // An expert is chosen when score plus bias exceeds a bar that hardly moves from token to token; put the bar at 0.
            Self::Zipf(s) => frequencies(experts, k, s).into_iter().map(|p| -score(upper_quantile(p)) as f32).collect(),
        }
    }
}

/// Frequencies by rank: a power law that sums to `k`, cut where it would exceed certainty.
fn frequencies(experts: usize, k: usize, s: f64) -> Vec<f64> {
    let weights: Vec<f64> = (1..=experts).map(|rank| (rank as f64).powf(-s)).collect();
    let wanted = (k as f64).min(FREQUENCY_MAX * experts as f64);
    let sum_at = |c: f64| -> f64 { weights.iter().map(|w| (c * w).min(FREQUENCY_MAX)).sum() };
    let (mut low, mut high) = (0.0, 1.0);
    while sum_at(high) < wanted && high < 1e300 {
        high *= 2.0;
    }
    for _ in 0..200 {
        let middle = 0.5 * (low + high);
        if sum_at(middle) < wanted { low = middle } else { high = middle }
    }
    // The rarest keep a chance: a quantile of zero does not exist.
    weights.iter().map(|w| (high * w).clamp(1e-9, FREQUENCY_MAX)).collect()
}

/// The router's score of a logit (spec 3.9).
pub(super) fn score(logit: f64) -> f64 {
    (logit.max(0.0) + (-logit.abs()).exp().ln_1p()).sqrt()
}

/// The value that a standard normal variable exceeds with probability `p` (Abramowitz and Stegun 26.2.23; error below 4.5e-4).
fn upper_quantile(p: f64) -> f64 {
    if p > 0.5 {
        return -upper_quantile(1.0 - p);
    }
    let t = (-2.0 * p.ln()).sqrt();
    let top = 2.515_517 + t * (0.802_853 + t * 0.010_328);
    let bottom = 1.0 + t * (1.432_788 + t * (0.189_269 + t * 0.001_308));
    t - top / bottom
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_known_probabilities() {
        for (p, z) in [(0.5, 0.0), (0.158_655, 1.0), (0.022_75, 2.0), (0.841_345, -1.0), (0.001_35, 3.0)] {
            assert!((upper_quantile(p) - z).abs() < 1e-3, "{p}: {}", upper_quantile(p));
        }
    }

    #[test]
    fn frequencies_sum_to_the_choices_of_a_token() {
        for (experts, k, s) in [(384, 6, 1.0), (384, 6, 3.0), (16, 4, 0.5), (8, 8, 1.0)] {
            let found = frequencies(experts, k, s);
            let wanted = (k as f64).min(FREQUENCY_MAX * experts as f64);
            assert!((found.iter().sum::<f64>() - wanted).abs() < 1e-3, "{experts} {k} {s}");
            assert!(found.windows(2).all(|w| w[0] >= w[1]));
        }
    }

    #[test]
    fn names_are_read_and_written_alike() {
        for text in ["uniform", "zipf:1.1", "zipf:0"] {
            assert_eq!(text.parse::<Routing>().unwrap().to_string(), text);
        }
        for text in ["zipf", "zipf:", "zipf:-1", "zipf:9", "zipf:nan", "even"] {
            assert!(text.parse::<Routing>().is_err(), "{text}");
        }
    }
}
