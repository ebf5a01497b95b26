//! The interactive session: a conversation that outlives its mistakes.
//! Never loses a conversation to an error or to Ctrl-C: a failed or stopped answer leaves the messages before it in place.
//! Surprising fact: the whole conversation is rendered anew for each answer, and what the state already holds costs nothing.

use std::io::{ErrorKind, IsTerminal};
use std::path::{Path, PathBuf};

use rustyline::error::ReadlineError;
use rustyline::{Config, DefaultEditor};

use crate::cli::args::Cli;
use crate::cli::interrupt::Interrupt;
use crate::cli::output::{self, note};
use crate::cli::piped_lines::PipedLines;
use crate::cli::repl_command::{self, COMMANDS, Line};
use crate::cli::run::{answer_message, from_generate, from_session, write_stats};
use crate::cli::session_file::{self, Talk};
use crate::cli::trace_file::TraceFile;
use crate::cli::watch::RunWatcher;
use crate::cli::{CliError, input, report};
use crate::engine::Engine;
use crate::engine::stats::{RunStats, Timings};
use crate::models::{ModelRunner, Want};
use crate::session::checkpoint::Checkpoint;
use crate::session::generate::{Ended, GenerateOptions, generate};
use crate::session::prompt::PromptFormat;
use crate::session::sampler::Sampler;
use crate::session::stop::StopRules;
use crate::session::timeline::{Flow, Timeline};
use crate::text::chat::{Message, Role};

/// Lines in a row that may be no text before the terminal is given up.
const UNREADABLE_MAX: u32 = 100;
const PROMPT: &str = "> ";
/// Lines of history kept.
const HISTORY_MAX: usize = 1000;

/// The line editor. To be made before [`Interrupt::listen`].
///
/// # Errors
/// A terminal that cannot be used.
pub fn editor() -> Result<DefaultEditor, CliError> {
    let config = Config::builder().max_history_size(HISTORY_MAX).map_err(CliError::failed)?.auto_add_history(true);
    DefaultEditor::with_config(config.bracketed_paste(true).build()).map_err(CliError::failed)
}

/// Runs the session until the user leaves.
///
/// # Errors
/// A terminal that cannot be read; a file of the run that cannot be written.
pub fn run(
    cli: &Cli,
    engine: &Engine,
    mut editor: DefaultEditor,
    (sampler, saved): (Sampler, Option<Checkpoint>),
    interrupt: &Interrupt,
) -> Result<(), CliError> {
    let history = history_path();
    if let Some(path) = &history {
        // A first run has none.
        let _ = editor.load_history(path);
    }
    let trace = cli.diagnosis.trace_routes.as_deref();
    let recording = trace.map(|path| TraceFile::begin("--trace-routes", path, engine)).transpose()?;
    let mut repl = Repl::new(cli, engine, sampler, interrupt)?;
    saved.map_or(Ok(()), |saved| repl.restore(saved))?;
    let mut piped = piped()?;
    note("type a message, or /help");
    let (mut unreadable, mut has_failed, mut lost) = (0, false, None);
    loop {
        interrupt.waits(true);
        // One that came while a line was being handled; from here on it ends the wait.
        if interrupt.is_terminated() {
            break;
        }
        let line = next_line(&mut editor, piped.as_mut(), interrupt);
        interrupt.waits(false);
        match line {
            Ok(line) => {
                unreadable = 0;
                let flow = repl.handle(&line);
                interrupt.clear();
                match flow {
                    Ok(Flow::Continue) => {}
                    Ok(Flow::Stop) => break,
                    // Nobody reads any more; what was asked for in files is kept all the same.
                    Err(CliError::Unread) => {
                        lost = Some(CliError::Unread);
                        break;
                    }
                    Err(error) => {
                        note(&error.to_string());
                        has_failed = true;
                    }
                }
            }
            // At the prompt there is nothing to stop: Ctrl-C clears the line.
            Err(ReadlineError::Interrupted | ReadlineError::Signal(_)) => interrupt.clear(),
            Err(ReadlineError::Eof) => break,
            Err(ReadlineError::Io(error)) if error.kind() == ErrorKind::InvalidData && unreadable < UNREADABLE_MAX => {
                unreadable += 1;
                note("that line is not UTF-8 text; the conversation goes on");
                has_failed = true;
            }
            Err(error) => {
                lost = Some(CliError::failed(format!("cannot read the next message: {error}")));
                break;
            }
        }
    }
    if let Some(path) = &history {
        let _ = editor.save_history(path);
    }
    // Each is worth having without the others.
    let recorded = recording.zip(trace).map_or(Ok(()), |(recording, path)| recording.finish(path, engine));
    let counted = write_stats(cli, &repl.stats());
    let saved = repl.save_at_the_end();
    recorded.and(counted).and(saved)?;
    if let Some(error) = lost {
        return Err(error);
    }
    // A person has seen the errors; a script sees the code.
    match (interrupt.is_terminated(), has_failed && !std::io::stdin().is_terminal()) {
        (true, _) => Err(CliError::failed("interrupted")),
        (false, true) => Err(CliError::failed("a line of the input failed; its error is above")),
        (false, false) => Ok(()),
    }
}

