//! Experts and n-gram rows out of memory, in an order that a seed shuffles.
//! Never changes what is delivered, only when. Surprising fact: `next_ready` hands experts out in shuffled order, which
//! must not change a bit of the result.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ds4::backend::{Backend, SharedBytes};
use ds4::models::supply::{ExpertLease, ExpertMats, ExpertSupply, Phase, RowSupply, RowTicket, SupplyError};
use ds4::models::weights::WeightSource;
use ds4::units::{ExpertIdx, LayerIdx};

struct Expert<B: Backend> {
    gate: B::Mat,
    up: B::Mat,
    down: B::Mat,
}

/// All experts, loaded.
pub struct MemoryExperts<B: Backend> {
    backend: Arc<B>,
    layers: Vec<Vec<Expert<B>>>,
    lease_max: usize,
    pub requests: AtomicU64,
    /// Every (layer, expert) in the order of the requests.
    pub asked: Mutex<Vec<(u16, u16)>>,
    held: AtomicU64,
    /// Most experts that leases held together.
    pub held_most: AtomicU64,
    /// Requests left until one fails; negative = never.
    pub fail_after: std::sync::atomic::AtomicI64,
    seed: AtomicU64,
}

fn slice<B: Backend>(source: &dyn WeightSource, backend: &B, name: &str, expert: usize) -> B::Mat {
    let (shape, bytes) = (source.shape(name).unwrap(), source.bytes(name).unwrap());
    let (cols, rows) = (shape.dims[0] as usize, shape.dims[1] as usize);
    let len = shape.ty.row_bytes(cols as u64).unwrap() as usize * rows;
    let part: SharedBytes = bytes.as_slice()[expert * len..][..len].to_vec().into();
    backend.load(shape.ty, rows, cols, part).unwrap()
}

impl<B: Backend> MemoryExperts<B> {
    pub fn new(
        backend: Arc<B>,
        source: &dyn WeightSource,
        (layers, experts): (usize, usize),
        lease_max: usize,
    ) -> Self {
        let load = |layer: usize, expert: usize| {
            let mat = |part: &str| slice(source, &*backend, &format!("blk.{layer}.ffn_{part}_exps.weight"), expert);
            Expert { gate: mat("gate"), up: mat("up"), down: mat("down") }
        };
        let layers = (0..layers).map(|l| (0..experts).map(|e| load(l, e)).collect()).collect();
        Self {
            layers,
            backend,
            lease_max,
            requests: AtomicU64::new(0),
            asked: Mutex::default(),
            held: AtomicU64::new(0),
            held_most: AtomicU64::new(0),
            fail_after: (-1).into(),
            seed: AtomicU64::new(1),
        }
    }
}

struct Lease<'a, B: Backend> {
    supply: &'a MemoryExperts<B>,
    layer: usize,
    ids: Vec<ExpertIdx>,
    order: Vec<usize>,
}

impl<B: Backend> ExpertSupply<B> for MemoryExperts<B> {
    fn lease_max(&self) -> usize {
        self.lease_max
    }

    fn request(
        &self,
        layer: LayerIdx,
        ids: &[ExpertIdx],
        _phase: Phase,
    ) -> Result<Box<dyn ExpertLease<B> + '_>, SupplyError> {
        assert!(ids.len() <= self.lease_max, "{} experts asked of {}", ids.len(), self.lease_max);
        self.requests.fetch_add(1, Ordering::Relaxed);
        if self.fail_after.load(Ordering::Relaxed) >= 0 && self.fail_after.fetch_sub(1, Ordering::Relaxed) == 0 {
            return Err(SupplyError(format!("layer {} cannot be read", layer.0).into()));
        }
        self.asked.lock().unwrap().extend(ids.iter().map(|id| (layer.0, id.0)));
        let held = self.held.fetch_add(ids.len() as u64, Ordering::Relaxed) + ids.len() as u64;
        self.held_most.fetch_max(held, Ordering::Relaxed);
        let mut order: Vec<usize> = (0..ids.len()).collect();
        let seed = self.seed.fetch_add(1, Ordering::Relaxed) as usize;
        order.sort_by_key(|i| (i + 1) * (2 * seed + 1) * 7919 % 101);
        Ok(Box::new(Lease { supply: self, layer: layer.0 as usize, ids: ids.to_vec(), order }))
    }
}

impl<B: Backend> ExpertLease<B> for Lease<'_, B> {
    fn next_ready(&mut self) -> Result<Option<usize>, SupplyError> {
        Ok(self.order.pop())
    }

    fn mats(&self, index: usize) -> ExpertMats<'_, B> {
        let expert = &self.supply.layers[self.layer][self.ids[index].0 as usize];
        let backend = &self.supply.backend;
        ExpertMats { gate: backend.view(&expert.gate), up: backend.view(&expert.up), down: backend.view(&expert.down) }
    }
}

impl<B: Backend> Drop for Lease<'_, B> {
    fn drop(&mut self) {
        self.supply.held.fetch_sub(self.ids.len() as u64, Ordering::Relaxed);
    }
}

/// N-gram tables in memory.
pub struct MemoryRows {
    tables: Vec<SharedBytes>,
    row_bytes: usize,
    pub submissions: AtomicU64,
}

impl MemoryRows {
    pub fn new(source: &dyn WeightSource, layers: &[usize]) -> Self {
        let name = |layer: &usize| format!("blk.{layer}.engram_embd.weight");
        Self {
            tables: layers.iter().map(|l| source.bytes(&name(l)).unwrap()).collect(),
            row_bytes: source.shape(&name(&layers[0])).unwrap().dims[0] as usize,
            submissions: AtomicU64::new(0),
        }
    }
}

struct Ticket {
    tables: Vec<SharedBytes>,
    rows: Vec<Vec<u64>>,
    row_bytes: usize,
}

impl RowSupply for MemoryRows {
    fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    fn submit(&self, rows_by_table: &[Vec<u64>]) -> Result<Box<dyn RowTicket>, SupplyError> {
        self.submissions.fetch_add(1, Ordering::Relaxed);
        let (tables, rows) = (self.tables.clone(), rows_by_table.to_vec());
        Ok(Box::new(Ticket { tables, rows, row_bytes: self.row_bytes }))
    }
}

impl RowTicket for Ticket {
    fn wait(&mut self, table: usize, out: &mut [u8]) -> Result<(), SupplyError> {
        for (row, out) in self.rows[table].iter().zip(out.chunks_exact_mut(self.row_bytes)) {
            out.copy_from_slice(&self.tables[table].as_slice()[*row as usize * self.row_bytes..][..self.row_bytes]);
        }
        Ok(())
    }
}
