//! Rows as pictures: speed against context, cost of appends, speed and hit rate against cache budget.
//! Owns which panels a set of rows deserves and what belongs to one line; `plot_svg` draws. Surprising fact: a line joins medians over
//! repetitions, and every repetition stays visible as a point.

use std::collections::{BTreeMap, BTreeSet};

use crate::cli::CliError;
use crate::cli::bench::args::PlotArgs;
use crate::cli::bench::note;
use crate::cli::bench::plot_svg::{Panel, Series, svg};
use crate::cli::bench::row::{Mode, Row};
use crate::cli::bench::table::Table;
use crate::cli::outputs::{self, Named};
use crate::cli::whole_file::WholeFile;

/// Bytes of a GiB.
const GIB: f64 = (1u64 << 30) as f64;

/// Runs `ds4-bench plot`.
///
/// # Errors
/// Files that cannot be read, and an output that cannot be written.
pub fn run(args: &PlotArgs) -> Result<(), CliError> {
    let inputs: Vec<Named<'_>> = args.files.iter().map(|file| ("the measurements", Some(file.as_path()))).collect();
    outputs::keep_apart(&inputs, &[("-o", Some(&args.output))])?;
    let tables = args.files.iter().map(|path| Table::read(path)).collect::<Result<Vec<_>, _>>()?;
    let panels = panels(&tables);
    if panels.is_empty() {
        return Err(CliError::failed("the files have no speed above zero; there is nothing to draw"));
    }
    let title = args.title.clone().unwrap_or_else(|| {
        let part = |column: fn(&Row) -> &str| tables[0].common(column).unwrap_or("unknown").to_owned();
        format!("{} on {}", part(|row| &row.model), part(|row| &row.machine))
    });
    let text = svg(&title, &panels).map_err(|e| CliError::failed(format!("cannot draw: {e}")))?;
    let cannot = |e: std::io::Error| CliError::failed(format!("cannot write {}: {e}", args.output.display()));
    let mut file = WholeFile::create(&args.output).map_err(cannot)?;
    std::io::Write::write_all(&mut file, text.as_bytes()).and_then(|()| file.finish()).map_err(cannot)?;
    note(&format!("wrote {} ({} panels)", args.output.display(), panels.len()));
    Ok(())
}

/// Points by the line that they belong to, then by x.
type Lines = BTreeMap<String, BTreeMap<u64, Vec<f64>>>;

