//! Lines of an interactive session that come from no terminal: a pipe, a file. Owns the bytes between two lines.
//! Never holds more than the longest prompt, and never waits where nobody can interrupt it. Surprising fact: signal handlers restart reads by
//! themselves, so it is `poll` that waits: a signal always ends that.

use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind};
use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// Longest wait before the caller's question is asked again: a signal may come just before the wait begins.
const WAIT_MAX: Timespec = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };

/// A source of lines.
pub struct PipedLines {
    from: BufReader<File>,
    /// The beginning of a line whose end has not come.
    begun: Vec<u8>,
    bytes_max: usize,
}

impl PipedLines {
    /// The lines of `from`, which have at most `bytes_max` bytes.
    ///
    /// # Errors
    /// A process that can open no more files.
    pub fn new(from: impl AsFd, bytes_max: usize) -> io::Result<Self> {
        let from = File::from(from.as_fd().try_clone_to_owned()?);
        Ok(Self { from: BufReader::with_capacity(1 << 16, from), begun: Vec::new(), bytes_max })
    }

    /// The next line without its end; `None` when there is no more. Returns early when `is_asked_to_stop` says so, and loses nothing by it.
    ///
    /// # Errors
    /// `Interrupted`; `InvalidData` for a line that is not UTF-8, behind which the next one comes; `FileTooLarge` for one without an end.
    pub fn next(&mut self, is_asked_to_stop: &dyn Fn() -> bool) -> io::Result<Option<String>> {
        let has_ended = loop {
            if self.from.buffer().is_empty() {
                wait(self.from.get_ref(), is_asked_to_stop)?;
            }
            let found = match self.from.fill_buf() {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                found => found?,
            };
            if found.is_empty() {
                break false;
            }
            let end = found.iter().position(|byte| *byte == b'\n');
            let taken = end.unwrap_or(found.len());
            self.begun.extend_from_slice(&found[..taken]);
            self.from.consume(taken + usize::from(end.is_some()));
            if self.begun.len() > self.bytes_max {
                let why = format!("a line has more than {} bytes; split it", self.bytes_max);
                return Err(io::Error::new(ErrorKind::FileTooLarge, why));
            }
            if end.is_some() {
                break true;
            }
        };
        let mut line = std::mem::take(&mut self.begun);
        if !has_ended && line.is_empty() {
            return Ok(None);
        }
        if line.last() == Some(&b'\r') {
            line.pop();
        }
        String::from_utf8(line).map(Some).map_err(|e| io::Error::new(ErrorKind::InvalidData, e))
    }
}

/// Waits until a read would not.
fn wait(file: &File, is_asked_to_stop: &dyn Fn() -> bool) -> io::Result<()> {
    loop {
        if is_asked_to_stop() {
            return Err(ErrorKind::Interrupted.into());
        }
        match poll(&mut [PollFd::new(file, PollFlags::IN)], Some(&WAIT_MAX)) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::io::Write;

    fn never() -> bool {
        false
    }

    #[test]
    fn lines_come_as_they_were_written() {
        let (reader, mut writer) = io::pipe().unwrap();
        let mut lines = PipedLines::new(&reader, 8).unwrap();
        writer.write_all(b"one\r\n\n\xff\n12345678\nlast").unwrap();
        drop(writer);
        assert_eq!(lines.next(&never).unwrap().as_deref(), Some("one"));
        assert_eq!(lines.next(&never).unwrap().as_deref(), Some(""));
        assert_eq!(lines.next(&never).unwrap_err().kind(), ErrorKind::InvalidData);
        assert_eq!(lines.next(&never).unwrap().as_deref(), Some("12345678"));
        assert_eq!(lines.next(&never).unwrap().as_deref(), Some("last"));
        assert_eq!(lines.next(&never).unwrap(), None);
    }

    #[test]
    fn what_never_ends_is_given_up() {
        let mut lines = PipedLines::new(File::open("/dev/zero").unwrap(), 1 << 20).unwrap();
        assert_eq!(lines.next(&never).unwrap_err().kind(), ErrorKind::FileTooLarge);
        assert!(lines.begun.capacity() <= 4 << 20, "{}", lines.begun.capacity());
    }

    #[test]
    fn a_wait_can_be_ended_and_loses_nothing() {
        let (reader, mut writer) = io::pipe().unwrap();
        let mut lines = PipedLines::new(&reader, 100).unwrap();
        writer.write_all(b"be").unwrap();
        // Asked once before each wait: the first half is read, then the next wait is refused.
        let asked = Cell::new(0);
        let second_time = || asked.replace(asked.get() + 1) > 0;
        assert_eq!(lines.next(&second_time).unwrap_err().kind(), ErrorKind::Interrupted);
        writer.write_all(b"gun\n").unwrap();
        assert_eq!(lines.next(&never).unwrap().as_deref(), Some("begun"));
    }
}
