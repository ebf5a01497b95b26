//! Products of every weight type at the shapes of the model, in both arithmetics, and their edges.
//! Never times a matrix that stays in a cache: copies of it take turns. Surprising fact: limits are far below what rounding allows, since
//! sums run in the CPU's order.

use ds4::backend::cpu::matmul::Arithmetic;
use ds4::backend::{Backend, SharedBytes, ops};
use ds4::quant::QuantType;

use crate::case::{Case, Clock, Rig};
use crate::kernels_common::{WEIGHT_TYPES, weights};
use crate::rows::{down, up};

/// Weights that take turns under the clock: several times a second-level cache of 60 MB.
const TURN_BYTES: usize = 300 << 20;

struct Product {
    ty: QuantType,
    outputs: usize,
    cols: usize,
    rows: usize,
    groups: usize,
    arithmetic: Arithmetic,
    w: SharedBytes,
    x: Vec<f32>,
}

impl Case for Product {
    fn op(&self) -> &'static str {
        "matmul"
    }

    fn shape(&self) -> String {
        let groups = if self.groups > 1 { format!(" in {} groups", self.groups) } else { String::new() };
        let mode = if self.arithmetic == Arithmetic::Fast { "" } else { " exact" };
        format!("{} {}x{}{groups}, {} rows{mode}", self.ty, self.outputs, self.cols, self.rows)
    }

    fn limit(&self) -> f64 {
        // The order of sums is the CPU's: nothing may differ.
        0.0
    }

    fn bytes(&self) -> usize {
        self.w.as_slice().len() + 4 * self.rows * (self.groups * self.cols + self.outputs)
    }

    fn is_of_a_token(&self) -> bool {
        self.rows == 1
    }

    fn arithmetic(&self) -> Arithmetic {
        self.arithmetic
    }

    fn run<B: Backend>(&self, b: &B, clock: &mut Clock) -> Vec<Vec<f32>> {
        let load = || b.load(self.ty, self.outputs, self.cols, self.w.clone()).unwrap();
        let x = up(b, &self.x);
        let mut out = up(b, &vec![f32::NAN; self.rows * self.outputs]);
        let mut mats = vec![load()];
        let op = |w: &B::Mat, out: &mut B::Buf| {
            b.matmul(ops::Matmul { w: b.view(w), x: &x, rows: self.rows, groups: self.groups }, out).unwrap();
        };
        op(&mats[0], &mut out);
        let result = down(b, &out);
        if b.name() == "cuda" {
            let copies = (TURN_BYTES / self.w.as_slice().len()).clamp(1, 64);
            mats.extend((1..copies).map(|_| load()));
        }
        let wait = || _ = b.download(&x, 0, &mut [0.0]);
        clock.time(|i| op(&mats[i % mats.len()], &mut out), wait);
        vec![result]
    }
}

/// The same rows with two matrices.
struct Pair {
    types: [QuantType; 2],
    outputs: [usize; 2],
    cols: usize,
    rows: usize,
    w: [SharedBytes; 2],
    x: Vec<f32>,
}

impl Case for Pair {
    fn op(&self) -> &'static str {
        "matmul_pair"
    }

    fn shape(&self) -> String {
        let ([a, b], [m, n]) = (self.types, self.outputs);
        format!("{a} {m}x{0}, {b} {n}x{0}, {1} rows", self.cols, self.rows)
    }

    fn limit(&self) -> f64 {
        0.0
    }

    fn bytes(&self) -> usize {
        self.w.iter().map(|w| w.as_slice().len()).sum()
    }

    fn is_of_a_token(&self) -> bool {
        self.rows == 1
    }

    fn arithmetic(&self) -> Arithmetic {
        Arithmetic::Fast
    }

    fn run<B: Backend>(&self, b: &B, clock: &mut Clock) -> Vec<Vec<f32>> {
        let load = || [0, 1].map(|i| b.load(self.types[i], self.outputs[i], self.cols, self.w[i].clone()).unwrap());
        let x = up(b, &self.x);
        let [mut first, mut second] = self.outputs.map(|n| up(b, &vec![f32::NAN; n * self.rows]));
        let op = |mats: &[B::Mat; 2], first: &mut B::Buf, second: &mut B::Buf| {
            let op = ops::MatmulPair { a: b.view(&mats[0]), b: b.view(&mats[1]), x: &x, rows: self.rows };
            b.matmul_pair(op, first, second).unwrap();
        };
        let mut pairs = vec![load()];
        op(&pairs[0], &mut first, &mut second);
        let results = vec![down(b, &first), down(b, &second)];
        if b.name() == "cuda" {
            pairs.extend((1..(TURN_BYTES / self.bytes()).clamp(1, 64)).map(|_| load()));
        }
        let wait = || _ = b.download(&x, 0, &mut [0.0]);
        clock.time(|i| op(&pairs[i % pairs.len()], &mut first, &mut second), wait);
        results
    }
}

