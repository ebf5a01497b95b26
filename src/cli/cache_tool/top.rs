//! `ds4-cache top`: a running process's cache, live: slots by state, hit rate, reads, and maps of use and presence.
//! Owns the loop and the keys; the picture is `top_frame`'s. Never touches the process: it only reads its snapshot file.
//! A signal ends it as a key does, with the terminal as it was. Surprising fact: a process that was killed leaves its last record behind, so the age of the news is shown.

use std::io::{ErrorKind, IsTerminal};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyModifiers};
use ratatui::text::Line;
use ratatui::widgets::Paragraph;

use super::top_frame::{frame, plain};
use crate::cli::CliError;
use crate::cli::interrupt::Interrupt;
use crate::obs::snapshot::Snapshot;

/// Pause between two looks at the file: a process writes one as often.
const EVERY: Duration = Duration::from_millis(250);
/// News older than this are remarked on.
const OLD: Duration = Duration::from_secs(3);
/// Columns of a frame that goes to no terminal.
const PLAIN_WIDTH: u16 = 100;

/// Flags of `ds4-cache top`.
#[derive(Args, Debug)]
pub struct TopArgs {
    /// The file of ds4 --snapshot-file
    file: PathBuf,
    /// Print one frame as plain text and stop
    #[arg(long)]
    once: bool,
}

/// Runs the subcommand; returns what goes to stdout.
///
/// # Errors
/// A file that is no snapshot, a terminal that is none.
pub fn run(args: &TopArgs) -> Result<String, CliError> {
    let first = Snapshot::read(&args.file).map_err(CliError::failed)?;
    if args.once {
        return Ok(plain(&frame(&first, PLAIN_WIDTH, u16::MAX)));
    }
    if !std::io::stdout().is_terminal() {
        return Err(CliError::usage("the live view needs a terminal; --once prints one frame"));
    }
    let failed = |e| CliError::failed(format!("the terminal failed: {e}"));
    let interrupt = Interrupt::listen().map_err(failed)?;
    let mut terminal = ratatui::try_init().map_err(failed)?;
    let shown = watch(args, &mut terminal, first, &interrupt);
    ratatui::restore();
    shown.map_err(failed)?;
    // Keys are no signals here.
    if interrupt.is_set() { Err(CliError::failed("interrupted")) } else { Ok(String::new()) }
}

/// Whether a key was pressed that ends the view.
fn is_left() -> std::io::Result<bool> {
    if !event::poll(EVERY)? {
        return Ok(false);
    }
    let Event::Key(key) = event::read()? else { return Ok(false) };
    let is_interrupt = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    Ok(is_interrupt || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc))
}

fn watch(
    args: &TopArgs,
    terminal: &mut ratatui::DefaultTerminal,
    mut snapshot: Snapshot,
    interrupt: &Interrupt,
) -> std::io::Result<()> {
    let (mut news, mut trouble) = (Instant::now(), None);
    while !interrupt.is_set() {
        terminal.draw(|f| {
            let area = f.area();
            let mut lines = frame(&snapshot, area.width, area.height.saturating_sub(1));
            lines.push(Line::from(footer(&snapshot, news.elapsed(), trouble.as_deref())));
            f.render_widget(Paragraph::new(lines), area);
        })?;
        match is_left() {
            Ok(true) => return Ok(()),
            Err(error) if error.kind() != ErrorKind::Interrupted => return Err(error),
            Ok(false) | Err(_) => {}
        }
        match Snapshot::read(&args.file) {
            Ok(next) => {
                if (next.pid, next.elapsed_ms) != (snapshot.pid, snapshot.elapsed_ms) {
                    news = Instant::now();
                }
                (snapshot, trouble) = (next, None);
            }
            Err(error) => trouble = Some(error.to_string()),
        }
    }
    Ok(())
}

fn footer(snapshot: &Snapshot, age: Duration, trouble: Option<&str>) -> String {
    let state = match (trouble, snapshot.is_last) {
        (Some(trouble), _) => trouble.to_owned(),
        (None, true) => "the process has ended".into(),
        (None, false) if age > OLD => format!("no news for {} s; the process may have been killed", age.as_secs()),
        (None, false) => "live".into(),
    };
    format!("{state}   q quits")
}
