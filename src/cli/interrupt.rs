//! Ctrl-C and termination as a flag that long work looks at.
//! Never unwinds or kills by itself on the first signal. Surprising fact: the second one ends the process at once with
//! code 1, so a user is never trapped behind a slow drive.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};

/// Shared view of "somebody asked us to stop".
#[derive(Clone, Debug)]
pub struct Interrupt {
    asked: Arc<AtomicBool>,
    /// Whether SIGTERM ends the process now, because nothing is running that would look at `asked`.
    idle: Arc<AtomicBool>,
    /// Whether SIGTERM ever came: unlike Ctrl-C it asks the whole program to end.
    terminated: Arc<AtomicBool>,
}

impl Interrupt {
    /// Starts listening for SIGINT and SIGTERM.
    ///
    /// # Errors
    /// When the system refuses the handlers.
    pub fn listen() -> std::io::Result<Self> {
        let [flag, idle, terminated] = std::array::from_fn(|_| Arc::new(AtomicBool::new(false)));
        // The first handler of a signal takes it from the system; until the last is in place only this one knows of it.
        let early = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&early))?;
        }
        signal_hook::flag::register_conditional_shutdown(SIGTERM, 1, Arc::clone(&idle))?;
        for signal in [SIGINT, SIGTERM] {
            // Order matters: the shutdown looks at the flag before this signal sets it.
            signal_hook::flag::register_conditional_shutdown(signal, 1, Arc::clone(&flag))?;
            signal_hook::flag::register(signal, Arc::clone(&flag))?;
        }
        signal_hook::flag::register(SIGTERM, Arc::clone(&terminated))?;
        if early.load(Ordering::Relaxed) {
            flag.store(true, Ordering::Relaxed);
        }
        Ok(Self { asked: flag, idle, terminated })
    }

    /// Whether a stop was asked for since the last `clear`.
    pub fn is_set(&self) -> bool {
        self.asked.load(Ordering::Relaxed)
    }

    /// Whether the program was asked to end; `clear` does not change it.
    pub fn is_terminated(&self) -> bool {
        self.terminated.load(Ordering::Relaxed)
    }

    /// Forgets an answered request, so that the next generation can run.
    pub fn clear(&self) {
        self.asked.store(false, Ordering::Relaxed);
    }

    /// Whether SIGTERM is to end the process at once, as while waiting for a line.
    pub fn end_at_once(&self, idle: bool) {
        self.idle.store(idle, Ordering::Relaxed);
    }
}
