//! Cases of the ops that work row by row: norms, rotations, rounding, moves, hyper-connections, n-gram gates, sums of experts.
//! Never leaves an output as it was: it is poisoned with NaN first, so a value that was not written is seen.

use ds4::backend::{Backend, SharedBytes, ops};
use ds4::quant::QuantType;

use crate::case::{Case, Clock, Rig};
use crate::kernels_common::{WEIGHT_TYPES, weights};

/// The values on the device.
pub fn up<B: Backend>(b: &B, values: &[f32]) -> B::Buf {
    let mut buf = b.alloc("test values", values.len()).unwrap();
    b.upload(values, &mut buf, 0).unwrap();
    buf
}

/// The ids on the device.
pub fn up_ids<B: Backend>(b: &B, values: &[i32]) -> B::Ids {
    let mut ids = b.alloc_ids("test ids", values.len()).unwrap();
    b.upload_ids(values, &mut ids, 0).unwrap();
    ids
}

/// All values of a buffer.
pub fn down<B: Backend>(b: &B, buf: &B::Buf) -> Vec<f32> {
    let mut values = vec![0.0; b.len(buf)];
    b.download(buf, 0, &mut values).unwrap();
    values
}

/// All ids, as values.
pub fn down_ids<B: Backend>(b: &B, ids: &B::Ids) -> Vec<f32> {
    let mut values = vec![0; b.len_ids(ids)];
    b.download_ids(ids, 0, &mut values).unwrap();
    values.into_iter().map(|v| v as f32).collect()
}

fn nans(len: usize) -> Vec<f32> {
    vec![f32::NAN; len]
}

/// Waits until the device is idle.
pub fn wait<B: Backend>(b: &B, buf: &B::Buf) {
    b.download(buf, 0, &mut [0.0]).unwrap();
}

/// A case with its inputs: `run` gets them by number.
macro_rules! case {
    ($name:ident, $op:literal, $limit:expr, |$this:ident, $b:ident, $clock:ident| $run:block) => {
        pub struct $name {
            pub shape: String,
            pub bytes: usize,
            /// Sizes, in the order of the constructor below.
            pub n: Vec<usize>,
            pub v: Vec<Vec<f32>>,
        }

        impl Case for $name {
            fn op(&self) -> &'static str {
                $op
            }

            fn shape(&self) -> String {
                self.shape.clone()
            }

            fn limit(&self) -> f64 {
                $limit
            }

            fn bytes(&self) -> usize {
                self.bytes
            }

            fn run<B: Backend>(&self, $b: &B, $clock: &mut Clock) -> Vec<Vec<f32>> {
                let $this = self;
                $run
            }
        }
    };
}
pub(crate) use case;

// Limits: 0 where every step is rounded alike; 1e-14 (a few last bits) where the C library's exp or log takes part.
case!(Norm, "rms_norm", 0.0, |c, b, clock| {
    let (rows, width) = (c.n[0], c.n[1]);
    let (x, weight, mut out) = (up(b, &c.v[0]), up(b, &c.v[1]), up(b, &nans(rows * width)));
    let op = |out: &mut B::Buf| {
        b.rms_norm(ops::RmsNorm { x: &x, weight: &weight, rows, width, eps: 1e-20 }, out).unwrap();
    };
    op(&mut out);
    let result = down(b, &out);
    clock.time(|_| op(&mut out), || wait(b, &x));
    vec![result]
});

case!(Rope, "rope", 1e-14, |c, b, clock| {
    let (rows, heads, width, rotary, first_pos, pos_step) = (c.n[0], c.n[1], c.n[2], c.n[3], c.n[4], c.n[5]);
    let (freqs, mut x) = (up(b, &c.v[0]), up(b, &c.v[1]));
    let op = |x: &mut B::Buf, inverse| {
        let op = ops::Rope { freqs: &freqs, rows, heads, width, rotary, first_pos, pos_step, inverse };
        b.rope(op, x).unwrap();
    };
    op(&mut x, false);
    let forward = down(b, &x);
    b.upload(&c.v[1], &mut x, 0).unwrap();
    op(&mut x, true);
    let back = down(b, &x);
    clock.time(|_| op(&mut x, false), || wait(b, &freqs));
    vec![forward, back]
});

