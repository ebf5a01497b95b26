//! `ds4-cache curve`: misses of decode, and the tokens a second they allow, over the cache budget.
//! Owns the points and the CSV; the picture is `curve_plot`'s. Surprising fact: LRU needs one pass for all sizes, every
//! other policy a replay a point, so LRU is a line and the others are dots.

use std::path::PathBuf;

use cache_policy::curve::knee;
use cache_policy::{Bytes, ExpertIdx, LayerIdx, MissCurve, Phase, Speed, TraceHeader};
use clap::Args;

use super::budgets::{Budget, Classes};
use super::curve_plot::{self, Plot};
use super::model_facts::{ModelFacts, memory_rate, options};
use super::note;
use super::plan::check_model;
use super::replay::phase_name;
use super::scores::{Scores, WantOptimum, contenders, score};
use super::speed_flags::SpeedArgs;
use super::table::{Table, grouped, percent, short};
use super::trace_input::{TraceInput, describe};
use crate::cli::CliError;
use crate::cli::outputs::keep_apart;
use crate::cli::whole_file::WholeFile;
use crate::storage::probe::ProbeChoice;

/// Sizes at which LRU is listed: more than a picture can show.
const LRU_POINTS: u64 = 256;

/// Flags of `ds4-cache curve`.
#[derive(Args, Debug)]
pub struct CurveArgs {
    /// Trace of ds4 --trace-routes
    trace: PathBuf,
    /// CSV file to write
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Picture to write
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Policy to show beside LRU and the optimum
    #[arg(long, value_name = "NAME", default_value = "auto")]
    policy: String,
    /// Budgets at which the policy and the optimum are replayed
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = clap::value_parser!(u64).range(2..=200))]
    points: u64,
    /// Model file of the trace: refuses a trace of another one, and knows what a step reads and what the drive gives
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
    #[command(flatten)]
    speed: SpeedArgs,
    /// Use a trace whose recording was cut off, up to where it ends
    #[arg(long)]
    partial: bool,
}

/// Misses at one size.
#[derive(Clone, Copy, Debug)]
pub struct Point {
    pub slots: u64,
    pub bytes: Bytes,
    pub misses_per_token: f64,
    pub missed_bytes_per_token: f64,
}

/// Everything that a curve shows.
pub struct Curve {
    /// `prefill` or `decode`.
    pub phase: Phase,
    pub experts: u64,
    /// Bytes of all experts.
    pub all: Bytes,
    /// Slots of one token's experts.
    pub floor: u64,
    /// Slots at which the curve of LRU turns flat.
    pub knee: Option<u64>,
    pub lru: Vec<Point>,
    pub policy: &'static str,
    pub chosen: Vec<Point>,
    pub optimum: Option<Vec<Point>>,
    pub speed: Option<Speed>,
}

/// Runs the subcommand; returns what goes to stdout.
///
/// # Errors
/// Unknown policies, damaged traces, files that cannot be written.
pub fn run(args: &CurveArgs) -> Result<String, CliError> {
    contenders(std::slice::from_ref(&args.policy))?;
    let inputs = [("the trace", Some(args.trace.as_path())), ("--model", args.model.as_deref())];
    keep_apart(&inputs, &[("-o", args.output.as_deref()), ("--svg", args.svg.as_deref())])?;
    let input = TraceInput::open(&args.trace, args.partial)?;
    let model = describe(input.header());
    let speed = speed(args, &input)?;
    let curve = measure(args, input, speed)?;
    if let Some(path) = &args.output {
        write(path, csv(&curve)?.as_bytes())?;
    }
    if let Some(path) = &args.svg {
        let title = format!("{}: {model}", path_name(&args.trace));
        write(path, curve_plot::svg(&Plot { title: &title, curve: &curve }).map_err(CliError::failed)?.as_bytes())?;
    }
    Ok(text(&curve, &format!("{}: {model}", args.trace.display())))
}

