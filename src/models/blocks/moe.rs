//! The expert half of a layer: router, routed experts, shared expert; for one row as experts land, for a sweep some experts at a time.
//! Never adds in the order in which reads land. Surprising fact: outputs are added by rising expert id and not by falling score, so that a
//! sweep of any width can add each expert's output as soon as it is made and still get the bits of a single row.

use super::buffers;
use super::grouping::Grouping;
use super::guess::Guess;
use super::probing::{Place, show, show_ids};
use super::suffix::Piece;
use super::sweep::Rows;
use crate::backend::cpu::experts_rows::experts_rows as one_by_one;
use crate::backend::{Backend, BackendError, ops};
use crate::models::ModelError;
use crate::models::probe::{Point, Probe};
use crate::models::supply::{
    ExpertLease, ExpertMats, ExpertSupply, Phase, RowChoice, RowExperts, RowGuess, RowProducts,
};
use crate::units::{ExpertIdx, LayerIdx};

/// Router and shared expert of one layer.
pub struct MoeWeights<B: Backend> {
    pub norm: B::Buf,
    pub router: B::Mat,
    /// `[experts]`; `None` where the router does not choose.
    pub bias: Option<B::Buf>,
    pub shared_gate: B::Mat,
    pub shared_up: B::Mat,
    pub shared_down: B::Mat,
}

/// Sizes of the expert half, and the rows that its buffers hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MoeSizes {
    pub hidden: usize,
    pub experts: usize,
    /// Experts of a token.
    pub k: usize,
    /// Width of an expert, routed or shared.
    pub width: usize,
    pub rows: usize,
}

/// Constants of one layer's expert half.
#[derive(Clone, Copy, Debug)]
pub struct MoeRules {
    /// Factor of the router weights.
    pub scale: f32,
    /// Whether router weights are divided by their sum.
    pub normalise: bool,
    /// Clamp of routed experts.
    pub limit: f32,
    /// Clamp of the shared expert.
    pub shared_limit: f32,
}

buffers! {
    /// Work memory of the expert half.
    MoeBuffers, s: MoeSizes;
    bufs {
        /// `[rows, experts]`.
        router_logits: s.rows * s.experts,
        /// `[rows, k]`.
        router_weights: s.rows * s.k,
        /// `[rows, hidden]`: rows of one expert.
        expert_x: s.rows * s.hidden,
        /// `[rows, width]`: gate, then the product of both, of one expert or the shared one.
        expert_gate: s.rows * s.width,
        /// `[rows, width]`.
        expert_up: s.rows * s.width,
        /// `[rows, hidden]`: output of one expert.
        expert_y: s.rows * s.hidden,
        /// `[k, hidden]`: outputs of the experts of a single row, by rising expert.
        expert_out: s.k * s.hidden,
        /// `[rows]` or `[k]`: weights of the outputs that are being added.
        expert_weights: s.rows.max(s.k),
        /// `[rows, hidden]`: sums that outputs are being added to.
        sums: s.rows * s.hidden,
        /// `[rows]`: ones.
        ones: s.rows,
        /// `[rows, hidden]`: output of the shared expert.
        shared_out: s.rows * s.hidden,
    }
    ids {
        /// `[rows, k]`.
        router_ids: s.rows * s.k,
        /// `[k]`: places of a single row's weights, by rising expert.
        places: s.k,
    }
    parts {}
    fields {}
}

/// [`MoeBuffers`], ready for use.
pub struct MoeWork<B: Backend>(pub MoeBuffers<B>);

impl<B: Backend> MoeWork<B> {
    /// Allocates them.
    pub fn new(sizes: MoeSizes, backend: &B) -> Result<Self, BackendError> {
        let mut buffers = MoeBuffers::new(sizes, backend)?;
        backend.upload(&vec![1.0; sizes.rows], &mut buffers.ones, 0)?;
        Ok(Self(buffers))
    }

    /// Bytes that the buffers really take.
    pub fn allocated_bytes(&self, backend: &B) -> u64 {
        self.0.allocated_bytes(backend)
    }
}