case!(Round, "round_cache", 0.0, |c, b, clock| {
    let heads = ops::CacheFormat::Fp8Heads { width: 512, tail: 80 };
    let format =
        [ops::CacheFormat::Fp8Block32, ops::CacheFormat::Fp4Block32, ops::CacheFormat::Fp4Block16, heads][c.n[1]];
    let mut x = up(b, &c.v[0]);
    b.round_cache(ops::RoundCache { format, values: c.n[0] }, &mut x).unwrap();
    let result = down(b, &x);
    let other = up(b, &[0.0]);
    clock.time(|_| b.round_cache(ops::RoundCache { format, values: c.n[0] }, &mut x).unwrap(), || wait(b, &other));
    vec![result]
});

case!(Store, "store_rows", 0.0, |c, b, clock| {
    let (rows, width, first_slot, slots) = (c.n[0], c.n[1], c.n[2], c.n[3]);
    let (src, mut dst) = (up(b, &c.v[0]), up(b, &vec![7.0; slots * width]));
    let op = |dst: &mut B::Buf| {
        b.store_rows(ops::StoreRows { src: &src, rows, width, first_slot, slots }, dst).unwrap();
    };
    op(&mut dst);
    let result = down(b, &dst);
    clock.time(|_| op(&mut dst), || wait(b, &src));
    vec![result]
});

case!(Gather, "gather_rows", 0.0, |c, b, clock| {
    let (count, width, first) = (c.n[0], c.n[1], c.n[2]);
    let indices: Vec<i32> = c.v[1].iter().map(|v| *v as i32).collect();
    let (src, indices, mut out) = (up(b, &c.v[0]), up_ids(b, &indices), up(b, &nans(count * width)));
    let op = |out: &mut B::Buf| {
        let op = ops::MoveRows { src: &src, indices: &indices, range: first..first + count, width };
        b.gather_rows(op, out).unwrap();
    };
    op(&mut out);
    let result = down(b, &out);
    clock.time(|_| op(&mut out), || wait(b, &src));
    vec![result]
});

case!(Scatter, "scatter_rows", 0.0, |c, b, clock| {
    let (count, width, first) = (c.n[0], c.n[1], c.n[2]);
    let indices: Vec<i32> = c.v[1].iter().map(|v| *v as i32).collect();
    let (src, ids, mut dst) = (up(b, &c.v[0]), up_ids(b, &indices), up(b, &vec![3.0; indices.len() * width]));
    let op = |dst: &mut B::Buf| {
        let op = ops::MoveRows { src: &src, indices: &ids, range: first..first + count, width };
        b.scatter_rows(op, dst).unwrap();
    };
    op(&mut dst);
    let result = down(b, &dst);
    clock.time(|_| op(&mut dst), || wait(b, &src));
    vec![result]
});

case!(SwiGlu, "swiglu", 1e-14, |c, b, clock| {
    let (up_values, mut gate) = (up(b, &c.v[1]), up(b, &c.v[0]));
    let op = |gate: &mut B::Buf| {
        b.swiglu(ops::SwiGlu { up: &up_values, values: c.n[0], limit: 10.0 }, gate).unwrap();
    };
    op(&mut gate);
    let result = down(b, &gate);
    clock.time(|_| op(&mut gate), || wait(b, &up_values));
    vec![result]
});

case!(Combine, "combine_experts", 0.0, |c, b, clock| {
    let (rows, k, width) = (c.n[0], c.n[1], c.n[2]);
    let (outputs, weights, shared) = (up(b, &c.v[0]), up(b, &c.v[1]), up(b, &c.v[2]));
    let mut out = up(b, &nans(rows * width));
    let op = |out: &mut B::Buf| {
        let op = ops::CombineExperts { outputs: &outputs, weights: &weights, shared: &shared, rows, k, width };
        b.combine_experts(op, out).unwrap();
    };
    op(&mut out);
    let result = down(b, &out);
    clock.time(|_| op(&mut out), || wait(b, &shared));
    vec![result]
});

