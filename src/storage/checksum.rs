//! Checksums of what is streamed: each part of each expert, each 4 KiB block of the n-gram tables, kept beside the model file.
//! Owns the sidecar format; never decides what happens on a mismatch. Surprising fact: the sidecar ends with a checksum of itself, so
//! a cut or altered one is refused instead of accusing a good model.
//!
//! Layout, little endian: `DS4SUMS1`, file length, header length, XXH3-128 of the header (everything before the tensor data), number
//! of layers, number of tables; then for each layer its number, its experts and the XXH3-64 of gate, up, down of each expert; then
//! for each table its layer, its blocks and the low 32 bits of the XXH3-64 of each block; at the end the XXH3-64 of all before.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use thiserror::Error;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::gguf::GgufFile;
use super::layout::{Extent, Layout, TableLayout};
use super::part_file;
use crate::units::ExpertIdx;

const MAGIC: [u8; 8] = *b"DS4SUMS1";
/// Bytes of a table block: the smallest read that any drive makes, so checking a row reads nothing that was not read anyway.
pub const BLOCK_BYTES: u64 = 4096;
/// Table bytes that are hashed at a time.
const PIECE_BYTES: u64 = 4 << 20;

/// Why there is no sidecar.
#[derive(Debug, Error)]
pub enum ChecksumError {
    #[error("{}: {doing}: {source}", path.display())]
    Io { path: PathBuf, doing: &'static str, source: std::io::Error },
    #[error("{} exists already; use --force to replace it", path.display())]
    Exists { path: PathBuf },
    #[error("{}: no checksums of this model; make them with ds4-gguf checksum", path.display())]
    Missing { path: PathBuf },
    #[error("{}: {problem}; make it again with ds4-gguf checksum", path.display())]
    Unusable { path: PathBuf, problem: String },
    #[error("stopped; nothing was written")]
    Stopped,
}

/// Sums of one layer: `[experts][gate, up, down]`.
type LayerSums = Vec<[u64; 3]>;

/// All sums of one model file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Checksums {
    experts: Vec<LayerSums>,
    /// Low halves of the sums of each table's blocks.
    tables: Vec<Vec<u32>>,
}

/// The sidecar's usual place: the model's name with `.ds4sum` behind it.
pub fn sidecar_path(model: &Path) -> PathBuf {
    let mut name = model.as_os_str().to_owned();
    name.push(".ds4sum");
    name.into()
}

/// Blocks that a table touches; the first and the last may be shared with other bytes of the file, which are left out.
pub(super) fn table_blocks(table: &TableLayout) -> std::ops::Range<u64> {
    let end = table.offset + table.rows * u64::from(table.row_bytes);
    table.offset / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES)
}

/// The part of `block` that belongs to the table.
pub(super) fn block_extent(table: &TableLayout, block: u64) -> Extent {
    let end = table.offset + table.rows * u64::from(table.row_bytes);
    let offset = (block * BLOCK_BYTES).max(table.offset);
    Extent { offset, len: ((block + 1) * BLOCK_BYTES).min(end) - offset }
}

pub(super) fn block_sum(bytes: &[u8]) -> u32 {
    xxh3_64(bytes) as u32
}

fn read_error(path: &Path, source: std::io::Error) -> ChecksumError {
    ChecksumError::Io { path: path.to_owned(), doing: "cannot read", source }
}

