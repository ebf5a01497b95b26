//! What the drive under a model file gives: reads of expert size at several depths and piece sizes, random rows at several depths.
//! Owns the choice of depth and piece; never takes longer than a second on a drive that answers. Surprising fact: it reads through
//! the same pool as a run, so what it measures is what a run gets, not what the drive could give to somebody else.

mod measure;
mod remembered;

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::storage::reader::{OpenError, PoolLimits, ReaderChoice, ReaderOptions};
use crate::units::Bytes;

pub use remembered::Memory;

/// Files below this size say nothing about a drive: a part of them lies in its cache at once.
pub const FILE_BYTES_MIN: u64 = 64 << 20;

/// `--probe`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ProbeChoice {
    /// Measure a drive when it is first met, then remember.
    #[default]
    Auto,
    /// Never measure; the built-in depth and piece size.
    Off,
    /// Measure now, whatever is remembered.
    Force,
}

impl FromStr for ProbeChoice {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            "force" => Ok(Self::Force),
            _ => Err(format!("'{text}' is not one of auto, off, force")),
        }
    }
}

/// Reads of expert size with one setting.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct BulkPoint {
    pub piece_bytes: u64,
    /// Pieces under way.
    pub depth: u32,
    pub gb_per_s: f64,
    /// Median time from the kernel's hand to the landing of a piece.
    pub piece_ms_p50: f64,
}

/// Random reads of 4 KiB with one depth.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct RowPoint {
    pub depth: u32,
    pub reads_per_s: f64,
}

/// What a drive gave.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct DriveRates {
    /// The cheapest point within 5 % of the best: what a run uses.
    pub bulk: BulkPoint,
    /// As above, for rows.
    pub rows: RowPoint,
    /// Everything that was measured.
    pub bulk_points: Vec<BulkPoint>,
    pub row_points: Vec<RowPoint>,
    /// How long that took.
    pub probe_ms: f64,
    /// Bytes that it read.
    pub probe_bytes: u64,
    /// When, seconds since 1970.
    pub measured_unix_s: u64,
}

/// Drives fill up and wear out, and a measurement may have met a busy hour: a week, then it is made again.
const AGE_MAX_S: u64 = 7 * 24 * 3600;

/// Within this share of the best rate a setting counts as equal, and the one with fewer bytes under way is better: what comes next
/// waits behind fewer of them.
const NEARLY_BEST: f64 = 0.95;

impl DriveRates {
    /// Chooses among measured points. `None` without any.
    fn choose(bulk_points: Vec<BulkPoint>, row_points: Vec<RowPoint>) -> Option<Self> {
        let best = |rates: &mut dyn Iterator<Item = f64>| rates.fold(0.0, f64::max) * NEARLY_BEST;
        let bulk_least = best(&mut bulk_points.iter().map(|p| p.gb_per_s));
        let row_least = best(&mut row_points.iter().map(|p| p.reads_per_s));
        let bulk = bulk_points.iter().filter(|p| p.gb_per_s >= bulk_least);
        // Of two with the same bytes under way the one with larger pieces needs less of the processor.
        let bulk = *bulk.min_by_key(|p| (p.piece_bytes * u64::from(p.depth), p.depth))?;
        let rows = *row_points.iter().filter(|p| p.reads_per_s >= row_least).min_by_key(|p| p.depth)?;
        let (probe_ms, probe_bytes, measured_unix_s) = (0.0, 0, 0);
        Some(Self { bulk, rows, bulk_points, row_points, probe_ms, probe_bytes, measured_unix_s })
    }

    /// Seconds since the measurement; a date in the future counts as none.
    fn age_s(&self) -> u64 {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs());
        now.checked_sub(self.measured_unix_s).unwrap_or(u64::MAX)
    }

    /// Whether every number is one that a probe can give: they may come from a file that anybody can edit.
    fn is_sane(&self) -> bool {
        let bulk = |p: &BulkPoint| {
            (4096..=64 << 20).contains(&p.piece_bytes)
                && (1..=4096).contains(&p.depth)
                && p.gb_per_s.is_finite()
                && p.gb_per_s > 0.0
                && p.piece_ms_p50 >= 0.0
        };
        let row = |p: &RowPoint| (1..=4096).contains(&p.depth) && p.reads_per_s.is_finite() && p.reads_per_s > 0.0;
        self.bulk_points.len() <= 64
            && self.row_points.len() <= 64
            && bulk(&self.bulk)
            && row(&self.rows)
            && self.bulk_points.iter().all(bulk)
            && self.row_points.iter().all(row)
    }

    /// `options` with the depth and piece size that suit this drive.
    pub fn tune(&self, options: &ReaderOptions) -> ReaderOptions {
        let piece_bytes = self.bulk.piece_bytes as usize;
        ReaderOptions {
            limits: PoolLimits { piece_bytes, ..options.limits },
            bytes_under_way_max: piece_bytes * self.bulk.depth as usize,
            depth: self.rows.depth.max(self.bulk.depth) as usize,
            // Threads cost memory and switches; beyond these a blocking reader gains nothing.
            pread_threads: options.pread_threads.max((self.bulk.depth as usize).min(64)),
            ..*options
        }
    }
}

