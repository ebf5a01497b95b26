//! Launchers of kernels/expert_gate.cuh: where a row's experts lie, and the gate that stands closed while one is on its way.
//! Never waits: the kernels do. Surprising fact: the answer to a gate runs in another lane than the gate, else it would wait behind it.

use super::Launch;
use crate::backend::BackendError;
use crate::backend::cuda::device::{Device, Lane};
use crate::backend::cuda::memory::{CudaBuf, CudaIds};

/// Entries of the table that one answer changes, see the kernel.
pub const CHANGES_MAX: usize = 32;

/// Device memory of one layer's gate, and the pass that goes through it.
#[derive(Clone, Copy)]
pub struct Gate {
    /// The layer's word.
    pub word: u64,
    pub pass: u32,
    /// The layer's part of the table.
    pub table: u64,
    /// `[k]` ids by rising id.
    pub sorted: u64,
    /// The layer's [`TIMES`] words.
    pub times: u64,
}

/// Times of a layer that the kernels take, in nanoseconds of the device's clock: its choice, the first look at its gate, and when that was open.
pub const TIMES: usize = 3;

/// Looks the `k` experts of a row up, sorts them, tells the host at `told`, and opens the gate if all are there.
pub fn resolve(
    device: &Device,
    gate: Gate,
    (ids, weights): (&CudaIds, &CudaBuf),
    sorted_weights: &mut CudaBuf,
    told: u64,
    k: usize,
) -> Result<(), BackendError> {
    let launch = Launch::new(device, "resolve_experts", [1, 1, 1], 32).ids(ids, k).buf(weights, k);
    let launch = launch.pointer(gate.table).pointer(gate.sorted).buf(sorted_weights, k);
    let launch = launch.pointer(told).pointer(gate.word).int(gate.pass as usize).int(k).pointer(gate.times);
    // SAFETY: the parameters of `resolve_experts`; ids are below the layer's part of the table.
    unsafe { launch.start() }
}

/// Tells the host at `told` the `count` experts that a layer will probably choose.
pub fn tell_guess(device: &Device, ids: &CudaIds, told: u64, pass: u32, count: usize) -> Result<(), BackendError> {
    let launch = Launch::new(device, "tell_guess", [1, 1, 1], 32).ids(ids, count).pointer(told);
    let launch = launch.int(pass as usize).int(count);
    // SAFETY: the parameters of `tell_guess`; `told` is host memory with room for the ids.
    unsafe { launch.start() }
}

/// Waits for the gate, then writes the slots of the layer's `k` experts to `slots`.
pub fn wait(device: &Device, gate: Gate, stop: u64, slots: u64, k: usize) -> Result<(), BackendError> {
    let launch = Launch::new(device, "await_experts", [1, 1, 1], 32).pointer(gate.word).pointer(stop);
    let launch = launch.int(gate.pass as usize).pointer(gate.table).pointer(gate.sorted).pointer(slots).int(k);
    let launch = launch.pointer(gate.times);
    // SAFETY: the parameters of `await_experts`; `stop` is host memory that the device reads.
    unsafe { launch.start() }
}

/// Writes the device's clock to `at`.
pub fn stamp(device: &Device, at: u64) -> Result<(), BackendError> {
    let launch = Launch::new(device, "stamp_clock", [1, 1, 1], 32).pointer(at);
    // SAFETY: the parameter of `stamp_clock`: the caller's 8 bytes.
    unsafe { launch.start() }
}

/// Changes entries of the table at `table` and opens the gate `word`, behind the arranging of experts.
pub fn open(
    device: &Device,
    (word, pass): (u64, u32),
    table: u64,
    changes: &[(usize, u64)],
) -> Result<(), BackendError> {
    assert!(changes.len() <= CHANGES_MAX, "{} changes of the table", changes.len());
    let mut words = [0; CHANGES_MAX + CHANGES_MAX / 2];
    for (i, (entry, slot)) in changes.iter().enumerate() {
        words[i] = *slot;
        words[CHANGES_MAX + i / 2] |= (*entry as u64) << (32 * (i % 2));
    }
    let launch = Launch::new(device, "open_gate", [1, 1, 1], CHANGES_MAX).lane(Lane::Arranging);
    let launch = launch.block(&words).int(changes.len()).pointer(table).pointer(word).int(pass as usize);
    // SAFETY: the parameters of `open_gate`; the caller checked that entries are inside the table.
    unsafe { launch.start() }
}
