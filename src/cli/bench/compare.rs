//! Two files of measurements, row against row: ratios with their intervals.
//! Never averages over states of the cache or kinds of rows, and never compares rows that measured different things. Surprising fact: pairs
//! are made in order of occurrence, so files of alternating runs (A B A B) pair each run with its neighbour in time.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use serde::Serialize;

use crate::cli::CliError;
use crate::cli::bench::args::{CompareArgs, Format};
use crate::cli::bench::note;
use crate::cli::bench::output::write_plain;
use crate::cli::bench::row::{Mode, Row, round};
use crate::cli::bench::table::Table;
use crate::cli::output;

/// What makes rows alike.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Key {
    mode: Mode,
    regime: String,
    cache_slots: u64,
    ctx_tokens: u64,
    prefill_tokens: u64,
    gen_tokens: u64,
}

impl Key {
    fn of(row: &Row) -> Self {
        Self {
            mode: row.mode,
            regime: row.regime.clone(),
            cache_slots: row.cache_slots,
            ctx_tokens: row.ctx_tokens,
            prefill_tokens: row.prefill_tokens,
            gen_tokens: row.gen_tokens,
        }
    }

    fn words(&self) -> String {
        let Self { mode, regime, cache_slots, ctx_tokens, prefill_tokens, gen_tokens } = self;
        let regime = if regime.is_empty() { "unmarked" } else { regime };
        format!(
            "{} {regime}, {cache_slots} slots, {ctx_tokens} tokens ({prefill_tokens} new), {gen_tokens} generated",
            mode.name()
        )
    }
}

