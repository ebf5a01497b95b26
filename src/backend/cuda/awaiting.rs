//! While kernels of a device may be waiting for the host: what the driver must not be asked for then, and small uploads all the same.
//! Never waits for the device. Surprising fact: memory that is given back meanwhile is kept and freed afterwards, since the driver frees only
//! when all kernels have ended, and the thread that could let them end may be the one that asks.

use std::thread::{self, ThreadId};

use parking_lot::{Condvar, Mutex};

use crate::backend::BackendError;

/// Bytes of small uploads that fit beside one wait: one row's ids and the n-gram values of its tables take a few percent of it.
pub(super) const BOUNCE: usize = 4 << 20;

#[derive(Default)]
struct State {
    /// The thread that will let the kernels go on.
    holder: Option<ThreadId>,
    /// Memory to free afterwards.
    given: Vec<u64>,
    /// Bytes of the buffer for small uploads that were used.
    used: usize,
}

/// Who answers the kernels of a device, if any may be waiting.
#[derive(Default)]
pub(super) struct Awaiting {
    state: Mutex<State>,
    ended: Condvar,
}

fn refused(what: &str, reason: &str) -> BackendError {
    BackendError::Device { backend: "cuda", what: what.to_owned(), reason: reason.to_owned() }
}

impl Awaiting {
    /// From now on this thread answers.
    pub(super) fn begin(&self) {
        let mut state = self.state.lock();
        assert!(state.holder.is_none(), "one pass at a time waits for the host");
        state.holder = Some(thread::current().id());
        state.used = 0;
    }

    /// Nothing waits any more. Returns what is to be freed.
    pub(super) fn end(&self) -> Vec<u64> {
        let mut state = self.state.lock();
        state.holder = None;
        self.ended.notify_all();
        std::mem::take(&mut state.given)
    }

    /// Returns once the driver may be asked for something that waits for all kernels.
    ///
    /// # Errors
    /// On the thread that answers: it would wait for itself.
    pub(super) fn take_turn(&self, what: &str) -> Result<(), BackendError> {
        let mut state = self.state.lock();
        while let Some(holder) = state.holder {
            if holder == thread::current().id() {
                return Err(refused(what, "kernels wait for this thread to bring experts"));
            }
            self.ended.wait(&mut state);
        }
        Ok(())
    }

    /// Keeps `at` for later, if it cannot be freed now.
    pub(super) fn keeps(&self, at: u64) -> bool {
        let mut state = self.state.lock();
        let is_waiting = state.holder.is_some();
        if is_waiting {
            state.given.push(at);
        }
        is_waiting
    }

    /// Where in the buffer `len` bytes may be put so that their upload needs no help of the driver; `None` when it may help.
    ///
    /// # Errors
    /// A full buffer.
    pub(super) fn room(&self, len: usize) -> Result<Option<usize>, BackendError> {
        let mut state = self.state.lock();
        if state.holder != Some(thread::current().id()) {
            return Ok(None);
        }
        let at = state.used.next_multiple_of(16);
        if len > BOUNCE - at.min(BOUNCE) {
            return Err(refused("an upload", "more bytes than fit beside kernels that wait for experts"));
        }
        state.used = at + len;
        Ok(Some(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_thread_that_answers_is_refused_and_others_wait() {
        let awaiting = Awaiting::default();
        awaiting.take_turn("x").unwrap();
        assert!(!awaiting.keeps(16));
        awaiting.begin();
        assert!(awaiting.take_turn("allocating").unwrap_err().to_string().contains("allocating"));
        assert!(awaiting.keeps(32));
        thread::scope(|scope| {
            let other = scope.spawn(|| awaiting.take_turn("x").is_ok());
            assert_eq!(awaiting.end(), [32]);
            assert!(other.join().unwrap());
        });
        assert!(!awaiting.keeps(48));
    }

    #[test]
    fn small_uploads_share_one_buffer_and_a_full_one_is_told() {
        let awaiting = Awaiting::default();
        assert_eq!(awaiting.room(8).unwrap(), None, "the driver may help");
        awaiting.begin();
        assert_eq!(awaiting.room(8).unwrap(), Some(0));
        assert_eq!(awaiting.room(100).unwrap(), Some(16));
        assert_eq!(awaiting.room(BOUNCE - 128).unwrap(), Some(128));
        assert!(awaiting.room(1).is_err());
        assert!(awaiting.room(usize::MAX).is_err());
        awaiting.end();
        awaiting.begin();
        assert_eq!(awaiting.room(1).unwrap(), Some(0));
    }
}
