//! The flags of `ds4-bench`, as clap reads them. Parses only; `schedule` finds what cannot be done.
//! Never opens a file. Surprising fact: model and streaming flags are those of `ds4` itself, with one renamed: `--ctx` is called
//! `--ctx-alloc`, because a sweep has many context lengths and only one allocation.

use std::path::PathBuf;

use clap::{ArgAction, Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};

use crate::cli::args::{ModelArgs, StreamingArgs};

/// Measures how fast a model reads and writes, against context length and cache budget.
#[derive(Parser, Debug)]
#[command(
    name = "ds4-bench",
    version,
    max_term_width = 110,
    args_conflicts_with_subcommands = true,
    args_override_self = true,
    after_help = "Rows go to stdout as they finish (or to --csv); docs/BENCHMARKING.md explains every column."
)]
pub struct BenchCli {
    #[command(subcommand)]
    pub command: Option<BenchCommand>,
    #[command(flatten)]
    pub run: RunArgs,
}

/// What can be done with finished files.
#[derive(Subcommand, Debug)]
pub enum BenchCommand {
    /// Compare two CSV files row by row: ratio B / A with its 95 % interval
    Compare(CompareArgs),
    /// Draw CSV files: speed against context, cost of appends, speed and hit rate against cache budget
    Plot(PlotArgs),
}

/// A measurement.
#[derive(Args, Debug)]
pub struct RunArgs {
    #[command(flatten)]
    pub sweep: SweepArgs,
    #[command(flatten)]
    pub output: OutputArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub streaming: StreamingArgs,
}

/// What is measured.
#[derive(Args, Debug)]
#[command(next_help_heading = "Sweep")]
pub struct SweepArgs {
    /// UTF-8 text that is read, without chat format (one comes with the sources in benches/text)
    #[arg(long, value_name = "FILE")]
    pub prompt_file: Option<PathBuf>,
    /// Read and generate random token ids of this seed, in place of a text and the model's choice: for random weights
    #[arg(long, value_name = "SEED", conflicts_with = "prompt_file")]
    pub random_tokens: Option<u64>,
    /// First context length
    #[arg(long, value_name = "N", default_value_t = 2048)]
    pub ctx_start: u32,
    /// Last context length
    #[arg(long, value_name = "N", default_value_t = 32768)]
    pub ctx_max: u32,
    /// Tokens from one context length to the next
    #[arg(long, value_name = "N", default_value_t = 2048)]
    pub step_incr: u32,
    /// Factor from one context length to the next, in place of --step-incr unless it is 1
    #[arg(long, value_name = "F", default_value_t = 1.0, allow_negative_numbers = true)]
    pub step_mul: f64,
    /// Tokens generated at each context length; 0 measures prefill only
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub gen_tokens: u32,
    /// Also append this many tokens at each context length, e.g. 1,8,32,256
    #[arg(long, value_name = "LENS", value_delimiter = ',', action = ArgAction::Set)]
    pub append: Vec<u32>,
    /// Repeat everything for each of these cache budgets, e.g. 64,128,1.5GB
    #[arg(long, value_name = "LIST", value_delimiter = ',', action = ArgAction::Set, conflicts_with = "ssd_streaming_cache_experts")]
    pub budgets: Vec<String>,
    /// Measured repetitions of every regime
    #[arg(short = 'r', long, value_name = "N", default_value_t = 1)]
    pub repetitions: u32,
    /// States of the expert cache to measure, in this order of time: cold, preloaded, warm-repeat, new-text
    #[arg(long, value_name = "LIST", value_enum, value_delimiter = ',', action = ArgAction::Set, default_value = "cold")]
    pub regimes: Vec<Regime>,
}

/// Where rows go.
#[derive(Args, Debug)]
#[command(next_help_heading = "Output")]
pub struct OutputArgs {
    /// Write rows to a CSV file, each as soon as it is measured
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// What is written to stdout: md, csv, json, jsonl [default: csv, or nothing with --csv]
    #[arg(short = 'o', long = "output", value_name = "FORMAT", value_enum)]
    pub format: Option<Format>,
}

