//! Runs a sweep: opens engines, walks one text from context length to context length, times what is new.
//! Never times what only restores a state. Surprising fact: generation does not move the sweep on; the timeline goes back to the context
//! length it came from, so each prefill extends the same text (as in the known tool).

use std::ops::ControlFlow;
use std::time::Instant;

use clap::Parser;

use crate::cli::CliError;
use crate::cli::args::Cli;
use crate::cli::bench::args::{Regime, RunArgs};
use crate::cli::bench::identity::Identity;
use crate::cli::bench::measure::Mark;
use crate::cli::bench::output::Rows;
use crate::cli::bench::row::{Mode, Row, round};
use crate::cli::bench::schedule::Schedule;
use crate::cli::bench::tokens::Tokens;
use crate::cli::interrupt::Interrupt;
use crate::cli::progress::{Meter, Unit};
use crate::cli::run::from_session;
use crate::cli::watch::RunWatcher;
use crate::cli::{bench, open, outputs};
use crate::engine::options::{EngineOptions, Preload};
use crate::engine::prepare::{Prepared, prepare};
use crate::engine::{Engine, Step};
use crate::models::{RunnerOptions, Want};
use crate::session::timeline::{SessionError, Timeline};
use crate::storage::probe::ProbeChoice;
use crate::units::{TokenId, parse_budget};

/// Measures what the flags ask for.
///
/// # Errors
/// Usage errors before anything large is read; failures of the model; an interruption, after which finished rows are kept.
pub fn run(args: &RunArgs) -> Result<(), CliError> {
    let schedule = Schedule::new(args)?;
    let options = engine_options(args, &schedule)?;
    let inputs =
        [("the model", Some(options[0].model.as_path())), ("--prompt-file", args.sweep.prompt_file.as_deref())];
    outputs::keep_apart(&inputs, &[("--csv", args.output.csv.as_deref())])?;
    let tokens = Tokens::new(args, &schedule, &options[0])?;
    let interrupt = Interrupt::listen().map_err(|e| CliError::failed(format!("cannot listen for signals: {e}")))?;
    // All budgets are planned before the first is measured, so that a bad one does not cost an hour.
    for one in &options {
        prepare(&EngineOptions { probe: ProbeChoice::Off, ..one.clone() }).map_err(CliError::failed)?;
    }
    let identity = Identity::of(&options[0].model)
        .map_err(|e| CliError::failed(format!("cannot read {}: {e}", options[0].model.display())))?;
    let mut rows = Rows::open(args.output.csv.as_deref(), args.output.format)?;
    let mut conditions = identity.lines().to_vec();
    conditions.push(format!("command: {}", bench::command_line()));
    rows.set_conditions(conditions);
    identity.lines().iter().for_each(|line| bench::note(line));
    let total = rows_total(&schedule, options.len());
    let mut bench = Bench { schedule: &schedule, tokens: &tokens, identity, interrupt: &interrupt, rows, total };
    let measured = options.iter().try_for_each(|one| bench.budget(one));
    let finished = bench.rows.finish();
    match measured {
        Err(CliError::Failed(why)) if bench.rows.len() > 0 => Err(CliError::Failed(format!(
            "{why}; the {} of {total} rows that were finished are in {}",
            bench.rows.len(),
            bench.rows.place()
        ))),
        other => other.and(finished),
    }
}

fn rows_total(schedule: &Schedule, budgets: usize) -> usize {
    budgets * schedule.regimes.len() * schedule.repetitions * schedule.rows_per_pass()
}

/// Options of `ds4` for the same flags, one set a budget.
fn engine_options(args: &RunArgs, schedule: &Schedule) -> Result<Vec<EngineOptions>, CliError> {
    let mut cli = Cli::try_parse_from(["ds4"]).expect("every flag of ds4 has a default");
    cli.model = args.model.clone();
    cli.streaming = args.streaming.clone();
    let mut options = open::engine_options(&cli)?;
    options.ctx = Some(schedule.ctx_alloc);
    if args.sweep.budgets.is_empty() {
        return Ok(vec![options]);
    }
    let budgets = args.sweep.budgets.iter().map(|text| {
        let budget = parse_budget(text).map_err(|e| CliError::usage(format!("--budgets: {e}")))?;
        Ok(EngineOptions { budget: Some(budget), ..options.clone() })
    });
    budgets.collect()
}

