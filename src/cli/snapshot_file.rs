//! The file of `--snapshot-file`: a thread that writes what the engine looks like, a few times a second and once at the end.
//! Never stops a run: a file that can no longer be written is told once, and the run goes on. Surprising fact: records are renamed into
//! place without being flushed to the drive, since the drive has better things to do and a crash leaves nothing to look at.

use std::io::{self, ErrorKind, Write};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::cli::output::note;
use crate::engine::observe::Observer;
use crate::obs::snapshot::Snapshot;
use crate::storage::part_file;

/// Pause between two records.
const EVERY: Duration = Duration::from_millis(250);

#[derive(Default)]
struct Stop {
    is_set: Mutex<bool>,
    rung: Condvar,
}

/// Writes records until it is dropped, which writes the last one.
pub struct SnapshotFile {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

impl SnapshotFile {
    /// Writes a first record to `path` and starts the thread.
    ///
    /// # Errors
    /// When the file cannot be made.
    pub fn start(path: &Path, mut observer: Observer) -> io::Result<Self> {
        // Renaming onto a device would put a plain file in its place.
        if std::fs::metadata(path).is_ok_and(|found| !found.is_file()) {
            return Err(io::Error::new(ErrorKind::InvalidInput, "it is no regular file"));
        }
        part_file::remove_abandoned(path);
        write(path, &observer.snapshot(false))?;
        let stop = Arc::new(Stop::default());
        let (theirs, path) = (Arc::clone(&stop), path.to_owned());
        let thread = std::thread::Builder::new()
            .name("ds4-snapshot".into())
            .spawn(move || write_until_stopped(&path, &mut observer, &theirs))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

fn write_until_stopped(path: &Path, observer: &mut Observer, stop: &Stop) {
    let mut has_failed = false;
    loop {
        let mut is_set = stop.is_set.lock();
        if !*is_set {
            stop.rung.wait_for(&mut is_set, EVERY);
        }
        let is_last = *is_set;
        drop(is_set);
        let written = write(path, &observer.snapshot(is_last));
        if let (Err(error), false) = (&written, has_failed) {
            note(&format!("note: --snapshot-file: cannot write {}: {error}; the run goes on", path.display()));
        }
        has_failed = written.is_err();
        if is_last {
            return;
        }
    }
}

fn write(path: &Path, snapshot: &Snapshot) -> io::Result<()> {
    let mut file = part_file::open(path)?;
    let mut bytes = serde_json::to_vec(snapshot)?;
    bytes.push(b'\n');
    file.write_all(&bytes)?;
    file.persist(path).map_err(|e| e.error)?;
    Ok(())
}

impl Drop for SnapshotFile {
    fn drop(&mut self) {
        *self.stop.is_set.lock() = true;
        self.stop.rung.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been printed by it.
            let _ = thread.join();
        }
    }
}
