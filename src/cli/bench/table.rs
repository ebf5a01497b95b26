//! Reading CSV files of measurements back, ours and the known tool's. Owns what a file must have; never judges numbers, but for those that no
//! run can give.
//! Surprising fact: files of the known tool lack most columns, which then read as empty; only the first nine are required.

use std::path::Path;

use crate::cli::CliError;
use crate::cli::bench::row::{KNOWN_COLUMNS, Row};
use crate::cli::input;

/// The rows of a file.
#[derive(Debug)]
pub struct Table {
    /// As the user named it.
    pub name: String,
    pub rows: Vec<Row>,
}

impl Table {
    /// Reads a file.
    ///
    /// # Errors
    /// Files that cannot be read, lack columns or rows, or were cut off; the message names file and line.
    pub fn read(path: &Path) -> Result<Self, CliError> {
        let rows = parse(&input::text_file(path)?).map_err(|e| CliError::failed(format!("{}: {e}", path.display())))?;
        Ok(Self { name: path.display().to_string(), rows })
    }

    /// What all rows have in common for one column; `None` when they differ or say nothing.
    pub fn common(&self, column: impl Fn(&Row) -> &str) -> Option<&str> {
        let first = self.rows.first().map(&column).filter(|text| !text.is_empty())?;
        self.rows.iter().all(|row| column(row) == first).then_some(first)
    }
}

fn parse(text: &str) -> Result<Vec<Row>, String> {
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let header = reader.headers().map_err(|e| e.to_string())?.clone();
    if let Some(missing) = KNOWN_COLUMNS.iter().find(|name| !header.iter().any(|h| h == **name)) {
        return Err(format!("no column {missing}; is this a CSV file of ds4-bench?"));
    }
    let mut rows = Vec::new();
    for record in reader.records() {
        let record = record.map_err(|e| match e.kind() {
            csv::ErrorKind::UnequalLengths { pos, expected_len, len } => format!(
                "line {} has {len} cells, the header {expected_len}; was the file cut off?",
                pos.as_ref().map_or(0, csv::Position::line)
            ),
            _ => e.to_string(),
        })?;
        let line = record.position().map_or(0, csv::Position::line);
        if record == header {
            // Files may be joined with their headers.
            continue;
        }
        let row: Row = record.deserialize(Some(&header)).map_err(|e| format!("line {line}: {}", cell_error(&e)))?;
        if let Some((name, value)) = row.measures().find(|(_, value)| !(value.is_finite() && *value >= 0.0)) {
            return Err(format!(
                "line {line}: {name} is {value}, which no run measures; correct the line or take it out"
            ));
        }
        rows.push(row);
    }
    if rows.is_empty() {
        return Err("no rows; was the run stopped before the first one?".into());
    }
    Ok(rows)
}

fn cell_error(error: &csv::Error) -> String {
    match error.kind() {
        csv::ErrorKind::Deserialize { err, .. } => err.to_string(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: &str = "ctx_tokens,prefill_tokens,prefill_tps,gen_tokens,gen_tps,gen_first_ms,gen_steady_tokens,gen_steady_tps,\
                         kvcache_bytes\n";

    #[test]
    fn files_of_the_known_tool_read() {
        let rows = parse(&format!(
            "{KNOWN}2048,2048,70.04,128,11.93,84.1,127,11.95,52184460\n{KNOWN}4096,2048,1,0,0,0,0,0,1\n"
        ))
        .unwrap();
        assert_eq!((rows.len(), rows[0].prefill_tps, rows[0].kvcache_bytes), (2, 70.04, 52_184_460));
        assert_eq!((rows[0].model_id.as_str(), rows[1].ctx_tokens), ("", 4096));
    }

    #[test]
    fn what_is_no_table_is_named() {
        for (text, part) in [
            ("", "no column ctx_tokens"),
            ("a,b\n1,2\n", "no column ctx_tokens"),
            (KNOWN, "no rows"),
            (&format!("{KNOWN}1,2,3\n"), "line 2 has 3 cells, the header 9"),
            (&format!("{KNOWN}1,2,x,4,5,6,7,8,9\n"), "line 2"),
            (&format!("{KNOWN}-1,2,3,4,5,6,7,8,9\n"), "line 2"),
            (&format!("{KNOWN}1,2,nan,4,5,6,7,8,9\n"), "line 2: prefill_tps is NaN"),
            (&format!("{KNOWN}1,2,3,4,-5,6,7,8,9\n"), "line 2: gen_tps is -5"),
            (&format!("{KNOWN}1,2,3,4,5,6,7,inf,9\n"), "line 2: gen_steady_tps is inf"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(part), "{text:?}: {error}");
        }
    }
}
