//! What one invocation of `ds4` does: picks the task that the flags ask for and runs it.
//! Never computes. Surprising fact: tasks that need no weights (plan, inspect, tokens) never load any.

use std::path::Path;
use std::time::Duration;

use crate::cli::args::Cli;
use crate::cli::input::{self, Prompt};
use crate::cli::interrupt::Interrupt;
use crate::cli::logits_file::LogitsFile;
use crate::cli::logprobs_file::{LogprobsFile, write_json};
use crate::cli::open::{engine_options, open};
use crate::cli::session_file::{self, Talk};
use crate::cli::snapshot_file::SnapshotFile;
use crate::cli::trace_file::TraceFile;
use crate::cli::watch::RunWatcher;
use crate::cli::whole_file::WholeFile;
use crate::cli::{CliError, doctor, output, repl, report, tasks, written};
use crate::engine::Engine;
use crate::engine::stats::{RunStats, Timings};
use crate::models::Want;
use crate::session::checkpoint::Checkpoint;
use crate::session::generate::{Answer, Ended, GenerateError, GenerateOptions, generate};
use crate::session::prompt::PromptFormat;
use crate::session::sampler::{Sampler, SamplerParams};
use crate::session::stop::StopRules;
use crate::session::timeline::{Flow, SessionError, SyncReport, Timeline};
use crate::text::chat::{Message, Role};
use crate::text::tokenizer::Tokenizer;
use crate::units::TokenId;

/// Runs the task of `cli`.
///
/// # Errors
/// One sentence for the user, with the exit code's kind.
pub fn run(cli: &Cli) -> Result<(), CliError> {
    let sampler = sampler(cli)?;
    let mut options = engine_options(cli)?;
    options.rewind_points = rewind_points(cli);
    if cli.diagnosis.doctor {
        return doctor::run(cli, &options);
    }
    if cli.diagnosis.inspect {
        return tasks::inspect(&options.model);
    }
    if cli.diagnosis.plan {
        return tasks::plan(&options);
    }
    let prompt = input::prompt(cli)?;
    if cli.diagnosis.dump_tokens {
        return tasks::dump_tokens(cli, &options, prompt);
    }
    let text = cli.diagnosis.perplexity_file.as_deref().map(input::text_file).transpose()?;
    check_outputs(cli, prompt.is_some())?;
    let saved = cli.session.load_session.as_deref().map(session_file::open).transpose()?;
    saved.as_ref().map_or(Ok(()), |saved| session_file::check_prompt(saved, prompt.as_ref()))?;
    // The line editor takes SIGINT for itself when it is made; made first, it gets the signal from our handler.
    let editor = (prompt.is_none() && text.is_none()).then(repl::editor).transpose()?;
    let interrupt = Interrupt::listen().map_err(|e| CliError::failed(format!("cannot listen for signals: {e}")))?;
    if text.is_some() && options.ctx.is_none() {
        options.ctx = Some(tasks::PERPLEXITY_WINDOW);
    }
    let engine = open(&options, &interrupt)?;
    // Dropped, with a last record, when the task is done.
    let _snapshots = cli.diagnosis.snapshot_file.as_deref().map(|p| snapshots(p, &engine)).transpose()?;
    let done = match (text, prompt, cli.diagnosis.decode_consistency) {
        (None, None, _) => repl::run(cli, &engine, editor.expect("made above"), (sampler, saved), &interrupt),
        (Some(text), ..) => tasks::perplexity(cli, &engine, &interrupt, &text),
        (None, Some(prompt), Some(single)) => {
            let ctx = engine.plan().ctx as usize;
            let tokens = prompt_tokens(cli, engine.tokenizer(), engine.prepared.config.arch(), &prompt, ctx)?;
            tasks::consistency(&engine, &interrupt, &tokens, single as usize)
        }
        (None, Some(prompt), None) => answer_once(cli, &engine, (sampler, saved), &interrupt, &prompt),
    };
    // What was learned is worth keeping when the run was interrupted, too.
    let saved = save_hotlist(cli, &engine);
    done.and(saved)
}

/// Frontiers to keep: one answer needs one, and only where a session outlives it. An answer's text may be other tokens when it is read again, or
/// its reasoning may be left out, so that the place to go on from is the end of the prompt.
fn rewind_points(cli: &Cli) -> usize {
    let session = &cli.session;
    match cli.is_interactive() {
        true => session.rewind_points as usize,
        false => usize::from(session.load_session.is_some() || session.save_session.is_some()),
    }
}

