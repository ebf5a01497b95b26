//! Errors of conversion. Owns the messages; never decides what to do about them.
//! Surprising fact: "does not fit" lists the types that would, because that is the next question.

use std::path::PathBuf;

use thiserror::Error;

use crate::quant::{QuantError, QuantType};
use crate::storage::gguf::GgufError;
use crate::storage::layout::LayoutError;

/// Why a conversion or comparison stopped.
#[derive(Debug, Error)]
pub enum ConvertError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[error("{}: {doing}: {source}", path.display())]
    Io { path: PathBuf, doing: &'static str, source: std::io::Error },
    #[error("{}: {problem}", path.display())]
    Json { path: PathBuf, problem: String },
    #[error("{}: safetensors header: {problem}", path.display())]
    Header { path: PathBuf, problem: String },
    #[error("{}: no model.safetensors and no model.safetensors.index.json", path.display())]
    NoCheckpoint { path: PathBuf },
    #[error("checkpoint tensor {tensor} is missing")]
    MissingTensor { tensor: String },
    #[error("checkpoint tensor {tensor} has shape {found:?}, expected {expected}")]
    Shape { tensor: String, found: Vec<u64>, expected: String },
    #[error("checkpoint tensor {tensor} has type {found}, expected {expected}")]
    Dtype { tensor: String, found: String, expected: &'static str },
    #[error("checkpoint tensor {tensor} has no place in the model that config.json describes ({others} more like it)")]
    UnexpectedTensor { tensor: String, others: usize },
    #[error("config.json: {key} {problem}")]
    Config { key: String, problem: String },
    #[error("{}: {problem}", path.display())]
    Engram { path: PathBuf, problem: String },
    #[error("{}: {problem}", path.display())]
    Tokenizer { path: PathBuf, problem: String },
    #[error(
        "tensor {tensor}: rows of {columns} values do not fit {ty}; {class} may be one of {fitting} (--set {class}=TYPE)"
    )]
    DoesNotFit { tensor: String, class: &'static str, columns: u64, ty: QuantType, fitting: String },
    #[error("tensor {tensor}, row {row}, column {column}: value {value} {problem}")]
    Value { tensor: String, row: u64, column: u64, value: f32, problem: &'static str },
    #[error("tensor {tensor}, row {row}: {source}")]
    Codec { tensor: String, row: u64, source: QuantError },
    #[error("{}: {problem}", path.display())]
    Importance { path: PathBuf, problem: String },
    #[error("--set {given}: {problem}")]
    Setting { given: String, problem: String },
    #[error("stopped; nothing was written")]
    Stopped,
}