/// A sweep under way.
struct Bench<'a> {
    schedule: &'a Schedule,
    tokens: &'a Tokens,
    identity: Identity,
    interrupt: &'a Interrupt,
    rows: Rows,
    total: usize,
}

/// What the rows of a pass are marked with.
#[derive(Clone, Copy)]
struct Label {
    regime: Regime,
    /// From 0.
    repetition: usize,
}

/// An open engine and the sequence that is measured on it.
struct Subject {
    engine: Engine,
    timeline: Timeline,
    /// Columns that are the same for every row.
    blank: Row,
}

impl Bench<'_> {
    /// Everything for one set of options.
    fn budget(&mut self, options: &EngineOptions) -> Result<(), CliError> {
        let mut subject = None;
        for &regime in &self.schedule.regimes {
            for repetition in 0..self.schedule.repetitions {
                if regime.opens_anew() {
                    // The old cache gives its memory back before the next one is planned.
                    drop(subject.take());
                    subject = Some(self.open(options, regime)?);
                }
                let subject = match &mut subject {
                    Some(subject) => subject,
                    none => {
                        let mut opened = self.open(options, regime)?;
                        self.pass(&mut opened, 0, None)?;
                        none.insert(opened)
                    }
                };
                let offset = self.schedule.text_offset(regime, repetition);
                self.pass(subject, offset, Some(Label { regime, repetition }))?;
            }
        }
        Ok(())
    }

    fn open(&self, options: &EngineOptions, regime: Regime) -> Result<Subject, CliError> {
        let preload = if regime == Regime::Preloaded { options.preload } else { Preload::Cold };
        let options = EngineOptions { preload, ..options.clone() };
        let meters = std::sync::Mutex::new([
            Meter::new("loading weights", Unit::Bytes),
            Meter::new("preloading experts", Unit::Bytes),
        ]);
        let progress = |step: Step, done: u64, total: u64| {
            let mut meters = meters.lock().expect("no progress call panics");
            meters[usize::from(step != Step::Weights)].set(done, total);
            if self.interrupt.is_set() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let is_first = self.rows.len() == 0;
        let mut accept = |prepared: &Prepared| {
            prepared.notices.iter().filter(|_| is_first).for_each(|line| bench::note(line));
            bench::note(&prepared.plan.to_string());
        };
        let engine = Engine::open(&options, &mut accept, &progress).map_err(CliError::failed)?;
        let timeline = Timeline::new(engine.runner().map_err(CliError::failed)?);
        let blank = self.identity.row(&engine, &options);
        Ok(Subject { engine, timeline, blank })
    }

    /// Walks the text from `offset` on. Without a label nothing is recorded: it warms the cache up.
    fn pass(&mut self, subject: &mut Subject, offset: usize, label: Option<Label>) -> Result<(), CliError> {
        let text = &self.tokens.read[offset..][..self.schedule.text_tokens()];
        subject.timeline.clear();
        for &frontier in &self.schedule.frontiers {
            let mut row = self.blank(subject, offset, label);
            self.extend(subject, &text[..frontier], &mut row)?;
            self.generate(subject, (offset, frontier), &mut row)?;
            self.back_to(subject, frontier)?;
            self.record(row, label)?;
            let mut at = frontier;
            for &len in &self.schedule.appends {
                let mut row = Row { mode: Mode::Append, ..self.blank(subject, offset, label) };
                let appended = [&text[..frontier], &text[at..at + len]].concat();
                self.extend(subject, &appended, &mut row)?;
                self.back_to(subject, frontier)?;
                self.record(row, label)?;
                at += len;
            }
        }
        Ok(())
    }

    fn blank(&self, subject: &Subject, offset: usize, label: Option<Label>) -> Row {
        let mut row = Row { text_offset: offset as u64, tokens: self.tokens.name(), ..subject.blank.clone() };
        if let Some(label) = label {
            row.regime = label.regime.name().into();
            row.rep = label.repetition as u64 + 1;
        }
        row
    }

    /// Times the tokens of `prompt` that the timeline does not hold yet.
    fn extend(&self, subject: &mut Subject, prompt: &[TokenId], row: &mut Row) -> Result<(), CliError> {
        let new = prompt.len() - subject.timeline.tokens().len();
        let (mark, started) = (Mark::now(&subject.engine), Instant::now());
        subject.timeline.sync(prompt, Want::Last, &mut RunWatcher::new(self.interrupt)).map_err(from_session)?;
        let ms = started.elapsed().as_secs_f64() * 1e3;
        row.set_prefill(new, ms, &mark.interval(&subject.engine));
        row.ctx_tokens = prompt.len() as u64;
        let prepared = &subject.engine.prepared;
        row.kvcache_bytes = prepared.config.runner_bytes(&RunnerOptions { ctx: prompt.len(), ..prepared.runner }).kv;
        Ok(())
    }

    /// Times generated tokens: greedy ones, the end token excepted, since a sweep wants the same number everywhere; or those drawn for this
    /// offset and context length.
    fn generate(&self, subject: &mut Subject, place: (usize, usize), row: &mut Row) -> Result<(), CliError> {
        let end = subject.engine.tokenizer().eos();
        let mark = Mark::now(&subject.engine);
        let mut ms = Vec::with_capacity(self.schedule.gen_tokens);
        let mut watcher = RunWatcher::new(self.interrupt);
        let mut drawn = self.tokens.generated(place.0, place.1);
        for _ in 0..self.schedule.gen_tokens {
            if self.interrupt.is_set() {
                return Err(from_session(SessionError::Interrupted));
            }
            let started = Instant::now();
            let drawn = drawn.as_mut().and_then(Iterator::next);
            let token = drawn.unwrap_or_else(|| best(subject.timeline.last_logits(), end));
            subject.timeline.append(&[token], Want::Last, &mut watcher).map_err(from_session)?;
            ms.push(started.elapsed().as_secs_f64() * 1e3);
        }
        row.set_generation(&ms, &mark.interval(&subject.engine));
        Ok(())
    }

    fn back_to(&self, subject: &mut Subject, len: usize) -> Result<(), CliError> {
        subject.timeline.rewind(len, &mut RunWatcher::new(self.interrupt)).map_err(from_session)
    }

    fn record(&mut self, mut row: Row, label: Option<Label>) -> Result<(), CliError> {
        if label.is_none() {
            return Ok(());
        }
        row.rss_bytes = crate::sys::process_memory().map_or(0, |m| m.resident.0);
        row.load1 = load_average();
        if !self.rows.shows_rows() {
            bench::note(&format!("row {} of {}: {}", self.rows.len() + 1, self.total, words(&row)));
        }
        self.rows.push(row)
    }
}

