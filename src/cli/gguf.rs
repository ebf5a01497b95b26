//! The command line of `ds4-gguf`: inspect, convert, quantize, imatrix, synth, checksum, compare.
//! Owns flags and what is printed; never touches tensor data itself.
//! Surprising fact: an interrupted conversion ends through the normal error path, which is what removes its file.

mod checksum;
mod imatrix;
mod inspect;
mod synth;

use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand, ValueEnum};

use super::args::refuse_as;
use super::interrupt::Interrupt;
use super::progress::{Meter, Unit};
use super::{CliError, output};
use crate::storage::convert::{
    self, ALIGNMENT, BaseRecipe, Comparison, ConvertError, Importance, Options, Recipe, Summary, TensorDifference,
};
use crate::storage::gguf::GgufFile;
use crate::units::Bytes;

/// Inspects, makes, re-quantises and compares GGUF files.
#[derive(Parser, Debug)]
#[command(name = "ds4-gguf", version, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Show metadata, tensors, bytes of each class and sizes of experts
    Inspect(InspectArgs),
    /// Make a GGUF file from a checkpoint folder (config.json, safetensors, tokenizer.json)
    Convert(ConvertArgs),
    /// Re-encode a GGUF file
    Quantize(QuantizeArgs),
    /// Run a model over a text and write an importance file for convert and quantize
    Imatrix(imatrix::ImatrixArgs),
    /// Write a model file of random weights with the published layout, at any scale
    Synth(synth::SynthArgs),
    /// Sum up experts and n-gram rows, for ds4 --verify-reads
    Checksum(checksum::ChecksumArgs),
    /// Compare two GGUF files tensor by tensor; exit code 1 when they differ
    Compare(CompareArgs),
}

#[derive(Args, Debug)]
struct InspectArgs {
    file: PathBuf,
    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
    /// List every tensor
    #[arg(long)]
    tensors: bool,
}

#[derive(Args, Debug)]
struct ConvertArgs {
    /// Checkpoint folder
    folder: PathBuf,
    /// native: lossless; q4: Q4_K experts; q2: IQ2_XXS gate and up, Q2_K down
    #[arg(long, value_enum)]
    recipe: RecipeName,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Args, Debug)]
struct QuantizeArgs {
    /// GGUF file to read
    file: PathBuf,
    /// q4: Q4_K experts; q2: IQ2_XXS gate and up, Q2_K down; native: as in the input but for --set
    #[arg(long, value_enum)]
    recipe: RecipeName,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Args, Debug)]
struct OutputArgs {
    /// File to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Replace one entry of the recipe, e.g. attention=Q4_K (classes: embedding, attention, shared, indexer, mixing,
    /// gate_up, down, head, ngram)
    #[arg(long, value_name = "CLASS=TYPE")]
    set: Vec<String>,
    /// Importance file: weighs the errors of quantised values
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
    /// Replace an existing output
    #[arg(long)]
    force: bool,
    /// Alignment of tensor data, a power of two
    #[arg(long, value_name = "BYTES", default_value_t = ALIGNMENT)]
    alignment: u32,
    /// Encoding threads [default: all processors]; the output does not depend on it
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
}

