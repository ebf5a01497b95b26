//! The file of `--trace-file`: passes, layers, a GPU's work, waits and reads over time, in the JSON that ui.perfetto.dev and chrome://tracing open.
//! Never fails a run before its end. Surprising fact: reads that overlap are drawn in lanes below each other, and a lane is chosen when a read
//! has ended, because nothing is told of it before.

use std::fmt::Debug;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

use crate::cli::CliError;
use crate::cli::whole_file::WholeFile;
use crate::obs::spans::{self, Row};

const ROWS: [Row; 11] = [
    Row::Passes,
    Row::Layers,
    Row::HostWaits,
    Row::Gpu,
    Row::GpuLayers,
    Row::GpuWaits,
    Row::Uploads,
    Row::Arranging,
    Row::Waits,
    Row::Reads,
    Row::Clock,
];
/// In microseconds: sums of times are rounded, and neighbours must not seem to overlap by that.
const NANOSECOND: f64 = 1e-3;
/// Tracks of one row, at most.
const LANES_MAX: usize = 1000;

struct Writing {
    /// `None` once the file is complete.
    out: Option<BufWriter<WholeFile>>,
    is_first: bool,
    /// By row: when the last stretch of each lane ended, in microseconds.
    lanes: [Vec<f64>; ROWS.len()],
    failure: Option<io::Error>,
}

impl Writing {
    fn put(&mut self, value: &Value) {
        if let (Some(out), None) = (&mut self.out, &self.failure) {
            let between = if std::mem::take(&mut self.is_first) { "" } else { ",\n" };
            self.failure = write!(out, "{between}{value}").err();
        }
        if self.failure.is_some() {
            // The subscriber lives as long as the process: what it kept would never be taken away.
            self.out = None;
        }
    }

    /// Draws a stretch of `row` in the first lane that was free by then.
    fn draw(&mut self, row: usize, (at, took): (f64, f64), what: &str, args: Map<String, Value>) {
        let free = self.lanes[row].iter().position(|end| *end <= at + NANOSECOND);
        let lane = free.unwrap_or_else(|| self.lanes[row].len().min(LANES_MAX - 1));
        let track = row * LANES_MAX + lane;
        if lane == self.lanes[row].len() {
            self.lanes[row].push(0.0);
            let name = if lane == 0 { ROWS[row].name().into() } else { format!("{} {}", ROWS[row].name(), lane + 1) };
            self.put(&json!({"ph": "M", "name": "thread_name", "pid": 1, "tid": track, "args": {"name": name}}));
            self.put(
                &json!({"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": track, "args": {"sort_index": track}}),
            );
        }
        self.lanes[row][lane] = at + took;
        self.put(&json!({"ph": "X", "name": what, "pid": 1, "tid": track, "ts": at, "dur": took, "args": args}));
    }
}

/// A file that is being written, and its ear.
#[derive(Clone)]
pub struct SpanFile(Arc<Mutex<Writing>>);

fn cannot(path: &Path, error: &io::Error) -> CliError {
    CliError::failed(format!("--trace-file: cannot write {}: {error}", path.display()))
}

impl SpanFile {
    /// Begins the file; it listens once it is part of a subscriber.
    ///
    /// # Errors
    /// A file that cannot be made.
    pub fn begin(path: &Path) -> Result<Self, CliError> {
        let mut out = BufWriter::new(WholeFile::create(path).map_err(|e| cannot(path, &e))?);
        spans::start_clock();
        out.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n").map_err(|e| cannot(path, &e))?;
        let writing = Writing { out: Some(out), is_first: true, lanes: Default::default(), failure: None };
        let file = Self(Arc::new(Mutex::new(writing)));
        file.0.lock().put(&json!({"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "ds4"}}));
        Ok(file)
    }

    /// Ends the file and gives it its name. What comes later is not drawn.
    ///
    /// # Errors
    /// A full disk, for example.
    pub fn finish(&self, path: &Path) -> Result<(), CliError> {
        let mut writing = self.0.lock();
        if let Some(error) = writing.failure.take() {
            return Err(cannot(path, &error));
        }
        let Some(mut out) = writing.out.take() else { return Ok(()) };
        out.write_all(b"\n]}\n").map_err(|e| cannot(path, &e))?;
        let file = out.into_inner().map_err(|e| cannot(path, e.error()))?;
        file.finish().map_err(|e| cannot(path, &e))
    }
}

/// The fields of one event.
#[derive(Default)]
struct Found {
    row: String,
    what: String,
    at: f64,
    took: f64,
    args: Map<String, Value>,
}

impl Visit for Found {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "row" => self.row = value.into(),
            "what" => self.what = value.into(),
            _ => {}
        }
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        match field.name() {
            "at" => self.at = value,
            "took" => self.took = value,
            _ => {}
        }
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        if value >= 0 {
            self.args.insert(field.name().into(), value.into());
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        if value > 0 {
            self.args.insert(field.name().into(), value.into());
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn Debug) {}
}

impl<S: Subscriber> Layer<S> for SpanFile {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut found = Found::default();
        event.record(&mut found);
        if let Some(row) = ROWS.iter().position(|row| row.name() == found.row) {
            self.0.lock().draw(row, (found.at, found.took), &found.what, found.args);
        }
    }
}