/// A finished row in a line.
fn words(row: &Row) -> String {
    let slots = if row.cache_slots > 0 { format!(", {} slots", row.cache_slots) } else { String::new() };
    let what = match row.mode {
        Mode::Sweep => format!("prefill {:.2} t/s, generation {:.2} t/s", row.prefill_tps, row.gen_tps),
        Mode::Append => format!("{} appended in {:.2} ms", row.prefill_tokens, row.prefill_ms),
    };
    format!("{} {}{slots}, {} tokens: {what}", row.regime, row.mode.name(), row.ctx_tokens)
}

/// The most likely token but `end`; the first of equals.
fn best(logits: &[f32], end: Option<TokenId>) -> TokenId {
    let mut best = (0, f32::NEG_INFINITY);
    for (id, &logit) in logits.iter().enumerate() {
        if logit > best.1 && Some(id as TokenId) != end {
            best = (id as TokenId, logit);
        }
    }
    best.0
}

fn load_average() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/loadavg").ok()?;
    Some(round(text.split_whitespace().next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_token_is_never_chosen() {
        assert_eq!(best(&[0.5, 2.0, 2.0, 1.0], None), 1);
        assert_eq!(best(&[0.5, 2.0, 2.0, 1.0], Some(1)), 2);
        assert_eq!(best(&[-5.0, f32::NAN, -9.0], Some(0)), 2);
    }
}
