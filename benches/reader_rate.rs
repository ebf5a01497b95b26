//! What the reader gets out of a drive: random experts of V4.1 Q2 shape and random table rows, by kind, piece and depth.
//! Run: `cargo bench --bench reader_rate -- FILE [SECONDS [short|fio]]`; `short` measures what the probe chooses, `fio` that and fio
//! (if installed) in turns on the same file, medians of five.
//! Surprising fact: lines with `direct=false` measure the drive only when the file is larger than memory, else the page cache.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use ds4::engine::slabs::{SlabClass, Slabs};
use ds4::storage::layout::{Extent, TableLayout};
use ds4::storage::probe::measure_now;
use ds4::storage::reader::*;
use ds4::storage::row_table::{RowTables, WINDOW_BLOCKS};
use ds4::units::{Bytes, ExpertKey, LayerIdx};

/// Gate, up and down slices of one V4.1 Q2 expert.
const PARTS: [u64; 3] = [3_041_280, 3_041_280, 3_870_720];
/// Experts asked for at once: one layer of a decode step.
const EXPERTS_AT_ONCE: u64 = 6;

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 20) % n
    }
}

fn cpu_seconds() -> f64 {
    // Fields 14 and 15 of /proc/self/stat: user and system time in clock ticks of 1/100 s.
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    let ticks = |i: usize| fields.get(i).and_then(|f| f.parse::<f64>().ok()).unwrap_or(0.0);
    (ticks(11) + ticks(12)) / 100.0
}

/// Keeps `EXPERTS_AT_ONCE` experts under way for `span`; bytes wanted and seconds.
fn experts(reader: &dyn Reader, file_bytes: u64, span: Duration) -> (u64, f64) {
    let gather = Gather::new();
    let mut random = Random(7);
    // The cache's own memory: huge pages cost the kernel less to hold during a read.
    let slot = PARTS.map(|len| reader.alignment().region_bytes_max(len).expect("small").next_multiple_of(4096) as u64);
    let classes = slot.map(|bytes| SlabClass { slot_bytes: Bytes(bytes), slots: EXPERTS_AT_ONCE });
    let slabs = Slabs::allocate(&classes).expect("memory").slots;
    let mut regions: Vec<(usize, DestRegion)> =
        slabs.into_iter().enumerate().flat_map(|(part, slots)| slots.into_iter().map(move |s| (part, s))).collect();
    let mut request = |part: usize, region: DestRegion| {
        let len = PARTS[part];
        let offset = random.below((file_bytes - len) / len) * len;
        let label = ReadLabel::Expert { key: ExpertKey::new(0, 0), part: ExpertPart::Gate };
        let (lane, class) = (Lane::Bulk, ReadClass::Demand);
        ReadRequest { extent: Extent { offset, len }, lane, class, label, region, tag: part as u64 }
    };
    let begun = Instant::now();
    let batch: Vec<_> = regions.drain(..).map(|(part, region)| request(part, region)).collect();
    let (mut under_way, mut bytes) = (batch.len(), 0);
    reader.submit(batch, gather.clone());
    while under_way > 0 {
        let (tag, result) = gather.next();
        let landed = result.expect("the drive reads");
        bytes += landed.len as u64;
        if begun.elapsed() < span {
            reader.submit(vec![request(tag as usize, landed.region)], gather.clone());
        } else {
            under_way -= 1;
        }
    }
    (bytes, begun.elapsed().as_secs_f64())
}

/// Batches of `batch` random rows one after another for `span`; rows and seconds.
fn rows(rows: &RowTables, batch: usize, span: Duration) -> (u64, f64) {
    let mut random = Random(9);
    let mut out = vec![0; batch * 264];
    let begun = Instant::now();
    let mut done = 0;
    while begun.elapsed() < span {
        let asked = (0..batch).map(|_| random.below(rows.tables()[0].rows)).collect();
        rows.submit(&[asked]).and_then(|mut ticket| ticket.wait(0, &mut out)).expect("the drive reads");
        done += batch as u64;
    }
    (done, begun.elapsed().as_secs_f64())
}

/// What one run gave: GB/s or reads a second, and cores of the processor meanwhile.
#[derive(Clone, Copy, Default)]
struct Rate {
    per_s: f64,
    cores: f64,
}

/// Runs fio for `span` with `more` arguments. `None` when it is not installed or fails.
fn fio(path: &Path, span: Duration, more: &[String]) -> Option<serde_json::Value> {
    let base = ["--name=r", "--rw=randread", "--direct=1", "--ioengine=io_uring", "--registerfiles=1", "--norandommap"];
    let out = Command::new("fio")
        .args(base)
        .args(["--time_based", "--output-format=json"])
        .arg(format!("--filename={}", path.display()))
        .arg(format!("--runtime={}ms", span.as_millis()))
        .args(more)
        .output()
        .ok()?;
    let value: serde_json::Value = serde_json::from_slice(&out.stdout).ok()?;
    Some(value["jobs"][0].clone())
}

