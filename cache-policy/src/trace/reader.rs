//! Unpacks a trace from chunks of any length. Owns at most one block of bytes. Never trusts a length or an index.
//! Surprising fact: events borrow the reader's buffer, so a trace of any length is read without allocating per event.

use alloc::vec::Vec;

use super::{
    BLOCK, BLOCK_BYTES, BLOCK_HEAD_BYTES, END, END_BYTES, Event, HEAD_BYTES, LAYER_BYTES, LAYERS_MAX, MAGIC,
    TAG_DECODE, TAG_FAVOUR, TAG_NEXT, TAG_OVERLAP, TAG_PREFILL, TAG_PRELOAD, TAG_ROUTE, TAG_SESSION, TAG_TOKEN,
    TraceError, TraceHeader, TraceLayer, VERSION, bits_of, rows_of,
};
use crate::ids::{Bytes, ExpertIdx, ExpertKey, LayerIdx, Phase};

/// Longest payload of a block: a writer seals at half of this, after at most one record too many.
const PAYLOAD_MAX: usize = 4 * BLOCK_BYTES;

/// What is known of the bytes so far.
enum State {
    Header,
    Block,
    Ended,
}

/// Reads a trace piece by piece: `feed` bytes, take events with `next` until it has none, feed more, `finish`.
pub struct TraceReader {
    state: State,
    header: Option<TraceHeader>,
    rows: Vec<Option<u16>>,
    /// Bytes fed and not consumed, from `at` on.
    input: Vec<u8>,
    at: usize,
    /// Offset in the trace of `input[0]`.
    base: u64,
    /// End in `input` of the payload being read; records remain while `at` is before it.
    payload_end: usize,
    /// Offset of the block being read.
    block: u64,
    next_row: usize,
    experts: Vec<ExpertIdx>,
    /// Experts named in the current route.
    named: Vec<u64>,
    routes: u64,
    uses: u64,
}

impl Default for TraceReader {
    fn default() -> Self {
        Self::new()
    }
}

impl TraceReader {
    /// A reader that has seen nothing.
    pub fn new() -> Self {
        Self {
            state: State::Header,
            header: None,
            rows: Vec::new(),
            input: Vec::new(),
            at: 0,
            base: 0,
            payload_end: 0,
            block: 0,
            next_row: 0,
            experts: Vec::new(),
            named: Vec::new(),
            routes: 0,
            uses: 0,
        }
    }

    /// The header, once enough bytes were fed and `next` was called.
    pub fn header(&self) -> Option<&TraceHeader> {
        self.header.as_ref()
    }

    /// Requests read so far.
    pub fn routes(&self) -> u64 {
        self.routes
    }

    /// Expert uses read so far.
    pub fn uses(&self) -> u64 {
        self.uses
    }

