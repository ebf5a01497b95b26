//! The tasks of `ds4` that are not conversations: inspect, plan, token dump, perplexity, consistency.
//! Never loads weights for the first three. Surprising fact: results go to stdout, since they are what was asked for.

use std::path::Path;
use std::time::Instant;

use crate::cli::args::Cli;
use crate::cli::input::Prompt;
use crate::cli::interrupt::Interrupt;
use crate::cli::open::refusal;
use crate::cli::output::{line, note};
use crate::cli::run::{from_session, prompt_tokens, write_stats};
use crate::cli::watch::RunWatcher;
use crate::cli::{CliError, gguf, report};
use crate::engine::Engine;
use crate::engine::options::EngineOptions;
use crate::engine::prepare::{prepare, tokenizer};
use crate::engine::stats::{RunStats, Timings};
use crate::session::timeline::Timeline;
use crate::session::{consistency, perplexity as likelihood};
use crate::units::TokenId;

/// Window of `--perplexity-file` when `--ctx` is not given.
pub const PERPLEXITY_WINDOW: usize = 1024;

/// `--inspect`.
///
/// # Errors
/// A file that is no model.
pub fn inspect(model: &Path) -> Result<(), CliError> {
    line(gguf::describe(model).map_err(CliError::failed)?.trim_end()).map_err(CliError::output)
}

/// `--plan`.
///
/// # Errors
/// A file that is no model; the planner's refusals.
pub fn plan(options: &EngineOptions) -> Result<(), CliError> {
    let prepared = prepare(options).map_err(|error| refusal(&error, options))?;
    prepared.notices.iter().for_each(|notice| note(notice));
    line(&prepared.plan.to_string()).map_err(CliError::output)
}

/// `--dump-tokens`.
///
/// # Errors
/// No prompt, or one that the model's format refuses.
pub fn dump_tokens(cli: &Cli, options: &EngineOptions, prompt: Option<Prompt>) -> Result<(), CliError> {
    let Some(prompt) = prompt else {
        return Err(CliError::usage("--dump-tokens needs a prompt: add -p, --prompt-file or --tokens-file"));
    };
    let (vocabulary, arch) = tokenizer(&options.model).map_err(CliError::failed)?;
    let tokens = prompt_tokens(cli, &vocabulary, &arch, &prompt, usize::MAX)?;
    line(&serde_json::to_string(&tokens).map_err(CliError::failed)?).map_err(CliError::output)
}

/// `--perplexity-file`.
///
/// # Errors
/// A failed pass, or a text of fewer than two tokens.
pub fn perplexity(cli: &Cli, engine: &Engine, interrupt: &Interrupt, text: &str) -> Result<(), CliError> {
    let tokenizer = engine.tokenizer();
    let tokens = tokenizer.encode(text).map_err(CliError::failed)?;
    if tokens.is_empty() {
        return Err(CliError::usage("the text of --perplexity-file is empty; give it one to measure"));
    }
    let mut timeline = Timeline::new(engine.runner().map_err(CliError::failed)?);
    let window = timeline.ctx();
    let mut watcher = RunWatcher::new(interrupt);
    let started = Instant::now();
    let sum =
        likelihood::measure(&mut timeline, &tokens, tokenizer.bos(), window, &mut watcher).map_err(from_session)?;
    let elapsed = started.elapsed();
    line(&format!(
        "perplexity: {:.4}, nll: {:.5} nats/token, top-1: {:.2} %, {} tokens in {} windows of {window}",
        sum.perplexity(),
        sum.nll(),
        100.0 * sum.top1 as f64 / sum.predicted as f64,
        sum.predicted,
        sum.windows
    ))
    .map_err(CliError::output)?;
    let timings = Timings {
        prompt_tokens: tokens.len() as u64,
        prefill_tokens: sum.predicted + sum.windows,
        prefill: elapsed,
        ..Timings::default()
    };
    let stats = RunStats::collect(engine, window, &timings);
    report::print(&stats);
    write_stats(cli, &stats)
}

/// `--decode-consistency`.
///
/// # Errors
/// A failed pass, or a difference.
pub fn consistency(engine: &Engine, interrupt: &Interrupt, tokens: &[TokenId], single: usize) -> Result<(), CliError> {
    let mut timeline = Timeline::new(engine.runner().map_err(CliError::failed)?);
    let outcome =
        consistency::compare(&mut timeline, tokens, single, &interrupt.asked_in_passes()).map_err(from_session)?;
    line(&format!(
        "decode consistency: {} of {} positions differ, largest difference {:e}",
        outcome.different, outcome.positions, outcome.max_abs
    ))
    .map_err(CliError::output)?;
    match outcome.first {
        None => Ok(()),
        Some(position) => Err(CliError::Failed(format!(
            "computing tokens together and one by one differs from position {position} on; please report this with the model's name"
        ))),
    }
}
