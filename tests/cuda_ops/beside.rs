//! Ops that are recorded and run beside one another: the same bits as one after the other on the processor.
//! Never holds a device: nothing waits for the host here. Surprising fact: both branches round activations, each in memory of its own; with one
//! memory for both this fails.

use ds4::backend::cpu::CpuBackend;
use ds4::backend::cuda::{CudaBackend, Room};
use ds4::backend::{Backend, BackendError, ops};
use ds4::quant::QuantType;

use crate::case::Rig;
use crate::kernels_common::{Rng, weights};
use crate::rows::{down, up};

const STREAMS: usize = 4;
const HIDDEN: usize = 1536;
/// Outputs of the products, more than one block of threads takes.
const OUTPUTS: usize = 1536;
/// Sublayers of a recording, and recordings that are played.
const SUBLAYERS: usize = 6;
const PLAYED: usize = 3;

struct Values {
    streams: Vec<f32>,
    carried: Vec<f32>,
    base: Vec<f32>,
    norm: Vec<f32>,
    mix: Vec<u8>,
    products: [Vec<u8>; 2],
}

impl Values {
    fn new(rng: &mut Rng) -> Self {
        let mix_len = STREAMS * (STREAMS + 2);
        Self {
            streams: rng.normals(STREAMS * HIDDEN),
            carried: rng.normals(STREAMS),
            base: rng.normals(mix_len),
            norm: rng.normals(HIDDEN),
            mix: weights(rng, QuantType::F16, mix_len, STREAMS * HIDDEN),
            products: [(); 2].map(|()| weights(rng, QuantType::Q4_K, OUTPUTS, HIDDEN)),
        }
    }
}

/// Device memory of a few sublayers.
struct Line<B: Backend> {
    streams: B::Buf,
    carried: B::Buf,
    fixed: [B::Buf; 3],
    mix: B::Mat,
    products: [B::Mat; 2],
    /// Raw mix, pre, post, matrix.
    coefficients: [B::Buf; 4],
    /// Collapsed, input, and both products.
    work: [B::Buf; 4],
    /// Sum of what the branches made, and its norm.
    y: [B::Buf; 2],
}

impl<B: Backend> Line<B> {
    fn new(b: &B, v: &Values) -> Self {
        let load = |bytes: &Vec<u8>, ty, rows, cols| b.load(ty, rows, cols, bytes.clone().into()).unwrap();
        let room = |len| b.alloc("work", len).unwrap();
        let mix_len = STREAMS * (STREAMS + 2);
        Self {
            streams: up(b, &v.streams),
            carried: up(b, &v.carried),
            fixed: [up(b, &v.base), up(b, &[0.7, 0.6, 0.5]), up(b, &v.norm)],
            mix: load(&v.mix, QuantType::F16, mix_len, STREAMS * HIDDEN),
            products: [0, 1].map(|i| load(&v.products[i], QuantType::Q4_K, OUTPUTS, HIDDEN)),
            coefficients: [mix_len, STREAMS, STREAMS, STREAMS * STREAMS].map(room),
            work: [HIDDEN, HIDDEN, OUTPUTS, OUTPUTS].map(room),
            y: [HIDDEN, HIDDEN].map(room),
        }
    }

    /// One sublayer: two products of its input, one of them aside, and their sum into the streams.
    fn sublayer(&mut self, b: &B) -> Result<(), BackendError> {
        let [base, scale, norm] = &self.fixed;
        let [mix, pre, post, comb] = &mut self.coefficients;
        let [collapsed, x, aside, line] = &mut self.work;
        let op = ops::HcEnter {
            w: b.view(&self.mix),
            streams: &self.streams,
            base,
            scale,
            weights: Some(&self.carried),
            norm,
            rows: 1,
            stream_count: STREAMS,
            hidden: HIDDEN,
            rms_eps: 1e-6,
            hc_eps: 1e-6,
            iterations: 20,
        };
        let coefficients = ops::HcOut { pre, post, comb };
        b.hc_enter(op, ops::HcEntered { coefficients, mix, collapsed, x })?;
        b.fork()?;
        let product = |w, x: &B::Buf, out: &mut B::Buf| b.matmul(ops::Matmul { w, x, rows: 1, groups: 1 }, out);
        let [sum, y] = &mut self.y;
        b.aside(|| {
            product(b.view(&self.products[0]), x, aside)?;
            b.swiglu(ops::SwiGlu { up: x, values: HIDDEN, limit: 7.0 }, aside)
        })?;
        // The second product is of the first one's result: another rounded row than that of the branch, at the same time.
        product(b.view(&self.products[1]), x, line)?;
        product(b.view(&self.products[1]), line, sum)?;
        b.join()?;
        b.rms_norm(ops::RmsNorm { x: line, weight: norm, rows: 1, width: HIDDEN, eps: 1e-6 }, y)?;
        // The coefficients are waited for here, and were not before.
        b.hc_expand(
            ops::HcExpand { y, post, comb, rows: 1, stream_count: STREAMS, hidden: HIDDEN },
            &mut self.streams,
        )?;
        let op = ops::CombineExperts { outputs: sum, weights: post, shared: aside, rows: 1, k: 1, width: HIDDEN };
        b.combine_experts(op, y)?;
        std::mem::swap(&mut self.carried, pre);
        Ok(())
    }

    fn values(&self, b: &B) -> Vec<Vec<f32>> {
        [&self.streams, &self.carried, &self.y[0], &self.y[1]].map(|buf| down(b, buf)).into()
    }
}

fn checked(rng: &mut Rng, cpu: &CpuBackend, gpu: &CudaBackend) -> bool {
    let values = Values::new(rng);
    let (mut want, mut got) = (Line::new(cpu, &values), Line::new(gpu, &values));
    // Once in line: afterwards nothing is allocated.
    want.sublayer(cpu).unwrap();
    got.sublayer(gpu).unwrap();
    let table = gpu.slot_table(1, 1).unwrap();
    let room = Room { hidden: HIDDEN, width: HIDDEN, k: 1, is_registered: false };
    let mut is_equal = true;
    for _ in 0..PLAYED {
        let mut pass = table.begin(gpu, room).unwrap();
        pass.record().unwrap();
        for _ in 0..SUBLAYERS {
            want.sublayer(cpu).unwrap();
            got.sublayer(gpu).unwrap();
        }
        if !pass.play(0).unwrap() {
            pass.play_new(0).unwrap();
        }
        pass.end().unwrap();
        let pairs = want.values(cpu).into_iter().zip(got.values(gpu));
        is_equal &= pairs.into_iter().all(|(a, b)| a.iter().zip(&b).all(|(x, y)| x.to_bits() == y.to_bits()));
    }
    is_equal
}

/// Recordings with branches.
pub fn check(rig: &mut Rig) {
    let Some((rng, cpu, gpu)) = rig.fast("beside") else { return };
    let is_good = checked(rng, cpu, gpu);
    rig.note("beside: recorded branches", is_good);
}
