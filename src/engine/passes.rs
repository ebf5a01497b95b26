//! What the passes of a run have computed, counted where every front end's passes go through.
//! Never decides anything. Surprising fact: a failed pass counts for the tokens of its finished chunks, as the state does.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Tokens computed since the engine was opened, by any sequence.
#[derive(Debug, Default)]
pub struct Passes {
    tokens: AtomicU64,
    decode_tokens: AtomicU64,
    sessions: AtomicU32,
}

impl Passes {
    /// A pass over `asked` tokens has added `computed` to the state.
    pub fn count(&self, asked: usize, computed: usize) {
        // Relaxed: the numbers order nothing.
        self.tokens.fetch_add(computed as u64, Ordering::Relaxed);
        if asked == 1 {
            self.decode_tokens.fetch_add(computed as u64, Ordering::Relaxed);
        }
    }

    /// Number of a session that begins.
    pub fn next_session(&self) -> u32 {
        self.sessions.fetch_add(1, Ordering::Relaxed)
    }

    /// Tokens computed.
    pub fn tokens(&self) -> u64 {
        self.tokens.load(Ordering::Relaxed)
    }

    /// Those computed one at a time.
    pub fn decode_tokens(&self) -> u64 {
        self.decode_tokens.load(Ordering::Relaxed)
    }
}
