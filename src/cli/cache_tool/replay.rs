//! `ds4-cache replay`: what every policy does with a trace at every budget, next to the best that is possible.
//! Owns the rows and their three spellings (table, JSON, CSV). Never rounds what a script reads.
//! Surprising fact: cold misses are the same in every row of a phase, since an empty cache can avoid none of them.

use std::path::PathBuf;

use cache_policy::policies::DEFAULT;
use cache_policy::{Bytes, Phase, Score};
use clap::Args;
use serde::{Deserialize, Serialize};

use super::budgets::{Budget, Classes};
use super::note;
use super::scores::{Scores, WantOptimum, contenders, score};
use super::table::{Table, grouped, percent, short};
use super::trace_input::{TraceInput, describe, identity};
use crate::cli::CliError;

/// Flags of `ds4-cache replay`.
#[derive(Args, Debug)]
pub struct ReplayArgs {
    /// Trace of ds4 --trace-routes
    trace: PathBuf,
    /// Policies, separated by commas; all for every known one
    #[arg(long, value_name = "NAME,..|all", default_value = "lru,auto", value_delimiter = ',')]
    policy: Vec<String>,
    /// Budgets, separated by commas: shares of all experts, numbers of slots, or gigabytes (GB = GiB)
    #[arg(long, value_name = "P%|N|NGB,..", default_value = "25%,50%,75%", value_delimiter = ',')]
    budget: Vec<String>,
    /// Compute the best possible cache too
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = WantOptimum::Auto)]
    optimum: WantOptimum,
    /// One JSON object instead of tables
    #[arg(long, conflicts_with = "csv")]
    json: bool,
    /// CSV instead of tables
    #[arg(long)]
    csv: bool,
    /// Use a trace whose recording was cut off, up to where it ends
    #[arg(long)]
    partial: bool,
}

/// Value of [`ReplayReport::format`].
pub const FORMAT: &str = "ds4-replay";
/// Name of the row of the best possible cache.
pub const OPTIMUM: &str = "optimum";

/// The result of a replay. Field names are part of the `--json` format.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ReplayReport {
    /// [`FORMAT`].
    pub format: String,
    pub version: u32,
    pub trace: String,
    /// Identity of the model, hexadecimal; zeros when the trace has none.
    pub model: String,
    pub layers: u64,
    pub experts: u64,
    /// Experts that one token uses in all layers.
    pub token_experts: u64,
    pub sessions: u64,
    pub prefill_tokens: u64,
    pub decode_tokens: u64,
    /// Whether the trace names its tokens; otherwise steps were counted.
    pub has_tokens: bool,
    pub rows: Vec<Row>,
}

/// One policy at one budget in one phase.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Row {
    /// `prefill` or `decode`.
    pub phase: String,
    pub budget: String,
    pub slots: u64,
    /// Share of all experts.
    pub share: f64,
    pub cache_bytes: u64,
    pub policy: String,
    pub requests: u64,
    pub all_hit_requests: u64,
    pub uses: u64,
    pub hits: u64,
    pub misses: u64,
    /// Misses of experts that had not been used before.
    pub cold_misses: u64,
    /// Misses of experts that had been evicted.
    pub warm_misses: u64,
    pub evictions: u64,
    pub read_bytes: u64,
    pub hit_rate: f64,
    pub misses_per_token: f64,
    /// Misses relative to the best possible ones; absent when these are unknown.
    pub optimum_ratio: Option<f64>,
}

/// Name of a phase in reports.
pub fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Prefill => "prefill",
        Phase::Decode => "decode",
    }
}

/// Runs the subcommand; returns what goes to stdout.
///
/// # Errors
/// Bad budgets, unknown policies, damaged traces.
pub fn run(args: &ReplayArgs) -> Result<String, CliError> {
    let contenders = contenders(&args.policy)?;
    let mut input = TraceInput::open(&args.trace, args.partial)?;
    let budgets = Classes::of(input.header()).parse_all(&args.budget)?;
    let scores = score(&mut input, &budgets, &contenders, args.optimum)?;
    tell_splits(&scores);
    let report = report(&input, &budgets, &scores);
    if args.json {
        return Ok(serde_json::to_string_pretty(&report).map_err(CliError::failed)? + "\n");
    }
    if args.csv { csv(&report) } else { Ok(text(&report, &describe(input.header()))) }
}

