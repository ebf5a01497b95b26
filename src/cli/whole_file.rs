//! Files that a run leaves behind: complete under their name, or not there at all.
//! Never replaces anything but a regular file. Surprising fact: renaming onto a device would succeed for root and put a plain file in its
//! place, so devices and pipes get their bytes copied at the end instead.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{Access, OFlags, access, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
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

/// What a name stands for.
enum Kind {
    /// A file, there or not, that will have this name: a link stays, and what it names is replaced.
    Name(PathBuf),
    Pipe,
    /// A device, for example.
    Other,
}

impl Kind {
    fn of(path: &Path) -> io::Result<Self> {
        match fs::metadata(path) {
            Ok(found) if found.is_dir() => Err(ErrorKind::IsADirectory.into()),
            Ok(found) if found.is_file() && is_model(path) => Err(replaces_model()),
            Ok(found) if found.is_file() => Ok(Self::Name(fs::canonicalize(path)?)),
            Ok(found) if found.file_type().is_fifo() => Ok(Self::Pipe),
            Ok(_) => Ok(Self::Other),
            Err(_) => Ok(Self::Name(path.to_owned())),
        }
    }
}

/// Longest wait for somebody to read a pipe: its reader may have been started a moment later.
const READER_WAIT: Duration = Duration::from_secs(10);

/// Opens a pipe whose reader is there, or comes within `patience`: plainly opened, one that nobody ever reads would keep the run for ever.
fn open_pipe(path: &Path, patience: Duration) -> io::Result<File> {
    let begun = Instant::now();
    let file = loop {
        let nonblocking = OFlags::NONBLOCK.bits().cast_signed();
        match File::options().write(true).custom_flags(nonblocking).open(path) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::NXIO) => {
                if begun.elapsed() >= patience {
                    return Err(io::Error::other("nobody reads this pipe; start its reader first"));
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            opened => break opened?,
        }
    };
    // A slow reader is waited for.
    fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
    Ok(file)
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
        let target = match Kind::of(path)? {
            Kind::Name(path) => Target::Name(path),
            Kind::Pipe => Target::Stream(open_pipe(path, READER_WAIT)?),
            Kind::Other => Target::Stream(File::options().write(true).open(path)?),
        };
        let temporary = match &target {
            Target::Name(path) => part_file::begin(path)?,
            Target::Stream(_) => {
                let folder = std::env::temp_dir();
                let told =
                    |e| io::Error::other(format!("{e}; its bytes wait in {} (TMPDIR) until the end", folder.display()));
                part_file::open(&folder.join("stream")).map_err(told)?
            }
        };
        Ok(Self { temporary, target })
    }

    /// Sees whether [`Self::create`] would do, and leaves nothing. A pipe is not opened: its reader would take the end of this look for the
    /// end of the file.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub fn check(path: &Path) -> io::Result<()> {
        match Kind::of(path)? {
            Kind::Pipe => Ok(access(path, Access::WRITE_OK)?),
            Kind::Name(_) | Kind::Other => Self::create(path).map(drop),
        }
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
        self.temporary.write(bytes).map_err(part_file::without_part)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.temporary.flush().map_err(part_file::without_part)
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
        // A look is no opening: with no reader there is nothing to wait for, and later none to have been sent away.
        WholeFile::check(&pipe).unwrap();
        let error = open_pipe(&pipe, Duration::from_millis(50)).unwrap_err();
        assert!(error.to_string().contains("nobody reads this pipe"), "{error}");
    }
}
