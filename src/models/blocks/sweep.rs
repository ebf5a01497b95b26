//! Many rows through the layers, layer by layer: within a layer in pieces of a chunk for everything but the experts, which take the rows of
//! the whole sweep.
//! Never changes a bit by its width. Surprising fact: an expert is read once a sweep however many rows there are, so wider sweeps are faster
//! exactly as far as the drive was the limit.

use super::ahead::Ahead;
use super::grouping::Grouping;
use super::moe::{Moe, MoeCarry, MoeSizes};
use super::suffix::{Piece, PieceKind, Suffix};
use crate::backend::{Backend, BackendError};
use crate::models::supply::{ExpertMats, ExpertSupply};
use crate::models::{LogitSink, ModelError, Progress};
use crate::obs::spans;
use crate::units::{ExpertIdx, LayerIdx};

/// Most experts that are computed together, by a processor and by a device that queues them.
const AT_ONCE: [usize; 2] = [1, 64];

/// What a sweep asks of an architecture. Buffers of a pass hold one piece at a time.
pub trait Layers<B: Backend> {
    /// The streams of a piece before the first layer.
    fn start(&mut self, piece: Piece) -> Result<(), ModelError>;

    /// What the piece's kind says of the part of `layer` before its experts, for the `number`-th piece of the layer. A whole piece is left
    /// routed, so that [`Layers::moe`] can be saved.
    fn attend(&mut self, layer: usize, number: usize, piece: Piece) -> Result<(), ModelError>;

    /// All `pieces` of the layer have been attended.
    fn settle(&mut self, layer: usize, pieces: usize) -> Result<(), ModelError> {
        let _ = (layer, pieces);
        Ok(())
    }

    /// The expert half of `layer` over the buffers of a pass of this piece.
    fn moe(&mut self, layer: usize, piece: Piece) -> Moe<'_, B>;

    /// The output of the expert half, which is in its place, joins the streams of the piece.
    fn leave(&mut self, layer: usize, piece: Piece) -> Result<(), ModelError>;

    /// Logits of all rows of a piece, behind the last layer.
    fn head(&mut self, piece: Piece, sink: &mut LogitSink<'_>) -> Result<(), ModelError>;
}

/// A sweep under way.
pub struct Sweep<'a, B: Backend, L: Layers<B>> {
    pub backend: &'a B,
    pub layers: L,
    pub layer_count: usize,
    pub sizes: MoeSizes,
    pub carry: &'a mut MoeCarry<B>,
    pub grouping: &'a mut Grouping,
    pub experts: &'a dyn ExpertSupply<B>,
    pub suffix: &'a Suffix,
    /// Rows of the sweep.
    pub rows: usize,
    /// Rows of a piece, at most.
    pub chunk: usize,
    /// Told the share that is done, in rows.
    pub progress: &'a mut Progress<'a>,
}