/// Two files to compare.
#[derive(Args, Debug)]
pub struct CompareArgs {
    /// The base
    #[arg(value_name = "A.csv")]
    pub base: PathBuf,
    /// What is compared with it
    #[arg(value_name = "B.csv")]
    pub other: PathBuf,
    /// Leave rows out that only one file has, in place of refusing
    #[arg(long)]
    pub common: bool,
    /// What is written to stdout: md, csv, json, jsonl
    #[arg(short = 'o', long = "output", value_name = "FORMAT", value_enum, default_value_t = Format::Md)]
    pub format: Format,
}

/// Files to draw.
#[derive(Args, Debug)]
pub struct PlotArgs {
    /// CSV files, a line each
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// SVG file to write
    #[arg(short = 'o', long, value_name = "FILE")]
    pub output: PathBuf,
    /// Title [default: model and machine of the first file]
    #[arg(long, value_name = "TEXT")]
    pub title: Option<String>,
}

/// What the expert cache holds when a repetition begins.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Regime {
    /// Nothing: the model is opened anew for every repetition.
    Cold,
    /// What a preload has read: the model is opened anew for every repetition.
    Preloaded,
    /// What an earlier pass over the same text has left.
    WarmRepeat,
    /// What passes over other text have left.
    NewText,
}

impl Regime {
    /// As it is written in rows and flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cold => "cold",
            Self::Preloaded => "preloaded",
            Self::WarmRepeat => "warm-repeat",
            Self::NewText => "new-text",
        }
    }

    /// Whether every repetition opens the model anew.
    pub fn opens_anew(self) -> bool {
        matches!(self, Self::Cold | Self::Preloaded)
    }
}

/// How rows are written.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// A table to read, with the conditions above it
    Md,
    /// A header and one line a row
    Csv,
    /// One object: conditions and rows
    Json,
    /// One object a line
    Jsonl,
}

/// The command line as clap knows it.
pub fn command() -> clap::Command {
    BenchCli::command().mut_arg("ctx", |arg| {
        arg.short(None)
            .long("ctx-alloc")
            .help("Context length that memory is allocated for [default: what the sweep needs]")
    })
}

/// Parses an argument list, the program's name included.
///
/// # Errors
/// What clap has to say, help and version included.
pub fn parse<I, T>(args: I) -> Result<BenchCli, clap::Error>
where
    I: IntoIterator<Item = T>,
    T: Into<std::ffi::OsString> + Clone,
{
    BenchCli::from_arg_matches(&command().try_get_matches_from(args)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definition_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn defaults_are_those_of_the_known_tool() {
        let cli = parse(["ds4-bench", "--prompt-file", "x"]).unwrap();
        let sweep = &cli.run.sweep;
        let numbers = (sweep.ctx_start, sweep.ctx_max, sweep.step_incr, sweep.gen_tokens);
        assert_eq!((numbers, sweep.step_mul), ((2048, 32768, 2048, 128), 1.0));
        assert_eq!((sweep.repetitions, &sweep.regimes[..]), (1, &[Regime::Cold][..]));
        assert!(cli.command.is_none() && cli.run.model.ctx.is_none());
    }

    #[test]
    fn lists_and_subcommands_parse() {
        let cli = parse(["ds4-bench", "--append", "1,8", "--regimes", "new-text,cold", "--ctx-alloc", "99"]).unwrap();
        assert_eq!((&cli.run.sweep.append[..], cli.run.model.ctx), (&[1, 8][..], Some(99)));
        assert_eq!(cli.run.sweep.regimes, [Regime::NewText, Regime::Cold]);
        assert!(matches!(parse(["ds4-bench", "compare", "a", "b"]).unwrap().command, Some(BenchCommand::Compare(_))));
        // The last one counts, so that scripts have defaults which their callers replace.
        let cli =
            parse(["ds4-bench", "--append", "1,8", "--gen-tokens", "1", "--append", "3", "--gen-tokens", "2"]).unwrap();
        assert_eq!((&cli.run.sweep.append[..], cli.run.sweep.gen_tokens), (&[3][..], 2));
        for bad in [&["--ctx", "5"][..], &["-c", "5"], &["--regimes", "hot"], &["plot", "x"], &["compare", "x"]] {
            assert!(parse([&["ds4-bench"], bad].concat()).is_err(), "{bad:?}");
        }
    }
}
