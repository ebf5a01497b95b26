//! Cases of the ops at the ends of a pass: how a sublayer begins, and the choice of a token.
//! Never compares less than all outputs. Surprising fact: what an op leaves in its work memory is no output: it may differ.

use ds4::backend::{Backend, SharedBytes, ops};
use ds4::quant::QuantType;

use crate::case::{Case, Clock, Rig};
use crate::kernels_common::weights;
use crate::rows::{down, down_ids, up, up_ids, wait};

struct Enter {
    shape: String,
    ty: QuantType,
    /// Rows, streams, hidden width.
    n: [usize; 3],
    is_carried: bool,
    w: SharedBytes,
    /// Streams, base, scale, carried weights, norm.
    v: [Vec<f32>; 5],
}

impl Case for Enter {
    fn op(&self) -> &'static str {
        "hc_enter"
    }

    fn shape(&self) -> String {
        self.shape.clone()
    }

    fn limit(&self) -> f64 {
        1e-13
    }

    fn bytes(&self) -> usize {
        self.w.as_slice().len() + 4 * self.v[0].len()
    }

    fn is_of_a_token(&self) -> bool {
        self.n[0] == 1
    }

    fn parts(&self) -> Vec<(&'static str, usize)> {
        // Recorded, the input is a launch of its own.
        let streams = 4 * self.v[0].len();
        if self.is_carried && self.n[0] == 1 {
            vec![("hc_input", streams), ("hc_enter", self.bytes())]
        } else {
            Vec::new()
        }
    }

    fn run<B: Backend>(&self, b: &B, clock: &mut Clock) -> Vec<Vec<f32>> {
        let [rows, n, hidden] = self.n;
        let [streams, base, scale, carried, norm] = [0, 1, 2, 3, 4].map(|i| up(b, &self.v[i]));
        let poisoned = |len: usize| up(b, &vec![f32::NAN; len]);
        let [mut pre, mut post, mut comb] = [rows * n, rows * n, rows * n * n].map(poisoned);
        let [mut mix, mut collapsed, mut x] = [rows * n * (n + 2), rows * hidden, rows * hidden].map(poisoned);
        let load = || b.load(self.ty, n * (n + 2), n * hidden, self.w.clone()).unwrap();
        let mut mats = vec![load()];
        let mut op = |w: &B::Mat| {
            let op = ops::HcEnter {
                w: b.view(w),
                streams: &streams,
                base: &base,
                scale: &scale,
                weights: self.is_carried.then_some(&carried),
                norm: &norm,
                rows,
                stream_count: n,
                hidden,
                rms_eps: 1e-20,
                hc_eps: 1e-6,
                iterations: 20,
            };
            let coefficients = ops::HcOut { pre: &mut pre, post: &mut post, comb: &mut comb };
            let out = ops::HcEntered { coefficients, mix: &mut mix, collapsed: &mut collapsed, x: &mut x };
            b.hc_enter(op, out).unwrap();
        };
        // Twice: what the first leaves behind must not disturb the second.
        op(&mats[0]);
        op(&mats[0]);
        if self.bytes() > 1 << 20 {
            mats.extend((0..31).map(|_| load()));
        }
        clock.time(|i| op(&mats[i % mats.len()]), || wait(b, &scale));
        [&pre, &post, &comb, &x].map(|buf| down(b, buf)).into()
    }
}

struct Best {
    shape: String,
    values: Vec<f32>,
}

impl Case for Best {
    fn op(&self) -> &'static str {
        "best_of"
    }

    fn shape(&self) -> String {
        self.shape.clone()
    }

    fn limit(&self) -> f64 {
        0.0
    }

    fn bytes(&self) -> usize {
        4 * self.values.len()
    }

    fn run<B: Backend>(&self, b: &B, clock: &mut Clock) -> Vec<Vec<f32>> {
        let values = up(b, &self.values);
        let mut best = up_ids(b, &[77]);
        let mut op = || b.best_of(ops::BestOf { values: &values, count: self.values.len() }, &mut best).unwrap();
        op();
        op();
        clock.time(|_| op(), || wait(b, &values));
        vec![down_ids(b, &best)]
    }
}

struct Drawn {
    shape: String,
    values: Vec<f32>,
    rule: ops::DrawRule,
    numbers: Vec<u64>,
}

impl Case for Drawn {
    fn op(&self) -> &'static str {
        "draw"
    }

    fn shape(&self) -> String {
        self.shape.clone()
    }

    fn limit(&self) -> f64 {
        0.0
    }

    fn bytes(&self) -> usize {
        4 * self.values.len()
    }

    fn run<B: Backend>(&self, b: &B, clock: &mut Clock) -> Vec<Vec<f32>> {
        let values = up(b, &self.values);
        let mut drawn = up_ids(b, &[77]);
        let mut op = |number| {
            let rule = ops::DrawRule { number, ..self.rule };
            b.draw(ops::Draw { values: &values, count: self.values.len(), rule }, &mut drawn).unwrap();
            down_ids(b, &drawn)
        };
        let places = self.numbers.iter().map(|number| op(*number)).collect();
        let mut drawn = up_ids(b, &[77]);
        let op = ops::Draw { values: &values, count: self.values.len(), rule: self.rule };
        clock.time(|_| b.draw(ops::Draw { ..op }, &mut drawn).unwrap(), || wait(b, &values));
        places
    }
}

