//! Rows of the disk-only tables: sorted, de-duplicated, read in one deep batch, handed out in the order asked. Owns the bounce memory
//! of a bounded window; keeps rows only where a cache is asked for, and never invents one: a row that cannot be read fails the step.
//! Surprising fact: a large batch runs by itself after `submit`, because each block that lands hands its memory to the next read.

mod cache;

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::obs::RowCounters;
use crate::obs::stall::Patience;
use crate::storage::layout::{Extent, TableLayout};
use crate::storage::reader::{
    BatchId, DestRegion, Lane, ReadClass, ReadError, ReadLabel, ReadRequest, ReadResult, ReadSink, Reader,
};
use crate::units::{Bytes, LayerIdx};
use cache::RowCache;

/// Blocks whose reads may be under way or queued at once: above any drive's depth, and at 8 KiB a block (264-byte rows, 4 KiB
/// alignment) 8 MiB of bounce memory.
pub const WINDOW_BLOCKS: usize = 1024;
/// Bounce regions kept for the next batch: one under way and one ahead.
const SPARE_REGIONS_MAX: usize = 2;

/// Why rows could not be had.
#[derive(Clone, Debug, thiserror::Error)]
pub enum RowError {
    #[error(
        "row {row} of the table of layer {} does not exist: it has {rows} rows; the file's hash constants do not fit its table",
        layer.0
    )]
    OutOfRange { layer: LayerIdx, row: u64, rows: u64 },
    #[error("the table of layer {} is not usable: {rows} rows of {row_bytes} bytes at offset {offset}", layer.0)]
    Layout { layer: LayerIdx, rows: u64, row_bytes: u32, offset: u64 },
    #[error(transparent)]
    Read(ReadError),
    #[error("no memory for {bytes} bytes of row reads ({cause}); use a smaller --prefill-chunk or --ctx")]
    Memory { bytes: usize, cause: String },
    #[error("no memory for a row cache of {} ({cause}); use a smaller --row-cache", Bytes(*bytes))]
    CacheMemory { bytes: u64, cause: String },
}

/// The row tables of one model file.
pub struct RowTables {
    reader: Arc<dyn Reader>,
    tables: Arc<[TableLayout]>,
    /// Bytes of bounce memory for one block of any table.
    block_bytes: usize,
    window_blocks: usize,
    spare: Arc<Mutex<Vec<DestRegion>>>,
    counters: Arc<RowCounters>,
    cache: Option<Arc<Mutex<RowCache>>>,
}

impl RowTables {
    /// Tables of the file behind `reader`, with `WINDOW_BLOCKS` or fewer reads at once. Errors on a layout that overflows.
    pub fn new(reader: Arc<dyn Reader>, tables: &[TableLayout], window_blocks: usize) -> Result<Self, RowError> {
        let mut block_bytes = 0;
        for table in tables {
            let &TableLayout { layer, offset, row_bytes, rows } = table;
            let fits = rows.checked_mul(u64::from(row_bytes)).and_then(|bytes| bytes.checked_add(offset)).is_some();
            let bytes = reader.alignment().region_bytes_max(u64::from(row_bytes));
            match bytes {
                Some(bytes) if fits && row_bytes > 0 => block_bytes = block_bytes.max(bytes),
                _ => return Err(RowError::Layout { layer, rows, row_bytes, offset }),
            }
        }
        Ok(Self {
            // Whole multiples keep every block of the bounce memory aligned.
            block_bytes: block_bytes.next_multiple_of(reader.alignment().memory as usize),
            reader,
            tables: tables.into(),
            window_blocks: window_blocks.clamp(1, WINDOW_BLOCKS),
            spare: Arc::default(),
            counters: Arc::default(),
            cache: None,
        })
    }

    /// The same tables with at most `budget` of memory for rows that were read before. A budget below one set of rows keeps none.
    pub fn with_cache(mut self, budget: Bytes) -> Self {
        let row_bytes = self.tables.iter().map(|t| t.row_bytes as usize).max().unwrap_or(0);
        let rows = self.tables.iter().fold(0u64, |sum, t| sum.saturating_add(t.rows)).min(1 << 48);
        // Keys hold 48 bits of a row; a table of more is kept out of the cache altogether.
        let fits = row_bytes > 0 && self.tables.iter().all(|t| t.rows < 1 << 48);
        let cache = if fits { RowCache::new(budget.0, row_bytes, rows) } else { None };
        self.cache = cache.map(|cache| Arc::new(Mutex::new(cache)));
        self
    }

    /// Memory of the cache, for the memory plan; taken at the first read.
    pub fn cache_bytes(&self) -> u64 {
        self.cache.as_ref().map_or(0, |cache| cache.lock().bytes())
    }

