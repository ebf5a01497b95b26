//! Search behind the IQ2_XXS encoder: which magnitude vector, signs, sub-block scale and block factor fit best.
//! Never approximates inside a group of 8: for any scale the chosen vector and signs are the best of all 256 x 128.
//! Surprising fact: for a group the best error as a function of the scale is a minimum of 256 parabolas that only a
//! dozen of them ever touch, so those are found once and every scale after that costs a table look-up.
//!
//! With magnitudes g, weights w and values x, storing s * g costs sum w x^2 - 2 s P + s^2 Q, where Q = sum w g^2 and
//! P = sum w |x| g, less twice the cheapest term if an odd number of values is negative: that sign is stored wrong.

use super::iq2_xxs::{GRID, SUBS, scale};
use super::superblock::{SuperBlock, TooLarge};
use half::f16;
use std::ops::Range;

/// What a block stores, unpacked.
pub struct GridBlock {
    pub d: f16,
    pub scales: [u8; SUBS],
    /// One grid entry a group of 8 values.
    pub entries: [u8; 32],
    /// Negative values of each group; their number is even.
    pub signs: [u8; 32],
}

/// Block factors tried.
const FACTORS: i32 = 36;

/// One group's choice: it saves 2 s `p` - s^2 `q` of the error at scale s.
#[derive(Clone, Copy, Default)]
struct Choice {
    p: f32,
    q: f32,
    entry: u8,
}

/// From scale `start` on, the four groups of a sub-block together save 2 s `p` - s^2 `q`.
#[derive(Clone, Copy)]
struct Segment {
    start: f32,
    p: f32,
    q: f32,
}

/// A change of one group's best choice at scale `at`.
struct Change {
    at: f32,
    p: f32,
    q: f32,
}

/// Entries whose sums are formed side by side.
const LANES: usize = 8;

/// Magnitudes as [entry / LANES][value of the group][entry % LANES].
static MAGNITUDES: [[[f32; LANES]; 8]; 256 / LANES] = {
    let mut table = [[[0.0; LANES]; 8]; 256 / LANES];
    let mut entry = 0;
    while entry < 256 {
        let mut i = 0;
        while i < 8 {
            table[entry / LANES][i][entry % LANES] = ((GRID[entry] >> (8 * i)) & 255) as f32;
            i += 1;
        }
        entry += 1;
    }
    table
};

/// Encodes a block.
pub fn fit(block: &SuperBlock) -> Result<GridBlock, TooLarge> {
    let mut out = GridBlock { d: f16::ZERO, scales: [0; SUBS], entries: [0; 32], signs: [0; 32] };
    if block.is_zero() {
        return Ok(out);
    }
    let groups = block.x.as_chunks().0.iter().zip(block.w.as_chunks().0);
    let mut pool = Vec::with_capacity(256);
    let hulls: Vec<Vec<Choice>> = groups.clone().map(|(x, w)| hull(x, w, &mut pool)).collect();
    let curves: Vec<Vec<Segment>> = hulls.as_chunks::<4>().0.iter().map(curve).collect();
    let wanted: Vec<f32> = curves.iter().map(|c| best_scale(c)).collect();
    let largest = wanted.iter().copied().fold(0.0, f32::max);
    // From a factor that leaves the largest code unused to one that clips the largest scale.
    let factor = |k: i32| largest * 4.0 / (16.5 - 0.25 * k as f32);
    let trial = |d: f32| Trial::new(block, &curves, &wanted, d);
    let mut best = trial(factor(0))?;
    for k in 1..FACTORS {
        if let Ok(next) = trial(factor(k)) {
            best = best.better(next);
        }
    }
    if let Ok(refitted) = trial(best.refitted_factor(&curves)) {
        best = best.better(refitted);
    }
    if best.saved <= 0.0 {
        // Values so small that the smallest factor overshoots them: zeros are closer.
        return Ok(out);
    }
    (out.d, out.scales) = (best.stored, best.scales);
    for (group, (x, w)) in groups.enumerate() {
        let s = scale(best.d, u32::from(best.scales[group / 4]));
        out.entries[group] = choice_at(&hulls[group], s).entry;
        out.signs[group] = signs(x, w, out.entries[group]);
    }
    Ok(out)
}

fn negatives(x: &[f32; 8]) -> u8 {
    x.iter().enumerate().map(|(i, v)| u8::from(*v < 0.0) << i).sum()
}

/// P and Q of every entry for one group.
struct Sums {
    p: [f32; 256],
    q: [f32; 256],
}

