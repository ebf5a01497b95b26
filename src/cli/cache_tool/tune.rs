//! `ds4-cache tune`: runs a prompt, records its routes, replays them at several budgets and policies, recommends flags.
//! Owns the run and the verdict; computing and recording are the engine's. Never prints the answer of the model.
//! Surprising fact: both rates of the prediction come from the run itself: its decode time without the waits, and what
//! the drive gave while it was asked.

use std::path::{Path, PathBuf};

use cache_policy::policies::{DEFAULT, KNOWN};
use cache_policy::{Phase, Speed};
use clap::Args;

use super::advice::{Choice, flags, recommend};
use super::budgets::Budget;
use super::model_facts::{Fit, ModelFacts, options};
use super::note;
use super::scores::{Scores, WantOptimum, contenders, score};
use super::speed_flags::{SpeedArgs, above_zero};
use super::table::{Table, grouped, percent, short};
use super::trace_input::TraceInput;
use crate::cli::interrupt::Interrupt;
use crate::cli::outputs::keep_apart;
use crate::cli::run::{from_generate, from_session};
use crate::cli::trace_file::TraceFile;
use crate::cli::watch::RunWatcher;
use crate::cli::whole_file::WholeFile;
use crate::cli::{CliError, input, open};
use crate::engine::Engine;
use crate::engine::options::EngineOptions;
use crate::engine::prepare::Prepared;
use crate::engine::stats::{RunStats, Timings};
use crate::models::Want;
use crate::session::generate::{Ended, GenerateOptions, Piece, generate};
use crate::session::prompt::PromptFormat;
use crate::session::sampler::{Sampler, SamplerParams};
use crate::session::stop::StopRules;
use crate::session::timeline::{Flow, Timeline};
use crate::text::chat::{Message, Role};
use crate::units::parse_budget;

/// Shares of the experts that are looked at, in percent.
const SHARES: [u64; 8] = [10, 20, 30, 40, 50, 65, 80, 100];
/// Fewer decoded tokens than this say little about a cache.
const TOKENS_FEW: u64 = 64;
/// Another policy than the default is recommended only when it misses this much less, over this many tokens at least.
const POLICY_MARGIN: f64 = 0.95;
const POLICY_TOKENS_MIN: u64 = 256;

/// Flags of `ds4-cache tune`.
#[derive(Args, Debug)]
pub struct TuneArgs {
    /// Model file (GGUF)
    model: PathBuf,
    /// UTF-8 text of the kind that will be asked
    #[arg(long, value_name = "FILE")]
    prompt_file: PathBuf,
    /// Tokens to generate; goes on past the model's own stop
    #[arg(short = 'n', long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    /// Temperature; 0 takes the most likely token, which may make a small model repeat itself
    #[arg(long, value_name = "T", default_value_t = 0.7)]
    temp: f32,
    /// Seed of the sampler
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Budget of the run itself: N slots, or NGB of memory [default: what memory allows]
    #[arg(long, value_name = "N|NGB")]
    run_budget: Option<String>,
    /// Keep the recorded routes in this file
    #[arg(long, value_name = "FILE")]
    keep_trace: Option<PathBuf>,
    /// Recommend the smallest budget that gives this many tokens a second
    #[arg(long, value_name = "T/S", value_parser = above_zero)]
    target_tps: Option<f64>,
    /// Context length
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    ctx: Option<u32>,
    /// Compute threads [default: all processors]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Plan as if this much memory were in use by others
    #[arg(long, value_name = "NGB")]
    simulate_used_memory: Option<String>,
    #[command(flatten)]
    speed: SpeedArgs,
}

/// What the run measured.
struct Measured {
    stats: RunStats,
    speed: Speed,
    drive_source: &'static str,
    step_source: &'static str,
}

/// Runs the subcommand; returns what goes to stdout.
///
/// # Errors
/// Bad flags, a model or a prompt that cannot be run, an interruption.
pub fn run(args: &TuneArgs) -> Result<String, CliError> {
    let inputs = [("the model", Some(args.model.as_path())), ("--prompt-file", Some(args.prompt_file.as_path()))];
    keep_apart(&inputs, &[("--keep-trace", args.keep_trace.as_deref())])?;
    let text = input::text_file(&args.prompt_file)?;
    if text.trim().is_empty() {
        return Err(CliError::usage(format!(
            "{} is empty; give a text of the kind that will be asked",
            args.prompt_file.display()
        )));
    }
    let mut options: EngineOptions = options(&args.model, args.ctx, args.simulate_used_memory.as_deref())?;
    let budget = args.run_budget.as_deref().map(parse_budget).transpose();
    options.budget = budget.map_err(|e| CliError::usage(format!("--run-budget: {e}")))?;
    options.threads = args.threads.map(usize::from);
    let sampler = SamplerParams { temperature: args.temp, seed: args.seed, ..SamplerParams::default() };
    let sampler = Sampler::new(sampler).map_err(CliError::usage)?;
    let scratch = tempfile::tempdir().map_err(|e| CliError::failed(format!("cannot make a scratch folder: {e}")))?;
    if let Some(path) = &args.keep_trace {
        WholeFile::check(path)
            .map_err(|e| CliError::failed(format!("--keep-trace: cannot write {}: {e}", path.display())))?;
    }
    let trace = args.keep_trace.clone().unwrap_or_else(|| scratch.path().join("routes"));
    let interrupt = Interrupt::listen().map_err(|e| CliError::failed(format!("cannot listen for signals: {e}")))?;
    let engine = open::open(&options, &interrupt)?;
    let timings = record(args, &engine, sampler, &interrupt, &text, &trace)?;
    let measured = measured(args, &engine, &timings)?;
    let facts = ModelFacts::of(without_weights(engine))?;
    verdict(args, &facts, &measured, &trace)
}