/// The next line: edited where that can be done, else as it comes.
fn next_line(
    editor: &mut DefaultEditor,
    piped: Option<&mut PipedLines>,
    interrupt: &Interrupt,
) -> Result<String, ReadlineError> {
    if piped.is_some() && std::io::stdin().is_terminal() {
        output::prompt(PROMPT);
    }
    match piped {
        None => editor.readline(PROMPT),
        Some(lines) => match lines.next(&|| interrupt.is_set() || interrupt.is_terminated()) {
            Ok(line) => line.ok_or(ReadlineError::Eof),
            Err(error) if error.kind() == ErrorKind::Interrupted => Err(ReadlineError::Interrupted),
            Err(error) => Err(ReadlineError::Io(error)),
        },
    }
}

/// Whether the line editor has what it takes, a terminal on both sides that it knows. It would wait elsewhere without an end, whatever signal comes,
/// and write what it shows of a line to the file that answers go to.
fn is_editable() -> bool {
    let plain = ["dumb", "cons25", "emacs"];
    let is_plain = std::env::var("TERM").is_ok_and(|term| plain.iter().any(|name| term.eq_ignore_ascii_case(name)));
    std::io::stdin().is_terminal() && std::io::stdout().is_terminal() && !is_plain
}

/// The lines of a stdin that cannot be edited.
fn piped() -> Result<Option<PipedLines>, CliError> {
    let stdin = std::io::stdin();
    let lines = (!is_editable()).then(|| PipedLines::new(&stdin, input::TEXT_BYTES_MAX as usize));
    lines.transpose().map_err(|e| CliError::failed(format!("cannot read the input: {e}")))
}

/// None where HOME is not absolute: an empty one would leave a file wherever the program is started.
fn history_path() -> Option<PathBuf> {
    let home = PathBuf::from(std::env::var_os("HOME")?);
    home.is_absolute().then(|| home.join(".ds4_history"))
}

struct Repl<'a> {
    cli: &'a Cli,
    engine: &'a Engine,
    format: PromptFormat,
    sampler: Sampler,
    interrupt: &'a Interrupt,
    /// `None` only while `/ctx` swaps it, or after that failed.
    timeline: Option<Timeline>,
    messages: Vec<Message>,
    level: Option<u8>,
    timings: Timings,
}

impl<'a> Repl<'a> {
    fn new(cli: &'a Cli, engine: &'a Engine, sampler: Sampler, interrupt: &'a Interrupt) -> Result<Self, CliError> {
        let arch = engine.prepared.config.arch();
        let format = PromptFormat::of(engine.tokenizer(), arch).map_err(CliError::failed)?;
        let timeline = Some(timeline(engine, engine.runner().map_err(CliError::failed)?));
        let (messages, timings) = (system_messages(cli), Timings::default());
        let level = cli.thinking.level();
        Ok(Self { cli, engine, format, sampler, interrupt, timeline, messages, level, timings })
    }

    fn save(&mut self, path: &Path) -> Result<(), CliError> {
        let talk = Talk { messages: Some(self.messages.clone()), level: self.level };
        let (cli, engine) = (self.cli, self.engine);
        let timeline = at_hand(&mut self.timeline)?;
        session_file::save((cli, engine, path), timeline, &talk, &self.sampler)
    }

    fn save_at_the_end(&mut self) -> Result<(), CliError> {
        let Some(path) = &self.cli.session.save_session else { return Ok(()) };
        if at_hand(&mut self.timeline)?.tokens().is_empty() {
            note("note: nothing was said, so no session is saved");
            return Ok(());
        }
        self.save(path)
    }

