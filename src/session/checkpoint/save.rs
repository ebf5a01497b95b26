//! Writes a session as one stream of bytes. Never seeks and never names a file: whoever calls gives the finished file its name.
//! Surprising fact: nothing is held back until the end, so a session of any length is written with a piece of it in memory.

use std::io::{self, BufWriter, Write};

use xxhash_rust::xxh3::Xxh3;

use super::{CheckpointError, END, Head, MAGIC, ModelMark, NUMBERS, SamplerMark, SavedTalk, VALUES, VERSION};
use crate::models::state::{StateError, StateSink};
use crate::session::sampler::Sampler;
use crate::session::timeline::Timeline;
use crate::text::chat::Message;

/// Bytes that are collected before they are written.
const BUFFER_BYTES: usize = 1 << 20;

/// Counts and hashes what goes through it.
struct Out<'a> {
    inner: BufWriter<&'a mut dyn Write>,
    hash: Xxh3,
    count: u64,
    /// Kept from piece to piece.
    bytes: Vec<u8>,
}

impl Out<'_> {
    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hash.update(bytes);
        self.count += bytes.len() as u64;
        self.inner.write_all(bytes)
    }

    fn put_values(&mut self, values: &[f32]) -> io::Result<()> {
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.clear();
        bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        let result = self.put(&bytes);
        self.bytes = bytes;
        result
    }

    fn put_piece(&mut self, kind: u8, name: &str, count: usize) -> io::Result<()> {
        assert!(name.len() <= usize::from(u8::MAX), "names of pieces are short");
        self.put(&[kind, name.len() as u8])?;
        self.put(name.as_bytes())?;
        self.put(&(count as u64).to_le_bytes())
    }

    /// End mark, length, checksum.
    fn finish(mut self) -> io::Result<u64> {
        self.put(&END)?;
        let length = self.count + 8 + 16;
        self.put(&length.to_le_bytes())?;
        let sum = self.hash.digest128().to_le_bytes();
        self.put(&sum)?;
        self.inner.flush()?;
        Ok(length)
    }
}

impl StateSink for Out<'_> {
    fn numbers(&mut self, name: &str, numbers: &[u64]) -> Result<(), StateError> {
        self.put_piece(NUMBERS, name, numbers.len())?;
        for number in numbers {
            self.put(&number.to_le_bytes())?;
        }
        Ok(())
    }

    fn values(&mut self, name: &str, values: &[f32]) -> Result<(), StateError> {
        self.put_piece(VALUES, name, values.len())?;
        Ok(self.put_values(values)?)
    }
}

/// Writes `timeline` to `out`, with the conversation that it belongs to (messages and reasoning level), if it is one. Returns the bytes
/// written.
///
/// # Errors
/// An empty timeline, a model whose state cannot be saved, an `out` that cannot be written to. The timeline is as before.
pub fn write(
    out: &mut dyn Write,
    model: &ModelMark,
    timeline: &mut Timeline,
    talk: Option<(&[Message], Option<u8>)>,
    sampler: &Sampler,
) -> Result<u64, CheckpointError> {
    if timeline.tokens().is_empty() {
        return Err(CheckpointError::Empty);
    }
    let head = Head {
        program: concat!("ds4 ", env!("CARGO_PKG_VERSION")).into(),
        model: model.clone(),
        tokens: timeline.tokens().len() as u64,
        logits: if timeline.has_logits() { timeline.vocab() as u64 } else { 0 },
        images: timeline.image_marks(),
        sampler: SamplerMark { seed: sampler.params().seed, position: sampler.position() },
        talk: talk
            .map(|(messages, level)| SavedTalk { messages: messages.iter().map(Message::to_json).collect(), level }),
    };
    let head = serde_json::to_vec(&head).map_err(|e| CheckpointError::Write(e.into()))?;
    let inner = BufWriter::with_capacity(BUFFER_BYTES, out);
    let mut out = Out { inner, hash: Xxh3::new(), count: 0, bytes: Vec::new() };
    (|| -> Result<(), StateError> {
        out.put(&MAGIC)?;
        out.put(&VERSION.to_le_bytes())?;
        out.put(&(head.len() as u64).to_le_bytes())?;
        out.put(&head)?;
        for token in timeline.tokens() {
            out.put(&token.to_le_bytes())?;
        }
        if timeline.has_logits() {
            out.put_values(timeline.last_logits())?;
        }
        timeline.save_state(&mut out)?;
        timeline.save_images(&mut out)
    })()
    .map_err(|error| match error {
        StateError::Io(error) => CheckpointError::Write(error),
        other => other.into(),
    })?;
    out.finish().map_err(CheckpointError::Write)
}