/// Writes `--save-hotlist`, if asked for and if anything was learned.
fn save_hotlist(cli: &Cli, engine: &Engine) -> Result<(), CliError> {
    let Some(path) = &cli.streaming.save_hotlist else { return Ok(()) };
    let cannot = |e| CliError::failed(format!("--save-hotlist: cannot write {}: {e}", path.display()));
    match engine.learned_hotlist().map_err(cannot)? {
        Some(list) => write_json(path, &list).map_err(cannot),
        None => Ok(()),
    }
}

fn snapshots(path: &Path, engine: &Engine) -> Result<SnapshotFile, CliError> {
    let cannot = |e| CliError::failed(format!("--snapshot-file: cannot write {}: {e}", path.display()));
    SnapshotFile::start(path, engine.observer()).map_err(cannot)
}

/// Refuses, before anything is loaded, output flags without effect and output files that cannot be written.
fn check_outputs(cli: &Cli, has_prompt: bool) -> Result<(), CliError> {
    let args = &cli.diagnosis;
    let of_one_answer = [
        ("--decode-consistency", args.decode_consistency.is_some()),
        ("--dump-logits", args.dump_logits.is_some()),
        ("--dump-logprobs", args.dump_logprobs.is_some()),
    ];
    if let Some((flag, _)) = of_one_answer.iter().find(|(_, is_given)| *is_given && !has_prompt) {
        return Err(CliError::usage(format!("{flag} needs a prompt: add -p, --prompt-file or --tokens-file")));
    }
    for (flag, path) in written(cli) {
        if let Some(path) = path {
            WholeFile::check(path).map_err(|e| cannot_write(flag, path, &e))?;
        }
    }
    Ok(())
}

fn sampler(cli: &Cli) -> Result<Sampler, CliError> {
    let args = &cli.sampling;
    let params = SamplerParams {
        temperature: args.temp,
        top_k: args.top_k as usize,
        top_p: args.top_p,
        min_p: args.min_p,
        seed: args.seed,
    };
    Sampler::new(params).map_err(CliError::usage)
}

/// The tokens of a prompt given on the command line, for a context of `ctx` tokens.
///
/// # Errors
/// Prompts that the model's format refuses, or that are far too long.
pub fn prompt_tokens(
    cli: &Cli,
    tokenizer: &Tokenizer,
    arch: &str,
    prompt: &Prompt,
    ctx: usize,
) -> Result<Vec<TokenId>, CliError> {
    next_tokens(&mut Talk::begin(cli), (tokenizer, arch), prompt, ctx)
}

/// The tokens that `prompt` makes of a conversation, which it becomes part of; a prompt of tokens ends the conversation.
fn next_tokens(
    talk: &mut Talk,
    (tokenizer, arch): (&Tokenizer, &str),
    prompt: &Prompt,
    ctx: usize,
) -> Result<Vec<TokenId>, CliError> {
    let text = match prompt {
        Prompt::Tokens(tokens) => {
            talk.messages = None;
            return Ok(tokens.clone());
        }
        Prompt::Text(text) => text,
    };
    let format = PromptFormat::of(tokenizer, arch).map_err(CliError::failed)?;
    let messages = talk.messages.get_or_insert_default();
    messages.push(Message::new(Role::User, text.as_str()));
    format.encode(tokenizer, messages, talk.level, ctx).map_err(CliError::usage)
}

/// The files that one run may write, opened before anything is computed.
struct Dumps {
    logits: Option<LogitsFile>,
    logprobs: Option<LogprobsFile>,
    routes: Option<TraceFile>,
}

impl Dumps {
    fn open(cli: &Cli, engine: &Engine) -> Result<Self, CliError> {
        let args = &cli.diagnosis;
        let model = engine.prepared.file.path().display().to_string();
        let create = |p: &Path| LogitsFile::create(p, vocab(engine)).map_err(|e| cannot_write("--dump-logits", p, &e));
        Ok(Self {
            logits: args.dump_logits.as_deref().map(create).transpose()?,
            logprobs: args.dump_logprobs.as_ref().map(|_| LogprobsFile::new(model)),
            routes: args.trace_routes.as_deref().map(|p| TraceFile::begin("--trace-routes", p, engine)).transpose()?,
        })
    }

