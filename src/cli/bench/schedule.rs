//! What a sweep will do, worked out before anything is opened: context lengths, appends, the text they need.
//! Pure numbers; never touches a model. Surprising fact: appends at one context length use stretches of text that follow one another, since
//! the same tokens twice would find their experts in the cache.

use crate::cli::CliError;
use crate::cli::bench::args::{Regime, RunArgs};
use crate::units::TokenId;

/// A checked sweep.
#[derive(Clone, PartialEq, Debug)]
pub struct Schedule {
    /// Context lengths, rising.
    pub frontiers: Vec<usize>,
    /// Tokens generated at each.
    pub gen_tokens: usize,
    /// Lengths appended at each.
    pub appends: Vec<usize>,
    /// Measured repetitions of every regime.
    pub repetitions: usize,
    /// In order of time, without repeats.
    pub regimes: Vec<Regime>,
    /// Context length to allocate.
    pub ctx_alloc: usize,
}

/// A context length of more tokens than any model has: keeps sums far from overflow.
const TOKENS_MAX: u32 = 1 << 26;
/// More context lengths than anybody looks at.
const FRONTIERS_MAX: usize = 10_000;

impl Schedule {
    /// Checks the flags of a sweep.
    ///
    /// # Errors
    /// Usage errors: what cannot be done, and what to change.
    pub fn new(args: &RunArgs) -> Result<Self, CliError> {
        let sweep = &args.sweep;
        check_numbers(args)?;
        let frontiers = frontiers(sweep.ctx_start, sweep.ctx_max, sweep.step_incr, sweep.step_mul);
        if frontiers.len() > FRONTIERS_MAX {
            return Err(CliError::usage(format!(
                "the sweep has more than {FRONTIERS_MAX} context lengths; use larger steps"
            )));
        }
        let appends: Vec<usize> = sweep.append.iter().map(|len| *len as usize).collect();
        let longest = appends.iter().copied().max().unwrap_or(0).max(sweep.gen_tokens as usize);
        let needed = sweep.ctx_max as usize + longest;
        let ctx_alloc = args.model.ctx.map_or(needed, |ctx| ctx as usize);
        if sweep.ctx_max as usize > ctx_alloc {
            return Err(CliError::usage(format!(
                "--ctx-max {} is more than --ctx-alloc {ctx_alloc} holds; use --ctx-alloc {needed} or a smaller --ctx-max",
                sweep.ctx_max
            )));
        }
        if needed > ctx_alloc {
            return Err(CliError::usage(format!(
                "--ctx-max {} and {longest} tokens to generate or append do not fit --ctx-alloc {ctx_alloc}; use \
                 --ctx-alloc {needed}, or leave it out",
                sweep.ctx_max
            )));
        }
        let mut regimes = sweep.regimes.clone();
        regimes.sort();
        regimes.dedup();
        let repetitions = sweep.repetitions as usize;
        Ok(Self { frontiers, gen_tokens: sweep.gen_tokens as usize, appends, repetitions, regimes, ctx_alloc })
    }

    /// Tokens of text that one pass reads.
    pub fn text_tokens(&self) -> usize {
        self.frontiers.last().expect("a sweep has at least one length") + self.appends.iter().sum::<usize>()
    }

    /// Tokens of text that the whole run needs: new text is read once.
    pub fn text_tokens_total(&self) -> usize {
        let stretches = if self.regimes.contains(&Regime::NewText) { self.repetitions + 1 } else { 1 };
        stretches.saturating_mul(self.text_tokens())
    }

    /// Rows that one pass gives.
    pub fn rows_per_pass(&self) -> usize {
        self.frontiers.len() * (1 + self.appends.len())
    }

    /// Where the text of a repetition (from 0) begins.
    pub fn text_offset(&self, regime: Regime, repetition: usize) -> usize {
        if regime == Regime::NewText { (repetition + 1) * self.text_tokens() } else { 0 }
    }