    fn load(&mut self, path: &Path) -> Result<(), CliError> {
        let saved = session_file::open(path)?;
        session_file::check_prompt(&saved, None)?;
        self.restore(saved)
    }

    fn restore(&mut self, saved: Checkpoint) -> Result<(), CliError> {
        let (cli, engine) = (self.cli, self.engine);
        let timeline = at_hand(&mut self.timeline)?;
        let talk = session_file::restore((cli, engine), saved, timeline, &mut self.sampler)?;
        self.messages = talk.messages.unwrap_or_default();
        self.level = talk.level;
        Ok(())
    }

    /// Forgets the last `count` questions and what was answered. The state goes back as far as that costs nothing; the next answer computes
    /// the rest.
    fn rewind(&mut self, count: usize) -> Result<(), CliError> {
        let questions = self.messages.iter().enumerate().filter(|(_, m)| m.role == Role::User).map(|(at, _)| at);
        let questions: Vec<usize> = questions.collect();
        let Some(first) = questions.len().checked_sub(count).map(|at| questions[at]) else {
            let there = questions.len();
            return Err(CliError::Usage(format!(
                "/rewind {count}: questions so far: {there}; /clear forgets them all"
            )));
        };
        self.messages.truncate(first);
        let timeline = at_hand(&mut self.timeline)?;
        let before = self.format.encode(self.engine.tokenizer(), &self.messages, self.level, timeline.ctx());
        let before = before.unwrap_or_default();
        timeline.keep_shared(&before).map_err(from_session)?;
        let kept = timeline.tokens().len();
        let left = questions.len() - count;
        note(&format!("questions left: {left}, tokens of the state: {kept}"));
        Ok(())
    }

    fn handle(&mut self, line: &str) -> Result<Flow, CliError> {
        match repl_command::parse(line).map_err(CliError::Usage)? {
            Line::Empty => {}
            Line::Say(text) => self.say(text)?,
            Line::Read(path) => self.say(input::regular_text_file(&path)?)?,
            Line::Help => COMMANDS.iter().for_each(|(usage, what)| note(&format!("{usage:<12} {what}"))),
            Line::Quit => return Ok(Flow::Stop),
            Line::Think(level) => {
                self.level = Some(level);
                note(&if level == 0 { "no reasoning".into() } else { format!("reasoning level {level}") });
            }
            Line::Ctx(ctx) => self.change_ctx(ctx as usize)?,
            Line::Status => self.status(),
            Line::Stats => report::print(&self.stats()),
            Line::Clear => self.clear(),
            Line::Regen => self.regenerate()?,
            Line::Save(path) => self.save(&path)?,
            Line::Load(path) => self.load(&path)?,
            Line::Rewind(count) => self.rewind(count as usize)?,
        }
        Ok(Flow::Continue)
    }

    fn say(&mut self, text: String) -> Result<(), CliError> {
        let before = self.messages.len();
        self.messages.push(Message::new(Role::User, text));
        let result = self.answer();
        if result.as_ref().is_err_and(|error| !matches!(error, CliError::Unread)) {
            self.messages.truncate(before);
        }
        result
    }

    fn regenerate(&mut self) -> Result<(), CliError> {
        if self.messages.last().is_some_and(|m| m.role == Role::Assistant) {
            let old = self.messages.pop();
            let result = self.answer();
            if result.as_ref().is_err_and(|error| !matches!(error, CliError::Unread)) {
                self.messages.extend(old);
            }
            return result;
        }
        Err(CliError::Usage("there is no answer yet".into()))
    }

