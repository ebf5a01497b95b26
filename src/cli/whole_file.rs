//! Files that a run leaves behind: complete under their name, or not there at all.
//! Never replaces anything but a regular file. Surprising fact: renaming onto a device would succeed for root and put a plain file in its
//! place, so devices and pipes get their bytes copied at the end instead.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use crate::storage::part_file;

/// A file that gets its name when it is finished.
pub struct WholeFile {
    temporary: NamedTempFile,
    target: Target,
}

enum Target {
    /// Takes this name.
    Name(PathBuf),
    /// Something that has no content to keep: a device, a pipe.
    Stream(File),
}

/// Whether a GGUF file has this name: hours of download that a wrong completion of a name must not cost.
pub fn is_model(path: &Path) -> bool {
    let mut magic = [0; 4];
    File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && magic == *b"GGUF"
}

/// Why a file of that kind is not written to.
pub fn replaces_model() -> io::Error {
    io::Error::other("it is a model file, which nothing of this kind replaces")
}

impl WholeFile {
    /// Starts a file that will be called `path`.
    ///
    /// # Errors
    /// When its folder cannot be written to, or `path` is a folder.
    pub fn create(path: &Path) -> io::Result<Self> {
        let target = match fs::metadata(path) {
            Ok(found) if found.is_dir() => return Err(ErrorKind::IsADirectory.into()),
            Ok(found) if found.is_file() && is_model(path) => {
                return Err(replaces_model());
            }
            // A link stays; what it names is replaced.
            Ok(found) if found.is_file() => Target::Name(fs::canonicalize(path)?),
            Ok(_) => Target::Stream(File::options().write(true).open(path)?),
            Err(_) => Target::Name(path.to_owned()),
        };
        let temporary = match &target {
            Target::Name(path) => part_file::begin(path)?,
            Target::Stream(_) => part_file::open(&std::env::temp_dir().join("stream"))?,
        };
        Ok(Self { temporary, target })
    }

    /// Gives the file its name; an older one of that name is replaced.
    ///
    /// # Errors
    /// A full disk, or a name that cannot be taken.
    pub fn finish(mut self) -> io::Result<()> {
        match &mut self.target {
            Target::Name(path) => {
                self.temporary.as_file().sync_all()?;
                self.temporary.persist(path).map_err(|e| e.error)?;
            }
            Target::Stream(out) => {
                self.temporary.seek(SeekFrom::Start(0))?;
                io::copy(&mut self.temporary, out)?;
            }
        }
        Ok(())
    }
}

impl Write for WholeFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.temporary.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.temporary.flush()
    }
}

impl Seek for WholeFile {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.temporary.seek(to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, text: &str) -> io::Result<()> {
        let mut file = WholeFile::create(path)?;
        file.write_all(text.as_bytes())?;
        file.finish()
    }

    #[test]
    fn a_file_appears_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let mut file = WholeFile::create(&path).unwrap();
        file.write_all(b"half").unwrap();
        assert!(!path.exists());
        drop(file);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        write(&path, "whole").unwrap();
        write(&path, "again").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "again");
        assert!(write(folder.path(), "no").is_err());
        assert!(write(&folder.path().join("nowhere/x"), "no").is_err());
    }

    #[test]
    fn links_and_pipes_stay_what_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let (target, link, pipe) = (folder.path().join("t"), folder.path().join("l"), folder.path().join("p"));
        fs::write(&target, "old").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        write(&link, "new").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&target).unwrap(), "new");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::from_raw_mode(0o600)).unwrap();
        let reader = std::thread::spawn({
            let pipe = pipe.clone();
            move || fs::read_to_string(pipe).unwrap()
        });
        write(&pipe, "through").unwrap();
        assert_eq!(reader.join().unwrap(), "through");
        assert!(!fs::metadata(&pipe).unwrap().is_file());
    }
}
