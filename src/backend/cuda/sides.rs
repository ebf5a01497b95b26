//! Streams beside that of the ops: while ops are recorded, those that need nothing of one another run at once.
//! Never used by ops that are started one by one: then all are in one line, as their twin. Surprising fact: what was queued beside the ops is
//! waited for by the first op that needs it (`join`), at the latest when the recording ends.

use std::sync::Arc;

use cudarc::driver::result::DriverError;
use cudarc::driver::{CudaContext, CudaEvent, CudaStream};
use parking_lot::Mutex;

use super::device::Device;
use crate::backend::BackendError;

/// Which of the streams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Side {
    /// Coefficients of hyper-connections, which nobody needs before the end of a sublayer.
    Coefficients = 0,
    /// What a model says to be aside.
    Ops = 1,
}

/// One stream, where it branches off and where it comes back.
struct Branch {
    stream: Arc<CudaStream>,
    forked: CudaEvent,
    joined: CudaEvent,
}

impl Branch {
    fn new(context: &Arc<CudaContext>) -> Result<Self, DriverError> {
        Ok(Self { stream: context.new_stream()?, forked: context.new_event(None)?, joined: context.new_event(None)? })
    }

    /// What is queued from the next [`Self::enter`] on is behind the ops of `ops` so far.
    fn fork(&self, ops: &CudaStream) -> Result<(), DriverError> {
        self.forked.record(ops)
    }

    fn enter(&self) -> Result<(), DriverError> {
        self.stream.wait(&self.forked)
    }

    /// Ops of `ops` from now on are behind what was queued here.
    fn join(&self, ops: &CudaStream) -> Result<(), DriverError> {
        self.joined.record(&self.stream)?;
        ops.wait(&self.joined)
    }
}

/// Ops that are being recorded.
#[derive(Default)]
struct Recording {
    /// What they are so far, in one number.
    kind: u64,
    /// Whether the last one in line was a kernel.
    is_behind_kernel: bool,
    /// Where ops go now, if not in line.
    side: Option<Side>,
    /// Which branches have something that nobody waited for.
    open: [bool; 2],
    /// How the names of kernels begin that are recorded; all if there is none.
    only: Option<&'static str>,
}

impl Recording {
    /// An op called `what` is queued. Returns whether the one before it in its line was a kernel.
    fn note(&mut self, what: &'static str, is_kernel: bool) -> bool {
        // Names are static: their addresses tell them apart.
        self.kind = (self.kind.rotate_left(5) ^ what.as_ptr() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        std::mem::replace(&mut self.is_behind_kernel, is_kernel)
    }

    fn leaves_out(&self, kernel: &str) -> bool {
        self.only.is_some_and(|only| !kernel.starts_with(only))
    }

    /// Ops go to `side` from now on; what has to be handed to [`Self::leave`].
    fn enter(&mut self, side: Side) -> bool {
        assert!(self.side.is_none(), "aside of what is aside");
        self.side = Some(side);
        self.open[side as usize] = true;
        self.note("enter", false)
    }

    /// Ops are in line again.
    fn leave(&mut self, was_behind_kernel: bool) {
        self.side = None;
        self.note("leave", was_behind_kernel);
    }

    /// Whether there was something on `side`; it is waited for from now on.
    fn join(&mut self, side: Side) -> bool {
        let was_open = std::mem::take(&mut self.open[side as usize]);
        if was_open {
            self.note("join", false);
        }
        was_open
    }
}

/// The line of ops and what is beside it.
pub(super) struct Sides {
    line: Arc<CudaStream>,
    /// By [`Side`].
    branches: [Branch; 2],
    /// While ops are recorded.
    recording: Mutex<Option<Recording>>,
}

impl Sides {
    pub(super) fn new(context: &Arc<CudaContext>, line: &Arc<CudaStream>) -> Result<Self, DriverError> {
        let branches = [Branch::new(context)?, Branch::new(context)?];
        Ok(Self { line: Arc::clone(line), branches, recording: Mutex::new(None) })
    }

    /// Where ops go now.
    pub(super) fn ops(&self) -> &CudaStream {
        let side = self.recording.lock().as_ref().and_then(|recording| recording.side);
        side.map_or(&self.line, |side| &self.branches[side as usize].stream)
    }