impl Checksums {
    /// Reads everything streamed of `model` and sums it up; `watch` is told bytes done and bytes in all.
    ///
    /// # Errors
    /// A failed read, `Stopped`.
    pub fn of_model(
        model: &GgufFile,
        layout: &Layout,
        watch: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Self, ChecksumError> {
        let path = model.path();
        let file = File::open(path).map_err(|e| read_error(path, e))?;
        let total = layout.expert_bytes_total().0 + layout.table_bytes_total().0;
        let mut done = 0;
        let mut advance = |bytes: u64| {
            done += bytes;
            if watch(done, total).is_break() { Err(ChecksumError::Stopped) } else { Ok(()) }
        };
        // Layers may share their ranges.
        let mut seen: HashMap<[u64; 3], LayerSums> = HashMap::new();
        let mut experts = Vec::with_capacity(layout.experts.len());
        for layer in &layout.experts {
            let ranges = [layer.gate.offset, layer.up.offset, layer.down.offset];
            let sums = match seen.get(&ranges) {
                Some(sums) => sums.clone(),
                None => {
                    let mut sums = Vec::with_capacity(usize::from(layer.experts));
                    for first in (0..layer.experts).step_by(16) {
                        let some: Vec<u16> = (first..layer.experts.min(first + 16)).collect();
                        let found =
                            some.par_iter().map(|expert| expert_sums(&file, &layer.extents(ExpertIdx(*expert))));
                        sums.extend(found.collect::<std::io::Result<LayerSums>>().map_err(|e| read_error(path, e))?);
                        advance(some.len() as u64 * layer.expert_bytes().0)?;
                    }
                    seen.insert(ranges, sums.clone());
                    sums
                }
            };
            experts.push(sums);
        }
        let mut tables = Vec::with_capacity(layout.tables.len());
        for table in &layout.tables {
            let mut sums = Vec::new();
            let blocks = table_blocks(table);
            let step = PIECE_BYTES / BLOCK_BYTES;
            for first in blocks.clone().step_by(16 * step as usize) {
                let last = blocks.end.min(first + 16 * step);
                let starts: Vec<u64> = (first..last).step_by(step as usize).collect();
                let found = starts.par_iter().map(|start| table_sums(&file, table, *start..last.min(start + step)));
                let found: Vec<Vec<u32>> = found.collect::<std::io::Result<_>>().map_err(|e| read_error(path, e))?;
                sums.extend(found.into_iter().flatten());
                advance((last - first) * BLOCK_BYTES)?;
            }
            tables.push(sums);
        }
        if let Err(change) = model.identity().check_path(path) {
            return Err(ChecksumError::Unusable { path: path.to_owned(), problem: change.to_string() });
        }
        Ok(Self { experts, tables })
    }

    /// Writes the sidecar of `model` to `path`, whole or not at all.
    ///
    /// # Errors
    /// `Exists` unless `force`, a full drive.
    pub fn write(&self, model: &GgufFile, layout: &Layout, path: &Path, force: bool) -> Result<u64, ChecksumError> {
        let io = |source| ChecksumError::Io { path: path.to_owned(), doing: "cannot write", source };
        if !force && path.symlink_metadata().is_ok() {
            return Err(ChecksumError::Exists { path: path.to_owned() });
        }
        let temporary = part_file::begin(path).map_err(io)?;
        let mut out = Summed { inner: BufWriter::new(temporary), hash: Xxh3::new(), bytes: 0 };
        out.write_all(&identity(model)?).map_err(io)?;
        for count in [self.experts.len(), self.tables.len()] {
            out.write_all(&(count as u32).to_le_bytes()).map_err(io)?;
        }
        for (layer, sums) in layout.experts.iter().zip(&self.experts) {
            out.write_all(&u32::from(layer.layer.0).to_le_bytes()).map_err(io)?;
            out.write_all(&u32::from(layer.experts).to_le_bytes()).map_err(io)?;
            for sum in sums.iter().flatten() {
                out.write_all(&sum.to_le_bytes()).map_err(io)?;
            }
        }
        for (table, sums) in layout.tables.iter().zip(&self.tables) {
            out.write_all(&u32::from(table.layer.0).to_le_bytes()).map_err(io)?;
            out.write_all(&(sums.len() as u64).to_le_bytes()).map_err(io)?;
            for sum in sums {
                out.write_all(&sum.to_le_bytes()).map_err(io)?;
            }
        }
        let digest = out.hash.digest();
        out.write_all(&digest.to_le_bytes()).map_err(io)?;
        let bytes = out.bytes;
        let temporary = out.inner.into_inner().map_err(|e| io(e.into_error()))?;
        temporary.as_file().sync_all().map_err(io)?;
        let placed = if force { temporary.persist(path) } else { temporary.persist_noclobber(path) };
        placed.map_err(|e| match e.error.kind() {
            std::io::ErrorKind::AlreadyExists => ChecksumError::Exists { path: path.to_owned() },
            _ => io(e.error),
        })?;
        Ok(bytes)
    }

    /// Reads the sidecar at `path` and checks that it belongs to `model`. Nothing is believed before it was compared with the
    /// layout, so a wrong file costs no memory.
    ///
    /// # Errors
    /// `Missing`; `Unusable` for a sidecar of another file, of another version of it, or one that is cut or altered.
    pub fn open(path: &Path, model: &GgufFile, layout: &Layout) -> Result<Self, ChecksumError> {
        let io = |source| read_error(path, source);
        let unusable = |problem: &str| ChecksumError::Unusable { path: path.to_owned(), problem: problem.into() };
        // Before it is opened: to open a pipe is to wait until somebody writes to it.
        let found = match std::fs::metadata(path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                return Err(ChecksumError::Missing { path: path.to_owned() });
            }
            other => other.map_err(io)?,
        };
        if !found.is_file() {
            return Err(unusable("not a regular file"));
        }
        let mut file = File::open(path).map_err(io)?;
        let identity = identity(model)?;
        let expected_bytes = sidecar_bytes(layout, identity.len());
        let mut start = vec![0; identity.len()];
        let short = |e: std::io::Error| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => unusable("too short for a file of checksums"),
            _ => io(e),
        };
        file.read_exact(&mut start).map_err(short)?;
        if start[..8] != MAGIC {
            return Err(unusable("not a file of checksums"));
        }
        if start != identity {
            return Err(unusable("it belongs to another model file, or to another version of this one"));
        }
        if found.len() != expected_bytes {
            let problem = format!("it has {} bytes, expected {expected_bytes}", found.len());
            return Err(ChecksumError::Unusable { path: path.to_owned(), problem });
        }
        let mut rest = Vec::with_capacity((expected_bytes - start.len() as u64) as usize);
        file.read_to_end(&mut rest).map_err(io)?;
        if (start.len() + rest.len()) as u64 != expected_bytes {
            return Err(unusable("it changed while it was read"));
        }
        let (body, digest) = rest.split_at(rest.len() - 8);
        let mut hash = Xxh3::new();
        hash.update(&start);
        hash.update(body);
        if hash.digest().to_le_bytes() != digest {
            return Err(unusable("it is damaged"));
        }
        parse(body, layout).ok_or_else(|| unusable("its tables do not fit the model"))
    }

    /// The sum of one part (gate, up, down) of an expert of the layer at `index` of the layout.
    pub(super) fn expert(&self, index: usize, expert: ExpertIdx, part: usize) -> u64 {
        self.experts[index][usize::from(expert.0)][part]
    }

    /// The sum of the `block`-th block of the table at `index` of the layout.
    pub(super) fn table(&self, index: usize, block: usize) -> u32 {
        self.tables[index][block]
    }
}

