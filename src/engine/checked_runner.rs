//! A runner that looks whether the model file is still the one that was opened, before every pass, and names it where its bytes are bad.
//! Never repairs or reopens anything. Surprising fact: reads of a replaced file would go on without an error (the old inode lives), so
//! only this look tells the user that the answers no longer come from the file of that name.

use std::sync::Arc;

use crate::models::probe::Probe;
use crate::models::supply::SupplyError;
use crate::models::{LogitSink, ModelError, ModelRunner, RunnerBytes, Want};
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

/// `inner`, with a check of the file of `reader` (two system calls) before each pass.
pub(super) struct CheckedRunner {
    pub inner: Box<dyn ModelRunner>,
    pub reader: Arc<dyn Reader>,
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

    fn len(&self) -> usize {
        self.inner.len()
    }

    fn bytes(&self) -> RunnerBytes {
        self.inner.bytes()
    }

    fn reset(&mut self) {
        self.inner.reset();
    }

    fn rewind(&mut self, kept: &[TokenId]) -> usize {
        self.inner.rewind(kept)
    }

    fn prefetch_rows(&mut self, tokens: &[TokenId]) -> Result<(), ModelError> {
        // The pass that uses these rows checks the file.
        self.inner.prefetch_rows(tokens)
    }

    fn forward(
        &mut self,
        tokens: &[TokenId],
        want: Want,
        sink: &mut LogitSink<'_>,
        probe: Option<&mut dyn Probe>,
    ) -> Result<(), ModelError> {
        let path = || self.reader.path().display().to_string();
        self.reader.check_file().map_err(|change| SupplyError(Box::new(FileChanged { path: path(), change })))?;
        self.inner.forward(tokens, want, sink, probe).map_err(|error| match error {
            ModelError::RowData { .. } => SupplyError(Box::new(FileDamaged { path: path(), error })).into(),
            other => other,
        })
    }
}
