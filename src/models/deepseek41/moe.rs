//! Router, routed experts and the shared expert (spec 3.9), over experts that may still be on their way.
//! Never waits for a read while there is something to compute: the shared expert runs first, then whatever has landed.
//! Surprising fact: each expert writes to its own place for each row, and the sum is taken at the end in router order,
//! so the order in which reads land cannot change a bit.

use super::guess::Guess;
use super::pass::Pass;
use crate::backend::{Backend, BackendError, ops};
use crate::models::ModelError;
use crate::models::probe::Point;
use crate::models::supply::{ExpertLease, ExpertMats, ExpertSupply, Phase};
use crate::units::{ExpertIdx, LayerIdx};

/// Rows of a chunk grouped by expert; host memory that is kept from layer to layer.
pub struct Grouping {
    /// `[rows, k]` as the router chose.
    ids: Vec<i32>,
    /// First assignment of each expert, and the end of the last.
    starts: Vec<usize>,
    /// Distinct experts, in the order in which they are asked for.
    active: Vec<ExpertIdx>,
    rows: Vec<i32>,
    places: Vec<i32>,
    /// Where the next assignment of each expert goes, while sorting.
    next: Vec<usize>,
    guess: Guess,
}

impl Grouping {
    /// Room for chunks of `chunk` rows with `k` experts each.
    pub fn new(chunk: usize, experts: usize, k: usize) -> Self {
        Self {
            ids: Vec::with_capacity(chunk * k),
            starts: Vec::with_capacity(experts + 1),
            active: Vec::with_capacity(experts),
            rows: Vec::with_capacity(chunk * k),
            places: Vec::with_capacity(chunk * k),
            next: Vec::with_capacity(experts + 1),
            guess: Guess::new(experts),
        }
    }

    /// Bytes that [`Grouping::new`] takes.
    pub fn bytes_for(chunk: usize, experts: usize, k: usize) -> u64 {
        let by_expert = 2 * (experts + 1) * size_of::<usize>() + experts * size_of::<ExpertIdx>();
        (3 * chunk * k * size_of::<i32>() + by_expert) as u64 + Guess::bytes_for(experts)
    }

    /// Sorts `ids` by expert; rows of one expert stay in rising order.
    fn group(&mut self, experts: usize, k: usize) {
        self.starts.clear();
        self.starts.resize(experts + 1, 0);
        self.active.clear();
        for id in &self.ids {
            let expert = *id as usize;
            if self.starts[expert + 1] == 0 {
                self.active.push(ExpertIdx(expert as u16));
            }
            self.starts[expert + 1] += 1;
        }
        for expert in 0..experts {
            self.starts[expert + 1] += self.starts[expert];
        }
        // One token asks in router order; a batch by rising id, which is the order of the file.
        if self.ids.len() > k {
            self.active.sort_unstable();
        }
        self.rows.resize(self.ids.len(), 0);
        self.places.resize(self.ids.len(), 0);
        self.next.clone_from(&self.starts);
        for (place, id) in self.ids.iter().enumerate() {
            let at = self.next[*id as usize];
            self.next[*id as usize] += 1;
            self.rows[at] = (place / k) as i32;
            self.places[at] = place as i32;
        }
    }

    /// Assignments of `expert`.
    fn range(&self, expert: ExpertIdx) -> std::ops::Range<usize> {
        self.starts[expert.0 as usize]..self.starts[expert.0 as usize + 1]
    }
}

