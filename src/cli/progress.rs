//! Progress of long steps: a bar on a terminal, a plain line now and then elsewhere.
//! Never writes to stdout. Surprising fact: steps shorter than half a second show nothing, so small models stay quiet.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::cli::output::note;

/// Steps faster than this are not worth a line.
const QUIET: Duration = Duration::from_millis(500);
/// Distance of plain lines.
const PLAIN_EVERY: Duration = Duration::from_secs(2);

/// What the numbers of a meter count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unit {
    Bytes,
    Tokens,
}

/// One running step.
pub struct Meter {
    label: &'static str,
    unit: Unit,
    started: Instant,
    shown: Option<Instant>,
    bar: Option<ProgressBar>,
}

impl Meter {
    /// A meter for `label`; nothing is shown yet.
    pub fn new(label: &'static str, unit: Unit) -> Self {
        Self { label, unit, started: Instant::now(), shown: None, bar: None }
    }

    /// Says that `done` of `total` is behind us.
    pub fn set(&mut self, done: u64, total: u64) {
        let now = Instant::now();
        if now - self.started < QUIET {
            return;
        }
        if std::io::stderr().is_terminal() {
            let bar = self.bar.get_or_insert_with(|| terminal_bar(self.label, self.unit, total));
            bar.set_length(total);
            bar.set_position(done);
            if done >= total {
                // The line belongs to the answer now.
                self.clear();
            }
        } else if self.shown.is_none_or(|shown| now - shown >= PLAIN_EVERY) {
            self.shown = Some(now);
            note(&format!("{}: {} of {}", self.label, self.amount(done), self.amount(total)));
        }
    }

    /// Takes a bar away, for words that follow.
    pub fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    fn amount(&self, n: u64) -> String {
        match self.unit {
            Unit::Bytes => crate::units::Bytes(n).to_string(),
            Unit::Tokens => format!("{n} tokens"),
        }
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.clear();
    }
}

fn terminal_bar(label: &'static str, unit: Unit, total: u64) -> ProgressBar {
    let numbers = match unit {
        Unit::Bytes => "{binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec}",
        Unit::Tokens => "{pos}/{len} tokens {per_sec}",
    };
    let style = ProgressStyle::with_template(&format!("ds4: {{msg}} [{{bar:30}}] {numbers} eta {{eta}}"))
        .expect("the template is a constant")
        .progress_chars("=> ");
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(8));
    bar.set_style(style);
    bar.set_message(label);
    bar
}
