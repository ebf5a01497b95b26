//! Where text goes: answers to stdout, everything else to stderr.
//! Never panics when the reader of stdout went away, and never exits by itself: half-written files must still be taken away.
//! Surprising fact: a reader of stdout that goes away ends the program quietly with code 0, since `ds4 | head` is a wish, not an error; a
//! stdout that was closed from the start is one.

use std::io::{self, IsTerminal, Write};

use crate::sys::stdout_was_closed;

/// Writes a piece of an answer and shows it at once.
///
/// # Errors
/// A full disk behind a redirection, for example; `BrokenPipe` when nobody reads any more.
pub fn answer(text: &str) -> io::Result<()> {
    bytes(text.as_bytes())
}

/// As [`answer`], for what need not be text.
///
/// # Errors
/// As [`answer`].
pub fn bytes(text: &[u8]) -> io::Result<()> {
    if !text.is_empty() && stdout_was_closed() {
        return Err(io::Error::other("stdout is closed; send it to /dev/null if the text is not wanted"));
    }
    let mut out = io::stdout().lock();
    out.write_all(text).and_then(|()| out.flush())
}

/// Writes one line of output.
///
/// # Errors
/// As [`answer`].
pub fn line(text: &str) -> io::Result<()> {
    answer(&format!("{text}\n"))
}

/// Asks a user who can see it for a line.
pub fn prompt(text: &str) {
    let mut err = io::stderr().lock();
    if !err.is_terminal() {
        return;
    }
    let _ = err.write_all(text.as_bytes()).and_then(|()| err.flush());
}

/// Tells the user something, every line under the program's name.
pub fn note(text: &str) {
    note_as("ds4", text);
}

/// As [`note`], under the name of another program.
pub fn note_as(program: &str, text: &str) {
    let mut err = io::stderr().lock();
    for line in text.lines() {
        // Nothing is left to do when stderr is gone.
        let _ = writeln!(err, "{program}: {line}");
    }
}
