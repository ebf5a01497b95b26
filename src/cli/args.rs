//! The flags of `ds4`, as clap reads them. Parses only: what a value means for a given model is resolved later.
//! Never opens a file. Surprising fact: `-sys` is spelled with one dash by users of the known engine, which clap cannot
//! express, so the argument list is rewritten before parsing.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, Parser, ValueEnum};

use crate::cli::{CliError, output};
use crate::engine::options::SWEEP_ROWS_MAX;

/// Runs mixture-of-experts language models larger than memory by streaming their experts from an SSD.
#[derive(Parser, Debug, Clone)]
#[command(
    name = "ds4",
    version,
    max_term_width = 110,
    after_help = "Without -p, --prompt-file or --tokens-file: an interactive session."
)]
pub struct Cli {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub prompt: PromptArgs,
    #[command(flatten)]
    pub session: SessionArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub thinking: ThinkingArgs,
    #[command(flatten)]
    pub streaming: StreamingArgs,
    #[command(flatten)]
    pub diagnosis: DiagnosisArgs,
}

/// The model file and how it is computed.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// Model file (GGUF) [default: ds4flash.gguf if present, else the bundled small model]
    #[arg(short, long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// Context length in tokens [default: the trained length, at most 32768]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub ctx: Option<u32>,
    /// Compute threads [default: the processors this process may use]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Compute on the processor (same as --backend cpu)
    #[arg(long, conflicts_with = "backend")]
    pub cpu: bool,
    /// Where to compute
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto, value_name = "NAME")]
    pub backend: BackendChoice,
    /// The GPU to compute on, as the driver counts them [default: 0]
    #[arg(long, value_name = "N", value_parser = gpu_device, conflicts_with = "cpu", allow_hyphen_values = true)]
    pub gpu_devices: Option<u16>,
    /// Experts kept in GPU memory: N slots, or NGB (GB = GiB) [default: what is free]
    #[arg(long, value_name = "N|NGB", allow_hyphen_values = true)]
    pub gpu_cache: Option<String>,
    /// How experts reach a GPU's memory: copied, or read in the host's memory by the kernels that arrange them; auto measures that on a GPU without
    /// memory of its own, and copies elsewhere
    #[arg(long, value_enum, default_value_t = UploadsChoice::Auto, value_name = "WAY")]
    pub gpu_uploads: UploadsChoice,
    /// The host looks up which experts a GPU needs, layer by layer, instead of the GPU (the same text, slower)
    #[arg(long)]
    pub no_graph: bool,
    /// Order of a GPU's sums: fast uses tensor cores for attention, exact has the processor's bits, slower [default: fast]
    #[arg(long, value_enum, value_name = "ORDER")]
    pub gpu_sums: Option<SumsChoice>,
    /// Exact arithmetic: F32 activations instead of 8-bit blocks; slower
    #[arg(long)]
    pub quality: bool,
    /// Diagnostic: keep cached rows and index keys unrounded
    #[arg(long)]
    pub kv_exact: bool,
    /// Instruction set of the CPU kernels; amx is avx512 and matrix tiles for many rows (every choice gives the same bits)
    #[arg(long, value_enum, default_value_t = SimdChoice::Auto, value_name = "LEVEL")]
    pub simd: SimdChoice,
    /// Prompt tokens computed together [default: 512; on a GPU up to 2048, as memory allows]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=32768))]
    pub prefill_chunk: Option<u32>,
    /// Prompt tokens that share one read of each expert [default: what a sixteenth of the memory carries, at most 32768]
    #[arg(long, value_name = "N|auto", value_parser = sweep_rows)]
    pub sweep_rows: Option<SweepRows>,
    /// Diagnostic: compute every prompt token in every layer, also where nothing can see it
    #[arg(long)]
    pub no_decoder_suffix: bool,
}

