//! Packs events into sealed blocks. Owns the block under construction. Never allocates after its first block.
//! Surprising fact: an event costs a few shifts; nothing is compressed, checksummed or copied until a block is full.

use alloc::vec::Vec;

use super::{
    BLOCK, BLOCK_BYTES, END, MAGIC, TAG_DECODE, TAG_FAVOUR, TAG_NEXT, TAG_OVERLAP, TAG_PREFILL, TAG_PRELOAD, TAG_ROUTE,
    TAG_SESSION, TAG_TOKEN, TraceError, TraceHeader, TraceLayer, VERSION, bits_of, rows_of,
};
use crate::ids::{ExpertIdx, ExpertKey, LayerIdx, Phase};

/// Turns events into bytes. Take the bytes with `drain` whenever convenient, and call `finish` at the end.
pub struct TraceWriter {
    layers: Vec<TraceLayer>,
    rows: Vec<Option<u16>>,
    sealed: Vec<u8>,
    block: Vec<u8>,
    /// Row that tag 0 would mean.
    next_row: usize,
    routes: u64,
    uses: u64,
}

impl TraceWriter {
    /// A writer whose first bytes are the header.
    ///
    /// # Errors
    /// `BadHeader` for a header that no reader would accept.
    pub fn new(header: &TraceHeader) -> Result<Self, TraceError> {
        header.check()?;
        let mut sealed = Vec::with_capacity(2 * BLOCK_BYTES);
        sealed.extend_from_slice(MAGIC);
        sealed.extend_from_slice(&VERSION.to_le_bytes());
        sealed.extend_from_slice(&(header.layers.len() as u16).to_le_bytes());
        sealed.extend_from_slice(&header.model);
        for l in &header.layers {
            for word in [l.layer.0, l.experts, l.top_k, 0] {
                sealed.extend_from_slice(&word.to_le_bytes());
            }
            sealed.extend_from_slice(&l.expert_bytes.0.to_le_bytes());
        }
        sealed.extend_from_slice(&crc32fast::hash(&sealed).to_le_bytes());
        Ok(Self {
            rows: rows_of(&header.layers),
            layers: header.layers.clone(),
            sealed,
            block: Vec::with_capacity(BLOCK_BYTES + 4096),
            next_row: 0,
            routes: 0,
            uses: 0,
        })
    }

    /// Marks the begin of a session.
    pub fn session(&mut self, number: u32) {
        self.block.push(TAG_SESSION);
        push_varint(&mut self.block, number);
    }

    /// Says what the following routes are for.
    pub fn phase(&mut self, phase: Phase) {
        self.block.push(match phase {
            Phase::Prefill => TAG_PREFILL,
            Phase::Decode => TAG_DECODE,
        });
    }

    /// Marks a token that is about to be computed.
    pub fn token(&mut self, position: u32, id: u32) {
        self.seal_if_full();
        self.block.push(TAG_TOKEN);
        push_varint(&mut self.block, position);
        push_varint(&mut self.block, id);
    }

    /// Records an expert that was in the cache before the first request.
    ///
    /// # Errors
    /// `BadRoute` when the header has no such expert; nothing is recorded.
    pub fn preload(&mut self, key: ExpertKey) -> Result<(), TraceError> {
        self.seal_if_full();
        let experts = self.experts_of(key.layer).filter(|&experts| key.expert.0 < experts);
        let experts = experts.ok_or(TraceError::BadRoute { layer: key.layer, experts: 1 })?;
        self.block.push(TAG_PRELOAD);
        push_varint(&mut self.block, u32::from(key.layer.0));
        self.pack(&[key.expert], bits_of(experts));
        Ok(())
    }

    /// Says how many of the requests before the next one still hold their experts. Zero need not be said.
    pub fn overlap(&mut self, requests: u32) {
        self.seal_if_full();
        self.block.push(TAG_OVERLAP);
        push_varint(&mut self.block, requests);
    }

    fn experts_of(&self, layer: LayerIdx) -> Option<u16> {
        let row = self.rows.get(usize::from(layer.0)).copied().flatten()?;
        Some(self.layers[usize::from(row)].experts)
    }