case!(Collapse, "hc_collapse", 0.0, |c, b, clock| {
    let (rows, stream_count, hidden) = (c.n[0], c.n[1], c.n[2]);
    let (streams, weights, mut out) = (up(b, &c.v[0]), up(b, &c.v[1]), up(b, &nans(rows * hidden)));
    let op = |out: &mut B::Buf| {
        let op = ops::HcCollapse { streams: &streams, weights: &weights, rows, stream_count, hidden };
        b.hc_collapse(op, out).unwrap();
    };
    op(&mut out);
    let result = down(b, &out);
    clock.time(|_| op(&mut out), || wait(b, &weights));
    vec![result]
});

case!(Expand, "hc_expand", 0.0, |c, b, clock| {
    let (rows, stream_count, hidden) = (c.n[0], c.n[1], c.n[2]);
    let (y, post, comb, mut streams) = (up(b, &c.v[0]), up(b, &c.v[1]), up(b, &c.v[2]), up(b, &c.v[3]));
    let op = |streams: &mut B::Buf| {
        let op = ops::HcExpand { y: &y, post: &post, comb: &comb, rows, stream_count, hidden };
        b.hc_expand(op, streams).unwrap();
    };
    op(&mut streams);
    let result = down(b, &streams);
    clock.time(|_| op(&mut streams), || wait(b, &post));
    vec![result]
});

case!(Coefficients, "hc_coefficients", 1e-13, |c, b, clock| {
    let (rows, n, hidden) = (c.n[0], c.n[1], c.n[2]);
    let [streams, mix, base, scale] = [0, 1, 2, 3].map(|i| up(b, &c.v[i]));
    let [mut pre, mut post, mut comb] = [rows * n, rows * n, rows * n * n].map(|len| up(b, &nans(len)));
    let op = |pre: &mut B::Buf, post: &mut B::Buf, comb: &mut B::Buf| {
        let op = ops::HcCoefficients {
            streams: &streams,
            mix: &mix,
            base: &base,
            scale: &scale,
            rows,
            stream_count: n,
            hidden,
            rms_eps: 1e-20,
            hc_eps: 1e-6,
            iterations: 20,
        };
        b.hc_coefficients(op, ops::HcOut { pre, post, comb }).unwrap();
    };
    op(&mut pre, &mut post, &mut comb);
    let results = vec![down(b, &pre), down(b, &post), down(b, &comb)];
    clock.time(|_| op(&mut pre, &mut post, &mut comb), || wait(b, &scale));
    results
});

case!(Gate, "engram_gate", 1e-13, |c, b, clock| {
    let (rows, stream_count, hidden) = (c.n[0], c.n[1], c.n[2]);
    let [keys_value, q_norm, k_norm, mut streams] = [0, 1, 2, 3].map(|i| up(b, &c.v[i]));
    let mut gates = up(b, &nans(rows * stream_count));
    let op = |streams: &mut B::Buf, gates: &mut B::Buf| {
        let op = ops::EngramGate {
            keys_value: &keys_value,
            q_norm: &q_norm,
            k_norm: &k_norm,
            rows,
            stream_count,
            hidden,
            rms_eps: 1e-20,
            floor: 1e-6,
        };
        b.engram_gate(op, streams, gates).unwrap();
    };
    op(&mut streams, &mut gates);
    let results = vec![down(b, &streams), down(b, &gates)];
    clock.time(|_| op(&mut streams, &mut gates), || wait(b, &q_norm));
    results
});

case!(Decode, "decode_rows", 0.0, |c, b, clock| {
    let (rows, width) = (c.n[0], c.n[1]);
    // Codes and scales that are numbers, every one of them somewhere.
    let byte = |i: usize| {
        let (at, mixed) = (i % (width + width / 32), c.v[0][i % c.v[0].len()] as u8);
        if at >= width {
            mixed % 247
        } else if mixed & 0x7f == 0x7f {
            0x7e
        } else {
            mixed
        }
    };
    let bytes: Vec<u8> = (0..rows * (width + width / 32)).map(byte).collect();
    let words = up_ids(b, &bytemuck::pod_collect_to_vec::<u8, i32>(&bytes));
    let mut out = up(b, &nans(rows * width));
    let op = |out: &mut B::Buf| b.decode_rows(ops::DecodeRows { bytes: &words, rows, width }, out).unwrap();
    op(&mut out);
    let result = down(b, &out);
    let other = up(b, &[0.0]);
    clock.time(|_| op(&mut out), || wait(b, &other));
    vec![result]
});