/// The rates, from flags and from the model file; `None` when nothing was said about speed.
fn speed(args: &CurveArgs, input: &TraceInput) -> Result<Option<Speed>, CliError> {
    let flags = &args.speed;
    let Some(model) = &args.model else {
        if flags.memory_gbs.is_some() {
            return Err(CliError::usage(
                "--memory-gbs needs --model FILE, which knows the bytes of a step; or use --step-ms",
            ));
        }
        return match (flags.drive_gbs, flags.step_ms) {
            (None, None) => Ok(None),
            (Some(_), Some(_)) => Ok(flags.speed(None)),
            _ => Err(CliError::usage("tokens a second need both --drive-gbs and --step-ms, or --model FILE")),
        };
    };
    let mut options = options(model, None, None)?;
    if flags.drive_gbs.is_some() {
        options.probe = ProbeChoice::Off;
    }
    let facts = ModelFacts::open(&options)?;
    check_model(input.header(), &facts.header, input)?;
    let probed = facts.prepared.drive.as_ref().map(|rates| rates.bulk.gb_per_s);
    let Some(drive_gbs) = flags.drive_gbs.or(probed) else {
        note(
            "note: the rate of the drive is not known (the model file is too small to measure it by), so no tokens a second; give --drive-gbs",
        );
        return Ok(None);
    };
    let step_s = match flags.step_s(Some(facts.step_bytes())) {
        Some(step_s) => step_s,
        None => Speed::step_from_memory(facts.step_bytes(), memory_rate()?),
    };
    Ok(Some(Speed { step_s, drive_bytes_per_s: drive_gbs * 1e9 }))
}

fn path_name(path: &std::path::Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn write(path: &std::path::Path, bytes: &[u8]) -> Result<(), CliError> {
    let cannot = |e| CliError::failed(format!("cannot write {}: {e}", path.display()));
    let mut file = WholeFile::create(path).map_err(cannot)?;
    std::io::Write::write_all(&mut file, bytes).and_then(|()| file.finish()).map_err(cannot)
}

/// `points` sizes from the floor to all experts, both included.
pub fn sizes(classes: &Classes, points: u64) -> Result<Vec<Budget>, CliError> {
    let (floor, experts) = (classes.floor(), classes.experts());
    let steps = (points - 1).min(experts - floor).max(1);
    let mut slots: Vec<u64> = (0..=steps).map(|i| floor + (experts - floor) * i / steps).collect();
    slots.dedup();
    slots.into_iter().map(|n| classes.slots(n, format!("{n} slots"))).collect()
}

fn measure(args: &CurveArgs, mut input: TraceInput, speed: Option<Speed>) -> Result<Curve, CliError> {
    let classes = Classes::of(input.header());
    let budgets = sizes(&classes, args.points)?;
    let contenders = contenders(std::slice::from_ref(&args.policy))?;
    let policy = contenders[0].name;
    let scores = score(&mut input, &budgets, &contenders, WantOptimum::Auto)?;
    let phase = if scores.census.decode.uses > 0 { Phase::Decode } else { Phase::Prefill };
    if phase == Phase::Prefill {
        note("note: the trace has no decode; the curve shows prefill");
    }
    let tokens = scores.census.of(phase).tokens.max(1) as f64;
    // The stack distances take a second reading: they are counted for the phase that is shown.
    let mut again = TraceInput::open(&args.trace, args.partial)?;
    let lru = lru_points(&mut again, &classes, phase, tokens)?;
    let equal_steps: Vec<u64> = lru.iter().map(|p| (p.misses_per_token * tokens).round() as u64).collect();
    let point = |budget: &Budget, score: &cache_policy::Score| {
        let (tally, read) = score.of(phase);
        let per_token = |count: u64| count as f64 / tokens;
        Point {
            slots: budget.slots,
            bytes: budget.bytes,
            misses_per_token: per_token(tally.misses),
            missed_bytes_per_token: per_token(read.0),
        }
    };
    let Scores { scored, optimum, .. } = &scores;
    Ok(Curve {
        phase,
        experts: classes.experts(),
        all: budgets.last().map_or(Bytes(0), |b| b.bytes),
        floor: classes.floor(),
        knee: knee(&equal_steps, 0).map(|at| lru[at].slots),
        chosen: scored.iter().map(|s| point(&budgets[s.budget], &s.score)).collect(),
        optimum: optimum.as_ref().map(|all| budgets.iter().zip(all).map(|(b, s)| point(b, s)).collect()),
        lru,
        policy,
        speed,
    })
}

/// Misses of LRU from the floor to all experts, in steps as equal as whole slots allow.
fn lru_points(input: &mut TraceInput, classes: &Classes, phase: Phase, tokens: f64) -> Result<Vec<Point>, CliError> {
    let header = input.header().clone();
    let mut curves = ClassCurves::new(&header);
    while let Some(batch) = input.next_batch()? {
        for r in batch.requests() {
            curves.record(r.layer, r.experts, r.phase == phase);
        }
    }
    let by_class = curves.misses();
    let mut points = Vec::new();
    for budget in sizes(classes, LRU_POINTS)? {
        let (mut misses, mut bytes) = (0, 0);
        for ((all, expert_bytes), shape) in by_class.iter().zip(&budget.shapes) {
            misses += all[shape.slots];
            bytes += all[shape.slots] * expert_bytes.0;
        }
        points.push(Point {
            slots: budget.slots,
            bytes: budget.bytes,
            misses_per_token: misses as f64 / tokens,
            missed_bytes_per_token: bytes as f64 / tokens,
        });
    }
    Ok(points)
}

/// One miss curve a size class.
struct ClassCurves {
    curves: Vec<(MissCurve, Bytes)>,
    /// By layer index: class and number of expert 0 within it.
    layers: Vec<Option<(usize, usize)>>,
}

impl ClassCurves {
    fn new(header: &TraceHeader) -> Self {
        let mut layers = vec![None; header.layers.iter().map(|l| usize::from(l.layer.0) + 1).max().unwrap_or(0)];
        let mut curves = Vec::new();
        for (class, (bytes, members)) in header.size_classes().into_iter().enumerate() {
            let mut total = 0;
            for (layer, experts) in members {
                layers[usize::from(layer.0)] = Some((class, total));
                total += usize::from(experts);
            }
            curves.push((MissCurve::new(total), bytes));
        }
        Self { curves, layers }
    }

    fn record(&mut self, layer: LayerIdx, experts: &[ExpertIdx], is_counted: bool) {
        let (class, base) = self.layers[usize::from(layer.0)].expect("the trace has checked the layer");
        self.curves[class].0.record_request(experts.iter().map(|e| base + usize::from(e.0)), is_counted);
    }

    /// Misses by slots of each class.
    fn misses(&self) -> Vec<(Vec<u64>, Bytes)> {
        self.curves.iter().map(|(curve, bytes)| (curve.all(), *bytes)).collect()
    }
}

fn csv(curve: &Curve) -> Result<String, CliError> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    let head = ["policy", "slots", "share", "cache_bytes", "misses_per_token", "read_bytes_per_token", "tokens_per_s"];
    let lists = [("lru", Some(&curve.lru)), (curve.policy, Some(&curve.chosen)), ("optimum", curve.optimum.as_ref())];
    let mut write = || -> Result<(), csv::Error> {
        writer.write_record(head)?;
        for (name, points) in lists {
            for p in points.into_iter().flatten() {
                let tps = curve.speed.map(|s| s.tokens_per_s(p.missed_bytes_per_token));
                writer.write_record([
                    name.to_owned(),
                    p.slots.to_string(),
                    format!("{:.6}", p.slots as f64 / curve.experts as f64),
                    p.bytes.0.to_string(),
                    format!("{:.6}", p.misses_per_token),
                    format!("{:.1}", p.missed_bytes_per_token),
                    tps.map_or(String::new(), |tps| format!("{tps:.4}")),
                ])?;
            }
        }
        Ok(())
    };
    write().map_err(CliError::failed)?;
    let bytes = writer.into_inner().map_err(CliError::failed)?;
    Ok(String::from_utf8(bytes).expect("the cells are text"))
}

