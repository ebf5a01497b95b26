//! Writes the requests of a run as a trace (`cache_policy::trace`): sessions, phases, tokens, and every request in the order in which
//! the cache served it. Owns one pass of events and one block of bytes. Never writes a pass that failed.
//! Surprising fact: what the cache held when recording began is part of the trace, so that a replay starts where the run did.

use std::io::{self, Write};

use cache_policy::{Phase, TraceHeader, TraceWriter};

use crate::units::{ExpertIdx, ExpertKey, LayerIdx, TokenId};

enum Entry {
    Session(u32),
    Token {
        position: u32,
        id: TokenId,
    },
    Favour {
        layer: LayerIdx,
        /// End of its experts in `ids`.
        end: usize,
    },
    Route {
        phase: Phase,
        layer: LayerIdx,
        overlap: u32,
        /// End of its experts in `ids`.
        end: usize,
    },
}

/// A trace under way.
pub(super) struct RouteTrace {
    writer: TraceWriter,
    out: Box<dyn Write + Send>,
    /// Events of the passes under way.
    entries: Vec<Entry>,
    ids: Vec<ExpertIdx>,
    open_passes: usize,
    has_failed_pass: bool,
    session: Option<u32>,
    phase: Option<Phase>,
    failure: Option<io::Error>,
}

impl RouteTrace {
    /// Starts a trace into `out`; `preload` is what the cache holds, most wanted first.
    ///
    /// # Errors
    /// A header that no trace can have; an `out` that cannot be written to.
    pub fn new(header: &TraceHeader, preload: &[ExpertKey], out: Box<dyn Write + Send>) -> io::Result<Self> {
        let mut writer = TraceWriter::new(header).map_err(io::Error::other)?;
        for &key in preload {
            writer.preload(key).map_err(io::Error::other)?;
        }
        let mut trace = Self {
            writer,
            out,
            entries: Vec::new(),
            ids: Vec::new(),
            open_passes: 0,
            has_failed_pass: false,
            session: None,
            phase: None,
            failure: None,
        };
        trace.drain();
        trace.failure.take().map_or(Ok(trace), Err)
    }

    /// A pass over `tokens` of `session` begins.
    pub fn begin_pass(&mut self, session: u32, position: usize, tokens: &[TokenId]) {
        self.open_passes += 1;
        self.entries.push(Entry::Session(session));
        let tokens = tokens.iter().enumerate();
        self.entries.extend(tokens.map(|(at, &id)| Entry::Token { position: (position + at) as u32, id }));
    }

    /// One request was served while `overlap` earlier ones held their experts.
    pub fn route(&mut self, phase: Phase, layer: LayerIdx, ids: &[ExpertIdx], overlap: usize) {
        if self.open_passes == 0 {
            return;
        }
        self.ids.extend_from_slice(ids);
        self.entries.push(Entry::Route { phase, layer, overlap: overlap as u32, end: self.ids.len() });
    }

    /// The experts that a prompt uses most of `layer` were named, best first.
    pub fn favour(&mut self, layer: LayerIdx, ids: &[ExpertIdx]) {
        if self.open_passes > 0 {
            self.ids.extend_from_slice(ids);
            self.entries.push(Entry::Favour { layer, end: self.ids.len() });
        }
    }

    /// A pass has ended; when it is the last one under way and none of them failed, their events are written.
    pub fn end_pass(&mut self, is_good: bool) {
        self.open_passes = self.open_passes.saturating_sub(1);
        self.has_failed_pass |= !is_good;
        if self.open_passes > 0 {
            return;
        }
        if !std::mem::take(&mut self.has_failed_pass) && self.failure.is_none() {
            self.write_entries();
            self.drain();
        }
        self.entries.clear();
        self.ids.clear();
    }

    fn write_entries(&mut self) {
        let mut begin = 0;
        for entry in &self.entries {
            match *entry {
                Entry::Session(number) if self.session == Some(number) => {}
                Entry::Session(number) => {
                    self.session = Some(number);
                    self.writer.session(number);
                }
                Entry::Token { position, id } => self.writer.token(position, id),
                Entry::Favour { layer, end } => {
                    self.writer.favour(layer, &self.ids[begin..end]).expect("the supply knows the layer");
                    begin = end;
                }
                Entry::Route { phase, layer, overlap, end } => {
                    if self.phase.replace(phase) != Some(phase) {
                        self.writer.phase(phase);
                    }
                    if overlap > 0 {
                        self.writer.overlap(overlap);
                    }
                    self.writer.route(layer, &self.ids[begin..end]).expect("the supply has checked the request");
                    begin = end;
                }
            }
        }
    }

    fn drain(&mut self) {
        let Self { writer, out, failure, .. } = self;
        writer.drain(&mut |bytes| {
            if failure.is_none() {
                *failure = out.write_all(bytes).err();
            }
        });
    }

    /// Writes what remains and the closing block.
    ///
    /// # Errors
    /// The first failure to write.
    pub fn finish(self) -> io::Result<()> {
        let Self { writer, mut out, mut failure, .. } = self;
        writer.finish(&mut |bytes| {
            if failure.is_none() {
                failure = out.write_all(bytes).err();
            }
        });
        failure.map_or_else(|| out.flush(), Err)
    }
}
