//! What the front end does while a pass runs: progress, interruption, dumped logits.
//! Never touches the model. Surprising fact: a full disk under `--dump-logits` is told after the pass, because a watcher cannot fail one.

use std::io;

use crate::cli::interrupt::Interrupt;
use crate::cli::logits_file::LogitsFile;
use crate::cli::progress::{Meter, Unit};
use crate::session::timeline::{Flow, StopAsked, Watcher};

/// Watches the passes of one run.
pub struct RunWatcher<'a> {
    interrupt: &'a Interrupt,
    meter: Meter,
    logits: Option<&'a mut LogitsFile>,
    failure: Option<io::Error>,
}

impl<'a> RunWatcher<'a> {
    /// A watcher that only shows progress and looks for interruptions.
    pub fn new(interrupt: &'a Interrupt) -> Self {
        Self { interrupt, meter: Meter::new("prefill", Unit::Tokens), logits: None, failure: None }
    }

    /// Also writes all logits to `file`.
    pub fn dumping(mut self, file: Option<&'a mut LogitsFile>) -> Self {
        self.logits = file;
        self
    }

    /// What went wrong in the watcher itself.
    ///
    /// # Errors
    /// The first failure to write.
    pub fn finish(self) -> io::Result<()> {
        self.failure.map_or(Ok(()), Err)
    }
}

impl Watcher for RunWatcher<'_> {
    fn prefill(&mut self, done: usize, total: usize) -> Flow {
        self.meter.set(done as u64, total as u64);
        if self.interrupt.is_set() { Flow::Stop } else { Flow::Continue }
    }

    fn stop_asked(&self) -> Option<StopAsked> {
        Some(self.interrupt.asked_in_passes())
    }

    fn logits(&mut self, _position: usize, logits: &[f32]) {
        if let (Some(file), None) = (&mut self.logits, &self.failure) {
            self.failure = file.push(logits).err();
        }
    }
}