impl<B: Backend> Pass<'_, B> {
    /// `y = experts(x) + shared(x)`.
    pub fn moe(
        &mut self,
        layer: usize,
        supply: &dyn ExpertSupply<B>,
        grouping: &mut Grouping,
    ) -> Result<(), ModelError> {
        self.route(layer)?;
        self.group(grouping)?;
        let phase = if self.ctx.rows == 1 { Phase::Decode } else { Phase::Prefill };
        let request = |ids: &[ExpertIdx]| supply.request(LayerIdx(layer as u16), ids, phase);
        // Two waves share the lease when one is not enough: the next one is read while this one is computed.
        let lease_max = supply.lease_max();
        let one_wave = grouping.active.len() <= lease_max;
        let wave_len = if one_wave { lease_max } else { (lease_max / 2).max(1) };
        let mut waves = grouping.active.chunks(wave_len);
        let mut current = waves.next().map(|ids| request(ids).map(|lease| (ids, lease))).transpose()?;
        let mut is_first = true;
        while let Some((ids, lease)) = current {
            let next = waves.next();
            let early = match next {
                Some(ids) if lease_max >= 2 => Some(request(ids)?),
                _ => None,
            };
            if is_first {
                self.guess_next(layer, supply, &mut grouping.guess)?;
                self.shared_expert(layer)?;
                is_first = false;
            }
            self.run_wave(layer, ids, lease, grouping)?;
            current = match (next, early) {
                (Some(ids), Some(lease)) => Some((ids, lease)),
                (Some(ids), None) => Some((ids, request(ids)?)),
                (None, _) => None,
            };
        }
        Ok(self.combine()?)
    }

    /// Spec 3.9, steps 1 to 4.
    fn route(&mut self, layer: usize) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let (c, weights) = (ctx.config, &ctx.layer(layer).moe);
        ctx.matmul(&weights.router, &w.x, &mut w.router_logits)?;
        let op = ops::Route {
            logits: &w.router_logits,
            bias: &weights.bias,
            rows: ctx.rows,
            experts: c.experts,
            k: c.experts_per_token,
            scale: c.routed_scale,
            normalise: c.normalise_top_k,
        };
        ctx.backend.route(op, &mut w.router_ids, &mut w.router_weights)?;
        self.show_ids(Point::RouterIds, layer, c.experts_per_token, |w| &w.router_ids)?;
        self.show(Point::RouterWeights, layer, c.experts_per_token, |w| &w.router_weights)
    }

    /// Brings the choice to the host, groups it and sends the groups back.
    fn group(&mut self, grouping: &mut Grouping) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let k = ctx.config.experts_per_token;
        grouping.ids.resize(ctx.rows * k, 0);
        ctx.backend.download_ids(&w.router_ids, 0, &mut grouping.ids)?;
        grouping.group(ctx.config.experts, k);
        ctx.backend.upload_ids(&grouping.rows, &mut w.group_rows, 0)?;
        ctx.backend.upload_ids(&grouping.places, &mut w.group_places, 0)
    }

    /// Computes the experts of one lease as they land.
    fn run_wave(
        &mut self,
        layer: usize,
        ids: &[ExpertIdx],
        mut lease: Box<dyn ExpertLease<B> + '_>,
        grouping: &Grouping,
    ) -> Result<(), ModelError> {
        while let Some(index) = lease.next_ready()? {
            let mats = lease.mats(index);
            self.expert(layer, ids[index], &mats, grouping)?;
        }
        Ok(())
    }

    /// Spec 3.9, step 5, for the rows of one expert.
    fn expert(
        &mut self,
        layer: usize,
        expert: ExpertIdx,
        mats: &ExpertMats<'_, B>,
        grouping: &Grouping,
    ) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let (c, range) = (ctx.config, grouping.range(expert));
        let rows = range.len();
        let gather = ops::MoveRows { src: &w.x, indices: &w.group_rows, range: range.clone(), width: c.hidden };
        ctx.backend.gather_rows(gather, &mut w.expert_x)?;
        ctx.backend.matmul(ops::Matmul { w: mats.gate, x: &w.expert_x, rows, groups: 1 }, &mut w.expert_gate)?;
        ctx.backend.matmul(ops::Matmul { w: mats.up, x: &w.expert_x, rows, groups: 1 }, &mut w.expert_up)?;
        let op = ops::SwiGlu { up: &w.expert_up, values: rows * c.expert_width, limit: c.swiglu_limit };
        ctx.backend.swiglu(op, &mut w.expert_gate)?;
        if let Some(probe) = self.probe.as_mut().filter(|p| p.wants_expert_mid()) {
            let mut mid = vec![0.0; rows * c.expert_width];
            ctx.backend.download(&w.expert_gate, 0, &mut mid)?;
            probe.expert_mid(layer, expert.0 as usize, c.expert_width, &mid);
        }
        ctx.backend.matmul(ops::Matmul { w: mats.down, x: &w.expert_gate, rows, groups: 1 }, &mut w.expert_y)?;
        let scatter = ops::MoveRows { src: &w.expert_y, indices: &w.group_places, range, width: c.hidden };
        ctx.backend.scatter_rows(scatter, &mut w.expert_out)
    }

    /// The same formula with the resident matrices, for all rows.
    fn shared_expert(&mut self, layer: usize) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let (c, weights) = (ctx.config, &ctx.layer(layer).moe);
        ctx.matmul(&weights.shared_gate, &w.x, &mut w.expert_gate)?;
        ctx.matmul(&weights.shared_up, &w.x, &mut w.expert_up)?;
        let op = ops::SwiGlu { up: &w.expert_up, values: ctx.rows * c.expert_width, limit: c.swiglu_limit };
        ctx.backend.swiglu(op, &mut w.expert_gate)?;
        self.show(Point::SharedMid, layer, c.expert_width, |w| &w.expert_gate)?;
        let w = &mut *self.work;
        ctx.matmul(&weights.shared_down, &w.expert_gate, &mut w.shared_out)
    }

    /// Spec 3.9, step 6.
    fn combine(&mut self) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let op = ops::CombineExperts {
            outputs: &w.expert_out,
            weights: &w.router_weights,
            shared: &w.shared_out,
            rows: ctx.rows,
            k: ctx.config.experts_per_token,
            width: ctx.config.hidden,
        };
        ctx.backend.combine_experts(op, &mut w.y)
    }
}
