//! Reads a saved session. Never believes a length before it was compared with what is left of the file.
//! Surprising fact: the checksum is computed again while the state is taken over, since the file could change between the two readings.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

use super::{
    CheckpointError, END, Head, MAGIC, ModelMark, NUMBERS, START_BYTES, SamplerMark, TRAILER_BYTES, VALUES, VERSION,
};
use crate::models::state::{StateError, StateSink, StateSource};
use crate::session::images::{ImageMark, MemoryState};
use crate::session::timeline::Timeline;
use crate::text::chat::{ChatError, Message};
use crate::units::TokenId;

const BUFFER_BYTES: usize = 1 << 20;
const CHANGED: &str = "its checksum does not fit its bytes";

/// A file that is a whole, undamaged session.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    file: File,
    /// Bytes of the file.
    len: u64,
    head_bytes: u64,
    sum: [u8; 16],
    head: Head,
    messages: Option<Vec<Message>>,
}

/// What came back besides tokens and state.
#[derive(Debug)]
pub struct Restored {
    /// Messages and reasoning level; `None` for a session of bare tokens.
    pub talk: Option<(Vec<Message>, Option<u8>)>,
    pub sampler: SamplerMark,
    /// What differs from how the session was computed so far.
    pub notes: Vec<String>,
}

