//! `ds4-bench`: sweeps over context lengths and cache budgets, comparison and plots of their rows.
//! Never computes a token itself: it drives `engine` and `session` as `ds4` does. Surprising fact: numbers from different states of the
//! cache (cold, preloaded, warm repeat, new text) stand in different rows and are never averaged into one.

pub mod args;
mod compare;
mod identity;
mod measure;
mod output;
mod plot;
mod plot_svg;
pub mod row;
mod run;
mod schedule;
mod table;
mod tokens;

use std::io::Write;
use std::process::ExitCode;

use args::{BenchCli, BenchCommand};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::cli::args::{refuse_as, words};
use crate::cli::{CliError, warnings};

/// Runs `ds4-bench` on the process's arguments.
pub fn main() -> ExitCode {
    crate::sys::return_freed_memory();
    tracing_subscriber::registry().with(warnings::layer("ds4-bench")).init();
    let result = match args::parse(std::env::args_os()) {
        Ok(BenchCli { command: None, run }) => run::run(&run),
        Ok(BenchCli { command: Some(BenchCommand::Compare(args)), .. }) => compare::run(&args),
        Ok(BenchCli { command: Some(BenchCommand::Plot(args)), .. }) => plot::run(&args),
        Err(error) => refuse_as("ds4-bench", &error),
    };
    match result {
        Ok(()) | Err(CliError::Unread) => ExitCode::SUCCESS,
        Err(error) => {
            // One line, whatever an error's own text contains.
            note(&error.to_string().split_whitespace().collect::<Vec<_>>().join(" "));
            ExitCode::from(if matches!(error, CliError::Usage(_)) { 2 } else { 1 })
        }
    }
}

/// Tells the user something, every line under the program's name.
fn note(text: &str) {
    let mut err = std::io::stderr().lock();
    for line in text.lines() {
        // Nothing is left to do when stderr is gone.
        let _ = writeln!(err, "ds4-bench: {line}");
    }
}

/// The command line of this process, as it would be typed.
fn command_line() -> String {
    let mut words: Vec<String> = words().skip(1).collect();
    for word in words.iter_mut().filter(|word| word.contains(|c: char| c.is_whitespace() || "\"'$\\".contains(c))) {
        *word = format!("'{}'", word.replace('\'', "'\\''"));
    }
    words.insert(0, "ds4-bench".into());
    words.join(" ")
}
