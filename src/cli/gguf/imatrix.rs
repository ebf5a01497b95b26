//! `ds4-gguf imatrix`: runs a model over a text and writes what every matrix input weighs.
//! Owns the flags and the order of work; never sums anything itself. Surprising fact: windows are scored like those of
//! `ds4 --perplexity-file`, so the note at the end also says how well the model knows the text it was measured on.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use clap::Args;

use super::{listen, note, step};
use crate::backend::cpu::matmul::Arithmetic;
use crate::cli::interrupt::Interrupt;
use crate::cli::progress::{Meter, Unit};
use crate::cli::run::from_session;
use crate::cli::{CliError, input};
use crate::engine::Engine;
use crate::engine::options::EngineOptions;
use crate::models::probe::Probe;
use crate::session::importance::Collector;
use crate::session::perplexity;
use crate::session::timeline::{Flow, StopAsked, Timeline, Watcher};
use crate::storage::convert::write_importance;
use crate::storage::part_file;

/// Flags of `ds4-gguf imatrix`.
#[derive(Args, Debug)]
pub(super) struct ImatrixArgs {
    /// Model file (GGUF) to run; the more exact its types, the better
    model: PathBuf,
    /// UTF-8 text to run it over
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// File to write (safetensors)
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Length of a window in tokens; each starts from nothing
    #[arg(short, long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(2..))]
    ctx: u32,
    /// Use at most this many tokens of the text
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    tokens: Option<u32>,
    /// Keep experts on the drive instead of loading all of them
    #[arg(long)]
    ssd_streaming: bool,
    /// Replace an existing output
    #[arg(long)]
    force: bool,
    /// Compute threads [default: all processors]; the output does not depend on it
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
}

/// Lends the collector to every pass.
struct Collecting<'a> {
    collector: Collector,
    interrupt: &'a Interrupt,
    meter: Meter,
}

impl Watcher for Collecting<'_> {
    fn prefill(&mut self, done: usize, total: usize) -> Flow {
        match step(&mut self.meter, self.interrupt, done as u64, total as u64) {
            ControlFlow::Continue(()) => Flow::Continue,
            ControlFlow::Break(()) => Flow::Stop,
        }
    }

    fn stop_asked(&self) -> Option<StopAsked> {
        Some(self.interrupt.asked_in_passes())
    }

    fn has_probe(&self) -> bool {
        true
    }

    fn probe(&mut self) -> Option<&mut dyn Probe> {
        Some(&mut self.collector)
    }
}

/// Runs the command.
///
/// # Errors
/// An output that exists, an unreadable text or model, a failed pass, an interruption; the output is untouched then.
pub(super) fn run(args: &ImatrixArgs) -> Result<(), CliError> {
    refuse_output(&args.output, args.force)?;
    let text = input::text_file(&args.text)?;
    let interrupt = listen()?;
    let options = EngineOptions {
        ctx: Some(args.ctx as usize),
        threads: args.threads.map(usize::from),
        arithmetic: Arithmetic::Quality,
        is_streaming: args.ssd_streaming,
        ..EngineOptions::new(&args.model)
    };
    let mut show = |prepared: &crate::engine::prepare::Prepared| {
        prepared.notices.iter().for_each(|notice| note(notice));
    };
    let go_on = |_, _, _| if interrupt.is_set() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    let engine = Engine::open(&options, &mut show, &go_on).map_err(CliError::failed)?;
    let tokenizer = engine.tokenizer();
    let mut tokens = tokenizer.encode(&text).map_err(CliError::failed)?;
    tokens.truncate(args.tokens.map_or(usize::MAX, |n| n as usize));
    let config = &engine.prepared.config;
    let collector = Collector::new(config.matrix_inputs(), config.expert_shape().1);
    let meter = Meter::new("imatrix", Unit::Tokens);
    let mut watcher = Collecting { collector, interrupt: &interrupt, meter };
    let mut timeline = Timeline::new(engine.runner().map_err(CliError::failed)?);
    let window = timeline.ctx();
    let seen =
        perplexity::measure(&mut timeline, &tokens, tokenizer.bos(), window, &mut watcher).map_err(from_session)?;
    let Collecting { collector, .. } = watcher;
    let (unseen, experts) = collector.unseen_experts();
    let tensors = collector.finish().map_err(CliError::failed)?;
    let file_name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let notes = [
        ("model", file_name(&args.model)),
        ("text", file_name(&args.text)),
        ("tokens", tokens.len().to_string()),
        ("window", window.to_string()),
    ];
    write_importance(&args.output, &tensors, &notes)?;
    note(&format!(
        "wrote {}: {} tensors from {} tokens in {} windows of {window}; perplexity of the text {:.4}; \
         {unseen} of {experts} experts were never chosen",
        args.output.display(),
        tensors.len(),
        tokens.len(),
        seen.windows,
        seen.perplexity()
    ));
    Ok(())
}

/// A file that must not be replaced, or cannot be made, is found before hours of work, not after.
fn refuse_output(path: &Path, force: bool) -> Result<(), CliError> {
    let shown = path.display();
    match std::fs::metadata(path) {
        Ok(found) if !found.is_file() => Err(CliError::Failed(format!("{shown} is not a regular file; name another"))),
        Ok(_) if !force => Err(CliError::Failed(format!("{shown} exists already; use --force to replace it"))),
        _ => part_file::open(path).map(drop).map_err(|e| CliError::Failed(format!("{shown}: cannot write: {e}"))),
    }
}
