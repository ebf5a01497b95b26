//! `ds4-cache plan`: what budget a model may have on this machine, and what speed follows from which hit rate.
//! Owns the tables; memory is the planner's, drive rates are the probe's. Never foretells a hit rate without a trace.
//! Surprising fact: without a trace the two ends, no hits and all hits, already tell whether the budget can matter.

use std::path::PathBuf;

use cache_policy::{Phase, Speed, TraceHeader};
use clap::Args;

use super::advice::{Choice, flags, recommend};
use super::budgets::Budget;
use super::model_facts::{ModelFacts, memory_rate, options};
use super::note;
use super::scores::{Scores, WantOptimum, contenders, score};
use super::speed_flags::{SpeedArgs, above_zero};
use super::table::{Table, grouped, percent, short};
use super::trace_input::TraceInput;
use crate::cli::CliError;
use crate::storage::probe::ProbeChoice;
use crate::units::Bytes;

/// Hit rates of the table that needs no trace.
const HIT_RATES: [f64; 7] = [0.0, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0];
/// Shares of the experts that are looked at, in percent, beside the floor and the automatic budget.
const SHARES: [u64; 8] = [10, 20, 30, 40, 50, 65, 80, 100];

/// Flags of `ds4-cache plan`.
#[derive(Args, Debug)]
pub struct PlanArgs {
    /// Model file (GGUF)
    model: PathBuf,
    /// Trace of this model (ds4 --trace-routes): gives hit rates for every budget
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Policy to replay the trace with
    #[arg(long, value_name = "NAME", default_value = "auto", requires = "trace")]
    policy: String,
    /// Recommend the smallest budget that gives this many tokens a second
    #[arg(long, value_name = "T/S", requires = "trace", value_parser = above_zero)]
    target_tps: Option<f64>,
    /// Context length to plan for
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    ctx: Option<u32>,
    /// Plan as if this much memory were in use by others
    #[arg(long, value_name = "NGB")]
    simulate_used_memory: Option<String>,
    #[command(flatten)]
    speed: SpeedArgs,
    /// Use a trace whose recording was cut off, up to where it ends
    #[arg(long, requires = "trace")]
    partial: bool,
}

/// Runs the subcommand; returns what goes to stdout.
///
/// # Errors
/// A model that cannot run here, a trace of another model, a drive of unknown rate.
pub fn run(args: &PlanArgs) -> Result<String, CliError> {
    let contenders = contenders(std::slice::from_ref(&args.policy))?;
    let mut options = options(&args.model, args.ctx, args.simulate_used_memory.as_deref())?;
    if args.speed.drive_gbs.is_some() {
        options.probe = ProbeChoice::Off;
    }
    let trace = args.trace.as_deref().map(|path| TraceInput::open(path, args.partial)).transpose()?;
    let facts = ModelFacts::open(&options)?;
    facts.prepared.notices.iter().for_each(|notice| note(notice));
    let mut text = head(&facts);
    let speed = speed(args, &facts, &mut text)?;
    let budgets = budgets(&facts)?;
    let Some(mut trace) = trace else {
        text.push_str(&without_trace(&facts, &budgets, speed));
        return Ok(text);
    };
    check_model(trace.header(), &facts.header, &trace)?;
    let scores = score(&mut trace, &budgets, &contenders, WantOptimum::Auto)?;
    text.push_str(&with_trace(args, &facts, &budgets, speed, &scores, contenders[0].name));
    Ok(text)
}

/// Refuses a trace of another model file.
///
/// # Errors
/// Another identity; the same one with other layers, which is damage.
pub fn check_model(trace: &TraceHeader, model: &TraceHeader, input: &TraceInput) -> Result<(), CliError> {
    let shown = input.path().display();
    trace.check_model(&model.model).map_err(|e| CliError::failed(format!("{shown}: {e}")))?;
    if trace.layers != model.layers {
        return Err(CliError::failed(format!(
            "{shown}: its layers are not those of the model; record the trace again"
        )));
    }
    Ok(())
}

