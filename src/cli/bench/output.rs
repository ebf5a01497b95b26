//! How rows leave: CSV and JSON lines as each row ends, tables and one JSON object at the end.
//! Never holds a finished row back from a file. Surprising fact: a row is written by one call and flushed, so a run that is stopped at any
//! moment leaves a file of whole rows.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::json;

use crate::cli::bench::args::Format;
use crate::cli::bench::row::{Mode, Row};
use crate::cli::whole_file::{is_model, replaces_model};
use crate::cli::{CliError, output};
use crate::units::Bytes;

/// A CSV text that grows by whole rows.
#[derive(Default)]
struct CsvRows {
    has_header: bool,
}

impl CsvRows {
    /// The next row, with the header before the first one.
    fn next<R: Serialize>(&mut self, row: &R) -> Vec<u8> {
        let mut writer = csv::WriterBuilder::new().has_headers(!self.has_header).from_writer(Vec::new());
        self.has_header = true;
        writer.serialize(row).expect("rows are flat and memory takes them");
        writer.into_inner().expect("memory takes them")
    }
}

/// Where the rows of a run go.
pub struct Rows {
    file: Option<(File, PathBuf, CsvRows)>,
    stdout: Option<Format>,
    stdout_csv: CsvRows,
    /// Kept for formats that are written at the end.
    rows: Vec<Row>,
    conditions: Vec<String>,
}

impl Rows {
    /// Opens what is asked for; an existing CSV file is replaced.
    ///
    /// # Errors
    /// When the CSV file cannot be written.
    pub fn open(csv: Option<&Path>, format: Option<Format>) -> Result<Self, CliError> {
        let create = |path: &Path| match is_model(path) {
            true => Err(replaces_model()),
            false => File::create(path),
        };
        let file = csv.map(|path| match create(path) {
            Ok(file) => Ok((file, path.to_owned(), CsvRows::default())),
            Err(e) => Err(CliError::failed(format!("--csv: cannot write {}: {e}", path.display()))),
        });
        let stdout = format.or(if csv.is_none() { Some(Format::Csv) } else { None });
        Ok(Self {
            file: file.transpose()?,
            stdout,
            stdout_csv: CsvRows::default(),
            rows: Vec::new(),
            conditions: Vec::new(),
        })
    }

    /// Whether rows show on stdout while the run goes on.
    pub fn shows_rows(&self) -> bool {
        matches!(self.stdout, Some(Format::Csv | Format::Jsonl))
    }

    /// Finished rows so far.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Lines above a table and in the JSON object.
    pub fn set_conditions(&mut self, lines: Vec<String>) {
        self.conditions = lines;
    }

    /// Takes a finished row.
    ///
    /// # Errors
    /// A full disk, or nobody who reads stdout.
    pub fn push(&mut self, row: Row) -> Result<(), CliError> {
        if let Some((file, path, csv)) = &mut self.file {
            let bytes = csv.next(&row);
            file.write_all(&bytes)
                .and_then(|()| file.flush())
                .map_err(|e| CliError::failed(format!("--csv: cannot write {}: {e}", path.display())))?;
        }
        match self.stdout {
            Some(Format::Csv) => answer(&String::from_utf8_lossy(&self.stdout_csv.next(&row)))?,
            Some(Format::Jsonl) => answer(&(json!(row).to_string() + "\n"))?,
            _ => {}
        }
        self.rows.push(row);
        Ok(())
    }

    /// Writes what comes at the end, also after an interruption.
    ///
    /// # Errors
    /// As [`Rows::push`].
    pub fn finish(&self) -> Result<(), CliError> {
        match self.stdout {
            Some(Format::Md) => answer(&table(&self.conditions, &self.rows)),
            Some(Format::Json) => {
                let whole = json!({ "conditions": self.conditions, "rows": self.rows });
                answer(&(serde_json::to_string_pretty(&whole).expect("plain values") + "\n"))
            }
            _ => Ok(()),
        }
    }

    /// Where finished rows can be found, for messages.
    pub fn place(&self) -> String {
        match &self.file {
            Some((_, path, _)) => path.display().to_string(),
            None => "stdout".into(),
        }
    }
}

fn answer(text: &str) -> Result<(), CliError> {
    output::answer(text).map_err(CliError::output)
}