fn tell_splits(scores: &Scores) {
    let most = scores.scored.iter().map(|s| s.split_requests).max().unwrap_or(0);
    if most > 0 {
        note(&format!(
            "note: {most} requests were recorded with a larger cache; they were cut into waves that fit, as the engine cuts them"
        ));
    }
}

/// The rows of a replay.
pub fn report(input: &TraceInput, budgets: &[Budget], scores: &Scores) -> ReplayReport {
    let (header, census) = (input.header(), &scores.census);
    let experts: u64 = header.layers.iter().map(|l| u64::from(l.experts)).sum();
    let mut rows = Vec::new();
    for phase in [Phase::Prefill, Phase::Decode] {
        if census.of(phase).uses == 0 {
            continue;
        }
        for (at, budget) in budgets.iter().enumerate() {
            let best = scores.optimum.as_ref().map(|o| &o[at]);
            let mut add = |policy: &str, score: &Score| {
                rows.push(row(phase, budget, experts, policy, (score, best), census.of(phase)));
            };
            scores.scored.iter().filter(|s| s.budget == at).for_each(|s| add(s.policy, &s.score));
            best.into_iter().for_each(|best| add(OPTIMUM, best));
        }
    }
    ReplayReport {
        format: FORMAT.into(),
        version: 1,
        trace: input.path().display().to_string(),
        model: header.model.iter().map(|byte| format!("{byte:02x}")).collect(),
        layers: header.layers.len() as u64,
        experts,
        token_experts: header.layers.iter().map(|l| u64::from(l.top_k)).sum(),
        sessions: census.sessions,
        prefill_tokens: census.prefill.tokens,
        decode_tokens: census.decode.tokens,
        has_tokens: census.has_tokens(),
        rows,
    }
}

fn row(
    phase: Phase,
    budget: &Budget,
    experts: u64,
    policy: &str,
    (score, best): (&Score, Option<&Score>),
    census: &cache_policy::census::PhaseCensus,
) -> Row {
    let (tally, read) = score.of(phase);
    let ratio = |best: &Score| match (tally.misses, best.of(phase).0.misses) {
        (0, 0) => 1.0,
        (misses, best) => misses as f64 / best as f64,
    };
    Row {
        phase: phase_name(phase).into(),
        budget: budget.label.clone(),
        slots: budget.slots,
        share: budget.slots as f64 / experts as f64,
        cache_bytes: budget.bytes.0,
        policy: policy.into(),
        requests: tally.requests,
        all_hit_requests: tally.all_hit,
        uses: tally.hits + tally.misses,
        hits: tally.hits,
        misses: tally.misses,
        cold_misses: census.first_uses,
        warm_misses: tally.misses - census.first_uses,
        evictions: tally.evictions,
        read_bytes: read.0,
        hit_rate: tally.hit_rate().unwrap_or(0.0),
        misses_per_token: tally.misses as f64 / census.tokens.max(1) as f64,
        // A phase in which the optimum misses nothing has no ratio.
        optimum_ratio: best.map(ratio).filter(|r| r.is_finite()),
    }
}

fn csv(report: &ReplayReport) -> Result<String, CliError> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    report.rows.iter().try_for_each(|row| writer.serialize(row)).map_err(CliError::failed)?;
    let bytes = writer.into_inner().map_err(CliError::failed)?;
    Ok(String::from_utf8(bytes).expect("rows are text"))
}

fn text(report: &ReplayReport, model: &str) -> String {
    let unit = if report.has_tokens { "tokens" } else { "steps (tokens are not marked)" };
    let sessions = match report.sessions {
        0 => String::new(),
        1 => "1 session, ".into(),
        n => format!("{n} sessions, "),
    };
    let mut text = format!(
        "{}: {model}; {sessions}{} prefill and {} decode {unit}; every replay starts with an empty cache\n",
        report.trace,
        grouped(report.prefill_tokens),
        grouped(report.decode_tokens)
    );
    for phase in [Phase::Prefill, Phase::Decode] {
        let rows: Vec<&Row> = report.rows.iter().filter(|r| r.phase == phase_name(phase)).collect();
        if !rows.is_empty() {
            text.push_str(&format!("\n{}\n", phase_name(phase)));
            text.push_str(&table(&rows, report.has_tokens));
        }
    }
    if let Some(advice) = advice(report) {
        text.push_str(&format!("\n{advice}\n"));
    }
    text
}