    /// Refuses a text that is too short.
    ///
    /// # Errors
    /// A usage error with both lengths.
    pub fn check_text(&self, tokens: &[TokenId]) -> Result<(), CliError> {
        let needed = self.text_tokens_total();
        if tokens.len() >= needed {
            return Ok(());
        }
        let (new_text, change) = if self.regimes.contains(&Regime::NewText) {
            (format!(" ({} stretches of new text and one before them)", self.repetitions), ", fewer repetitions")
        } else {
            (String::new(), "")
        };
        Err(CliError::usage(format!(
            "the prompt file has {} tokens, the sweep needs {needed}{new_text}; use a longer file, a smaller \
             --ctx-max{change} or fewer appends",
            tokens.len()
        )))
    }
}

fn check_numbers(args: &RunArgs) -> Result<(), CliError> {
    let sweep = &args.sweep;
    let numbers = [("--ctx-start", sweep.ctx_start), ("--ctx-max", sweep.ctx_max), ("--step-incr", sweep.step_incr)];
    for (flag, value) in numbers.into_iter().chain([("--repetitions", sweep.repetitions)]) {
        if value == 0 {
            return Err(CliError::usage(format!("{flag} 0 measures nothing; use at least 1")));
        }
    }
    let lengths = numbers.into_iter().chain([("--gen-tokens", sweep.gen_tokens), ("-r", sweep.repetitions)]);
    if let Some((flag, value)) = lengths.into_iter().find(|(_, value)| *value > TOKENS_MAX) {
        return Err(CliError::usage(format!("{flag} {value} is beyond any model; use at most {TOKENS_MAX}")));
    }
    if sweep.ctx_start > sweep.ctx_max {
        return Err(CliError::usage(format!(
            "--ctx-start {} is more than --ctx-max {}; swap them or change one",
            sweep.ctx_start, sweep.ctx_max
        )));
    }
    if !(sweep.step_mul.is_finite() && sweep.step_mul >= 1.0) {
        return Err(CliError::usage(format!(
            "--step-mul {} does not rise; use a number above 1, or 1 for steps of --step-incr",
            sweep.step_mul
        )));
    }
    if let Some(len) = sweep.append.iter().find(|len| **len == 0 || **len > TOKENS_MAX) {
        return Err(CliError::usage(format!("--append {len}: lengths are from 1 to {TOKENS_MAX} tokens")));
    }
    check_regimes(args)
}

fn check_regimes(args: &RunArgs) -> Result<(), CliError> {
    let streaming = &args.streaming;
    let has = |regime| args.sweep.regimes.contains(&regime);
    if !streaming.ssd_streaming {
        if !args.sweep.budgets.is_empty() {
            return Err(CliError::usage("--budgets are sizes of the expert cache; add --ssd-streaming"));
        }
        if has(Regime::Preloaded) {
            return Err(CliError::usage("--regimes preloaded needs an expert cache; add --ssd-streaming"));
        }
    }
    if has(Regime::Preloaded) && streaming.ssd_streaming_cold {
        return Err(CliError::usage("--ssd-streaming-cold contradicts --regimes preloaded; leave one out"));
    }
    let preloads = [
        ("--ssd-streaming-preload-experts", streaming.ssd_streaming_preload_experts.is_some()),
        ("--hotlist", streaming.hotlist.is_some()),
    ];
    if let (Some((flag, _)), false) = (preloads.iter().find(|(_, is_given)| *is_given), has(Regime::Preloaded)) {
        return Err(CliError::usage(format!("{flag} has no effect here; add --regimes preloaded")));
    }
    if streaming.save_hotlist.is_some() {
        return Err(CliError::usage(
            "--save-hotlist: the routes of a benchmark are not those of your work; save them with ds4",
        ));
    }
    Ok(())
}