    /// Records the experts of a layer that a prompt uses most, best first.
    ///
    /// # Errors
    /// `BadRoute` when the header has no such layer or expert; nothing is recorded.
    pub fn favour(&mut self, layer: LayerIdx, experts: &[ExpertIdx]) -> Result<(), TraceError> {
        self.seal_if_full();
        let bad = TraceError::BadRoute { layer, experts: experts.len() };
        let count = self.experts_of(layer).filter(|&count| experts.iter().all(|e| e.0 < count)).ok_or(bad)?;
        self.block.push(TAG_FAVOUR);
        push_varint(&mut self.block, u32::from(layer.0));
        push_varint(&mut self.block, experts.len() as u32);
        self.pack(experts, bits_of(count));
        Ok(())
    }

    /// Records one request.
    ///
    /// # Errors
    /// `BadRoute` when the header has no such layer or expert; nothing is recorded.
    pub fn route(&mut self, layer: LayerIdx, experts: &[ExpertIdx]) -> Result<(), TraceError> {
        self.seal_if_full();
        let row = self.rows.get(usize::from(layer.0)).copied().flatten();
        let Some(row) = row.map(usize::from).filter(|&r| experts.iter().all(|e| e.0 < self.layers[r].experts)) else {
            return Err(TraceError::BadRoute { layer, experts: experts.len() });
        };
        let shape = self.layers[row];
        if row == self.next_row && experts.len() == usize::from(shape.top_k) {
            self.block.push(TAG_NEXT);
        } else {
            self.block.push(TAG_ROUTE);
            push_varint(&mut self.block, u32::from(layer.0));
            push_varint(&mut self.block, experts.len() as u32);
        }
        self.pack(experts, bits_of(shape.experts));
        self.next_row = (row + 1) % self.layers.len();
        self.routes += 1;
        self.uses += experts.len() as u64;
        Ok(())
    }

    fn pack(&mut self, experts: &[ExpertIdx], bits: u32) {
        let (mut word, mut filled) = (0u32, 0);
        for expert in experts {
            word |= u32::from(expert.0) << filled;
            filled += bits;
            while filled >= 8 {
                self.block.push(word as u8);
                word >>= 8;
                filled -= 8;
            }
        }
        if filled > 0 {
            self.block.push(word as u8);
        }
    }

    /// Gives the bytes that are ready to `sink` and forgets them. Nothing is ready until a block is full.
    pub fn drain(&mut self, sink: &mut dyn FnMut(&[u8])) {
        if !self.sealed.is_empty() {
            sink(&self.sealed);
            self.sealed.clear();
        }
    }

    /// Seals the last block and the closing one, and gives all that remains to `sink`.
    pub fn finish(mut self, sink: &mut dyn FnMut(&[u8])) {
        self.seal();
        let mut end = Vec::with_capacity(super::END_BYTES);
        end.extend_from_slice(&self.routes.to_le_bytes());
        end.extend_from_slice(&self.uses.to_le_bytes());
        append_block(&mut self.sealed, END, &end);
        self.drain(sink);
    }

    fn seal_if_full(&mut self) {
        if self.block.len() >= BLOCK_BYTES {
            self.seal();
        }
    }

    fn seal(&mut self) {
        if !self.block.is_empty() {
            append_block(&mut self.sealed, BLOCK, &self.block);
            self.block.clear();
        }
        self.next_row = 0;
    }
}

fn append_block(to: &mut Vec<u8>, kind: u32, payload: &[u8]) {
    for word in [kind, payload.len() as u32, crc32fast::hash(payload)] {
        to.extend_from_slice(&word.to_le_bytes());
    }
    to.extend_from_slice(payload);
}

/// Seven bits a byte, lowest first, top bit = more follows.
fn push_varint(to: &mut Vec<u8>, mut value: u32) {
    while value >= 0x80 {
        to.push(value as u8 | 0x80);
        value >>= 7;
    }
    to.push(value as u8);
}