/// What the rows of a sweep keep between the choice of their experts and the last expert; sizes with the rows of the sweep.
#[derive(Clone, Copy)]
pub struct CarrySizes(pub MoeSizes);

buffers! {
    /// Rows of a sweep on their way through the experts.
    MoeCarry, s: CarrySizes;
    bufs {
        /// `[rows, hidden]`: input of the experts.
        x: s.0.rows * s.0.hidden,
        /// `[rows, hidden]`: sum of the experts so far.
        sum: s.0.rows * s.0.hidden,
        /// `[rows, k]`: weights in router order.
        router_weights: s.0.rows * s.0.k,
    }
    ids {
        /// `[rows, k]`: in router order.
        router_ids: s.0.rows * s.0.k,
        /// `[rows * k]`: source rows, grouped by expert.
        group_rows: s.0.rows * s.0.k,
        /// `[rows * k]`: places of their weights, grouped by expert.
        group_places: s.0.rows * s.0.k,
    }
    parts {}
    fields {}
}

/// The expert half of one layer over the rows of a pass.
pub struct Moe<'a, B: Backend> {
    pub backend: &'a B,
    pub sizes: MoeSizes,
    pub rules: MoeRules,
    pub weights: &'a MoeWeights<B>,
    pub layer: usize,
    /// Position of row 0.
    pub first_pos: usize,
    /// Rows of this pass.
    pub rows: usize,
    /// `[rows, hidden]`: the normalised input.
    pub x: &'a mut B::Buf,
    /// `[rows, hidden]`: the output.
    pub y: &'a mut B::Buf,
    pub work: &'a mut MoeBuffers<B>,
    pub probe: Option<&'a mut (dyn Probe + 'a)>,
}