fn expert_sums(file: &File, extents: &[Extent; 3]) -> std::io::Result<[u64; 3]> {
    let mut sums = [0; 3];
    let mut buffer = Vec::new();
    for (sum, extent) in sums.iter_mut().zip(extents) {
        let mut hash = Xxh3::new();
        let end = extent.offset + extent.len;
        for offset in (extent.offset..end).step_by(PIECE_BYTES as usize) {
            read_piece(file, Extent { offset, len: PIECE_BYTES.min(end - offset) }, &mut buffer)?;
            hash.update(&buffer);
        }
        *sum = hash.digest();
    }
    Ok(sums)
}

/// Sums of `blocks`, which are [`PIECE_BYTES`] or fewer.
fn table_sums(file: &File, table: &TableLayout, blocks: std::ops::Range<u64>) -> std::io::Result<Vec<u32>> {
    let (first, last) = (block_extent(table, blocks.start), block_extent(table, blocks.end - 1));
    let mut bytes = Vec::new();
    read_piece(file, Extent { offset: first.offset, len: last.offset + last.len - first.offset }, &mut bytes)?;
    let sum = |block: u64| {
        let extent = block_extent(table, block);
        let at = (extent.offset - first.offset) as usize;
        block_sum(&bytes[at..at + extent.len as usize])
    };
    Ok(blocks.map(sum).collect())
}

