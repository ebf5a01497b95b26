//! Router, one routed expert, and the shared expert (spec 3.9); the expert sublayer of a single row.
//! Never adds in the order in which reads land. Surprising fact: outputs are added by rising expert id and not by falling score, so that a
//! sweep of any width can add each expert's output as soon as it is made and still get the bits of a single row.

use super::grouping::Grouping;
use super::pass::Pass;
use crate::backend::{Backend, BackendError, ops};
use crate::models::ModelError;
use crate::models::probe::Point;
use crate::models::supply::{ExpertLease, ExpertMats, ExpertSupply, Phase};
use crate::units::{ExpertIdx, LayerIdx};

impl<B: Backend> Pass<'_, B> {
    /// `y = experts(x) + shared(x)` for a pass of one row: the experts are computed as they land.
    pub fn moe_row(
        &mut self,
        layer: usize,
        supply: &dyn ExpertSupply<B>,
        grouping: &mut Grouping,
    ) -> Result<(), ModelError> {
        self.route(layer)?;
        let (experts, k) = (self.ctx.config.experts, self.ctx.config.experts_per_token);
        grouping.ids.resize(k, 0);
        self.ctx.backend.ask_ids(&self.work.router_ids, k)?;
        // A device works on this while the host hears of the choice and queues what follows from it.
        if B::IS_QUEUED {
            self.shared_expert(layer)?;
        }
        self.ctx.backend.take_ids(&self.work.router_ids, &mut grouping.ids)?;
        grouping.group(experts, k);
        let mut lease = supply.request(LayerIdx(layer as u16), &grouping.active, Phase::Decode)?;
        self.guess_next(layer, supply, &mut grouping.guess)?;
        // The processor works on this while the drive reads.
        if !B::IS_QUEUED {
            self.shared_expert(layer)?;
        }
        if self.probe.as_ref().is_some_and(|p| p.wants_expert_mid()) {
            while let Some(index) = lease.next_ready()? {
                let expert = grouping.active[index];
                self.expert_row(layer, expert, &lease.mats(index), grouping.range(expert).start)?;
            }
        } else {
            self.experts_row(lease, grouping)?;
        }
        Ok(self.combine_row(grouping)?)
    }

    /// Spec 3.9, step 5, for the only row: a device may take all experts that are at hand together.
    fn experts_row(&mut self, mut lease: Box<dyn ExpertLease<B> + '_>, grouping: &Grouping) -> Result<(), ModelError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let c = ctx.config;
        let mut ready = Vec::with_capacity(grouping.active.len());
        loop {
            ready.clear();
            lease.next_batch(&mut ready)?;
            if ready.is_empty() {
                return Ok(());
            }
            let placed = |index: &usize| {
                let (mats, place) = (lease.mats(*index), grouping.range(grouping.active[*index]).start);
                ops::PlacedExpert { gate: mats.gate, up: mats.up, down: mats.down, place }
            };
            let experts: Vec<_> = ready.iter().map(placed).collect();
            let (hidden, width, limit) = (c.hidden, c.expert_width, c.swiglu_limit);
            let op = ops::ExpertsRow { x: &w.x, experts: &experts, hidden, width, limit };
            let (gate, up, y) = (&mut w.expert_gate, &mut w.expert_up, &mut w.expert_y);
            ctx.backend.experts_row(op, ops::ExpertsOut { gate, up, y, outputs: &mut w.expert_out })?;
        }
    }

    /// Spec 3.9, steps 1 to 4.
    pub fn route(&mut self, layer: usize) -> Result<(), BackendError> {
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

    /// Spec 3.9, step 5, for the only row; its output goes to `place`.
    fn expert_row(
        &mut self,
        layer: usize,
        expert: ExpertIdx,
        mats: &ExpertMats<'_, B>,
        place: usize,
    ) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let pair = ops::MatmulPair { a: mats.gate, b: mats.up, x: &w.x, rows: 1 };
        ctx.backend.matmul_pair(pair, &mut w.expert_gate, &mut w.expert_up)?;
        self.expert_down(layer, expert, mats, 1)?;
        let (w, hidden) = (&mut *self.work, ctx.config.hidden);
        ctx.backend.copy(&w.expert_y, 0, &mut w.expert_out, place * hidden, hidden)
    }

    /// Second half of step 5: from `expert_gate` and `expert_up` (`[rows, expert_width]`) to `expert_y`.
    pub fn expert_down(
        &mut self,
        layer: usize,
        expert: ExpertIdx,
        mats: &ExpertMats<'_, B>,
        rows: usize,
    ) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let c = ctx.config;
        let op = ops::SwiGlu { up: &w.expert_up, values: rows * c.expert_width, limit: c.swiglu_limit };
        ctx.backend.swiglu(op, &mut w.expert_gate)?;
        if let Some(probe) = self.probe.as_mut().filter(|p| p.wants_expert_mid()) {
            let mut mid = vec![0.0; rows * c.expert_width];
            ctx.backend.download(&w.expert_gate, 0, &mut mid)?;
            probe.expert_mid(layer, expert.0 as usize, c.expert_width, &mid);
        }
        ctx.backend.matmul(ops::Matmul { w: mats.down, x: &w.expert_gate, rows, groups: 1 }, &mut w.expert_y)
    }

    /// The same formula with the resident matrices, for all rows of the pass.
    pub fn shared_expert(&mut self, layer: usize) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let (c, weights) = (ctx.config, &ctx.layer(layer).moe);
        let (a, b) = (ctx.backend.view(&weights.shared_gate), ctx.backend.view(&weights.shared_up));
        let pair = ops::MatmulPair { a, b, x: &w.x, rows: ctx.rows };
        ctx.backend.matmul_pair(pair, &mut w.expert_gate, &mut w.expert_up)?;
        let op = ops::SwiGlu { up: &w.expert_up, values: ctx.rows * c.expert_width, limit: c.swiglu_limit };
        ctx.backend.swiglu(op, &mut w.expert_gate)?;
        self.show(Point::SharedMid, layer, c.expert_width, |w| &w.expert_gate)?;
        let w = &mut *self.work;
        ctx.matmul(&weights.shared_down, &w.expert_gate, &mut w.shared_out)
    }

    /// Spec 3.9, step 6, for the only row.
    fn combine_row(&mut self, grouping: &Grouping) -> Result<(), BackendError> {
        let (ctx, w) = (self.ctx, &mut *self.work);
        let (k, width) = (ctx.config.experts_per_token, ctx.config.hidden);
        ctx.backend.upload_ids(&grouping.places, &mut w.places, 0)?;
        let sort = ops::MoveRows { src: &w.router_weights, indices: &w.places, range: 0..k, width: 1 };
        ctx.backend.gather_rows(sort, &mut w.expert_weights)?;
        let op = ops::CombineExperts {
            outputs: &w.expert_out,
            weights: &w.expert_weights,
            shared: &w.shared_out,
            rows: 1,
            k,
            width,
        };
        ctx.backend.combine_experts(op, &mut w.y)
    }
}