fn head(facts: &ModelFacts) -> String {
    let (prepared, plan) = (&facts.prepared, &facts.prepared.plan);
    let sizes: Vec<String> = prepared.classes.iter().map(|c| c.expert_bytes.to_string()).collect();
    let rest = plan.total().0 - plan.cache.0;
    format!(
        "model    {} ({}): {} layers, {} experts of {}; a token uses {} ({}) and {} of other weights\n\
         memory   {} usable of {}; {} for everything but experts at --ctx {}; automatic cache {} = {} slots\n",
        prepared.file.path().display(),
        prepared.config.arch(),
        facts.header.layers.len(),
        grouped(facts.classes.experts()),
        sizes.join(" and "),
        grouped(facts.classes.floor()),
        Bytes(facts.expert_bytes),
        Bytes(facts.dense_bytes),
        plan.facts.usable(),
        plan.facts.total,
        Bytes(rest),
        plan.ctx,
        plan.cache,
        grouped(plan.cache_slots)
    )
}

/// The rates, told where each comes from.
fn speed(args: &PlanArgs, facts: &ModelFacts, text: &mut String) -> Result<Speed, CliError> {
    let (drive, source) = match (args.speed.drive_gbs, &facts.prepared.drive) {
        (Some(gbs), _) => (gbs, "as given"),
        (None, Some(rates)) => (rates.bulk.gb_per_s, "measured, expert-sized reads"),
        (None, None) => {
            return Err(CliError::failed(
                "the rate of the drive is not known: the model file is too small to measure it by; give --drive-gbs",
            ));
        }
    };
    text.push_str(&format!("drive    {} GB/s ({source})\n", short(drive)));
    let step_s = match args.speed.step_s(Some(facts.step_bytes())) {
        Some(step_s) => {
            let how = if args.speed.step_ms.is_some() { "as given" } else { "from --memory-gbs: at best" };
            text.push_str(&format!("step     {} ms with every expert cached ({how})\n", short(1e3 * step_s)));
            step_s
        }
        None => {
            let rate = memory_rate()?;
            let step_s = Speed::step_from_memory(facts.step_bytes(), rate);
            text.push_str(&format!(
                "step     {} ms with every expert cached, at best: {} read from memory at {} GB/s (measured); --step-ms if you know better\n",
                short(1e3 * step_s),
                Bytes(facts.step_bytes() as u64),
                short(rate / 1e9)
            ));
            step_s
        }
    };
    Ok(Speed { step_s, drive_bytes_per_s: drive * 1e9 })
}

/// Floor, shares, and the automatic budget.
fn budgets(facts: &ModelFacts) -> Result<Vec<Budget>, CliError> {
    let classes = &facts.classes;
    let mut budgets = vec![classes.slots(classes.floor(), "floor".into())?];
    for share in SHARES {
        let slots = classes.experts() * share / 100;
        if slots > classes.floor() {
            budgets.push(classes.slots(slots, format!("{share} %"))?);
        }
    }
    // Last, so that it gives way to a share of the same number of slots.
    budgets.push(facts.planned_budget("automatic".into()));
    budgets.sort_by_key(|b| b.slots);
    budgets.dedup_by_key(|b| b.slots);
    Ok(budgets)
}

/// Cells that every table of budgets begins with.
fn budget_cells(facts: &ModelFacts, budget: &Budget) -> Vec<String> {
    let plan = &facts.prepared.plan;
    let in_all = plan.total().0 - plan.cache.0 + budget.bytes.0;
    vec![
        budget.label.clone(),
        grouped(budget.slots),
        percent(budget.slots as f64 / facts.classes.experts() as f64),
        budget.bytes.to_string(),
        Bytes(in_all).to_string(),
        facts.fit(budget.bytes).name().into(),
    ]
}

const BUDGET_HEAD: [&str; 6] = ["<budget", "slots", "share", "cache", "memory in all", "<fits"];

