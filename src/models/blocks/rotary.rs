//! Angles per position of rotated pairs: plain and with YaRN's blend of frequencies.
//! Never scales magnitudes: YaRN's factor is 1 in these models. Surprising fact: whole pairs are interpolated or not, with a linear ramp
//! between the pair that turns `beta_fast` times over the original length and the one that turns `beta_slow` times.

/// Rotary embedding of layers that see compressed rows.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Yarn {
    pub theta: f32,
    pub factor: f32,
    pub original_positions: f32,
    pub beta_fast: f32,
    pub beta_slow: f32,
}

fn plain(theta: f32, rotary: usize, pair: usize) -> f64 {
    f64::from(theta).powf(-2.0 * pair as f64 / rotary as f64)
}

/// Angle per position of each of `rotary / 2` pairs, without interpolation.
pub fn plain_freqs(theta: f32, rotary: usize) -> Vec<f32> {
    (0..rotary / 2).map(|i| plain(theta, rotary, i) as f32).collect()
}

/// Angle per position of each of `rotary / 2` pairs.
pub fn yarn_freqs(yarn: &Yarn, rotary: usize) -> Vec<f32> {
    let width = rotary as f64;
    let theta = f64::from(yarn.theta);
    let turns_at = |beta: f32| {
        let ratio = f64::from(yarn.original_positions) / (f64::from(beta) * std::f64::consts::TAU);
        width * ratio.ln() / (2.0 * theta.ln())
    };
    let low = turns_at(yarn.beta_fast).floor().max(0.0);
    let high = turns_at(yarn.beta_slow).ceil().min(width - 1.0);
    // The published code widens an empty ramp by this much, so as not to divide by zero.
    let span = if high > low { high - low } else { 0.001 };
    (0..rotary / 2)
        .map(|i| {
            let ramp = ((i as f64 - low) / span).clamp(0.0, 1.0);
            let plain = plain(yarn.theta, rotary, i);
            (plain * (1.0 - ramp) + plain / f64::from(yarn.factor) * ramp) as f32
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spec deepseek-v4, 3.4.
    #[test]
    fn check_values_of_the_spec() {
        let yarn =
            Yarn { theta: 160_000.0, factor: 16.0, original_positions: 65_536.0, beta_fast: 32.0, beta_slow: 1.0 };
        let freqs = yarn_freqs(&yarn, 64);
        for (pair, expected) in [
            (0, 1.0),
            (1, 6.876_560_2e-1),
            (15, 3.635_538_5e-3),
            (16, 2.265_625e-3),
            (17, 1.396_801_3e-3),
            (20, 2.969_777_7e-4),
            (24, 1.953_125e-5),
            (26, 3.694_303e-6),
            (31, 5.680_529e-7),
        ] {
            let found: f32 = freqs[pair];
            assert!((found / expected - 1.0f32).abs() < 1e-6, "pair {pair}: {found} for {expected}");
        }
        assert_eq!(plain_freqs(10_000.0, 4), [1.0, 0.01]);
    }
}
