//! Exponentially decayed use counts without touching unused keys. Owns the growing weight of a use.
//! Never reads a clock: time is the epoch. Surprising fact: instead of all counts shrinking, the weight of a new use
//! grows, so the order of unused keys never changes and nothing needs an update.

use crate::policy::Epoch;

/// Above this weight the owner divides everything by it; far below the largest f32.
const WEIGHT_MAX: f64 = (1u64 << 60) as f64;

/// Weight of one use, doubling every half-life.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inflation {
    weight: f64,
    per_epoch: f64,
    epoch: Epoch,
}

impl Inflation {
    /// `half_life_epochs` must be at least 1.
    pub(crate) fn new(half_life_epochs: u32) -> Self {
        Self { weight: 1.0, per_epoch: two_to_the_inverse(half_life_epochs.max(1)), epoch: Epoch(0) }
    }

    /// Weight of a use now, as added to a count.
    pub(crate) fn weight(&self) -> f32 {
        self.weight as f32
    }

    /// Moves to `epoch`. A returned factor must be multiplied into every count.
    pub(crate) fn advance(&mut self, epoch: Epoch) -> Option<f32> {
        let steps = epoch.0.saturating_sub(self.epoch.0);
        self.epoch = self.epoch.max(epoch);
        self.weight *= power(self.per_epoch, steps);
        if self.weight < WEIGHT_MAX {
            return None;
        }
        let factor = 1.0 / self.weight;
        self.weight = 1.0;
        Some(factor as f32)
    }
}

/// 2^(1/n) by its series: exp(x) with x = ln 2 / n <= 0.7 needs 20 terms for the last bit.
fn two_to_the_inverse(n: u32) -> f64 {
    let x = core::f64::consts::LN_2 / f64::from(n);
    (1..=20).rev().fold(1.0, |sum, k| 1.0 + sum * x / f64::from(k))
}

/// `base^exponent` by squaring; overflow ends at infinity.
fn power(mut base: f64, mut exponent: u64) -> f64 {
    let mut product = 1.0;
    while exponent > 0 {
        if exponent & 1 == 1 {
            product *= base;
        }
        base *= base;
        exponent >>= 1;
    }
    product
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weight_doubles_every_half_life() {
        for half_life in [1, 7, 64, 1024] {
            let mut inflation = Inflation::new(half_life);
            for doublings in 1..=3u64 {
                assert_eq!(inflation.advance(Epoch(doublings * u64::from(half_life))), None);
                let expected = f64::from(1u32 << doublings);
                assert!((inflation.weight / expected - 1.0).abs() < 1e-12, "{half_life}: {}", inflation.weight);
            }
        }
    }

    #[test]
    fn a_large_weight_is_handed_to_the_counts() {
        let mut inflation = Inflation::new(1);
        assert_eq!(inflation.advance(Epoch(59)), None);
        let before = f64::from(inflation.weight());
        let factor = inflation.advance(Epoch(61)).expect("2^61 is past the limit");
        assert_eq!(f64::from(factor) * before * 4.0, 1.0);
        assert_eq!(inflation.weight(), 1.0);
        // A pause longer than any count survives leaves zero, not a NaN.
        assert_eq!(inflation.advance(Epoch(100_000)), Some(0.0));
    }
}
