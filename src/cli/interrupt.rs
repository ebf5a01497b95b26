//! Ctrl-C, termination and a closed terminal as flags that long work looks at.
//! Never unwinds or kills by itself on the first signal. Surprising fact: the second one ends the process at once with
//! code 1, so a user is never trapped behind a slow drive.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::session::timeline::StopAsked;

/// How often, and how many times, it is looked whether a wait for a line has ended that was to end.
const LOOK_EVERY: Duration = Duration::from_millis(10);
const LOOKS_MAX: u32 = 1000;

/// Shared view of "somebody asked us to stop".
#[derive(Clone, Debug)]
pub struct Interrupt {
    asked: Arc<AtomicBool>,
    /// Whether the program waits for a line: then termination is passed on as the signal that ends the wait.
    waiting: Arc<AtomicBool>,
    /// Whether termination ever came: unlike Ctrl-C it asks the whole program to end.
    terminated: Arc<AtomicBool>,
}

impl Interrupt {
    /// Starts listening for SIGINT, SIGTERM and SIGHUP.
    ///
    /// # Errors
    /// When the system refuses the handlers.
    pub fn listen() -> std::io::Result<Self> {
        let [asked, waiting, terminated] = std::array::from_fn(|_| Arc::new(AtomicBool::new(false)));
        // The first handler of a signal takes it from the system; until the last is in place only this one knows of it.
        let early = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&early))?;
            // Order matters: the shutdown looks at the flag before this signal sets it, or the thread that hears of it below.
            signal_hook::flag::register_conditional_shutdown(signal, 1, Arc::clone(&asked))?;
        }
        signal_hook::flag::register(SIGINT, Arc::clone(&asked))?;
        let mut ends = Signals::new([SIGTERM, SIGHUP])?;
        if early.load(Ordering::Relaxed) {
            asked.store(true, Ordering::Relaxed);
        }
        let this = Self { asked, waiting, terminated };
        let shared = this.clone();
        thread::Builder::new().name("ds4-signals".into()).spawn(move || {
            for _ in ends.forever() {
                shared.terminate();
            }
        })?;
        Ok(this)
    }

    fn terminate(&self) {
        self.terminated.store(true, Ordering::Relaxed);
        if !self.waiting.load(Ordering::Relaxed) || kill_process(getpid(), Signal::INT).is_err() {
            self.asked.store(true, Ordering::Relaxed);
            return;
        }
        // The line editor takes a note of SIGINT, and looks at it when its read ends early. Only SIGWINCH does that to a read: signals that pass
        // through our handlers restart it. The note must be there before, and the read may not have begun yet.
        for _ in 0..LOOKS_MAX {
            if !self.waiting.load(Ordering::Relaxed) {
                return;
            }
            if self.is_set() {
                let _ = kill_process(getpid(), Signal::WINCH);
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    /// Whether a stop was asked for since the last `clear`.
    pub fn is_set(&self) -> bool {
        self.asked.load(Ordering::Relaxed)
    }

    /// [`Self::is_set`] for passes, which outlive no borrow of this.
    pub fn asked_in_passes(&self) -> StopAsked {
        let asked = Arc::clone(&self.asked);
        Arc::new(move || asked.load(Ordering::Relaxed))
    }

    /// Whether the program was asked to end; `clear` does not change it.
    pub fn is_terminated(&self) -> bool {
        self.terminated.load(Ordering::Relaxed)
    }

    /// Forgets an answered request, so that the next generation can run.
    pub fn clear(&self) {
        self.asked.store(false, Ordering::Relaxed);
    }

    /// Whether the program waits for a line, which SIGINT ends.
    pub fn waits(&self, waiting: bool) {
        self.waiting.store(waiting, Ordering::Relaxed);
    }
}
