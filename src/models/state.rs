//! How the state of a sequence leaves a runner and comes back: the two doors of checkpoints and of rewinding.
//! Never says where the numbers go: a file or memory is the caller's business. Surprising fact: what a sequence only ever appends to need
//! not be kept to go back, so the small part that is overwritten as it moves on is a part of its own.

use std::io;

use crate::backend::BackendError;

/// The last rows of a sequence that can always be taken back for next to nothing: the widest batch whose tail may turn out wrong.
pub const ROLLBACK_ROWS: usize = 8;

/// How much of a state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StatePart {
    /// What is overwritten as the sequence moves on. With the rest still in place, enough to go back to where it was taken.
    Frontier,
    /// Everything: enough for a fresh runner.
    Whole,
}

/// Why a state could not be saved or loaded.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("the saved state does not fit: {what} is {found}, expected {expected}")]
    Mismatch { what: &'static str, found: String, expected: String },
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Backend(#[from] BackendError),
}

impl StateError {
    /// A number that is not what the model or the context allow.
    pub fn mismatch(what: &'static str, found: impl ToString, expected: impl ToString) -> Self {
        Self::Mismatch { what, found: found.to_string(), expected: expected.to_string() }
    }
}

/// Takes a state, piece by piece. The source gives the same pieces in the same order.
pub trait StateSink {
    /// So many numbers and values are about to come, at least: for sinks that keep them in memory.
    fn room(&mut self, numbers: usize, values: usize) {
        let _ = (numbers, values);
    }

    /// Counts and positions.
    ///
    /// # Errors
    /// Whatever keeps them from being stored.
    fn numbers(&mut self, name: &str, numbers: &[u64]) -> Result<(), StateError>;

    /// Values of buffers.
    ///
    /// # Errors
    /// Whatever keeps them from being stored.
    fn values(&mut self, name: &str, values: &[f32]) -> Result<(), StateError>;
}

/// Gives a state back, piece by piece.
pub trait StateSource {
    /// The next piece, which must be numbers of this name and count.
    ///
    /// # Errors
    /// Another piece than that, or one that cannot be read.
    fn numbers(&mut self, name: &'static str, numbers: &mut [u64]) -> Result<(), StateError>;

    /// The next piece, which must be values of this name and count.
    ///
    /// # Errors
    /// As for numbers.
    fn values(&mut self, name: &'static str, values: &mut [f32]) -> Result<(), StateError>;
}