/// Writes rows of any kind in a format that needs no conditions.
///
/// # Errors
/// As [`Rows::push`].
pub fn write_plain<R: Serialize>(rows: &[R], format: Format) -> Result<(), CliError> {
    let mut csv = CsvRows::default();
    let text = match format {
        Format::Csv => rows.iter().map(|r| String::from_utf8_lossy(&csv.next(r)).into_owned()).collect(),
        Format::Jsonl => rows.iter().map(|r| json!(r).to_string() + "\n").collect(),
        Format::Json | Format::Md => {
            serde_json::to_string_pretty(&json!({ "rows": rows })).expect("plain values") + "\n"
        }
    };
    answer(&text)
}

/// A Markdown table of the columns that are read first.
fn table(conditions: &[String], rows: &[Row]) -> String {
    let mut text: String = conditions.iter().map(|line| format!("* {line}\n")).collect();
    let is_streaming = rows.iter().any(|row| row.cache_slots > 0);
    let mut head = vec![
        "mode",
        "regime",
        "rep",
        "context",
        "prefill tokens",
        "prefill t/s",
        "generated",
        "t/s",
        "first ms",
        "steady t/s",
    ];
    if is_streaming {
        head.extend(["prefill read", "drive busy", "drive bound t/s", "compute bound t/s", "of the bound"]);
        head.extend(["slots", "cache", "hits", "all-hit layers", "read a token", "drive wait ms a token"]);
    }
    text += &format!("\n| {} |\n|{}\n", head.join(" | "), "---:|".repeat(head.len()));
    let percent = |share: Option<f64>| share.map_or(String::new(), |s| format!("{:.1} %", 100.0 * s));
    for row in rows {
        let mut cells = vec![
            row.mode.name().to_owned(),
            row.regime.clone(),
            row.rep.to_string(),
            row.ctx_tokens.to_string(),
            row.prefill_tokens.to_string(),
            format!("{:.2}", row.prefill_tps),
        ];
        cells.extend(match row.mode {
            Mode::Append => [const { String::new() }; 4],
            Mode::Sweep => [
                row.gen_tokens.to_string(),
                format!("{:.2}", row.gen_tps),
                format!("{:.2}", row.gen_first_ms),
                format!("{:.2}", row.gen_steady_tps),
            ],
        });
        if is_streaming {
            let rate = |tps: Option<f64>| tps.map_or(String::new(), |tps| format!("{tps:.2}"));
            cells.extend([
                Bytes(row.prefill_read_bytes).to_string(),
                percent(row.drive_busy()),
                rate(row.drive_bound_tps()),
                rate(row.compute_bound_tps()),
                percent(row.bound_ratio()),
            ]);
            cells.extend([
                row.cache_slots.to_string(),
                Bytes(row.cache_budget_bytes).to_string(),
                percent(row.cache_hit_rate),
                percent(row.all_hit_layer_rate),
                row.read_bytes_per_token.map_or(String::new(), |bytes| Bytes(bytes as u64).to_string()),
                row.expert_wait_ms_per_token.map_or(String::new(), |ms| format!("{ms:.2}")),
            ]);
        }
        text += &format!("| {} |\n", cells.join(" | "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_whole_after_every_row() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.csv");
        let mut rows = Rows::open(Some(&path), None).unwrap();
        for ctx_tokens in 1..=3 {
            rows.push(Row { ctx_tokens, ..Row::default() }).unwrap();
            let text = std::fs::read_to_string(&path).unwrap();
            let read: Vec<Row> = csv::Reader::from_reader(text.as_bytes()).deserialize().map(Result::unwrap).collect();
            assert_eq!(read.len() as u64, ctx_tokens);
            assert!(text.ends_with('\n') && text.matches("ctx_tokens").count() == 1, "{text}");
        }
        assert!(rows.len() == 3 && !rows.shows_rows() && rows.place().ends_with("rows.csv"));
    }

    #[test]
    fn tables_have_as_many_cells_as_heads() {
        for cache_slots in [0, 8] {
            let rows = [Mode::Sweep, Mode::Append].map(|mode| Row { mode, cache_slots, ..Row::default() });
            let text = table(&["machine: x".into()], &rows);
            let bars: Vec<usize> =
                text.lines().filter(|l| l.starts_with('|')).map(|l| l.matches('|').count()).collect();
            assert!(bars.len() == 4 && bars.iter().all(|n| *n == bars[0]), "{text}");
            assert!(text.starts_with("* machine: x\n\n|"), "{text}");
        }
    }
}
