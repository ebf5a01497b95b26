//! Cases of attention with both orders of sums, and rows of a batch against the same rows alone.
//! Never gives fast sums keys that they do not take: those are in cases of their own, which the exact kernels must have answered. Surprising
//! fact: fast sums are held to a bound below the distance of the processor's own sums from F64 times a hundred.

use ds4::backend::ops::Sums;
use ds4::backend::{Backend, ops};

use crate::case::{Case, Clock, Rig};
use crate::kernels_common::Rng;
use crate::rows::{down, up, up_ids, wait};

/// Fast sums against the processor's: both are F32, so what is between them are last bits of scores, whose error the softmax makes larger.
const FAST_LIMIT: f64 = 1e-11;

/// Sizes of one attention.
#[derive(Clone, Copy)]
struct Shape {
    rows: usize,
    heads: usize,
    width: usize,
    window_slots: usize,
    window_len: usize,
    k: usize,
    first_pos: usize,
}

/// Compressed rows that there are.
const GROUPS: usize = 700;

struct Attend {
    shape: Shape,
    /// BF16 values as keys.
    is_bf16: bool,
    sums: Sums,
    /// Queries, window, compressed rows, sinks.
    v: [Vec<f32>; 4],
    picks: Vec<i32>,
}

impl Attend {
    fn new(rng: &mut Rng, shape: Shape, is_bf16: bool, sums: Sums) -> Self {
        let Shape { rows, heads, width, window_slots, k, first_pos, .. } = shape;
        let mut picks = Vec::new();
        for r in 0..rows {
            // The second of some rows has none.
            let known = (first_pos + r + 1).min(GROUPS).min(k) * usize::from(r != 1 || rows == 1);
            let step = GROUPS.checked_div(known).unwrap_or(1);
            picks.extend((0..k).map(|i| if i < known { (i * step) as i32 } else { -1 }));
        }
        let mut keys = |rows: usize| {
            let mut keys = rng.normals(rows * width);
            if is_bf16 {
                keys.iter_mut().for_each(|v| *v = f32::from_bits(v.to_bits() & 0xffff_0000));
            }
            keys
        };
        let (window, compressed) = (keys(window_slots), keys(GROUPS));
        let v = [rng.normals(rows * heads * width), window, compressed, rng.normals(heads)];
        Self { shape, is_bf16, sums, v, picks }
    }

    /// Outputs of rows `first..first + count` on `b`.
    fn rows<B: Backend>(&self, b: &B, (first, count): (usize, usize), clock: &mut Clock) -> Vec<f32> {
        let Shape { heads, width, window_slots, window_len, k, first_pos, .. } = self.shape;
        let part = first * heads * width..(first + count) * heads * width;
        let (q, window) = (up(b, &self.v[0][part.clone()]), up(b, &self.v[1]));
        let (compressed, sinks) = (up(b, &self.v[2]), up(b, &self.v[3]));
        let selected = up_ids(b, &self.picks[first * k..(first + count) * k]);
        let mut out = up(b, &vec![f32::NAN; part.len()]);
        let op = |out: &mut B::Buf| {
            let compressed = (k > 0).then_some(ops::Compressed { rows: &compressed, selected: &selected, k });
            let op = ops::Attention {
                q: &q,
                window: &window,
                window_slots,
                window_len,
                compressed,
                sinks: &sinks,
                rows: count,
                heads,
                width,
                first_pos: first_pos + first,
                scale: 1.0 / (width as f32).sqrt(),
                keys_are_bf16: self.is_bf16,
            };
            b.attention(op, out).unwrap();
        };
        op(&mut out);
        let result = down(b, &out);
        clock.time(|_| op(&mut out), || wait(b, &sinks));
        result
    }
}

impl Case for Attend {
    fn op(&self) -> &'static str {
        "attention"
    }

    fn shape(&self) -> String {
        let Shape { rows, heads, width, window_len, k, first_pos, .. } = self.shape;
        let sums = if self.sums == Sums::Fast { ", fast" } else { "" };
        format!("{rows}x{heads}x{width}, {window_len}+{k} at {first_pos}{sums}")
    }

    fn limit(&self) -> f64 {
        if self.sums == Sums::Fast && self.is_bf16 { FAST_LIMIT } else { 1e-13 }
    }

    fn bytes(&self) -> usize {
        // Each key once a row.
        let Shape { rows, heads, width, window_len, k, first_pos, .. } = self.shape;
        4 * width * rows * (2 * heads + window_len.min(first_pos + 1) + k.min(first_pos + 1))
    }

    fn is_of_a_token(&self) -> bool {
        self.shape.rows == 1
    }

    fn parts(&self) -> Vec<(&'static str, usize)> {
        // Two launches where scores are spread.
        let keys = 4 * self.shape.width * (self.shape.window_len + self.shape.k);
        let is_spread = self.sums == Sums::Fast && self.is_bf16 && self.shape.rows == 1;
        if is_spread { vec![("attention_scores", keys), ("attention_values", keys)] } else { Vec::new() }
    }

    fn sums(&self) -> Sums {
        self.sums
    }

    fn run<B: Backend>(&self, b: &B, clock: &mut Clock) -> Vec<Vec<f32>> {
        vec![self.rows(b, (0, self.shape.rows), clock)]
    }
}

