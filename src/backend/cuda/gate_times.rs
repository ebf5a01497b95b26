//! When each layer of a pass chose its experts and when they were there, by the device's own clock: how long its gates held it up.
//! Never waits: the times come to the host behind the last gate, ahead of the token. Surprising fact: the kernels write them always; only
//! passes whose time is taken fetch them.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::device::Device;
use super::host_memory::HostBytes;
use super::launch::expert_gate::{self, TIMES};
use super::memory::Bytes;
use crate::backend::BackendError;
use crate::obs::spans::{self, Detail, Row};

/// A gate that held for less was open when it was looked at.
const OPEN_NS: u64 = 1_000;

/// Times of one table's layers.
pub struct GateTimes {
    /// `[layers, TIMES]` words, and one for the clock itself.
    words: Bytes,
    copy: Mutex<HostBytes>,
    /// Whether `copy` is of the last pass.
    is_asked: AtomicBool,
    names: Vec<u16>,
}

/// One layer, in nanoseconds of the device's clock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Layer {
    chosen: u64,
    looked: u64,
    opened: u64,
}

fn layers(words: &[u64]) -> impl Iterator<Item = Layer> + '_ {
    words.chunks_exact(TIMES).map(|t| Layer { chosen: t[0], looked: t[1], opened: t[2] })
}

fn stalled_ns(words: &[u64]) -> u64 {
    layers(words).map(|layer| layer.opened.saturating_sub(layer.looked)).sum()
}

/// What is drawn of a pass that had `begun`: row, name, layer by place, beginning and end.
fn stretches(begun: u64, words: &[u64]) -> Vec<(Row, &'static str, usize, [u64; 2])> {
    let (mut found, mut before) = (Vec::new(), begun);
    for (place, layer) in layers(words).enumerate() {
        // Only gates and routers stamp: a layer's experts and the attention of the next one are one part.
        let what = if place == 0 { "start to router" } else { "gate to router" };
        found.push((Row::GpuLayers, what, place, [before, layer.chosen]));
        found.push((Row::GpuLayers, "router to gate", place, [layer.chosen, layer.looked]));
        if layer.opened.saturating_sub(layer.looked) >= OPEN_NS {
            found.push((Row::GpuWaits, "experts", place, [layer.looked, layer.opened]));
        }
        before = layer.opened;
    }
    found
}

impl GateTimes {
    pub(super) fn new(device: &Arc<Device>, layers: usize) -> Result<Self, BackendError> {
        let len = 8 * (TIMES * layers + 1);
        let words = Bytes::new(device, "times of gates", len)?;
        device.zero(words.at, len)?;
        let copy = Mutex::new(device.host_bytes(len)?);
        let names = (0..layers as u16).collect();
        Ok(Self { words, copy, is_asked: AtomicBool::new(false), names })
    }

    pub(super) fn set_names(&mut self, names: Vec<u16>) {
        assert_eq!(names.len(), self.names.len(), "a name for each layer");
        self.names = names;
    }

    fn name(&self, layer: usize) -> u16 {
        self.names.get(layer).copied().unwrap_or(u16::MAX)
    }

    /// The name of ops that begin with layer `layers.start` or, if there is none among them, follow the one before.
    pub(super) fn name_of(&self, layers: Range<usize>) -> String {
        match layers.len() {
            0 => format!("after layer {}", self.name(layers.start.saturating_sub(1))),
            1 => format!("layer {}", self.name(layers.start)),
            _ => format!("layers {} to {}", self.name(layers.start), self.name(layers.end - 1)),
        }
    }

    /// Where kernels write the times of `layer`.
    pub(super) fn layer(&self, layer: usize) -> u64 {
        self.words.at + (8 * TIMES * layer) as u64
    }

    /// A pass begins. Nothing is being recorded.
    pub(super) fn begin(&self, device: &Device) -> Result<(), BackendError> {
        // Relaxed: passes run one after another.
        self.is_asked.store(false, Ordering::Relaxed);
        match device.is_timed() && spans::is_wanted() {
            true => expert_gate::stamp(device, self.layer(self.names.len())),
            false => Ok(()),
        }
    }

    /// All ops of a pass were queued: fetches its times behind them, if somebody wants them.
    pub(super) fn ask(&self, device: &Device) -> Result<(), BackendError> {
        if device.is_timed() {
            device.download_aside(self.words.at, &mut self.copy.lock(), self.words.len)?;
            self.is_asked.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// How long the gates held the last pass up, in nanoseconds; `None` if its time was not taken, or it did not find its experts by itself.
    /// Its ops have ended.
    pub fn stalled_ns(&self) -> Option<u64> {
        let copy = self.copy.lock();
        let words: &[u64] = bytemuck::cast_slice(copy.read());
        self.is_asked.load(Ordering::Relaxed).then(|| stalled_ns(&words[..TIMES * self.names.len()]))
    }

    /// Draws the last pass. Its ops have ended, and were drawn.
    pub fn draw(&self, device: &Device) {
        let (true, Some(stamped)) = (self.is_asked.load(Ordering::Relaxed), device.stamped()) else { return };
        let copy = self.copy.lock();
        let words: &[u64] = bytemuck::cast_slice(copy.read());
        let Some((stamp, words)) = words.split_last() else { return };
        let moment =
            |ns: u64| -> Option<Instant> { stamped.checked_add(Duration::from_nanos(ns.checked_sub(*stamp)?)) };
        for (row, what, place, [from, to]) in stretches(*stamp, words) {
            if let (Some(at), Some(took)) = (moment(from), to.checked_sub(from)) {
                let detail = Detail { layer: Some(self.name(place)), ..Detail::default() };
                spans::tell(row, what, (at, Duration::from_nanos(took)), detail);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Chosen, looked at, open, of two layers: the second one's gate was closed for 50 us.
    const WORDS: [u64; 6] = [10_000, 15_000, 15_200, 90_000, 96_000, 146_000];

    #[test]
    fn gates_hold_from_the_first_look_until_they_are_open() {
        assert_eq!(stalled_ns(&WORDS), 200 + 50_000);
        assert_eq!(stalled_ns(&[0, 7, 5]), 0, "a clock that goes back is no time");
    }

    #[test]
    fn a_layer_is_drawn_from_gate_to_choice_to_gate() {
        let halves = [
            (Row::GpuLayers, "start to router", 0, [1_000, 10_000]),
            (Row::GpuLayers, "router to gate", 0, [10_000, 15_000]),
            (Row::GpuLayers, "gate to router", 1, [15_200, 90_000]),
            (Row::GpuLayers, "router to gate", 1, [90_000, 96_000]),
            (Row::GpuWaits, "experts", 1, [96_000, 146_000]),
        ];
        assert_eq!(stretches(1_000, &WORDS), halves);
    }
}
