//! Stretches of time that are worth a picture: passes, layers, a GPU's work, reads, waits. Each is told once, at its end, as an event of `tracing`.
//! Never keeps anything, and costs one comparison where nobody listens. Surprising fact: only the end of a stretch makes an event, so whoever
//! draws them learns of a long one after the short ones within it.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// Target of the events.
pub const TARGET: &str = "ds4::span";

/// The moment that events count from.
static EPOCH: LazyLock<Instant> = LazyLock::new(Instant::now);

/// What a stretch is drawn with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Row {
    /// Tokens on their way through the model.
    Passes,
    /// Halves of a layer: the processor's work, waits included. On a device: what the host did for it.
    Layers,
    /// What a GPU was given, from its beginning to its end: a few layers together, or single ops.
    Gpu,
    /// Parts of layers on a GPU that were given to it together, by its own clock.
    GpuLayers,
    /// A GPU stood still until an expert was there.
    GpuWaits,
    /// Experts on their way to a GPU.
    Uploads,
    /// What a GPU does to experts that have come: bringing them into its layout, and opening gates.
    Arranging,
    /// The host stood still until a GPU had done or chosen something.
    HostWaits,
    /// The processor stood still until something came from the drive.
    Waits,
    /// Reads of the drive; many at a time.
    Reads,
    /// How far the clocks of host and GPU may be apart, and had gone apart, as lengths.
    Clock,
}

impl Row {
    /// Its name in the picture.
    pub const fn name(self) -> &'static str {
        match self {
            Row::Passes => "passes",
            Row::Layers => "layers",
            Row::Gpu => "gpu",
            Row::GpuLayers => "gpu-layers",
            Row::GpuWaits => "gpu-waits",
            Row::Uploads => "uploads",
            Row::Arranging => "arranging",
            Row::HostWaits => "host-waits",
            Row::Waits => "waits",
            Row::Reads => "reads",
            Row::Clock => "clock",
        }
    }
}

/// What is known of a stretch besides its time; 0 where it says nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Detail {
    /// Layer, where there is one.
    pub layer: Option<u16>,
    /// Routed expert.
    pub expert: Option<u16>,
    /// Rows computed.
    pub rows: u64,
    /// Bytes moved.
    pub bytes: u64,
}

/// Whether anybody listens.
#[inline]
pub fn is_wanted() -> bool {
    tracing::enabled!(target: TARGET, tracing::Level::TRACE)
}

/// Now, if anybody listens.
#[inline]
pub fn begin() -> Option<Instant> {
    is_wanted().then(Instant::now)
}

/// Tells of `what`, which began at `begun` and ends now.
pub fn end(row: Row, what: &str, begun: Instant, detail: Detail) {
    if is_wanted() {
        tell(row, what, (begun, begun.elapsed()), detail);
    }
}

/// Tells of `what`, which began at `begun` and took `took`, to whoever listens.
pub fn tell(row: Row, what: &str, (begun, took): (Instant, Duration), detail: Detail) {
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    let (at, took) = (us(begun.saturating_duration_since(*EPOCH)), us(took));
    let number = |value: Option<u16>| value.map_or(-1, i64::from);
    let (layer, expert) = (number(detail.layer), number(detail.expert));
    let (rows, bytes) = (detail.rows, detail.bytes);
    tracing::trace!(target: TARGET, row = row.name(), what, at, took, layer, expert, rows, bytes);
}

/// Tells of `what` of `layer` over `rows` rows; `begun` is from [`begin`].
pub fn end_half(what: &str, layer: usize, rows: usize, begun: Option<Instant>) {
    if let Some(begun) = begun {
        let detail = Detail { layer: Some(layer as u16), rows: rows as u64, ..Detail::default() };
        end(Row::Layers, what, begun, detail);
    }
}

/// Sets the moment that events count from, if it is not set: it must come before the first of them.
pub fn start_clock() {
    LazyLock::force(&EPOCH);
}
