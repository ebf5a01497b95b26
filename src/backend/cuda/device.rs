//! One GPU: its context, its streams of kernels and of uploads, memory and the launch of kernels, each counted.
//! Never waits except where a caller asks for bytes. Surprising fact: an error of a kernel shows at a later call, so the names of the
//! kernels since the last wait are kept and told with it.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::os::raw::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, sys};
use parking_lot::Mutex;

use super::awaiting::{Awaiting, BOUNCE};
use super::faults::{self, Version};
use super::modules::{LoadError, Modules};
use super::segments::Recorded;
use super::sides::{Side, Sides};
use super::timeline::Timeline;
use crate::backend::BackendError;
use crate::obs::spans::{self, Detail, Row};

/// Threads of a small kernel, for each multiprocessor. Where several kernels wait for room a small one goes first: others wait for it, and nobody misses
/// what it takes.
const SMALL_THREADS: u64 = 256;
/// Kernels that are named with an error.
const RECENT: usize = 6;

/// Why there is no GPU to compute on.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("no CUDA driver is installed (libcuda.so.1 is not found)")]
    NoDriver,
    #[error("the driver offers CUDA {found}, and this program needs {needed} or later; update the driver")]
    DriverTooOld { found: Version, needed: Version },
    #[error("the CUDA driver does not start: {reason}; {hint}")]
    Init { reason: String, hint: &'static str },
    #[error("there is no CUDA device {wanted}: the driver shows {found}, counted from 0")]
    NoDevice { wanted: usize, found: usize },
    #[error("CUDA device {ordinal} cannot be used: {reason}; {hint}")]
    Context { ordinal: usize, reason: String, hint: &'static str },
    #[error(
        "CUDA device {ordinal} ({name}) has compute capability {major}.{minor}, and the kernels need {}.{} or later; name another device with --gpu-devices",
        faults::CAPABILITY_LEAST.0, faults::CAPABILITY_LEAST.1
    )]
    TooOld { ordinal: usize, name: String, major: u32, minor: u32 },
    #[error(transparent)]
    Kernels(#[from] LoadError),
}

/// What a GPU is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Properties {
    pub name: String,
    /// Number of the device as the driver counts, from 0.
    pub ordinal: usize,
    /// Compute capability.
    pub capability: (u32, u32),
    pub multiprocessors: usize,
    /// Whether host and device share one memory.
    pub is_integrated: bool,
    pub memory_bytes: u64,
    /// Most shared memory of a block, in bytes.
    pub shared_max: usize,
}

/// What a device has done, since it was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DeviceCounters {
    pub launches: u64,
    /// Graphs started: recorded kernels and copies that the device runs one after another.
    pub graphs: u64,
    /// Tokens chosen on the device.
    pub choices: u64,
    /// Bytes of experts that kernels read in the host's memory.
    pub in_place_bytes: u64,
    /// Times that the host waited for the stream.
    pub waits: u64,
    /// How long it waited, for a router's choice too, in nanoseconds.
    pub wait_ns: u64,
    pub upload_bytes: u64,
    /// Of those, bytes that came beside the kernels.
    pub aside_bytes: u64,
    pub download_bytes: u64,
    /// Uploads beside the kernels whose time was taken: bytes and nanoseconds.
    pub timed_upload_bytes: u64,
    pub timed_upload_ns: u64,
}

#[derive(Default)]
pub(super) struct Counts {
    launches: AtomicU64,
    graphs: AtomicU64,
    choices: AtomicU64,
    in_place_bytes: AtomicU64,
    waits: AtomicU64,
    wait_ns: AtomicU64,
    pub(super) upload_bytes: AtomicU64,
    aside_bytes: AtomicU64,
    pub(super) download_bytes: AtomicU64,
    timed_upload_bytes: AtomicU64,
    timed_upload_ns: AtomicU64,
}

/// Which kernels a kernel is in order with.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Lane {
    /// The ops.
    #[default]
    Ops,
    /// What arranges weights for ops that wait for them.
    Arranging,
}

/// Host memory that small uploads pass through while kernels wait for the host.
struct Bounce {
    start: usize,
}