/// What to say to the model.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Prompt")]
pub struct PromptArgs {
    /// Prompt text; rendered with the model's chat format
    #[arg(short, long, value_name = "TEXT", conflicts_with_all = ["prompt_file", "tokens_file"])]
    pub prompt: Option<String>,
    /// Read the prompt text from a UTF-8 file
    #[arg(long, value_name = "FILE", conflicts_with = "tokens_file")]
    pub prompt_file: Option<PathBuf>,
    /// JSON array of token ids taken as the exact prompt, without chat format
    #[arg(long, value_name = "FILE")]
    pub tokens_file: Option<PathBuf>,
    /// System text (also -sys)
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Most tokens to generate [default: until the model stops or the context is full]
    #[arg(short = 'n', long, value_name = "N")]
    pub tokens: Option<u32>,
}

/// Conversations that outlive the process.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Session")]
pub struct SessionArgs {
    /// Go on with a session that --save-session or /save wrote
    #[arg(long, value_name = "FILE", conflicts_with_all = ["perplexity_file", "decode_consistency", "dump_logits"])]
    pub load_session: Option<PathBuf>,
    /// Save conversation and state at the end, to go on without computing them again
    #[arg(long, value_name = "FILE", conflicts_with_all = ["perplexity_file", "decode_consistency"])]
    pub save_session: Option<PathBuf>,
    /// Places that an interactive session can go back to without computing them again
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(0..=64), conflicts_with_all = ["prompt", "prompt_file", "tokens_file", "perplexity_file"])]
    pub rewind_points: u32,
}

/// How the next token is chosen.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Temperature; 0 takes the most likely token
    #[arg(long, default_value_t = 0.0, value_name = "T", value_parser = at_least_zero)]
    pub temp: f32,
    /// Keep the most likely tokens whose probabilities add up to P
    #[arg(long, default_value_t = 1.0, value_name = "P", value_parser = probability)]
    pub top_p: f32,
    /// Drop tokens less likely than P times the most likely one
    #[arg(long, default_value_t = 0.0, value_name = "P", value_parser = probability)]
    pub min_p: f32,
    /// Keep the K most likely tokens; 0 keeps all
    #[arg(long, default_value_t = 0, value_name = "K")]
    pub top_k: u32,
    /// Seed of the sampler
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub seed: u64,
}

/// How much the model reasons before it answers.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Thinking")]
pub struct ThinkingArgs {
    /// Reason before answering (level 75)
    #[arg(long, group = "thinking")]
    pub think: bool,
    /// Reason as long as it takes (level 100)
    #[arg(long, group = "thinking")]
    pub think_max: bool,
    /// Answer without reasoning
    #[arg(long, group = "thinking")]
    pub nothink: bool,
    /// Reasoning level; 0 answers at once
    #[arg(long, group = "thinking", value_name = "0..100", value_parser = clap::value_parser!(u8).range(0..=100))]
    pub think_level: Option<u8>,
}

impl ThinkingArgs {
    /// The level asked for, if any flag was given: 0 is no reasoning.
    pub fn level(&self) -> Option<u8> {
        match (self.think, self.think_max, self.nothink) {
            (true, _, _) => Some(75),
            (_, true, _) => Some(100),
            (_, _, true) => Some(0),
            _ => self.think_level,
        }
    }
}