impl Checkpoint {
    /// Opens the session at `path`, and reads it once to see that it is whole.
    ///
    /// # Errors
    /// Everything that is wrong with a file, whatever the model.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let shown = || path.to_owned();
        let failed = |error| CheckpointError::File { path: shown(), error };
        let not = |what: &str| CheckpointError::NotASession { path: shown(), what: what.into() };
        let found = std::fs::metadata(path).map_err(failed)?;
        if !found.is_file() {
            return Err(not(if found.is_dir() { "it is a folder" } else { "it is no regular file" }));
        }
        let mut file = File::open(path).map_err(failed)?;
        let len = file.metadata().map_err(failed)?.len();
        let mut start = [0; START_BYTES as usize];
        let had = read_up_to(&mut file, &mut start).map_err(failed)?;
        if had == 0 {
            return Err(not("it is empty"));
        }
        if !start.starts_with(&MAGIC[..had.min(MAGIC.len())]) {
            return Err(not("it begins with other bytes"));
        }
        if len < START_BYTES + TRAILER_BYTES {
            return Err(CheckpointError::CutShort { path: shown() });
        }
        let found = u32::from_le_bytes(start[8..12].try_into().expect("four bytes"));
        if found != VERSION {
            return Err(CheckpointError::Version { path: shown(), found });
        }
        let mut trailer = [0; TRAILER_BYTES as usize];
        file.seek(SeekFrom::Start(len - TRAILER_BYTES)).and_then(|_| file.read_exact(&mut trailer)).map_err(failed)?;
        if trailer[..8] != END || trailer[8..16] != len.to_le_bytes() {
            return Err(CheckpointError::CutShort { path: shown() });
        }
        let sum = trailer[16..].try_into().expect("sixteen bytes");
        if hash(&mut file, len - 16).map_err(failed)? != sum {
            return Err(CheckpointError::Damaged { path: shown(), what: CHANGED.into() });
        }
        let head_bytes = u64::from_le_bytes(start[12..].try_into().expect("eight bytes"));
        let room = len - START_BYTES - TRAILER_BYTES;
        let damaged = |what: &str| CheckpointError::Damaged { path: shown(), what: what.into() };
        if head_bytes > room {
            return Err(damaged("its head is longer than the file"));
        }
        let mut bytes = vec![0; head_bytes as usize];
        file.seek(SeekFrom::Start(START_BYTES)).and_then(|_| file.read_exact(&mut bytes)).map_err(failed)?;
        let head: Head = serde_json::from_slice(&bytes).map_err(|e| damaged(&e.to_string()))?;
        let counted = head.tokens.saturating_mul(4).saturating_add(head.logits.saturating_mul(4));
        if head.tokens == 0 || counted > room - head_bytes {
            return Err(damaged("its tokens are not all there"));
        }
        let messages = head.talk.as_ref().map(|talk| talk.messages.iter().map(Message::from_json).collect());
        let messages = messages.transpose().map_err(|e: ChatError| damaged(&e.to_string()))?;
        Ok(Self { path: shown(), file, len, head_bytes, sum, head, messages })
    }

    fn damaged(&self, what: &str) -> CheckpointError {
        CheckpointError::Damaged { path: self.path.clone(), what: what.into() }
    }

    /// Tokens of the session.
    pub fn tokens(&self) -> u64 {
        self.head.tokens
    }

    /// Bytes of the file.
    pub fn bytes(&self) -> u64 {
        self.len
    }

    /// The conversation; `None` for bare tokens.
    pub fn messages(&self) -> Option<&[Message]> {
        self.messages.as_deref()
    }

    /// Refuses a session that `model` with a context of `ctx` tokens cannot take.
    ///
    /// # Errors
    /// Another model, or too long a session.
    pub fn check(&self, model: &ModelMark, ctx: usize) -> Result<(), CheckpointError> {
        let path = || self.path.clone();
        if self.head.model.identity != model.identity {
            return Err(CheckpointError::OtherModel {
                path: path(),
                found: self.head.model.shown(),
                expected: model.shown(),
            });
        }
        if self.head.tokens > ctx as u64 {
            return Err(CheckpointError::TooLong { path: path(), tokens: self.head.tokens, ctx });
        }
        Ok(())
    }

    /// Makes `timeline` the saved one.
    ///
    /// # Errors
    /// As for `check`, with the timeline untouched. A file that changed since it was opened, or a state that is none of this model's: the
    /// timeline is empty then.
    pub fn restore(mut self, model: &ModelMark, timeline: &mut Timeline) -> Result<Restored, CheckpointError> {
        self.check(model, timeline.ctx())?;
        let vocab = timeline.vocab();
        if self.head.logits != 0 && self.head.logits != vocab as u64 {
            return Err(self.damaged("its logits are of another vocabulary"));
        }
        let failed = |error| CheckpointError::File { path: self.path.clone(), error };
        self.file.seek(SeekFrom::Start(0)).map_err(failed)?;
        let inner = BufReader::with_capacity(BUFFER_BYTES, &self.file);
        let body = self.len - TRAILER_BYTES;
        let mut source = Source { inner, hash: Xxh3::new(), left: body, bytes: Vec::new() };
        source.skip(START_BYTES + self.head_bytes).map_err(failed)?;
        let mut tokens = vec![0; self.head.tokens as usize];
        source.tokens(&mut tokens).map_err(failed)?;
        if let Some(token) = tokens.iter().find(|token| **token as usize >= vocab) {
            return Err(self.damaged(&format!("token id {token} is not below the vocabulary of {vocab}")));
        }
        let mut logits = vec![0.0; self.head.logits as usize];
        source.floats(&mut logits).map_err(failed)?;
        let logits = (!logits.is_empty()).then_some(&logits[..]);
        let loaded = timeline.load_state(&tokens, logits, &mut source);
        let loaded = loaded.and_then(|()| load_images(&self.head.images, timeline, &mut source));
        match loaded.and_then(|()| source.finish()) {
            Ok(sum) if sum == self.sum => Ok(self.restored(model)),
            Ok(_) => {
                timeline.clear();
                Err(self.damaged(CHANGED))
            }
            Err(error) => {
                timeline.clear();
                Err(match error {
                    StateError::Io(error) => CheckpointError::File { path: self.path.clone(), error },
                    // The file has no part in it.
                    StateError::Backend(_) => error.into(),
                    other @ StateError::Mismatch { .. } => self.damaged(&other.to_string()),
                })
            }
        }
    }

    fn restored(self, model: &ModelMark) -> Restored {
        let old = &self.head.model;
        let mut notes = Vec::new();
        let mut differs = |was: bool, flag: &str| {
            let (was, is) = if was { ("with", "without") } else { ("without", "with") };
            notes.push(format!("note: the session was computed {was} {flag}, and goes on {is} it"));
        };
        if old.is_quality != model.is_quality {
            differs(old.is_quality, "--quality");
        }
        if old.is_kv_exact != model.is_kv_exact {
            differs(old.is_kv_exact, "--kv-exact");
        }
        let level = self.head.talk.as_ref().and_then(|talk| talk.level);
        Restored { talk: self.messages.map(|messages| (messages, level)), sampler: self.head.sampler, notes }
    }
}

/// Takes over the frontiers that lead to shorter beginnings of the session.
fn load_images(marks: &[ImageMark], timeline: &mut Timeline, source: &mut Source<'_>) -> Result<(), StateError> {
    let (tokens, mut longest) = (timeline.tokens().len() as u64, 0);
    for mark in marks {
        if mark.from > mark.to || mark.to > tokens || mark.to <= longest || mark.from == 0 && mark.to == 0 {
            let found = format!("{} to {}", mark.from, mark.to);
            return Err(StateError::mismatch("a frontier", found, format!("{} to {tokens}", longest + 1)));
        }
        longest = mark.to;
        let mut state = MemoryState::default();
        for _ in 0..mark.pieces {
            source.piece(&mut state)?;
        }
        timeline.adopt_image((mark.from as usize, mark.to as usize), state);
    }
    Ok(())
}

fn read_up_to(file: &mut File, buffer: &mut [u8]) -> io::Result<usize> {
    let mut had = 0;
    while had < buffer.len() {
        match file.read(&mut buffer[had..])? {
            0 => break,
            count => had += count,
        }
    }
    Ok(had)
}