case!(Pairs, "pool_pairs", 1e-14, |c, b, clock| {
    let (rows, width, first_pos) = (c.n[0], c.n[1], c.n[2]);
    let [values, gates, open_values, open_gates] = [0, 1, 2, 3].map(|i| up(b, &c.v[i]));
    let pairs = (0..rows).filter(|r| (first_pos + r) % 2 == 1).count();
    let mut pooled = up(b, &nans(pairs.max(1) * width));
    let (mut next_values, mut next_gates) = (up(b, &vec![9.0; width]), up(b, &vec![8.0; width]));
    let op = |pooled: &mut B::Buf, next_values: &mut B::Buf, next_gates: &mut B::Buf| {
        let op = ops::PoolPairs {
            values: &values,
            gates: &gates,
            open_values: &open_values,
            open_gates: &open_gates,
            rows,
            width,
            first_pos,
        };
        b.pool_pairs(op, ops::PairsOut { pooled, open_values: next_values, open_gates: next_gates }).unwrap()
    };
    let closed = op(&mut pooled, &mut next_values, &mut next_gates);
    let results = vec![vec![closed as f32], down(b, &pooled), down(b, &next_values), down(b, &next_gates)];
    clock.time(|_| _ = op(&mut pooled, &mut next_values, &mut next_gates), || wait(b, &values));
    results
});

case!(Groups, "pool_groups", 1e-14, |c, b, clock| {
    let (slots, width, ratio, overlaps, first, count) = (c.n[0], c.n[1], c.n[2], c.n[3] == 1, c.n[4], c.n[5]);
    let [values, gates, bias] = [0, 1, 2].map(|i| up(b, &c.v[i]));
    let mut out = up(b, &nans(count * width));
    let op = |out: &mut B::Buf| {
        let groups = first..first + count;
        let op = ops::PoolGroups { values: &values, gates: &gates, bias: &bias, slots, width, ratio, overlaps, groups };
        b.pool_groups(op, out).unwrap();
    };
    op(&mut out);
    let result = down(b, &out);
    clock.time(|_| op(&mut out), || wait(b, &values));
    vec![result]
});

struct Embed {
    ty: QuantType,
    rows: usize,
    cols: usize,
    vocab: usize,
    copies: usize,
    table: SharedBytes,
    ids: Vec<i32>,
}

impl Case for Embed {
    fn op(&self) -> &'static str {
        "embed"
    }

    fn shape(&self) -> String {
        format!("{} {} of {}x{}, {} copies", self.ty, self.rows, self.vocab, self.cols, self.copies)
    }

    fn limit(&self) -> f64 {
        0.0
    }

    fn bytes(&self) -> usize {
        let row = self.ty.row_bytes(self.cols as u64).unwrap() as usize;
        self.rows * (row + 4 * self.cols * self.copies)
    }

    fn run<B: Backend>(&self, b: &B, clock: &mut Clock) -> Vec<Vec<f32>> {
        let table = b.load(self.ty, self.vocab, self.cols, self.table.clone()).unwrap();
        let (ids, mut out) = (up_ids(b, &self.ids), up(b, &nans(self.rows * self.copies * self.cols)));
        let op = |out: &mut B::Buf| {
            let op = ops::Embed { table: b.view(&table), ids: &ids, rows: self.rows, copies: self.copies };
            b.embed(op, out).unwrap();
        };
        op(&mut out);
        let result = down(b, &out);
        let other = up(b, &[0.0]);
        clock.time(|_| op(&mut out), || wait(b, &other));
        vec![result]
    }
}

