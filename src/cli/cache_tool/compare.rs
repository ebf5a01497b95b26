//! `ds4-cache compare`: two traces of one model, or two results of `replay --json`.
//! Owns what is worth saying about a pair; never compares different models.
//! Surprising fact: whether a trace helps the next one is measured, by replaying the second behind the first.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use cache_policy::policies::DEFAULT;
use cache_policy::{Census, Phase, ScoredReplay, by_name};
use clap::Args;

use super::budgets::{Budget, Classes};
use super::replay::{FORMAT, ReplayReport, Row};
use super::table::{Table, grouped, percent, short};
use super::trace_input::{TraceInput, describe, identity};
use crate::cli::CliError;

/// Longest result file that is read: a hundred thousand rows.
const REPORT_BYTES_MAX: u64 = 64 << 20;

/// Flags of `ds4-cache compare`.
#[derive(Args, Debug)]
pub struct CompareArgs {
    /// Trace of ds4 --trace-routes, or a file written by replay --json
    first: PathBuf,
    /// Another one of the same kind and model
    second: PathBuf,
    /// Budgets at which traces are compared
    #[arg(long, value_name = "P%|N|NGB,..", default_value = "25%,50%,75%", value_delimiter = ',')]
    budget: Vec<String>,
    /// Policy with which traces are compared
    #[arg(long, value_name = "NAME", default_value = "auto")]
    policy: String,
    /// Use traces whose recording was cut off, up to where they end
    #[arg(long)]
    partial: bool,
}

/// Runs the subcommand; returns what goes to stdout.
///
/// # Errors
/// Files of different kinds or models, and whatever is wrong with either.
pub fn run(args: &CompareArgs) -> Result<String, CliError> {
    match (is_report(&args.first)?, is_report(&args.second)?) {
        (true, true) => reports(&read_report(&args.first)?, &read_report(&args.second)?, args),
        (false, false) => traces(args),
        _ => Err(CliError::usage("one file is a trace and the other a replay result; give two of a kind")),
    }
}

/// Whether a file looks like a result of `replay --json` rather than a trace.
fn is_report(path: &Path) -> Result<bool, CliError> {
    let unreadable = |e| CliError::failed(format!("cannot read {}: {e}", path.display()));
    let mut first = [0; 1];
    let count = File::open(path).and_then(|mut f| f.read(&mut first)).map_err(unreadable)?;
    Ok(count == 1 && first[0] == b'{')
}

fn read_report(path: &Path) -> Result<ReplayReport, CliError> {
    let shown = path.display();
    let unreadable = |e| CliError::failed(format!("cannot read {shown}: {e}"));
    let mut text = String::new();
    File::open(path).and_then(|f| f.take(REPORT_BYTES_MAX).read_to_string(&mut text)).map_err(unreadable)?;
    let bad = |e| CliError::failed(format!("{shown} is not a result of ds4-cache replay --json ({e}); make it again"));
    let report: ReplayReport = serde_json::from_str(&text).map_err(|e| bad(e.to_string()))?;
    if report.format != FORMAT || report.version != 1 {
        return Err(bad(format!("format {:?} version {}", report.format, report.version)));
    }
    Ok(report)
}

fn reports(a: &ReplayReport, b: &ReplayReport, args: &CompareArgs) -> Result<String, CliError> {
    if (&a.model, a.layers, a.experts, a.token_experts) != (&b.model, b.layers, b.experts, b.token_experts) {
        return Err(other_models(args, &a.model, &b.model));
    }
    let mut table = Table::new(&["<phase", "<budget", "<policy", "misses/token A", "B", "B / A", "hit rate A", "B"]);
    let (mut ratios, mut has_common): (Vec<(f64, &Row)>, bool) = (Vec::new(), false);
    for row in &a.rows {
        let same = |other: &&Row| (&other.phase, other.slots, &other.policy) == (&row.phase, row.slots, &row.policy);
        let Some(other) = b.rows.iter().find(same) else { continue };
        has_common = true;
        let ratio = other.misses_per_token / row.misses_per_token;
        if ratio.is_finite() && row.phase == "decode" {
            ratios.push((ratio, row));
        }
        table.row([
            row.phase.clone(),
            row.budget.clone(),
            row.policy.clone(),
            short(row.misses_per_token),
            short(other.misses_per_token),
            if ratio.is_finite() { format!("{ratio:.3}") } else { "-".into() },
            percent(row.hit_rate),
            percent(other.hit_rate),
        ]);
    }
    let mut text = format!("A: {}\nB: {}\n\n{}", a.trace, b.trace, table.text());
    if !has_common {
        return Err(CliError::failed("the two results have no phase, budget and policy in common; replay both alike"));
    }
    let largest = ratios.iter().max_by(|x, y| (x.0 - 1.0).abs().total_cmp(&(y.0 - 1.0).abs()));
    text.push_str(&match largest {
        Some((ratio, row)) if (ratio - 1.0).abs() >= 0.0005 => format!(
            "\nThe largest difference in decode: {} at {} misses {ratio:.3} times as often a token in B.\n",
            row.policy, row.budget
        ),
        Some(_) => "\nNo difference in decode.\n".into(),
        None => String::new(),
    });
    Ok(text)
}

fn other_models(args: &CompareArgs, a: &str, b: &str) -> CliError {
    let short = |id: &str| id.chars().take(16).collect::<String>();
    CliError::failed(format!(
        "{} is of model {} and {} of model {}, or their layers differ; only traces of one model file can be compared",
        args.first.display(),
        short(a),
        args.second.display(),
        short(b)
    ))
}