    fn answer(&mut self) -> Result<(), CliError> {
        let engine = self.engine;
        let timeline = at_hand(&mut self.timeline)?;
        let tokens = self.format.encode(engine.tokenizer(), &self.messages, self.level, timeline.ctx());
        let tokens = tokens.map_err(CliError::failed)?;
        self.interrupt.clear();
        let mut watcher = RunWatcher::new(self.interrupt);
        let sync = timeline.sync(&tokens, Want::Last, &mut watcher).map_err(from_session)?;
        let options = GenerateOptions {
            tokens_max: self.cli.prompt.tokens.map_or(usize::MAX, |n| n as usize),
            is_scored: false,
            top_logprobs: 0,
            want: Want::Last,
        };
        let rules =
            StopRules::new(engine.tokenizer().eos().into_iter().collect(), Vec::new()).map_err(CliError::usage)?;
        let interrupt = self.interrupt;
        let mut failure = None;
        let row_wait = engine.row_wait();
        let answer =
            generate(timeline, engine.tokenizer(), &mut self.sampler, rules, &options, &mut watcher, &mut |piece| {
                failure = output::answer(piece.text).err();
                if failure.is_some() || interrupt.is_set() { Flow::Stop } else { Flow::Continue }
            })
            .map_err(from_generate)?;
        let shown = failure.map_or_else(|| output::line(""), Err).map_err(CliError::output);
        if matches!(shown, Err(CliError::Failed(_))) {
            return shown;
        }
        interrupt.clear();
        self.messages.push(answer_message(&answer.text));
        self.timings.prompt_tokens += tokens.len() as u64;
        self.timings.reused_tokens += sync.reused as u64;
        self.timings.prefill_tokens += sync.computed as u64;
        self.timings.prefill += sync.elapsed;
        self.timings.generated_tokens += answer.tokens.len() as u64;
        self.timings.decode_passes += answer.passes;
        self.timings.decode += answer.elapsed;
        self.timings.decode_row_wait += engine.row_wait().saturating_sub(row_wait);
        // A reader that went away has seen what it wanted: the answer so far belongs to the conversation that may be saved.
        shown?;
        note(&match answer.ended {
            Ended::Caller => "stopped; the conversation goes on from here".to_owned(),
            Ended::Context => "the context is full; /clear starts over, /ctx N makes room".to_owned(),
            Ended::Stop | Ended::Tokens => {
                let last = Timings {
                    prefill_tokens: sync.computed as u64,
                    prefill: sync.elapsed,
                    decode_passes: answer.passes,
                    decode: answer.elapsed,
                    ..Timings::default()
                };
                format!("prefill: {:.2} t/s, generation: {:.2} t/s", last.prefill_tps(), last.decode_tps())
            }
        });
        Ok(())
    }

    fn clear(&mut self) {
        self.messages = system_messages(self.cli);
        if let Some(timeline) = &mut self.timeline {
            timeline.clear();
        }
        note("the conversation is forgotten");
    }

    fn change_ctx(&mut self, ctx: usize) -> Result<(), CliError> {
        // The old state goes first: both together need not fit.
        let old = self.timeline.take().map_or(0, |t| t.ctx());
        match self.engine.runner_with_ctx(ctx) {
            Ok(runner) => {
                self.timeline = Some(timeline(self.engine, runner));
                self.messages = system_messages(self.cli);
                note(&format!("context of {ctx} tokens; the conversation is forgotten"));
                Ok(())
            }
            Err(error) => {
                let runner = self.engine.runner_with_ctx(old).map_err(CliError::failed)?;
                self.timeline = Some(timeline(self.engine, runner));
                Err(CliError::failed(error))
            }
        }
    }

    fn status(&self) {
        let (used, ctx) = self.timeline.as_ref().map_or((0, 0), |t| (t.tokens().len(), t.ctx()));
        note(&format!("{}, {used} of {ctx} tokens used", self.engine.prepared.file.path().display()));
        note(&self.engine.plan().to_string());
        if ctx as u64 != self.engine.plan().ctx {
            note(&format!(
                "the plan was made for --ctx {}; this context has {ctx} tokens since /ctx",
                self.engine.plan().ctx
            ));
        }
    }

    fn stats(&self) -> RunStats {
        let ctx = self.timeline.as_ref().map_or(0, Timeline::ctx);
        RunStats::collect(self.engine, ctx, &self.timings)
    }
}

fn system_messages(cli: &Cli) -> Vec<Message> {
    cli.prompt.system.iter().map(|text| Message::new(Role::System, text.as_str())).collect()
}

/// The sequence, unless a failed `/ctx` left none.
fn at_hand(timeline: &mut Option<Timeline>) -> Result<&mut Timeline, CliError> {
    timeline.as_mut().ok_or_else(|| CliError::Failed("no context; use /ctx N".into()))
}

/// A timeline over `runner` that can go back.
fn timeline(engine: &Engine, runner: Box<dyn ModelRunner>) -> Timeline {
    Timeline::with_images(runner, engine.prepared.rewind_points)
}