impl<B: Backend, L: Layers<B>> Sweep<'_, B, L> {
    /// All layers.
    pub fn run(&mut self) -> Result<(), ModelError> {
        for piece in self.suffix.pieces(0, self.chunk) {
            self.layers.start(piece)?;
        }
        let mut ahead = Ahead::new(self.experts, 0, self.sizes.experts);
        if self.wants_all_experts(0) {
            // Before the first favourites are named a request would count as a use, and nothing that nobody has chosen yet is one.
            self.experts.favour(LayerIdx(0), &[]);
            ahead.ask_unseen(0)?;
        }
        for layer in 0..self.layer_count {
            let begun = spans::begin();
            self.attention(layer, &mut ahead)?;
            spans::end_half("attention", layer, self.rows, begun);
            let begun = spans::begin();
            let mut next = Ahead::new(self.experts, layer + 1, self.sizes.experts);
            self.routed_experts(layer, ahead, &mut next)?;
            self.leave(layer)?;
            spans::end_half("experts", layer, self.rows, begun);
            ahead = next;
        }
        Ok(())
    }

    /// Logits of the last `count` rows.
    pub fn logits(&mut self, count: usize, sink: &mut LogitSink<'_>) -> Result<(), ModelError> {
        for first in (self.rows - count..self.rows).step_by(self.chunk) {
            let piece = Piece { first, end: self.rows.min(first + self.chunk), kind: PieceKind::Whole };
            self.layers.head(piece, sink)?;
        }
        Ok(())
    }

    /// Says that `done` of `all` parts of half `half` of a layer are done, and stops if nobody wants the rest.
    fn tell(&mut self, (layer, half): (usize, usize), done: usize, all: usize) -> Result<(), ModelError> {
        let halves = 2 * self.layer_count * all.max(1);
        let rows = self.rows * ((2 * layer + half) * all.max(1) + done) / halves;
        if (self.progress)(rows).is_break() { Err(ModelError::Interrupted) } else { Ok(()) }
    }

    /// Everything of a layer up to the choice of experts, piece by piece.
    fn attention(&mut self, layer: usize, ahead: &mut Ahead<'_, B>) -> Result<(), ModelError> {
        let k = self.sizes.k;
        let whole = self.suffix.layer(layer).whole;
        self.grouping.ids.resize((self.rows - whole) * k, 0);
        // A device is given all pieces before anybody waits for it, unless their choices say what to read.
        let is_late = B::IS_QUEUED && self.wants_all_experts(layer);
        let mut pieces = 0;
        for (number, piece) in self.suffix.pieces(layer, self.chunk).enumerate() {
            pieces = number + 1;
            self.tell((layer, 0), piece.first, self.rows)?;
            self.layers.attend(layer, number, piece)?;
            if piece.kind != PieceKind::Whole {
                continue;
            }
            let moe = self.layers.moe(layer, piece);
            moe.save(self.carry, piece)?;
            if is_late {
                continue;
            }
            let from = (piece.first - whole) * k;
            let ids = &mut self.grouping.ids[from..from + piece.rows() * k];
            self.backend.download_ids(&moe.work.router_ids, 0, ids)?;
            if piece.first == whole && piece.end < self.rows {
                ahead.ask_early(&distinct(ids, self.sizes.experts))?;
            }
        }
        self.layers.settle(layer, pieces)?;
        if is_late {
            self.backend.download_ids(&self.carry.router_ids, whole * k, &mut self.grouping.ids)?;
        }
        Ok(())
    }

    /// Whether the rows of `layer` are so many that practically every expert will be chosen: chosen evenly, each would be expected
    /// eight times, and left out once in 3,000 times.
    fn wants_all_experts(&self, layer: usize) -> bool {
        const EXPECTED_USES: usize = 8;
        let rows = |layer| self.rows - self.suffix.layer(layer).whole;
        layer < self.layer_count && rows(layer) * self.sizes.k >= EXPECTED_USES * self.sizes.experts
    }

    /// The experts of all rows: each once, by rising id. `next` may begin to read.
    fn routed_experts(
        &mut self,
        layer: usize,
        mut ahead: Ahead<'_, B>,
        next: &mut Ahead<'_, B>,
    ) -> Result<(), ModelError> {
        let reads_next = self.wants_all_experts(layer + 1);
        let whole = self.suffix.layer(layer).whole;
        let mut grouping = std::mem::take(self.grouping);
        let result = (|| {
            grouping.group(self.sizes.experts, self.sizes.k);
            grouping.active.sort_unstable();
            self.experts.favour(LayerIdx(layer as u16), &grouping.ranked(self.sizes.k));
            grouping.shift(whole, self.sizes.k);
            self.backend.upload_ids(&grouping.rows, &mut self.carry.group_rows, 0)?;
            self.backend.upload_ids(&grouping.places, &mut self.carry.group_places, 0)?;
            ahead.settle(&grouping.active);
            ahead.ask_from(&grouping.active, 0)?;
            if self.is_one_piece(layer) {
                // Its input is still in place; the drive works meanwhile.
                let piece = Piece { first: whole, end: self.rows, kind: PieceKind::Whole };
                self.layers.moe(layer, piece).shared_expert()?;
            }
            let mut done = 0;
            while done < grouping.active.len() {
                self.tell((layer, 1), done, grouping.active.len())?;
                ahead.ask_from(&grouping.active, done)?;
                if reads_next && ahead.has_asked(&grouping.active[done..]) {
                    next.ask_unseen(ahead.held())?;
                }
                done += ahead.with(&grouping.active[done..], AT_ONCE[usize::from(B::IS_QUEUED)], |experts| {
                    self.experts(layer, experts, &grouping)
                })?;
            }
            Ok(())
        })();
        *self.grouping = grouping;
        result
    }

    /// Whether all rows whose experts are computed fit one piece.
    fn is_one_piece(&self, layer: usize) -> bool {
        (1..=self.chunk).contains(&(self.rows - self.suffix.layer(layer).whole))
    }

    fn experts(
        &mut self,
        layer: usize,
        experts: &[(ExpertIdx, ExpertMats<'_, B>)],
        grouping: &Grouping,
    ) -> Result<(), ModelError> {
        let piece = Piece { first: 0, end: self.chunk.min(self.rows), kind: PieceKind::Whole };
        let mut moe = self.layers.moe(layer, piece);
        Ok(moe.experts_rows(experts, grouping, self.chunk, self.carry)?)
    }

    /// The shared expert, and the end of the layer, piece by piece.
    fn leave(&mut self, layer: usize) -> Result<(), ModelError> {
        let is_shared_done = self.is_one_piece(layer);
        for piece in self.suffix.pieces(layer, self.chunk).filter(|p| p.kind == PieceKind::Whole) {
            self.layers.moe(layer, piece).finish(self.carry, piece, is_shared_done)?;
            self.layers.leave(layer, piece)?;
        }
        Ok(())
    }
}

/// The distinct ids, rising.
fn distinct(ids: &[i32], experts: usize) -> Vec<ExpertIdx> {
    let mut is_used = vec![false; experts];
    ids.iter().for_each(|id| is_used[*id as usize] = true);
    (0..experts).filter(|expert| is_used[*expert]).map(|expert| ExpertIdx(expert as u16)).collect()
}

/// Copies of a piece's rows between the buffers of a sweep and those of a pass.
pub struct Rows<'a, B: Backend> {
    pub backend: &'a B,
    pub piece: Piece,
}

impl<B: Backend> Rows<'_, B> {
    /// From the sweep to the pass, `width` values a row.
    pub fn load(&self, carry: &B::Buf, work: &mut B::Buf, width: usize) -> Result<(), BackendError> {
        self.backend.copy(carry, self.piece.first * width, work, 0, self.piece.rows() * width)
    }

    /// From the pass to the sweep.
    pub fn save(&self, work: &B::Buf, carry: &mut B::Buf, width: usize) -> Result<(), BackendError> {
        self.backend.copy(work, 0, carry, self.piece.first * width, self.piece.rows() * width)
    }

    /// As `load`, for ids.
    pub fn load_ids(&self, carry: &B::Ids, work: &mut B::Ids, width: usize) -> Result<(), BackendError> {
        self.backend.copy_ids(carry, self.piece.first * width, work, 0, self.piece.rows() * width)
    }

    /// As `save`, for ids.
    pub fn save_ids(&self, work: &B::Ids, carry: &mut B::Ids, width: usize) -> Result<(), BackendError> {
        self.backend.copy_ids(work, 0, carry, self.piece.first * width, self.piece.rows() * width)
    }
}
