//! Ops that are recorded and handed to the device together, as a graph: the device goes from one to the next by itself.
//! Never keeps what an op computes with: every recording is new, only the driver's form of it is used again. Surprising fact: recording an op
//! takes an eighth of the time of launching it (0.45 against 3.5 us, H200), so a token is recorded anew each time.

use std::borrow::Cow;
use std::collections::HashMap;

use cudarc::driver::{result, sys};
use parking_lot::Mutex;

use super::CudaBackend;
use super::device::{Device, Lane};
use crate::backend::BackendError;

/// Forms that are kept. A model has a few for each of its segments: some layers do more at every second or fourth position.
const KEPT_MAX: usize = 96;

/// Recorded ops.
pub(super) struct Recorded {
    graph: sys::CUgraph,
    /// Which kernels and copies, in order.
    pub(super) kind: u64,
    /// Its name where it is drawn.
    pub(super) what: Cow<'static, str>,
}

impl Recorded {
    /// What `end_capture` gave for ops of this kind.
    pub(super) fn new(graph: sys::CUgraph, kind: u64) -> Self {
        Self { graph, kind, what: Cow::Borrowed("layers") }
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        // SAFETY: owned; forms that were made of it live on.
        let _ = unsafe { result::graph::destroy(self.graph) };
    }
}

/// The driver's form of a recording.
struct Form(sys::CUgraphExec);

impl Form {
    fn new(device: &Device, recorded: &Recorded) -> Result<Self, BackendError> {
        device.bind()?;
        // SAFETY: the recording is alive.
        let made = unsafe { result::graph::instantiate(recorded.graph, sys::CUgraphInstantiate_flags(0)) };
        device.check("making a graph", made).map(Self)
    }
}

// SAFETY: a handle that any thread may use with the context current; the lock around it allows one at a time.
unsafe impl Send for Form {}

impl Drop for Form {
    fn drop(&mut self) {
        // SAFETY: owned; the driver lets a run that is under way end.
        let _ = unsafe { result::graph::exec_destroy(self.0) };
    }
}

/// Forms of earlier recordings, by place in the pass and kind.
#[derive(Default)]
pub(super) struct Segments {
    kept: Mutex<HashMap<(usize, u64), Form>>,
}

impl Segments {
    /// Starts `recorded` in the form of an earlier one at this place of the pass; `false` if there is none that it fits.
    pub(super) fn play_known(&self, device: &Device, place: usize, recorded: &Recorded) -> Result<bool, BackendError> {
        let mut kept = self.kept.lock();
        let Some(form) = kept.get(&(place, recorded.kind)) else { return Ok(false) };
        device.bind()?;
        let mut info = sys::CUgraphExecUpdateResultInfo {
            result: sys::CUgraphExecUpdateResult::CU_GRAPH_EXEC_UPDATE_SUCCESS,
            errorNode: std::ptr::null_mut(),
            errorFromNode: std::ptr::null_mut(),
        };
        // SAFETY: both are alive; runs that were started keep what they were started with.
        if unsafe { sys::cuGraphExecUpdate_v2(form.0, recorded.graph, &mut info) }.result().is_err() {
            kept.remove(&(place, recorded.kind));
            return Ok(false);
        }
        device.play(form.0, recorded.what.clone()).map(|()| true)
    }

    /// Starts `recorded` in a form of its own, which is kept. May wait for the device.
    pub(super) fn play_new(&self, device: &Device, place: usize, recorded: &Recorded) -> Result<(), BackendError> {
        let form = Form::new(device, recorded)?;
        let mut kept = self.kept.lock();
        if kept.len() >= KEPT_MAX {
            kept.clear();
        }
        device.play(form.0, recorded.what.clone())?;
        kept.insert((place, recorded.kind), form);
        Ok(())
    }
}

impl CudaBackend {
    /// Seconds that the ops which `queue` queues take on the device, recorded and played one recording behind another: the median of `times` of
    /// them, between events. Of the ops only the kernels whose names begin with `only` are recorded. What they compute is as if they had run
    /// that often.
    ///
    /// # Errors
    /// Failures of the device; ops that cannot be recorded.
    pub fn replayed_seconds(
        &self,
        times: usize,
        only: Option<&'static str>,
        queue: impl FnOnce(),
    ) -> Result<f64, BackendError> {
        let device = self.device();
        device.begin_recording()?;
        only.into_iter().for_each(|only| device.sides.record_only(only));
        queue();
        let recorded = device.end_recording()?;
        let form = Form::new(device, &recorded)?;
        let events = (0..=times).map(|_| device.clock_event()).collect::<Result<Vec<_>, _>>()?;
        // The first one is not timed: behind it the host is ahead of the device, so nothing of starting is in the others.
        for event in &events {
            device.play(form.0, recorded.what.clone())?;
            device.mark(event, Lane::Ops)?;
        }
        device.wait()?;
        let between = |pair: &[cudarc::driver::CudaEvent]| {
            // SAFETY: both events live, have times and have come.
            unsafe { result::event::elapsed(pair[0].cu_event(), pair[1].cu_event()) }
        };
        let ms = events.windows(2).map(between).collect::<Result<Vec<f32>, _>>();
        let mut ms = device.check("taking the time of a graph", ms)?;
        ms.sort_by(f32::total_cmp);
        Ok(ms.get(ms.len() / 2).map_or(0.0, |ms| f64::from(*ms) / 1e3))
    }
}