/// One replay at one budget: behind the first trace, and alone.
struct Run {
    alone: ScoredReplay,
    behind: ScoredReplay,
}

fn traces(args: &CompareArgs) -> Result<String, CliError> {
    let name = if args.policy == "auto" { DEFAULT } else { &args.policy };
    let make = by_name(name).map_err(|e| CliError::usage(format!("--policy: {e}")))?;
    let mut first = TraceInput::open(&args.first, args.partial)?;
    let mut second = TraceInput::open(&args.second, args.partial)?;
    if first.header() != second.header() {
        return Err(other_models(args, &identity(&first.header().model), &identity(&second.header().model)));
    }
    let budgets = Classes::of(first.header()).parse_all(&args.budget)?;
    let new = |b: &Budget| ScoredReplay::new(&b.shapes, make);
    let mut runs: Vec<Run> = budgets.iter().map(|b| Run { alone: new(b), behind: new(b) }).collect();
    feed(&mut first, &mut runs, |run| [Some(&mut run.behind), None])?;
    let before: Vec<_> = runs.iter().map(|r| r.behind.score).collect();
    feed(&mut second, &mut runs, |run| [Some(&mut run.behind), Some(&mut run.alone)])?;
    let (a, b) = (first.census(), second.census());
    let mut text =
        format!("A: {}\nB: {}\nboth: {}\n\n", args.first.display(), args.second.display(), describe(first.header()));
    text.push_str(&usage_table(a, b));
    let phase = if a.decode.uses > 0 && b.decode.uses > 0 { Phase::Decode } else { Phase::Prefill };
    let (total, by_layer) = overlap(first.header(), a, b);
    text.push_str(&format!(
        "\nOverlap of expert use (1 = the same): {total:.2}; by layer {:.2} to {:.2}.\n\n",
        by_layer.iter().copied().fold(f64::INFINITY, f64::min),
        by_layer.iter().copied().fold(0.0, f64::max)
    ));
    let name_of = super::replay::phase_name(phase);
    let columns = ["<budget", "slots", "A", "B", "B after A", "saved"];
    let mut table = Table::new(&columns);
    let per = |misses: u64, census: &Census| misses as f64 / census.of(phase).tokens.max(1) as f64;
    let mut saved_most: Option<(f64, &Budget)> = None;
    for ((budget, run), before) in budgets.iter().zip(&runs).zip(&before) {
        let misses = |score: &cache_policy::Score| score.of(phase).0.misses;
        let behind = misses(&run.behind.score) - misses(before);
        let alone = misses(&run.alone.score);
        let saved = 1.0 - behind as f64 / alone.max(1) as f64;
        if saved_most.is_none_or(|most| saved > most.0) {
            saved_most = Some((saved, budget));
        }
        table.row([
            budget.label.clone(),
            grouped(budget.slots),
            short(per(misses(before), a)),
            short(per(alone, b)),
            short(per(behind, b)),
            percent(saved),
        ]);
    }
    text.push_str(&format!("misses a token in {name_of} with {name}, from an empty cache\n{}", table.text()));
    if let Some((saved, budget)) = saved_most {
        text.push_str(&match saved {
            s if s >= 0.01 => {
                format!("\nA cache warmed by A saves B up to {} of its misses (at {}).\n", percent(s), budget.label)
            }
            _ => "\nA cache warmed by A saves B next to nothing.\n".into(),
        });
    }
    Ok(text)
}

fn feed(
    input: &mut TraceInput,
    runs: &mut [Run],
    pick: impl Fn(&mut Run) -> [Option<&mut ScoredReplay>; 2] + Sync,
) -> Result<(), CliError> {
    while let Some(batch) = input.next_batch()? {
        for run in runs.iter_mut() {
            for replay in pick(run).into_iter().flatten() {
                batch.requests().try_for_each(|r| replay.request(&r)).map_err(CliError::failed)?;
            }
        }
    }
    Ok(())
}

fn usage_table(a: &Census, b: &Census) -> String {
    let mut table = Table::new(&["<", "A", "B"]);
    let mut add =
        |what: &str, of: &dyn Fn(&Census) -> u64| table.row([what.to_owned(), grouped(of(a)), grouped(of(b))]);
    add("sessions", &|c| c.sessions);
    add("prefill tokens", &|c| c.prefill.tokens);
    add("decode tokens", &|c| c.decode.tokens);
    add("expert uses", &|c| c.uses_total());
    add("experts used", &|c| c.experts_used() as u64);
    let only = |x: &Census, y: &Census| {
        x.expert_uses().iter().zip(y.expert_uses()).filter(|(x, y)| **x > 0 && **y == 0).count() as u64
    };
    table.row(["used here only".to_owned(), grouped(only(a, b)), grouped(only(b, a))]);
    table.text()
}

/// Share of uses that two traces have in common when each is scaled to one: over all experts, and by layer.
fn overlap(header: &cache_policy::TraceHeader, a: &Census, b: &Census) -> (f64, Vec<f64>) {
    let common = |x: &[u64], y: &[u64]| {
        let sum = |list: &[u64]| list.iter().sum::<u64>().max(1) as f64;
        let (sx, sy) = (sum(x), sum(y));
        x.iter().zip(y).map(|(x, y)| (*x as f64 / sx).min(*y as f64 / sy)).sum::<f64>()
    };
    let (mut at, mut by_layer) = (0, Vec::new());
    for layer in &header.layers {
        let end = at + usize::from(layer.experts);
        by_layer.push(common(&a.expert_uses()[at..end], &b.expert_uses()[at..end]));
        at = end;
    }
    (common(a.expert_uses(), b.expert_uses()), by_layer)
}
