//! Launchers of attention on tensor cores: kernels/attention_spread.cuh for a few rows, kernels/attention_mma.cuh for many.
//! Never takes keys that are no BF16 values. Surprising fact: both add in the same order, so the choice between them never changes a bit.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::{Launch, has_shared};
use crate::backend::BackendError;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::{Bytes, CudaBuf};
use crate::backend::ops::Attention;

/// Width of a head, terms of a product, and most keys of a row: see kernels/attention_parts.cuh and kernels/attention_mma.cuh.
const WIDTH: usize = 512;
const STEP: usize = 16;
const KEYS_MAX: usize = 640;
const THREADS: usize = 256;
/// Keys and channels of a block of kernels/attention_spread.cuh, and the shared memory of one that adds values.
const SPREAD_KEYS: usize = 24;
const SPREAD_CHANNELS: usize = 16;
const VALUE_THREADS: usize = 512;
const SPREAD_SHARED: usize = KEYS_MAX / STEP * 1024 + 16 * (KEYS_MAX + 16) * 4;
/// Heads of all rows up to which scores are spread. Each of the other blocks does all for its heads, which takes as long as 8 rows of 64 heads
/// spread; that time does not grow until there are more blocks than multiprocessors.
const SPREAD_HEADS_MAX: usize = 8 * 64;

/// Room for the scores of a few rows, taken once, and what was counted.
pub(in crate::backend::cuda) struct Scores {
    bytes: Mutex<Option<Bytes>>,
    all: AtomicU64,
    on_tensor_cores: AtomicU64,
}

impl Scores {
    pub(in crate::backend::cuda) fn new() -> Self {
        Self { bytes: Mutex::new(None), all: AtomicU64::new(0), on_tensor_cores: AtomicU64::new(0) }
    }

    /// Makes the room, so that it is not made later. Returns where it is.
    pub(in crate::backend::cuda) fn reserve(&self, device: &Arc<Device>) -> Result<u64, BackendError> {
        let mut kept = self.bytes.lock();
        if kept.is_none() {
            *kept = Some(Bytes::new(device, "scores of attention", SPREAD_HEADS_MAX * KEYS_MAX * 4)?);
        }
        Ok(kept.as_ref().expect("taken above").at)
    }

    /// One more attention.
    pub(super) fn count(&self, is_on_tensor_cores: bool) {
        // Relaxed: counters that nothing waits for.
        self.all.fetch_add(1, Ordering::Relaxed);
        self.on_tensor_cores.fetch_add(u64::from(is_on_tensor_cores), Ordering::Relaxed);
    }

    /// Attentions so far, and how many of them ran on tensor cores.
    pub(in crate::backend::cuda) fn counts(&self) -> (u64, u64) {
        (self.all.load(Ordering::Relaxed), self.on_tensor_cores.load(Ordering::Relaxed))
    }
}

/// Keys of a row at most.
fn keys_max(op: &Attention<'_, CudaBackend>) -> usize {
    op.window_len + op.compressed.as_ref().map_or(0, |c| c.k)
}

/// Whether these kernels take `op`.
pub(super) fn takes(device: &Device, op: &Attention<'_, CudaBackend>) -> bool {
    op.keys_are_bf16
        && op.width == WIDTH
        && op.heads.is_multiple_of(16)
        && (1..=KEYS_MAX).contains(&keys_max(op))
        && has_shared(device, SPREAD_SHARED.max(mma_shared(1)))
}

/// `mma_shared` of kernels/attention_mma.cuh, for blocks of `16 * m` heads.
fn mma_shared(m: usize) -> usize {
    let (factors, keys, stages) = (3 * m * 512, KEYS_MAX * STEP * 4, if m == 4 { 4 } else { 2 });
    let weights = 16 * m * (KEYS_MAX + 16) * 4 + 2 * STEP * (WIDTH * 2 + 16);
    KEYS_MAX * 8 + 2 * factors + weights.max(stages * keys)
}

pub(super) fn attention_mma(
    device: &Arc<Device>,
    scores: &Scores,
    op: &Attention<'_, CudaBackend>,
    out: &mut CudaBuf,
) -> Result<(), BackendError> {
    if op.rows * op.heads <= SPREAD_HEADS_MAX {
        let at = scores.reserve(device)?;
        return spread(device, at, op, out);
    }
    let is_full = op.rows * op.heads > 16 * device.properties().multiprocessors;
    let is_wide = is_full && op.heads.is_multiple_of(64) && has_shared(device, mma_shared(4));
    let m = if is_wide { 4 } else { 1 };
    let kernel = if m == 4 { "attention_mma_64" } else { "attention_mma_16" };
    let values = op.rows * op.heads * WIDTH;
    let launch = Launch::new(device, kernel, [op.heads / (16 * m), op.rows, 1], THREADS).shared(mma_shared(m));
    let launch = keys_of(launch.buf(op.q, values), op).buf(op.sinks, op.heads).buf(out, values);
    let launch = shape_of(launch.int(op.heads).int(op.width), op).float(op.scale);
    // SAFETY: the parameters of both kernels; selected rows are rows of `compressed` by contract.
    unsafe { launch.start() }
}

/// Scores, then values.
fn spread(
    device: &Device,
    scores: u64,
    op: &Attention<'_, CudaBackend>,
    out: &mut CudaBuf,
) -> Result<(), BackendError> {
    let (values, stride) = (op.rows * op.heads * WIDTH, keys_max(op).next_multiple_of(STEP));
    let grid = [stride.div_ceil(SPREAD_KEYS), op.heads / 16, op.rows];
    let launch = keys_of(Launch::new(device, "attention_scores", grid, THREADS).buf(op.q, values), op);
    let launch = shape_of(launch.pointer(scores).int(op.heads).int(stride), op).float(op.scale);
    // SAFETY: the parameters of `attention_scores`, which writes a stride for each of at most SPREAD_HEADS_MAX heads; no stride is longer
    // than KEYS_MAX.
    unsafe { launch.start()? };
    let grid = [WIDTH / SPREAD_CHANNELS, op.heads / 16, op.rows];
    let launch = Launch::new(device, "attention_values", grid, VALUE_THREADS).shared(SPREAD_SHARED).pointer(scores);
    let launch = keys_of(launch, op).buf(op.sinks, op.heads).buf(out, values);
    let launch = shape_of(launch.int(op.heads).int(stride), op);
    // SAFETY: the parameters of `attention_values`, behind the scores that it reads.
    unsafe { launch.start() }
}

/// Window, compressed rows and which of them are selected.
fn keys_of<'d>(launch: Launch<'d>, op: &Attention<'_, CudaBackend>) -> Launch<'d> {
    let launch = launch.buf(op.window, op.window_slots * op.width);
    match &op.compressed {
        Some(c) => launch.buf(c.rows, 0).ids(c.selected, op.rows * c.k),
        None => launch.pointer(0).pointer(0),
    }
}

/// What says where a row's keys are.
fn shape_of<'d>(launch: Launch<'d>, op: &Attention<'_, CudaBackend>) -> Launch<'d> {
    let k = op.compressed.as_ref().map_or(0, |c| c.k);
    launch.int(op.window_slots).int(op.window_len).int(k).int(op.first_pos)
}