/// A column by name.
type Column<T> = (&'static str, fn(&Row) -> T);
/// A column of text by name.
type TextColumn = (&'static str, fn(&Row) -> &str);
/// Mode, regime and cache slots of rows that belong together.
type Group<'a> = (Mode, &'a str, u64);

/// Rates that are compared.
const METRICS: [Column<f64>; 3] = [
    ("prefill_tps", |row| row.prefill_tps),
    ("gen_tps", |row| row.gen_tps),
    ("gen_steady_tps", |row| row.gen_steady_tps),
];

/// One line of the result. `ctx_tokens` is empty in the line over all rows of a group.
#[derive(Clone, PartialEq, Debug, Serialize)]
struct Line {
    metric: &'static str,
    mode: Mode,
    regime: String,
    cache_slots: u64,
    ctx_tokens: Option<u64>,
    prefill_tokens: Option<u64>,
    pairs: usize,
    /// Geometric means of A and B.
    a: f64,
    b: f64,
    /// Geometric mean of B / A over the pairs.
    ratio: f64,
    /// 95 % interval of the ratio; empty for a single pair.
    low: Option<f64>,
    high: Option<f64>,
}

/// Runs `ds4-bench compare`.
///
/// # Errors
/// Files that cannot be read, of different models, or with rows that the other one lacks.
pub fn run(args: &CompareArgs) -> Result<(), CliError> {
    let (a, b) = (Table::read(&args.base)?, Table::read(&args.other)?);
    check_models(&a, &b)?;
    let pairs = pair(&a, &b, args.common)?;
    for line in conditions(&a, &b) {
        note(&line);
    }
    let lines = lines(&pairs);
    match args.format {
        Format::Md => output::answer(&table(&a, &b, &lines)).map_err(CliError::output),
        format => write_plain(&lines, format),
    }
}

/// Files must be about one model, as far as they say.
fn check_models(a: &Table, b: &Table) -> Result<(), CliError> {
    for table in [a, b] {
        let known: Vec<&str> = table.rows.iter().map(|r| r.model_id.as_str()).filter(|id| !id.is_empty()).collect();
        if known.iter().any(|id| *id != known[0]) {
            return Err(CliError::failed(format!("{} has rows of several models; split it first", table.name)));
        }
    }
    let id = |table: &Table| table.common(|row| &row.model_id).map(str::to_owned);
    match (id(a), id(b)) {
        (Some(x), Some(y)) if x != y => Err(CliError::failed(format!(
            "the files are of different models: {} is {} ({x}), {} is {} ({y}); compare runs of one model file",
            a.name, a.rows[0].model, b.name, b.rows[0].model
        ))),
        (Some(_), Some(_)) => Ok(()),
        (x, _) => {
            let name = if x.is_none() { &a.name } else { &b.name };
            note(&format!(
                "note: {name} does not say which model it is of; the comparison assumes that it is the same"
            ));
            Ok(())
        }
    }
}

/// Settings that differ: often the purpose of the comparison, so they are shown and not refused.
fn conditions(a: &Table, b: &Table) -> Vec<String> {
    let columns: [TextColumn; 8] = [
        ("machine", |row| &row.machine),
        ("build", |row| &row.build),
        ("backend", |row| &row.backend),
        ("arithmetic", |row| &row.arithmetic),
        ("cache policy", |row| &row.cache_policy),
        ("lookahead", |row| &row.lookahead),
        ("io", |row| &row.io),
        ("tokens", |row| &row.tokens),
    ];
    let mut lines = Vec::new();
    for (name, column) in columns {
        let (x, y) = (a.common(column), b.common(column));
        if x != y {
            lines.push(format!("{name}: {} / {}", x.unwrap_or("unknown or mixed"), y.unwrap_or("unknown or mixed")));
        }
    }
    let numbers: [Column<u64>; 3] = [
        ("threads", |row| row.threads),
        ("prefill chunk", |row| row.prefill_chunk),
        ("prefill sweep", |row| row.prefill_sweep),
    ];
    for (name, column) in numbers {
        let (x, y) = (column(&a.rows[0]), column(&b.rows[0]));
        if x != y {
            lines.push(format!("{name}: {x} / {y}"));
        }
    }
    lines
}

type Pairs<'a> = BTreeMap<Key, Vec<(&'a Row, &'a Row)>>;

fn grouped(table: &Table) -> BTreeMap<Key, Vec<&Row>> {
    let mut groups: BTreeMap<Key, Vec<&Row>> = BTreeMap::new();
    for row in &table.rows {
        groups.entry(Key::of(row)).or_default().push(row);
    }
    groups
}

/// Rows of one kind side by side, in order of occurrence.
fn pair<'a>(a: &'a Table, b: &'a Table, common: bool) -> Result<Pairs<'a>, CliError> {
    let (left, mut right) = (grouped(a), grouped(b));
    let mut pairs = Pairs::new();
    let mut unlike = Vec::new();
    for (key, rows) in left {
        let others = right.remove(&key).unwrap_or_default();
        if rows.len() != others.len() {
            unlike.push(format!("{}: {} in {}, {} in {}", key.words(), rows.len(), a.name, others.len(), b.name));
        }
        let together: Vec<_> = rows.into_iter().zip(others).collect();
        if let (Entry::Vacant(place), false) = (pairs.entry(key), together.is_empty()) {
            place.insert(together);
        }
    }
    unlike.extend(
        right.iter().map(|(key, rows)| format!("{}: 0 in {}, {} in {}", key.words(), a.name, rows.len(), b.name)),
    );
    if pairs.is_empty() {
        return Err(CliError::failed(format!("the files have no row in common; {} differs first", unlike[0])));
    }
    if let (Some(first), false) = (unlike.first(), common) {
        return Err(CliError::failed(format!(
            "the files have unlike rows, {} kinds in all, the first being {first}; measure both alike, or use --common to leave \
             them out",
            unlike.len()
        )));
    }
    unlike.iter().for_each(|what| note(&format!("left out: {what}")));
    Ok(pairs)
}

/// A line for each kind of row, and one over all rows of a group where it has several kinds.
fn lines(pairs: &Pairs) -> Vec<Line> {
    let mut lines = Vec::new();
    for (metric, value) in METRICS {
        let mut groups: BTreeMap<Group<'_>, Vec<(f64, f64)>> = BTreeMap::new();
        let mut kinds: BTreeMap<Group<'_>, usize> = BTreeMap::new();
        for (key, rows) in pairs {
            let values: Vec<(f64, f64)> = rows.iter().map(|(a, b)| (value(a), value(b))).collect();
            // Nothing was measured in rows without generation, for example.
            if values.iter().any(|(a, b)| *a <= 0.0 || *b <= 0.0) {
                continue;
            }
            let group = (key.mode, key.regime.as_str(), key.cache_slots);
            lines.push(line(metric, group, Some(key), &values));
            *kinds.entry(group).or_default() += 1;
            groups.entry(group).or_default().extend(values);
        }
        for (group, values) in groups {
            if kinds[&group] > 1 {
                lines.push(line(metric, group, None, &values));
            }
        }
    }
    lines
}

fn line(metric: &'static str, group: (Mode, &str, u64), key: Option<&Key>, values: &[(f64, f64)]) -> Line {
    let logs: Vec<f64> = values.iter().map(|(a, b)| (b / a).ln()).collect();
    let (mean, half) = mean_and_half_width(&logs);
    let geometric = |pick: fn(&(f64, f64)) -> f64| {
        round((values.iter().map(|v| pick(v).ln()).sum::<f64>() / values.len() as f64).exp())
    };
    Line {
        metric,
        mode: group.0,
        regime: group.1.to_owned(),
        cache_slots: group.2,
        ctx_tokens: key.map(|k| k.ctx_tokens),
        prefill_tokens: key.map(|k| k.prefill_tokens),
        pairs: values.len(),
        a: geometric(|v| v.0),
        b: geometric(|v| v.1),
        ratio: round(mean.exp()),
        low: half.map(|h| round((mean - h).exp())),
        high: half.map(|h| round((mean + h).exp())),
    }
}

/// Mean and half of the 95 % interval of the mean (Student's t); no interval for a single value.
fn mean_and_half_width(values: &[f64]) -> (f64, Option<f64>) {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    if values.len() < 2 {
        return (mean, None);
    }
    let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0);
    (mean, Some(t_quantile(values.len() - 1) * (variance / n).sqrt()))
}