/// Each row of a batch alone, and all but the first one together: the bits of the whole batch.
fn check_rows_alone(rig: &mut Rig, shape: Shape) {
    let case = Attend::new(&mut rig.rng, shape, true, Sums::Fast);
    if !rig.is_within(&case) {
        return;
    }
    let Some((_, gpu)) = rig.fast_sums("attention") else { return };
    let before = gpu.attention_counts().1;
    let rows = |first, count| case.rows(gpu, (first, count), &mut Clock::stopped());
    let all = rows(0, shape.rows);
    let mut apart: Vec<f32> = (0..shape.rows).flat_map(|r| rows(r, 1)).collect();
    let is_same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
    let mut good = is_same(&all, &apart);
    apart.truncate(shape.heads * shape.width);
    apart.extend(rows(1, shape.rows - 1));
    good &= is_same(&all, &apart);
    // Not one of them went to the exact kernels.
    good &= gpu.attention_counts().1 - before == 2 + shape.rows as u64;
    rig.note(&format!("attention: rows of {} alone", case.shape()), good);
}

pub fn cases(rig: &mut Rig) {
    let shape = |(rows, heads, width, window_slots, window_len, k, first_pos)| Shape {
        rows,
        heads,
        width,
        window_slots,
        window_len,
        k,
        first_pos,
    };
    let exact = [
        (1, 64, 512, 640, 128, 512, 5000),
        (1, 64, 512, 640, 128, 0, 5000),
        (1, 64, 512, 640, 128, 512, 3),
        (5, 4, 64, 24, 16, 8, 13),
        (3, 2, 20, 9, 4, 0, 0),
        (15, 64, 512, 640, 128, 512, 1000),
        (16, 64, 512, 640, 128, 512, 1000),
        (17, 64, 512, 640, 128, 512, 0),
        (33, 32, 512, 200, 100, 0, 40),
        (70, 64, 512, 640, 128, 512, 600),
    ];
    for sizes in exact {
        let case = Attend::new(&mut rig.rng, shape(sizes), false, Sums::Exact);
        rig.check(&case);
    }
    // One to many rows; the first ones of a sequence; no compressed rows; few heads; an odd window; V4 Flash and Pro with rows rounded throughout.
    let fast = [
        (1, 64, 512, 640, 128, 512, 5000),
        (1, 64, 512, 640, 128, 0, 5000),
        (1, 64, 512, 640, 128, 512, 0),
        (2, 64, 512, 640, 128, 512, 300),
        (7, 64, 512, 640, 128, 512, 0),
        (7, 64, 512, 640, 128, 0, 125),
        (64, 64, 512, 640, 128, 512, 5000),
        (64, 64, 512, 640, 128, 512, 0),
        (40, 64, 512, 640, 128, 0, 100),
        (33, 64, 512, 640, 32, 32, 300),
        (512, 64, 512, 640, 128, 512, 1000),
        (3, 16, 512, 200, 100, 0, 40),
        (300, 16, 512, 700, 100, 61, 40),
        (33, 128, 512, 640, 128, 512, 700),
    ];
    for sizes in fast {
        let case = Attend::new(&mut rig.rng, shape(sizes), true, Sums::Fast);
        rig.check(&case);
    }
    // Taken by the exact kernels: keys of more bits, another width, heads that fill no tile, more keys than a block holds.
    let refused = [
        ((2, 64, 512, 640, 128, 512, 300), false),
        ((40, 64, 512, 640, 128, 512, 300), false),
        ((5, 16, 64, 24, 16, 8, 13), true),
        ((2, 8, 512, 640, 128, 512, 300), true),
        ((2, 128, 512, 640, 128, 1024, 2000), true),
    ];
    for (sizes, is_bf16) in refused {
        let before = rig.fast_sums("attention").map(|(_, gpu)| gpu.attention_counts().1);
        let case = Attend::new(&mut rig.rng, shape(sizes), is_bf16, Sums::Fast);
        rig.check(&case);
        if let Some((_, gpu)) = rig.fast_sums("attention") {
            let is_exact = before == Some(gpu.attention_counts().1);
            rig.note(&format!("attention: {} not on tensor cores", case.shape()), is_exact);
        }
    }
    for sizes in [
        (33, 64, 512, 640, 32, 32, 300),
        (40, 64, 512, 640, 128, 512, 0),
        (70, 64, 512, 640, 128, 512, 600),
        (140, 16, 512, 640, 128, 0, 90),
    ] {
        check_rows_alone(rig, shape(sizes));
    }
}