/// The point of `points` with `slots`, or the next larger one.
fn at(points: &[Point], slots: u64) -> Option<&Point> {
    points.iter().find(|p| p.slots >= slots)
}

fn text(curve: &Curve, title: &str) -> String {
    let has_bytes = curve.all.0 > curve.experts;
    let mut head = vec!["slots", "share", "cache", "lru", curve.policy, "optimum"];
    if curve.speed.is_some() {
        head.extend(["t/s lru", "t/s", "t/s optimum"]);
    }
    let mut table = Table::new(&head);
    for (i, chosen) in curve.chosen.iter().enumerate() {
        let lru = at(&curve.lru, chosen.slots);
        let best = curve.optimum.as_ref().map(|o| &o[i]);
        let columns = [lru, Some(chosen), best];
        let mut cells = vec![
            grouped(chosen.slots),
            percent(chosen.slots as f64 / curve.experts as f64),
            if has_bytes { chosen.bytes.to_string() } else { "-".into() },
        ];
        cells.extend(columns.iter().map(|p| p.map_or("-".into(), |p| short(p.misses_per_token))));
        if let Some(speed) = curve.speed {
            let tps = |p: &Point| short(speed.tokens_per_s(p.missed_bytes_per_token));
            cells.extend(columns.iter().map(|p| p.map_or("-".into(), &tps)));
        }
        table.row(cells);
    }
    let mut text =
        format!("{title}\nmisses a token in {} by cache size\n\n{}\n", phase_name(curve.phase), table.text());
    text.push_str(&format!("Floor: {} slots, one token's experts.", grouped(curve.floor)));
    if let Some(knee) = curve.knee {
        let share = percent(knee as f64 / curve.experts as f64);
        text.push_str(&format!(
            " Knee of LRU: {} slots ({share}); from there on a slot wins less than the average one.",
            grouped(knee)
        ));
    }
    text.push('\n');
    text
}
