//! Rates remembered from start to start: one small JSON file in the user's cache directory, an entry for each drive and way of reading.
//! Never trusted: whatever is not exactly what a probe writes is as good as absent. Surprising fact: the entry is found by the
//! identity of the file system, not of the model file, so the second model on a drive is not measured again.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::storage::probe::{DriveRates, io_name};
use crate::storage::reader::{DirectChoice, OpenError, ReaderOptions};

/// Raised when the meaning of a number changes; other versions are ignored.
const VERSION: u32 = 1;
/// Far above what the drives of one user take.
const TEXT_BYTES_MAX: u64 = 1 << 20;
const DRIVES_MAX: usize = 256;
const FILE: &str = "drives.json";

/// Where rates are remembered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Memory {
    /// `None` when the user has no cache directory.
    dir: Option<PathBuf>,
}

#[derive(Serialize, Deserialize)]
struct Text {
    version: u32,
    drives: BTreeMap<String, DriveRates>,
}

/// What an entry is found by.
pub(super) struct Key {
    pub(super) text: String,
    pub(super) file_bytes: u64,
}

/// The drive under `path` and the way of reading it.
pub(super) fn key(path: &Path, options: &ReaderOptions) -> Result<Key, OpenError> {
    let failed = |source| OpenError::Open { path: path.to_owned(), source };
    let file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    let device = metadata.dev();
    let volume = rustix::fs::fstatvfs(&file).map_or(0, |s| s.f_fsid);
    let kind = rustix::fs::fstatfs(&file).map_or(0, |s| s.f_type as u64);
    let direct = if options.direct == DirectChoice::Off { "buffered" } else { "direct" };
    let io = io_name(options.io);
    Ok(Key { text: format!("{device:x}-{volume:x}-{kind:x}-{direct}-{io}"), file_bytes: metadata.len() })
}

impl Memory {
    /// The directory `ds4` in the user's cache directory.
    pub fn of_user() -> Self {
        Self { dir: crate::sys::user_cache_dir().map(|dir| dir.join("ds4")) }
    }

    /// A directory of the caller's choice.
    pub fn in_dir(dir: impl Into<PathBuf>) -> Self {
        Self { dir: Some(dir.into()) }
    }

    /// Remembers nothing.
    pub fn none() -> Self {
        Self { dir: None }
    }

    /// The file that holds the rates.
    pub fn file(&self) -> Option<PathBuf> {
        self.dir.as_ref().map(|dir| dir.join(FILE))
    }

    pub(super) fn recall(&self, key: &str) -> Option<DriveRates> {
        self.read()?.drives.remove(key).filter(DriveRates::is_sane)
    }

    fn read(&self) -> Option<Text> {
        let mut bytes = Vec::new();
        File::open(self.file()?).ok()?.take(TEXT_BYTES_MAX).read_to_end(&mut bytes).ok()?;
        serde_json::from_slice::<Text>(&bytes).ok().filter(|text| text.version == VERSION)
    }

    /// Adds or replaces an entry. The error is a sentence for the user.
    pub(super) fn keep(&self, key: &str, rates: &DriveRates) -> Result<(), String> {
        let again = "the drive will be measured again at the next start";
        let Some(dir) = &self.dir else {
            return Err(format!("there is no cache directory (neither XDG_CACHE_HOME nor HOME is set): {again}"));
        };
        let mut text = self.read().unwrap_or(Text { version: VERSION, drives: BTreeMap::new() });
        if text.drives.len() >= DRIVES_MAX {
            text.drives.clear();
        }
        text.drives.insert(key.to_owned(), rates.clone());
        let write = || -> std::io::Result<()> {
            std::fs::create_dir_all(dir)?;
            // Written aside and renamed, so that two starts at once leave one whole file.
            let mut file = tempfile::NamedTempFile::new_in(dir)?;
            file.write_all(&serde_json::to_vec_pretty(&text)?)?;
            file.persist(dir.join(FILE)).map_err(|e| e.error)?;
            Ok(())
        };
        write().map_err(|e| format!("cannot write {} ({e}): {again}", dir.join(FILE).display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::probe::{BulkPoint, RowPoint};

    fn rates() -> DriveRates {
        let bulk = BulkPoint { piece_bytes: 1 << 20, depth: 8, gb_per_s: 1.5, piece_ms_p50: 2.0 };
        let rows = RowPoint { depth: 64, reads_per_s: 1e5 };
        let mut rates = DriveRates::choose(vec![bulk], vec![rows]).unwrap();
        rates.measured_unix_s = 7;
        rates
    }

    #[test]
    fn entries_survive_and_stay_apart() {
        let dir = tempfile::tempdir().unwrap();
        let memory = Memory::in_dir(dir.path().join("new/dir"));
        assert_eq!(memory.recall("a"), None);
        memory.keep("a", &rates()).unwrap();
        let slower = DriveRates { probe_ms: 9.0, ..rates() };
        memory.keep("b", &slower).unwrap();
        assert_eq!((memory.recall("a"), memory.recall("b"), memory.recall("c")), (Some(rates()), Some(slower), None));
    }

    #[test]
    fn a_damaged_file_is_absent_and_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let memory = Memory::in_dir(dir.path());
        memory.keep("a", &rates()).unwrap();
        let good = std::fs::read_to_string(memory.file().unwrap()).unwrap();
        let bad = [
            String::new(),
            "{".into(),
            good[..good.len() / 2].into(),
            good.replace("\"version\": 1", "\"version\": 2"),
            good.replace("1.5", "-1.5"),
            good.replace("\"depth\": 8", "\"depth\": 99999999999"),
        ];
        for text in bad {
            std::fs::write(memory.file().unwrap(), &text).unwrap();
            assert_eq!(memory.recall("a"), None, "{text}");
            memory.keep("a", &rates()).unwrap();
            assert_eq!(memory.recall("a"), Some(rates()));
        }
    }

    #[test]
    fn what_cannot_be_written_is_told() {
        let error = Memory::in_dir("/proc/no/such").keep("a", &rates()).unwrap_err();
        assert!(error.contains("/proc/no/such/drives.json") && error.contains("again"), "{error}");
        let error = Memory::none().keep("a", &rates()).unwrap_err();
        assert!(error.contains("XDG_CACHE_HOME"), "{error}");
    }

    #[test]
    fn ways_of_reading_have_entries_of_their_own() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        let of = |direct| key(&path, &ReaderOptions { direct, ..ReaderOptions::default() }).unwrap().text;
        assert_eq!(of(DirectChoice::Auto), of(DirectChoice::On));
        assert_ne!(of(DirectChoice::Auto), of(DirectChoice::Off));
        assert!(key(Path::new("/no/such"), &ReaderOptions::default()).is_err());
    }
}