#[derive(Args, Debug)]
struct CompareArgs {
    first: PathBuf,
    second: PathBuf,
    /// Largest normalised mean square error (NMSE) of a tensor that counts as equal
    #[arg(long, value_name = "NMSE", default_value_t = 0.0)]
    tolerance: f64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum RecipeName {
    Native,
    Q4,
    Q2,
}

impl RecipeName {
    fn base(self) -> BaseRecipe {
        match self {
            RecipeName::Native => BaseRecipe::Native,
            RecipeName::Q4 => BaseRecipe::Q4,
            RecipeName::Q2 => BaseRecipe::Q2,
        }
    }
}

/// What `ds4-gguf inspect` prints of a file.
///
/// # Errors
/// A file that is no GGUF file.
pub fn describe(model: &std::path::Path) -> Result<String, ConvertError> {
    Ok(inspect::text(&GgufFile::open(model)?, false))
}

/// Tells the user something beside the result.
fn note(text: &str) {
    output::note_as("ds4-gguf", text);
}

/// Runs `ds4-gguf` on the process's arguments.
pub fn main() -> ExitCode {
    let mut text = Vec::new();
    let result = match Cli::try_parse() {
        Ok(cli) => run(cli.command, &mut text),
        Err(error) => refuse_as("ds4-gguf", &error).map(|()| ExitCode::SUCCESS),
    };
    // Whatever was found is shown, also before an error.
    if let Err(error) = output::bytes(&text)
        && error.kind() != ErrorKind::BrokenPipe
    {
        note(&format!("cannot write to standard output: {error}"));
        return ExitCode::FAILURE;
    }
    match result {
        Ok(code) => code,
        Err(CliError::Unread) => ExitCode::SUCCESS,
        Err(error) => {
            note(&format!("{error}"));
            ExitCode::from(if matches!(error, CliError::Usage(_)) { 2 } else { 1 })
        }
    }
}

impl From<ConvertError> for CliError {
    fn from(error: ConvertError) -> Self {
        match error {
            ConvertError::Setting { .. } => Self::usage(error),
            other => Self::failed(other),
        }
    }
}

fn run(command: Command, out: &mut Vec<u8>) -> Result<ExitCode, CliError> {
    match command {
        Command::Inspect(args) => {
            let file = open(&args.file)?;
            let text = if args.json { inspect::json(&file, args.tensors) } else { inspect::text(&file, args.tensors) };
            out.extend_from_slice(text.as_bytes());
            Ok(ExitCode::SUCCESS)
        }
        Command::Convert(args) => {
            let work = |options: &Options, watch: &mut convert::Watch| convert::convert(&args.folder, options, watch);
            Ok(produce("convert", args.recipe, &args.output, work)?)
        }
        Command::Quantize(args) => {
            let file = open(&args.file)?;
            let work = |options: &Options, watch: &mut convert::Watch| convert::quantize(&file, options, watch);
            Ok(produce("quantize", args.recipe, &args.output, work)?)
        }
        Command::Imatrix(args) => imatrix::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Synth(args) => synth::run(&args),
        Command::Checksum(args) => checksum::run(&args),
        Command::Compare(args) => {
            let (first, second) = (open(&args.first)?, open(&args.second)?);
            let interrupt = listen()?;
            let mut meter = Meter::new("compare", Unit::Bytes);
            let found =
                convert::compare(&first, &second, &mut |done, total| step(&mut meter, &interrupt, done, total))?;
            drop(meter);
            out.extend_from_slice(comparison(&found).as_bytes());
            let equal = found.within(args.tolerance);
            Ok(if equal { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
    }
}

fn open(path: &Path) -> Result<GgufFile, ConvertError> {
    Ok(GgufFile::open(path)?)
}

fn listen() -> Result<Interrupt, ConvertError> {
    let io = |source| ConvertError::Io { path: PathBuf::new(), doing: "cannot listen for signals", source };
    Interrupt::listen().map_err(io)
}

fn step(meter: &mut Meter, interrupt: &Interrupt, done: u64, total: u64) -> ControlFlow<()> {
    meter.set(done, total);
    if interrupt.is_set() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
}

/// Limits the threads of this program; called once, before its first parallel step.
fn use_threads(threads: Option<u16>) {
    if let Some(threads) = threads {
        let builder = rayon::ThreadPoolBuilder::new().num_threads(usize::from(threads));
        // Fails only where a pool exists already, and this is the first use.
        builder.build_global().expect("the pool is set once, before its first use");
    }
}

/// Sets up what convert and quantize share, runs `work`, reports.
fn produce(
    label: &'static str,
    recipe: RecipeName,
    args: &OutputArgs,
    work: impl FnOnce(&Options, &mut convert::Watch) -> Result<Summary, ConvertError> + Send,
) -> Result<ExitCode, ConvertError> {
    let importance = args.imatrix.as_deref().map(Importance::open).transpose()?;
    let options = Options {
        recipe: Recipe::base(recipe.base()).with(&args.set)?,
        importance: importance.as_ref(),
        output: &args.output,
        force: args.force,
        alignment: args.alignment,
    };
    if importance.is_none() && options.recipe.wants_importance() {
        note("note: types of 2 and 3 bits lose less with an importance file (--imatrix)");
    }
    use_threads(args.threads);
    let interrupt = listen()?;
    let mut meter = Meter::new(label, Unit::Bytes);
    let summary = work(&options, &mut |done, total| step(&mut meter, &interrupt, done, total))?;
    drop(meter);
    report(&summary, &args.output);
    Ok(ExitCode::SUCCESS)
}

fn report(summary: &Summary, output: &Path) {
    let Summary { tensors, bytes, left_out, with_importance } = *summary;
    note(&format!("wrote {}: {tensors} tensors, {} ({bytes} bytes)", output.display(), Bytes(bytes)));
    if with_importance > 0 {
        note(&format!("{with_importance} tensors were encoded with importance"));
    }
    if left_out > 0 {
        note(&format!("{left_out} checkpoint tensors outside the text model were left out"));
    }
}

fn comparison(found: &Comparison) -> String {
    let mut lines: Vec<String> = Vec::new();
    for d in &found.metadata {
        let how = match d.present {
            [true, true] => "differs",
            [true, false] => "is only in the first file",
            _ => "is only in the second file",
        };
        let note = if d.is_provenance { " (says how the file was made)" } else { "" };
        lines.push(format!("key {} {how}{note}", d.key));
    }
    for d in &found.differences {
        lines.push(match d {
            TensorDifference::OnlyIn { first: true, name } => format!("tensor {name} is only in the first file"),
            TensorDifference::OnlyIn { first: false, name } => format!("tensor {name} is only in the second file"),
            TensorDifference::Dims { name, dims: [a, b] } => format!("tensor {name}: dimensions {a:?} and {b:?}"),
            TensorDifference::Raw { name, types: [a, b] } => format!("tensor {name}: {a} and {b}, bytes differ"),
            TensorDifference::Type { name, types: [a, b] } => format!("tensor {name}: {a} and {b}, equal values"),
            TensorDifference::Values { name, types: [a, b], max_abs, rms, nmse } => {
                format!("tensor {name}: {a} and {b}, max abs {max_abs:.6e}, rms {rms:.6e}, nmse {nmse:.6e}")
            }
        });
    }
    let equal = found.tensors - found.differences.iter().filter(|d| has_two_sides(d)).count();
    lines.push(format!("{equal} of {} common tensors are identical", found.tensors));
    lines.join("\n") + "\n"
}

fn has_two_sides(d: &TensorDifference) -> bool {
    !matches!(d, TensorDifference::OnlyIn { .. })
}