/// A value to draw: its name, and how it is read from a row.
type Measure = (&'static str, fn(&Row) -> Option<f64>);

const PREFILL: Measure = ("prefill, tokens a second", |row| above_zero(row.prefill_tps));
const GENERATION: Measure = ("generation after the first token, tokens a second", |row| above_zero(row.gen_steady_tps));
const APPEND: Measure = ("time of an append, ms", |row| above_zero(row.prefill_ms));
const HITS: Measure =
    ("hit rate of the expert cache in generation, %", |row| row.cache_hit_rate.map(|rate| 100.0 * rate));

fn above_zero(value: f64) -> Option<f64> {
    (value > 0.0).then_some(value)
}

/// The panels that these rows fill.
fn panels(tables: &[Table]) -> Vec<Panel> {
    let rows = || tables.iter().flat_map(|table| &table.rows);
    let budgets: BTreeSet<u64> = rows().map(|row| row.cache_slots).filter(|slots| *slots > 0).collect();
    let names = names(tables);
    let mut panels = Vec::new();
    let context = |row: &Row| (row.mode == Mode::Sweep).then_some(row.ctx_tokens);
    let append = |row: &Row| (row.mode == Mode::Append).then_some(row.prefill_tokens);
    let contexts: BTreeSet<u64> = rows().filter_map(context).collect();
    // Several budgets at one context length are told by the panels of budgets.
    let has_contexts = contexts.len() > 1 || budgets.len() < 2;
    for measure in [PREFILL, GENERATION].into_iter().filter(|_| has_contexts) {
        panels.push(panel(
            "context, tokens",
            measure,
            &collect(tables, &names, measure.1, context, |row| {
                if budgets.len() > 1 { format!("{} slots", row.cache_slots) } else { String::new() }
            }),
        ));
    }
    let appends = collect(tables, &names, APPEND.1, append, |row| {
        format!("at {}", row.ctx_tokens - row.prefill_tokens.min(row.ctx_tokens))
    });
    // Lengths from one token to a thousand.
    panels.push(Panel { is_log: true, ..panel("tokens appended", APPEND, &appends) });
    if budgets.len() > 1 {
        // One context length says it: the longest one.
        let longest = rows().filter(|row| row.mode == Mode::Sweep).map(|row| row.ctx_tokens).max();
        let budget = |row: &Row| {
            let is_longest = row.mode == Mode::Sweep && Some(row.ctx_tokens) == longest;
            (is_longest && row.cache_slots > 0).then_some(row.cache_budget_bytes)
        };
        for measure in [GENERATION, HITS] {
            let lines = collect(tables, &names, measure.1, budget, |row| format!("at {}", row.ctx_tokens));
            let mut panel = panel("expert cache, GiB", measure, &lines);
            panel.scale_x(1.0 / GIB);
            panels.push(panel);
        }
    }
    panels.retain(|panel| !panel.series.is_empty());
    panels
}

/// Short names of files: without what all of them share.
fn names(tables: &[Table]) -> Vec<String> {
    if tables.len() == 1 {
        return vec![String::new()];
    }
    let stem = |name: &str| {
        let file = name.rsplit('/').next().unwrap_or(name);
        file.strip_suffix(".csv").unwrap_or(file).to_owned()
    };
    let stems: Vec<String> = tables.iter().map(|table| stem(&table.name)).collect();
    let distinct: BTreeSet<&String> = stems.iter().collect();
    if distinct.len() == stems.len() { stems } else { tables.iter().map(|table| table.name.clone()).collect() }
}

fn collect(
    tables: &[Table],
    names: &[String],
    value: fn(&Row) -> Option<f64>,
    x: impl Fn(&Row) -> Option<u64>,
    extra: impl Fn(&Row) -> String,
) -> Lines {
    let mut lines = Lines::new();
    for (table, name) in tables.iter().zip(names) {
        for row in &table.rows {
            let (Some(x), Some(value)) = (x(row), value(row)) else { continue };
            let parts = [name.clone(), row.regime.clone(), extra(row)];
            let parts: Vec<&str> = parts.iter().map(String::as_str).filter(|part| !part.is_empty()).collect();
            let line = if parts.is_empty() { "all rows".to_owned() } else { parts.join(", ") };
            lines.entry(line).or_default().entry(x).or_default().push(value);
        }
    }
    lines
}

fn panel(x_name: &'static str, measure: Measure, lines: &Lines) -> Panel {
    let series = lines.iter().map(|(name, points)| Series {
        name: name.clone(),
        points: points.iter().flat_map(|(x, values)| values.iter().map(|y| (*x as f64, *y))).collect(),
        medians: points.iter().map(|(x, values)| (*x as f64, median(values))).collect(),
    });
    Panel { x_name, y_name: measure.0, is_log: false, series: series.collect() }
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(ctx_tokens: u64, slots: u64, regime: &str, tps: f64) -> Row {
        Row {
            ctx_tokens,
            prefill_tps: tps,
            gen_steady_tps: tps,
            cache_slots: slots,
            cache_budget_bytes: slots << 30,
            cache_hit_rate: Some(0.5),
            regime: regime.into(),
            ..Row::default()
        }
    }

    fn table(name: &str, rows: Vec<Row>) -> Table {
        Table { name: name.into(), rows }
    }

    #[test]
    fn repetitions_are_points_and_their_median_the_line() {
        let rows =
            [1.0, 9.0, 2.0].map(|tps| row(5, 0, "cold", tps)).into_iter().chain([row(5, 0, "warm-repeat", 50.0)]);
        let panels = panels(&[table("a.csv", rows.collect())]);
        assert_eq!(panels.len(), 2);
        let cold = &panels[0].series[0];
        assert_eq!((cold.name.as_str(), cold.points.len(), &cold.medians[..]), ("cold", 3, &[(5.0, 2.0)][..]));
        assert_eq!(panels[0].series[1].medians, [(5.0, 50.0)], "regimes are never mixed");
        assert_eq!(median(&[4.0, 1.0]), 2.5);
    }

    #[test]
    fn budgets_and_appends_have_panels_of_their_own() {
        let mut rows = vec![row(5, 1, "cold", 1.0), row(9, 1, "cold", 2.0), row(9, 4, "cold", 3.0)];
        rows.push(Row { mode: Mode::Append, prefill_tokens: 4, prefill_ms: 7.0, ..row(9, 1, "cold", 1.0) });
        let panels = panels(&[table("a.csv", rows)]);
        let names: Vec<_> = panels.iter().map(|p| p.x_name).collect();
        assert_eq!(
            names,
            ["context, tokens", "context, tokens", "tokens appended", "expert cache, GiB", "expert cache, GiB"]
        );
        assert_eq!(panels[2].series[0].name, "cold, at 5");
        assert_eq!(panels[3].series[0].medians, [(1.0, 2.0), (4.0, 3.0)], "at the longest context only");
        let one = super::panels(&[table("a.csv", vec![row(9, 1, "cold", 2.0), row(9, 4, "cold", 3.0)])]);
        assert!(one.len() == 2 && one.iter().all(|p| p.x_name == "expert cache, GiB"), "one context length: {one:?}");
    }

    #[test]
    fn files_are_named_where_there_are_several() {
        let two = |a: &str, b: &str| names(&[table(a, vec![]), table(b, vec![])]);
        assert_eq!(two("x/a.csv", "x/b.csv"), ["a", "b"]);
        assert_eq!(two("x/a.csv", "y/a.csv"), ["x/a.csv", "y/a.csv"]);
    }
}
