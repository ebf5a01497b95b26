//! A trace file as header and batches of events. Owns the file and one batch; never holds the whole trace.
//! Surprising fact: a trace whose recording was cut off is sound up to its last block, so `--partial` can use it.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use cache_policy::{Bytes, Census, Event, ExpertIdx, LayerIdx, Phase, Request, TraceError, TraceHeader, TraceReader};

use super::note;
use crate::cli::CliError;

/// Bytes read at once.
const CHUNK_BYTES: usize = 1 << 20;
/// Requests of one batch: enough to give every thread work, little enough to stay in a cache.
const BATCH_REQUESTS: usize = 1 << 15;

/// One request of a batch.
#[derive(Clone, Copy, Debug)]
struct Entry {
    phase: Phase,
    layer: LayerIdx,
    is_favour: bool,
    overlap: u32,
    expert_bytes: Bytes,
    /// End of its experts.
    end: usize,
}

/// Some requests in the order of the trace.
#[derive(Debug, Default)]
pub struct Batch {
    entries: Vec<Entry>,
    experts: Vec<ExpertIdx>,
}

impl Batch {
    /// The requests in their order.
    pub fn requests(&self) -> impl Iterator<Item = Request<'_>> {
        let mut begin = 0;
        self.entries.iter().map(move |&Entry { phase, layer, is_favour, overlap, expert_bytes, end }| {
            let experts = &self.experts[begin..end];
            begin = end;
            Request { phase, layer, experts, is_favour, overlap, expert_bytes }
        })
    }
}

/// A trace being read.
pub struct TraceInput {
    path: PathBuf,
    file: File,
    reader: TraceReader,
    chunk: Vec<u8>,
    header: TraceHeader,
    census: Census,
    batch: Batch,
    /// What the next request overlaps.
    overlap: u32,
    is_partial_fine: bool,
    is_at_end: bool,
}

impl TraceInput {
    /// Opens the trace at `path` and reads its header. With `is_partial_fine` a missing end is a note, not an error.
    ///
    /// # Errors
    /// A file that cannot be read or is no trace.
    pub fn open(path: &Path, is_partial_fine: bool) -> Result<Self, CliError> {
        let unreadable = |e: std::io::Error| CliError::failed(format!("cannot read {}: {e}", path.display()));
        let mut file = File::open(path).map_err(unreadable)?;
        let (mut reader, mut chunk) = (TraceReader::new(), vec![0; CHUNK_BYTES]);
        let told = |e: TraceError| CliError::failed(format!("{}: {e}", path.display()));
        // The header fits the first read of a regular file; a pipe may give it in pieces.
        let mut first = Vec::new();
        loop {
            let read = file.read(&mut chunk).map_err(unreadable)?;
            if read == 0 {
                reader.feed(&first);
                reader.finish().map_err(told)?;
                return Err(told(TraceError::Truncated { offset: first.len() as u64 }));
            }
            first.extend_from_slice(&chunk[..read]);
            let mut header_reader = TraceReader::new();
            header_reader.feed(&first);
            // A damaged block may follow; whether it is wanted is decided when it is read.
            let outcome = header_reader.next().map(|_| ());
            if let Some(header) = header_reader.header() {
                let header = header.clone();
                let census = Census::new(&header);
                reader.feed(&first);
                let (path, batch) = (path.to_owned(), Batch::default());
                return Ok(Self {
                    path,
                    file,
                    reader,
                    chunk,
                    header,
                    census,
                    batch,
                    overlap: 0,
                    is_partial_fine,
                    is_at_end: false,
                });
            }
            outcome.map_err(told)?;
        }
    }

    /// What the trace says about its model.
    pub fn header(&self) -> &TraceHeader {
        &self.header
    }

    /// What has been read so far.
    pub fn census(&self) -> &Census {
        &self.census
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The next requests; `None` at the end.
    ///
    /// # Errors
    /// Damage, a missing end, a drive that fails.
    pub fn next_batch(&mut self) -> Result<Option<&Batch>, CliError> {
        self.batch.entries.clear();
        self.batch.experts.clear();
        while self.batch.entries.len() < BATCH_REQUESTS && !self.is_at_end {
            let event = self.reader.next().map_err(|e| CliError::failed(format!("{}: {e}", self.path.display())))?;
            let Some(event) = event else {
                self.read_more()?;
                continue;
            };
            match event {
                Event::Overlap(requests) => self.overlap = requests,
                Event::Route { layer, experts } if !experts.is_empty() => {
                    self.batch.experts.extend_from_slice(experts);
                    self.batch.entries.push(Entry {
                        phase: self.census.phase(),
                        layer,
                        is_favour: false,
                        overlap: std::mem::take(&mut self.overlap),
                        expert_bytes: self.census.expert_bytes(layer),
                        end: self.batch.experts.len(),
                    });
                }
                Event::Favour { layer, experts } => {
                    self.batch.experts.extend_from_slice(experts);
                    self.batch.entries.push(Entry {
                        phase: self.census.phase(),
                        layer,
                        is_favour: true,
                        overlap: 0,
                        expert_bytes: self.census.expert_bytes(layer),
                        end: self.batch.experts.len(),
                    });
                }
                _ => {}
            }
            self.census.count(&event);
        }
        Ok((!self.batch.entries.is_empty()).then_some(&self.batch))
    }

    fn read_more(&mut self) -> Result<(), CliError> {
        let shown = self.path.display();
        let read = self.file.read(&mut self.chunk);
        let read = read.map_err(|e| CliError::failed(format!("cannot read {shown}: {e}")))?;
        if read > 0 {
            self.reader.feed(&self.chunk[..read]);
            return Ok(());
        }
        self.is_at_end = true;
        match std::mem::take(&mut self.reader).finish() {
            Err(error @ TraceError::Truncated { .. }) if self.is_partial_fine => {
                note(&format!("note: {shown}: {error}; what was read before is used"));
                Ok(())
            }
            Err(error @ TraceError::Truncated { .. }) => {
                Err(CliError::failed(format!("{shown}: {error}; --partial uses what is there")))
            }
            other => other.map_err(|e| CliError::failed(format!("{shown}: {e}"))),
        }
    }
}

/// The model of a trace in words: `10 layers, 240 experts, 40 a token`, with its identity if it has one.
pub fn describe(header: &TraceHeader) -> String {
    let experts: u64 = header.layers.iter().map(|l| u64::from(l.experts)).sum();
    let per_token: u64 = header.layers.iter().map(|l| u64::from(l.top_k)).sum();
    let identity = match header.model {
        id if id == [0; 32] => String::new(),
        id => format!("model {}, ", identity(&id)),
    };
    format!("{identity}{} layers, {experts} experts, {per_token} a token", header.layers.len())
}

/// First eight bytes of a model's identity, as messages show it.
pub fn identity(model: &[u8; 32]) -> String {
    model[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}
