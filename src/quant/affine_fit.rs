//! Scale search of the formats with minima (Q4_K, Q2_K): value = d * scale * q - dmin * min.
//! Never returns a negative minimum. Surprising fact: the closed-form least-squares line through the codes is only a
//! starting point; most of the last few percent come from choosing the *rounded* scale and minimum together.

use super::minifloat::round_even_small;
use super::superblock::{LANES, SuperBlock, TooLarge, VALUES, fold, limit};
use half::f16;

/// Largest code, scale and minimum of a format.
#[derive(Clone, Copy)]
pub struct Limits {
    pub code_max: u8,
    pub scale_max: u8,
}

/// What a block stores, unpacked; entries beyond the format's sub-blocks are zero.
pub struct AffineBlock {
    pub d: f16,
    pub dmin: f16,
    pub scales: [u8; 16],
    pub mins: [u8; 16],
    pub codes: [u8; VALUES],
    /// Weighted squared error, in normalised units.
    error: f32,
}

impl AffineBlock {
    const ZERO: AffineBlock =
        AffineBlock { d: f16::ZERO, dmin: f16::ZERO, scales: [0; 16], mins: [0; 16], codes: [0; VALUES], error: 0.0 };
}

/// Line of one sub-block: value = `scale` * q - `min`.
#[derive(Clone, Copy, Default)]
struct Line {
    scale: f32,
    min: f32,
}

/// First guesses of a sub-block's scale: the range is spread over `code_max` + each of these.
const STRETCH: [f32; 9] = [-0.9, -0.65, -0.4, -0.2, 0.0, 0.2, 0.4, 0.65, 0.9];

/// Encodes a block in sub-blocks of `N` values.
pub fn fit<const N: usize>(block: &SuperBlock, limits: Limits) -> Result<AffineBlock, TooLarge> {
    if block.is_zero() {
        return Ok(AffineBlock::ZERO);
    }
    let x = block.x.as_chunks::<N>().0;
    let w = block.w.as_chunks::<N>().0;
    let mut lines = [Line::default(); 16];
    for (line, (x, w)) in lines.iter_mut().zip(x.iter().zip(w)) {
        *line = fit_line(x, w, f32::from(limits.code_max));
    }
    let top = |f: fn(&Line) -> f32| lines.iter().map(f).fold(0.0, f32::max) / f32::from(limits.scale_max);
    let (d, dmin) = (block.store(top(|l| l.scale))?, block.store(top(|l| l.min))?);
    let starts = lines.map(|line| (nearest(line.scale, d.1, limits), nearest(line.min, dmin.1, limits)));
    let first = encode::<N>(block, d, dmin, &starts, limits);
    let Some((d, dmin)) = refit_factors::<N>(block, &first) else { return Ok(first) };
    let (Ok(d), Ok(dmin)) = (block.store(d), block.store(dmin)) else { return Ok(first) };
    let starts = std::array::from_fn(|sub| (first.scales[sub], first.mins[sub]));
    let second = encode::<N>(block, d, dmin, &starts, limits);
    Ok(if second.error < first.error { second } else { first })
}

/// Whole multiple of `d` nearest to `v`, within the format's range.
fn nearest(v: f32, d: f32, limits: Limits) -> u8 {
    if d > 0.0 { limit(round_even_small(v / d), 0.0, f32::from(limits.scale_max)) as u8 } else { 0 }
}

/// Chooses rounded scales, minima and codes under two factors, each given as stored and as normalised value.
fn encode<const N: usize>(
    block: &SuperBlock,
    d: (f16, f32),
    dmin: (f16, f32),
    starts: &[(u8, u8); 16],
    limits: Limits,
) -> AffineBlock {
    let mut out = AffineBlock { d: d.0, dmin: dmin.0, ..AffineBlock::ZERO };
    let subs = block.x.as_chunks::<N>().0.iter().zip(block.w.as_chunks::<N>().0);
    for (sub, (x, w)) in subs.enumerate() {
        let (error, scale, min) = choose_rounded(x, w, starts[sub], d.1, dmin.1, limits);
        out.error += error;
        (out.scales[sub], out.mins[sub]) = (scale, min);
        let line = Line { scale: d.1 * f32::from(scale), min: dmin.1 * f32::from(min) };
        write_codes(x, line, f32::from(limits.code_max), &mut out.codes[N * sub..]);
    }
    out
}

/// Sums over a sub-block that determine the least-squares line through (q, t).
struct Sums {
    wq: f32,
    wqq: f32,
    wtq: f32,
}

#[inline(always)]
fn code(t: f32, inverse: f32, code_max: f32) -> f32 {
    limit(round_even_small(t * inverse), 0.0, code_max)
}

#[inline(always)]
fn sums<const N: usize>(t: &[f32; N], w: &[f32; N], inverse: f32, code_max: f32) -> Sums {
    let mut lanes = [[0f32; LANES]; 3];
    for i in (0..N).step_by(LANES) {
        for l in 0..LANES {
            let q = code(t[i + l], inverse, code_max);
            let wq = w[i + l] * q;
            lanes[0][l] += wq;
            lanes[1][l] += wq * q;
            lanes[2][l] += wq * t[i + l];
        }
    }
    Sums { wq: fold(lanes[0]), wqq: fold(lanes[1]), wtq: fold(lanes[2]) }
}