fn without_trace(facts: &ModelFacts, budgets: &[Budget], speed: Speed) -> String {
    let mut table = Table::new(&BUDGET_HEAD);
    budgets.iter().for_each(|b| table.row(budget_cells(facts, b)));
    let mut rates = Table::new(&["hit rate", "read/token", "t/s at most", "t/s if reads cost no wait"]);
    for rate in HIT_RATES {
        let missed = (1.0 - rate) * facts.expert_bytes as f64;
        rates.row([
            percent(rate),
            Bytes(missed.round() as u64).to_string(),
            short(speed.tokens_per_s(missed)),
            short(speed.tokens_per_s_overlapped(missed)),
        ]);
    }
    let model = facts.prepared.file.path().display();
    format!(
        "\n{}\nWhat a hit rate is worth here:\n\n{}\n\
         Which budget gives which hit rate is unknown without routes of your own text. Record some with --trace-routes FILE\n\
         and run ds4-cache plan {model} --trace FILE, or let ds4-cache tune {model} --prompt-file TEXT do both.\n",
        table.text(),
        rates.text()
    )
}

fn with_trace(
    args: &PlanArgs,
    facts: &ModelFacts,
    budgets: &[Budget],
    speed: Speed,
    scores: &Scores,
    policy: &str,
) -> String {
    let phase = if scores.census.decode.uses > 0 { Phase::Decode } else { Phase::Prefill };
    let tokens = scores.census.of(phase).tokens.max(1) as f64;
    let mut head = BUDGET_HEAD.to_vec();
    head.extend(["hit rate", "misses/token", "t/s at most", "t/s optimum"]);
    let mut table = Table::new(&head);
    let mut choices = Vec::new();
    for (at, budget) in budgets.iter().enumerate() {
        let score = scores.of(at, policy).expect("every budget was replayed").score;
        let (tally, read) = score.of(phase);
        let tokens_per_s = speed.tokens_per_s(read.0 as f64 / tokens);
        let best = scores.optimum.as_ref().map(|o| speed.tokens_per_s(o[at].of(phase).1.0 as f64 / tokens));
        let mut cells = budget_cells(facts, budget);
        cells.extend([
            percent(tally.hit_rate().unwrap_or(0.0)),
            short(tally.misses as f64 / tokens),
            short(tokens_per_s),
            best.map_or("-".into(), short),
        ]);
        table.row(cells);
        choices.push(Choice { budget, fit: facts.fit(budget.bytes), tokens_per_s });
    }
    let model = facts.prepared.file.path().display().to_string();
    let mut text = format!(
        "\n{policy}, {} tokens of {}\n\n{}\n",
        grouped(tokens as u64),
        super::replay::phase_name(phase),
        table.text()
    );
    match (recommend(&choices, args.target_tps), args.target_tps) {
        (Some(choice), target) => {
            let why = match target {
                Some(target) => format!("the smallest that gives {} t/s", short(target)),
                None => "the smallest within 2 % of the fastest that fits".to_owned(),
            };
            text.push_str(&format!(
                "Use {} slots, {why} ({} t/s at most):\n\n    {}\n",
                grouped(choice.budget.slots),
                short(choice.tokens_per_s),
                flags(&model, choice.budget.slots, policy)
            ));
        }
        (None, Some(target)) => {
            let most = choices.iter().filter(|c| c.fit != super::model_facts::Fit::No).map(|c| c.tokens_per_s);
            let most = most.fold(0.0, f64::max);
            let limit = match speed.missed_bytes_for(target) {
                None => "the step alone takes longer, so no cache can give it",
                Some(_) => "more memory, a faster drive or smaller experts would be needed",
            };
            text.push_str(&format!("{} t/s is out of reach here ({} at most): {limit}.\n", short(target), short(most)));
        }
        (None, None) => text.push_str("No budget fits this machine.\n"),
    }
    text
}
