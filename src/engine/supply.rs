//! What models ask for, answered from storage: experts from the cache or from memory, rows from the tables.
//! Never caches by itself. Surprising fact: without streaming there is no cache at all: all experts are resident tensors, so
//! that run is the plain twin of every streamed one.

use std::sync::Arc;

use crate::backend::cpu::CpuBackend;
use crate::backend::cpu::matmul::MatView;
use crate::engine::known::KnownExperts;
use crate::engine::lookahead::Lookahead;
use crate::engine::routes::Routes;
use crate::models::supply::{ExpertLease, ExpertMats, ExpertSupply, Phase, RowSupply, RowTicket, SupplyError};
use crate::storage::expert_cache::{self, ExpertCache};
use crate::storage::layout::{ExpertTensor, LayerExperts};
use crate::storage::row_table::{self, RowTables};
use crate::storage::weights::ResidentWeights;
use crate::units::{ExpertIdx, ExpertKey, LayerIdx};

fn failed(error: impl std::error::Error + Send + Sync + 'static) -> SupplyError {
    SupplyError(Box::new(error))
}

/// A request that no file layout answers: a bug of the model, told as an error since a session must survive it.
#[derive(Debug, thiserror::Error)]
#[error("layer {layer} has no routed experts in this file; convert it again with ds4-gguf convert")]
struct NoSuchLayer {
    layer: u16,
}

fn find_layer(layers: &[LayerExperts], layer: LayerIdx) -> Result<&LayerExperts, SupplyError> {
    let at = layers.binary_search_by_key(&layer, |l| l.layer).map_err(|_| failed(NoSuchLayer { layer: layer.0 }))?;
    Ok(&layers[at])
}

fn mat<'a>(tensor: &ExpertTensor, bytes: &'a [u8]) -> MatView<'a> {
    MatView { ty: tensor.ty, rows: tensor.rows, cols: tensor.cols, bytes }
}

fn mats<'a>(layer: &LayerExperts, [gate, up, down]: [&'a [u8]; 3]) -> ExpertMats<'a, CpuBackend> {
    ExpertMats { gate: mat(&layer.gate, gate), up: mat(&layer.up, up), down: mat(&layer.down, down) }
}

/// Experts that a sweep may hold in any case: enough reads to keep a drive busy while some are computed.
const SWEEP_EXPERTS_MIN: usize = 16;

/// Experts that are streamed through the cache.
pub struct StreamedExperts {
    cache: Arc<ExpertCache>,
    layers: Vec<LayerExperts>,
    lookahead: Option<Arc<Lookahead>>,
    known: Arc<KnownExperts>,
    top_k: usize,
}

impl StreamedExperts {
    /// Experts of `layers` (by rising layer) behind `cache`, `top_k` a token, told to `lookahead` if there is one.
    pub fn new(
        cache: Arc<ExpertCache>,
        layers: Vec<LayerExperts>,
        top_k: usize,
        lookahead: Option<Arc<Lookahead>>,
    ) -> Self {
        let known = Arc::new(KnownExperts::new(Arc::clone(&cache), lookahead.is_some()));
        Self { cache, layers, lookahead, known, top_k }
    }

    /// What became of experts that were known before their layer.
    pub fn known(&self) -> &Arc<KnownExperts> {
        &self.known
    }
}

struct StreamedLease<'a> {
    lease: expert_cache::Lease<'a>,
    layer: &'a LayerExperts,
}

impl ExpertSupply<CpuBackend> for StreamedExperts {
    fn lease_max(&self) -> usize {
        self.cache.lease_max()
    }

    /// An eighth of the slots, since what a prompt's experts take at a time decode lacks afterwards; or all that hold nothing worth keeping.
    fn sweep_max(&self) -> usize {
        let slots = self.cache.lease_max();
        slots.min((slots / 8).max(self.cache.slots_to_spare()).max(SWEEP_EXPERTS_MIN))
    }

    fn favour(&self, layer: LayerIdx, ids: &[ExpertIdx]) {
        self.cache.favour(layer, ids);
    }

    fn request(
        &self,
        layer: LayerIdx,
        ids: &[ExpertIdx],
        phase: Phase,
    ) -> Result<Box<dyn ExpertLease<CpuBackend> + '_>, SupplyError> {
        let found = find_layer(&self.layers, layer)?;
        self.known.requested(layer, ids, phase);
        let lease = self.cache.request(layer, ids, phase).map_err(failed)?;
        // After the request: its own reads go first.
        if let Some(lookahead) = &self.lookahead {
            lookahead.requested(layer, ids, phase);
        }
        Ok(Box::new(StreamedLease { lease, layer: found }))
    }

    fn announce(&self, experts: &[ExpertKey]) {
        self.known.announce(experts);
    }

    fn guesses_wanted(&self) -> usize {
        self.lookahead.as_ref().map_or(0, |lookahead| lookahead.guesses_wanted())
    }

    fn has(&self, expert: ExpertKey) -> bool {
        self.cache.contains(expert)
    }

    fn hold_present(&self, layer: LayerIdx, expert: ExpertIdx) -> Option<Box<dyn ExpertLease<CpuBackend> + '_>> {
        let found = find_layer(&self.layers, layer).ok()?;
        let lease = self.cache.hold_present(ExpertKey { layer, expert }, HOLD_RESERVE * self.top_k)?;
        Some(Box::new(StreamedLease { lease, layer: found }))
    }

    fn guess(&self, layer: LayerIdx, ids: &[ExpertIdx]) {
        if let Some(lookahead) = &self.lookahead {
            lookahead.guessed(layer, ids);
        }
    }
}

