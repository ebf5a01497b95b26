//! Scale search of the formats without minima (Q6_K, Q3_K): value = d * scale * q with signed scale and code.
//! Never uses the symmetric code range only: there is one more negative code than positive ones.
//! Surprising fact: a scale may be negative, which puts that extra code on the side of the sub-block's largest value.

use super::minifloat::round_even_small;
use super::superblock::{LANES, SuperBlock, TooLarge, VALUES, fold, limit};
use half::f16;

/// Values of a sub-block, for both formats.
const N: usize = 16;
const SUBS: usize = VALUES / N;

/// Codes reach from -`code_half` to `code_half` - 1, scales from -`scale_half` to `scale_half` - 1.
#[derive(Clone, Copy)]
pub struct Limits {
    pub code_half: f32,
    pub scale_half: f32,
    /// First guesses: the largest value is mapped to each of these codes, with either sign.
    pub targets: &'static [f32],
}

/// What a block stores, unpacked.
pub struct SignedBlock {
    pub d: f16,
    pub scales: [i8; SUBS],
    pub codes: [i8; VALUES],
    /// Weighted squared error, in normalised units.
    error: f32,
}

/// Encodes a block.
pub fn fit(block: &SuperBlock, limits: Limits) -> Result<SignedBlock, TooLarge> {
    if block.is_zero() {
        return Ok(SignedBlock { d: f16::ZERO, scales: [0; SUBS], codes: [0; VALUES], error: 0.0 });
    }
    let x = block.x.as_chunks::<N>().0;
    let w = block.w.as_chunks::<N>().0;
    let scales: [f32; SUBS] = std::array::from_fn(|sub| fit_scale(&x[sub], &w[sub], limits));
    let largest = scales.iter().copied().fold(0.0, |m: f32, s| if s.abs() > m.abs() { s } else { m });
    // The largest scale takes the extra negative code.
    let d = block.store(-largest / limits.scale_half)?;
    let first = encode(block, d, &scales.map(|scale| round_even_small(scale / d.1)), limits);
    let Some(Ok(d)) = refit_factor(block, &first).map(|d| block.store(d)) else { return Ok(first) };
    let second = encode(block, d, &first.scales.map(f32::from), limits);
    Ok(if second.error < first.error { second } else { first })
}

/// Chooses rounded scales and codes under a factor, given as stored and as normalised value.
fn encode(block: &SuperBlock, d: (f16, f32), starts: &[f32; SUBS], limits: Limits) -> SignedBlock {
    let mut out = SignedBlock { d: d.0, scales: [0; SUBS], codes: [0; VALUES], error: 0.0 };
    let subs = block.x.as_chunks::<N>().0.iter().zip(block.w.as_chunks::<N>().0);
    for (sub, (x, w)) in subs.enumerate() {
        let (error, scale) = choose_rounded(x, w, starts[sub], d.1, limits);
        out.error += error;
        out.scales[sub] = scale as i8;
        write_codes(x, d.1 * scale, limits, &mut out.codes[N * sub..]);
    }
    out
}

#[inline(always)]
fn code(x: f32, inverse: f32, limits: Limits) -> f32 {
    limit(round_even_small(x * inverse), -limits.code_half, limits.code_half - 1.0)
}

/// The best unrounded scale of a sub-block; 0 if it is all zero.
fn fit_scale(x: &[f32; N], w: &[f32; N], limits: Limits) -> f32 {
    let largest = x.iter().copied().fold(0.0, |m: f32, v| if v.abs() > m.abs() { v } else { m });
    if largest == 0.0 {
        return 0.0;
    }
    let (mut best_gain, mut best_scale) = (0.0, 0.0);
    let targets = limits.targets.iter().flat_map(|target| [-target, *target]);
    for inverse in targets.map(|target| target / largest) {
        let (wxq, wqq) = sums(x, w, inverse, limits);
        // The error falls by (sum w x q)^2 / sum w q^2 against storing zeros.
        if wqq > 0.0 && wxq * wxq > best_gain * wqq {
            (best_gain, best_scale) = (wxq * wxq / wqq, wxq / wqq);
        }
    }
    best_scale
}

#[inline(always)]
fn sums(x: &[f32; N], w: &[f32; N], inverse: f32, limits: Limits) -> (f32, f32) {
    let mut lanes = [[0f32; LANES]; 2];
    for i in (0..N).step_by(LANES) {
        for l in 0..LANES {
            let q = code(x[i + l], inverse, limits);
            let wq = w[i + l] * q;
            lanes[0][l] += wq * x[i + l];
            lanes[1][l] += wq * q;
        }
    }
    (fold(lanes[0]), fold(lanes[1]))
}

/// The best whole scale around `start`, with its error.
fn choose_rounded(x: &[f32; N], w: &[f32; N], start: f32, d: f32, limits: Limits) -> (f32, f32) {
    let mut best = (f32::INFINITY, 0.0);
    for step in [0.0, -1.0, 1.0] {
        let scale = limit(start + step, -limits.scale_half, limits.scale_half - 1.0);
        let error = scale_error(x, w, d * scale, limits);
        if error < best.0 {
            best = (error, scale);
        }
    }
    best
}

fn inverse_or_zero(scale: f32) -> f32 {
    if scale != 0.0 { 1.0 / scale } else { 0.0 }
}

fn scale_error(x: &[f32; N], w: &[f32; N], scale: f32, limits: Limits) -> f32 {
    let inverse = inverse_or_zero(scale);
    let mut lanes = [0f32; LANES];
    for i in (0..N).step_by(LANES) {
        for l in 0..LANES {
            let miss = x[i + l] - scale * code(x[i + l], inverse, limits);
            lanes[l] += w[i + l] * miss * miss;
        }
    }
    fold(lanes)
}

fn write_codes(x: &[f32; N], scale: f32, limits: Limits, codes: &mut [i8]) {
    let inverse = inverse_or_zero(scale);
    for (q, x) in codes.iter_mut().zip(x) {
        *q = code(*x, inverse, limits) as i8;
    }
}

/// The factor that minimises the error with all codes and scales kept.
fn refit_factor(block: &SuperBlock, out: &SignedBlock) -> Option<f32> {
    let (mut xy, mut yy) = (0f64, 0f64);
    for sub in 0..SUBS {
        let scale = f32::from(out.scales[sub]);
        let (mut sub_xy, mut sub_yy) = (0f32, 0f32);
        for i in N * sub..N * (sub + 1) {
            let y = scale * f32::from(out.codes[i]);
            sub_xy += block.w[i] * block.x[i] * y;
            sub_yy += block.w[i] * y * y;
        }
        xy += f64::from(sub_xy);
        yy += f64::from(sub_yy);
    }
    (yy > 0.0 && xy != 0.0).then(|| (xy / yy) as f32)
}
