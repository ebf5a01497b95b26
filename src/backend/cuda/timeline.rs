//! When the device had work: events with times around what it is given, summed over a pass, and drawn where somebody draws.
//! Never waits, but for the clock in front of a drawn pass. Surprising fact: times are told as F32 milliseconds between two events, too coarse
//! for a kernel after minutes, so the event that is tied to the host's clock is replaced by a later one every second.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, result};
use parking_lot::Mutex;

use super::device::{Device, Lane};
use crate::backend::BackendError;
use crate::obs::spans::{self, Detail, Row};

/// Age at which the event that is tied to the host's clock is replaced.
const CLOCK_MAX: Duration = Duration::from_secs(1);
/// Tries of tying the two clocks together; the one that took the least time is believed.
const CLOCK_TRIES: usize = 8;
/// The kernel that stamps the device's own clock, see kernels/expert_gate.cuh.
const STAMP: &str = "stamp_clock";
/// Stretches that may wait to be drawn before a look which of them have ended.
const PENDING_MAX: usize = 2048;

/// How closely the time of ops is taken.
const OFF: u8 = 0;
/// From the first op that is queued to the next place where the host waits, or a graph.
const STRETCHES: u8 = 1;
/// Each op, and each upload.
const OPS: u8 = 2;

/// An event, and the host's time when it came.
struct Anchor {
    event: CudaEvent,
    at: Instant,
}

/// Something that the device does between two events.
struct Stretch {
    what: Cow<'static, str>,
    detail: Detail,
    began: CudaEvent,
    ended: CudaEvent,
}

#[derive(Default)]
struct State {
    /// What was begun.
    open: Option<(CudaEvent, Cow<'static, str>)>,
    /// What ends in this order, if it has not: ops, and beside them uploads and the arranging of what they brought.
    ops: VecDeque<Stretch>,
    uploads: VecDeque<Stretch>,
    arranging: VecDeque<Stretch>,
    spare: Vec<CudaEvent>,
    /// Time of the ops of this pass that have ended.
    busy_ns: u64,
    anchor: Option<Anchor>,
    /// Ends of what was last drawn of each of the three: none of its row begins before.
    drawn: [Option<Instant>; 3],
    /// When the last kernel [`STAMP`] ran.
    stamped: Option<Instant>,
    /// What the next upload brings.
    next_upload: Detail,
}

/// The times of one device.
#[derive(Default)]
pub(super) struct Timeline {
    fineness: AtomicU8,
    state: Mutex<State>,
}

fn nanoseconds(began: &CudaEvent, ended: &CudaEvent) -> Option<i64> {
    // SAFETY: both events live, have times and have come; if not, the driver says so.
    let ms = unsafe { result::event::elapsed(began.cu_event(), ended.cu_event()) }.ok()?;
    Some((f64::from(ms) * 1e6) as i64)
}

impl State {
    fn event(&mut self, device: &Device) -> Result<CudaEvent, BackendError> {
        self.spare.pop().map_or_else(|| device.clock_event(), Ok)
    }

    /// When `event` came on the host's clock.
    fn moment(&self, event: &CudaEvent) -> Option<Instant> {
        let anchor = self.anchor.as_ref()?;
        let ns = nanoseconds(&anchor.event, event)?;
        let apart = Duration::from_nanos(ns.unsigned_abs());
        if ns < 0 { anchor.at.checked_sub(apart) } else { anchor.at.checked_add(apart) }
    }

    fn beside(&mut self, row: Row) -> &mut VecDeque<Stretch> {
        if row == Row::Arranging { &mut self.arranging } else { &mut self.uploads }
    }

    /// Takes stretches that have ended, oldest first; returns whether none is left.
    fn settle(&mut self) -> bool {
        while self.ops.front().is_some_and(|stretch| stretch.ended.is_complete()) {
            let Some(stretch) = self.ops.pop_front() else { break };
            self.busy_ns += nanoseconds(&stretch.began, &stretch.ended).map_or(0, |ns| ns.max(0) as u64);
            self.draw(stretch, Row::Gpu);
        }
        for row in [Row::Uploads, Row::Arranging] {
            while self.beside(row).front().is_some_and(|stretch| stretch.ended.is_complete()) {
                let Some(stretch) = self.beside(row).pop_front() else { break };
                self.draw(stretch, row);
            }
        }
        self.ops.is_empty()
    }

    fn draw(&mut self, Stretch { what, detail, began, ended }: Stretch, row: Row) {
        if spans::is_wanted()
            && let (Some(begun), Some(end)) = (self.moment(&began), self.moment(&ended))
        {
            // Neighbours may seem to overlap by what an event's time is rounded to.
            let last = &mut self.drawn[usize::from(row == Row::Uploads) + 2 * usize::from(row == Row::Arranging)];
            let begun = last.map_or(begun, |last| last.max(begun));
            let took = end.saturating_duration_since(begun);
            *last = Some(begun + took);
            spans::tell(row, &what, (begun, took), detail);
            if what == STAMP {
                self.stamped = Some(begun + took / 2);
            }
        }
        self.spare.extend([began, ended]);
    }
}

impl Device {
    fn fineness(&self) -> u8 {
        // Relaxed: set and used by the thread that computes.
        self.timeline.fineness.load(Ordering::Relaxed)
    }

    /// Whether the time of this pass is taken.
    pub(super) fn is_timed(&self) -> bool {
        self.fineness() != OFF
    }

