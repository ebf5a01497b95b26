//! Streams beside that of the ops: while ops are recorded, those that need nothing of one another run at once.
//! Never used by ops that are started one by one: then all are in one line, as their twin. Surprising fact: what was queued beside the ops is
//! waited for by the first op that needs it (`join`), at the latest when the recording ends.

use std::sync::Arc;

use cudarc::driver::result::DriverError;
use cudarc::driver::{CudaContext, CudaEvent, CudaStream};

/// Which of the streams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Side {
    /// Coefficients of hyper-connections, which nobody needs before the end of a sublayer.
    Coefficients = 0,
    /// What a model says to be aside.
    Ops = 1,
}

/// One stream, where it branches off and where it comes back.
pub(super) struct Branch {
    pub(super) stream: Arc<CudaStream>,
    forked: CudaEvent,
    joined: CudaEvent,
}

impl Branch {
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self, DriverError> {
        Ok(Self { stream: context.new_stream()?, forked: context.new_event(None)?, joined: context.new_event(None)? })
    }

    /// What is queued from the next [`Self::enter`] on is behind the ops of `ops` so far.
    pub(super) fn fork(&self, ops: &CudaStream) -> Result<(), DriverError> {
        self.forked.record(ops)
    }

    pub(super) fn enter(&self) -> Result<(), DriverError> {
        self.stream.wait(&self.forked)
    }

    /// Ops of `ops` from now on are behind what was queued here.
    pub(super) fn join(&self, ops: &CudaStream) -> Result<(), DriverError> {
        self.joined.record(&self.stream)?;
        ops.wait(&self.joined)
    }
}

/// Ops that are being recorded.
#[derive(Default)]
pub(super) struct Recording {
    /// What they are so far, in one number.
    pub(super) kind: u64,
    /// Whether the last one in line was a kernel.
    pub(super) is_behind_kernel: bool,
    /// Where ops go now, if not in line.
    pub(super) side: Option<Side>,
    /// Which branches have something that nobody waited for.
    open: [bool; 2],
}

impl Recording {
    /// An op called `what` is queued. Returns whether the one before it in its line was a kernel.
    pub(super) fn note(&mut self, what: &'static str, is_kernel: bool) -> bool {
        // Names are static: their addresses tell them apart.
        self.kind = (self.kind.rotate_left(5) ^ what.as_ptr() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        std::mem::replace(&mut self.is_behind_kernel, is_kernel)
    }

    /// Ops go to `side` from now on; what has to be handed to [`Self::leave`].
    pub(super) fn enter(&mut self, side: Side) -> bool {
        assert!(self.side.is_none(), "aside of what is aside");
        self.side = Some(side);
        self.open[side as usize] = true;
        self.note("enter", false)
    }

    /// Ops are in line again.
    pub(super) fn leave(&mut self, was_behind_kernel: bool) {
        self.side = None;
        self.note("leave", was_behind_kernel);
    }

    /// Whether there was something on `side`; it is waited for from now on.
    pub(super) fn join(&mut self, side: Side) -> bool {
        let was_open = std::mem::take(&mut self.open[side as usize]);
        if was_open {
            self.note("join", false);
        }
        was_open
    }
}