impl Sums {
    fn new(x: &[f32; 8], w: &[f32; 8]) -> Self {
        let odd = if negatives(x).count_ones() % 2 == 1 { 1.0 } else { 0.0 };
        let wx: [f32; 8] = std::array::from_fn(|i| w[i] * x[i].abs());
        let mut sums = Sums { p: [0.0; 256], q: [0.0; 256] };
        let outputs = sums.p.as_chunks_mut::<LANES>().0.iter_mut().zip(sums.q.as_chunks_mut::<LANES>().0);
        for (magnitudes, (p_out, q_out)) in MAGNITUDES.iter().zip(outputs) {
            let (mut p, mut q, mut cheapest) = ([0f32; LANES], [0f32; LANES], [f32::INFINITY; LANES]);
            for i in 0..8 {
                for l in 0..LANES {
                    let g = magnitudes[i][l];
                    let gain = wx[i] * g;
                    p[l] += gain;
                    q[l] += w[i] * g * g;
                    cheapest[l] = if gain < cheapest[l] { gain } else { cheapest[l] };
                }
            }
            for l in 0..LANES {
                p_out[l] = p[l] - 2.0 * odd * cheapest[l];
                q_out[l] = q[l];
            }
        }
        sums
    }

    fn choice(&self, entry: usize) -> Choice {
        Choice { p: self.p[entry], q: self.q[entry], entry: entry as u8 }
    }

    /// First entry with the largest 2 p - s q; for s = 0 the one with the largest p.
    fn best_at(&self, s: f32) -> Choice {
        let value = |entry: usize| 2.0 * self.p[entry] - s * self.q[entry];
        let mut lanes = [f32::NEG_INFINITY; LANES];
        for entry in 0..256 {
            let v = value(entry);
            let lane = &mut lanes[entry % LANES];
            *lane = if v > *lane { v } else { *lane };
        }
        let top = lanes.into_iter().fold(f32::NEG_INFINITY, f32::max);
        let entry = (0..256).find(|entry| value(*entry) == top);
        self.choice(entry.expect("the largest of 256 finite values is one of them"))
    }

    /// Appends the choices above either chord; few are, so lanes are first looked at together.
    fn collect_above(&self, a: &Chord, b: &Chord, pool: &mut Vec<Choice>) {
        for start in (0..256).step_by(LANES) {
            let above: [bool; LANES] = std::array::from_fn(|l| {
                let (p, q) = (2.0 * self.p[start + l], self.q[start + l]);
                (p - a.s * q > a.level) | (p - b.s * q > b.level)
            });
            if above.contains(&true) {
                let found = (0..LANES).filter(|l| above[*l]).map(|l| self.choice(start + l));
                pool.extend(found);
            }
        }
    }
}

/// The choices of a group that are best at some scale, from small scales to large ones. `pool` is scratch space.
fn hull(x: &[f32; 8], w: &[f32; 8], pool: &mut Vec<Choice>) -> Vec<Choice> {
    let sums = Sums::new(x, w);
    let first = sums.best_at(0.0);
    // Entry 0 is all eights: no other has a smaller q.
    let last = sums.choice(0);
    let mut hull = Vec::with_capacity(24);
    if first.q > last.q {
        hull.push(first);
        let top = sums.best_at(crossing(first, last));
        if last.q < top.q && top.q < first.q {
            // Whatever else is ever best lies above one of the two chords to the top.
            let (left, right) = (Chord::new(first, top), Chord::new(top, last));
            pool.clear();
            sums.collect_above(&left, &right, pool);
            let all = 0..pool.len();
            left.fill(pool, all.clone(), &mut hull);
            hull.push(top);
            right.fill(pool, all, &mut hull);
        }
    }
    hull.push(last);
    hull
}

/// Two choices that are equally good at scale `s`, where both save s times `level`.
#[derive(Clone, Copy)]
struct Chord {
    from: Choice,
    to: Choice,
    s: f32,
    level: f32,
}

impl Chord {
    fn new(from: Choice, to: Choice) -> Self {
        let s = crossing(from, to);
        Chord { from, to, s, level: 2.0 * from.p - s * from.q }
    }

    fn is_below(&self, c: &Choice) -> bool {
        c.q < self.from.q && c.q > self.to.q && 2.0 * c.p - self.s * c.q > self.level
    }

    /// Appends what lies on the hull strictly between the ends, out of `pool[range]`.
    fn fill(&self, pool: &mut Vec<Choice>, range: Range<usize>, hull: &mut Vec<Choice>) {
        let start = pool.len();
        let mut top: Option<(f32, Choice)> = None;
        for i in range {
            let c = pool[i];
            if self.is_below(&c) {
                pool.push(c);
                let value = 2.0 * c.p - self.s * c.q;
                if top.is_none_or(|t| value > t.0) {
                    top = Some((value, c));
                }
            }
        }
        if let Some((_, top)) = top {
            let kept = start..pool.len();
            Chord::new(self.from, top).fill(pool, kept.clone(), hull);
            hull.push(top);
            Chord::new(top, self.to).fill(pool, kept, hull);
        }
        pool.truncate(start);
    }
}