    /// The tables, in the order in which `submit` and `wait` number them.
    pub fn tables(&self) -> &[TableLayout] {
        &self.tables
    }

    /// Live counters.
    pub fn counters(&self) -> &RowCounters {
        &self.counters
    }

    /// Most memory that one batch of `rows` rows in all takes, for the memory plan.
    pub fn batch_bytes_max(&self, rows: u64) -> u64 {
        let row_bytes = self.tables.iter().map(|t| u64::from(t.row_bytes)).max().unwrap_or(0);
        let bookkeeping = std::mem::size_of::<(u64, u32)>() as u64 + 4 + std::mem::size_of::<Block>() as u64 + 8;
        let window = rows.min(self.window_blocks as u64);
        rows.saturating_mul(row_bytes + bookkeeping).saturating_add(window * self.block_bytes as u64)
    }

    /// Starts reading `rows_by_table[t]` of each table `t`, in any order, repeats allowed, as one submission. Returns at once, or
    /// after waiting for room when the reader's queue is full. Panics when the number of tables differs.
    pub fn submit(&self, rows_by_table: &[Vec<u64>]) -> Result<RowTicket, RowError> {
        assert_eq!(rows_by_table.len(), self.tables.len(), "rows for each table");
        let mut plan = Plan::default();
        let mut cache = self.cache.as_ref().map(|cache| cache.lock());
        if let Some(cache) = &mut cache {
            cache.allocate()?;
        }
        for (index, (table, rows)) in self.tables.iter().zip(rows_by_table).enumerate() {
            let align = u64::from(self.reader.alignment().offset);
            plan.add_table(index, table, rows, align, cache.as_deref_mut())?;
        }
        drop(cache);
        self.counters.submissions.increment();
        self.counters.rows_asked.add(rows_by_table.iter().map(|rows| rows.len() as u64).sum());
        self.counters.row_reads.add(plan.blocks.len() as u64);
        for (table, asked) in self.tables.iter().zip(&plan.asked) {
            let read = (asked.distinct - asked.cached) as u64;
            self.counters.rows_read.add(read);
            self.counters.rows_cached.add(asked.cached as u64);
            self.counters.row_bytes.add(read * u64::from(table.row_bytes));
        }

        let mut bounce = self.take_bounce()?;
        let first_wave = plan.blocks.len().min(self.window_blocks);
        let state = BatchState {
            packed: std::mem::take(&mut plan.packed),
            rows_left: plan.asked.iter().map(|asked| asked.distinct - asked.cached).collect(),
            next_block: first_wave,
            error: None,
            abandoned: false,
        };
        let batch = Arc::new(Batch {
            tables: Arc::clone(&self.tables),
            plan,
            cache: self.cache.clone(),
            state: Mutex::new(state),
            progress: Condvar::new(),
        });
        let mut requests = Vec::with_capacity(first_wave);
        for block in 0..first_wave {
            let rest = bounce.split_off(self.block_bytes);
            requests.push(batch.request(block, std::mem::replace(&mut bounce, rest)));
        }
        let id = self.reader.submit(requests, Arc::clone(&batch) as Arc<dyn ReadSink>);
        Ok(RowTicket {
            batch,
            id,
            reader: Arc::clone(&self.reader),
            rest_of_bounce: Some(bounce),
            spare: Arc::clone(&self.spare),
            counters: Arc::clone(&self.counters),
        })
    }

    fn take_bounce(&self) -> Result<DestRegion, RowError> {
        if let Some(region) = self.spare.lock().pop() {
            return Ok(region);
        }
        let bytes = self.block_bytes * self.window_blocks;
        DestRegion::anonymous(bytes).map_err(|e| RowError::Memory { bytes, cause: e.to_string() })
    }
}

/// One read: the distinct rows `first_row .. first_row + rows` of a table's sorted list, all inside one aligned range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Block {
    table: u32,
    first_row: u32,
    rows: u32,
    extent: Extent,
}

/// What was asked of one table.
#[derive(Debug, Default)]
struct Asked {
    /// For each row asked, its place among the distinct rows.
    place: Vec<u32>,
    distinct: usize,
    /// Of those, rows that the cache had.
    cached: usize,
}

#[derive(Debug, Default)]
struct Plan {
    asked: Vec<Asked>,
    /// The distinct rows of all tables, table by table, rising within each.
    rows: Vec<u64>,
    /// Where each table's distinct rows begin in `rows`.
    rows_at: Vec<usize>,
    /// By table, then file offset: the first table is needed first.
    blocks: Vec<Block>,
    /// `[distinct rows, row_bytes]` of each table; rows of the cache are in.
    packed: Vec<Vec<u8>>,
}