/// Reads a range once, leaving nothing of it in the page cache: the model may be much larger than memory.
fn read_piece(file: &File, extent: Extent, out: &mut Vec<u8>) -> std::io::Result<()> {
    out.resize(extent.len as usize, 0);
    file.read_exact_at(out, extent.offset)?;
    // Advice only.
    let _ =
        rustix::fs::fadvise(file, extent.offset, std::num::NonZeroU64::new(extent.len), rustix::fs::Advice::DontNeed);
    Ok(())
}

/// Magic, lengths and the hash of the model's header.
fn identity(model: &GgufFile) -> Result<Vec<u8>, ChecksumError> {
    let path = model.path();
    let header_len = model.data_start().min(model.file_len());
    let mut header = vec![0; header_len as usize];
    let file = File::open(path).map_err(|e| read_error(path, e))?;
    file.read_exact_at(&mut header, 0).map_err(|e| read_error(path, e))?;
    let mut out = MAGIC.to_vec();
    out.extend(model.file_len().to_le_bytes());
    out.extend(header_len.to_le_bytes());
    out.extend(xxhash_rust::xxh3::xxh3_128(&header).to_le_bytes());
    Ok(out)
}

/// Length of the sidecar of a model with this layout.
fn sidecar_bytes(layout: &Layout, identity: usize) -> u64 {
    let experts: u64 = layout.experts.iter().map(|l| 8 + 24 * u64::from(l.experts)).sum();
    let tables: u64 = layout.tables.iter().map(table_blocks).map(|b| 12 + 4 * (b.end - b.start)).sum();
    identity as u64 + 8 + experts + tables + 8
}

/// The sums behind the identity; `None` where counts differ from the layout. `body` has the length that the layout asks for.
fn parse(mut body: &[u8], layout: &Layout) -> Option<Checksums> {
    let counts = [take::<4>(&mut body)?, take::<4>(&mut body)?].map(u32::from_le_bytes);
    if counts != [layout.experts.len() as u32, layout.tables.len() as u32] {
        return None;
    }
    let mut experts = Vec::with_capacity(layout.experts.len());
    for layer in &layout.experts {
        let found = [take::<4>(&mut body)?, take::<4>(&mut body)?].map(u32::from_le_bytes);
        if found != [u32::from(layer.layer.0), u32::from(layer.experts)] {
            return None;
        }
        let mut sums = Vec::with_capacity(usize::from(layer.experts));
        for _ in 0..layer.experts {
            sums.push([take::<8>(&mut body)?, take::<8>(&mut body)?, take::<8>(&mut body)?].map(u64::from_le_bytes));
        }
        experts.push(sums);
    }
    let mut tables = Vec::with_capacity(layout.tables.len());
    for table in &layout.tables {
        let blocks = table_blocks(table);
        let (layer, count) = (u32::from_le_bytes(take(&mut body)?), u64::from_le_bytes(take(&mut body)?));
        if (layer, count) != (u32::from(table.layer.0), blocks.end - blocks.start) {
            return None;
        }
        let sums = (0..count).map(|_| take::<4>(&mut body).map(u32::from_le_bytes)).collect::<Option<Vec<u32>>>()?;
        tables.push(sums);
    }
    body.is_empty().then_some(Checksums { experts, tables })
}

fn take<const N: usize>(body: &mut &[u8]) -> Option<[u8; N]> {
    let (head, tail) = body.split_first_chunk::<N>()?;
    *body = tail;
    Some(*head)
}

/// Counts and sums what is written.
struct Summed<W> {
    inner: W,
    hash: Xxh3,
    bytes: u64,
}

impl<W: Write> Write for Summed<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let count = self.inner.write(bytes)?;
        self.hash.update(&bytes[..count]);
        self.bytes += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.inner.flush()
    }
}