fn embeds(rig: &mut Rig) {
    for ty in WEIGHT_TYPES {
        let (cols, vocab, rows) = (if ty.block_values() == 1 { 77 } else { 512 }, 50, 9);
        let ids = (0..rows).map(|_| (rig.rng.next() % vocab as u64) as i32).collect();
        let table = SharedBytes::from(weights(&mut rig.rng, ty, vocab, cols));
        rig.check(&Embed { ty, rows, cols, vocab, copies: 4, table, ids });
    }
    let table = SharedBytes::from(weights(&mut rig.rng, QuantType::Q8_0, 1000, 5120));
    rig.check(&Embed { ty: QuantType::Q8_0, rows: 1, cols: 5120, vocab: 1000, copies: 4, table, ids: vec![999] });
}

fn moves(rig: &mut Rig) {
    for (rows, width, first_slot, slots) in [(1, 512, 639, 640), (9, 512, 636, 640), (5, 3, 2, 5), (7, 300, 4, 100)] {
        let v = vec![rig.rng.normals(rows * width)];
        let shape = format!("{rows}x{width} at {first_slot} of {slots}");
        rig.check(&Store { shape, bytes: 8 * rows * width, n: vec![rows, width, first_slot, slots], v });
    }
    for (count, all, width, first) in [(1, 6, 5120, 3), (3, 8, 5, 2), (100, 512, 5120, 0)] {
        // A permutation: scattered rows have one place each.
        let mut indices: Vec<f32> = (0..all).map(|i| i as f32).collect();
        for i in (1..all).rev() {
            indices.swap(i, (rig.rng.next() % (i as u64 + 1)) as usize);
        }
        let (shape, n) = (format!("{count} of {all}, width {width}"), vec![count, width, first]);
        let v = vec![rig.rng.normals(all * width), indices];
        rig.check(&Gather { shape: shape.clone(), bytes: 8 * count * width, n: n.clone(), v: v.clone() });
        rig.check(&Scatter { shape, bytes: 8 * count * width, n, v });
    }
}

fn decodes(rig: &mut Rig) {
    for (rows, width) in [(24, 256), (1, 32), (5, 96), (49_152, 256)] {
        let shape = format!("{rows}x{width}");
        let bytes = rows * (width + width / 32 + 4 * width);
        // A length that no row has a whole number of.
        let v = vec![(0..65_537).map(|_| (rig.rng.next() % 256) as f32).collect()];
        rig.check(&Decode { shape, bytes, n: vec![rows, width], v });
    }
}

fn streams(rig: &mut Rig) {
    for (rows, n, hidden) in [(1, 4, 5120), (3, 2, 40), (5, 4, 257), (64, 4, 5120), (2, 8, 33)] {
        let shape = format!("{rows}x{n}x{hidden}");
        let (sizes, values) = (vec![rows, n, hidden], rows * n * hidden);
        let r = &mut rig.rng;
        let collapse = vec![r.normals(values), r.normals(rows * n)];
        let expand = vec![r.normals(rows * hidden), r.normals(rows * n), r.normals(rows * n * n), r.normals(values)];
        let mix = n * (n + 2);
        let coefficients = vec![r.normals(values), r.normals(rows * mix), r.normals(mix), r.normals(3)];
        let gate =
            vec![r.normals(rows * (n + 1) * hidden), r.normals(n * hidden), r.normals(n * hidden), r.normals(values)];
        let bytes = 4 * values;
        rig.check(&Collapse { shape: shape.clone(), bytes: bytes + bytes / n, n: sizes.clone(), v: collapse });
        rig.check(&Expand { shape: shape.clone(), bytes: 2 * bytes + bytes / n, n: sizes.clone(), v: expand });
        rig.check(&Coefficients { shape: shape.clone(), bytes, n: sizes.clone(), v: coefficients });
        rig.check(&Gate { shape, bytes: 3 * bytes + bytes / n, n: sizes, v: gate });
    }
}

