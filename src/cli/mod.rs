//! The front end: flags, the interactive session, progress, the closing report.
//! Never computes and never reads tensors itself; `session` and `engine` do. Surprising fact: everything is prepared and checked that
//! can be before the model is loaded, so that a typing error does not cost a minute of reads.

pub mod args;
pub mod bench;
pub mod cache_tool;
pub mod doctor;
pub mod gguf;
pub mod input;
pub mod interrupt;
pub mod logits_file;
pub mod logprobs_file;
pub mod open;
pub mod output;
pub mod outputs;
pub mod piped_lines;
pub mod progress;
pub mod repl;
pub mod repl_command;
pub mod report;
pub mod run;
pub mod session_file;
pub mod snapshot_file;
pub mod span_file;
pub mod start;
pub mod task_flags;
pub mod tasks;
mod token_time;
pub mod trace_file;
pub mod warnings;
pub mod watch;
pub mod whole_file;

use std::io::ErrorKind;
use std::process::ExitCode;

use args::Cli;
use outputs::Named;
use span_file::SpanFile;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::obs::spans::TARGET;
use crate::storage::checksum::sidecar_path;

/// What the program ends with.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The command line asks for something that makes no sense: code 2.
    #[error("{0}")]
    Usage(String),
    /// The work failed: code 1.
    #[error("{0}")]
    Failed(String),
    /// Nobody reads stdout any more, which is no failure: code 0, and not a word.
    #[error("nobody reads the output")]
    Unread,
}

impl CliError {
    /// A failure of the work.
    pub fn failed(error: impl std::fmt::Display) -> Self {
        Self::Failed(error.to_string())
    }

    /// Output that could not be written.
    pub fn output(error: std::io::Error) -> Self {
        match error.kind() {
            ErrorKind::BrokenPipe => Self::Unread,
            _ => Self::Failed(format!("cannot write the answer: {error}")),
        }
    }

    /// A command line that makes no sense.
    pub fn usage(error: impl std::fmt::Display) -> Self {
        Self::Usage(error.to_string())
    }
}

/// Runs `ds4`.
pub fn main() -> ExitCode {
    crate::sys::return_freed_memory();
    let result = match Cli::from_process_args() {
        Ok(cli) => listened(&cli),
        Err(error) => args::refuse(&error),
    };
    match result {
        Ok(()) | Err(CliError::Unread) => ExitCode::SUCCESS,
        Err(error) => {
            // One line, whatever an error's own text contains.
            output::note(&error.to_string().split_whitespace().collect::<Vec<_>>().join(" "));
            ExitCode::from(if matches!(error, CliError::Usage(_)) { 2 } else { 1 })
        }
    }
}

/// Runs `ds4` with warnings on stderr, and with `--trace-file` if it is asked for: what it has seen of a run that failed is kept, too.
fn listened(cli: &Cli) -> Result<(), CliError> {
    task_flags::check(cli)?;
    keep_files_apart(cli)?;
    let warnings = warnings::layer("ds4");
    let Some(path) = &cli.diagnosis.trace_file else {
        tracing_subscriber::registry().with(warnings).init();
        return run::run(cli);
    };
    let spans = SpanFile::begin(path)?;
    let listens = Targets::new().with_target(TARGET, LevelFilter::TRACE);
    tracing_subscriber::registry().with(warnings).with(spans.clone().with_filter(listens)).init();
    let result = run::run(cli);
    let finished = spans.finish(path);
    result.and(finished)
}

/// Refuses outputs of `ds4` that would replace what it reads, or each other.
fn keep_files_apart(cli: &Cli) -> Result<(), CliError> {
    let (streaming, seen) = (&cli.streaming, &cli.diagnosis);
    let checksums = streaming.checksums.clone().or_else(|| cli.model.model.as_deref().map(sidecar_path));
    let inputs = [
        ("-m", cli.model.model.as_deref()),
        ("--checksums", checksums.as_deref()),
        ("--prompt-file", cli.prompt.prompt_file.as_deref()),
        ("--tokens-file", cli.prompt.tokens_file.as_deref()),
        ("--perplexity-file", seen.perplexity_file.as_deref()),
        ("--hotlist", streaming.hotlist.as_deref()),
        ("--load-session", cli.session.load_session.as_deref()),
    ];
    outputs::keep_apart(&inputs, &written(cli))
}

/// Files that `ds4` is to write.
fn written(cli: &Cli) -> [Named<'_>; 8] {
    let seen = &cli.diagnosis;
    [
        ("--stats-json", seen.stats_json.as_deref()),
        ("--dump-logits", seen.dump_logits.as_deref()),
        ("--dump-logprobs", seen.dump_logprobs.as_deref()),
        ("--trace-routes", seen.trace_routes.as_deref()),
        ("--trace-file", seen.trace_file.as_deref()),
        ("--snapshot-file", seen.snapshot_file.as_deref()),
        ("--save-hotlist", cli.streaming.save_hotlist.as_deref()),
        ("--save-session", cli.session.save_session.as_deref()),
    ]
}
