//! The measuring itself: a chain of random reads for each setting, timed between two looks at the reader's own counters.
//! Owns the memory that the reads land in; keeps no result. Surprising fact: a setting is skipped when the reads that it would leave
//! under way could not land within the second, which is what keeps a slow disk from being asked for minutes of work.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::{Condvar, Mutex};

use crate::storage::layout::Extent;
use crate::storage::probe::{BulkPoint, DriveRates, FILE_BYTES_MIN, ProbeError, RowPoint};
use crate::storage::reader::{
    DestRegion, Lane, PoolLimits, ReadClass, ReadLabel, ReadRequest, ReadResult, ReadSink, Reader, ReaderOptions,
    open_reader,
};
use crate::units::Bytes;

/// All of it.
const TIME_MAX: Duration = Duration::from_millis(960);
/// One setting: the queue fills, then the counters are watched.
const FILL: Duration = Duration::from_millis(8);
const WATCH: Duration = Duration::from_millis(30);
const WATCH_ROWS: Duration = Duration::from_millis(22);
/// Each setting is watched in turn, this often: a drive shared with others changes its rate while the others are tried.
const PASSES: usize = 2;

/// One matrix of a V4.1 expert in 2 bits: the read that the engine makes most.
const PART_BYTES: u64 = 3_041_280;
const ROW_BYTES: u64 = 4096;

/// Bytes under way, tried with the middle piece size, rising.
const FLIGHTS: [u64; 4] = [4 << 20, 8 << 20, 16 << 20, 32 << 20];
const PIECE_FIRST: u64 = 512 << 10;
/// Tried with the best of the flights.
const PIECES: [u64; 3] = [1 << 20, 256 << 10, 2 << 20];
const ROW_DEPTHS: [u32; 4] = [32, 64, 128, 256];

/// Regions of `PART_BYTES` that keep the largest flight full, with two more for what is between landing and the next.
const PARTS_MAX: usize = (32 << 20) / PART_BYTES as usize + 3;

/// A sink that answers each landing with the next random read until it is told to stop.
struct Chain {
    file_bytes: u64,
    read_bytes: u64,
    lane: Lane,
    state: Mutex<State>,
    ended: Condvar,
}

struct State {
    random: u64,
    is_over: bool,
    under_way: usize,
    regions: Vec<DestRegion>,
    error: Option<String>,
}

impl Chain {
    fn request(&self, state: &mut State, region: DestRegion) -> ReadRequest {
        // SplitMix64: any sequence without a stride that a drive could guess.
        state.random = state.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let places = (self.file_bytes - self.read_bytes) / ROW_BYTES;
        let extent = Extent { offset: (z ^ (z >> 31)) % places * ROW_BYTES, len: self.read_bytes };
        let label = ReadLabel::Tensor("the drive probe".into());
        ReadRequest { extent, lane: self.lane, class: ReadClass::Preload, label, region, tag: 0 }
    }
}

impl ReadSink for Chain {
    fn landed(&self, _tag: u64, result: ReadResult) -> Option<ReadRequest> {
        let mut state = self.state.lock();
        match result {
            Ok(landed) if !state.is_over => return Some(self.request(&mut state, landed.region)),
            Ok(landed) => state.regions.push(landed.region),
            Err(error) => {
                state.is_over = true;
                state.error.get_or_insert_with(|| error.to_string());
            }
        }
        state.under_way -= 1;
        if state.under_way == 0 {
            self.ended.notify_all();
        }
        None
    }
}

/// A file, how to read it, and what is left of the time.
struct Probe<'a> {
    path: &'a Path,
    options: &'a ReaderOptions,
    file_bytes: u64,
    begun: Instant,
    bytes: u64,
    /// Bytes a second of the best setting so far.
    rate: f64,
}

/// What one setting gave.
struct Seen {
    bytes_per_s: f64,
    reads_per_s: f64,
    ms_p50: f64,
}

