//! `ds4-gguf synth`: writes a synthetic model file.
//! Owns the flags and the check that the engine would run such a file; never makes a byte of it. Surprising fact: the check comes before
//! the work, so contradictory sizes cost no time.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};

use super::{RecipeName, listen, report, step, use_threads};
use crate::cli::CliError;
use crate::cli::progress::{Meter, Unit};
use crate::engine::metadata::{FileMetadata, vocabulary};
use crate::models;
use crate::storage::convert::{ALIGNMENT, Arch, ConvertError, Recipe};
use crate::storage::synth::{Dims, Routing, Shape, SynthError, SynthOptions, SynthPlan};
use crate::text::tokenizer::Tokenizer;

/// Flags of `ds4-gguf synth`.
#[derive(Args, Debug)]
pub(super) struct SynthArgs {
    /// File to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Architecture: DeepSeek V4.1 or V4 Flash
    #[arg(long, value_enum, default_value_t = ArchName::Deepseek41)]
    arch: ArchName,
    /// Sizes to start from: full is the published model (as q2 341 GiB, V4 Flash 81 GiB), small a few megabytes
    #[arg(long, value_enum, default_value_t = ShapeName::Full)]
    shape: ShapeName,
    /// Layers; kinds of layers are spread as in the published model
    #[arg(long, value_name = "N")]
    layers: Option<u32>,
    /// Routed experts a layer
    #[arg(long, value_name = "N")]
    experts: Option<u32>,
    /// Rows of each n-gram table of V4.1, rounded to what the hash needs; 0 leaves tables out
    #[arg(long, value_name = "N")]
    table_rows: Option<u64>,
    /// Tokens of the vocabulary
    #[arg(long, value_name = "N")]
    vocab: Option<u32>,
    /// Replace another size, by its name in config.json, e.g. hidden_size=1024
    #[arg(long, value_name = "NAME=N")]
    dim: Vec<String>,
    /// Types of the tensors: q2, q4 or native (MXFP4 experts, BF16 elsewhere)
    #[arg(long, value_enum, default_value_t = RecipeName::Q2)]
    recipe: RecipeName,
    /// Replace one entry of the recipe, as in convert
    #[arg(long, value_name = "CLASS=TYPE")]
    set: Vec<String>,
    /// Only this many layers have experts of their own; the others name the same ranges of the file in turn
    #[arg(long, value_name = "L")]
    alias: Option<u32>,
    /// How often experts are chosen: uniform, or zipf:S for a power law with exponent S
    #[arg(long, value_name = "RULE", default_value = "uniform")]
    routing: String,
    /// The same seed gives the same bytes
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Replace an existing output
    #[arg(long)]
    force: bool,
    /// Alignment of tensor data, a power of two
    #[arg(long, value_name = "BYTES", default_value_t = ALIGNMENT)]
    alignment: u32,
    /// Threads that make bytes [default: all processors]; the output does not depend on it
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum ArchName {
    Deepseek41,
    Deepseek4,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum ShapeName {
    Full,
    Small,
}

impl From<SynthError> for CliError {
    fn from(error: SynthError) -> Self {
        match error {
            SynthError::Recipe(inner @ ConvertError::Setting { .. }) => Self::usage(inner),
            SynthError::Dim { .. }
            | SynthError::Vocabulary { .. }
            | SynthError::Alias { .. }
            | SynthError::Routing { .. } => Self::usage(error),
            other => Self::failed(other),
        }
    }
}

/// Runs the command.
///
/// # Errors
/// Sizes that make no model, an output that exists, a full drive, an interruption; the output is untouched then.
pub(super) fn run(args: &SynthArgs) -> Result<ExitCode, CliError> {
    let options = SynthOptions {
        dims: dims(args)?,
        recipe: Recipe::base(args.recipe.base()).with(&args.set)?,
        alias: args.alias,
        routing: args.routing.parse::<Routing>()?,
        seed: args.seed,
        alignment: args.alignment,
    };
    use_threads(args.threads);
    let plan = SynthPlan::new(&options)?;
    models::config(&FileMetadata(plan.metadata())).map_err(CliError::usage)?;
    Tokenizer::new(vocabulary(plan.metadata()).map_err(CliError::failed)?).map_err(CliError::failed)?;
    let interrupt = listen()?;
    let mut meter = Meter::new("synth", Unit::Bytes);
    let mut watch = |done, total| -> ControlFlow<()> { step(&mut meter, &interrupt, done, total) };
    let summary = plan.write(&args.output, args.force, &mut watch)?;
    drop(meter);
    report(&summary, &args.output);
    Ok(ExitCode::SUCCESS)
}

fn dims(args: &SynthArgs) -> Result<Dims, CliError> {
    let shape = match args.shape {
        ShapeName::Full => Shape::Full,
        ShapeName::Small => Shape::Small,
    };
    let arch = match args.arch {
        ArchName::Deepseek41 => Arch::DeepSeek41,
        ArchName::Deepseek4 => Arch::DeepSeek4,
    };
    let mut dims = Dims::of(arch, shape);
    for given in &args.dim {
        let pair = given.split_once('=').and_then(|(name, n)| Some((name, n.parse::<u32>().ok()?)));
        let (name, n) = pair.ok_or_else(|| CliError::usage(format!("--dim {given}: write NAME=N")))?;
        dims.set(name, n)?;
    }
    let named = [("num_hidden_layers", args.layers), ("n_routed_experts", args.experts), ("vocab_size", args.vocab)];
    for (name, value) in named {
        value.map(|n| dims.set(name, n)).transpose()?;
    }
    args.table_rows.map(|n| dims.set_table_rows(n)).transpose()?;
    Ok(dims)
}
