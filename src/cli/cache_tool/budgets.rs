//! Cache budgets as typed, turned into slots by size class. Owns the spelling and the floor.
//! Never gives fewer slots than one token uses; sharing among size classes is the planner's, as in a live run.
//! Surprising fact: a budget in percent is of the experts, not of the memory, so that it means the same on every machine.

use cache_policy::plan::{self, ClassRequest, Facts, Request};
use cache_policy::{ClassShape, TraceHeader};

use crate::cli::CliError;
use crate::units::{self, Bytes};

/// Experts by size: what a budget is shared among.
#[derive(Clone, Debug)]
pub struct Classes {
    classes: Vec<ClassRequest>,
    shapes: Vec<ClassShape>,
    top_k: u64,
}

/// A budget that a replay can use.
#[derive(Clone, Debug)]
pub struct Budget {
    /// For people: `50 %`, `120 slots`, `64GB`.
    pub label: String,
    /// Slots of all classes.
    pub slots: u64,
    /// Bytes of the slots.
    pub bytes: Bytes,
    /// Slots by class, with the layers.
    pub shapes: Vec<ClassShape>,
}

impl Classes {
    /// The size classes of a trace. Slots are counted without alignment padding, which a trace does not know.
    pub fn of(header: &TraceHeader) -> Self {
        let top_k = header.layers.iter().map(|l| u64::from(l.top_k)).max().unwrap_or(1);
        let (mut classes, mut shapes) = (Vec::new(), Vec::new());
        for (bytes, layers) in header.size_classes() {
            let experts = layers.iter().map(|l| u64::from(l.1)).sum();
            let expert_bytes = Bytes(bytes.0.max(1));
            classes.push(ClassRequest { expert_bytes, slot_bytes: expert_bytes, layers: layers.len() as u64, experts });
            shapes.push(ClassShape { layers, slots: 0 });
        }
        Self { classes, shapes, top_k }
    }

    /// As `of`, with the padded slots of an opened model; `classes` and `shapes` in the same order.
    pub fn padded(classes: Vec<ClassRequest>, shapes: Vec<ClassShape>, top_k: u64) -> Self {
        Self { classes, shapes, top_k }
    }

    /// Experts of all layers.
    pub fn experts(&self) -> u64 {
        self.classes.iter().map(|c| c.experts).sum()
    }

    /// Layers that route.
    pub fn layers(&self) -> u64 {
        self.classes.iter().map(|c| c.layers).sum()
    }

    /// One token's experts: the fewest slots that work.
    pub fn floor(&self) -> u64 {
        self.classes.iter().map(|c| (c.layers * self.top_k).min(c.experts)).sum()
    }

    /// `slots` slots, between the floor and all experts, shared among the classes.
    ///
    /// # Errors
    /// Sizes that the planner takes for damage.
    pub fn slots(&self, slots: u64, label: String) -> Result<Budget, CliError> {
        self.planned(plan::Budget::Slots(slots.clamp(self.floor(), self.experts())), label)
    }

    fn planned(&self, budget: plan::Budget, label: String) -> Result<Budget, CliError> {
        // A machine that is never the limit: only the sharing among classes is wanted.
        let facts = Facts { total: Bytes(1 << 62), available: Bytes(1 << 62), ..Facts::default() };
        let request = Request {
            classes: self.classes.clone(),
            top_k: self.top_k,
            is_streaming: true,
            budget,
            ..Request::default()
        };
        let plan = plan::plan(&facts, &request).map_err(CliError::failed)?;
        let mut shapes = self.shapes.clone();
        for (shape, planned) in shapes.iter_mut().zip(&plan.classes) {
            shape.slots = planned.slots as usize;
        }
        Ok(Budget { label, slots: plan.cache_slots, bytes: plan.cache, shapes })
    }

