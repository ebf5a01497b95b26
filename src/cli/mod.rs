//! The front end: flags, the interactive session, progress, the closing report.
//! Never computes and never reads tensors itself; `session` and `engine` do. Surprising fact: everything is prepared and checked that
//! can be before the model is loaded, so that a typing error does not cost a minute of reads.

pub mod args;
pub mod gguf;
pub mod input;
pub mod interrupt;
pub mod logits_file;
pub mod logprobs_file;
pub mod open;
pub mod output;
pub mod progress;
pub mod repl;
pub mod repl_command;
pub mod report;
pub mod run;
pub mod tasks;
pub mod watch;

use std::process::ExitCode;

use args::Cli;

/// What the program ends with.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The command line asks for something that makes no sense: code 2.
    #[error("{0}")]
    Usage(String),
    /// The work failed: code 1.
    #[error("{0}")]
    Failed(String),
}

impl CliError {
    /// A failure of the work.
    pub fn failed(error: impl std::fmt::Display) -> Self {
        Self::Failed(error.to_string())
    }

    /// A command line that makes no sense.
    pub fn usage(error: impl std::fmt::Display) -> Self {
        Self::Usage(error.to_string())
    }
}

/// Runs `ds4`.
pub fn main() -> ExitCode {
    let warnings = tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(tracing::Level::WARN);
    warnings.without_time().with_target(false).init();
    match run::run(&Cli::from_process_args()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // One line, whatever an error's own text contains.
            output::note(&error.to_string().split_whitespace().collect::<Vec<_>>().join(" "));
            ExitCode::from(if matches!(error, CliError::Usage(_)) { 2 } else { 1 })
        }
    }
}
