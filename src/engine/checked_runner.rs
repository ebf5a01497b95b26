//! A runner that looks whether the model file is still the one that was opened, before every pass, names it where its bytes are bad,
//! and tells counters and recorders what is computed.
//! Never repairs or reopens anything. Surprising fact: reads of a replaced file would go on without an error (the old inode lives), so
//! only this look tells the user that the answers no longer come from the file of that name.

use std::sync::Arc;

use crate::engine::lookahead::Lookahead;
use crate::engine::passes::Passes;
use crate::engine::routes::Routes;
use crate::engine::token_time::TokenTimer;
use crate::models::probe::Probe;
use crate::models::state::{StateError, StatePart, StateSink, StateSource};
use crate::models::supply::SupplyError;
use crate::models::{LogitSink, ModelError, ModelRunner, Progress, RunnerBytes, Want};
use crate::obs::spans::{self, Detail, Row};
use crate::storage::reader::{FileChange, Reader};
use crate::units::TokenId;

/// The file is not the one whose header and weights are in memory.
#[derive(Debug, thiserror::Error)]
#[error("{path} changed while in use: {change}; restart with the file in place")]
struct FileChanged {
    path: String,
    change: FileChange,
}

/// Bytes of the file that no model means.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {error}")]
struct FileDamaged {
    path: String,
    error: ModelError,
}

/// `inner`, with a check of the file of `reader` (two system calls), if any is read from, before each pass.
pub(super) struct CheckedRunner {
    pub inner: Box<dyn ModelRunner>,
    pub reader: Option<Arc<dyn Reader>>,
    pub passes: Arc<Passes>,
    /// Where a GPU computes.
    pub times: Option<Arc<TokenTimer>>,
    pub routes: Routes,
    pub lookahead: Option<Arc<Lookahead>>,
    /// Number of the session, once it has a pass.
    pub session: Option<u32>,
}

impl CheckedRunner {
    fn session(&mut self) -> u32 {
        *self.session.get_or_insert_with(|| self.passes.next_session())
    }

    /// Tells the lookahead of a single token that comes next.
    fn foresee(&mut self, tokens: &[TokenId]) {
        if let (Some(lookahead), &[token]) = (self.lookahead.clone(), tokens) {
            lookahead.begin_token(self.session(), self.inner.len(), token);
        }
    }
}

impl ModelRunner for CheckedRunner {
    fn arch(&self) -> &'static str {
        self.inner.arch()
    }

    fn vocab(&self) -> usize {
        self.inner.vocab()
    }

    fn ctx(&self) -> usize {
        self.inner.ctx()
    }

    fn chunk(&self) -> usize {
        self.inner.chunk()
    }

    fn sweep(&self) -> usize {
        self.inner.sweep()
    }

    fn len(&self) -> usize {
        self.inner.len()
    }

    fn bytes(&self) -> RunnerBytes {
        self.inner.bytes()
    }

    fn reset(&mut self) {
        self.session = None;
        self.inner.reset();
    }

    fn reach(&self, len: usize) -> usize {
        self.inner.reach(len)
    }

    fn save_state(&mut self, part: StatePart, sink: &mut dyn StateSink) -> Result<(), StateError> {
        self.inner.save_state(part, sink)
    }

    fn load_state(
        &mut self,
        part: StatePart,
        kept: &[TokenId],
        source: &mut dyn StateSource,
    ) -> Result<(), StateError> {
        self.session = None;
        self.inner.load_state(part, kept, source)
    }

    fn rewind(&mut self, kept: &[TokenId]) -> usize {
        // Positions that come twice belong to two sessions.
        self.session = None;
        self.inner.rewind(kept)
    }

    fn chooses(&self) -> bool {
        self.inner.chooses()
    }

    fn chosen(&self) -> Option<TokenId> {
        self.inner.chosen()
    }

    fn fetch_logits(&mut self, logits: &mut [f32]) -> Result<(), ModelError> {
        self.inner.fetch_logits(logits)
    }

    fn prefetch_rows(&mut self, tokens: &[TokenId]) -> Result<(), ModelError> {
        // Its experts can be guessed as soon as the id is known.
        self.foresee(tokens);
        // The pass that uses these rows checks the file.
        self.inner.prefetch_rows(tokens)
    }

    fn forward_watched(
        &mut self,
        tokens: &[TokenId],
        want: Want,
        sink: &mut LogitSink<'_>,
        probe: Option<&mut dyn Probe>,
        progress: &mut Progress<'_>,
    ) -> Result<(), ModelError> {
        let path = |reader: &Arc<dyn Reader>| reader.path().display().to_string();
        if let Some(reader) = &self.reader {
            let changed = |change| SupplyError(Box::new(FileChanged { path: path(reader), change }));
            reader.check_file().map_err(changed)?;
        }
        let before = self.inner.len();
        let session = self.session();
        self.foresee(tokens);
        self.routes.begin_pass(session, before, tokens);
        let timed = self.times.as_ref().and_then(|times| times.begin(tokens.len()));
        let begun = spans::begin();
        let result = self.inner.forward_watched(tokens, want, sink, probe, progress);
        if let Some(begun) = begun {
            let what = if tokens.len() == 1 { "token" } else { "prefill" };
            spans::end(Row::Passes, what, begun, Detail { rows: tokens.len() as u64, ..Detail::default() });
        }
        if let Some(times) = &self.times {
            times.end(timed, result.is_ok());
        }
        self.routes.end_pass(result.is_ok());
        self.passes.count(tokens.len(), self.inner.len() - before);
        if let (Some(lookahead), true, true) = (&self.lookahead, result.is_ok(), tokens.len() > 1) {
            lookahead.pass_over(session, before, tokens);
        }
        result.map_err(|error| match (error, &self.reader) {
            (error @ ModelError::RowData { .. }, Some(reader)) => {
                SupplyError(Box::new(FileDamaged { path: path(reader), error })).into()
            }
            (other, _) => other,
        })
    }
}
