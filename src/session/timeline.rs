//! One sequence of tokens and the model state that belongs to it, in step with each other.
//! Never lets the two drift: after any error or interruption the timeline holds exactly the tokens that the state holds.
//! Surprising fact: a prompt that extends the timeline costs only its new part; any other prompt starts over, because
//! windows and open groups are overwritten as they move on (spec deepseek-v41 5.4).

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use crate::models::probe::Probe;
use crate::models::{ModelError, ModelRunner, Want};
use crate::units::TokenId;

/// Whether long work goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flow {
    Continue,
    Stop,
}

/// Why a session could not go on. The timeline stays usable.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("the prompt is empty; give it at least one token")]
    EmptyPrompt,
    #[error(
        "the prompt has {tokens} tokens, but the context holds {ctx}; use --ctx {tokens} or more, or a shorter prompt"
    )]
    PromptTooLong { tokens: usize, ctx: usize },
    #[error("interrupted")]
    Interrupted,
}

/// What bringing the timeline to a prompt took.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct SyncReport {
    /// Prompt tokens that were in the state already.
    pub reused: usize,
    /// Prompt tokens that were computed.
    pub computed: usize,
    /// Time for those.
    pub elapsed: Duration,
}

/// Who watches a timeline while it computes.
pub trait Watcher: Send {
    /// `done` of `total` prompt tokens are computed.
    fn prefill(&mut self, done: usize, total: usize) -> Flow {
        let _ = (done, total);
        Flow::Continue
    }
    /// Logits of `position`, when all are asked for.
    fn logits(&mut self, position: usize, logits: &[f32]) {
        let _ = (position, logits);
    }
    /// Whether `probe` gives one.
    fn has_probe(&self) -> bool {
        false
    }
    /// A probe for the forward passes.
    fn probe(&mut self) -> Option<&mut dyn Probe> {
        None
    }
}

/// Watches nothing.
pub struct NoWatcher;

impl Watcher for NoWatcher {}

/// Tokens and state.
pub struct Timeline {
    runner: Box<dyn ModelRunner>,
    tokens: Vec<TokenId>,
    last_logits: Vec<f32>,
}

impl Timeline {
    /// An empty timeline over a fresh runner.
    pub fn new(runner: Box<dyn ModelRunner>) -> Self {
        let (ctx, vocab) = (runner.ctx(), runner.vocab());
        Self { runner, tokens: Vec::with_capacity(ctx), last_logits: vec![0.0; vocab] }
    }

    /// The tokens that the state holds.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Most tokens that fit.
    pub fn ctx(&self) -> usize {
        self.runner.ctx()
    }

    /// Length of a logits row.
    pub fn vocab(&self) -> usize {
        self.runner.vocab()
    }

    /// Rows that go through the layers together.
    pub fn chunk(&self) -> usize {
        self.runner.chunk()
    }

    /// Logits after the last token; meaningful after a `sync` or `append` that succeeded.
    pub fn last_logits(&self) -> &[f32] {
        &self.last_logits
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.runner.reset();
        self.tokens.clear();
    }

    /// Goes back to the first `len` tokens, which must be a length that the timeline had after a `sync` or `append`. Tokens that the state
    /// no longer holds are computed again. There are no logits afterwards, until something is appended.
    ///
    /// # Errors
    /// Failures of the passes and interruptions, as for `sync`.
    pub fn rewind(&mut self, len: usize, watcher: &mut dyn Watcher) -> Result<(), SessionError> {
        if len >= self.tokens.len() {
            return Ok(());
        }
        let kept = self.tokens[..len].to_vec();
        let held = self.runner.rewind(&kept);
        self.tokens.truncate(held);
        if held < len {
            self.sync(&kept, Want::None, watcher)?;
        }
        Ok(())
    }

    /// Starts the row reads of a token that will be appended next.
    ///
    /// # Errors
    /// When the reads cannot be submitted.
    pub fn announce(&mut self, token: TokenId) -> Result<(), SessionError> {
        Ok(self.runner.prefetch_rows(&[token])?)
    }

