//! Cases of several experts on rows of their own: batches of every kind, rows that several experts share.
//! Never lets an expert have a row twice. Surprising fact: sums begin at numbers, so a row that is added to out of turn shows.

use ds4::backend::cpu::matmul::Arithmetic;
use ds4::backend::{Backend, SharedBytes, ops};
use ds4::quant::QuantType;

use crate::case::{Case, Clock, Rig};
use crate::kernels_common::weights;
use crate::rows::{down, up, up_ids};

/// Experts with weights of their own: more than a second-level cache holds at the widths of a model.
const DISTINCT_MAX: usize = 10;

struct Swept {
    types: [QuantType; 2],
    /// Rows of each expert.
    counts: Vec<usize>,
    hidden: usize,
    width: usize,
    room: usize,
    arithmetic: Arithmetic,
    /// Gate, up and down; expert i has those of number i of them, from the start again.
    w: Vec<[SharedBytes; 3]>,
    x: Vec<f32>,
    sums: Vec<f32>,
    weights: Vec<f32>,
    /// Of each assignment.
    row_ids: Vec<i32>,
    places: Vec<i32>,
}

impl Case for Swept {
    fn op(&self) -> &'static str {
        "experts_rows"
    }

    fn shape(&self) -> String {
        let [first, second] = self.types;
        let most = self.counts.iter().max().unwrap_or(&0);
        let mode = if self.arithmetic == Arithmetic::Fast { "" } else { " exact" };
        let (count, all) = (self.counts.len(), self.row_ids.len());
        format!("{count} of {}x{}, {first}, {second}, {all} rows, {most} at most{mode}", self.width, self.hidden)
    }

    fn limit(&self) -> f64 {
        // The C library's exp in the SwiGLU may move a code of the second product by one.
        1e-7
    }

    fn bytes(&self) -> usize {
        let of = |i: usize| self.w[i % self.w.len()].iter().map(|w| w.as_slice().len()).sum::<usize>();
        (0..self.counts.len()).map(of).sum::<usize>() + 4 * self.row_ids.len() * (2 * self.hidden + 2 * self.width)
    }

    fn is_of_a_token(&self) -> bool {
        false
    }

    fn arithmetic(&self) -> Arithmetic {
        self.arithmetic
    }

    fn run<B: Backend>(&self, b: &B, clock: &mut Clock) -> Vec<Vec<f32>> {
        let (hidden, width, room) = (self.hidden, self.width, self.room);
        let shapes = [(self.types[0], width, hidden), (self.types[0], width, hidden), (self.types[1], hidden, width)];
        let load = |w: &[SharedBytes; 3]| -> [B::Mat; 3] {
            std::array::from_fn(|i| b.load(shapes[i].0, shapes[i].1, shapes[i].2, w[i].clone()).unwrap())
        };
        let mats: Vec<_> = self.w.iter().map(load).collect();
        let (x, weights) = (up(b, &self.x), up(b, &self.weights));
        let (row_ids, places) = (up_ids(b, &self.row_ids), up_ids(b, &self.places));
        let mut sums = up(b, &self.sums);
        let lens = [hidden, width, width, hidden, 1, hidden, hidden];
        let [mut xs, mut gate, mut upper, mut y, mut ws, mut before, mut after] =
            lens.map(|len| up(b, &vec![f32::NAN; room * len]));
        let mut op = |sums: &mut B::Buf| {
            let (mut experts, mut begin) = (Vec::new(), 0);
            for ([gate, up, down], count) in mats.iter().cycle().zip(&self.counts) {
                let assigned = begin..begin + count;
                begin += count;
                experts.push(ops::SweptExpert { gate: b.view(gate), up: b.view(up), down: b.view(down), assigned });
            }
            let op = ops::ExpertsRows {
                x: &x,
                rows: &row_ids,
                weights: &weights,
                places: &places,
                experts: &experts,
                hidden,
                width,
                limit: 10.0,
                room,
            };
            let (x, gate, up, y) = (&mut xs, &mut gate, &mut upper, &mut y);
            let work = ops::SweptWork { x, gate, up, y, weights: &mut ws, before: &mut before, after: &mut after };
            b.experts_rows(op, work, sums).unwrap();
        };
        op(&mut sums);
        let result = down(b, &sums);
        clock.time(|_| op(&mut sums), || _ = b.download(&x, 0, &mut [0.0]));
        vec![result]
    }
}

