//! The file of `--dump-logprobs`: one JSON object with the chosen tokens and their best alternatives.
//! Holds numbers only; written whole at the end. Surprising fact: texts of tokens may be parts of characters, so bytes are given too.

use std::io::{self, Write};
use std::path::Path;

use serde::Serialize;

use crate::cli::whole_file::WholeFile;
use crate::session::sampler::Choice;
use crate::text::tokenizer::Tokenizer;
use crate::units::TokenId;

#[derive(Serialize)]
struct Token {
    id: TokenId,
    text: String,
    bytes: Vec<u8>,
    logprob: f32,
}

#[derive(Serialize)]
struct Step {
    #[serde(flatten)]
    chosen: Token,
    top: Vec<Token>,
}

/// Log-probabilities of one answer.
#[derive(Serialize)]
pub struct LogprobsFile {
    model: String,
    tokens: Vec<Step>,
}

impl LogprobsFile {
    /// Nothing yet, for `model`.
    pub fn new(model: impl Into<String>) -> Self {
        Self { model: model.into(), tokens: Vec::new() }
    }

    /// Adds a chosen token.
    pub fn push(&mut self, tokenizer: &Tokenizer, chosen: Choice, top: &[Choice]) {
        let describe = |choice: &Choice| {
            let bytes = tokenizer.token_bytes(choice.id).unwrap_or_default().to_vec();
            let text = String::from_utf8_lossy(&bytes).into_owned();
            Token { id: choice.id, text, bytes, logprob: choice.logprob }
        };
        self.tokens.push(Step { chosen: describe(&chosen), top: top.iter().map(describe).collect() });
    }

    /// Writes the file; an older one of the name is replaced only when all is well.
    ///
    /// # Errors
    /// A full disk, or a name that cannot be taken.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        write_json(path, self)
    }
}

/// Writes `value` as a JSON file: complete under its name, or not at all.
///
/// # Errors
/// A full disk, or a name that cannot be taken.
pub fn write_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let mut file = WholeFile::create(path)?;
    serde_json::to_writer_pretty(&mut file, value)?;
    file.write_all(b"\n")?;
    file.finish()
}