    /// Ops are recorded from now on.
    pub(super) fn begin(&self) {
        *self.recording.lock() = Some(Recording::default());
    }

    /// Of what is being recorded, kernels whose names do not begin with `only` are left out.
    pub(super) fn record_only(&self, only: &'static str) {
        if let Some(recording) = &mut *self.recording.lock() {
            recording.only = Some(only);
        }
    }

    /// Whether `kernel` is not to be queued.
    pub(super) fn leaves_out(&self, kernel: &str) -> bool {
        self.recording.lock().as_ref().is_some_and(|recording| recording.leaves_out(kernel))
    }

    /// Ops are not recorded any more; what they were, in one number.
    pub(super) fn end(&self) -> u64 {
        self.recording.lock().take().map_or(0, |recording| recording.kind)
    }

    pub(super) fn is_recording(&self) -> bool {
        self.recording.lock().is_some()
    }

    /// An op called `what` is queued. Returns whether it may follow a kernel before that has quite ended: in a graph only what is behind one.
    pub(super) fn note(&self, what: &'static str, is_kernel: bool) -> bool {
        self.recording.lock().as_mut().is_none_or(|recording| recording.note(what, is_kernel))
    }

    fn leave(&self, was_behind_kernel: bool) {
        if let Some(recording) = &mut *self.recording.lock() {
            recording.leave(was_behind_kernel);
        }
    }
}

impl Device {
    /// What [`Self::beside`] queues on `side` next is behind the ops so far. Nothing, unless ops are recorded.
    pub(super) fn fork(&self, side: Side) -> Result<(), BackendError> {
        if !self.is_recording() {
            return Ok(());
        }
        self.bind()?;
        self.check("branching off", self.sides.branches[side as usize].fork(&self.sides.line))
    }

    /// Queues what `f` does on `side`, behind the last [`Self::fork`] and what went there before, instead of behind all ops; in line with them unless
    /// ops are recorded.
    pub(super) fn beside<E: From<BackendError>>(&self, side: Side, f: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let entered = self.sides.recording.lock().as_mut().map(|recording| recording.enter(side));
        let Some(was_behind_kernel) = entered else { return f() };
        let entered = self.check("branching off", self.sides.branches[side as usize].enter());
        let done = entered.map_err(E::from).and_then(|()| f());
        self.sides.leave(was_behind_kernel);
        done
    }

    /// Ops from now on are behind what went to `side`.
    pub(super) fn join(&self, side: Side) -> Result<(), BackendError> {
        if !self.sides.recording.lock().as_mut().is_some_and(|recording| recording.join(side)) {
            return Ok(());
        }
        self.bind()?;
        self.check("coming back from a branch", self.sides.branches[side as usize].join(&self.sides.line))
    }

    /// Whether ops go to a side now.
    pub(super) fn is_beside(&self) -> bool {
        self.sides.recording.lock().as_ref().is_some_and(|recording| recording.side.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_branch_begins_without_overlap_and_leaves_the_line_as_it_was() {
        let mut r = Recording::default();
        assert!(!r.note("first", true));
        let before = r.enter(Side::Ops);
        assert!(before && !r.note("aside", true), "the first op of a branch is behind no kernel of its own line");
        assert!(r.note("aside", true));
        r.leave(before);
        assert!(r.note("second", true), "the line goes on behind its own kernel");
        assert!(r.join(Side::Ops) && !r.join(Side::Ops) && !r.join(Side::Coefficients));
        assert!(!r.note("third", true), "what joins waits for both to have ended");
    }

    #[test]
    fn kernels_that_are_not_asked_for_are_left_out() {
        let mut r = Recording::default();
        assert!(!r.leaves_out("experts_down_q2_k"));
        r.only = Some("experts_down");
        assert!(!r.leaves_out("experts_down_q2_k") && r.leaves_out("quantise_256"));
    }

    #[test]
    fn recordings_with_and_without_a_branch_are_of_different_kinds() {
        let kind = |is_aside: bool| {
            let mut r = Recording::default();
            r.note("first", true);
            let before = is_aside.then(|| r.enter(Side::Ops));
            r.note("second", true);
            if let Some(before) = before {
                r.leave(before);
            }
            r.kind
        };
        assert_ne!(kind(true), kind(false));
    }
}