impl Rig {
    fn swept(
        &mut self,
        types: [QuantType; 2],
        (counts, rows, room): (&[usize], usize, usize),
        (hidden, width): (usize, usize),
        arithmetic: Arithmetic,
    ) {
        let rng = &mut self.rng;
        let mut make = |ty, rows, cols| SharedBytes::from(weights(rng, ty, rows, cols));
        let w = counts
            .iter()
            .take(DISTINCT_MAX)
            .map(|_| [make(types[0], width, hidden), make(types[0], width, hidden), make(types[1], hidden, width)]);
        let w = w.collect();
        let all: usize = counts.iter().sum();
        // Every third row from a start of the expert's own, so that neighbours share rows.
        let of_expert = |(i, count): (usize, &usize)| {
            let mut rows: Vec<i32> = (0..*count).map(|r| ((5 * i + r) % rows) as i32).collect();
            rows.sort_unstable();
            rows
        };
        let row_ids: Vec<i32> = counts.iter().enumerate().flat_map(of_expert).collect();
        let places = (0..all as i32).rev().collect();
        let (x, sums, weights) =
            (self.rng.normals(rows * hidden), self.rng.normals(rows * hidden), self.rng.normals(all));
        let counts = counts.to_vec();
        self.check(&Swept { types, counts, hidden, width, room, arithmetic, w, x, sums, weights, row_ids, places });
    }
}

pub fn cases(rig: &mut Rig) {
    use Arithmetic::{Fast, Quality};
    use QuantType::{IQ2_XXS, MXFP4, Q2_K, Q3_K, Q4_K, Q6_K, Q8_0};
    let few: [usize; 150] = std::array::from_fn(|i| 1 + 7 * i % 23);
    let many: [usize; 20] = std::array::from_fn(|i| 20 + 7 * i);
    let all = [[IQ2_XXS, Q2_K], [Q4_K, Q4_K], [Q3_K, Q6_K], [Q6_K, Q3_K], [Q8_0, Q8_0], [MXFP4, MXFP4], [Q8_0, Q4_K]];
    for types in all {
        // Experts that share a batch, that fill one, that are cut; more than a launch takes; too few rows for tiles.
        rig.swept(types, (&[130, 1, 64, 65, 129, 33, 500], 512, 300), (512, 256), Fast);
        rig.swept(types, (&many, 200, 1000), (256, 512), Fast);
        rig.swept(types, (&[3, 9, 1], 12, 16), (512, 256), Fast);
        // Few rows each: one expert, all counts up to what tiles begin with, more experts than a launch takes, and less room than it would.
        for count in [1, 2, 7, 8, 9, 16, 17] {
            rig.swept(types, (&[count], 20, 32), (256, 512), Fast);
        }
        rig.swept(types, (&few, 48, 2000), (512, 256), Fast);
        rig.swept(types, (&few, 48, 40), (256, 256), Fast);
    }
    rig.swept([Q8_0, Q8_0], (&[40, 30], 64, 64), (512, 256), Fast);
    rig.swept([Q2_K, Q2_K], (&[40, 30], 64, 64), (512, 256), Quality);
    // Experts of a model with many and with few.
    rig.swept([IQ2_XXS, Q2_K], (&[128, 120, 136, 128, 130, 126, 140, 117], 1024, 1024), (5120, 2304), Fast);
    rig.swept([IQ2_XXS, Q2_K], (&[512], 512, 512), (5120, 2304), Fast);
    // Experts of a prompt of 128 rows, and of 512, of a model with 384.
    for types in [[IQ2_XXS, Q2_K], [Q4_K, Q4_K], [Q8_0, Q8_0], [MXFP4, MXFP4], [Q3_K, Q6_K]] {
        let counts: [usize; 40] = std::array::from_fn(|i| [1, 2, 3, 2, 4, 1, 2, 3][i % 8]);
        rig.swept(types, (&counts, 128, 512), (5120, 2304), Fast);
    }
    for types in [[IQ2_XXS, Q2_K], [Q4_K, Q4_K]] {
        let counts: [usize; 40] = std::array::from_fn(|i| [8, 5, 11, 7, 9, 8, 14, 2][i % 8]);
        rig.swept(types, (&counts, 512, 512), (5120, 2304), Fast);
    }
    // Blocks of 32: columns that fill no step of tiles, and experts of a model.
    for types in [[Q8_0, MXFP4], [MXFP4, Q8_0]] {
        rig.swept(types, (&[31, 97, 402, 2], 512, 540), (480, 288), Fast);
        rig.swept(types, (&[128, 120, 136, 127, 130, 126, 141, 117], 1024, 1030), (5120, 2304), Fast);
    }
}