fn draws(rig: &mut Rig) {
    let all = ops::DrawRule { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, number: 1 << 63 };
    let flat: Vec<f32> = rig.rng.normals(129_280);
    let steep: Vec<f32> = flat.iter().map(|v| v * 6.0).collect();
    let coarse: Vec<f32> = flat.iter().map(|v| (v * 2.0).round() * 0.5).collect();
    let mut masked = steep.clone();
    masked.iter_mut().step_by(3).for_each(|v| *v = f32::NEG_INFINITY);
    let mut broken = flat.clone();
    broken[128_000] = f32::NAN;
    let rows = [
        ("flat", flat),
        ("steep", steep),
        ("ties", coarse),
        ("all equal", vec![-7.25; 100_000]),
        ("masked", masked),
        ("a NaN", broken),
        ("only minus infinity", vec![f32::NEG_INFINITY; 5000]),
        ("both zeros", [-0.0, 0.0].repeat(1500)),
        ("one value", vec![3.0]),
        ("2049 values", rig.rng.normals(2049)),
    ];
    let rules = [
        ("", all),
        (", t 0.05", ops::DrawRule { temperature: 0.05, ..all }),
        (", t 100", ops::DrawRule { temperature: 100.0, ..all }),
        (", t 1e-30", ops::DrawRule { temperature: 1e-30, ..all }),
        (", k 40", ops::DrawRule { top_k: 40, ..all }),
        (", k 1", ops::DrawRule { top_k: 1, ..all }),
        (", k 2048", ops::DrawRule { top_k: 2048, temperature: 3.0, ..all }),
        (", p 0.95", ops::DrawRule { top_p: 0.95, ..all }),
        (", p 1e-6", ops::DrawRule { top_p: 1e-6, ..all }),
        (", p almost 1", ops::DrawRule { top_p: 1.0 - f32::EPSILON / 2.0, ..all }),
        (", min 0.05", ops::DrawRule { min_p: 0.05, ..all }),
        (", k 50 p 0.9 min 0.02", ops::DrawRule { top_k: 50, top_p: 0.9, min_p: 0.02, temperature: 0.8, ..all }),
    ];
    for (name, values) in &rows {
        for (filters, rule) in &rules {
            let mut numbers = vec![0, u64::MAX, 1 << 63];
            numbers.extend((0..6).map(|_| rig.rng.next()));
            let shape = format!("{name}{filters}");
            rig.check(&Drawn { shape, values: values.clone(), rule: *rule, numbers });
        }
    }
}

pub fn cases(rig: &mut Rig) {
    draws(rig);
    for (ty, n, is_carried) in [
        (QuantType::F16, [1, 4, 5120], true),
        (QuantType::F16, [1, 4, 5120], false),
        (QuantType::F32, [1, 4, 5120], true),
        (QuantType::F32, [1, 4, 7000], false),
        (QuantType::BF16, [1, 4, 128], true),
        (QuantType::F32, [1, 8, 320], false),
        (QuantType::F32, [1, 3, 41], true),
        (QuantType::F16, [5, 4, 256], true),
    ] {
        let [rows, streams, hidden] = n;
        let (mix, len) = (streams * (streams + 2), streams * hidden);
        let r = &mut rig.rng;
        let w = SharedBytes::from(weights(r, ty, mix, len));
        let v = [rows * len, mix, 3, rows * streams, hidden].map(|len| r.normals(len));
        let from = if is_carried { "carried" } else { "own" };
        let shape = format!("{ty} {rows}x{streams}x{hidden}, {from} weights");
        rig.check(&Enter { shape, ty, n, is_carried, w, v });
    }
    let long = rig.rng.normals(129_280);
    let with = |changes: &[(usize, f32)]| {
        let mut values = long.clone();
        changes.iter().for_each(|(at, value)| values[*at] = *value);
        values
    };
    for (what, values) in [
        ("129280 values", long.clone()),
        ("equals far apart", with(&[(129_279, 50.0), (70_001, 50.0), (511, 50.0)])),
        ("zeros of both signs", vec![-0.0, 0.0]),
        ("all negative", vec![-3.0, -2.0, f32::NEG_INFINITY]),
        ("a NaN", with(&[(100_000, f32::NAN)])),
        ("a negative NaN", with(&[(3, -f32::NAN)])),
        ("an infinity", with(&[(129_000, f32::INFINITY)])),
        ("only minus infinity", vec![f32::NEG_INFINITY; 700]),
    ] {
        rig.check(&Best { shape: what.to_owned(), values });
    }
}