impl Drop for Bounce {
    fn drop(&mut self) {
        // SAFETY: from `malloc_host` in `Device::open`; the streams that read it are dropped before.
        let _ = unsafe { result::free_host(std::ptr::with_exposed_provenance_mut::<c_void>(self.start)) };
    }
}

/// An open device.
pub struct Device {
    // In the order in which they must go.
    pub(super) timeline: Timeline,
    modules: Modules,
    stream: Arc<CudaStream>,
    /// Uploads that kernels need not wait for before they are used.
    uploads: Arc<CudaStream>,
    arranging: Arc<CudaStream>,
    /// Where ops go while they are recorded.
    pub(super) sides: Sides,
    bounce: Bounce,
    pub(super) awaiting: Awaiting,
    /// Comes when ops that small uploads were for, while others waited, have ended.
    awaited: CudaEvent,
    context: Arc<CudaContext>,
    properties: Properties,
    /// The priority of small kernels; 0 is that of all others.
    priority: i32,
    pub(super) counts: Counts,
    /// Ring of kernel names, and how many were launched since the last wait.
    recent: Mutex<([&'static str; RECENT], usize)>,
    /// The first error after which this process cannot use the device any more.
    lost: OnceLock<String>,
}

pub(super) fn text(error: DriverError) -> String {
    let name = error.error_name().ok().and_then(|n| n.to_str().ok()).unwrap_or("unknown error");
    let says = error.error_string().ok().and_then(|n| n.to_str().ok()).unwrap_or("no text");
    format!("{says} ({name})")
}

impl Device {
    /// Device number `ordinal` with all kernels loaded. `text_only` compiles them from their text even where the program holds them
    /// compiled.
    ///
    /// # Errors
    /// No driver, no such device, a device that is taken, kernels that cannot be loaded.
    pub fn open(ordinal: usize, text_only: bool) -> Result<Self, OpenError> {
        // SAFETY: only looks for the library.
        if !unsafe { sys::is_culib_present() } {
            return Err(OpenError::NoDriver);
        }
        if let Some(found) = Version::of_driver().filter(|found| *found < faults::DRIVER_LEAST) {
            return Err(OpenError::DriverTooOld { found, needed: faults::DRIVER_LEAST });
        }
        let silent = |e: DriverError| OpenError::Init { reason: text(e), hint: faults::start_hint(e.0) };
        result::init().map_err(silent)?;
        let found = result::device::get_count().map_err(silent)?.max(0) as usize;
        if ordinal >= found {
            return Err(OpenError::NoDevice { wanted: ordinal, found });
        }
        let refused = |e: DriverError| OpenError::Context { ordinal, reason: text(e), hint: faults::use_hint(e.0) };
        let context = CudaContext::new(ordinal).map_err(refused)?;
        let stream = context.new_stream().map_err(refused)?;
        let uploads = context.new_stream().map_err(refused)?;
        let arranging = context.new_stream().map_err(refused)?;
        let sides = Sides::new(&context, &stream).map_err(refused)?;
        let awaited = context.new_event(None).map_err(refused)?;
        // SAFETY: a plain allocation, given back once, when the device is dropped.
        let bounce = unsafe { result::malloc_host(BOUNCE, 0) }.map_err(refused)?;
        let bounce = Bounce { start: bounce.expose_provenance() };
        let properties = properties(&context).map_err(refused)?;
        let priority = greatest_priority().map_err(refused)?;
        let (major, minor) = properties.capability;
        if properties.capability < faults::CAPABILITY_LEAST {
            return Err(OpenError::TooOld { ordinal, name: properties.name, major, minor });
        }
        let modules = Modules::load(properties.capability, text_only)?;
        let recent = Mutex::new(([""; RECENT], 0));
        let (counts, awaiting, lost) = (Counts::default(), Awaiting::default(), OnceLock::new());
        Ok(Self {
            timeline: Timeline::default(),
            modules,
            stream,
            uploads,
            arranging,
            sides,
            bounce,
            awaiting,
            awaited,
            context,
            properties,
            priority,
            counts,
            recent,
            lost,
        })
    }

    /// What the device is.
    pub fn properties(&self) -> &Properties {
        &self.properties
    }

    /// How the kernels came: for reports.
    pub fn kernels_from(&self) -> &'static str {
        self.modules.origin()
    }

    /// What was done so far.
    pub fn counters(&self) -> DeviceCounters {
        let get = |n: &AtomicU64| n.load(Ordering::Relaxed);
        let c = &self.counts;
        DeviceCounters {
            launches: get(&c.launches),
            graphs: get(&c.graphs),
            choices: get(&c.choices),
            in_place_bytes: get(&c.in_place_bytes),
            waits: get(&c.waits),
            wait_ns: get(&c.wait_ns),
            upload_bytes: get(&c.upload_bytes),
            aside_bytes: get(&c.aside_bytes),
            download_bytes: get(&c.download_bytes),
            timed_upload_bytes: get(&c.timed_upload_bytes),
            timed_upload_ns: get(&c.timed_upload_ns),
        }
    }

    /// A token is chosen here and not by the host.
    pub(super) fn count_choice(&self) {
        self.counts.choices.fetch_add(1, Ordering::Relaxed);
    }

    /// Kernels in `lane` up to `event` read `bytes` of registered memory: who waits for uploads waits for them.
    pub(super) fn note_in_place(&self, bytes: usize, event: &CudaEvent, lane: Lane) -> Result<(), BackendError> {
        self.counts.in_place_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.mark(event, lane)?;
        self.check("waiting for kernels", self.uploads.wait(event))
    }

    /// Free and total bytes of the device's memory.
    pub fn memory(&self) -> Result<(u64, u64), BackendError> {
        self.bind()?;
        let (free, total) = self.check("asking for free memory", self.context.mem_get_info())?;
        Ok((free as u64, total as u64))
    }

    /// Makes the context that of this thread: needed before anything else on it.
    pub(super) fn bind(&self) -> Result<(), BackendError> {
        if let Some(reason) = self.lost.get() {
            return Err(BackendError::DeviceLost { backend: "cuda", reason: format!("the GPU is lost: {reason}") });
        }
        self.check("binding the device to a thread", self.context.bind_to_thread())
    }

    pub(super) fn raw_stream(&self) -> sys::CUstream {
        self.sides.ops().cu_stream()
    }

    pub(super) fn uploads(&self) -> &CudaStream {
        &self.uploads
    }

    fn lane(&self, lane: Lane) -> &CudaStream {
        match lane {
            Lane::Ops => self.sides.ops(),
            Lane::Arranging => &self.arranging,
        }
    }

    /// From now on ops are recorded instead of started, until [`Self::end_recording`].
    pub(super) fn begin_recording(&self) -> Result<(), BackendError> {
        self.bind()?;
        // Relaxed: other lanes go on, also from this thread.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream lives as long as `self`.
        self.check("recording", unsafe { result::stream::begin_capture(self.raw_stream(), mode) })?;
        self.sides.begin();
        Ok(())
    }

    /// What was recorded.
    pub(super) fn end_recording(&self) -> Result<Recorded, BackendError> {
        self.bind()?;
        let joined = self.join(Side::Coefficients).and_then(|()| self.join(Side::Ops));
        let kind = self.sides.end();
        // SAFETY: the stream lives as long as `self`.
        let graph = self.check("recording", unsafe { result::stream::end_capture(self.raw_stream()) })?;
        joined?;
        Ok(Recorded::new(graph, kind))
    }

    /// Whether ops are being recorded.
    pub(super) fn is_recording(&self) -> bool {
        self.sides.is_recording()
    }

    /// An op called `what` is queued. Returns whether it may follow a kernel before that has quite ended: in a graph only what is behind a kernel.
    fn note(&self, what: &'static str, is_kernel: bool) -> bool {
        self.sides.note(what, is_kernel)
    }

    /// Starts a graph called `what` behind the ops so far.
    pub(super) fn play(&self, graph: sys::CUgraphExec, what: Cow<'static, str>) -> Result<(), BackendError> {
        self.end_stretch()?;
        self.begin_op(what)?;
        self.counts.graphs.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's graph is alive; the driver keeps what a run needs.
        self.check("starting a graph", unsafe { result::graph::launch(graph, self.raw_stream()) })?;
        self.end_stretch()
    }

    /// Whether nothing is under way on `stream`.
    fn is_idle(&self, stream: &CudaStream) -> Result<bool, BackendError> {
        self.bind()?;
        // SAFETY: the stream lives as long as `self`.
        match unsafe { sys::cuStreamQuery(stream.cu_stream()) }.result() {
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            other => self.check("kernels", other).map(|()| true),
        }
    }

    /// Whether all ops have ended.
    pub(super) fn has_ended(&self) -> Result<bool, BackendError> {
        self.is_idle(&self.stream)
    }

    /// Whether all uploads of [`Self::upload_span`] have ended.
    pub(super) fn has_uploaded(&self) -> Result<bool, BackendError> {
        self.is_idle(&self.uploads)
    }

    /// From now on ops may wait for this thread, until [`Self::end_awaiting`]: nothing that waits for the device is done meanwhile. What small
    /// uploads of an earlier time pass through is free again.
    pub(super) fn begin_awaiting(&self) -> Result<(), BackendError> {
        // The ops of that time have ended for whoever has taken a token that they led to. Those queued since use no memory of its.
        if !self.has_come(&self.awaited)? {
            self.wait()?;
        }
        self.awaiting.begin();
        Ok(())
    }

    /// No op waits for the host any more, or none will when those queued so far have ended.
    pub(super) fn end_awaiting(&self) {
        // A device that failed says so to whoever asks it next.
        let _ = self.mark(&self.awaited, Lane::Ops);
        for at in self.awaiting.end() {
            self.give(at);
        }
    }

    /// Waits for all streams, for a pass that has failed.
    pub fn settle(&self) {
        if self.bind().is_ok() {
            for stream in [&self.uploads, &self.arranging, &self.stream] {
                // SAFETY: the stream lives as long as `self`. A device that failed has nothing under way.
                let _ = unsafe { result::stream::synchronize(stream.cu_stream()) };
            }
        }
    }

    /// `result`, with what was being done and which kernels were under way.
    pub(super) fn check<T>(&self, what: &str, result: Result<T, DriverError>) -> Result<T, BackendError> {
        result.map_err(|error| {
            let mut reason = text(error);
            let recent = self.recent.lock();
            let known = recent.1.min(RECENT);
            if known > 0 {
                let names = (0..known).map(|back| recent.0[(recent.1 - 1 - back) % RECENT]);
                let names: Vec<_> = names.collect();
                let _ = write!(reason, "; kernels under way, newest first: {}", names.join(", "));
            }
            if faults::is_lasting(error.0) {
                let reason = format!("{what} failed: {reason}");
                self.lost.get_or_init(|| reason.clone());
                return BackendError::DeviceLost { backend: "cuda", reason };
            }
            let (backend, what) = ("cuda", what.to_owned());
            match error.0 {
                sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => BackendError::Full { backend, what, reason },
                _ => BackendError::Device { backend, what, reason },
            }
        })
    }

    /// `bytes` of memory, not zeroed.
    pub(super) fn take(&self, what: &'static str, bytes: usize) -> Result<u64, BackendError> {
        self.bind()?;
        self.awaiting.take_turn("allocating memory")?;
        // SAFETY: a plain allocation; the caller owns it and gives it back once.
        match unsafe { result::malloc_sync(bytes.max(16)) } {
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                Err(BackendError::OutOfMemory { backend: "cuda", what, bytes: bytes as u64 })
            }
            other => self.check("allocating memory", other),
        }
    }

