//! Which task the flags ask for, and whether it writes the files that they ask for, too.
//! Never opens a file. Surprising fact: a file that is silently not written is noticed by nobody but the script that reads it next, so even
//! `--plan` behind a whole command line is refused where that names one.

use crate::cli::args::Cli;
use crate::cli::{CliError, written};

/// Files of every task that computes.
const COMPUTED: [&str; 3] = ["--trace-file", "--snapshot-file", "--save-hotlist"];
/// Those of a task that counts what it did, too.
const COUNTED: [&str; 4] = ["--stats-json", "--trace-file", "--snapshot-file", "--save-hotlist"];

/// Refuses two tasks in one, and files that the task does not write.
///
/// # Errors
/// `Usage`, naming both flags.
pub fn check(cli: &Cli) -> Result<(), CliError> {
    let (seen, prompt) = (&cli.diagnosis, &cli.prompt);
    let tasks: [(&str, bool, &[&str]); 6] = [
        ("--doctor", seen.doctor, &[]),
        ("--inspect", seen.inspect, &[]),
        ("--plan", seen.plan, &[]),
        ("--dump-tokens", seen.dump_tokens, &[]),
        ("--perplexity-file", seen.perplexity_file.is_some(), &COUNTED),
        ("--decode-consistency", seen.decode_consistency.is_some(), &COMPUTED),
    ];
    let mut given = tasks.iter().filter(|(_, is_given, _)| *is_given);
    let Some((task, _, writes)) = given.next() else { return Ok(()) };
    if let Some((other, ..)) = given.next() {
        return Err(CliError::usage(format!("{task} and {other} are two tasks; ask for one at a time")));
    }
    if let Some((flag, _)) = written(cli).iter().find(|(flag, path)| path.is_some() && !writes.contains(flag)) {
        return Err(CliError::usage(format!("{task} writes no file for {flag}; leave one of them out")));
    }
    let prompts = [
        ("-p", prompt.prompt.is_some()),
        ("--prompt-file", prompt.prompt_file.is_some()),
        ("--tokens-file", prompt.tokens_file.is_some()),
    ];
    match prompts.iter().find(|(_, is_given)| *is_given && *task == "--perplexity-file") {
        Some((flag, _)) => {
            Err(CliError::usage(format!("{task} measures a text and takes no {flag}; leave one of them out")))
        }
        None => Ok(()),
    }
}
