//! What a running process shows to another one: the record in the file of `--snapshot-file`. Owns the format and its checks.
//! Never collects a number itself. Surprising fact: a reader never sees half a record, because the file is renamed into place.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// Value of [`Snapshot::format`].
pub const FORMAT: &str = "ds4-snapshot";
/// Value of [`Snapshot::version`].
pub const VERSION: u32 = 1;
/// Longest file that is read: 64 MiB, thirty times the largest model's.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// Slots of the expert cache by state; the four states add up to `total`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct SlotStates {
    pub total: u64,
    pub empty: u64,
    /// A read into the slot is under way, or has failed a moment ago.
    pub filling: u64,
    /// Holds an expert that nobody uses at the moment.
    pub valid: u64,
    /// Holds an expert that a running step uses.
    pub leased: u64,
}

/// The experts of one layer.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct LayerSnapshot {
    pub layer: u16,
    /// Experts that the layer has.
    pub experts: u16,
    /// Ids of those in memory, rising.
    pub cached: Vec<u16>,
    /// Requests of each expert since the start: `[experts]`. A prefill chunk requests an expert once.
    pub uses: Vec<u32>,
}

/// One process at one moment. Counts are since the start unless a field says otherwise.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Snapshot {
    /// [`FORMAT`].
    pub format: String,
    /// [`VERSION`].
    pub version: u32,
    pub pid: u32,
    /// Path of the model file.
    pub model: String,
    pub arch: String,
    /// Since the model was open.
    pub elapsed_ms: u64,
    /// Whether this is the last record: the process is ending.
    pub is_last: bool,
    /// Tokens computed, prompt and generation.
    pub tokens: u64,
    /// Those computed one at a time.
    pub decode_tokens: u64,
    /// Single tokens a second, over the last two seconds.
    pub decode_tps: f64,
    pub slots: SlotStates,
    pub hits: u64,
    pub misses: u64,
    pub evictions: u64,
    /// Hits of all requests, 0 to 1; absent before the first.
    pub hit_rate: Option<f64>,
    /// Hits of the requests of single tokens.
    pub decode_hit_rate: Option<f64>,
    /// Kernel reads under way.
    pub reads_in_flight: u64,
    /// Bytes read, all kinds.
    pub read_bytes: u64,
    /// Over the last two seconds, in 10^9 bytes a second of wall time.
    pub read_gb_per_s: f64,
    /// Time that steps waited for experts.
    pub wait_ms: f64,
    /// Routed layers, rising; empty when nothing is streamed.
    pub layers: Vec<LayerSnapshot>,
}

/// Why a file is no snapshot.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    #[error("cannot read {path}: {error}; start ds4 with --snapshot-file {path}")]
    File { path: String, error: std::io::Error },
    #[error("{path} is not a snapshot of a running ds4 ({what}); give the file of --snapshot-file")]
    NotASnapshot { path: String, what: String },
    #[error("{path} has snapshot version {found}, this program reads version {VERSION}; use the program that wrote it")]
    Version { path: String, found: u64 },
}

impl Snapshot {
    /// Reads and checks the record in the file at `path`.
    ///
    /// # Errors
    /// A file that cannot be read, is none of ours, or whose lists contradict each other.
    pub fn read(path: &Path) -> Result<Self, SnapshotError> {
        let shown = || path.display().to_string();
        let failed = |error| SnapshotError::File { path: shown(), error };
        // Counted while reading: devices and pipes have no length.
        let mut bytes = Vec::new();
        let file = File::open(path).map_err(failed)?;
        file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
        if bytes.len() as u64 > FILE_BYTES_MAX {
            return Err(SnapshotError::NotASnapshot { path: shown(), what: "it is larger than any".into() });
        }
        Self::parse(&bytes, &shown())
    }

    /// As [`Snapshot::read`], from the bytes of the file called `path`.
    ///
    /// # Errors
    /// Bytes that are no record of this version.
    pub fn parse(bytes: &[u8], path: &str) -> Result<Self, SnapshotError> {
        #[derive(Deserialize)]
        struct Head {
            format: String,
            version: u64,
        }
        let bad = |what: String| SnapshotError::NotASnapshot { path: path.into(), what };
        let head: Head = serde_json::from_slice(bytes).map_err(|e| bad(e.to_string()))?;
        if head.format != FORMAT {
            return Err(bad(format!("its format is {:?}", head.format.chars().take(40).collect::<String>())));
        }
        if head.version != u64::from(VERSION) {
            return Err(SnapshotError::Version { path: path.into(), found: head.version });
        }
        let snapshot: Self = serde_json::from_slice(bytes).map_err(|e| bad(e.to_string()))?;
        for l in &snapshot.layers {
            let is_rising = l.cached.is_sorted_by(|a, b| a < b);
            if l.uses.len() != usize::from(l.experts) || !is_rising || l.cached.last().is_some_and(|e| *e >= l.experts)
            {
                return Err(bad(format!("the lists of layer {} do not fit its {} experts", l.layer, l.experts)));
            }
        }
        if !snapshot.layers.is_sorted_by(|a, b| a.layer < b.layer) {
            return Err(bad("its layers do not rise".into()));
        }
        Ok(snapshot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Snapshot {
        let layers = vec![
            LayerSnapshot { layer: 1, experts: 3, cached: vec![0, 2], uses: vec![4, 0, 7] },
            LayerSnapshot { layer: 4, experts: 2, cached: vec![], uses: vec![0, 1] },
        ];
        Snapshot { format: FORMAT.into(), version: VERSION, hit_rate: Some(0.25), layers, ..Snapshot::default() }
    }

    #[test]
    fn a_record_comes_back_as_it_went() {
        let bytes = serde_json::to_vec(&sample()).unwrap();
        assert_eq!(Snapshot::parse(&bytes, "s").unwrap(), sample());
    }

    #[test]
    fn what_is_no_record_is_refused() {
        let refuse = |change: fn(&mut Snapshot), part: &str| {
            let mut bad = sample();
            change(&mut bad);
            let error = Snapshot::parse(&serde_json::to_vec(&bad).unwrap(), "s").unwrap_err().to_string();
            assert!(error.contains(part) && !error.contains('\n'), "{error}");
        };
        refuse(|s| s.format = "other".into(), "its format is \"other\"");
        refuse(|s| s.version = 2, "version 2");
        refuse(|s| s.layers[0].cached.push(3), "layer 1");
        refuse(|s| s.layers[0].cached.reverse(), "layer 1");
        refuse(|s| s.layers[1].uses.push(3), "layer 4");
        refuse(|s| s.layers.reverse(), "do not rise");
        for bytes in [&b""[..], b"{", b"[]", b"{\"format\":\"ds4-snapshot\",\"version\":1}"] {
            assert!(matches!(Snapshot::parse(bytes, "s"), Err(SnapshotError::NotASnapshot { .. })));
        }
        let missing = Snapshot::read(Path::new("/nonexistent/snapshot")).unwrap_err().to_string();
        assert!(missing.contains("/nonexistent/snapshot"), "{missing}");
    }

    #[test]
    fn what_never_ends_is_refused() {
        let error = Snapshot::read(Path::new("/dev/zero")).unwrap_err();
        assert!(error.to_string().contains("larger than any"), "{error}");
        let error = Snapshot::read(Path::new("/dev/null")).unwrap_err();
        assert!(error.to_string().contains("not a snapshot"), "{error}");
    }
}
