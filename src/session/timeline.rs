//! One sequence of tokens and the model state that belongs to it, in step with each other.
//! Never lets the two drift: after any error or interruption the timeline holds exactly the tokens that the state holds.
//! Surprising fact: a prompt costs only what follows the tokens that it shares with the timeline, as far as the state can go back: windows
//! and open groups are overwritten as they move on (spec deepseek-v41 5.4), so it goes back to what is in reach or in a kept image.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::models::probe::Probe;
use crate::models::state::{StateError, StatePart, StateSink, StateSource};
use crate::models::{DrawRule, ModelError, ModelRunner, Want};
use crate::session::images::{ImageMark, Images, MemoryState};
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
    #[error(transparent)]
    State(#[from] StateError),
    #[error("the prompt is empty; give it at least one token")]
    EmptyPrompt,
    #[error(
        "the prompt has {tokens} tokens, but the context holds {ctx}; use a shorter prompt, or a context of {tokens} or more (--ctx; /ctx \
         in a conversation)"
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

/// Whether to stop, asked during a pass that has borrowed the watcher itself.
pub type StopAsked = Arc<dyn Fn() -> bool + Send + Sync>;

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
    /// What is asked many times during passes that hand out all logits or have a probe: the watcher is lent to those, so `prefill` is not
    /// called before they end. `None`: they are not stopped.
    fn stop_asked(&self) -> Option<StopAsked> {
        None
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
    /// Whether those are of the last token.
    has_logits: bool,
    /// Whether those of the last token are with the runner still, which chose from them; its choice.
    are_left: bool,
    chosen: Option<TokenId>,
    images: Images,
}

impl Timeline {
    /// An empty timeline over a fresh runner.
    pub fn new(runner: Box<dyn ModelRunner>) -> Self {
        Self::with_images(runner, 0)
    }

    /// As `new`, with up to `images` frontiers kept to go back to. They take `ModelConfig::frontier_bytes` each.
    pub fn with_images(runner: Box<dyn ModelRunner>, images: usize) -> Self {
        let (ctx, vocab) = (runner.ctx(), runner.vocab());
        let (tokens, last_logits) = (Vec::with_capacity(ctx), vec![0.0; vocab]);
        Self {
            runner,
            tokens,
            last_logits,
            has_logits: false,
            are_left: false,
            chosen: None,
            images: Images::new(images),
        }
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

    /// Whether the last logits are those of the last token: not after going back.
    pub fn has_logits(&self) -> bool {
        self.has_logits
    }

    /// Frontiers kept to go back to, and the most there may be.
    pub fn images(&self) -> (usize, usize) {
        (self.images.count(), self.images.most())
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.runner.reset();
        self.tokens.clear();
        self.images.cut(0);
        self.lose_logits();
    }

    fn lose_logits(&mut self) {
        (self.has_logits, self.are_left, self.chosen) = (false, false, None);
    }

    /// Goes back to the most of the first `len` tokens that costs nothing.
    fn go_back(&mut self, len: usize) -> Result<(), StateError> {
        if len == self.tokens.len() {
            return Ok(());
        }
        let near = self.runner.reach(len);
        let held = match self.images.best(len) {
            Some((held, state)) if held > near => {
                let loaded = self.runner.load_state(StatePart::Frontier, &self.tokens[..held], &mut state.reader());
                if let Err(error) = loaded {
                    self.clear();
                    return Err(error);
                }
                held
            }
            _ => self.runner.rewind(&self.tokens[..near]),
        };
        self.tokens.truncate(held);
        self.images.cut(held);
        self.lose_logits();
        Ok(())
    }

    /// Drops what `prompt` does not begin with, and of the rest what cannot be had for nothing.
    ///
    /// # Errors
    /// A device that fails; the timeline is empty then.
    pub fn keep_shared(&mut self, prompt: &[TokenId]) -> Result<(), SessionError> {
        Ok(self.go_back(shared(&self.tokens, prompt))?)
    }

    /// Writes the whole state to `sink`.
    ///
    /// # Errors
    /// What the sink says; models whose state cannot be saved.
    pub fn save_state(&mut self, sink: &mut dyn StateSink) -> Result<(), StateError> {
        self.runner.save_state(StatePart::Whole, sink)
    }

    /// Takes a whole state of `tokens` back, with the logits after the last of them where they were saved.
    ///
    /// # Errors
    /// A state that does not fit or cannot be read; the timeline is empty then.
    pub fn load_state(
        &mut self,
        tokens: &[TokenId],
        logits: Option<&[f32]>,
        source: &mut dyn StateSource,
    ) -> Result<(), StateError> {
        self.clear();
        self.runner.load_state(StatePart::Whole, tokens, source)?;
        self.tokens.extend_from_slice(tokens);
        if let Some(logits) = logits {
            self.last_logits.copy_from_slice(logits);
            self.has_logits = true;
        }
        Ok(())
    }

    /// The frontiers that are kept, by rising length.
    pub fn image_marks(&self) -> Vec<ImageMark> {
        self.images.marks()
    }

    /// Gives all of them to `sink`.
    ///
    /// # Errors
    /// What the sink says.
    pub fn save_images(&self, sink: &mut dyn StateSink) -> Result<(), StateError> {
        self.images.save_to(sink)
    }

    /// Takes a saved frontier of the present tokens back: one that leads to lengths `from` to `to`, longer than all that are kept.
    pub fn adopt_image(&mut self, (from, to): (usize, usize), state: MemoryState) {
        assert!(from <= to && to <= self.tokens.len(), "a frontier of other tokens");
        self.images.adopt((from, to), state);
    }

    /// Goes back to the first `len` tokens. Tokens that the state no longer holds are computed again. There are no logits afterwards, until
    /// something is appended.
    ///
    /// # Errors
    /// Failures of the passes and interruptions, as for `sync`.
    pub fn rewind(&mut self, len: usize, watcher: &mut dyn Watcher) -> Result<(), SessionError> {
        if len >= self.tokens.len() {
            return Ok(());
        }
        let kept = self.tokens[..len].to_vec();
        self.go_back(len)?;
        if self.tokens.len() < len {
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

    /// Makes the timeline equal `prompt`, with logits after its last token (and all others when `want` is `All`, which computes them all).
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
        let shared = shared(&self.tokens, prompt);
        if want == Want::All {
            self.clear();
        } else if shared == prompt.len() && shared == self.tokens.len() && self.has_logits {
            return Ok(SyncReport { reused: shared, ..SyncReport::default() });
        } else {
            // Logits are kept with the present state only: a prompt that is known in full needs its last token again.
            self.go_back(shared.min(prompt.len() - 1))?;
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
            self.images.take(&mut *self.runner)?;
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

    /// Appends `token` for a choice of the next one, greedy or by `rule`: where the runner makes that by itself, the logits stay there until
    /// [`Self::fetch_logits`].
    ///
    /// # Errors
    /// As for [`Self::append`].
    pub fn append_to_choose(
        &mut self,
        token: TokenId,
        rule: Option<DrawRule>,
        watcher: &mut dyn Watcher,
    ) -> Result<(), SessionError> {
        let chooses = self.runner.chooses() && !watcher.has_probe();
        let want = if chooses { rule.map_or(Want::Best, Want::Drawn) } else { Want::Last };
        self.append(&[token], want, watcher)
    }

    /// What the runner chose behind the last token, if it did.
    pub fn chosen(&self) -> Option<TokenId> {
        self.chosen
    }

    /// Brings logits that the last pass left with the runner, if it did, so that [`Self::last_logits`] has them.
    ///
    /// # Errors
    /// What the device says.
    pub fn fetch_logits(&mut self) -> Result<(), SessionError> {
        if self.are_left {
            self.lose_logits();
            self.runner.fetch_logits(&mut self.last_logits)?;
            self.has_logits = true;
        }
        Ok(())
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
        self.lose_logits();
        let (runner, last_logits) = (&mut self.runner, &mut self.last_logits);
        let mut keep = |position: usize, logits: &[f32]| {
            if position == last {
                last_logits.copy_from_slice(logits);
            }
        };
        let mut kept = Vec::new();
        let asked = watcher.stop_asked();
        let mut go_on = |_rows: usize| match &asked {
            Some(is_asked) if is_asked() => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        };
        let result = if want == Want::All && watcher.has_probe() {
            // Probe and logits are two borrows of one watcher, so here logits are collected and handed on after the pass.
            let mut sink = |position: usize, logits: &[f32]| {
                keep(position, logits);
                kept.push((position, logits.to_vec()));
            };
            runner.forward_watched(tokens, want, &mut sink, watcher.probe(), &mut go_on)
        } else if want == Want::All {
            let mut sink = |position: usize, logits: &[f32]| {
                keep(position, logits);
                watcher.logits(position, logits);
            };
            runner.forward_watched(tokens, want, &mut sink, None, &mut go_on)
        } else if watcher.has_probe() {
            runner.forward_watched(tokens, want, &mut keep, watcher.probe(), &mut go_on)
        } else {
            let mut progress = |rows: usize| match prompt {
                Some((done, total)) if watcher.prefill(done + rows, total) == Flow::Stop => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            };
            runner.forward_watched(tokens, want, &mut keep, None, &mut progress)
        };
        let held = self.runner.len();
        self.tokens.extend_from_slice(&tokens[..held - first]);
        self.has_logits = result.is_ok() && matches!(want, Want::Last | Want::All);
        self.are_left = result.is_ok() && matches!(want, Want::Best | Want::Drawn(_));
        self.chosen = self.runner.chosen().filter(|_| self.are_left);
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

/// How many tokens two sequences have in common from their beginning.
pub fn shared(a: &[TokenId], b: &[TokenId]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

fn keep_all(want: Want) -> Want {
    if want == Want::All { Want::All } else { Want::None }
}