/// Measures the drive under `path`, read as `options` say but for depth and pieces.
pub(super) fn measure(path: &Path, options: &ReaderOptions) -> Result<DriveRates, ProbeError> {
    let begun = Instant::now();
    let reader = open_reader(path, options)?;
    let file_bytes = std::fs::metadata(path).map_or(0, |m| m.len());
    if file_bytes < FILE_BYTES_MIN {
        return Err(ProbeError::TooSmall { path: path.to_owned(), bytes: Bytes(file_bytes) });
    }
    let mut probe = Probe { path, options, file_bytes, begun, bytes: 0, rate: 0.0 };
    let bulk_regions = regions(&*reader, PART_BYTES, PARTS_MAX)?;
    drop(reader);
    let (bulk_points, regions_back) = probe.bulk(bulk_regions)?;
    drop(regions_back);
    let row_points = probe.rows()?;
    let mut rates = DriveRates::choose(bulk_points, row_points).ok_or(ProbeError::Silent)?;
    rates.probe_ms = begun.elapsed().as_secs_f64() * 1e3;
    rates.probe_bytes = probe.bytes;
    rates.measured_unix_s = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs());
    if rates.is_sane() { Ok(rates) } else { Err(ProbeError::Silent) }
}

/// Memory for `count` reads of `len` bytes at any offset.
fn regions(reader: &dyn Reader, len: u64, count: usize) -> Result<Vec<DestRegion>, ProbeError> {
    let failed = |cause: String| ProbeError::Read(format!("no memory for it ({cause})"));
    let bytes = reader.alignment().region_bytes_max(len).ok_or_else(|| failed("too large".into()))?;
    let bytes = bytes.next_multiple_of(reader.alignment().memory as usize);
    let mut whole = DestRegion::anonymous(bytes * count).map_err(|e| failed(e.to_string()))?;
    let mut cut = Vec::with_capacity(count);
    for _ in 1..count {
        let rest = whole.split_off(bytes);
        cut.push(std::mem::replace(&mut whole, rest));
    }
    cut.push(whole);
    Ok(cut)
}