/// Some experts on one row, in an order of places that is not theirs.
struct Experts {
    types: [QuantType; 2],
    count: usize,
    hidden: usize,
    width: usize,
    arithmetic: Arithmetic,
    /// Gate, up and down of each.
    w: Vec<[SharedBytes; 3]>,
    x: Vec<f32>,
}

impl Case for Experts {
    fn op(&self) -> &'static str {
        "experts_row"
    }

    fn shape(&self) -> String {
        let mode = if self.arithmetic == Arithmetic::Fast { "" } else { " exact" };
        format!("{} of {}x{}, {}, {}{mode}", self.count, self.width, self.hidden, self.types[0], self.types[1])
    }

    fn limit(&self) -> f64 {
        // The C library's exp in the SwiGLU may move a code of the second product by one.
        1e-7
    }

    fn bytes(&self) -> usize {
        self.w.iter().flatten().map(|w| w.as_slice().len()).sum::<usize>() + 4 * self.hidden * (self.count + 1)
    }

    fn parts(&self) -> Vec<(&'static str, usize)> {
        // Both first matrices of all experts in one launch, and all second ones; nothing is fused where activations are not rounded.
        let bytes = |i: usize| self.w.iter().map(|w| w[i].as_slice().len()).sum::<usize>();
        let is_fused = self.arithmetic == Arithmetic::Fast && self.types[0].block_values() > 1;
        let parts = [("experts_gate_up", bytes(0) + bytes(1)), ("experts_down", bytes(2))];
        parts.into_iter().filter(|_| is_fused).collect()
    }

    fn arithmetic(&self) -> Arithmetic {
        self.arithmetic
    }

    fn run<B: Backend>(&self, b: &B, clock: &mut Clock) -> Vec<Vec<f32>> {
        let (count, hidden, width) = (self.count, self.hidden, self.width);
        let load = || -> Vec<[B::Mat; 3]> {
            let shapes =
                [(self.types[0], width, hidden), (self.types[0], width, hidden), (self.types[1], hidden, width)];
            let one = |w: &[SharedBytes; 3]| {
                std::array::from_fn(|i| b.load(shapes[i].0, shapes[i].1, shapes[i].2, w[i].clone()).unwrap())
            };
            self.w.iter().map(one).collect()
        };
        let x = up(b, &self.x);
        let [mut gate, mut up_buf, mut y] = [width, width, hidden].map(|len| up(b, &vec![f32::NAN; len]));
        let mut outputs = up(b, &vec![f32::NAN; count * hidden]);
        let mut op = |mats: &[[B::Mat; 3]], outputs: &mut B::Buf| {
            let mut experts = Vec::new();
            for (i, [g, u, d]) in mats.iter().enumerate() {
                let place = (i + 1) % count;
                experts.push(ops::PlacedExpert { gate: b.view(g), up: b.view(u), down: b.view(d), place });
            }
            let op = ops::ExpertsRow { x: &x, experts: &experts, hidden, width, limit: 10.0 };
            b.experts_row(op, ops::ExpertsOut { gate: &mut gate, up: &mut up_buf, y: &mut y, outputs }).unwrap();
        };
        let mut sets = vec![load()];
        op(&sets[0], &mut outputs);
        let result = down(b, &outputs);
        if b.name() == "cuda" {
            sets.extend((1..(TURN_BYTES / self.bytes()).clamp(1, 8)).map(|_| load()));
        }
        clock.time(|i| op(&sets[i % sets.len()], &mut outputs), || _ = b.download(&x, 0, &mut [0.0]));
        vec![result]
    }
}