/// Tokens' worth of one layer's experts that a hold for a copy leaves to requests: one that is under way, and the next.
const HOLD_RESERVE: usize = 2;

impl ExpertLease<CpuBackend> for StreamedLease<'_> {
    fn next_ready(&mut self) -> Result<Option<usize>, SupplyError> {
        self.lease.next_ready().map_err(failed)
    }

    fn mats(&self, index: usize) -> ExpertMats<'_, CpuBackend> {
        mats(self.layer, self.lease.slices(index))
    }
}

impl Drop for StreamedLease<'_> {
    /// A request that failed ends only with all of its reads, so that the next one cannot join a read that is about to fail too.
    /// After a request that went well nothing is left to wait for.
    fn drop(&mut self) {
        while !matches!(self.lease.next_ready(), Ok(None)) {}
    }
}

/// Experts that all lie in memory.
pub struct ResidentExperts {
    weights: Arc<ResidentWeights>,
    layers: Vec<LayerExperts>,
    /// Position of each layer's gate, up and down tensors among the loaded ones.
    tensors: Vec<[usize; 3]>,
    routes: Routes,
}

impl ResidentExperts {
    /// Experts of `layers` whose tensors were loaded; `None` if one was not. Requests are told to `routes`.
    pub fn new(weights: Arc<ResidentWeights>, layers: Vec<LayerExperts>, routes: Routes) -> Option<Self> {
        let position =
            |layer: &LayerExperts, part: &str| weights.index(&format!("blk.{}.ffn_{part}_exps.weight", layer.layer.0));
        let tensors = layers
            .iter()
            .map(|l| Some([position(l, "gate")?, position(l, "up")?, position(l, "down")?]))
            .collect::<Option<Vec<_>>>()?;
        Some(Self { weights, layers, tensors, routes })
    }
}

struct ResidentLease<'a> {
    experts: &'a ResidentExperts,
    layer: usize,
    ids: Vec<ExpertIdx>,
    handed: usize,
}

impl ExpertSupply<CpuBackend> for ResidentExperts {
    fn lease_max(&self) -> usize {
        self.layers.iter().map(|l| usize::from(l.experts)).max().unwrap_or(0)
    }

    fn request(
        &self,
        layer: LayerIdx,
        ids: &[ExpertIdx],
        phase: Phase,
    ) -> Result<Box<dyn ExpertLease<CpuBackend> + '_>, SupplyError> {
        find_layer(&self.layers, layer)?;
        self.routes.request(phase, layer, ids, 0);
        let at = self.layers.partition_point(|l| l.layer < layer);
        Ok(Box::new(ResidentLease { experts: self, layer: at, ids: ids.to_vec(), handed: 0 }))
    }
}

impl ExpertLease<CpuBackend> for ResidentLease<'_> {
    fn next_ready(&mut self) -> Result<Option<usize>, SupplyError> {
        let next = (self.handed < self.ids.len()).then_some(self.handed);
        self.handed += 1;
        Ok(next)
    }

    fn mats(&self, index: usize) -> ExpertMats<'_, CpuBackend> {
        let layer = &self.experts.layers[self.layer];
        let expert = usize::from(self.ids[index].0);
        let tensors = self.experts.tensors[self.layer];
        let slice = |tensor: usize, shape: &ExpertTensor| {
            let bytes = shape.slice_bytes as usize;
            &self.experts.weights.tensor(tensor)[expert * bytes..(expert + 1) * bytes]
        };
        mats(layer, [slice(tensors[0], &layer.gate), slice(tensors[1], &layer.up), slice(tensors[2], &layer.down)])
    }
}

/// Rows of the disk-only tables.
pub struct TableRows(pub Arc<RowTables>);

struct Ticket(row_table::RowTicket);

impl RowSupply for TableRows {
    fn row_bytes(&self) -> usize {
        self.0.tables().first().map_or(0, |t| t.row_bytes as usize)
    }

    fn submit(&self, rows_by_table: &[Vec<u64>]) -> Result<Box<dyn RowTicket>, SupplyError> {
        Ok(Box::new(Ticket(self.0.submit(rows_by_table).map_err(failed)?)))
    }
}

impl RowTicket for Ticket {
    fn wait(&mut self, table: usize, out: &mut [u8]) -> Result<(), SupplyError> {
        self.0.wait(table, out).map_err(failed)
    }
}