/// The best unrounded line of a sub-block.
fn fit_line<const N: usize>(x: &[f32; N], w: &[f32; N], code_max: f32) -> Line {
    let low = x.iter().copied().fold(0.0, f32::min);
    let high = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if high <= low {
        return Line { scale: 0.0, min: -low };
    }
    // t >= 0 keeps the sums free of cancellation.
    let t = x.map(|x| x - low);
    let (mut w_sum, mut wt, mut wtt) = (0.0, 0.0, 0.0);
    for (t, w) in t.iter().zip(w) {
        w_sum += w;
        wt += w * t;
        wtt += w * t * t;
    }
    let solve = |inverse: f32| -> Option<(f32, f32, f32)> {
        let s = sums(&t, w, inverse, code_max);
        let det = w_sum * s.wqq - s.wq * s.wq;
        if det <= 1e-6 * w_sum * s.wqq {
            return None;
        }
        let mut scale = (w_sum * s.wtq - s.wq * wt) / det;
        let mut base = (s.wqq * wt - s.wq * s.wtq) / det;
        if base + low > 0.0 {
            base = -low;
            scale = (s.wtq - base * s.wq) / s.wqq;
        }
        let error = wtt - 2.0 * (scale * s.wtq + base * wt)
            + scale * scale * s.wqq
            + base * (2.0 * scale * s.wq + base * w_sum);
        (scale > 0.0).then_some((error, scale, base))
    };
    let mut best = (f32::INFINITY, (high - low) / code_max, 0.0);
    for stretch in STRETCH {
        if let Some(found) = solve((code_max + stretch) / (high - low)).filter(|f| f.0 < best.0) {
            best = found;
        }
    }
    Line { scale: best.1, min: -(best.2 + low) }
}

/// The best of nine rounded pairs around `start`: its error, scale and minimum. A larger scale is tried with larger
/// minima, since the codes then start lower.
fn choose_rounded<const N: usize>(
    x: &[f32; N],
    w: &[f32; N],
    start: (u8, u8),
    d: f32,
    dmin: f32,
    limits: Limits,
) -> (f32, u8, u8) {
    const STEPS: [i32; 3] = [0, -1, 1];
    let within = |v: i32| v.clamp(0, i32::from(limits.scale_max)) as u8;
    let mut best = (f32::INFINITY, 0, 0);
    for step in STEPS {
        let scale = within(i32::from(start.0) + step);
        for min_step in STEPS {
            let min = within(i32::from(start.1) + step + min_step);
            let line = Line { scale: d * f32::from(scale), min: dmin * f32::from(min) };
            let error = line_error(x, w, line, f32::from(limits.code_max));
            if error < best.0 {
                best = (error, scale, min);
            }
        }
    }
    best
}

fn inverse_or_zero(scale: f32) -> f32 {
    if scale > 0.0 { 1.0 / scale } else { 0.0 }
}

fn line_error<const N: usize>(x: &[f32; N], w: &[f32; N], line: Line, code_max: f32) -> f32 {
    let inverse = inverse_or_zero(line.scale);
    let mut lanes = [0f32; LANES];
    for i in (0..N).step_by(LANES) {
        for l in 0..LANES {
            let t = x[i + l] + line.min;
            let miss = t - line.scale * code(t, inverse, code_max);
            lanes[l] += w[i + l] * miss * miss;
        }
    }
    fold(lanes)
}

fn write_codes<const N: usize>(x: &[f32; N], line: Line, code_max: f32, codes: &mut [u8]) {
    let inverse = inverse_or_zero(line.scale);
    for (q, x) in codes.iter_mut().zip(x) {
        *q = code(x + line.min, inverse, code_max) as u8;
    }
}

/// The two factors that minimise the error with all codes, scales and minima kept. `None` if they are undetermined or
/// not positive.
fn refit_factors<const N: usize>(block: &SuperBlock, out: &AffineBlock) -> Option<(f32, f32)> {
    let (mut aa, mut ab, mut bb, mut ax, mut bx) = (0f64, 0f64, 0f64, 0f64, 0f64);
    for sub in 0..VALUES / N {
        let (mut w_sum, mut wq, mut wqq, mut wx, mut wxq) = (0f32, 0f32, 0f32, 0f32, 0f32);
        for i in N * sub..N * (sub + 1) {
            let (x, w, q) = (block.x[i], block.w[i], f32::from(out.codes[i]));
            w_sum += w;
            wq += w * q;
            wqq += w * q * q;
            wx += w * x;
            wxq += w * x * q;
        }
        let (scale, min) = (f64::from(out.scales[sub]), f64::from(out.mins[sub]));
        aa += scale * scale * f64::from(wqq);
        ab -= scale * min * f64::from(wq);
        bb += min * min * f64::from(w_sum);
        ax += scale * f64::from(wxq);
        bx -= min * f64::from(wx);
    }
    if bb == 0.0 {
        return (aa > 0.0).then(|| ((ax / aa) as f32, 0.0));
    }
    let det = aa * bb - ab * ab;
    if det <= 1e-9 * aa * bb {
        return None;
    }
    let (d, dmin) = ((ax * bb - bx * ab) / det, (bx * aa - ax * ab) / det);
    (d > 0.0 && dmin > 0.0).then_some((d as f32, dmin as f32))
}
