//! Ids and sizes used by every layer (re-exported from the pure crate), and the parser of cache budgets.
//! Never guesses a unit: a bare number is a number of slots, `GB` means GiB, anything else is refused.

pub use cache_policy::{Bytes, ExpertIdx, ExpertKey, LayerIdx};

/// Index of a token in the vocabulary.
pub type TokenId = u32;