/// 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom (any table of it).
const T_QUANTILES: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];

fn t_quantile(freedom: usize) -> f64 {
    // Beyond the table: within 0.002 of the exact value.
    T_QUANTILES.get(freedom - 1).copied().unwrap_or(1.96 + 2.4 / freedom as f64)
}

fn verdict(line: &Line) -> &'static str {
    match (line.low, line.high) {
        (Some(low), _) if low > 1.0 => "B is faster",
        (_, Some(high)) if high < 1.0 => "B is slower",
        (Some(_), _) => "no difference shown",
        _ => "one pair: no interval",
    }
}

fn table(a: &Table, b: &Table, lines: &[Line]) -> String {
    let mut text = format!("A: {}\nB: {}\n", a.name, b.name);
    let mut head = None;
    for line in lines {
        let regime = if line.regime.is_empty() { "unmarked" } else { &line.regime };
        let group = (line.metric, line.mode, regime, line.cache_slots);
        if head != Some(group) {
            let slots = if line.cache_slots > 0 { format!(", {} slots", line.cache_slots) } else { String::new() };
            text += &format!(
                "\n{} ({}, {regime}{slots})\n\n| context | new | pairs | A | B | B / A | 95 % interval | |\n\
                 |---:|---:|---:|---:|---:|---:|---:|---|\n",
                line.metric,
                line.mode.name()
            );
            head = Some(group);
        }
        let number = |n: Option<u64>| n.map_or("all".into(), |n| n.to_string());
        let interval = line.low.zip(line.high).map_or(String::new(), |(low, high)| format!("{low:.3} .. {high:.3}"));
        text += &format!(
            "| {} | {} | {} | {:.2} | {:.2} | {:.3} | {interval} | {} |\n",
            number(line.ctx_tokens),
            number(line.prefill_tokens),
            line.pairs,
            line.a,
            line.b,
            line.ratio,
            verdict(line)
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(speeds: &[(u64, f64)]) -> Table {
        let row = |(ctx_tokens, tps): &(u64, f64)| Row {
            ctx_tokens: *ctx_tokens,
            prefill_tokens: 1,
            prefill_tps: *tps,
            regime: "cold".into(),
            model_id: "m".into(),
            ..Row::default()
        };
        Table { name: "t".into(), rows: speeds.iter().map(row).collect() }
    }

    #[test]
    fn ratios_and_intervals() {
        let a = rows(&[(1, 10.0), (1, 20.0), (1, 40.0), (2, 8.0)]);
        let b = rows(&[(1, 20.0), (1, 40.0), (1, 80.0), (2, 16.0)]);
        let found = lines(&pair(&a, &b, false).unwrap());
        assert_eq!(found.len(), 3, "{found:#?}");
        assert_eq!((found[0].pairs, found[0].ratio, found[0].low, found[0].high), (3, 2.0, Some(2.0), Some(2.0)));
        assert_eq!((found[0].a, found[1].low, verdict(&found[1])), (20.0, None, "one pair: no interval"));
        assert_eq!((found[2].ctx_tokens, found[2].pairs, verdict(&found[2])), (None, 4, "B is faster"));
    }

    #[test]
    fn noise_shows_no_difference() {
        // Logarithms of the ratios: +-0.1; mean 0, deviation 0.1155, half width 3.182 * 0.1155 / 2.
        let a = rows(&[(1, 1.0); 4]);
        let b = rows(&[0.1f64, -0.1, 0.1, -0.1].map(|x| (1, x.exp())));
        let found = &lines(&pair(&a, &b, false).unwrap())[0];
        assert!((found.ratio - 1.0).abs() < 1e-5 && verdict(found) == "no difference shown", "{found:?}");
        assert!((found.high.unwrap().ln() - 0.183_71).abs() < 1e-4, "{found:?}");
    }

    #[test]
    fn unlike_rows_are_refused_or_left_out() {
        let (a, b) = (rows(&[(1, 1.0), (2, 1.0)]), rows(&[(1, 1.0), (1, 1.0), (3, 1.0)]));
        let error = pair(&a, &b, false).unwrap_err().to_string();
        assert!(error.contains("3 kinds") && error.contains("--common") && error.contains("1 tokens"), "{error}");
        assert_eq!(pair(&a, &b, true).unwrap().len(), 1);
        assert!(pair(&a, &rows(&[(9, 1.0)]), true).unwrap_err().to_string().contains("no row in common"));
    }

    #[test]
    fn models_must_agree() {
        let (a, mut b) = (rows(&[(1, 1.0)]), rows(&[(1, 1.0), (2, 1.0)]));
        assert!(check_models(&a, &b).is_ok());
        b.rows[1].model_id = "other".into();
        assert!(check_models(&a, &b).unwrap_err().to_string().contains("several models"));
        b.rows[0].model_id = "other".into();
        assert!(check_models(&a, &b).unwrap_err().to_string().contains("different models"));
        b.rows.iter_mut().for_each(|row| row.model_id.clear());
        assert!(check_models(&a, &b).is_ok());
    }
}
