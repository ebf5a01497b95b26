//! A place drawn at random, larger values more often: the choice of a token at a temperature.
//! Never rounds a sum: weights are whole numbers, so sums are the same in every order, and every device draws the same place for the same
//! random number. Surprising fact: filters name one last value that stays, by an order in which no two values are equal; nothing is sorted for good.

use super::CpuBackend;
use super::best_of::best_of;
use crate::backend::ops::{BestOf, Draw, DrawRule};

/// The weight of the largest value. What has less than half of 2^-40 of it is never drawn; 2^24 values of that weight have a sum.
pub const ONE: u64 = 1 << 40;

/// The op: -1 where [`best_of`] is.
pub fn draw(op: Draw<'_, CpuBackend>) -> i32 {
    let values = &op.values[..op.count];
    match best_of(BestOf { values: op.values, count: op.count }) {
        -1 => -1,
        best => Drawer::default().draw(values, best as usize, &op.rule) as i32,
    }
}

/// Work memory that is kept from draw to draw.
#[derive(Default)]
pub struct Drawer {
    /// Of each value, 0 for what is left out.
    weights: Vec<u64>,
    candidates: Vec<Candidate>,
}

/// A value that a filter looks at.
#[derive(Clone, Copy)]
struct Candidate {
    rank: u64,
    weight: u64,
}

/// The order of values: larger ones are better, of equals the one at the lower place. Adding zero makes the two zeros equal.
fn rank(value: f32, place: usize) -> u64 {
    let bits = (value + 0.0).to_bits();
    let key = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(key) << 32 | u64::from(!(place as u32))
}

impl Drawer {
    /// A place among `values`, of which the one at `best` is the largest; none is NaN or infinity.
    pub fn draw(&mut self, values: &[f32], best: usize, rule: &DrawRule) -> usize {
        self.weigh(values, best, rule);
        let total: u64 = self.weights.iter().sum();
        // Below the total, as the number is below 2^64.
        let mut left = ((u128::from(rule.number) * u128::from(total)) >> 64) as u64;
        for (n, part) in self.weights.chunks(64).enumerate() {
            let sum: u64 = part.iter().sum();
            if left >= sum {
                left -= sum;
                continue;
            }
            for (i, weight) in part.iter().enumerate() {
                if left < *weight {
                    return n * 64 + i;
                }
                left -= weight;
            }
        }
        unreachable!("the largest value has a weight")
    }

    /// Fills the weights with what the filters leave: top-k, then top-p of that, then min-p.
    fn weigh(&mut self, values: &[f32], best: usize, rule: &DrawRule) {
        let (largest, temperature) = (f64::from(values[best]), f64::from(rule.temperature));
        self.weights.clear();
        self.weights.extend(values.iter().map(|value| weight(*value, largest, temperature)));
        let (last, floor) = (self.last(values, rule), floor(rule.min_p));
        if last > 0 || floor > 1 {
            for (place, (value, weight)) in values.iter().zip(&mut self.weights).enumerate() {
                if *weight < floor || rank(*value, place) < last {
                    *weight = 0;
                }
            }
        }
    }

    /// The rank of the last value that top-k and top-p leave; 0 if they leave all.
    fn last(&mut self, values: &[f32], rule: &DrawRule) -> u64 {
        let has_k = (1..values.len()).contains(&rule.top_k);
        if !has_k && rule.top_p >= 1.0 {
            return 0;
        }
        let all = values.iter().zip(&self.weights).enumerate();
        self.candidates.clear();
        self.candidates.extend(all.map(|(i, (value, weight))| Candidate { rank: rank(*value, i), weight: *weight }));
        let mut last = 0;
        if has_k {
            let (_, kept, _) = self.candidates.select_nth_unstable_by_key(rule.top_k - 1, |c| !c.rank);
            last = kept.rank;
            self.candidates.truncate(rule.top_k);
        }
        if rule.top_p < 1.0 { self.last_of_share(f64::from(rule.top_p)) } else { last }
    }

    /// The end of the shortest run of best candidates whose weights reach `share` of all.
    fn last_of_share(&mut self, share: f64) -> u64 {
        let candidates = &mut self.candidates;
        let total: u64 = candidates.iter().map(|c| c.weight).sum();
        let wanted = (share * total as f64).ceil() as u64;
        // All candidates below this weight together have less than what the run may leave out, so none is in the run; a quarter leaves room
        // for rounding.
        let least = (0.25 * (1.0 - share) * total as f64 / candidates.len() as f64) as u64;
        candidates.retain(|c| c.weight >= least);
        // The run is nearly always short, and sorting a whole vocabulary costs more than the rest of a choice.
        let (mut sorted, mut reached, mut kept) = (0, 0, 0);
        while reached < wanted {
            if kept == sorted {
                sorted = (sorted * 8).max(64).min(candidates.len());
                if sorted < candidates.len() {
                    candidates[kept..].select_nth_unstable_by_key(sorted - kept, |c| !c.rank);
                }
                candidates[kept..sorted].sort_unstable_by_key(|c| !c.rank);
            }
            reached += candidates[kept].weight;
            kept += 1;
        }
        candidates[kept - 1].rank
    }
}

/// exp((value - largest) / temperature) in units of 1 / [`ONE`].
fn weight(value: f32, largest: f64, temperature: f64) -> u64 {
    // Adding 2^52 rounds to a whole number and leaves that number in the low bits.
    const ROUND: f64 = 4_503_599_627_370_496.0;
    (exp_down((f64::from(value) - largest) / temperature) * ONE as f64 + ROUND).to_bits() & ((1 << 52) - 1)
}

