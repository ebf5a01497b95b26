//! From budgets with their speeds to one budget and one line of flags. Owns the rule; never measures.
//! Surprising fact: the recommended budget is not the largest one: memory that wins next to nothing is better left to
//! the page cache and to other programs.

use super::budgets::Budget;
use super::model_facts::Fit;

/// The smallest budget within this share of the fastest one that fits is recommended.
const NEARLY_FASTEST: f64 = 0.98;

/// A budget with the speed it allows.
pub struct Choice<'a> {
    pub budget: &'a Budget,
    pub fit: Fit,
    pub tokens_per_s: f64,
}

/// The option to recommend: the smallest that reaches `target`, or, without one, nearly the speed of the fastest that fits
/// comfortably. `None` when nothing does.
pub fn recommend<'a, 'b>(options: &'b [Choice<'a>], target: Option<f64>) -> Option<&'b Choice<'a>> {
    let fitting = || options.iter().filter(|o| o.fit == Fit::Yes);
    let fastest = fitting().map(|o| o.tokens_per_s).fold(0.0, f64::max);
    let wanted = target.unwrap_or(fastest * NEARLY_FASTEST);
    let within = |o: &&Choice<'_>| o.tokens_per_s >= wanted && (target.is_some() || o.tokens_per_s > 0.0);
    let candidates = options.iter().filter(|o| match target {
        Some(_) => o.fit != Fit::No,
        None => o.fit == Fit::Yes,
    });
    candidates.filter(within).min_by_key(|o| o.budget.slots)
}

/// The line to paste: what a shell takes as it is.
pub fn flags(model: &str, slots: u64, policy: &str) -> String {
    format!("ds4 -m {} --ssd-streaming --ssd-streaming-cache-experts {slots} --cache-policy {policy}", quoted(model))
}

/// `text` as one word of a shell.
fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+,:@%=".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        text.into()
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Bytes;

    #[test]
    fn the_smallest_budget_that_is_nearly_as_fast() {
        let budgets: Vec<Budget> = [10, 20, 30, 40]
            .map(|slots| Budget { label: String::new(), slots, bytes: Bytes(slots), shapes: Vec::new() })
            .into();
        let fits = [Fit::Yes, Fit::Yes, Fit::Yes, Fit::Tight];
        let speeds = [5.0, 9.9, 10.0, 20.0];
        let options: Vec<Choice<'_>> = budgets
            .iter()
            .zip(fits.into_iter().zip(speeds))
            .map(|(budget, (fit, tokens_per_s))| Choice { budget, fit, tokens_per_s })
            .collect();
        let slots = |target| recommend(&options, target).map(|o| o.budget.slots);
        assert_eq!(slots(None), Some(20));
        assert_eq!(slots(Some(4.0)), Some(10));
        assert_eq!(slots(Some(15.0)), Some(40), "a wish may make it tight");
        assert_eq!(slots(Some(30.0)), None);
        assert!(recommend(&[], None).is_none());
    }

    #[test]
    fn flags_can_be_pasted() {
        assert_eq!(
            flags("my models/it's.gguf", 120, "auto"),
            "ds4 -m 'my models/it'\\''s.gguf' --ssd-streaming --ssd-streaming-cache-experts 120 --cache-policy auto"
        );
        assert!(flags("a/b-1.gguf", 1, "lru").starts_with("ds4 -m a/b-1.gguf --ssd"));
    }
}