    /// From now on the time of ops is taken, until [`Self::end_times`]: in stretches between the host's waits, or op by op where somebody draws.
    ///
    /// # Errors
    /// Failures of the device.
    pub fn begin_times(&self) -> Result<(), BackendError> {
        let is_drawn = spans::is_wanted();
        if is_drawn {
            self.set_clock()?;
        }
        {
            let mut state = self.timeline.state.lock();
            let state = &mut *state;
            state.settle();
            let beside = std::mem::take(&mut state.uploads).into_iter().chain(std::mem::take(&mut state.arranging));
            let old = std::mem::take(&mut state.ops).into_iter().chain(beside);
            state.spare.extend(old.flat_map(|stretch| [stretch.began, stretch.ended]));
            state.spare.extend(state.open.take().map(|(event, _)| event));
            state.busy_ns = 0;
        }
        self.timeline.fineness.store(if is_drawn { OPS } else { STRETCHES }, Ordering::Relaxed);
        Ok(())
    }

    /// How long the device had work since [`Self::begin_times`], in nanoseconds; `None` if it has not ended with it, or has failed.
    pub fn end_times(&self) -> Option<u64> {
        let closed = self.end_stretch();
        self.timeline.fineness.store(OFF, Ordering::Relaxed);
        closed.and_then(|()| self.bind()).ok()?;
        let mut state = self.timeline.state.lock();
        state.settle().then_some(state.busy_ns)
    }

    /// An op called `what` is about to be queued.
    pub(super) fn begin_op(&self, what: impl Into<Cow<'static, str>>) -> Result<(), BackendError> {
        if !self.is_timed() || self.is_recording() {
            return Ok(());
        }
        let mut state = self.timeline.state.lock();
        if state.open.is_none() {
            let event = state.event(self)?;
            self.mark(&event, Lane::Ops)?;
            state.open = Some((event, what.into()));
        }
        Ok(())
    }

    /// It was queued.
    pub(super) fn end_op(&self) -> Result<(), BackendError> {
        if self.fineness() == OPS { self.end_stretch() } else { Ok(()) }
    }

    /// What was begun ends with the ops so far.
    pub(super) fn end_stretch(&self) -> Result<(), BackendError> {
        if !self.is_timed() || self.is_recording() {
            return Ok(());
        }
        let mut state = self.timeline.state.lock();
        if let Some((began, what)) = state.open.take() {
            let ended = state.event(self)?;
            self.mark(&ended, Lane::Ops)?;
            state.ops.push_back(Stretch { what, detail: Detail::default(), began, ended });
            if state.ops.len().is_multiple_of(PENDING_MAX) {
                state.settle();
            }
        }
        Ok(())
    }

    /// The next upload beside the ops brings this expert, for whoever draws.
    pub fn name_upload(&self, layer: u16, expert: u16) {
        if self.fineness() == OPS {
            let named = Detail { layer: Some(layer), expert: Some(expert), ..Detail::default() };
            self.timeline.state.lock().next_upload = named;
        }
    }

    /// Events for the beginning and end of an upload that is drawn, or of a kernel that arranges what it brought.
    pub(super) fn beside_clock(&self) -> Result<Option<[CudaEvent; 2]>, BackendError> {
        if self.fineness() != OPS {
            return Ok(None);
        }
        let mut state = self.timeline.state.lock();
        Ok(Some([state.event(self)?, state.event(self)?]))
    }

    /// `what` was queued between the two: an upload of `bytes`, or a kernel that has to do with it.
    pub(super) fn note_beside(&self, row: Row, what: &'static str, [began, ended]: [CudaEvent; 2], bytes: usize) {
        let mut state = self.timeline.state.lock();
        let detail = Detail { bytes: bytes as u64, ..state.next_upload };
        state.beside(row).push_back(Stretch { what: Cow::Borrowed(what), detail, began, ended });
    }

    /// When the last [`STAMP`] of a drawn pass ran.
    pub(super) fn stamped(&self) -> Option<Instant> {
        self.timeline.state.lock().stamped
    }

    /// Ties the clocks of device and host together if that was not done within the last second. A stretch as long as the doubt that is left
    /// is drawn, and one as long as the clocks had gone apart.
    fn set_clock(&self) -> Result<(), BackendError> {
        let is_late = |anchor: &Anchor| anchor.at.elapsed() > CLOCK_MAX;
        if !self.timeline.state.lock().anchor.as_ref().is_none_or(is_late) || !self.has_ended()? {
            return Ok(());
        }
        let mut best: Option<(Duration, Anchor)> = None;
        for _ in 0..CLOCK_TRIES {
            let event = self.timeline.state.lock().event(self)?;
            let before = Instant::now();
            self.mark(&event, Lane::Ops)?;
            self.check("setting the clock", event.synchronize())?;
            let doubt = before.elapsed();
            if best.as_ref().is_none_or(|(least, _)| doubt < *least) {
                best = Some((doubt, Anchor { event, at: before + doubt / 2 }));
            }
        }
        let Some((doubt, anchor)) = best else { return Ok(()) };
        spans::tell(Row::Clock, "doubt", (anchor.at, doubt), Detail::default());
        let mut state = self.timeline.state.lock();
        state.settle();
        if let Some(expected) = state.moment(&anchor.event) {
            let apart = expected.max(anchor.at) - expected.min(anchor.at);
            spans::tell(Row::Clock, "drift", (anchor.at + doubt, apart), Detail::default());
        }
        state.anchor = Some(anchor);
        Ok(())
    }
}