/// Rate of a fio job by a field of its `read` object.
fn fio_rate(path: &Path, span: Duration, more: &[String], field: &str) -> Option<Rate> {
    let job = fio(path, span, more)?;
    let number = |v: &serde_json::Value| v.as_f64().unwrap_or(0.0);
    Some(Rate {
        per_s: number(&job["read"][field]),
        cores: (number(&job["usr_cpu"]) + number(&job["sys_cpu"])) / 100.0,
    })
}

fn fio_bulk(kib: u64, depth: u64) -> Vec<String> {
    vec![format!("--bs={kib}k"), format!("--iodepth={depth}")]
}

fn fio_rows(depth: u64, is_batched: bool) -> Vec<String> {
    let mut args = vec!["--bs=4k".into(), format!("--iodepth={depth}")];
    if is_batched {
        // As a decode step asks: all at once, and nothing more until all have landed.
        args.extend([format!("--iodepth_batch_submit={depth}"), format!("--iodepth_batch_complete_min={depth}")]);
    }
    args
}

fn our_experts(path: &Path, file_bytes: u64, options: &ReaderOptions, span: Duration) -> Rate {
    let reader = open_reader(path, options).expect("opened before");
    let cpu = cpu_seconds();
    let (bytes, seconds) = experts(&*reader, file_bytes, span);
    Rate { per_s: bytes as f64 / seconds, cores: (cpu_seconds() - cpu) / seconds }
}

fn our_rows(path: &Path, file_bytes: u64, options: &ReaderOptions, batch: usize, span: Duration) -> Rate {
    let reader = open_reader(path, options).expect("opened before");
    let table = TableLayout { layer: LayerIdx(1), offset: 1000, row_bytes: 264, rows: (file_bytes - 1000) / 264 };
    let tables = RowTables::new(reader, &[table], WINDOW_BLOCKS).expect("a table over the file");
    let cpu = cpu_seconds();
    let (done, seconds) = rows(&tables, batch, span);
    Rate { per_s: done as f64 / seconds, cores: (cpu_seconds() - cpu) / seconds }
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied().unwrap_or(0.0)
}

/// Five rounds of both in turns; one line with the medians.
fn in_turns(name: &str, unit: f64, mut ours: impl FnMut() -> Rate, mut theirs: impl FnMut() -> Option<Rate>) {
    let (mut a, mut b) = (Vec::new(), Vec::new());
    let mut ratios = Vec::new();
    for round in 0..6 {
        // The order changes each round: a drive with a budget favours whoever comes first.
        let (our, their) = if round % 2 == 0 {
            let our = ours();
            (our, theirs().unwrap_or_default())
        } else {
            let their = theirs().unwrap_or_default();
            (ours(), their)
        };
        // The first round warms both up.
        if round > 0 {
            ratios.push(our.per_s / their.per_s);
            a.push(our);
            b.push(their);
        }
    }
    let of = |rates: &[Rate], f: fn(&Rate) -> f64| median(rates.iter().map(f).collect());
    let (our, their) = (of(&a, |r| r.per_s), of(&b, |r| r.per_s));
    println!(
        "{name}: ds4 {:.3} ({:.3} cores), fio {:.3} ({:.3} cores); ratio of medians {:.3}, median of ratios {:.3}",
        our / unit,
        of(&a, |r| r.cores),
        their / unit,
        of(&b, |r| r.cores),
        our / their,
        median(ratios)
    );
}

/// ds4 as the probe tunes it against the best that fio finds.
fn compare(path: &Path, file_bytes: u64, span: Duration) {
    let base = ReaderOptions::default();
    let rates = match measure_now(path, &base) {
        Ok(rates) => rates,
        Err(error) => return println!("{error}"),
    };
    let tuned = rates.tune(&base);
    println!(
        "probe: pieces of {} KiB, {} under way, {:.3} GB/s; rows at depth {}, {:.0} reads/s; {:.0} ms",
        rates.bulk.piece_bytes >> 10,
        rates.bulk.depth,
        rates.bulk.gb_per_s,
        rates.rows.depth,
        rates.rows.reads_per_s,
        rates.probe_ms
    );
    let mut best = (0.0, fio_bulk(512, 16));
    for args in [(256, 16), (256, 32), (512, 8), (512, 16), (512, 32), (1024, 8), (1024, 16), (2970, 6)] {
        let args = fio_bulk(args.0, args.1);
        match fio_rate(path, span / 2, &args, "bw_bytes") {
            Some(rate) if rate.per_s > best.0 => best = (rate.per_s, args),
            Some(_) => {}
            None => return println!("fio does not run here; install it to compare"),
        }
    }
    let bulk = best.1;
    in_turns(
        &format!("experts GB/s (fio {})", bulk.join(" ")),
        1e9,
        || our_experts(path, file_bytes, &tuned, span),
        || fio_rate(path, span, &bulk, "bw_bytes"),
    );
    for (batch, depth, is_batched) in [(48, 48, false), (48, 48, true), (49_152, tuned.depth as u64, false)] {
        let args = fio_rows(depth, is_batched);
        in_turns(
            &format!("rows 1000/s, batches of {batch} (fio {})", args.join(" ")),
            1e3,
            || our_rows(path, file_bytes, &tuned, batch, span),
            || fio_rate(path, span, &args, "iops"),
        );
    }
}