    /// Gives memory of [`Self::take`] back, after everything that was launched before.
    pub(super) fn give(&self, at: u64) {
        if !self.awaiting.keeps(at) && self.bind().is_ok() {
            // SAFETY: `at` came from `take` and nobody uses it any more; the driver waits for kernels that do. After a lost device
            // there is nothing left to free.
            let _ = unsafe { result::free_sync(at) };
        }
    }

    pub(super) fn zero(&self, at: u64, bytes: usize) -> Result<(), BackendError> {
        if bytes == 0 {
            return Ok(());
        }
        self.bind()?;
        self.note("zero", false);
        self.begin_op("zero")?;
        // SAFETY: the caller owns `bytes` at `at`.
        self.check("clearing memory", unsafe { result::memset_d8_async(at, 0, bytes, self.raw_stream()) })?;
        self.end_op()
    }

    /// Host to device, in stream order. `src` may be changed as soon as this returns, unless it is registered with the device.
    pub(super) fn upload(&self, src: &[u8], at: u64) -> Result<(), BackendError> {
        if src.is_empty() {
            return Ok(());
        }
        self.bind()?;
        self.note("upload", false);
        self.begin_op("upload")?;
        self.counts.upload_bytes.fetch_add(src.len() as u64, Ordering::Relaxed);
        let src = match self.awaiting.room(src.len())? {
            Some(place) => {
                let to = std::ptr::with_exposed_provenance_mut::<u8>(self.bounce.start + place);
                // SAFETY: `room` gave this part of the buffer to nobody else since all ops had ended.
                let to = unsafe { std::slice::from_raw_parts_mut(to, src.len()) };
                to.copy_from_slice(src);
                &*to
            }
            None => src,
        };
        // SAFETY: the caller owns `src.len()` bytes at `at`. Pageable host memory is copied before the call returns.
        self.check("an upload", unsafe { result::memcpy_htod_async(at, src, self.raw_stream()) })?;
        self.end_op()
    }