/// Where rates came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    Measured,
    Remembered,
}

/// The outcome of asking for rates.
#[derive(Clone, PartialEq, Debug)]
pub struct Probed {
    pub rates: DriveRates,
    pub source: Source,
    /// Why the rates were not kept for the next start, to be printed once.
    pub notice: Option<String>,
}

/// Why there are no rates.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("{} is {bytes}, too small to measure its drive (at least {} are needed)", path.display(), Bytes(FILE_BYTES_MIN))]
    TooSmall { path: PathBuf, bytes: Bytes },
    #[error("the drive probe met a read error: {0}")]
    Read(String),
    #[error("no read of the drive probe landed in time")]
    Silent,
}

/// Rates of the drive under `path`, read as `options` say; from `memory` where it has them, unless `choice` is `Force`.
/// `None` when `choice` is `Off`, or when nobody insists and the file is too small to tell.
///
/// # Errors
/// A file that cannot be opened as asked, or read; one that is too small, where `choice` is `Force`.
pub fn drive_rates(
    path: &Path,
    options: &ReaderOptions,
    choice: ProbeChoice,
    memory: &Memory,
) -> Result<Option<Probed>, ProbeError> {
    if choice == ProbeChoice::Off {
        return Ok(None);
    }
    let key = remembered::key(path, options)?;
    if key.file_bytes < FILE_BYTES_MIN {
        return match choice {
            ProbeChoice::Force => Err(ProbeError::TooSmall { path: path.to_owned(), bytes: Bytes(key.file_bytes) }),
            _ => Ok(None),
        };
    }
    if choice == ProbeChoice::Auto
        && let Some(rates) = memory.recall(&key.text)
        && rates.age_s() <= AGE_MAX_S
    {
        return Ok(Some(Probed { rates, source: Source::Remembered, notice: None }));
    }
    let rates = measure::measure(path, options)?;
    let notice = memory.keep(&key.text, &rates).err();
    Ok(Some(Probed { rates, source: Source::Measured, notice }))
}

/// Measures the drive under `path` now and keeps nothing.
///
/// # Errors
/// As [`drive_rates`], and a file that is too small.
pub fn measure_now(path: &Path, options: &ReaderOptions) -> Result<DriveRates, ProbeError> {
    measure::measure(path, options)
}

/// The reader kind as it is part of a key.
fn io_name(choice: ReaderChoice) -> &'static str {
    match choice {
        ReaderChoice::Auto => "auto",
        ReaderChoice::Uring => "uring",
        ReaderChoice::Pread => "pread",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bulk(piece_bytes: u64, depth: u32, gb_per_s: f64) -> BulkPoint {
        BulkPoint { piece_bytes, depth, gb_per_s, piece_ms_p50: 1.0 }
    }

    fn row(depth: u32, reads_per_s: f64) -> RowPoint {
        RowPoint { depth, reads_per_s }
    }

    #[test]
    fn the_fewest_bytes_under_way_win_among_equals() {
        let points =
            vec![bulk(1 << 20, 4, 1.0), bulk(1 << 20, 8, 1.95), bulk(1 << 19, 16, 1.96), bulk(1 << 20, 32, 2.0)];
        let rates = DriveRates::choose(points, vec![row(32, 50.0), row(64, 96.0), row(256, 100.0)]).unwrap();
        assert_eq!((rates.bulk.piece_bytes, rates.bulk.depth), (1 << 20, 8));
        assert_eq!(rates.rows.depth, 64);
        let tuned = rates.tune(&ReaderOptions::default());
        assert_eq!((tuned.limits.piece_bytes, tuned.bytes_under_way_max, tuned.depth), (1 << 20, 8 << 20, 64));
        assert!(DriveRates::choose(Vec::new(), vec![row(1, 1.0)]).is_none());
    }

    #[test]
    fn numbers_that_no_probe_gives_are_told() {
        let sane = DriveRates::choose(vec![bulk(1 << 20, 8, 2.0)], vec![row(64, 96.0)]).unwrap();
        assert!(sane.is_sane());
        for point in [bulk(0, 8, 2.0), bulk(1 << 20, 0, 2.0), bulk(1 << 20, 8, f64::NAN), bulk(1 << 40, 8, 1.0)] {
            assert!(!DriveRates { bulk: point, ..sane.clone() }.is_sane(), "{point:?}");
        }
        for point in [row(0, 1.0), row(5000, 1.0), row(64, 0.0), row(64, f64::INFINITY)] {
            assert!(!DriveRates { rows: point, ..sane.clone() }.is_sane(), "{point:?}");
        }
    }
}