    /// Makes the timeline equal `prompt`, with logits after its last token (and all others when `want` is `All`).
    ///
    /// # Errors
    /// Empty or too long prompts, failures of the pass, an interruption by the watcher.
    pub fn sync(
        &mut self,
        prompt: &[TokenId],
        want: Want,
        watcher: &mut dyn Watcher,
    ) -> Result<SyncReport, SessionError> {
        if prompt.is_empty() {
            return Err(SessionError::EmptyPrompt);
        }
        if prompt.len() > self.ctx() {
            return Err(SessionError::PromptTooLong { tokens: prompt.len(), ctx: self.ctx() });
        }
        let extends = self.tokens.len() < prompt.len() && prompt.starts_with(&self.tokens);
        // The logits of a fully known prompt are not kept with every state, so its last token would be missing: start over.
        if !extends || want == Want::All {
            self.clear();
        }
        let reused = self.tokens.len();
        let started = Instant::now();
        // Whoever looks at every row is served by the chunk, so that what is kept for it stays small.
        let step = if want == Want::All || watcher.has_probe() { self.runner.chunk() } else { self.runner.sweep() };
        let total = prompt.len() - reused;
        while self.tokens.len() < prompt.len() {
            if watcher.prefill(self.tokens.len() - reused, total) == Flow::Stop {
                return Err(SessionError::Interrupted);
            }
            let at = self.tokens.len();
            let end = prompt.len().min(at + step);
            let is_last = end == prompt.len();
            let want = if is_last && want == Want::None {
                Want::Last
            } else if is_last {
                want
            } else {
                keep_all(want)
            };
            self.append_part(&prompt[at..end], want, watcher, Some((at - reused, total)))?;
        }
        watcher.prefill(total, total);
        Ok(SyncReport { reused, computed: total, elapsed: started.elapsed() })
    }

    /// Appends `tokens` in one pass.
    ///
    /// # Errors
    /// Failures of the pass; the timeline then holds the tokens that the state holds.
    pub fn append(&mut self, tokens: &[TokenId], want: Want, watcher: &mut dyn Watcher) -> Result<(), SessionError> {
        self.append_part(tokens, want, watcher, None)
    }

    /// As `append`; `prompt` says how much of how many tokens of a prompt is done, and has the watcher told of each step further.
    fn append_part(
        &mut self,
        tokens: &[TokenId],
        want: Want,
        watcher: &mut dyn Watcher,
        prompt: Option<(usize, usize)>,
    ) -> Result<(), SessionError> {
        let first = self.tokens.len();
        let last = first + tokens.len() - 1;
        let (runner, last_logits) = (&mut self.runner, &mut self.last_logits);
        let mut keep = |position: usize, logits: &[f32]| {
            if position == last {
                last_logits.copy_from_slice(logits);
            }
        };
        let mut kept = Vec::new();
        let result = if want == Want::All && watcher.has_probe() {
            // Probe and logits are two borrows of one watcher, so here logits are collected and handed on after the pass.
            let mut sink = |position: usize, logits: &[f32]| {
                keep(position, logits);
                kept.push((position, logits.to_vec()));
            };
            runner.forward(tokens, want, &mut sink, watcher.probe())
        } else if want == Want::All {
            let mut sink = |position: usize, logits: &[f32]| {
                keep(position, logits);
                watcher.logits(position, logits);
            };
            runner.forward(tokens, want, &mut sink, None)
        } else if watcher.has_probe() {
            runner.forward(tokens, want, &mut keep, watcher.probe())
        } else {
            let mut progress = |rows: usize| match prompt {
                Some((done, total)) if watcher.prefill(done + rows, total) == Flow::Stop => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            };
            runner.forward_watched(tokens, want, &mut keep, None, &mut progress)
        };
        let held = self.runner.len();
        self.tokens.extend_from_slice(&tokens[..held - first]);
        result.map_err(|error| match error {
            ModelError::Interrupted => SessionError::Interrupted,
            other => other.into(),
        })?;
        for (position, logits) in kept {
            watcher.logits(position, &logits);
        }
        Ok(())
    }
}

fn keep_all(want: Want) -> Want {
    if want == Want::All { Want::All } else { Want::None }
}