    /// Finishes each of them, whatever became of the others; `watched` is how writing logits went so far. The first failure is told.
    fn finish(
        self,
        cli: &Cli,
        engine: &Engine,
        tokens: &[TokenId],
        watched: std::io::Result<()>,
    ) -> Result<(), CliError> {
        let args = &cli.diagnosis;
        let logits = self.logits.zip(args.dump_logits.as_ref()).map_or(Ok(()), |(file, path)| {
            let rows = file.rows();
            let finished = watched.and_then(|()| file.finish(&tokens[..rows]));
            finished.map_err(|e| cannot_write("--dump-logits", path, &e))
        });
        let logprobs = self
            .logprobs
            .zip(args.dump_logprobs.as_ref())
            .map_or(Ok(()), |(file, path)| file.write(path).map_err(|e| cannot_write("--dump-logprobs", path, &e)));
        let routes = self.routes.zip(args.trace_routes.as_ref());
        logits.and(logprobs).and(routes.map_or(Ok(()), |(routes, path)| routes.finish(path, engine)))
    }
}

/// Names the file as the user did: the error may speak of the one that it was going to become.
fn cannot_write(flag: &str, path: &Path, error: &std::io::Error) -> CliError {
    CliError::failed(format!("{flag}: cannot write {}: {error}", path.display()))
}

fn stop_rules(engine: &Engine) -> Result<StopRules, CliError> {
    StopRules::new(engine.tokenizer().eos().into_iter().collect(), Vec::new()).map_err(CliError::usage)
}

fn vocab(engine: &Engine) -> usize {
    engine.tokenizer().tokens_total()
}

fn answer_once(
    cli: &Cli,
    engine: &Engine,
    (mut sampler, saved): (Sampler, Option<Checkpoint>),
    interrupt: &Interrupt,
    prompt: &Prompt,
) -> Result<(), CliError> {
    let mut timeline = Timeline::with_images(engine.runner().map_err(CliError::failed)?, engine.prepared.rewind_points);
    let mut talk = match saved {
        Some(saved) => session_file::restore((cli, engine), saved, &mut timeline, &mut sampler)?,
        None => Talk::begin(cli),
    };
    let tokens = next_tokens(&mut talk, (engine.tokenizer(), engine.prepared.config.arch()), prompt, timeline.ctx())?;
    if let Prompt::Tokens(tokens) = prompt {
        session_file::check_tokens(&timeline, tokens)?;
    }
    let mut dumps = Dumps::open(cli, engine)?;
    let want = if dumps.logits.is_some() { Want::All } else { Want::Last };
    let mut watcher = RunWatcher::new(interrupt).dumping(dumps.logits.as_mut());
    let mut outcome = Outcome::default();
    let result = (|| -> Result<(), CliError> {
        outcome.sync = timeline.sync(&tokens, want, &mut watcher).map_err(from_session)?;
        outcome.prompt_tokens = tokens.len();
        let mut logprobs = dumps.logprobs.as_mut();
        let options = GenerateOptions {
            tokens_max: cli.prompt.tokens.map_or(usize::MAX, |n| n as usize),
            is_scored: logprobs.is_some(),
            top_logprobs: if logprobs.is_some() { cli.diagnosis.logprobs_top_k as usize } else { 0 },
            want,
        };
        let rules = stop_rules(engine)?;
        let mut failure = None;
        let row_wait = engine.row_wait();
        let answer =
            generate(&mut timeline, engine.tokenizer(), &mut sampler, rules, &options, &mut watcher, &mut |piece| {
                if let (Some(file), Some(choice)) = (&mut logprobs, piece.choice) {
                    file.push(engine.tokenizer(), choice, piece.top);
                }
                failure = output::answer(piece.text).err();
                if failure.is_some() || interrupt.is_set() { Flow::Stop } else { Flow::Continue }
            })
            .map_err(from_generate)?;
        outcome.row_wait = engine.row_wait().saturating_sub(row_wait);
        if failure.is_none() && !answer.text.is_empty() {
            failure = output::line("").err();
        }
        outcome.unshown = failure.map(CliError::output);
        // The last token was chosen but not computed; its logits are part of the dump.
        let has_room = timeline.tokens().len() < timeline.ctx();
        if let (Want::All, true, Some(&last)) = (want, has_room, answer.tokens.last()) {
            timeline.append(&[last], Want::All, &mut watcher).map_err(from_session)?;
        }
        outcome.answer = Some(answer);
        Ok(())
    })();
    let watched = watcher.finish();
    // Each of the following is worth having without the others, and without an answer that could not be shown.
    let reported = outcome.report(cli, engine, timeline.ctx());
    result?;
    let dumped = dumps.finish(cli, engine, timeline.tokens(), watched);
    let saved = outcome.save((cli, engine), &mut timeline, talk, &sampler);
    reported.and(dumped).and(saved)?;
    outcome.ended()
}