fn table(rows: &[&Row], has_tokens: bool) -> String {
    let per = if has_tokens { "misses/token" } else { "misses/step" };
    let has_bytes = rows.iter().any(|r| r.cache_bytes > r.slots);
    let head = [
        "<budget",
        "slots",
        "cache",
        "<policy",
        "hit rate",
        per,
        "cold",
        "warm",
        "all-hit layers",
        "read",
        "x optimum",
    ];
    let mut table = Table::new(&head);
    let mut last = None;
    for r in rows {
        let is_first = last.replace(&r.budget) != Some(&r.budget);
        let once = |text: String| if is_first { text } else { String::new() };
        table.row([
            once(r.budget.clone()),
            once(grouped(r.slots)),
            once(if has_bytes { Bytes(r.cache_bytes).to_string() } else { "-".into() }),
            r.policy.clone(),
            percent(r.hit_rate),
            short(r.misses_per_token),
            grouped(r.cold_misses),
            grouped(r.warm_misses),
            percent(r.all_hit_requests as f64 / r.requests.max(1) as f64),
            if has_bytes { Bytes(r.read_bytes).to_string() } else { "-".into() },
            r.optimum_ratio.map_or("-".into(), |x| format!("{x:.2}")),
        ]);
    }
    table.text()
}

/// One sentence on what would change most, from the decode rows (or the only phase there is).
fn advice(report: &ReplayReport) -> Option<String> {
    let phase = ["decode", "prefill"].into_iter().find(|p| report.rows.iter().any(|r| r.phase == *p))?;
    let rows: Vec<&Row> = report.rows.iter().filter(|r| r.phase == phase && r.policy != OPTIMUM).collect();
    let mut budgets: Vec<&str> = rows.iter().map(|r| r.budget.as_str()).collect();
    budgets.dedup();
    let best_at =
        |budget: &str| rows.iter().filter(|r| r.budget == budget).min_by_key(|r| (r.misses, r.policy != DEFAULT));
    let last = best_at(budgets.last()?)?;
    if last.warm_misses == 0 {
        let enough = budgets.iter().filter_map(|b| best_at(b)).find(|r| r.warm_misses == 0)?;
        return Some(format!(
            "At {} ({} slots) nothing is ever read twice: more memory would win nothing.",
            enough.budget, enough.slots
        ));
    }
    let mut parts: Vec<String> = Vec::new();
    if let Some(lru) =
        rows.iter().find(|r| r.budget == last.budget && r.policy == "lru").filter(|l| l.misses > last.misses)
    {
        let saved = 1.0 - last.misses as f64 / lru.misses as f64;
        parts.push(format!("at {} {} reads {} less than lru", last.budget, last.policy, percent(saved)));
    }
    for pair in budgets.windows(2) {
        let (from, to) = (best_at(pair[0])?, best_at(pair[1])?);
        let saved = 1.0 - to.misses as f64 / from.misses.max(1) as f64;
        parts.push(format!("{} -> {} saves {} of the reads", from.budget, to.budget, percent(saved)));
    }
    if let Some(ratio) = last.optimum_ratio.filter(|r| *r > 1.0) {
        parts.push(format!(
            "of {}'s misses at {} no cache could avoid {}",
            last.policy,
            last.budget,
            percent(1.0 / ratio)
        ));
    }
    let mut sentence = parts.join("; ");
    (!sentence.is_empty()).then(|| {
        sentence[..1].make_ascii_uppercase();
        format!("{} ({phase}).", sentence)
    })
}

/// Model of a report, as messages show it.
pub fn short_model(header: &cache_policy::TraceHeader) -> String {
    identity(&header.model)
}
