//! What the user wants said: prompt text, files, token lists, and which model file is meant.
//! Reads small files only. Surprising fact: an empty prompt is refused rather than sent, since every model answers it with noise.

use std::io::Read;
use std::path::{Path, PathBuf};

use crate::cli::CliError;
use crate::cli::args::Cli;
use crate::units::TokenId;

/// Where the known engine keeps its model.
const DEFAULT_MODEL: &str = "ds4flash.gguf";
/// The small model that comes with the sources.
const BUNDLED_MODEL: &str = "models/ds41-mini.gguf";
/// Longest prompt file or typed message: far above any context.
pub const TEXT_BYTES_MAX: u64 = 64 << 20;

/// The model file to run, and a line about it when the user did not name one.
///
/// # Errors
/// When there is none.
pub fn model_path(cli: &Cli) -> Result<(PathBuf, Option<String>), CliError> {
    if let Some(path) = &cli.model.model {
        return Ok((path.clone(), None));
    }
    if Path::new(DEFAULT_MODEL).exists() {
        return Ok((PathBuf::from(DEFAULT_MODEL), None));
    }
    let beside_program = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join(BUNDLED_MODEL)));
    let candidates = [
        Some(PathBuf::from(BUNDLED_MODEL)),
        beside_program,
        Some(Path::new(env!("CARGO_MANIFEST_DIR")).join(BUNDLED_MODEL)),
    ];
    match candidates.into_iter().flatten().find(|path| path.exists()) {
        Some(path) => {
            let notice = format!("no -m and no {DEFAULT_MODEL} here: using the bundled small model {}", path.display());
            Ok((path, Some(notice)))
        }
        None => Err(CliError::usage(format!(
            "no model: name a GGUF file with -m, or put it at {DEFAULT_MODEL}; the README says where to get one"
        ))),
    }
}

/// What a run without a conversation starts from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Prompt {
    /// A user's message.
    Text(String),
    /// The exact tokens.
    Tokens(Vec<TokenId>),
}

/// The prompt of the command line, if it has one.
///
/// # Errors
/// Unreadable files, text that is not UTF-8, empty prompts.
pub fn prompt(cli: &Cli) -> Result<Option<Prompt>, CliError> {
    let args = &cli.prompt;
    let prompt = match (&args.prompt, &args.prompt_file, &args.tokens_file) {
        (Some(text), _, _) => Prompt::Text(text.clone()),
        (_, Some(path), _) => Prompt::Text(text_file(path)?),
        (_, _, Some(path)) => Prompt::Tokens(tokens_file(path)?),
        (None, None, None) => return Ok(None),
    };
    let is_empty = match &prompt {
        Prompt::Text(text) => text.is_empty(),
        Prompt::Tokens(tokens) => tokens.is_empty(),
    };
    if is_empty {
        let flag = match (&args.prompt, &args.prompt_file) {
            (Some(_), _) => "-p",
            (_, Some(_)) => "--prompt-file",
            _ => "--tokens-file",
        };
        return Err(CliError::usage(format!(
            "the prompt is empty; give {flag} something to say, or leave it out for an interactive session"
        )));
    }
    Ok(Some(prompt))
}

/// A UTF-8 text file.
///
/// # Errors
/// One line that names the file and what is wrong with it.
pub fn text_file(path: &Path) -> Result<String, CliError> {
    let shown = path.display();
    let unreadable = |e: std::io::Error| CliError::failed(format!("cannot read {shown}: {e}"));
    // Counted while reading: devices and pipes have no length.
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(unreadable)?;
    file.take(TEXT_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > TEXT_BYTES_MAX {
        return Err(CliError::failed(format!("{shown} has more than {TEXT_BYTES_MAX} bytes; split it")));
    }
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        CliError::failed(format!(
            "{shown} is not UTF-8 text (first bad byte at {at}); convert it, for example with iconv"
        ))
    })
}

/// As [`text_file`], for a file that is named in a conversation: a pipe could keep it waiting where nobody can interrupt.
///
/// # Errors
/// As [`text_file`]; anything but a regular file.
pub fn regular_text_file(path: &Path) -> Result<String, CliError> {
    if std::fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        return Err(CliError::failed(format!("{} is no regular file; name a text file", path.display())));
    }
    text_file(path)
}

fn tokens_file(path: &Path) -> Result<Vec<TokenId>, CliError> {
    let text = text_file(path)?;
    serde_json::from_str(&text)
        .map_err(|e| CliError::failed(format!("{} is not a JSON array of token ids: {e}", path.display())))
}
