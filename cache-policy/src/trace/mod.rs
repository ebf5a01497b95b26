//! Routing traces: which experts each token asked for, in the order of the requests. Owns the byte format.
//! Never does I/O: the writer hands out sealed bytes, the reader is fed whatever chunks the caller has.
//! Surprising fact: the format stores requests, not rows, so that a replay makes exactly the decisions of the live run.
//!
//! Format, version 1, little-endian:
//!
//! ```text
//! header  "DS4ROUTE"  version u16  layers u16  model [u8; 32]
//!         layers x { layer u16  experts u16  top_k u16  reserved u16 = 0  expert_bytes u64 }
//!         crc32 u32 of everything before it
//! block   kind u32 ("BLK1" | "END1")  payload_len u32  crc32 u32 of the payload  payload
//! ```
//!
//! A block's payload is a run of records, first byte the tag: 0 next layer's route of `top_k` experts; 1 any other route
//! (layer, count as varints); 2 token (position, id as varints); 3 session (number as varint); 4 prefill; 5 decode;
//! 6 preload (layer as varint, expert); 7 overlap (count as varint); 8 favour (layer, count as varints, experts).
//! Experts are packed with as many bits as the layer's count needs, lowest bits first. The state that tag 0 refers to
//! starts anew with every block. The last block, END1, holds two u64: routes and uses written.

mod reader;
mod writer;

use alloc::vec::Vec;

use crate::ids::{Bytes, ExpertIdx, ExpertKey, LayerIdx, Phase};

pub use reader::TraceReader;
pub use writer::TraceWriter;

const MAGIC: &[u8; 8] = b"DS4ROUTE";
const VERSION: u16 = 1;
/// Bytes before the layer table.
const HEAD_BYTES: usize = 8 + 2 + 2 + 32;
const LAYER_BYTES: usize = 16;
const BLOCK_HEAD_BYTES: usize = 12;
const BLOCK: u32 = u32::from_le_bytes(*b"BLK1");
const END: u32 = u32::from_le_bytes(*b"END1");
const END_BYTES: usize = 16;
/// A block is sealed when its payload reaches this; a reader refuses twice as much.
const BLOCK_BYTES: usize = 64 << 10;
const LAYERS_MAX: usize = 4096;

const TAG_NEXT: u8 = 0;
const TAG_ROUTE: u8 = 1;
const TAG_TOKEN: u8 = 2;
const TAG_SESSION: u8 = 3;
const TAG_PREFILL: u8 = 4;
const TAG_DECODE: u8 = 5;
const TAG_PRELOAD: u8 = 6;
const TAG_OVERLAP: u8 = 7;
const TAG_FAVOUR: u8 = 8;

/// One routed layer of the traced model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TraceLayer {
    /// Index of the layer.
    pub layer: LayerIdx,
    /// Experts of the layer, at least 1.
    pub experts: u16,
    /// Experts a token uses there, at least 1 and at most `experts`.
    pub top_k: u16,
    /// Size of one expert.
    pub expert_bytes: Bytes,
}

/// What a trace says about its model.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TraceHeader {
    /// Identity of the model file, as its owner computes it.
    pub model: [u8; 32],
    /// Routed layers, rising.
    pub layers: Vec<TraceLayer>,
}

impl TraceHeader {
    /// Refuses a trace of another model.
    ///
    /// # Errors
    /// `TraceError::OtherModel`.
    pub fn check_model(&self, model: &[u8; 32]) -> Result<(), TraceError> {
        if self.model == *model {
            Ok(())
        } else {
            Err(TraceError::OtherModel { found: short(&self.model), expected: short(model) })
        }
    }

    /// Layers of equal expert size, in order of first appearance: the size classes of a cache.
    pub fn size_classes(&self) -> Vec<(Bytes, Vec<(LayerIdx, u16)>)> {
        let mut classes: Vec<(Bytes, Vec<(LayerIdx, u16)>)> = Vec::new();
        for l in &self.layers {
            match classes.iter_mut().find(|c| c.0 == l.expert_bytes) {
                Some(class) => class.1.push((l.layer, l.experts)),
                None => classes.push((l.expert_bytes, alloc::vec![(l.layer, l.experts)])),
            }
        }
        classes
    }