impl Probe<'_> {
    fn bulk(&mut self, mut regions: Vec<DestRegion>) -> Result<(Vec<BulkPoint>, Vec<DestRegion>), ProbeError> {
        let mut points: Vec<BulkPoint> = Vec::new();
        for _ in 0..PASSES {
            for flight in FLIGHTS {
                self.bulk_point(PIECE_FIRST, flight, &mut regions, &mut points)?;
            }
        }
        if let Some(best) = DriveRates::choose(points.clone(), vec![RowPoint { depth: 1, reads_per_s: 1.0 }]) {
            let flight = best.bulk.piece_bytes * u64::from(best.bulk.depth);
            for _ in 0..PASSES {
                for piece in PIECES {
                    self.bulk_point(piece, flight, &mut regions, &mut points)?;
                }
            }
        }
        Ok((points, regions))
    }

    fn bulk_point(
        &mut self,
        piece: u64,
        flight: u64,
        regions: &mut Vec<DestRegion>,
        points: &mut Vec<BulkPoint>,
    ) -> Result<(), ProbeError> {
        if !self.has_time(WATCH, flight) {
            return Ok(());
        }
        let options = ReaderOptions {
            limits: PoolLimits { piece_bytes: piece as usize, ..self.options.limits },
            bytes_under_way_max: flight as usize,
            pread_threads: (flight / piece).clamp(1, 64) as usize,
            ..*self.options
        };
        let count = (flight / PART_BYTES) as usize + 3;
        let seen = self.run(&options, (Lane::Bulk, PART_BYTES), WATCH, regions, count)?;
        if let Some(seen) = seen {
            self.rate = self.rate.max(seen.bytes_per_s);
            let (depth, gb_per_s) = ((flight / piece).max(1) as u32, seen.bytes_per_s / 1e9);
            match points.iter_mut().find(|p| p.piece_bytes == piece && p.depth == depth) {
                Some(point) => {
                    point.gb_per_s = f64::midpoint(point.gb_per_s, gb_per_s);
                    point.piece_ms_p50 = f64::midpoint(point.piece_ms_p50, seen.ms_p50);
                }
                None => {
                    points.push(BulkPoint { piece_bytes: piece, depth, gb_per_s, piece_ms_p50: seen.ms_p50 });
                }
            }
        }
        Ok(())
    }

    fn rows(&mut self) -> Result<Vec<RowPoint>, ProbeError> {
        let mut points: Vec<RowPoint> = Vec::new();
        let mut memory: Option<Vec<DestRegion>> = None;
        for depth in [ROW_DEPTHS; PASSES].into_iter().flatten() {
            // A disk that seeks for every row: what the last depth gave says how long this one drains.
            let per_s = points.last().map_or(f64::MAX, |p| p.reads_per_s);
            let drain = Duration::from_secs_f64((f64::from(depth) / per_s).min(1e3));
            if !points.is_empty() && self.begun.elapsed() + FILL + WATCH_ROWS + drain > TIME_MAX {
                break;
            }
            let options =
                ReaderOptions { depth: depth as usize, pread_threads: depth.min(64) as usize, ..*self.options };
            let mut regions = match memory.take() {
                Some(regions) => regions,
                None => {
                    let reader = open_reader(self.path, &options)?;
                    regions(&*reader, ROW_BYTES, 2 * ROW_DEPTHS[ROW_DEPTHS.len() - 1] as usize)?
                }
            };
            let seen = self.run(&options, (Lane::Rows, ROW_BYTES), WATCH_ROWS, &mut regions, 2 * depth as usize)?;
            memory = Some(regions);
            if let Some(seen) = seen {
                match points.iter_mut().find(|p| p.depth == depth) {
                    Some(point) => point.reads_per_s = f64::midpoint(point.reads_per_s, seen.reads_per_s),
                    None => points.push(RowPoint { depth, reads_per_s: seen.reads_per_s }),
                }
            }
        }
        Ok(points)
    }

    /// Whether a setting with `flight` bytes under way would end in time, as far as is known.
    fn has_time(&self, watch: Duration, flight: u64) -> bool {
        // The rows want their share of the second too: one pass of them.
        let reserve = (WATCH_ROWS + FILL) * ROW_DEPTHS.len() as u32;
        let drain = if self.rate > 0.0 { Duration::from_secs_f64(flight as f64 / self.rate) } else { Duration::ZERO };
        self.begun.elapsed() + FILL + watch + drain + reserve <= TIME_MAX
    }

    /// Keeps `count` reads queued or under way for a while. `None` when nothing landed meanwhile.
    fn run(
        &mut self,
        options: &ReaderOptions,
        (lane, read_bytes): (Lane, u64),
        watch: Duration,
        regions: &mut Vec<DestRegion>,
        count: usize,
    ) -> Result<Option<Seen>, ProbeError> {
        let reader = open_reader(self.path, options)?;
        let count = count.min(regions.len());
        let rest = regions.split_off(count);
        let first = std::mem::replace(regions, rest);
        let seed = self.begun.elapsed().as_nanos() as u64;
        let state = State { random: seed, is_over: false, under_way: count, regions: Vec::new(), error: None };
        let (file_bytes, state) = (self.file_bytes, Mutex::new(state));
        let chain = Arc::new(Chain { file_bytes, read_bytes, lane, state, ended: Condvar::new() });
        let batch = {
            let mut state = chain.state.lock();
            first.into_iter().map(|region| chain.request(&mut state, region)).collect()
        };
        reader.submit(batch, Arc::clone(&chain) as Arc<dyn ReadSink>);
        std::thread::sleep(FILL);
        let look = || (Instant::now(), reader.counters().device_bytes.get(), reader.counters().reads.get());
        let (from, bytes_from, reads_from) = look();
        std::thread::sleep(watch);
        let (to, bytes_to, reads_to) = look();
        let mut state = chain.state.lock();
        state.is_over = true;
        while state.under_way > 0 {
            chain.ended.wait(&mut state);
        }
        regions.append(&mut state.regions);
        self.bytes += reader.counters().device_bytes.get();
        if let Some(error) = state.error.take() {
            return Err(ProbeError::Read(error));
        }
        let seconds = (to - from).as_secs_f64();
        let (bytes, reads) = ((bytes_to - bytes_from) as f64, (reads_to - reads_from) as f64);
        let ms_p50 = reader.counters().latency.summary().ms_p50;
        let seen = Seen { bytes_per_s: bytes / seconds, reads_per_s: reads / seconds, ms_p50 };
        Ok((bytes > 0.0).then_some(seen))
    }
}