    /// Adds the next bytes of the trace. Memory stays within one block plus the chunk if events are taken in between.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.input.drain(..self.at);
        self.base += self.at as u64;
        self.payload_end -= self.at.min(self.payload_end);
        self.at = 0;
        self.input.extend_from_slice(bytes);
    }

    /// The next event, or `None` when more bytes are needed.
    ///
    /// # Errors
    /// What is wrong with the bytes; the reader is of no use afterwards.
    #[allow(clippy::should_implement_trait, reason = "a lending iterator: the event borrows the reader")]
    pub fn next(&mut self) -> Result<Option<Event<'_>>, TraceError> {
        if matches!(self.state, State::Header) && !self.read_header()? {
            return Ok(None);
        }
        while self.at >= self.payload_end {
            if !self.open_block()? {
                return Ok(None);
            }
        }
        self.record().map(Some)
    }

    /// Says that no bytes follow.
    ///
    /// # Errors
    /// `Empty` or `Truncated` when the closing block has not been read.
    pub fn finish(self) -> Result<(), TraceError> {
        let offset = self.base + self.input.len() as u64;
        match self.state {
            State::Ended => Ok(()),
            _ if offset == 0 => Err(TraceError::Empty),
            _ => Err(TraceError::Truncated { offset }),
        }
    }

    fn offset(&self) -> u64 {
        self.base + self.at as u64
    }

    fn rest(&self) -> &[u8] {
        &self.input[self.at..]
    }

    /// Reads the header if it is complete; says whether it was.
    fn read_header(&mut self) -> Result<bool, TraceError> {
        let rest = self.rest();
        let seen = rest.len().min(MAGIC.len());
        if rest[..seen] != MAGIC[..seen] {
            return Err(TraceError::NotATrace);
        }
        if rest.len() < HEAD_BYTES {
            return Ok(false);
        }
        let version = u16_at(rest, 8);
        if version != VERSION {
            return Err(TraceError::Version { found: version });
        }
        let layers = usize::from(u16_at(rest, 10));
        if layers > LAYERS_MAX {
            return Err(TraceError::BadHeader { what: "more than 4096 layers" });
        }
        let sum_at = HEAD_BYTES + layers * LAYER_BYTES;
        if rest.len() < sum_at + 4 {
            return Ok(false);
        }
        if crc32fast::hash(&rest[..sum_at]) != u32_at(rest, sum_at) {
            return Err(TraceError::Checksum { offset: 0 });
        }
        let mut model = [0; 32];
        model.copy_from_slice(&rest[12..HEAD_BYTES]);
        let layer = |row: &[u8]| TraceLayer {
            layer: LayerIdx(u16_at(row, 0)),
            experts: u16_at(row, 2),
            top_k: u16_at(row, 4),
            expert_bytes: Bytes(u64_at(row, 8)),
        };
        let layers = rest[HEAD_BYTES..sum_at].chunks_exact(LAYER_BYTES).map(layer).collect();
        let header = TraceHeader { model, layers };
        header.check()?;
        self.rows = rows_of(&header.layers);
        self.header = Some(header);
        self.at += sum_at + 4;
        self.state = State::Block;
        Ok(true)
    }

    /// Opens the next block if it is complete; says whether it was.
    fn open_block(&mut self) -> Result<bool, TraceError> {
        let offset = self.offset();
        if matches!(self.state, State::Ended) {
            return if self.rest().is_empty() { Ok(false) } else { Err(TraceError::Trailing { offset }) };
        }
        let rest = self.rest();
        if rest.len() < BLOCK_HEAD_BYTES {
            return Ok(false);
        }
        let (kind, length, sum) = (u32_at(rest, 0), u32_at(rest, 4) as usize, u32_at(rest, 8));
        if kind != BLOCK && kind != END {
            return Err(TraceError::BadBlock { offset, what: "unknown kind of block" });
        }
        if length > PAYLOAD_MAX || (kind == END && length != END_BYTES) {
            return Err(TraceError::BadBlock { offset, what: "impossible block length" });
        }
        let Some(payload) = rest.get(BLOCK_HEAD_BYTES..BLOCK_HEAD_BYTES + length) else { return Ok(false) };
        if crc32fast::hash(payload) != sum {
            return Err(TraceError::Checksum { offset });
        }
        if kind == END {
            if (u64_at(payload, 0), u64_at(payload, 8)) != (self.routes, self.uses) {
                return Err(TraceError::BadBlock { offset, what: "a block is missing" });
            }
            self.state = State::Ended;
        }
        self.at += BLOCK_HEAD_BYTES;
        self.payload_end = self.at + length;
        if kind == END {
            self.at = self.payload_end;
        }
        (self.block, self.next_row) = (offset, 0);
        Ok(true)
    }

    fn bad(&self, what: &'static str) -> TraceError {
        TraceError::BadBlock { offset: self.block, what }
    }

    fn byte(&mut self) -> Result<u8, TraceError> {
        if self.at >= self.payload_end {
            return Err(self.bad("a record runs past its block"));
        }
        self.at += 1;
        Ok(self.input[self.at - 1])
    }

    fn varint(&mut self) -> Result<u32, TraceError> {
        let mut value = 0u64;
        for shift in [0, 7, 14, 21, 28] {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7F) << shift;
            if byte < 0x80 {
                return u32::try_from(value).map_err(|_| self.bad("a number is too large"));
            }
        }
        Err(self.bad("a number is too long"))
    }

    fn record(&mut self) -> Result<Event<'_>, TraceError> {
        let layers = self.header.as_ref().map_or(0, |h| h.layers.len());
        match self.byte()? {
            TAG_SESSION => Ok(Event::Session(self.varint()?)),
            TAG_PREFILL => Ok(Event::Phase(Phase::Prefill)),
            TAG_DECODE => Ok(Event::Phase(Phase::Decode)),
            TAG_TOKEN => Ok(Event::Token { position: self.varint()?, id: self.varint()? }),
            TAG_NEXT => {
                let row = self.next_row;
                let count = self.header.as_ref().map_or(0, |h| usize::from(h.layers[row].top_k));
                self.route(row, count, layers)
            }
            TAG_ROUTE => {
                let row = self.row_of_layer()?;
                let count = self.varint()? as usize;
                self.route(row, count, layers)
            }
            TAG_OVERLAP => Ok(Event::Overlap(self.varint()?)),
            TAG_FAVOUR => {
                let row = self.row_of_layer()?;
                let count = self.varint()? as usize;
                let layer = self.unpack(row, count)?;
                Ok(Event::Favour { layer, experts: &self.experts })
            }
            TAG_PRELOAD => {
                let row = self.row_of_layer()?;
                let layer = self.header.as_ref().map_or(LayerIdx(0), |h| h.layers[row].layer);
                self.unpack(row, 1)?;
                Ok(Event::Preload(ExpertKey { layer, expert: self.experts[0] }))
            }
            _ => Err(self.bad("unknown record")),
        }
    }

    fn row_of_layer(&mut self) -> Result<usize, TraceError> {
        let layer = self.varint()? as usize;
        let row = self.rows.get(layer).copied().flatten();
        row.map(usize::from).ok_or_else(|| self.bad("unknown layer"))
    }

    fn route(&mut self, row: usize, count: usize, layers: usize) -> Result<Event<'_>, TraceError> {
        let layer = self.unpack(row, count)?;
        self.next_row = (row + 1) % layers;
        self.routes += 1;
        self.uses += count as u64;
        Ok(Event::Route { layer, experts: &self.experts })
    }

    /// Reads `count` experts of the layer in `row`; returns the layer.
    fn unpack(&mut self, row: usize, count: usize) -> Result<LayerIdx, TraceError> {
        let Some(shape) = self.header.as_ref().map(|h| h.layers[row]) else {
            return Err(self.bad("a route before the header"));
        };
        if count > usize::from(shape.experts) {
            return Err(self.bad("more experts than the layer has"));
        }
        self.experts.clear();
        self.named.clear();
        self.named.resize(usize::from(shape.experts).div_ceil(64), 0);
        let bits = bits_of(shape.experts);
        let (mut word, mut filled) = (0u32, 0);
        for _ in 0..count {
            while filled < bits {
                word |= u32::from(self.byte()?) << filled;
                filled += 8;
            }
            let expert = word & ((1 << bits) - 1);
            word >>= bits;
            filled -= bits;
            let named = self.named.get_mut(expert as usize / 64).filter(|_| expert < u32::from(shape.experts));
            let bit = 1 << (expert % 64);
            match named {
                Some(n) if *n & bit == 0 => *n |= bit,
                Some(_) => return Err(self.bad("an expert is named twice in one route")),
                None => return Err(self.bad("unknown expert")),
            }
            self.experts.push(ExpertIdx(expert as u16));
        }
        Ok(shape.layer)
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
