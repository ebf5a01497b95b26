//! Files under way: hidden beside the name that they will get, until they are whole.
//! Never removes a file that somebody writes. Surprising fact: a process that is killed cannot clean up after itself, so the next one that
//! writes a file of the same name does: a lock that ends with its owner says which parts are nobody's.

use std::ffi::OsString;
use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use tempfile::NamedTempFile;

/// Bytes of a target's name that are part of the hidden name: names may have 255, and the rest needs some, too.
const NAME_BYTES_MAX: usize = 200;
const SUFFIX: &str = ".part";
/// A part that was written to within this time is left alone: it may be about to be locked.
const AGE_MIN: Duration = Duration::from_secs(60);

/// The folder of `path`, and how the parts of that name begin.
fn place(path: &Path) -> (&Path, OsString) {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name().unwrap_or_default().as_bytes();
    let mut prefix = b".ds4-".to_vec();
    prefix.extend_from_slice(&name[..name.len().min(NAME_BYTES_MAX)]);
    prefix.push(b'-');
    (folder, OsString::from_vec(prefix))
}

/// Starts a file that will be called `path`, after the parts that nobody will finish are removed.
///
/// # Errors
/// A folder that cannot be written to.
pub fn begin(path: &Path) -> io::Result<NamedTempFile> {
    remove_abandoned(path);
    open(path)
}

/// As [`begin`], without a look at what else is there.
///
/// # Errors
/// A folder that cannot be written to.
pub fn open(path: &Path) -> io::Result<NamedTempFile> {
    let (folder, prefix) = place(path);
    // Narrowed by the umask, as for any file a user makes.
    let permissions = Permissions::from_mode(0o666);
    let file = tempfile::Builder::new().prefix(&prefix).suffix(SUFFIX).permissions(permissions).tempfile_in(folder);
    let file = file.map_err(|error| match error.kind() {
        ErrorKind::NotFound => io::Error::new(ErrorKind::NotFound, format!("there is no folder {}", folder.display())),
        _ => without_part(error),
    })?;
    // Where a file system has no locks, parts are not removed either.
    let _ = flock(file.as_file(), FlockOperation::NonBlockingLockExclusive);
    Ok(file)
}

/// The error without the hidden name, which no user has ever heard of.
pub fn without_part(error: io::Error) -> io::Error {
    let text = error.to_string();
    match text.split_once(" at path \"") {
        Some((what, _)) => io::Error::new(error.kind(), what),
        None => error,
    }
}

/// Removes the parts of `path` whose writers are gone. What cannot be removed stays: it is in nobody's way.
pub fn remove_abandoned(path: &Path) {
    let (folder, prefix) = place(path);
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        if name.as_bytes().starts_with(prefix.as_bytes()) && name.as_bytes().ends_with(SUFFIX.as_bytes()) {
            let _ = remove_if_abandoned(&entry.path());
        }
    }
}

fn remove_if_abandoned(part: &Path) -> io::Result<()> {
    let found = fs::symlink_metadata(part)?;
    let is_old = found.modified()?.elapsed().is_ok_and(|age| age >= AGE_MIN);
    if found.is_file() && is_old {
        let file = File::open(part)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        fs::remove_file(part)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn age(file: &File) {
        file.set_modified(SystemTime::now() - 2 * AGE_MIN).unwrap();
    }

    #[test]
    fn parts_of_writers_that_are_gone_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("x.session");
        let abandoned = |name: &str| {
            let file = File::create(folder.path().join(name)).unwrap();
            age(&file);
        };
        abandoned(".ds4-x.session-old.part");
        // Of another name, and no part at all.
        let kept = [".ds4-y.session-old.part", ".ds4-x.session-old", "x.session-old.part"];
        kept.into_iter().for_each(abandoned);
        // Too young to tell.
        File::create(folder.path().join(".ds4-x.session-new.part")).unwrap();
        // Somebody writes it, however slowly.
        let alive = begin(&target).unwrap();
        age(alive.as_file());
        let mut expected = kept.map(str::to_owned).to_vec();
        expected.push(".ds4-x.session-new.part".into());
        expected.push(alive.path().file_name().unwrap().to_str().unwrap().into());
        expected.sort();
        remove_abandoned(&target);
        assert_eq!(names(folder.path()), expected);
        alive.persist(&target).unwrap();
        assert!(target.exists());
    }

    #[test]
    fn errors_name_no_part() {
        let folder = tempfile::tempdir().unwrap();
        let error = begin(&folder.path().join("nowhere/x")).unwrap_err();
        assert_eq!(error.to_string(), format!("there is no folder {}/nowhere", folder.path().display()));
        assert_eq!(error.kind(), ErrorKind::NotFound);
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let error = begin(&file.join("x")).unwrap_err();
        assert!(error.to_string().starts_with("Not a directory") && !error.to_string().contains(".part"), "{error}");
    }

    #[test]
    fn names_of_any_length_have_parts() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("n".repeat(255));
        begin(&target).unwrap().persist(&target).unwrap();
        assert_eq!(names(folder.path()).len(), 1);
    }
}