/// Checksum of the first `len` bytes.
fn hash(file: &mut File, len: u64) -> io::Result<[u8; 16]> {
    file.seek(SeekFrom::Start(0))?;
    let (mut rest, mut buffer, mut hash) = (file.take(len), vec![0; BUFFER_BYTES], Xxh3::new());
    loop {
        match rest.read(&mut buffer)? {
            0 => return Ok(hash.digest128().to_le_bytes()),
            count => hash.update(&buffer[..count]),
        }
    }
}

/// The bytes between start and trailer.
struct Source<'a> {
    inner: BufReader<&'a File>,
    hash: Xxh3,
    /// Bytes before the trailer.
    left: u64,
    /// Kept from piece to piece.
    bytes: Vec<u8>,
}

impl Source<'_> {
    /// The next `count` bytes, of which so many must be left.
    fn take(&mut self, count: usize) -> io::Result<&[u8]> {
        self.left = self.left.checked_sub(count as u64).ok_or(io::ErrorKind::UnexpectedEof)?;
        self.bytes.resize(count, 0);
        self.inner.read_exact(&mut self.bytes)?;
        self.hash.update(&self.bytes);
        Ok(&self.bytes)
    }

    fn skip(&mut self, mut count: u64) -> io::Result<()> {
        while count > 0 {
            let part = count.min(BUFFER_BYTES as u64);
            self.take(part as usize)?;
            count -= part;
        }
        Ok(())
    }

    fn tokens(&mut self, tokens: &mut [TokenId]) -> io::Result<()> {
        let bytes = self.take(4 * tokens.len())?;
        for (token, bytes) in tokens.iter_mut().zip(bytes.chunks_exact(4)) {
            *token = TokenId::from_le_bytes(bytes.try_into().expect("four bytes"));
        }
        Ok(())
    }

    fn u64s(&mut self, numbers: &mut [u64]) -> io::Result<()> {
        let bytes = self.take(8 * numbers.len())?;
        for (number, bytes) in numbers.iter_mut().zip(bytes.chunks_exact(8)) {
            *number = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        }
        Ok(())
    }

    fn floats(&mut self, values: &mut [f32]) -> io::Result<()> {
        let bytes = self.take(4 * values.len())?;
        for (value, bytes) in values.iter_mut().zip(bytes.chunks_exact(4)) {
            *value = f32::from_le_bytes(bytes.try_into().expect("four bytes"));
        }
        Ok(())
    }

    /// Kind, name and count of the next piece.
    fn piece_head(&mut self) -> io::Result<(u8, String, u64)> {
        let [kind, name_bytes] = self.take(2)?.try_into().expect("two bytes");
        let name = String::from_utf8_lossy(self.take(usize::from(name_bytes))?).into_owned();
        Ok((kind, name, u64::from_le_bytes(self.take(8)?.try_into().expect("eight bytes"))))
    }

    /// The next piece, whatever it is.
    fn piece(&mut self, sink: &mut dyn StateSink) -> Result<(), StateError> {
        let (kind, name, count) = self.piece_head()?;
        let width = match kind {
            NUMBERS => 8,
            VALUES => 4,
            other => return Err(StateError::mismatch("the kind of a piece", other, format!("{NUMBERS} or {VALUES}"))),
        };
        // No memory for what is not there.
        if count > self.left / width {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        if kind == NUMBERS {
            let mut numbers = vec![0; count as usize];
            self.u64s(&mut numbers)?;
            sink.numbers(&name, &numbers)
        } else {
            let mut values = vec![0.0; count as usize];
            self.floats(&mut values)?;
            sink.values(&name, &values)
        }
    }

    /// Refuses any other piece than this one.
    fn expect(&mut self, kind: u8, name: &'static str, count: usize) -> Result<(), StateError> {
        let (found_kind, found_name, found_count) = self.piece_head()?;
        if (found_kind, &*found_name, found_count) != (kind, name, count as u64) {
            let found = format!("{found_count} of {found_name:?}");
            return Err(StateError::mismatch("a piece", found, format!("{count} of {name:?}")));
        }
        Ok(())
    }

    /// The checksum of all that was read and of the end mark; refuses anything between the last piece and the trailer.
    fn finish(mut self) -> Result<[u8; 16], StateError> {
        if self.left > 0 {
            return Err(StateError::mismatch("the rest behind the last piece", self.left, "0 bytes"));
        }
        self.left = 16;
        self.take(16)?;
        Ok(self.hash.digest128().to_le_bytes())
    }
}

impl StateSource for Source<'_> {
    fn numbers(&mut self, name: &'static str, numbers: &mut [u64]) -> Result<(), StateError> {
        self.expect(NUMBERS, name, numbers.len())?;
        Ok(self.u64s(numbers)?)
    }

    fn values(&mut self, name: &'static str, values: &mut [f32]) -> Result<(), StateError> {
        self.expect(VALUES, name, values.len())?;
        Ok(self.floats(values)?)
    }
}
