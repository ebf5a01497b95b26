//! `ds4-cache top`: a running process's cache, live: slots by state, hit rate, reads, and maps of use and presence.
//! Owns the loop and the keys; the picture is `top_frame`'s. Never touches the process: it only reads its snapshot file.
//! Surprising fact: a process that was killed leaves its last record behind, so the age of the news is shown.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyModifiers};
use ratatui::text::Line;
use ratatui::widgets::Paragraph;

use super::top_frame::{frame, plain};
use crate::cli::CliError;
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
    let mut terminal = ratatui::init();
    let shown = watch(args, &mut terminal, first);
    ratatui::restore();
    shown.map(|()| String::new()).map_err(|e| CliError::failed(format!("the terminal failed: {e}")))
}

fn watch(args: &TopArgs, terminal: &mut ratatui::DefaultTerminal, mut snapshot: Snapshot) -> std::io::Result<()> {
    let (mut news, mut trouble) = (Instant::now(), None);
    loop {
        terminal.draw(|f| {
            let area = f.area();
            let mut lines = frame(&snapshot, area.width, area.height.saturating_sub(1));
            lines.push(Line::from(footer(&snapshot, news.elapsed(), trouble.as_deref())));
            f.render_widget(Paragraph::new(lines), area);
        })?;
        if event::poll(EVERY)?
            && let Event::Key(key) = event::read()?
        {
            let is_interrupt = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
            if is_interrupt || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc) {
                return Ok(());
            }
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