    fn check(&self) -> Result<(), TraceError> {
        let bad = |what| Err(TraceError::BadHeader { what });
        if self.layers.is_empty() || self.layers.len() > LAYERS_MAX {
            return bad("the number of layers is not in 1..=4096");
        }
        if !self.layers.is_sorted_by(|a, b| a.layer < b.layer) {
            return bad("layers do not rise");
        }
        if self.layers.iter().any(|l| l.top_k == 0 || l.top_k > l.experts) {
            return bad("a layer uses no expert, or more than it has");
        }
        Ok(())
    }
}

fn short(model: &[u8; 32]) -> u64 {
    model.iter().take(8).fold(0, |sum, &byte| sum << 8 | u64::from(byte))
}

/// What a trace tells, in order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event<'a> {
    /// A session begins, with nothing carried over but the cache; or one of a known number goes on.
    Session(u32),
    /// An expert that was in the cache before the first request, most wanted first.
    Preload(ExpertKey),
    /// What follows is prompt or generation.
    Phase(Phase),
    /// A token is about to be computed; in prefill several come before their routes.
    Token {
        /// Position in the session.
        position: u32,
        /// Token id.
        id: u32,
    },
    /// So many requests before the next one still held their experts when it was served.
    Overlap(u32),
    /// The experts of a layer that a prompt uses most, best first: what the cache is to keep of it.
    Favour {
        /// Layer.
        layer: LayerIdx,
        /// Distinct experts.
        experts: &'a [ExpertIdx],
    },
    /// One request: the experts that one token or wave needs in a layer.
    Route {
        /// Layer.
        layer: LayerIdx,
        /// Experts in request order.
        experts: &'a [ExpertIdx],
    },
}

/// Why bytes are not a trace, or not this model's.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TraceError {
    /// Nothing at all.
    #[error("the trace is empty; the recording ended before its first byte was written")]
    Empty,
    /// Other magic bytes.
    #[error("not a routing trace (it does not begin with DS4ROUTE); give a file made by --trace-routes")]
    NotATrace,
    /// A version of the future.
    #[error("trace version {found}, this program reads version {VERSION}; use the program that wrote it")]
    Version {
        /// As stored.
        found: u16,
    },
    /// The header cannot describe a model.
    #[error("bad trace header: {what}; record the trace again")]
    BadHeader {
        /// What is wrong.
        what: &'static str,
    },
    /// Bytes changed since they were written.
    #[error("trace damaged at byte {offset}: the checksum does not match; record the trace again")]
    Checksum {
        /// Where the header or block begins.
        offset: u64,
    },
    /// A block that no writer makes.
    #[error("trace damaged at byte {offset}: {what}; record the trace again")]
    BadBlock {
        /// Where the block begins.
        offset: u64,
        /// What is wrong.
        what: &'static str,
    },
    /// The end is missing. Everything read so far is sound.
    #[error("the trace ends at byte {offset} without its closing block; the recording was cut off")]
    Truncated {
        /// Bytes seen.
        offset: u64,
    },
    /// Bytes after the closing block.
    #[error("bytes follow the closing block of the trace at byte {offset}; two files were joined")]
    Trailing {
        /// Where they begin.
        offset: u64,
    },
    /// Recorded with another file.
    #[error("the trace is of model {found:016x}, the file is {expected:016x}; record a trace with this file")]
    OtherModel {
        /// First eight bytes of the trace's identity.
        found: u64,
        /// First eight bytes of the wanted identity.
        expected: u64,
    },
    /// The engine recorded what the header does not know.
    #[error("layer {} with {experts} experts is not a route of this model; the recorder is given another model's header", layer.0)]
    BadRoute {
        /// Asked.
        layer: LayerIdx,
        /// Experts in the request.
        experts: usize,
    },
}

/// Bits that number `experts` experts.
fn bits_of(experts: u16) -> u32 {
    (u32::from(experts.max(2)) - 1).ilog2() + 1
}

/// Position in the header's table of each layer index.
fn rows_of(layers: &[TraceLayer]) -> Vec<Option<u16>> {
    let mut rows = Vec::new();
    for (row, layer) in layers.iter().enumerate() {
        rows.resize(usize::from(layer.layer.0), None);
        rows.push(u16::try_from(row).ok());
    }
    rows
}