/// Context lengths from `start` to `max`, both included: steps of `incr`, or by the factor `mul` unless it is 1.
fn frontiers(start: u32, max: u32, incr: u32, mul: f64) -> Vec<usize> {
    let mut lengths = vec![start as usize];
    let max = max as usize;
    while let Some(&last) = lengths.last()
        && last < max
        && lengths.len() <= FRONTIERS_MAX
    {
        let next = if mul == 1.0 { last + incr as usize } else { ((last as f64 * mul).ceil() as usize).max(last + 1) };
        lengths.push(next.min(max));
    }
    lengths
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::bench::args::parse;

    fn schedule(args: &str) -> Result<Schedule, CliError> {
        let args = ["ds4-bench", "--prompt-file", "x"].into_iter().chain(args.split_whitespace());
        Schedule::new(&parse(args).unwrap().run)
    }

    #[test]
    fn lengths_reach_the_end_exactly() {
        assert_eq!(frontiers(2, 9, 3, 1.0), [2, 5, 8, 9]);
        assert_eq!(frontiers(2, 8, 3, 1.0), [2, 5, 8]);
        assert_eq!(frontiers(7, 7, 1, 1.0), [7]);
        assert_eq!(frontiers(2, 17, 1, 2.0), [2, 4, 8, 16, 17]);
        assert_eq!(frontiers(1, 4, 1, 1.000_001), [1, 2, 3, 4]);
        assert_eq!(schedule("").unwrap().frontiers.len(), 16);
    }

    #[test]
    fn memory_and_text_cover_the_longest_row() {
        let s = schedule("--ctx-start 8 --ctx-max 16 --step-incr 8 --gen-tokens 5 --append 3,9").unwrap();
        assert_eq!((s.ctx_alloc, s.text_tokens(), s.text_tokens_total(), s.rows_per_pass()), (25, 28, 28, 6));
        let s = schedule("--ctx-max 4096 --regimes new-text,cold,cold -r 3").unwrap();
        assert_eq!((s.regimes.len(), s.text_tokens_total(), s.ctx_alloc), (2, 4 * 4096, 4096 + 128));
        assert_eq!([0, 1, 2].map(|r| s.text_offset(Regime::NewText, r)), [4096, 8192, 12288]);
        assert_eq!(s.text_offset(Regime::WarmRepeat, 2), 0);
        assert!(s.check_text(&vec![0; 4 * 4096]).is_ok() && s.check_text(&vec![0; 4 * 4096 - 1]).is_err());
    }

    #[test]
    fn what_cannot_be_measured_is_refused() {
        for (args, part) in [
            ("--ctx-start 0", "--ctx-start 0"),
            ("--step-incr 0", "--step-incr 0"),
            ("--step-mul 0.5", "--step-mul 0.5"),
            ("--step-mul nan", "--step-mul"),
            ("--step-mul -2", "--step-mul -2"),
            ("-r 0", "--repetitions 0"),
            ("--append 4,0", "--append 0"),
            ("--ctx-start 9 --ctx-max 8", "--ctx-start 9"),
            ("--ctx-max 4096 --ctx-alloc 4000", "--ctx-alloc 4224"),
            ("--ctx-max 4096 --ctx-alloc 4100", "--ctx-alloc 4224"),
            ("--ctx-max 4096 --gen-tokens 0 --append 5 --ctx-alloc 4100", "--ctx-alloc 4101"),
            ("--budgets 8", "--ssd-streaming"),
            ("--regimes preloaded", "--ssd-streaming"),
            ("--regimes preloaded --ssd-streaming --ssd-streaming-cold", "contradicts"),
            ("--ssd-streaming --ssd-streaming-preload-experts 4", "--regimes preloaded"),
            ("--ssd-streaming --hotlist x", "--regimes preloaded"),
            ("--ssd-streaming --save-hotlist x", "--save-hotlist"),
            ("--ctx-max 4000000000", "beyond any model"),
            ("--ctx-max 60000000 --step-incr 1", "larger steps"),
        ] {
            let error = schedule(args).unwrap_err().to_string();
            assert!(error.contains(part), "{args}: {error}");
        }
    }
}