    /// The budget that `text` names: `25%`, `120` (slots) or `64GB`.
    ///
    /// # Errors
    /// Text that is no budget, and budgets that cannot hold one token's experts.
    pub fn parse(&self, text: &str) -> Result<Budget, CliError> {
        let usage = |what: String| CliError::usage(format!("--budget {text}: {what}"));
        let (floor, experts) = (self.floor(), self.experts());
        if let Some(number) = text.strip_suffix('%') {
            let share: f64 = number.trim_end().parse().map_err(|_| usage("write a share such as 25%".into()))?;
            if !(share > 0.0 && share <= 100.0) {
                return Err(usage("a share lies above 0% and at most at 100%".into()));
            }
            let slots = (experts as f64 * share / 100.0 + 1e-9) as u64;
            if slots < floor {
                return Err(self.below(text, slots));
            }
            return self.slots(slots, format!("{} %", number.trim_end()));
        }
        let budget =
            units::parse_budget(text).map_err(|e| usage(format!("{e}, or a share of the experts such as 25%")))?;
        match budget {
            units::Budget::Slots(slots) if slots < floor => Err(self.below(text, slots)),
            units::Budget::Slots(slots) => self.slots(slots, format!("{} slots", slots.min(experts))),
            units::Budget::Bytes(bytes) => {
                let largest = self.classes.iter().map(|c| c.slot_bytes.0).max().unwrap_or(1);
                if bytes.0 > 1 << 60 {
                    return Err(usage("larger than any machine".into()));
                }
                // The planner shares bytes among the classes; it refuses what is below the floor in words for another flag.
                match self.planned(plan::Budget::Bytes(bytes), text.to_owned()) {
                    Ok(budget) => Ok(budget),
                    Err(_) => Err(self.below(text, bytes.0 / largest)),
                }
            }
        }
    }

    fn below(&self, text: &str, slots: u64) -> CliError {
        let (floor, experts) = (self.floor(), self.experts());
        // Whole percents, rounded up so that the advice works.
        let share = (100 * floor).div_ceil(experts);
        CliError::usage(format!(
            "--budget {text} holds {slots} of {experts} experts, but one token uses {floor} ({} layers x {}); use at least \
             {share}% or {floor}",
            self.layers(),
            self.top_k
        ))
    }

    /// All budgets of a list.
    ///
    /// # Errors
    /// As `parse`, for the first bad one.
    pub fn parse_all(&self, list: &[String]) -> Result<Vec<Budget>, CliError> {
        let mut budgets = list.iter().map(|text| self.parse(text.trim())).collect::<Result<Vec<_>, _>>()?;
        budgets.sort_by_key(|b| b.slots);
        budgets.dedup_by_key(|b| b.slots);
        Ok(budgets)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cache_policy::{LayerIdx, TraceLayer};

    fn classes() -> Classes {
        let layer =
            |l: u16, bytes: u64| TraceLayer { layer: LayerIdx(l), experts: 10, top_k: 2, expert_bytes: Bytes(bytes) };
        Classes::of(&TraceHeader {
            model: [0; 32],
            layers: vec![layer(0, 1 << 20), layer(1, 1 << 20), layer(2, 1 << 21)],
        })
    }

    #[test]
    fn budgets_become_slots_by_class() {
        let check = |text: &str, slots: u64, by_class: &[usize], label: &str| {
            let budget = classes().parse(text).unwrap();
            assert_eq!((budget.slots, budget.label.as_str()), (slots, label), "{text}");
            assert_eq!(budget.shapes.iter().map(|s| s.slots).collect::<Vec<_>>(), by_class, "{text}");
        };
        check("50%", 15, &[10, 5], "50 %");
        check("6", 6, &[4, 2], "6 slots");
        check("20%", 6, &[4, 2], "20 %");
        check("1000", 30, &[20, 10], "30 slots");
        check("100%", 30, &[20, 10], "100 %");
        check("0.015625GB", 12, &[8, 4], "0.015625GB");
        check("1GB", 30, &[20, 10], "1GB");
    }

    #[test]
    fn budgets_that_make_no_sense_say_what_does() {
        for (text, part) in [
            ("5", "use at least 20% or 6"),
            ("19%", "holds 5 of 30 experts, but one token uses 6 (3 layers x 2)"),
            ("0.001GB", "use at least 20% or 6"),
            ("0%", "above 0%"),
            ("101%", "at most at 100%"),
            ("x%", "such as 25%"),
            ("fifty", "such as 25%"),
            ("4294967296GB", "larger than any machine"),
        ] {
            let error = classes().parse(text).unwrap_err();
            assert!(matches!(error, CliError::Usage(_)) && error.to_string().contains(part), "{text}: {error}");
        }
        let list = ["100%".to_owned(), " 6".to_owned(), "20%".to_owned()];
        let slots: Vec<u64> = classes().parse_all(&list).unwrap().iter().map(|b| b.slots).collect();
        assert_eq!(slots, [6, 30], "in rising order, each once");
    }
}
