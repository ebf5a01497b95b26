//! What another cache budget would have done for the requests of a run: the numbers and, when they matter, one sentence.
//! Never looks at the drive or the clock. Surprising fact: it goes by the miss curve of LRU, which has all sizes in one pass; the default
//! policy misses less at each of them, but the sizes at which something changes are the same.

use cache_policy::{ClassShape, MissCurve};
use serde::Serialize;

use crate::engine::Engine;
use crate::engine::routes::Routes;
use crate::units::Bytes;

/// Uses below which a run says nothing about budgets.
const USES_MIN: u64 = 2000;
/// A larger cache is worth a word from this share of misses saved on.
const WORTH_SAVING: f64 = 0.25;
/// A smaller one costs nothing up to this share of more misses.
const COSTS_NOTHING: f64 = 0.02;
/// A smaller cache is worth a word when it is at most this share of the slots.
const WORTH_SHRINKING: f64 = 0.75;

/// Misses of an LRU cache, starting empty, on the requests of the run.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Advice {
    pub uses: u64,
    /// Experts that were used at all: misses at every budget.
    pub first_uses: u64,
    pub slots: u64,
    pub misses: u64,
    pub misses_half_slots: u64,
    pub misses_double_slots: u64,
    /// Fewest slots with hardly more misses than now.
    pub enough_slots: u64,
    /// Sentence for the report; `None` when no other budget would matter.
    pub text: Option<String>,
}

/// Curves of the size classes, scaled together.
struct Curves {
    /// Misses at every number of slots, with the slots of the run and the fewest that serve a token.
    classes: Vec<(Vec<u64>, usize, usize)>,
}

impl Curves {
    /// Slots and misses with `share` of the run's slots in every class.
    fn at(&self, share: f64) -> (u64, u64) {
        let mut sum = (0, 0);
        for (misses, slots, floor) in &self.classes {
            let scaled = ((*slots as f64 * share).round() as usize).clamp(*floor, (misses.len() - 1).max(*floor));
            sum.0 += scaled as u64;
            sum.1 += misses[scaled.min(misses.len() - 1)];
        }
        sum
    }
}

/// What `routes` say about the budget of a cache of `shapes`, whose slots take `bytes` together; `top_k` experts a token and layer.
pub fn advise(routes: &Routes, shapes: &[ClassShape], bytes: Bytes, top_k: usize) -> Option<Advice> {
    let curves = routes.miss_curves(shapes)?;
    let uses = curves.iter().map(MissCurve::uses).sum();
    let class = |(curve, shape): (&MissCurve, &ClassShape)| {
        let experts: usize = shape.layers.iter().map(|l| usize::from(l.1)).sum();
        let mut misses = curve.all();
        misses.truncate(experts + 1);
        (misses, shape.slots, (shape.layers.len() * top_k).min(experts))
    };
    let curves = Curves { classes: curves.iter().zip(shapes).map(class).collect() };
    let first_uses = curves.classes.iter().map(|c| c.0[c.0.len() - 1]).sum();
    let (slots, misses) = curves.at(1.0);
    let limit = (misses as f64 * (1.0 + COSTS_NOTHING)) as u64;
    let enough = (1..=32).map(|i| curves.at(f64::from(i) / 32.0)).find(|at| at.1 <= limit).unwrap_or((slots, misses));
    let double = curves.at(2.0);
    let mut advice = Advice {
        uses,
        first_uses,
        slots,
        misses,
        misses_half_slots: curves.at(0.5).1,
        misses_double_slots: double.1,
        enough_slots: enough.0,
        text: None,
    };
    if uses >= USES_MIN {
        advice.text = sentence(&advice, double.0, bytes);
    }
    Some(advice)
}

fn sentence(advice: &Advice, double_slots: u64, bytes: Bytes) -> Option<String> {
    let Advice { slots, misses, first_uses, .. } = *advice;
    let in_memory = |count: u64| Bytes((bytes.0 as f64 / slots.max(1) as f64 * count as f64) as u64);
    let saved = 1.0 - advice.misses_double_slots as f64 / misses.max(1) as f64;
    let is_smaller_enough = advice.enough_slots as f64 <= WORTH_SHRINKING * slots as f64;
    let smaller =
        || format!("{} slots ({}) would have read hardly more", advice.enough_slots, in_memory(advice.enough_slots));
    if saved >= WORTH_SAVING && double_slots > slots {
        let size = if double_slots >= 2 * slots { "twice the slots".into() } else { format!("{double_slots} slots") };
        return Some(format!(
            "{size} ({}) would have cut expert reads by about {:.0} %; half of them would have made {:.1} times as many",
            in_memory(double_slots),
            100.0 * saved,
            advice.misses_half_slots as f64 / misses.max(1) as f64
        ));
    }
    if misses <= first_uses + first_uses / 10 {
        let more = if is_smaller_enough { format!("; {}", smaller()) } else { String::new() };
        return Some(format!(
            "a larger cache would not help: nearly every read was of an expert used for the first time, which only a preload \
             (--hotlist) avoids{more}"
        ));
    }
    is_smaller_enough.then(smaller)
}

impl Engine {
    /// What another budget would have done; `None` without a cache, without requests and after more than are kept.
    pub fn advice(&self) -> Option<Advice> {
        self.cache()?;
        let (_, _, top_k) = self.prepared.config.expert_shape();
        advise(&self.routes, &self.class_shapes(), self.plan().cache, top_k)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{ExpertIdx, LayerIdx, Phase};

    /// Rounds over `experts` experts of one layer, one at a time, in a cache of `slots`.
    fn rounds(experts: u16, slots: usize, uses: usize) -> Advice {
        let layers = vec![(LayerIdx(0), 64)];
        let routes = Routes::new(&layers);
        for at in 0..uses {
            routes.request(Phase::Decode, LayerIdx(0), &[ExpertIdx((at % usize::from(experts)) as u16)], 0);
        }
        advise(&routes, &[ClassShape { layers, slots }], Bytes::mib(slots as u64), 1).unwrap()
    }

    #[test]
    fn a_cache_that_is_too_small_is_told_what_would_do() {
        let advice = rounds(40, 30, 4000);
        assert_eq!((advice.misses, advice.misses_double_slots, advice.first_uses), (4000, 40, 40));
        let text = advice.text.unwrap();
        assert!(text.starts_with("twice the slots (60.00 MiB) would have cut expert reads by about 99 %"), "{text}");
    }

    #[test]
    fn a_cache_that_is_too_large_is_told_what_is_enough() {
        let advice = rounds(10, 64, 4000);
        assert_eq!((advice.misses, advice.enough_slots), (10, 10));
        let text = advice.text.unwrap();
        assert!(
            text.contains("would not help") && text.ends_with("10 slots (10.00 MiB) would have read hardly more"),
            "{text}"
        );
    }

    #[test]
    fn a_short_run_says_nothing() {
        assert_eq!(rounds(40, 30, 1999).text, None);
    }
}