impl Plan {
    fn add_table(
        &mut self,
        index: usize,
        table: &TableLayout,
        rows: &[u64],
        align: u64,
        mut cache: Option<&mut RowCache>,
    ) -> Result<(), RowError> {
        if let Some(&row) = rows.iter().find(|&&row| row >= table.rows) {
            return Err(RowError::OutOfRange { layer: table.layer, row, rows: table.rows });
        }
        let mut sorted: Vec<(u64, u32)> = rows.iter().enumerate().map(|(i, &row)| (row, i as u32)).collect();
        sorted.sort_unstable();
        let at = self.rows.len();
        let mut place = vec![0u32; rows.len()];
        for (row, asked) in sorted {
            if self.rows.len() == at || self.rows.last() != Some(&row) {
                self.rows.push(row);
            }
            place[asked as usize] = (self.rows.len() - at - 1) as u32;
        }
        let distinct = self.rows.len() - at;
        let mut packed = packed_memory(distinct * table.row_bytes as usize)?;
        let mut cached = 0;
        let mut open: Option<Block> = None;
        for (i, out) in packed.chunks_exact_mut(table.row_bytes as usize).enumerate() {
            let number = self.rows[at + i];
            if cache.as_mut().is_some_and(|cache| cache.get(index, number, out)) {
                cached += 1;
                // A block is a run of rows that are not at hand.
                self.blocks.extend(open.take());
                continue;
            }
            let row = table.row(number);
            match &mut open {
                // A row that the aligned read brings anyway costs no read of its own.
                Some(block) if row.offset + row.len <= aligned_end(block.extent, align) => {
                    block.rows += 1;
                    block.extent.len = row.offset + row.len - block.extent.offset;
                }
                _ => {
                    let block = Block { table: index as u32, first_row: i as u32, rows: 1, extent: row };
                    self.blocks.extend(open.replace(block));
                }
            }
        }
        self.blocks.extend(open);
        self.rows_at.push(at);
        self.asked.push(Asked { place, distinct, cached });
        self.packed.push(packed);
        Ok(())
    }
}

/// Memory for the distinct rows of a table, taken without aborting when there is none.
fn packed_memory(bytes: usize) -> Result<Vec<u8>, RowError> {
    let mut packed = Vec::new();
    packed.try_reserve_exact(bytes).map_err(|e| RowError::Memory { bytes, cause: e.to_string() })?;
    packed.resize(bytes, 0);
    Ok(packed)
}

fn aligned_end(extent: Extent, align: u64) -> u64 {
    (extent.offset + extent.len).next_multiple_of(align)
}

struct BatchState {
    /// `[distinct rows, row_bytes]` of each table; only read once all of the table's rows are in.
    packed: Vec<Vec<u8>>,
    /// Distinct rows of each table that are not in yet.
    rows_left: Vec<usize>,
    /// First block that no read was made for.
    next_block: usize,
    error: Option<RowError>,
    abandoned: bool,
}

/// The sink of one batch.
struct Batch {
    tables: Arc<[TableLayout]>,
    plan: Plan,
    cache: Option<Arc<Mutex<RowCache>>>,
    state: Mutex<BatchState>,
    progress: Condvar,
}

impl Batch {
    fn request(&self, block: usize, region: DestRegion) -> ReadRequest {
        let Block { table, first_row, extent, .. } = self.plan.blocks[block];
        let row = self.plan.rows[self.plan.rows_at[table as usize] + first_row as usize];
        let label = ReadLabel::Row { layer: self.tables[table as usize].layer, row };
        ReadRequest { extent, lane: Lane::Rows, class: ReadClass::Demand, label, region, tag: block as u64 }
    }
}

impl ReadSink for Batch {
    fn landed(&self, tag: u64, result: ReadResult) -> Option<ReadRequest> {
        let mut state = self.state.lock();
        let landed = match result {
            Ok(landed) => landed,
            Err(error) => {
                state.error.get_or_insert(RowError::Read(error));
                self.progress.notify_all();
                return None;
            }
        };
        let Block { table, first_row, rows, extent } = self.plan.blocks[tag as usize];
        let (table, first_row, rows) = (table as usize, first_row as usize, rows as usize);
        let layout = &self.tables[table];
        let row_bytes = layout.row_bytes as usize;
        let mut cache = self.cache.as_ref().map(|cache| cache.lock());
        for i in first_row..first_row + rows {
            let row = self.plan.rows[self.plan.rows_at[table] + i];
            let from = (layout.row(row).offset - extent.offset) as usize;
            let bytes = &landed.bytes()[from..from + row_bytes];
            state.packed[table][i * row_bytes..(i + 1) * row_bytes].copy_from_slice(bytes);
            if let Some(cache) = &mut cache {
                cache.put(table, row, bytes);
            }
        }
        drop(cache);
        state.rows_left[table] -= rows;
        if state.rows_left[table] == 0 {
            self.progress.notify_all();
        }
        if state.abandoned || state.error.is_some() || state.next_block == self.plan.blocks.len() {
            return None;
        }
        let next = state.next_block;
        state.next_block += 1;
        drop(state);
        Some(self.request(next, landed.region))
    }
}