/// Scale from which on `b` (smaller q) is better than `a`.
fn crossing(a: Choice, b: Choice) -> f32 {
    2.0 * (a.p - b.p) / (a.q - b.q)
}

fn choice_at(hull: &[Choice], s: f32) -> Choice {
    let value = |c: &Choice| 2.0 * c.p - s * c.q;
    let mut best = hull[0];
    for choice in &hull[1..] {
        if value(choice) > value(&best) {
            best = *choice;
        }
    }
    best
}

/// The joint curve of a sub-block's four groups.
fn curve(hulls: &[Vec<Choice>; 4]) -> Vec<Segment> {
    let mut changes = Vec::with_capacity(64);
    let mut sum = Segment { start: 0.0, p: 0.0, q: 0.0 };
    for hull in hulls {
        sum.p += hull[0].p;
        sum.q += hull[0].q;
        changes.extend(hull.windows(2).map(|c| Change {
            at: crossing(c[0], c[1]),
            p: c[1].p - c[0].p,
            q: c[1].q - c[0].q,
        }));
    }
    changes.sort_by(|a, b| a.at.total_cmp(&b.at));
    let mut segments = Vec::with_capacity(changes.len() + 1);
    segments.push(sum);
    for change in changes {
        sum = Segment { start: change.at, p: sum.p + change.p, q: sum.q + change.q };
        segments.push(sum);
    }
    segments
}

fn saved(segment: Segment, s: f32) -> f32 {
    s * (2.0 * segment.p - s * segment.q)
}

fn segment_at(curve: &[Segment], s: f32) -> Segment {
    curve[curve.partition_point(|segment| segment.start <= s).max(1) - 1]
}

/// The scale that saves most: inside a segment the parabola peaks at p / q.
fn best_scale(curve: &[Segment]) -> f32 {
    let mut best = (0.0, 0.0);
    for (i, segment) in curve.iter().enumerate() {
        let end = curve.get(i + 1).map_or(f32::INFINITY, |next| next.start);
        let s = (segment.p / segment.q).max(segment.start).min(end);
        let gain = saved(*segment, s);
        if gain > best.0 {
            best = (gain, s);
        }
    }
    best.1
}

/// One block factor with the best 4-bit scales under it.
#[derive(Clone, Copy)]
struct Trial {
    saved: f32,
    stored: f16,
    d: f32,
    scales: [u8; SUBS],
}

impl Trial {
    fn new(block: &SuperBlock, curves: &[Vec<Segment>], wanted: &[f32], d: f32) -> Result<Self, TooLarge> {
        let (stored, d) = block.store(d)?;
        let mut trial = Trial { saved: 0.0, stored, d, scales: [0; SUBS] };
        for (sub, curve) in curves.iter().enumerate() {
            let below = ((wanted[sub] * 4.0 / d - 0.5) as i32).clamp(0, 15);
            let mut best = (f32::NEG_INFINITY, 0);
            for code in (below - 1).max(0)..=(below + 2).min(15) {
                let s = scale(d, code as u32);
                let gain = saved(segment_at(curve, s), s);
                if gain > best.0 {
                    best = (gain, code as u8);
                }
            }
            trial.saved += best.0;
            trial.scales[sub] = best.1;
        }
        Ok(trial)
    }

    fn better(self, other: Trial) -> Trial {
        if other.saved > self.saved { other } else { self }
    }

    /// The factor that fits best with all choices and scales kept.
    fn refitted_factor(&self, curves: &[Vec<Segment>]) -> f32 {
        let (mut p, mut q) = (0.0, 0.0);
        for (curve, code) in curves.iter().zip(&self.scales) {
            let unit = scale(1.0, u32::from(*code));
            let segment = segment_at(curve, self.d * unit);
            p += unit * segment.p;
            q += unit * unit * segment.q;
        }
        p / q
    }
}

/// Signs of a group; where an odd number is negative, the flip that costs least under the chosen magnitudes is applied.
fn signs(x: &[f32; 8], w: &[f32; 8], entry: u8) -> u8 {
    let mut signs = negatives(x);
    if signs.count_ones() % 2 == 1 {
        let magnitudes = GRID[usize::from(entry)].to_le_bytes();
        let cost = |i: usize| w[i] * x[i].abs() * f32::from(magnitudes[i]);
        let mut cheapest = 0;
        for i in 1..8 {
            if cost(i) < cost(cheapest) {
                cheapest = i;
            }
        }
        signs ^= 1 << cheapest;
    }
    signs
}
