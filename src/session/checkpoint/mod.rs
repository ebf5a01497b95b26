//! The file of a saved session: format, what it says of itself, and why one is refused. Writing is in `save`, reading in `load`.
//! Never gives a session to a model that it was not made with. Surprising fact: the file is read twice, first for its checksum, so that a
//! damaged one is refused before the session at hand is touched.
//!
//! Layout, little-endian: magic (8), version (u32), length of the head (u64), the head (JSON), token ids (u32 each), logits of the
//! vocabulary (f32 each) if there are any, the pieces of the state (kind u8, length of the name u8, name, count u64, then u64 or f32 each),
//! the pieces of each frontier that is kept, end mark (8), length of the file (u64), xxh3-128 of all bytes before it (16).

mod load;
mod save;

use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use load::{Checkpoint, Restored};
pub use save::write;

use crate::models::state::StateError;
use crate::session::images::ImageMark;

const MAGIC: [u8; 8] = *b"DS4SESS\0";
const END: [u8; 8] = *b"DS4END\0\0";
const VERSION: u32 = 1;
/// Magic, version, length of the head.
const START_BYTES: u64 = 20;
/// End mark, length, checksum.
const TRAILER_BYTES: u64 = 32;
const NUMBERS: u8 = 1;
const VALUES: u8 = 2;

/// What tells the model of a session, and how it is computed, from any other.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ModelMark {
    /// Identity of the model file, in hexadecimal digits.
    pub identity: String,
    /// Name of the file, for messages.
    pub name: String,
    pub arch: String,
    /// Whether it computes with F32 activations.
    pub is_quality: bool,
    /// Whether cached rows are left unrounded.
    pub is_kv_exact: bool,
}

impl ModelMark {
    /// Name and the start of the identity: enough for a reader's eye.
    fn shown(&self) -> String {
        let (name, identity): (String, String) =
            (self.name.chars().take(80).collect(), self.identity.chars().take(16).collect());
        format!("{name} ({identity})")
    }
}

/// Where a sampler stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SamplerMark {
    pub seed: u64,
    /// Position in the random numbers of that seed.
    pub position: u64,
}

/// The messages of a session, whose last one is an answer.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct SavedTalk {
    messages: Vec<Value>,
    level: Option<u8>,
}

/// The head of the file.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Head {
    /// Program and version that wrote it.
    program: String,
    model: ModelMark,
    tokens: u64,
    /// Length of the logits row; 0 where there is none.
    logits: u64,
    sampler: SamplerMark,
    /// Frontiers that the session can go back to, by rising length.
    images: Vec<ImageMark>,
    /// Absent when the tokens were given as such.
    talk: Option<SavedTalk>,
}

/// Why a session cannot be saved or loaded. Messages about a file name it.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("cannot read the session {}: {error}", path.display())]
    File { path: PathBuf, error: io::Error },
    #[error("cannot write the session: {0}")]
    Write(io::Error),
    #[error("{} is not a saved session ({what}); name a file of --save-session or /save", path.display())]
    NotASession { path: PathBuf, what: String },
    #[error(
        "the session {} has version {found}, this program reads version {VERSION}; use the ds4 that saved it, or start a new session",
        path.display()
    )]
    Version { path: PathBuf, found: u32 },
    #[error("the session {} is cut short; copy it again, or start a new session", path.display())]
    CutShort { path: PathBuf },
    #[error("the session {} is damaged ({what}); copy it again, or start a new session", path.display())]
    Damaged { path: PathBuf, what: String },
    #[error(
        "the session {} was saved with {found}, this model is {expected}; load it with the model file that it was saved with",
        path.display()
    )]
    OtherModel { path: PathBuf, found: String, expected: String },
    #[error("the session {} has {tokens} tokens, but the context holds {ctx}; use --ctx {tokens} or more", path.display())]
    TooLong { path: PathBuf, tokens: u64, ctx: usize },
    #[error("there is nothing to save yet")]
    Empty,
    #[error(transparent)]
    State(#[from] StateError),
}
