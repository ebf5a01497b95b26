//! The command line of `ds4-cache`: one file a subcommand.
//! Owns flags, exit codes and where text goes; never decides what a cache does, which is `cache-policy`'s.
//! Surprising fact: nothing of a result is printed before all of it is known, so a failure leaves stdout empty.

pub mod advice;
pub mod budgets;
pub mod compare;
pub mod curve;
pub mod curve_plot;
pub mod model_facts;
pub mod plan;
pub mod replay;
pub mod scores;
pub mod speed_flags;
pub mod table;
pub mod top;
pub mod top_frame;
pub mod trace_input;
pub mod tune;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::cli::{CliError, args, output};

/// Says what an expert cache of which size and policy is worth, from recorded routes.
#[derive(Parser, Debug)]
#[command(name = "ds4-cache", version, max_term_width = 110)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Replay a trace with several policies and budgets: hits, misses, bytes, distance from the optimum
    Replay(replay::ReplayArgs),
    /// Misses and predicted tokens a second over the budget, as CSV and as a picture
    Curve(curve::CurveArgs),
    /// Compare two traces of one model, or two results of replay --json
    Compare(compare::CompareArgs),
    /// What budget a model may have on this machine, and what speed follows
    Plan(plan::PlanArgs),
    /// Run a prompt, record its routes, recommend budget and policy as flags to paste
    Tune(tune::TuneArgs),
    /// Watch the cache of a running ds4 --snapshot-file
    Top(top::TopArgs),
}

/// Runs `ds4-cache` on the process's arguments.
pub fn main() -> ExitCode {
    let result = match Cli::try_parse() {
        Ok(cli) => run(&cli.command),
        Err(error) => args::refuse_as("ds4-cache", &error).map(|()| String::new()),
    };
    let printed = result.and_then(|text| output::answer(&text).map_err(CliError::output));
    match printed {
        Ok(()) | Err(CliError::Unread) => ExitCode::SUCCESS,
        Err(error) => {
            note(&error.to_string());
            ExitCode::from(if matches!(error, CliError::Usage(_)) { 2 } else { 1 })
        }
    }
}

fn run(command: &Command) -> Result<String, CliError> {
    match command {
        Command::Replay(args) => replay::run(args),
        Command::Curve(args) => curve::run(args),
        Command::Compare(args) => compare::run(args),
        Command::Plan(args) => plan::run(args),
        Command::Tune(args) => tune::run(args),
        Command::Top(args) => top::run(args),
    }
}

/// Tells the user something beside the result.
pub fn note(text: &str) {
    output::note_as("ds4-cache", &text.split_whitespace().collect::<Vec<_>>().join(" "));
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn definition_is_consistent() {
        Cli::command().debug_assert();
    }
}
