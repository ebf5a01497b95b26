//! What a graph asks of its surroundings: routed experts by (layer, ids) and rows of n-gram tables.
//! Never says where bytes come from. The engine implements both traits over `storage`; tests implement them over memory.
//! Surprising fact: experts are handed out in the order in which they land, but summed by rising id.

use crate::backend::Backend;
pub use crate::units::Phase;
use crate::units::{ExpertIdx, ExpertKey, LayerIdx};

/// A supply could not deliver. The text names file, offset, layer and expert or row; the step that asked has failed,
/// the cache and the session stay consistent.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct SupplyError(pub Box<dyn std::error::Error + Send + Sync>);

/// The three matrices of one routed expert.
pub struct ExpertMats<'a, B: Backend> {
    /// `[expert width, hidden]`.
    pub gate: B::MatView<'a>,
    /// `[expert width, hidden]`.
    pub up: B::MatView<'a>,
    /// `[hidden, expert width]`.
    pub down: B::MatView<'a>,
}

impl<B: Backend> Clone for ExpertMats<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for ExpertMats<'_, B> {}

/// Routed experts of all layers.
pub trait ExpertSupply<B: Backend>: Send + Sync {
    /// Most distinct experts that leases held at the same time may hold together (at least the router's top-k).
    fn lease_max(&self) -> usize;

    /// Most experts that a sweep over many rows holds at a time now, so that it leaves those in place that are worth keeping. Takes a look
    /// at every expert: asked once a layer.
    fn sweep_max(&self) -> usize {
        self.lease_max()
    }

    /// Says which experts of `layer` the rows of a sweep use most, best first, before they are requested: worth keeping for what comes
    /// after the sweep. Changes no result.
    fn favour(&self, layer: LayerIdx, ids: &[ExpertIdx]) {
        let _ = (layer, ids);
    }

    /// Pins `ids` (distinct) of `layer` and starts, or joins, the reads of those not in memory. Returns at once.
    fn request(
        &self,
        layer: LayerIdx,
        ids: &[ExpertIdx],
        phase: Phase,
    ) -> Result<Box<dyn ExpertLease<B> + '_>, SupplyError>;

    /// The next step will request `experts` (by rising layer) for certain. May start their reads; never waits.
    fn announce(&self, experts: &[ExpertKey]) {
        let _ = experts;
    }

    /// How many experts of the next layer a step of one token should guess; 0 when nobody would read them ahead.
    fn guesses_wanted(&self) -> usize {
        0
    }

    /// `ids` will probably be requested of `layer` next, best first. Changes nothing but what may be read ahead.
    fn guess(&self, layer: LayerIdx, ids: &[ExpertIdx]) {
        let _ = (layer, ids);
    }

    /// Whether an expert is in memory or on its way there.
    fn has(&self, expert: ExpertKey) -> bool {
        let _ = expert;
        false
    }

    /// Holds an expert that is in memory, for a copy ahead of its request; its lease has it ready. `None` where it is not, or where the hold could
    /// make a request wait. Reads nothing and is no request: no counter of requests moves.
    fn hold_present(&self, layer: LayerIdx, expert: ExpertIdx) -> Option<Box<dyn ExpertLease<B> + '_>> {
        let _ = (layer, expert);
        None
    }

    /// A pass over one row begins whose ops may all be queued before any has run: then the device finds its experts by itself. `None` where
    /// experts have to be requested. Same experts, same sums, same counters either way.
    fn begin_row(&self) -> Result<Option<Box<dyn RowExperts<B> + '_>>, SupplyError> {
        Ok(None)
    }
}

/// The experts that the router of one layer chose, as it left them on the device.
pub struct RowChoice<'a, B: Backend> {
    pub layer: LayerIdx,
    /// Experts of a row.
    pub k: usize,
    /// `[k]`.
    pub ids: &'a B::Ids,
    /// `[k]`.
    pub weights: &'a B::Buf,
    /// `[k]`: becomes the weights by rising id.
    pub sorted: &'a mut B::Buf,
}

/// The products of a row with the experts that were chosen for it.
pub struct RowProducts<'a, B: Backend> {
    pub layer: LayerIdx,
    pub k: usize,
    /// `[hidden]`.
    pub x: &'a B::Buf,
    /// Clamp of the experts.
    pub limit: f32,
    /// `[k, hidden]`: by rising id.
    pub outputs: &'a mut B::Buf,
}

/// Experts that the next layer will probably choose, named on the device.
pub struct RowGuess<'a, B: Backend> {
    /// The layer that has not chosen yet.
    pub layer: LayerIdx,
    /// `[count]`, best first.
    pub ids: &'a B::Ids,
    pub count: usize,
}

/// One row on its way through layers whose experts the device finds. Layers come in order, [`Self::chosen`] before [`Self::products`]; dropped
/// before [`Self::finish`], the pass is given up.
pub trait RowExperts<B: Backend> {
    /// Queues the look for the experts of a layer.
    fn chosen(&mut self, choice: RowChoice<'_, B>) -> Result<(), SupplyError>;

    /// How many experts of the next layer should be named behind a choice; 0 when nobody would bring them ahead.
    fn guesses_wanted(&self) -> usize {
        0
    }

    /// Queues the telling of a guess. Changes no result.
    fn guessed(&mut self, guess: RowGuess<'_, B>) -> Result<(), SupplyError> {
        let _ = guess;
        Ok(())
    }

    /// Queues their products, which begin when all experts are there.
    fn products(&mut self, products: RowProducts<'_, B>) -> Result<(), SupplyError>;

    /// All layers are queued. Returns when none needs anything more that is not there.
    fn finish(self: Box<Self>) -> Result<(), SupplyError>;
}

/// A hold on requested experts; dropping it ends the hold.
pub trait ExpertLease<B: Backend> {
    /// Position in the requested `ids` of an expert that is in memory and was not handed out before: present ones
    /// first, then each as its read lands (blocks). `None` when all were handed out.
    fn next_ready(&mut self) -> Result<Option<usize>, SupplyError>;

    /// Appends to `ready` what `next_ready` would hand out without a wait, at least one position; nothing when all were handed out.
    /// For devices that compute several at once.
    fn next_batch(&mut self, ready: &mut Vec<usize>) -> Result<(), SupplyError> {
        ready.extend(self.next_ready()?);
        Ok(())
    }

    /// The matrices of position `index`, which `next_ready` has handed out.
    fn mats(&self, index: usize) -> ExpertMats<'_, B>;
}

/// Rows of the disk-only tables (V4.1 Engram). Table numbers follow the order of the file's table layers.
pub trait RowSupply: Send + Sync {
    /// Bytes of one row of every table.
    fn row_bytes(&self) -> usize;

    /// Starts reading: `rows_by_table[t]` are the rows wanted of table `t`, in any order, repeats allowed; all tables go
    /// to the drive in one deep batch. Returns at once; the ticket keeps alive what it needs.
    fn submit(&self, rows_by_table: &[Vec<u64>]) -> Result<Box<dyn RowTicket>, SupplyError>;
}

/// Rows under way.
pub trait RowTicket: Send {
    /// Waits for all rows of `table` and writes them to `out` (`[rows asked, row_bytes]`) in the order asked.
    fn wait(&mut self, table: usize, out: &mut [u8]) -> Result<(), SupplyError>;
}