/// Gives weights and cache back before the replays.
fn without_weights(engine: Engine) -> Prepared {
    engine.prepared
}

/// Runs the prompt and writes its routes to `trace`.
fn record(
    args: &TuneArgs,
    engine: &Engine,
    mut sampler: Sampler,
    interrupt: &Interrupt,
    text: &str,
    trace: &Path,
) -> Result<Timings, CliError> {
    let tokenizer = engine.tokenizer();
    let format = PromptFormat::of(tokenizer, engine.prepared.config.arch()).map_err(CliError::failed)?;
    let mut timeline = Timeline::new(engine.runner().map_err(CliError::failed)?);
    let messages = [Message::new(Role::User, text)];
    let prompt = format.encode(tokenizer, &messages, None, timeline.ctx()).map_err(CliError::usage)?;
    let file = TraceFile::begin("--keep-trace", trace, engine)?;
    let mut watcher = RunWatcher::new(interrupt);
    let synced = timeline.sync(&prompt, Want::Last, &mut watcher).map_err(from_session)?;
    // Going on past the model's own stop: a dozen tokens would say nothing about a cache.
    let rules = StopRules::new(Vec::new(), Vec::new()).map_err(CliError::usage)?;
    let wanted =
        GenerateOptions { tokens_max: args.tokens as usize, is_scored: false, top_logprobs: 0, want: Want::Last };
    let mut on_piece = |_: &Piece<'_>| if interrupt.is_set() { Flow::Stop } else { Flow::Continue };
    let row_wait = engine.row_wait();
    let answer = generate(&mut timeline, tokenizer, &mut sampler, rules, &wanted, &mut watcher, &mut on_piece)
        .map_err(from_generate)?;
    if answer.ended == Ended::Caller {
        return Err(CliError::Failed("interrupted".into()));
    }
    file.finish(trace, engine)?;
    Ok(Timings {
        prompt_tokens: prompt.len() as u64,
        reused_tokens: synced.reused as u64,
        prefill_tokens: synced.computed as u64,
        prefill: synced.elapsed,
        generated_tokens: answer.tokens.len() as u64,
        decode_passes: answer.passes,
        decode: answer.elapsed,
        decode_row_wait: engine.row_wait().saturating_sub(row_wait),
    })
}

fn measured(args: &TuneArgs, engine: &Engine, timings: &Timings) -> Result<Measured, CliError> {
    let stats = RunStats::collect(engine, engine.plan().ctx as usize, timings);
    if timings.decode_passes == 0 {
        return Err(CliError::failed("nothing was decoded; ask for more tokens with -n"));
    }
    let waited_s = stats.cache.decode.wait_ns as f64 / 1e9 + timings.decode_row_wait.as_secs_f64();
    let step_s = (timings.decode.as_secs_f64() - waited_s).max(0.0) / timings.decode_passes as f64;
    let (step_s, step_source) = match args.speed.step_ms {
        Some(ms) => (ms / 1e3, "as given"),
        None => (step_s, "measured: decode without its waits"),
    };
    let probed = engine.prepared.drive.as_ref().map(|rates| rates.bulk.gb_per_s);
    let (drive, drive_source) = match (args.speed.drive_gbs, probed, stats.read_gb_per_s) {
        (Some(gbs), ..) => (gbs, "as given"),
        (_, Some(gbs), _) => (gbs, "measured, expert-sized reads"),
        (_, _, gbs) if gbs > 0.0 => (gbs, "what this run got while reading"),
        _ => {
            return Err(CliError::failed(
                "the run read nothing, so the rate of the drive is not known; give --drive-gbs",
            ));
        }
    };
    let speed = Speed { step_s, drive_bytes_per_s: drive * 1e9 };
    Ok(Measured { stats, speed, drive_source, step_source })
}