    /// An event for [`Self::mark`] and [`Self::upload_span`]; nobody waits for it until it is marked.
    pub(super) fn event(&self) -> Result<CudaEvent, BackendError> {
        self.check("making an event", self.context.new_event(None))
    }

    /// As [`Self::event`], with a time, for [`Self::note_upload`].
    pub(super) fn clock_event(&self) -> Result<CudaEvent, BackendError> {
        self.check("making an event", self.context.new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)))
    }

    /// Adds an upload of `bytes` between two events with times to the counters; `false` while it is under way.
    pub(super) fn note_upload(&self, bytes: u64, [began, ended]: &[CudaEvent; 2]) -> bool {
        if self.bind().is_err() || !ended.is_complete() {
            return false;
        }
        // SAFETY: both events live, were recorded, and have come.
        if let Ok(ms) = unsafe { result::event::elapsed(began.cu_event(), ended.cu_event()) } {
            self.counts.timed_upload_bytes.fetch_add(bytes, Ordering::Relaxed);
            self.counts.timed_upload_ns.fetch_add((f64::from(ms) * 1e6) as u64, Ordering::Relaxed);
        }
        true
    }

    /// Lets `event` come when all kernels that were started in `lane` have ended.
    pub(super) fn mark(&self, event: &CudaEvent, lane: Lane) -> Result<(), BackendError> {
        self.check("marking a place among kernels", event.record(self.lane(lane)))
    }

    /// Lets `event` come when the uploads of [`Self::upload_span`] so far have ended.
    pub(super) fn mark_uploads(&self, event: &CudaEvent) -> Result<(), BackendError> {
        self.check("marking a place among uploads", event.record(&self.uploads))
    }

    /// Whether what `event` was marked behind has ended; also of one that was never marked.
    pub(super) fn has_come(&self, event: &CudaEvent) -> Result<bool, BackendError> {
        self.bind()?;
        self.check("uploads", event.try_is_complete())
    }

    /// Ops from now on begin when what was started in `lane` so far has ended; `event` is used for it.
    pub(super) fn wait_for_lane(&self, lane: Lane, event: &CudaEvent) -> Result<(), BackendError> {
        self.mark(event, lane)?;
        self.check("waiting for kernels beside the ops", self.sides.ops().wait(event))
    }

    /// Host to device beside the kernels: `len` bytes at `src`, after `free` and the uploads before; kernels started in `lane` from now on wait for
    /// it, by way of `arrived`. `clock` are events with times for its beginning and end.
    ///
    /// # Safety
    /// * The bytes can be read; those of registered memory do not change before [`Self::wait_uploads`] has returned.
    pub(super) unsafe fn upload_span(
        &self,
        src: *const u8,
        len: usize,
        at: u64,
        (free, arrived): (&CudaEvent, &CudaEvent),
        clock: Option<&[CudaEvent; 2]>,
        lane: Lane,
    ) -> Result<(), BackendError> {
        self.bind()?;
        self.counts.upload_bytes.fetch_add(len as u64, Ordering::Relaxed);
        self.counts.aside_bytes.fetch_add(len as u64, Ordering::Relaxed);
        self.check("an upload", self.uploads.wait(free))?;
        let drawn = self.beside_clock()?;
        for [began, _] in clock.into_iter().chain(&drawn) {
            self.check("an upload", began.record(&self.uploads))?;
        }
        // SAFETY: the caller owns `len` bytes at `at` and promises the source. Pageable host memory is copied before the call returns.
        let started = unsafe { sys::cuMemcpyHtoDAsync_v2(at, src.cast(), len, self.uploads.cu_stream()) };
        self.check("an upload", started.result())?;
        for [_, ended] in clock.into_iter().chain(&drawn) {
            self.check("an upload", ended.record(&self.uploads))?;
        }
        drawn.into_iter().for_each(|drawn| self.note_beside(Row::Uploads, "upload", drawn, len));
        self.check("an upload", arrived.record(&self.uploads))?;
        self.check("an upload", self.lane(lane).wait(arrived))
    }

    /// The host has waited since `begun` for `what`: counts and draws that.
    pub(super) fn note_wait(&self, what: &'static str, begun: Instant) {
        self.counts.wait_ns.fetch_add(begun.elapsed().as_nanos() as u64, Ordering::Relaxed);
        spans::end(Row::HostWaits, what, begun, Detail::default());
    }

    /// Waits for the device: one of [`DeviceCounters::waits`].
    fn stand_still(
        &self,
        what: &'static str,
        wait: impl FnOnce() -> Result<(), DriverError>,
    ) -> Result<(), BackendError> {
        self.counts.waits.fetch_add(1, Ordering::Relaxed);
        self.end_stretch()?;
        let begun = Instant::now();
        let done = wait();
        self.note_wait(what, begun);
        self.check(what, done)
    }

    /// Waits until `event` has come.
    pub(super) fn wait_for(&self, event: &CudaEvent) -> Result<(), BackendError> {
        self.bind()?;
        self.stand_still("waiting for kernels", || event.synchronize())
    }

    /// Waits for the uploads of [`Self::upload_span`], not for kernels.
    pub fn wait_uploads(&self) -> Result<(), BackendError> {
        self.bind()?;
        // SAFETY: the stream lives as long as `self`.
        self.stand_still("waiting for uploads", || unsafe { result::stream::synchronize(self.uploads.cu_stream()) })
    }

    /// Device to host; returns when the bytes are there.
    pub(super) fn download(&self, at: u64, dst: &mut [u8]) -> Result<(), BackendError> {
        if dst.is_empty() {
            return Ok(());
        }
        self.bind()?;
        self.awaiting.take_turn("a download")?;
        self.counts.download_bytes.fetch_add(dst.len() as u64, Ordering::Relaxed);
        // SAFETY: the caller owns `dst.len()` bytes at `at`; `wait` below ends the copy before `dst` is released.
        let started = unsafe { result::memcpy_dtoh_async(dst, at, self.raw_stream()) };
        let started = self.check("a download", started);
        started.and(self.wait())
    }

    pub(super) fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), BackendError> {
        if bytes == 0 {
            return Ok(());
        }
        self.bind()?;
        self.note("copy", false);
        self.begin_op("copy")?;
        // SAFETY: the caller owns both ranges.
        self.check("a copy", unsafe { result::memcpy_dtod_async(to, from, bytes, self.raw_stream()) })?;
        self.end_op()
    }

    /// Waits for everything that was started.
    pub fn wait(&self) -> Result<(), BackendError> {
        self.bind()?;
        self.awaiting.take_turn("waiting for kernels")?;
        // SAFETY: the stream lives as long as `self`.
        self.stand_still("waiting for kernels", || unsafe { result::stream::synchronize(self.raw_stream()) })?;
        self.recent.lock().1 = 0;
        Ok(())
    }

    /// Starts a kernel.
    ///
    /// # Safety
    /// * The kernel's parameters lie in `words` in order, the n-th from word `firsts[n]` on, with the right sizes.
    /// * Every pointer among them is memory of this device, large enough for what the kernel does with this grid.
    /// * Grid, block and shared memory are what the kernel is written for.
    pub(super) unsafe fn launch(
        &self,
        kernel: &'static str,
        (grid, block, shared): ([u32; 3], u32, u32),
        words: &mut [u64],
        firsts: &[u8],
        lane: Lane,
    ) -> Result<(), BackendError> {
        if lane == Lane::Ops && self.sides.leaves_out(kernel) {
            return Ok(());
        }
        self.bind()?;
        let drawn = match lane {
            Lane::Ops => self.begin_op(kernel).map(|()| None)?,
            Lane::Arranging => self.beside_clock()?,
        };
        if let Some([began, _]) = &drawn {
            self.mark(began, lane)?;
        }
        let function = self.modules.function(kernel, shared);
        let mut params = [std::ptr::null_mut::<c_void>(); 24];
        for (param, first) in params.iter_mut().zip(firsts) {
            *param = std::ptr::from_mut(&mut words[usize::from(*first)]).cast();
        }
        {
            let mut recent = self.recent.lock();
            let at = recent.1 % RECENT;
            recent.0[at] = kernel;
            recent.1 += 1;
        }
        let may_overlap = lane == Lane::Ops && self.note(kernel, true) && function.may_overlap;
        self.counts.launches.fetch_add(1, Ordering::Relaxed);
        let threads = u64::from(block) * grid.iter().map(|n| u64::from(*n)).product::<u64>();
        let is_small = threads <= SMALL_THREADS * self.properties.multiprocessors as u64;
        let priority = if is_small { self.priority } else { 0 };
        let mut attributes = [
            (sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PRIORITY, sys::CUlaunchAttributeValue { priority }),
            (
                sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
            ),
        ]
        .map(|(id, value)| sys::CUlaunchAttribute { id, pad: [0; 4], value });
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared,
            hStream: self.lane(lane).cu_stream(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: if lane == Lane::Ops { 1 + u32::from(may_overlap) } else { 0 },
        };
        // SAFETY: the caller's promise; parameters are copied by the call. A kernel that may overlap waits for the one before it by itself.
        let started =
            unsafe { sys::cuLaunchKernelEx(&config, function.handle, params.as_mut_ptr(), std::ptr::null_mut()) };
        let started = started.result();
        self.check("a launch", started)?;
        match drawn {
            None if lane == Lane::Arranging => Ok(()),
            None => self.end_op(),
            Some(drawn) => {
                self.mark(&drawn[1], lane)?;
                self.note_beside(Row::Arranging, kernel, drawn, 0);
                Ok(())
            }
        }
    }
}

/// The first of all priorities: numbers below 0, or 0 where there is but one. The context is current.
fn greatest_priority() -> Result<i32, DriverError> {
    let (mut least, mut greatest) = (0, 0);
    // SAFETY: pointers that are valid for the call.
    unsafe { sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest) }.result().map(|()| greatest)
}

fn properties(context: &Arc<CudaContext>) -> Result<Properties, DriverError> {
    use sys::CUdevice_attribute_enum as Attribute;
    let (major, minor) = context.compute_capability()?;
    Ok(Properties {
        name: context.name()?,
        ordinal: context.ordinal(),
        capability: (major as u32, minor as u32),
        multiprocessors: context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize,
        is_integrated: context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)? != 0,
        memory_bytes: context.total_mem()? as u64,
        shared_max: context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize,
    })
}