pub fn cases(rig: &mut Rig) {
    embeds(rig);
    moves(rig);
    decodes(rig);
    streams(rig);
    for (rows, width) in [(1, 5120), (1, 1280), (1, 512), (1, 128), (7, 33), (3, 5), (64, 5120)] {
        let v = vec![rig.rng.normals(rows * width), rig.rng.normals(width)];
        rig.check(&Norm { shape: format!("{rows}x{width}"), bytes: 8 * rows * width, n: vec![rows, width], v });
    }
    for (rows, heads, width, rotary, first_pos, step) in
        [(1, 64, 512, 64, 30_000, 1), (9, 1, 512, 64, 127, 4), (3, 5, 20, 8, 0, 1), (16, 32, 128, 64, 1_000_000, 1)]
    {
        let freqs = (0..rotary / 2).map(|i| 10_000f32.powf(-2.0 * i as f32 / rotary as f32)).collect();
        let v = vec![freqs, rig.rng.normals(rows * heads * width)];
        let shape = format!("{rows}x{heads}x{width}, {rotary} at {first_pos}");
        let n = vec![rows, heads, width, rotary, first_pos, step];
        rig.check(&Rope { shape, bytes: 8 * rows * heads * rotary, n, v });
    }
    for (format, name) in ["FP8 of 32", "FP4 of 32", "FP4 of 16", "FP8 heads"].into_iter().enumerate() {
        for values in [if format == 3 { 1024 } else { 32 }, 512, 4096] {
            let mut x = rig.rng.normals(values);
            // Blocks of other magnitudes, ties, zeros, and one that is broken.
            for (block, values) in x.chunks_mut(16).enumerate() {
                let factor = [1.0, 1e-30, 1e20, 0.0, 1e-42][block % 5];
                values.iter_mut().for_each(|v| *v *= factor);
            }
            if values > 1024 {
                x[600] = f32::NAN;
                x[700] = f32::INFINITY;
                x[1024..1040].copy_from_slice(&[
                    6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0, -0.0, 448.0, 1.0, 0.5, 4.0, 3.0,
                ]);
            }
            let (shape, v) = (format!("{values} values, {name}"), vec![x]);
            rig.check(&Round { shape, bytes: 8 * values, n: vec![values, format], v });
        }
    }
    for values in [1, 2304, 9 * 2304] {
        let wide: Vec<f32> = rig.rng.normals(values).iter().map(|v| v * 6.0).collect();
        let v = vec![wide.clone(), rig.rng.normals(values).iter().map(|v| v * 6.0).collect()];
        rig.check(&SwiGlu { shape: format!("{values}"), bytes: 12 * values, n: vec![values], v });
    }
    for (rows, k, width) in [(1, 6, 5120), (3, 2, 7), (64, 6, 5120)] {
        let r = &mut rig.rng;
        let v = vec![r.normals(rows * k * width), r.normals(rows * k), r.normals(rows * width)];
        let bytes = 4 * rows * (k + 2) * width;
        rig.check(&Combine { shape: format!("{rows}x{k}x{width}"), bytes, n: vec![rows, k, width], v });
    }
    for (rows, width, first_pos) in [(1, 512, 0), (1, 512, 7), (2, 512, 3), (9, 512, 4), (9, 33, 5), (64, 512, 1)] {
        let r = &mut rig.rng;
        let v = vec![r.normals(rows * width), r.normals(rows * width), r.normals(width), r.normals(width)];
        let shape = format!("{rows}x{width} at {first_pos}");
        rig.check(&Pairs { shape, bytes: 10 * rows * width, n: vec![rows, width, first_pos], v });
    }
    for (slots, width, ratio, overlaps, first, count) in
        [(520, 512, 4, true, 0, 1), (520, 512, 4, true, 300, 128), (640, 512, 128, false, 7, 4), (11, 3, 4, true, 5, 2)]
    {
        let row = if overlaps { 2 * width } else { width };
        let r = &mut rig.rng;
        let v = vec![r.normals(slots * row), r.normals(slots * row), r.normals(ratio * row)];
        let shape = format!("{count} groups of {ratio}, width {width}, {}", if overlaps { "overlap" } else { "apart" });
        let bytes = 8 * count * ratio * row;
        rig.check(&Groups { shape, bytes, n: vec![slots, width, ratio, usize::from(overlaps), first, count], v });
    }
}