fn verdict(args: &TuneArgs, facts: &ModelFacts, measured: &Measured, trace: &Path) -> Result<String, CliError> {
    let mut trace_input = TraceInput::open(trace, false)?;
    let budgets = budgets(facts)?;
    let all = contenders(&["all".to_owned()])?;
    let scores = score(&mut trace_input, &budgets, &all, WantOptimum::Auto)?;
    let decoded = scores.census.decode.tokens;
    if decoded < TOKENS_FEW {
        note(&format!("note: only {decoded} tokens were decoded; a longer run (-n) says more"));
    }
    let Measured { stats, speed, drive_source, step_source } = measured;
    let mut text = format!(
        "run      {} prompt and {} generated tokens, {} t/s, {} hits in decode with {} slots\n\
         drive    {} GB/s ({drive_source})\nstep     {} ms with every expert cached ({step_source})\n\n",
        grouped(stats.prompt_tokens),
        grouped(stats.generated_tokens),
        short(stats.decode_tps),
        percent(stats.decode_hit_rate),
        grouped(stats.cache_slots),
        short(speed.drive_bytes_per_s / 1e9),
        short(1e3 * speed.step_s)
    );
    let (table, choices) = table(facts, &budgets, &scores, speed);
    text.push_str(&table);
    match recommend(&choices, args.target_tps) {
        Some(choice) => {
            let at = budgets.iter().position(|b| b.slots == choice.budget.slots).expect("it is one of them");
            let policy = policy(&scores, at);
            text.push_str(&format!(
                "\nExpect about {} t/s on text like this with {} slots ({}):\n\n    {}\n",
                short(choice.tokens_per_s),
                grouped(choice.budget.slots),
                choice.budget.bytes,
                flags(&facts.prepared.file.path().display().to_string(), choice.budget.slots, policy)
            ));
        }
        None => text.push_str("\nNo budget that fits this machine gives the speed asked for.\n"),
    }
    Ok(text)
}

/// Floor and shares that an explicit budget may have here, and the run's own.
fn budgets(facts: &ModelFacts) -> Result<Vec<Budget>, CliError> {
    let classes = &facts.classes;
    let mut budgets = vec![classes.slots(classes.floor(), "floor".into())?];
    for share in SHARES {
        let slots = classes.experts() * share / 100;
        if slots > classes.floor() {
            budgets.push(classes.slots(slots, format!("{share} %"))?);
        }
    }
    budgets.push(facts.planned_budget("this run".into()));
    budgets.retain(|b| facts.fit(b.bytes) != Fit::No);
    budgets.sort_by_key(|b| b.slots);
    budgets.dedup_by_key(|b| b.slots);
    Ok(budgets)
}

fn misses(scores: &Scores, budget: usize, policy: &str) -> u64 {
    scores.of(budget, policy).map_or(u64::MAX, |s| s.score.of(Phase::Decode).0.misses)
}

/// The default policy, unless another one misses clearly less at this budget.
fn policy(scores: &Scores, budget: usize) -> &'static str {
    let best = KNOWN.iter().map(|k| k.0).min_by_key(|name| misses(scores, budget, name)).unwrap_or(DEFAULT);
    let is_clear = scores.census.decode.tokens >= POLICY_TOKENS_MIN
        && (misses(scores, budget, best) as f64) < POLICY_MARGIN * misses(scores, budget, DEFAULT) as f64;
    if is_clear { best } else { DEFAULT }
}

fn table<'a>(facts: &ModelFacts, budgets: &'a [Budget], scores: &Scores, speed: &Speed) -> (String, Vec<Choice<'a>>) {
    let tokens = scores.census.decode.tokens.max(1) as f64;
    let head = ["<budget", "slots", "cache", "<fits", "<policy", "misses/token", "lru", DEFAULT, "optimum", "t/s"];
    let mut table = Table::new(&head);
    let mut choices = Vec::new();
    for (at, budget) in budgets.iter().enumerate() {
        let fit = facts.fit(budget.bytes);
        let chosen = policy(scores, at);
        let per_token = |misses: u64| short(misses as f64 / tokens);
        let read = scores.of(at, chosen).map_or(0, |s| s.score.of(Phase::Decode).1.0);
        let tokens_per_s = speed.tokens_per_s(read as f64 / tokens);
        let best = scores.optimum.as_ref().map(|o| o[at].of(Phase::Decode).0.misses);
        table.row([
            budget.label.clone(),
            grouped(budget.slots),
            budget.bytes.to_string(),
            fit.name().into(),
            chosen.into(),
            per_token(misses(scores, at, chosen)),
            per_token(misses(scores, at, "lru")),
            per_token(misses(scores, at, DEFAULT)),
            best.map_or("-".into(), per_token),
            short(tokens_per_s),
        ]);
        choices.push(Choice { budget, fit, tokens_per_s });
    }
    (format!("misses a token in decode, every replay from an empty cache\n\n{}", table.text()), choices)
}