impl<B: Backend> Moe<'_, B> {
    fn place(&self, point: Point) -> Place {
        Place { point, layer: self.layer, first_pos: self.first_pos }
    }

    /// Logits, experts and weights of all rows. With `known` (`[rows, k]`), these experts are taken and only weighed.
    pub fn route(&mut self, known: Option<&[i32]>) -> Result<(), BackendError> {
        let (backend, s, w) = (self.backend, self.sizes, &mut *self.work);
        let router = backend.view(&self.weights.router);
        let logits = ops::Matmul { w: router, x: self.x, rows: self.rows, groups: 1 };
        backend.matmul(logits, &mut w.router_logits)?;
        let (rows, experts, k) = (self.rows, s.experts, s.k);
        let (scale, normalise) = (self.rules.scale, self.rules.normalise);
        match known {
            Some(ids) => {
                backend.upload_ids(ids, &mut w.router_ids, 0)?;
                let (logits, ids) = (&w.router_logits, &w.router_ids);
                let op = ops::WeighExperts { logits, ids, rows, experts, k, scale, normalise };
                backend.weigh_experts(op, &mut w.router_weights)?;
            }
            None => {
                let bias = self.weights.bias.as_ref().expect("loaded for layers whose router chooses");
                let op = ops::Route { logits: &w.router_logits, bias, rows, experts, k, scale, normalise };
                backend.route(op, &mut w.router_ids, &mut w.router_weights)?;
            }
        }
        let place = self.place(Point::RouterIds);
        show_ids(backend, self.probe.as_deref_mut(), place, (rows, k), &self.work.router_ids)?;
        let place = self.place(Point::RouterWeights);
        show(backend, self.probe.as_deref_mut(), place, (rows, k), &self.work.router_weights)
    }

    /// `y = experts(x) + shared(x)` for a pass of one row that was routed: the experts are computed as they land. `known` as for
    /// [`Self::route`]. `next` is the layer behind this one, if its router chooses: the supply may want to know what it would say now.
    pub fn row(
        &mut self,
        supply: &dyn ExpertSupply<B>,
        grouping: &mut Grouping,
        known: Option<&[i32]>,
        next: Option<&MoeWeights<B>>,
    ) -> Result<(), ModelError> {
        let (experts, k) = (self.sizes.experts, self.sizes.k);
        if known.is_none() {
            self.backend.ask_ids(&self.work.router_ids, k)?;
        }
        // A device works on this while the host hears of the choice and queues what follows from it.
        if B::IS_QUEUED {
            self.shared_expert()?;
        }
        grouping.ids.resize(k, 0);
        match known {
            Some(ids) => grouping.ids.copy_from_slice(ids),
            None => self.backend.take_ids(&self.work.router_ids, &mut grouping.ids)?,
        }
        grouping.group(experts, k);
        let mut lease = supply.request(LayerIdx(self.layer as u16), &grouping.active, Phase::Decode)?;
        if let Some(next) = next {
            self.guess_next(next, supply, &mut grouping.guess)?;
        }
        // The processor works on this while the drive reads.
        if !B::IS_QUEUED {
            self.shared_expert()?;
        }
        if self.probe.as_ref().is_some_and(|p| p.wants_expert_mid()) {
            while let Some(index) = lease.next_ready()? {
                let expert = grouping.active[index];
                self.expert_row(expert, &lease.mats(index), grouping.range(expert).start)?;
            }
        } else {
            self.experts_row(lease, grouping)?;
        }
        Ok(self.combine_row(grouping)?)
    }

    /// As [`Self::row`], with experts that the device finds by itself: everything is queued, nothing is waited for.
    pub fn row_found(&mut self, found: &mut dyn RowExperts<B>, next: Option<&MoeWeights<B>>) -> Result<(), ModelError> {
        let (backend, layer, k, limit) = (self.backend, LayerIdx(self.layer as u16), self.sizes.k, self.rules.limit);
        let w = &mut *self.work;
        let (ids, weights, sorted) = (&w.router_ids, &w.router_weights, &mut w.expert_weights);
        found.chosen(RowChoice { layer, k, ids, weights, sorted })?;
        if let Some(next) = next {
            self.name_next(next, found)?;
        }
        // Beside everything since `Pass::enter_experts` has forked; the host has this long at least to bring what is absent.
        backend.aside(|| self.shared_expert())?;
        found.products(RowProducts { layer, k, x: &*self.x, limit, outputs: &mut self.work.expert_out })?;
        backend.join()?;
        Ok(self.combine_sorted()?)
    }

    /// Queues the choice that the next layer's router would make now, if somebody wants to know.
    fn name_next(&mut self, next: &MoeWeights<B>, found: &mut dyn RowExperts<B>) -> Result<(), ModelError> {
        let (count, bias) = match (found.guesses_wanted(), &next.bias) {
            (0, _) | (_, None) => return Ok(()),
            (wanted, Some(bias)) => (wanted.min(self.sizes.k), bias),
        };
        let (backend, w, experts) = (self.backend, &mut *self.work, self.sizes.experts);
        // Logits and weights of this layer have been used up by its own choice; places are for passes that the host groups.
        let logits = ops::Matmul { w: backend.view(&next.router), x: self.x, rows: 1, groups: 1 };
        backend.matmul(logits, &mut w.router_logits)?;
        let (logits, scale, normalise) = (&w.router_logits, 1.0, false);
        let op = ops::Route { logits, bias, rows: 1, experts, k: count, scale, normalise };
        backend.route(op, &mut w.places, &mut w.router_weights)?;
        Ok(found.guessed(RowGuess { layer: LayerIdx(self.layer as u16 + 1), ids: &w.places, count })?)
    }

    /// Tells `supply` what the next layer will probably request, if it wants to know. Between the routing of this layer and its sum.
    fn guess_next(
        &mut self,
        next: &MoeWeights<B>,
        supply: &dyn ExpertSupply<B>,
        guess: &mut Guess,
    ) -> Result<(), BackendError> {
        let (wanted, bias) = match (supply.guesses_wanted(), &next.bias) {
            (0, _) | (_, None) => return Ok(()),
            (wanted, Some(bias)) => (wanted, bias),
        };
        let (backend, w) = (self.backend, &mut *self.work);
        // The logits of this layer have been used up by its routing.
        let logits = ops::Matmul { w: backend.view(&next.router), x: self.x, rows: 1, groups: 1 };
        backend.matmul(logits, &mut w.router_logits)?;
        guess.scores.resize(self.sizes.experts, 0.0);
        guess.bias.resize(self.sizes.experts, 0.0);
        backend.download(&w.router_logits, 0, &mut guess.scores)?;
        backend.download(bias, 0, &mut guess.bias)?;
        guess.choose(wanted);
        supply.guess(LayerIdx(self.layer as u16 + 1), &guess.ids);
        Ok(())
    }

    /// The experts of the only row: a device may take all that are at hand together.
    fn experts_row(&mut self, mut lease: Box<dyn ExpertLease<B> + '_>, grouping: &Grouping) -> Result<(), ModelError> {
        let (s, w) = (self.sizes, &mut *self.work);
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
            let (hidden, width, limit) = (s.hidden, s.width, self.rules.limit);
            let op = ops::ExpertsRow { x: self.x, experts: &experts, hidden, width, limit };
            let (gate, up, y) = (&mut w.expert_gate, &mut w.expert_up, &mut w.expert_y);
            self.backend.experts_row(op, ops::ExpertsOut { gate, up, y, outputs: &mut w.expert_out })?;
        }
    }

    /// One expert of the only row; its output goes to `place`.
    fn expert_row(&mut self, expert: ExpertIdx, mats: &ExpertMats<'_, B>, place: usize) -> Result<(), BackendError> {
        let (backend, w, width) = (self.backend, &mut *self.work, self.sizes.width);
        let pair = ops::MatmulPair { a: mats.gate, b: mats.up, x: self.x, rows: 1 };
        backend.matmul_pair(pair, &mut w.expert_gate, &mut w.expert_up)?;
        let op = ops::SwiGlu { up: &w.expert_up, values: width, limit: self.rules.limit };
        backend.swiglu(op, &mut w.expert_gate)?;
        if let Some(probe) = self.probe.as_deref_mut().filter(|p| p.wants_expert_mid()) {
            let mut mid = vec![0.0; width];
            backend.download(&w.expert_gate, 0, &mut mid)?;
            probe.expert_mid(self.layer, expert.0 as usize, width, &mid);
        }
        backend.matmul(ops::Matmul { w: mats.down, x: &w.expert_gate, rows: 1, groups: 1 }, &mut w.expert_y)?;
        backend.copy(&w.expert_y, 0, &mut w.expert_out, place * self.sizes.hidden, self.sizes.hidden)
    }

    /// The same formula with the resident matrices, for all rows of the pass.
    pub fn shared_expert(&mut self) -> Result<(), BackendError> {
        let (backend, weights, w, rows) = (self.backend, self.weights, &mut *self.work, self.rows);
        let (a, b) = (backend.view(&weights.shared_gate), backend.view(&weights.shared_up));
        let pair = ops::MatmulPair { a, b, x: self.x, rows };
        backend.matmul_pair(pair, &mut w.expert_gate, &mut w.expert_up)?;
        let width = self.sizes.width;
        let op = ops::SwiGlu { up: &w.expert_up, values: rows * width, limit: self.rules.shared_limit };
        backend.swiglu(op, &mut w.expert_gate)?;
        let place = self.place(Point::SharedMid);
        show(backend, self.probe.as_deref_mut(), place, (rows, width), &self.work.expert_gate)?;
        let (w, down) = (&mut *self.work, backend.view(&weights.shared_down));
        backend.matmul(ops::Matmul { w: down, x: &w.expert_gate, rows, groups: 1 }, &mut w.shared_out)
    }

    /// Weighted sum of the only row's experts, then the shared one.
    fn combine_row(&mut self, grouping: &Grouping) -> Result<(), BackendError> {
        let (backend, w) = (self.backend, &mut *self.work);
        let k = self.sizes.k;
        backend.upload_ids(&grouping.places, &mut w.places, 0)?;
        let sort = ops::MoveRows { src: &w.router_weights, indices: &w.places, range: 0..k, width: 1 };
        backend.gather_rows(sort, &mut w.expert_weights)?;
        self.combine_sorted()
    }

    /// As [`Self::combine_row`], with weights that are in order.
    fn combine_sorted(&mut self) -> Result<(), BackendError> {
        let (backend, w) = (self.backend, &*self.work);
        let (k, width) = (self.sizes.k, self.sizes.hidden);
        let op = ops::CombineExperts {
            outputs: &w.expert_out,
            weights: &w.expert_weights,
            shared: &w.shared_out,
            rows: 1,
            k,
            width,
        };
        backend.combine_experts(op, self.y)
    }

    /// Some experts of a sweep by rising id, each on its rows, with work memory for `room` rows; outputs are added to the sums of the rows.
    pub fn experts_rows(
        &mut self,
        experts: &[(ExpertIdx, ExpertMats<'_, B>)],
        grouping: &Grouping,
        room: usize,
        carry: &mut MoeCarry<B>,
    ) -> Result<(), BackendError> {
        let (backend, s, w) = (self.backend, self.sizes, &mut *self.work);
        let mut swept = Vec::with_capacity(experts.len());
        for (expert, mats) in experts {
            let assigned = grouping.range(*expert);
            swept.push(ops::SweptExpert { gate: mats.gate, up: mats.up, down: mats.down, assigned });
        }
        let op = ops::ExpertsRows {
            x: &carry.x,
            rows: &carry.group_rows,
            weights: &carry.router_weights,
            places: &carry.group_places,
            experts: &swept,
            hidden: s.hidden,
            width: s.width,
            limit: self.rules.limit,
            room,
        };
        let work = ops::SweptWork {
            x: &mut w.expert_x,
            gate: &mut w.expert_gate,
            up: &mut w.expert_up,
            y: &mut w.expert_y,
            weights: &mut w.expert_weights,
            before: &mut w.sums,
            after: self.y,
        };
        let Some(probe) = self.probe.as_deref_mut().filter(|p| p.wants_expert_mid()) else {
            return backend.experts_rows(op, work, &mut carry.sum);
        };
        one_by_one(backend, &op, work, &mut carry.sum, |i, rows, mid| {
            let mut values = vec![0.0; rows * s.width];
            backend.download(mid, 0, &mut values)?;
            probe.expert_mid(self.layer, experts[i].0.0 as usize, s.width, &values);
            Ok(())
        })
    }

    /// Keeps a routed piece for the experts of its sweep, with the sums at zero.
    pub fn save(&self, carry: &mut MoeCarry<B>, piece: Piece) -> Result<(), BackendError> {
        let (backend, hidden) = (self.backend, self.sizes.hidden);
        let rows = Rows { backend, piece };
        rows.save(self.x, &mut carry.x, hidden)?;
        rows.save(&self.work.router_weights, &mut carry.router_weights, self.sizes.k)?;
        if B::IS_QUEUED {
            rows.save_ids(&self.work.router_ids, &mut carry.router_ids, self.sizes.k)?;
        }
        backend.clear(&mut carry.sum, piece.first * hidden, piece.rows() * hidden)
    }

    /// `y` from the sums of a piece and its shared expert, which is computed here unless it `is_shared_done`.
    pub fn finish(&mut self, carry: &MoeCarry<B>, piece: Piece, is_shared_done: bool) -> Result<(), BackendError> {
        let (backend, hidden) = (self.backend, self.sizes.hidden);
        let rows = Rows { backend, piece };
        rows.load(&carry.sum, &mut self.work.sums, hidden)?;
        if !is_shared_done {
            rows.load(&carry.x, self.x, hidden)?;
            self.shared_expert()?;
        }
        let w = &mut *self.work;
        add(backend, (&w.sums, &w.ones), &w.shared_out, (piece.rows(), hidden), self.y)
    }
}

/// `out = weights * outputs + sums`, row by row: exactly how a single row adds one output more.
fn add<B: Backend>(
    backend: &B,
    (outputs, weights): (&B::Buf, &B::Buf),
    sums: &B::Buf,
    (rows, width): (usize, usize),
    out: &mut B::Buf,
) -> Result<(), BackendError> {
    backend.combine_experts(ops::CombineExperts { outputs, weights, shared: sums, rows, k: 1, width }, out)
}
