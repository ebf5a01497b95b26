//! Whether an expert should lie in one record instead of three extents: random V4.1 Q2 experts read both ways from the same file.
//! Run: `cargo bench --bench packed_layout -- FILE [ROUNDS]`; the file should be larger than a gigabyte and of any content.
//! Surprising fact: the rounds alternate, because a shared drive drifts by more than the two layouts differ.

use std::path::Path;
use std::time::Instant;

use ds4::storage::layout::Extent;
use ds4::storage::reader::*;
use ds4::units::ExpertKey;

/// Gate, up and down slices of one V4.1 Q2 expert (spec 2.4).
const PARTS: [u64; 3] = [3_041_280, 3_041_280, 3_870_720];
const EXPERT: u64 = PARTS[0] + PARTS[1] + PARTS[2];
/// Experts of one round.
const EXPERTS_A_ROUND: u64 = 48;
/// Experts asked for together: up to two layers of a decode step.
const DEPTHS: [u64; 5] = [1, 2, 4, 6, 12];

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 20) % n
    }
}

/// The extents of expert `e` of `experts`: three tensors one behind the other, as in published files, or one record.
fn extents(e: u64, experts: u64, is_packed: bool) -> Vec<Extent> {
    if is_packed {
        return vec![Extent { offset: e * EXPERT, len: EXPERT }];
    }
    let mut start = 0;
    PARTS
        .iter()
        .map(|len| {
            let extent = Extent { offset: start + e * len, len: *len };
            start += experts * len;
            extent
        })
        .collect()
}

/// Reads `EXPERTS_A_ROUND` random experts, `depth` at a time; milliseconds an expert.
fn round(reader: &dyn Reader, random: &mut Random, experts: u64, depth: u64, is_packed: bool) -> f64 {
    let lens: &[u64] = if is_packed { &[EXPERT] } else { &PARTS };
    let region =
        |len: &u64| DestRegion::anonymous(reader.alignment().region_bytes_max(*len).expect("small")).expect("memory");
    let mut regions: Vec<DestRegion> = (0..depth).flat_map(|_| lens.iter().map(region)).collect();
    // Pages are touched before the clock runs.
    regions.iter_mut().for_each(|r| r.bytes_mut().fill(1));
    let gather = Gather::new();
    let begun = Instant::now();
    for _ in 0..EXPERTS_A_ROUND / depth {
        let wanted: Vec<Extent> = (0..depth).flat_map(|_| extents(random.below(experts), experts, is_packed)).collect();
        let label = ReadLabel::Expert { key: ExpertKey::new(0, 0), part: ExpertPart::Gate };
        let batch = wanted.iter().zip(regions.drain(..)).enumerate().map(|(i, (extent, region))| ReadRequest {
            extent: *extent,
            lane: Lane::Bulk,
            class: ReadClass::Demand,
            label: label.clone(),
            region,
            tag: i as u64,
        });
        let batch: Vec<_> = batch.collect();
        let mut back: Vec<Option<DestRegion>> = batch.iter().map(|_| None).collect();
        reader.submit(batch, gather.clone());
        for _ in 0..back.len() {
            let (tag, result) = gather.next();
            back[tag as usize] = Some(result.expect("the drive reads").region);
        }
        regions.extend(back.into_iter().flatten());
    }
    begun.elapsed().as_secs_f64() * 1e3 / (EXPERTS_A_ROUND / depth * depth) as f64
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let Some(path) = args.first().map(Path::new) else {
        return println!("usage: cargo bench --bench packed_layout -- FILE [ROUNDS]");
    };
    let rounds: usize = args.get(1).and_then(|s| s.parse().ok()).unwrap_or(9);
    let experts = std::fs::metadata(path).map_or(0, |m| m.len()) / EXPERT;
    if experts < 100 {
        return println!("{} is missing or smaller than a gigabyte", path.display());
    }
    for direct in [DirectChoice::On, DirectChoice::Off] {
        let reader = match open_reader(path, &ReaderOptions { direct, ..ReaderOptions::default() }) {
            Ok(reader) => reader,
            Err(error) => {
                println!("{error}");
                continue;
            }
        };
        println!("{} experts, {:?}, direct={}", experts, reader.kind(), reader.is_direct());
        let mut random = Random(11);
        for depth in DEPTHS {
            let (mut apart, mut packed, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
            for turn in 0..rounds {
                // Who goes first changes from round to round.
                let first = turn % 2 == 0;
                let a = round(&*reader, &mut random, experts, depth, first);
                let b = round(&*reader, &mut random, experts, depth, !first);
                let (one, three) = if first { (a, b) } else { (b, a) };
                packed.push(one);
                apart.push(three);
                ratios.push(three / one);
            }
            let (three, one, ratio) = (median(&mut apart), median(&mut packed), median(&mut ratios));
            println!(
                "{depth:>2} experts at once: three extents {three:.2} ms an expert ({:.2} GB/s), one record {one:.2} ms ({:.2} GB/s), ratio {ratio:.3} ({:.3} to {:.3})",
                EXPERT as f64 / three / 1e6,
                EXPERT as f64 / one / 1e6,
                ratios[rounds / 4],
                ratios[rounds - 1 - rounds / 4]
            );
        }
    }
}