fn bench_experts(path: &Path, file_bytes: u64, options: &ReaderOptions, span: Duration) {
    let reader = match open_reader(path, options) {
        Ok(reader) => reader,
        Err(error) => return println!("{error}"),
    };
    let cpu = cpu_seconds();
    let (bytes, seconds) = experts(&*reader, file_bytes, span);
    let cpu = cpu_seconds() - cpu;
    let gb = bytes as f64 / 1e9;
    let c = reader.counters().snapshot();
    println!(
        "experts {:?} direct={:<5} piece {:>4} KiB, {:>2} MiB under way, {} rings: {:6.3} GB/s, {:.3} core per GB/s, p50 {:.2} ms, p99 {:.2} ms",
        reader.kind(),
        reader.is_direct(),
        options.limits.piece_bytes >> 10,
        options.bytes_under_way_max >> 20,
        options.rings,
        gb / seconds,
        cpu / gb,
        c.latency.ms_p50,
        c.latency.ms_p99
    );
}

fn bench_rows(path: &Path, file_bytes: u64, options: &ReaderOptions, batch: usize, span: Duration) {
    let reader = match open_reader(path, options) {
        Ok(reader) => reader,
        Err(error) => return println!("{error}"),
    };
    let table = TableLayout { layer: LayerIdx(1), offset: 1000, row_bytes: 264, rows: (file_bytes - 1000) / 264 };
    let tables = RowTables::new(reader.clone(), &[table], WINDOW_BLOCKS).expect("a table over the file");
    let cpu = cpu_seconds();
    let (done, seconds) = rows(&tables, batch, span);
    let cpu = cpu_seconds() - cpu;
    println!(
        "rows {:?} direct={:<5} depth {:>3}, batch {batch:>5}: {:8.0} rows/s, {:7.3} ms a batch, {:.2} us processor a row, p50 {:.3} ms",
        reader.kind(),
        reader.is_direct(),
        options.depth,
        done as f64 / seconds,
        seconds * 1e3 * batch as f64 / done as f64,
        cpu * 1e6 / done as f64,
        reader.counters().snapshot().latency.ms_p50
    );
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let Some(path) = args.first() else {
        return println!("usage: cargo bench --bench reader_rate -- FILE [SECONDS [short|fio]]");
    };
    let path = Path::new(path);
    let span = Duration::from_secs_f64(args.get(1).and_then(|s| s.parse().ok()).unwrap_or(1.0));
    let file_bytes = std::fs::metadata(path).map_or(0, |m| m.len());
    if file_bytes < 64 << 20 {
        return println!("{} is missing or smaller than 64 MiB", path.display());
    }
    let base = ReaderOptions::default();
    let mode = args.get(2).map(String::as_str);
    if mode == Some("fio") {
        return compare(path, file_bytes, span);
    }
    if mode == Some("short") {
        bench_experts(path, file_bytes, &base, span);
        bench_rows(path, file_bytes, &base, 48, span);
        return bench_rows(path, file_bytes, &base, 49_152, span);
    }
    for (piece_kib, under_way_mib, rings) in
        [(128, 4, 1), (256, 8, 1), (512, 8, 1), (512, 16, 1), (512, 16, 2), (1024, 32, 1), (1024, 32, 2)]
    {
        let limits = PoolLimits { piece_bytes: piece_kib << 10, ..base.limits };
        let options = ReaderOptions { limits, rings, bytes_under_way_max: under_way_mib << 20, ..base };
        bench_experts(path, file_bytes, &options, span);
    }
    for (io, direct) in [
        (ReaderChoice::Uring, DirectChoice::Off),
        (ReaderChoice::Pread, DirectChoice::Auto),
        (ReaderChoice::Pread, DirectChoice::Off),
    ] {
        bench_experts(path, file_bytes, &ReaderOptions { io, direct, ..base }, span);
    }
    for io in [ReaderChoice::Uring, ReaderChoice::Pread] {
        for (batch, depth) in [(48, 48), (48, 128), (49_152, 32), (49_152, 128), (49_152, 256)] {
            bench_rows(path, file_bytes, &ReaderOptions { io, depth, ..base }, batch, span);
        }
    }
}