impl Rig {
    fn experts(
        &mut self,
        types: [QuantType; 2],
        count: usize,
        (hidden, width): (usize, usize),
        arithmetic: Arithmetic,
    ) {
        let rng = &mut self.rng;
        let mut make = |ty, rows, cols| SharedBytes::from(weights(rng, ty, rows, cols));
        let w = (0..count)
            .map(|_| [make(types[0], width, hidden), make(types[0], width, hidden), make(types[1], hidden, width)]);
        let w = w.collect();
        let x = self.rng.normals(hidden);
        self.check(&Experts { types, count, hidden, width, arithmetic, w, x });
    }

    fn product(
        &mut self,
        ty: QuantType,
        (outputs, cols): (usize, usize),
        rows: usize,
        groups: usize,
        arithmetic: Arithmetic,
    ) {
        let w = SharedBytes::from(weights(&mut self.rng, ty, outputs, cols));
        let x = self.rng.normals(rows * groups * cols);
        self.check(&Product { ty, outputs, cols, rows, groups, arithmetic, w, x });
    }
}

pub fn cases(rig: &mut Rig) {
    use Arithmetic::{Fast, Quality};
    for ty in WEIGHT_TYPES {
        // Every remainder of rows and outputs, the smallest widths.
        let cols = [ty.block_values(), ty.block_values() * 3, ty.block_values() * 5];
        for (i, (outputs, rows)) in [(1, 1), (17, 3), (5, 4), (33, 9)].into_iter().enumerate() {
            for mode in [Fast, Quality] {
                rig.product(ty, (outputs, cols[i % 3]), rows, 1, mode);
            }
        }
        rig.product(ty, (64, 1024), 1, 4, Fast);
        rig.product(ty, (64, 1024), 5, 4, Quality);
        // Tiles of 32, 64 and 128 rows, one row more and less, and weight rows that fill no tile.
        if ty.block_values() > 1 {
            for (i, rows) in [12, 47, 48, 63, 64, 65, 95, 97, 127, 128, 129].into_iter().enumerate() {
                rig.product(ty, (77, ty.block_values() * (2 * i + 1)), rows, 1, Fast);
            }
            rig.product(ty, (240, ty.block_values() * 4), 130, 3, Fast);
            rig.product(ty, (8200, ty.block_values() * 2), 17, 2, Fast);
            rig.product(ty, (4500, ty.block_values() * 10), 600, 1, Fast);
        }
        // Whole fours and eights of blocks, and what is left of them.
        if ty.block_values() > 1 {
            for blocks in [2, 4, 7, 9, 12, 23, 41] {
                rig.product(ty, (9, ty.block_values() * blocks), 1, 1, Fast);
                rig.product(ty, (6, ty.block_values() * blocks), 5, 2, Fast);
            }
        }
        // Not a multiple of the 16 lanes.
        if ty.block_values() == 1 {
            rig.product(ty, (7, 2053), 2, 1, Fast);
            rig.product(ty, (7, 5003), 1, 1, Fast);
            // Strips of 8 rows by 24 outputs and of 32 by 48: full, a row more, columns beyond whole lanes and steps, groups; rows of no whole 16 bytes.
            for (outputs, cols, rows, groups) in
                [(4224, 64, 64, 1), (8456, 2056, 65, 1), (2816, 104, 127, 4), (100, 2053, 70, 1), (512, 5120, 270, 1)]
            {
                rig.product(ty, (outputs, cols), rows, groups, Fast);
            }
        }
    }
    // Shapes of the model: queries, window rows, grouped output, output, shared expert, experts, hyper-connections, router.
    rig.product(QuantType::Q8_0, (1280, 5120), 1, 1, Fast);
    rig.product(QuantType::Q8_0, (32768, 1280), 1, 1, Fast);
    rig.product(QuantType::Q8_0, (512, 5120), 1, 1, Fast);
    rig.product(QuantType::Q8_0, (8192, 4096), 1, 8, Fast);
    rig.product(QuantType::Q8_0, (5120, 8192), 1, 1, Fast);
    rig.product(QuantType::Q8_0, (2304, 5120), 1, 1, Fast);
    rig.product(QuantType::Q8_0, (5120, 2304), 1, 1, Fast);
    rig.product(QuantType::F32, (24, 20480), 1, 1, Fast);
    rig.product(QuantType::F32, (384, 5120), 1, 1, Fast);
    rig.product(QuantType::BF16, (384, 5120), 1, 1, Fast);
    // One row in one launch: units with rows beyond a group's, two turns, the longest row and a longer one, several units a block.
    for (outputs, cols, groups) in [
        (30, 320, 6),
        (6, 32, 3),
        (9, 5152, 1),
        (7, 10240, 1),
        (7, 10272, 1),
        (24, 6144, 2),
        (20_003, 1280, 1),
        (5003, 5120, 1),
    ] {
        rig.product(QuantType::Q8_0, (outputs, cols), 1, groups, Fast);
    }
    // Engram: outputs enough for a tile, whose kernel a single row does not take.
    rig.product(QuantType::F16, (25600, 6144), 1, 1, Fast);
    for ty in [
        QuantType::Q8_0,
        QuantType::Q6_K,
        QuantType::Q4_K,
        QuantType::Q3_K,
        QuantType::Q2_K,
        QuantType::IQ2_XXS,
        QuantType::MXFP4,
    ] {
        // Both first matrices of six experts together, and their second ones.
        rig.product(ty, (6 * 4608, 5120), 1, 1, Fast);
        rig.product(ty, (6 * 5120, 2304), 1, 1, Fast);
        for rows in [8, 64, 512] {
            rig.product(ty, (2304, 5120), rows, 1, Fast);
        }
        rig.product(ty, (2304, 5120), 1, 1, Quality);
    }
    use QuantType::{BF16, F16, F32, IQ2_XXS, MXFP4, Q2_K, Q3_K, Q4_K, Q6_K, Q8_0};
    for (types, count) in [
        ([IQ2_XXS, Q2_K], 6),
        ([Q4_K, Q4_K], 6),
        ([Q8_0, Q8_0], 6),
        ([Q2_K, IQ2_XXS], 6),
        ([IQ2_XXS, Q2_K], 1),
        ([Q3_K, Q6_K], 6),
        ([MXFP4, MXFP4], 6),
    ] {
        rig.experts(types, count, (5120, 2304), Fast);
    }
    for (types, outputs, cols, rows) in [
        ([Q8_0, Q8_0], [2304, 2304], 5120, 1),
        ([Q8_0, Q8_0], [1281, 510], 5120, 1),
        ([Q8_0, Q8_0], [3, 5121], 544, 1),
        ([Q8_0, MXFP4], [33, 7], 480, 1),
        ([Q8_0, MXFP4], [33, 7], 480, 6),
        ([IQ2_XXS, Q4_K], [33, 7], 512, 5),
        ([F16, Q8_0], [5, 9], 64, 3),
        ([Q8_0, MXFP4], [70, 130], 480, 66),
        ([IQ2_XXS, Q4_K], [70, 130], 512, 66),
        ([Q8_0, Q4_K], [70, 130], 512, 66),
    ] {
        let w = [0, 1].map(|i| SharedBytes::from(weights(&mut rig.rng, types[i], outputs[i], cols)));
        let x = rig.rng.normals(rows * cols);
        rig.check(&Pair { types, outputs, cols, rows, w, x });
    }
    rig.experts([Q2_K, Q8_0], 19, (512, 256), Fast);
    rig.experts([Q6_K, IQ2_XXS], 3, (256, 256), Quality);
    rig.experts([F16, Q3_K], 2, (512, 256), Fast);
    // The same, at shapes of models and numbers of rows that fill no strip.
    for (ty, outputs, cols, rows) in [
        (F32, 1025, 1000, 255),
        (F16, 1153, 2056, 257),
        (F16, 25600, 160, 2047),
        (BF16, 1300, 5120, 256),
        (F16, 25600, 6144, 128),
        (F32, 24, 20480, 64),
        (F32, 24, 20480, 129),
        (F32, 23, 2052, 127),
        (F16, 25, 1032, 255),
        (BF16, 384, 5120, 256),
        (F32, 512, 5120, 2047),
        (F32, 384, 5122, 128),
        (F32, 384, 5120, 2048),
    ] {
        rig.product(ty, (outputs, cols), rows, 1, Fast);
    }
    // Queries, grouped output and output of a piece of a prompt.
    rig.product(QuantType::Q8_0, (32768, 1280), 130, 1, Fast);
    rig.product(QuantType::Q8_0, (8192, 4096), 130, 8, Fast);
    rig.product(QuantType::Q8_0, (5120, 8192), 130, 1, Fast);
    for rows in [2, 64] {
        rig.product(QuantType::Q8_0, (2304, 5120), rows, 1, Fast);
        rig.product(QuantType::Q4_K, (2304, 5120), rows, 1, Fast);
        rig.product(QuantType::F32, (384, 5120), rows, 1, Fast);
    }
}
