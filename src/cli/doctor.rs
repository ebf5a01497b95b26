//! `--doctor`: the diagnosis as a table for a person or as JSON for a program, on stdout.
//! Only words what `engine::doctor` found. Surprising fact: a damaged model file ends with code 1, but only after everything else was told.

use std::fmt::Write as _;

use crate::cli::args::Cli;
use crate::cli::{CliError, output};
use crate::engine::doctor::{BudgetBound, Check, Diagnosis, Drive, Health, Machine, PROMPT_TOKENS, examine};
use crate::engine::options::EngineOptions;
use crate::storage::probe::DriveRates;
use crate::units::Bytes;

/// Runs the examination and prints it.
///
/// # Errors
/// A model file that is not whole.
pub fn run(cli: &Cli, options: &EngineOptions) -> Result<(), CliError> {
    let found = examine(options);
    let text = match cli.diagnosis.json {
        true => serde_json::to_string_pretty(&found).map_err(CliError::failed)?,
        false => text(&found),
    };
    output::line(text.trim_end()).map_err(CliError::output)?;
    match found.model.is_whole() {
        true => Ok(()),
        false => Err(CliError::failed(fault(&found.model))),
    }
}

fn fault(model: &Health) -> String {
    let check = if model.file.is_ok { &model.layout } else { &model.file };
    check.detail.clone()
}

/// The table.
pub fn text(found: &Diagnosis) -> String {
    let mut out = format!("ds4 {}\n\n", found.version);
    machine(&mut out, &found.machine);
    drive(&mut out, &found.drive);
    model(&mut out, &found.model);
    if let Some(forecast) = &found.forecast {
        section(&mut out, "Prediction (bounds: what drive and memory allow at most)");
        row(&mut out, "a token", &forecast.to_string());
        bounds(&mut out, &found.bounds);
    }
    out
}

fn section(out: &mut String, title: &str) {
    let _ = writeln!(out, "{title}");
}

fn row(out: &mut String, name: &str, value: &str) {
    let _ = writeln!(out, "  {name:<14}{value}");
}

fn check(out: &mut String, name: &str, check: &Check) {
    row(out, name, &format!("{}{}", if check.is_ok { "" } else { "NO: " }, check.detail));
}

fn machine(out: &mut String, m: &Machine) {
    section(out, "Machine");
    row(out, "kernel", &m.kernel);
    row(out, "processors", &format!("{}, {}", m.processors, m.simd));
    check(out, "io_uring", &m.io_uring);
    let limit = m.memlock_bytes.map_or("unlimited".into(), |b| Bytes(b).to_string());
    row(out, "memlock", &limit);
    let (total, available, usable) = (Bytes(m.memory_bytes), Bytes(m.available_bytes), Bytes(m.usable_bytes));
    row(out, "memory", &format!("{total}, {available} available, {usable} usable for a plan"));
    match m.group_limit_bytes {
        Some(limit) => row(out, "control group", &format!("{} of {} used", Bytes(m.group_used_bytes), Bytes(limit))),
        None => row(out, "control group", "no limit"),
    }
    let rate =
        m.memory_gb_per_s.map_or("not measured: too little memory is free".into(), |r| format!("{r:.1} GB/s read"));
    row(out, "memory rate", &rate);
    // No GPU is no fault.
    row(out, "GPU", &m.gpu.detail);
    let rates = match (&m.gpu_rates, &m.gpu_not_measured) {
        (Some(r), _) => format!(
            "kernels read {:.1} GB/s of host memory, {:.1} GB/s of the GPU's own ({})",
            r.host_gb_per_s, r.own_gb_per_s, r.name
        ),
        (None, why) => format!("not measured: {}", why.as_deref().unwrap_or("unknown")),
    };
    row(out, "GPU rates", &rates);
    out.push('\n');
}

fn drive(out: &mut String, d: &Drive) {
    section(out, "Drive under the model");
    let unknown = || "unknown".to_owned();
    let (kind, source) = (d.file_system.clone().unwrap_or_else(unknown), d.source.clone().unwrap_or_else(unknown));
    row(out, "file system", &format!("{kind} on {source}"));
    check(out, "O_DIRECT", &d.direct);
    match (&d.rates, &d.not_measured) {
        (Some(rates), _) => points(out, rates),
        (None, why) => row(out, "rates", &format!("not measured: {}", why.as_deref().unwrap_or("unknown"))),
    }
    out.push('\n');
}

fn points(out: &mut String, rates: &DriveRates) {
    let seconds = rates.probe_ms / 1e3;
    row(out, "rates", &format!("{} read in {seconds:.2} s; * is what a run uses", Bytes(rates.probe_bytes)));
    let mark = |is_chosen: bool| if is_chosen { "*" } else { " " };
    let _ = writeln!(out, "    {:>12} {:>6} {:>10} {:>14}", "experts by", "depth", "GB/s", "median ms");
    for p in &rates.bulk_points {
        let piece = Bytes(p.piece_bytes).to_string();
        let chosen = mark(*p == rates.bulk);
        let _ = writeln!(out, "  {chosen} {piece:>12} {:>6} {:>10.3} {:>14.2}", p.depth, p.gb_per_s, p.piece_ms_p50);
    }
    let _ = writeln!(out, "    {:>12} {:>6} {:>10}", "rows of", "depth", "reads/s");
    for p in &rates.row_points {
        let chosen = mark(*p == rates.rows);
        let _ = writeln!(out, "  {chosen} {:>12} {:>6} {:>10.0}", "4.00 KiB", p.depth, p.reads_per_s);
    }
}

fn model(out: &mut String, m: &Health) {
    section(out, "Model file");
    row(out, "path", &format!("{} ({})", m.path, Bytes(m.bytes)));
    check(out, "header", &m.file);
    check(out, "layout", &m.layout);
    check(out, "streaming", &m.runs);
    out.push('\n');
}

fn bounds(out: &mut String, bounds: &[BudgetBound]) {
    if bounds.is_empty() {
        return;
    }
    let number =
        |tps: Option<f64>| tps.map_or("-".into(), |t| if t < 100.0 { format!("{t:.2}") } else { format!("{t:.0}") });
    let _ = writeln!(
        out,
        "    {:>10} {:>10} {:>12} {:>7} | decode t/s: {:>8} {:>8} {:>8} | prefill t/s, {PROMPT_TOKENS} tokens",
        "budget", "slots", "memory", "share", "no hit", "at share", "all hit"
    );
    for b in bounds {
        if let Some(refused) = &b.refused {
            let _ = writeln!(out, "    {:>10} {refused}", b.budget);
            continue;
        }
        let _ = writeln!(
            out,
            "    {:>10} {:>10} {:>12} {:>5.1} % | {:>20} {:>8} {:>8} | {:>8}",
            b.budget,
            b.slots,
            Bytes(b.cache_bytes).to_string(),
            100.0 * b.share,
            number(b.decode_tps_cold),
            number(b.decode_tps_share),
            number(b.decode_tps_hot),
            number(b.prefill_tps)
        );
    }
}