/// How experts move between the drive and memory.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Streaming")]
pub struct StreamingArgs {
    /// Keep routed experts on the drive and cache them in memory
    #[arg(long)]
    pub ssd_streaming: bool,
    /// Expert cache: N slots, or NGB of memory (GB = GiB); also --host-cache [default: what memory allows]
    #[arg(long, value_name = "N|NGB", requires = "ssd_streaming", alias = "host-cache", allow_hyphen_values = true)]
    pub ssd_streaming_cache_experts: Option<String>,
    /// Which experts leave a full cache: lru, lfu, clock, s3-fifo, sieve, window-random, layer-aware, adaptive (= auto)
    #[arg(long, value_name = "NAME", default_value = "auto", requires = "ssd_streaming")]
    pub cache_policy: String,
    /// Start with an empty expert cache
    #[arg(long, requires = "ssd_streaming", conflicts_with = "ssd_streaming_preload_experts")]
    pub ssd_streaming_cold: bool,
    /// Experts to load before the first token [default: what the cache holds, within 4 GiB of reads]
    #[arg(long, value_name = "N", requires = "ssd_streaming")]
    pub ssd_streaming_preload_experts: Option<u32>,
    /// Preload the experts that were popular in earlier runs, from a file of --save-hotlist
    #[arg(long, value_name = "FILE", requires = "ssd_streaming")]
    pub hotlist: Option<PathBuf>,
    /// Save which experts are popular; an earlier list in the file fades and is added
    #[arg(long, value_name = "FILE", requires = "ssd_streaming")]
    pub save_hotlist: Option<PathBuf>,
    /// Read experts ahead by a guess: of the last tokens' routes, of the next router, of both; a GPU uploads by the next router's too
    #[arg(long, value_enum, default_value_t = LookaheadChoice::Auto, value_name = "NAME", requires = "ssd_streaming")]
    pub lookahead: LookaheadChoice,
    /// Plan as if this much memory were in use by others
    #[arg(long, value_name = "NGB", allow_hyphen_values = true)]
    pub simulate_used_memory: Option<String>,
    /// Compare every expert and n-gram row with its checksum as it arrives (made by ds4-gguf checksum)
    #[arg(long, requires = "ssd_streaming")]
    pub verify_reads: bool,
    /// Checksums to compare with [default: the model's name with .ds4sum behind it]
    #[arg(long, value_name = "FILE", requires = "verify_reads")]
    pub checksums: Option<PathBuf>,
    /// Keep n-gram rows that were read before in this much memory
    #[arg(long, value_name = "NGB")]
    pub row_cache: Option<String>,
    /// How the drive is read
    #[arg(long, value_enum, default_value_t = IoChoice::Auto, value_name = "NAME")]
    pub io: IoChoice,
    /// Whether reads bypass the page cache: unless everything streamed fits in free memory, always, or never
    #[arg(long, value_enum, default_value_t = DirectFlag::Auto, value_name = "WHEN")]
    pub direct: DirectFlag,
    /// Whether the drive is measured (at most a second): when first met, never, or now
    #[arg(long, value_enum, default_value_t = ProbeFlag::Auto, value_name = "WHEN")]
    pub probe: ProbeFlag,
}

/// Looking into a model, a prompt or a run.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Diagnosis")]
pub struct DiagnosisArgs {
    /// Describe the model file and stop
    #[arg(long)]
    pub inspect: bool,
    /// Examine machine, drive and model file, predict bounds, and stop
    #[arg(long)]
    pub doctor: bool,
    /// With --doctor: print JSON
    #[arg(long, requires = "doctor")]
    pub json: bool,
    /// Print the memory plan and stop
    #[arg(long)]
    pub plan: bool,
    /// Print the prompt's token ids as a JSON array and stop
    #[arg(long)]
    pub dump_tokens: bool,
    /// Write tokens and logits of every position to a safetensors file
    #[arg(long, value_name = "FILE")]
    pub dump_logits: Option<PathBuf>,
    /// Write the log-probabilities of generated tokens to a JSON file
    #[arg(long, value_name = "FILE")]
    pub dump_logprobs: Option<PathBuf>,
    /// Alternatives per token in --dump-logprobs
    #[arg(long, default_value_t = 5, value_name = "K", requires = "dump_logprobs")]
    pub logprobs_top_k: u32,
    /// Measure the perplexity of a text file and stop (windows of --ctx tokens, 1024 by default)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "prompt_file", "tokens_file", "decode_consistency", "dump_logits", "dump_logprobs", "trace_routes"])]
    pub perplexity_file: Option<PathBuf>,
    /// Compute the last N prompt tokens in one chunk and one by one, compare the bits, and stop
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), conflicts_with = "trace_routes")]
    pub decode_consistency: Option<u32>,
    /// Write the run's counters to a JSON file
    #[arg(long, value_name = "FILE")]
    pub stats_json: Option<PathBuf>,
    /// Record the experts that every step requested, for ds4-cache
    #[arg(long, value_name = "FILE")]
    pub trace_routes: Option<PathBuf>,
    /// Draw passes, layers, waits, reads and what a GPU does over time, for ui.perfetto.dev (JSON)
    #[arg(long, value_name = "FILE")]
    pub trace_file: Option<PathBuf>,
    /// Keep a file with the state of the running process, rewritten four times a second
    #[arg(long, value_name = "FILE")]
    pub snapshot_file: Option<PathBuf>,
}

