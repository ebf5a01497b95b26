//! Launcher of kernels/draw.cu: the largest value, the steps of the filters that are on, then the draw itself.
//! Never leaves more on the host's side to do than to read one id. Surprising fact: what the launches hand on lies in memory that is zeros
//! again after the last one, so that nothing is cleared before the first.

use std::sync::Arc;

use parking_lot::Mutex;

use super::meeting::Meeting;
use super::{Launch, best_of};
use crate::backend::BackendError;
use crate::backend::cpu::draw::floor;
use crate::backend::cuda::CudaBackend;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::memory::{Bytes, CudaIds};
use crate::backend::ops::{BestOf, Draw};

/// Threads and values of a block, and bits that a step finds, see the kernel.
const THREADS: usize = 512;
const SPAN: usize = 2048;
const BITS: u32 = 11;
/// Bytes of `Work` before the sums of the blocks.
const HEAD_BYTES: usize = 8 * (1 << BITS) + 32;

/// `Work` of the kernels, as large as the longest row so far needs.
pub(in crate::backend::cuda) struct DrawMemory(Mutex<Option<Bytes>>);

impl DrawMemory {
    pub(in crate::backend::cuda) fn new() -> Self {
        Self(Mutex::new(None))
    }

    fn at(&self, device: &Arc<Device>, blocks: usize) -> Result<u64, BackendError> {
        let (mut kept, len) = (self.0.lock(), HEAD_BYTES + 8 * blocks);
        if let Some(bytes) = kept.as_ref().filter(|bytes| bytes.len >= len) {
            return Ok(bytes.at);
        }
        let bytes = Bytes::new(device, "drawing tokens", len)?;
        device.zero(bytes.at, len)?;
        Ok(kept.insert(bytes).at)
    }
}

/// A filter as the kernel takes it: a share of all weights, or a number of values where that is 0.
#[derive(Clone, Copy)]
struct Filter {
    share: f32,
    k: usize,
}

pub fn draw(
    device: &Arc<Device>,
    (meeting, memory): (&Meeting, &DrawMemory),
    op: Draw<'_, CudaBackend>,
    drawn: &mut CudaIds,
) -> Result<(), BackendError> {
    let Draw { values, count, rule } = op;
    best_of::best_of(device, meeting, BestOf { values, count }, drawn)?;
    let blocks = count.div_ceil(SPAN).max(1);
    let work = memory.at(device, blocks)?;
    // Bits of a place: a rank is a value's key and its place.
    let place_bits = usize::BITS - count.leading_zeros();
    let start = |kernel| {
        let launch = Launch::new(device, kernel, [blocks, 1, 1], THREADS).buf(values, count).int(count);
        launch.ids(drawn, 1).float(rule.temperature)
    };
    let top_k = (1..count).contains(&rule.top_k).then_some(Filter { share: 0.0, k: rule.top_k });
    let top_p = (rule.top_p < 1.0).then_some(Filter { share: rule.top_p, k: 0 });
    for filter in top_k.into_iter().chain(top_p) {
        let steps = (32 + place_bits).div_ceil(BITS);
        for step in (0..steps).rev() {
            let launch = start("draw_step").float(filter.share).int(filter.k).int(place_bits as usize);
            let launch = launch.int((step * BITS) as usize).int(usize::from(step + 1 == steps)).pointer(work);
            // SAFETY: the parameters of `draw_step`; a block for each span of the values, and as many sums behind the bins.
            unsafe { launch.start()? };
        }
    }
    let launch = start("draw").long(floor(rule.min_p) as usize).long(rule.number as usize);
    // SAFETY: the parameters of `draw`, as above.
    unsafe { launch.int(place_bits as usize).pointer(work).start() }
}
