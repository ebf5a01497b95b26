//! Launchers: from the argument struct of an op to the parameters of its kernels, one file an op.
//! Never computes and never waits. Surprising fact: lengths are checked here with `assert!`, as the CPU ops do by slicing: a short
//! buffer is a bug of the caller, and on a GPU it would be a silent one.

pub(super) mod attention;
pub(super) mod attention_mma;
pub(super) mod best_of;
pub(super) mod candidate_blocks;
pub(super) mod combine_experts;
pub(super) mod decode_rows;
pub(super) mod draw;
mod eights;
pub(super) mod embed;
pub(super) mod engram_gate;
pub(super) mod expert_gate;
pub(super) mod experts_row;
pub(super) mod experts_rows;
mod float_strips;
pub(super) mod hc_coefficients;
pub(super) mod hc_collapse;
pub(super) mod hc_enter;
pub(super) mod hc_expand;
pub(super) mod index_scores;
pub(super) mod matmul;
mod matmul_row;
pub(super) mod meeting;
pub(super) mod memory_rate;
pub(super) mod move_rows;
pub(super) mod pool_groups;
pub(super) mod pool_pairs;
pub(super) mod rms_norm;
pub(super) mod rope;
pub(super) mod round_cache;
pub(super) mod route;
pub(super) mod select_rows;
pub(super) mod store_rows;
pub(super) mod swiglu;
mod tiles;
pub(super) mod weigh_experts;

use super::device::{Device, Lane};
use super::memory::{CudaBuf, CudaIds};
use crate::backend::BackendError;

/// Threads of a block where nothing asks for another number.
pub(super) const THREADS: usize = 256;

/// Threads of a block in the kernels that sum a row, see kernels/common.cuh.
pub(super) const SUM_THREADS: usize = 512;

/// Threads of a block in the kernels that select, see kernels/select_best.cuh.
pub(super) const SELECT_THREADS: usize = 512;
/// Streams that a thread of the hyper-connection kernels can hold.
pub(super) const STREAMS_MAX: usize = 8;

/// Most parameters of a kernel.
const PARAMS_MAX: usize = 20;
/// Words of all parameters that most kernels do with; a list of experts has more.
const WORDS_USUAL: usize = 24;

/// A kernel with its grid and the parameters given so far.
pub(super) struct Launch<'d> {
    device: &'d Device,
    kernel: &'static str,
    grid: [u32; 3],
    block: u32,
    shared: u32,
    lane: Lane,
    words: Vec<u64>,
    /// First word of each parameter.
    firsts: [u8; PARAMS_MAX],
    count: usize,
}

impl<'d> Launch<'d> {
    /// `kernel` over `grid` blocks of `block` threads.
    pub(super) fn new(device: &'d Device, kernel: &'static str, grid: [usize; 3], block: usize) -> Self {
        let grid = grid.map(|n| u32::try_from(n).expect("grids are below 2^32 blocks"));
        assert!(grid[1] <= 65_535, "{kernel}: {} rows are more than a launch takes", grid[1]);
        Self {
            device,
            kernel,
            grid,
            block: block as u32,
            shared: 0,
            lane: Lane::default(),
            words: Vec::with_capacity(WORDS_USUAL),
            firsts: [0; PARAMS_MAX],
            count: 0,
        }
    }

    /// Bytes of dynamic shared memory.
    pub(super) fn shared(mut self, bytes: usize) -> Self {
        self.shared = bytes as u32;
        self
    }

    /// Among the kernels of `lane` instead of the ops.
    pub(super) fn lane(mut self, lane: Lane) -> Self {
        self.lane = lane;
        self
    }

    fn cell(self, value: u64) -> Self {
        self.block(&[value])
    }

    /// A struct of whole words.
    pub(super) fn block(mut self, words: &[u64]) -> Self {
        self.firsts[self.count] = u8::try_from(self.words.len()).expect("parameters of up to 2 KiB");
        self.words.extend_from_slice(words);
        self.count += 1;
        self
    }

    /// A pointer to device memory.
    pub(super) fn pointer(self, at: u64) -> Self {
        self.cell(at)
    }

    /// A pointer to at least `len` values.
    pub(super) fn buf(self, buf: &CudaBuf, len: usize) -> Self {
        assert!(buf.len >= len, "{}: a buffer of {} values, {len} needed", self.kernel, buf.len);
        self.cell(buf.bytes.at)
    }

    /// A pointer to at least `len` ids.
    pub(super) fn ids(self, ids: &CudaIds, len: usize) -> Self {
        assert!(ids.len >= len, "{}: a buffer of {} ids, {len} needed", self.kernel, ids.len);
        self.cell(ids.bytes.at)
    }

    /// An `int`.
    pub(super) fn int(self, value: usize) -> Self {
        let kernel = self.kernel;
        self.cell(u64::from(i32::try_from(value).unwrap_or_else(|_| panic!("{kernel}: {value} is no int")) as u32))
    }

    /// A 64-bit whole number.
    pub(super) fn long(self, value: usize) -> Self {
        self.cell(value as u64)
    }

    /// A `float`.
    pub(super) fn float(self, value: f32) -> Self {
        self.cell(u64::from(value.to_bits()))
    }

    /// Starts it.
    ///
    /// # Safety
    /// The parameters are those of the kernel, in order, and pointers reach as far as the kernel does with this grid.
    pub(super) unsafe fn start(mut self) -> Result<(), BackendError> {
        if self.grid.contains(&0) {
            return Ok(());
        }
        let (grid, block, shared) = (self.grid, self.block, self.shared);
        let (words, firsts) = (&mut self.words, &self.firsts[..self.count]);
        // SAFETY: the caller's promise.
        unsafe { self.device.launch(self.kernel, (grid, block, shared), words, firsts, self.lane) }
    }
}

/// Whether a block of `device` may use `bytes` of dynamic shared memory beside up to 4 KiB that a kernel declares itself.
pub(super) fn has_shared(device: &Device, bytes: usize) -> bool {
    bytes + (4 << 10) <= device.properties().shared_max
}

/// Grid of an op over `rows` rows of `width` values each.
pub(super) fn over_rows(width: usize, rows: usize) -> [usize; 3] {
    [width.div_ceil(THREADS), rows, 1]
}