/// Devices that can be asked for.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum BackendChoice {
    Auto,
    Cpu,
    Cuda,
}

/// Ways of experts into the memory of a GPU.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum UploadsChoice {
    Auto,
    Copy,
    Direct,
}

/// Orders of a GPU's sums.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum SumsChoice {
    Exact,
    Fast,
}

/// Instruction sets of the CPU kernels.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum SimdChoice {
    Auto,
    Scalar,
    Avx2,
    Avx512,
    Amx,
}

/// Guesses that are read ahead.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum LookaheadChoice {
    Auto,
    Off,
    Memory,
    Router,
    Both,
}

/// Readers.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum IoChoice {
    Auto,
    Uring,
    Pread,
}

/// When reads bypass the page cache.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum DirectFlag {
    Auto,
    On,
    Off,
}

/// When the drive is measured.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProbeFlag {
    Auto,
    Off,
    Force,
}

impl Cli {
    /// Parses the process's arguments.
    ///
    /// # Errors
    /// What [`refuse`] tells the user, which includes help and version.
    pub fn from_process_args() -> Result<Self, clap::Error> {
        Self::try_parse_from(rewrite(std::env::args_os()))
    }

    /// Whether the flags leave what to say to an interactive session.
    pub fn is_interactive(&self) -> bool {
        let prompt = &self.prompt;
        let files = [&prompt.prompt_file, &prompt.tokens_file, &self.diagnosis.perplexity_file];
        prompt.prompt.is_none() && files.iter().all(|file| file.is_none())
    }
}

/// Prints help or version, which clap hands over as an error too; any other error becomes a sentence.
///
/// # Errors
/// A usage error: what is wrong, and the hints that clap has for it, without its blocks.
pub fn refuse(error: &clap::Error) -> Result<(), CliError> {
    refuse_as("ds4", error)
}

/// As [`refuse`], for another program of the project.
///
/// # Errors
/// As [`refuse`].
pub fn refuse_as(program: &str, error: &clap::Error) -> Result<(), CliError> {
    let text = error.render().to_string();
    if !error.use_stderr() {
        return output::answer(&text).map_err(CliError::output);
    }
    if let Some((flag, value)) = negative_value(error, words()) {
        return Err(CliError::usage(format!(
            "{flag} {value}: the value must not be negative; {program} --help lists all flags"
        )));
    }
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let said = lines.take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"));
    let said = said.collect::<Vec<_>>().join(" ");
    Err(CliError::usage(format!("{}; {program} --help lists all flags", said.trim_start_matches("error: "))))
}

/// The words that this process was started with, for people to read: a file's name need not be text.
pub fn words() -> impl Iterator<Item = String> {
    std::env::args_os().map(|word| word.to_string_lossy().into_owned())
}

/// The flag and its value where clap took a value for a flag of its own because it begins with a minus.
fn negative_value(error: &clap::Error, args: impl Iterator<Item = String>) -> Option<(String, String)> {
    let Some(ContextValue::String(unknown)) = error.get(ContextKind::InvalidArg) else { return None };
    let is_negative =
        |text: &str| text.starts_with('-') && text[1..].starts_with(|c: char| c.is_ascii_digit() || c == '.');
    if error.kind() != ErrorKind::UnknownArgument || !is_negative(unknown) {
        return None;
    }
    let args: Vec<String> = args.collect();
    let found = args.windows(2).find(|pair| pair[0].starts_with('-') && pair[1].starts_with(unknown.as_str()))?;
    Some((found[0].clone(), found[1].clone()))
}

/// Turns `-sys` into `--system`, up to a `--`.
pub fn rewrite(args: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut ended = false;
    args.into_iter()
        .map(|arg| {
            ended |= arg == "--";
            if !ended && arg == "-sys" { "--system".into() } else { arg }
        })
        .collect()
}