/// The least weight that may be drawn.
pub fn floor(min_p: f32) -> u64 {
    // Exact: a power of two times a number of 24 bits. A weight of nothing is never drawn.
    ((f64::from(min_p) * ONE as f64).ceil() as u64).max(1)
}

/// exp(x) for x of at most 0, within 1e-12 of it; 0 below -700.
///
/// Plain arithmetic, so that it is computed several values at a time and gives the same bits on every machine: with the C library's,
/// a seed could mean another text elsewhere.
pub fn exp_down(x: f64) -> f64 {
    // Adding 1.5 * 2^52 rounds to a whole number and leaves that number in the low bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    let shifted = x.max(-700.0) * std::f64::consts::LOG2_E + ROUND;
    let rest = (x.max(-700.0) * std::f64::consts::LOG2_E - (shifted - ROUND)) * std::f64::consts::LN_2;
    let power_of_two = f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52);
    // Taylor's series; |rest| is at most 0.347, so the first term left out is below 1e-12.
    const RECIPROCALS: [f64; 10] =
        [1.0 / 10.0, 1.0 / 9.0, 1.0 / 8.0, 1.0 / 7.0, 1.0 / 6.0, 1.0 / 5.0, 1.0 / 4.0, 1.0 / 3.0, 1.0 / 2.0, 1.0];
    let series = RECIPROCALS.into_iter().fold(1.0, |sum, reciprocal| 1.0 + sum * rest * reciprocal);
    if x < -700.0 { 0.0 } else { series * power_of_two }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn weights_are_exponentials() {
        for step in 0..70_000 {
            let x = -f64::from(step) / 97.0;
            let error = (exp_down(x) - x.exp()).abs() / x.exp().max(1e-300);
            assert!(x < -700.0 || error < 1e-12, "exp({x}) is off by {error}");
        }
        assert_eq!((exp_down(0.0), exp_down(-701.0), exp_down(f64::NEG_INFINITY)), (1.0, 0.0, 0.0));
        for (value, expected) in [(0.0, ONE), (-2f32.ln(), ONE / 2), (-100.0, 0), (f32::NEG_INFINITY, 0)] {
            let found = weight(value, 0.0, 1.0);
            assert!(found.abs_diff(expected) < 1 << 17, "{value}: {found}, expected {expected}");
        }
        assert_eq!(weight(-27.6, 0.0, 1.0), 1, "rounded to the nearest");
        assert_eq!((floor(0.0), floor(0.5), floor(1.0)), (1, ONE / 2, ONE));
    }

    #[test]
    fn every_number_finds_its_place() {
        let rule = |number| DrawRule { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, number };
        let equal = vec![-3.5f32; 4096];
        for place in 0..4096u64 {
            let first = place << 52;
            for number in [first, first + ((1 << 52) - 1)] {
                assert_eq!(Drawer::default().draw(&equal, 0, &rule(number)), place as usize);
            }
        }
        let masked = [f32::NEG_INFINITY, 2.0, f32::NEG_INFINITY];
        assert_eq!([0, u64::MAX].map(|number| Drawer::default().draw(&masked, 1, &rule(number))), [1, 1]);
    }

    #[test]
    fn broken_values_have_no_place() {
        let rule = DrawRule { temperature: 1.0, top_k: 3, top_p: 0.5, min_p: 0.1, number: 1 << 63 };
        for values in [vec![1.0, f32::NAN], vec![f32::INFINITY], vec![f32::NEG_INFINITY; 2], vec![]] {
            assert_eq!(draw(Draw { values: &values, count: values.len(), rule }), -1);
        }
    }

    /// The filters by full sorting, as plainly as they can be written.
    fn kept_plainly(rule: &DrawRule, values: &[f32]) -> Vec<usize> {
        let mut places: Vec<usize> = (0..values.len()).collect();
        places.sort_by(|a, b| values[*b].total_cmp(&values[*a]).then(a.cmp(b)));
        if rule.top_k > 0 {
            places.truncate(rule.top_k);
        }
        let largest = f64::from(values[places[0]]);
        let weight = |place: usize| weight(values[place], largest, f64::from(rule.temperature));
        if rule.top_p < 1.0 {
            let wanted = f64::from(rule.top_p) * places.iter().map(|&place| weight(place)).sum::<u64>() as f64;
            let mut reached = 0;
            let before = |place: &usize| {
                let is_short = (reached as f64) < wanted;
                reached += weight(*place);
                is_short
            };
            places = places.iter().copied().take_while(before).collect();
        }
        places.retain(|&place| weight(place) as f64 >= f64::from(rule.min_p) * ONE as f64 && weight(place) > 0);
        places.sort_unstable();
        places
    }

    proptest! {
        #[test]
        fn filters_equal_full_sorting(
            values in prop::collection::vec((-80i32..80).prop_map(|step| step as f32 * 0.25), 1..1500),
            temperature in 0.05f32..3.0,
            top_k in 0usize..1500,
            top_p in prop_oneof![Just(1.0f32), 0.01f32..1.0],
            min_p in prop_oneof![Just(0.0f32), 0.0f32..0.5],
            number in any::<u64>(),
        ) {
            let rule = DrawRule { temperature, top_k, top_p, min_p, number };
            let best = best_of(BestOf { values: &values, count: values.len() }) as usize;
            let mut drawer = Drawer::default();
            let place = drawer.draw(&values, best, &rule);
            let kept: Vec<usize> = (0..values.len()).filter(|&place| drawer.weights[place] > 0).collect();
            prop_assert_eq!(&kept, &kept_plainly(&rule, &values));
            prop_assert!(kept.contains(&place));
        }
    }
}