/// What a one-shot run did, as far as it came.
#[derive(Default)]
struct Outcome {
    prompt_tokens: usize,
    sync: SyncReport,
    answer: Option<Answer>,
    /// Why some of the answer could not be shown.
    unshown: Option<CliError>,
    /// Waits for rows while generating.
    row_wait: Duration,
}

impl Outcome {
    /// Writes `--save-session`, if asked for and if there is an answer.
    fn save(
        &self,
        (cli, engine): (&Cli, &Engine),
        timeline: &mut Timeline,
        mut talk: Talk,
        sampler: &Sampler,
    ) -> Result<(), CliError> {
        let (Some(path), Some(answer)) = (&cli.session.save_session, &self.answer) else { return Ok(()) };
        talk.messages.iter_mut().for_each(|messages| messages.push(answer_message(&answer.text)));
        session_file::save((cli, engine, path), timeline, &talk, sampler)
    }

    /// What a run that computed an answer ends with.
    fn ended(self) -> Result<(), CliError> {
        match (self.unshown, self.answer) {
            (Some(error), _) => Err(error),
            (None, Some(answer)) if answer.ended == Ended::Caller => Err(CliError::Failed("interrupted".into())),
            _ => Ok(()),
        }
    }

    fn report(&self, cli: &Cli, engine: &Engine, ctx: usize) -> Result<(), CliError> {
        let answer = self.answer.as_ref();
        let timings = Timings {
            prompt_tokens: self.prompt_tokens as u64,
            reused_tokens: self.sync.reused as u64,
            prefill_tokens: self.sync.computed as u64,
            prefill: self.sync.elapsed,
            generated_tokens: answer.map_or(0, |a| a.tokens.len() as u64),
            decode_passes: answer.map_or(0, |a| a.passes),
            decode: answer.map_or(Duration::ZERO, |a| a.elapsed),
            decode_row_wait: self.row_wait,
        };
        let stats = RunStats::collect(engine, ctx, &timings);
        if answer.is_some() {
            report::print(&stats);
        }
        write_stats(cli, &stats)
    }
}

/// A generated text, whose opening reasoning tag was part of the prompt, as a message.
pub fn answer_message(text: &str) -> Message {
    match text.split_once("</think>") {
        Some((reasoning, answer)) => {
            Message { reasoning: Some(reasoning.to_owned()), ..Message::new(Role::Assistant, answer) }
        }
        None => Message::new(Role::Assistant, text),
    }
}

/// Writes `--stats-json`, if asked for.
///
/// # Errors
/// When the file cannot be written.
pub fn write_stats(cli: &Cli, stats: &RunStats) -> Result<(), CliError> {
    let Some(path) = &cli.diagnosis.stats_json else { return Ok(()) };
    write_json(path, stats).map_err(|e| CliError::failed(format!("--stats-json: cannot write {}: {e}", path.display())))
}

/// A failed session as an exit: prompts that cannot fit are the user's to change.
pub fn from_session(error: SessionError) -> CliError {
    match error {
        SessionError::EmptyPrompt | SessionError::PromptTooLong { .. } => CliError::usage(error),
        other => CliError::failed(other),
    }
}

/// As [`from_session`], for generation.
pub fn from_generate(error: GenerateError) -> CliError {
    match error {
        GenerateError::Session(error) => from_session(error),
        GenerateError::Sampler(error) => CliError::failed(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasoning_is_told_from_the_answer() {
        let answer = answer_message("hm</think>\n\nyes");
        assert_eq!((answer.reasoning.as_deref(), &*answer.content), (Some("hm"), "\n\nyes"));
        assert_eq!(answer_message("yes"), Message::new(Role::Assistant, "yes"));
    }
}