/// A value of `--sweep-rows`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SweepRows {
    Auto,
    Rows(usize),
}

fn sweep_rows(text: &str) -> Result<SweepRows, String> {
    match text.parse::<usize>() {
        Ok(rows @ 1..=SWEEP_ROWS_MAX) => Ok(SweepRows::Rows(rows)),
        _ if text == "auto" => Ok(SweepRows::Auto),
        _ => Err(format!("must be a number from 1 to {SWEEP_ROWS_MAX}, or auto")),
    }
}

fn gpu_device(text: &str) -> Result<u16, String> {
    if text.contains(',') {
        return Err("one GPU computes a model, so a list is refused; name one device, such as 0".into());
    }
    text.parse().map_err(|_| "must be the number of a device, from 0".into())
}

fn at_least_zero(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(value) if value >= 0.0 && value.is_finite() => Ok(value),
        _ => Err("must be a number of at least 0".into()),
    }
}

fn probability(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(value) if (0.0..=1.0).contains(&value) => Ok(value),
        _ => Err("must be between 0 and 1".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(args: &[&str]) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(rewrite(std::iter::once("ds4").chain(args.iter().copied()).map(OsString::from)))
    }

    #[test]
    fn definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn known_spellings_parse() {
        let cli =
            parse(&["-sys", "Be terse.", "-p", "-sys", "--ssd-streaming", "--ssd-streaming-cache-experts", "64GB"]);
        // A prompt that is itself `-sys` needs `--prompt=-sys`, as with any value that looks like a flag.
        assert!(cli.is_err());
        let cli =
            parse(&["-sys", "Be terse.", "-p", "hello", "--ssd-streaming", "--ssd-streaming-cache-experts", "64GB"])
                .unwrap();
        assert_eq!(cli.prompt.system.as_deref(), Some("Be terse."));
        assert_eq!(cli.streaming.ssd_streaming_cache_experts.as_deref(), Some("64GB"));
    }

    #[test]
    fn thinking_flags_exclude_each_other() {
        assert_eq!(parse(&["--think"]).unwrap().thinking.level(), Some(75));
        assert_eq!(parse(&["--think-max"]).unwrap().thinking.level(), Some(100));
        assert_eq!(parse(&["--nothink"]).unwrap().thinking.level(), Some(0));
        assert_eq!(parse(&["--think-level", "30"]).unwrap().thinking.level(), Some(30));
        assert_eq!(parse(&[]).unwrap().thinking.level(), None);
        assert!(parse(&["--think", "--nothink"]).is_err());
        assert!(parse(&["--think-level", "101"]).is_err());
    }

    #[test]
    fn negative_values_are_told_with_their_flag() {
        let told = |args: &[&str]| negative_value(&parse(args).unwrap_err(), args.iter().map(|arg| (*arg).to_owned()));
        let pair = |flag: &str, value: &str| Some((flag.to_owned(), value.to_owned()));
        assert_eq!(told(&["--temp", "-1"]), pair("--temp", "-1"));
        assert_eq!(told(&["-n", "-12", "-c", "5"]), pair("-n", "-12"));
        assert_eq!(told(&["--row-cache", "-1GB"]), pair("--row-cache", "-1GB"));
        assert_eq!(told(&["--temp", "-.5"]), pair("--temp", "-.5"));
        assert_eq!(told(&["--temp", "hot"]), None);
        assert_eq!(told(&["-9"]), None);
        assert_eq!(told(&["--no-such-flag"]), None);
    }

    #[test]
    fn bad_numbers_are_refused() {
        for bad in [
            ["--temp", "-1"],
            ["--temp", "nan"],
            ["--top-p", "1.5"],
            ["--ctx", "0"],
            ["--threads", "0"],
            ["--prefill-chunk", "0"],
            ["--sweep-rows", "0"],
            ["--sweep-rows", "wide"],
            ["--sweep-rows", "99999"],
            ["--io", "mmap"],
        ] {
            assert!(parse(&bad).is_err(), "{bad:?}");
        }
    }
}