/// Rows under way. Dropping it ends the reads that have not begun.
pub struct RowTicket {
    batch: Arc<Batch>,
    id: BatchId,
    reader: Arc<dyn Reader>,
    /// The part of the bounce memory that no block used; the last piece left takes the whole back.
    rest_of_bounce: Option<DestRegion>,
    spare: Arc<Mutex<Vec<DestRegion>>>,
    counters: Arc<RowCounters>,
}

impl RowTicket {
    /// Waits until all rows of `table` are in and writes them to `out` (`[rows asked, row_bytes]`) in the order asked. On an
    /// error `out` is untouched. Panics when `out` has another length.
    pub fn wait(&mut self, table: usize, out: &mut [u8]) -> Result<(), RowError> {
        let row_bytes = self.batch.tables[table].row_bytes as usize;
        let place = &self.batch.plan.asked[table].place;
        assert_eq!(out.len(), place.len() * row_bytes, "room for every row asked of table {table}");
        let mut state = self.batch.state.lock();
        if state.rows_left[table] > 0 && state.error.is_none() {
            let mut patience = Patience::new("n-gram rows");
            while state.rows_left[table] > 0 && state.error.is_none() {
                self.batch.progress.wait_for(&mut state, patience.step());
                self.counters.stalls.add(u64::from(patience.look()));
            }
            self.counters.wait_ns.add_ns(patience.end());
        }
        if state.rows_left[table] > 0 {
            self.counters.failed.increment();
            return Err(state.error.clone().expect("the wait ends with all rows or an error"));
        }
        for (row, &at) in out.chunks_exact_mut(row_bytes).zip(place) {
            let at = at as usize * row_bytes;
            row.copy_from_slice(&state.packed[table][at..at + row_bytes]);
        }
        Ok(())
    }

    /// Whether `wait(table)` would return at once.
    pub fn is_ready(&self, table: usize) -> bool {
        let state = self.batch.state.lock();
        state.rows_left[table] == 0 || state.error.is_some()
    }
}

impl Drop for RowTicket {
    fn drop(&mut self) {
        let mut state = self.batch.state.lock();
        state.abandoned = true;
        let complete = state.rows_left.iter().all(|&left| left == 0);
        drop(state);
        if !complete {
            self.reader.cancel(self.id);
        }
        // Fails while a read is under way: the memory then goes when that read has ended.
        let whole = self.rest_of_bounce.take().map(DestRegion::reunite);
        if let Some(Ok(region)) = whole {
            let mut spare = self.spare.lock();
            if spare.len() < SPARE_REGIONS_MAX {
                spare.push(region);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(rows: &[u64], align: u64) -> Plan {
        let table = TableLayout { layer: LayerIdx(1), offset: 1000, row_bytes: 264, rows: 1_000_000 };
        let mut plan = Plan::default();
        plan.add_table(0, &table, rows, align, None).unwrap();
        plan
    }

    #[test]
    fn rows_are_sorted_and_read_once() {
        let plan = plan(&[500, 7, 500, 300, 7], 512);
        assert_eq!(plan.rows, [7, 300, 500]);
        assert_eq!(plan.asked[0].place, [2, 0, 2, 1, 0]);
        assert_eq!(plan.blocks.len(), 3);
    }

    #[test]
    fn rows_share_a_read_only_inside_one_aligned_range() {
        // Row 0 is [1000, 1264), aligned to 512 it brings [512, 1536); row 1 ends at 1528. Row 2 brings
        // bytes up to 2048, and row 3 ends at 2056.
        let plan512 = plan(&[0, 1, 2, 3], 512);
        let shape: Vec<(u32, u32, u64)> = plan512.blocks.iter().map(|b| (b.first_row, b.rows, b.extent.len)).collect();
        assert_eq!(shape, [(0, 2, 528), (2, 1, 264), (3, 1, 264)]);
        // Buffered reads bring nothing beside the row.
        assert_eq!(plan(&[0, 1, 2, 3], 1).blocks.len(), 4);
        assert_eq!(plan(&[0, 1, 2, 3], 4096).blocks.len(), 1);
    }
}
