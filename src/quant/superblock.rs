//! A super-block of 256 values made ready for a scale search: normalised by a power of two, with a weight per value.
//! Never changes a value by rounding in the range that an F16 factor can express.
//! Surprising fact: searches run on values near 1, so that neither 1e-30 nor 1e30 squares out of the range of F32.

use super::minifloat::{exp2i, floor_log2};
use half::f16;

/// Values of every super-block type.
pub const VALUES: usize = 256;

/// Weights below this share of the largest count as this share: a weight of zero would leave scales undetermined.
const WEIGHT_FLOOR: f32 = 1e-6;

/// The magnitudes of a block exceed what its F16 factor can express.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TooLarge;

/// Normalised values and weights of a block.
pub struct SuperBlock {
    /// Values times 2^-`exponent`; the largest magnitude is in [1, 2), or all are zero.
    pub x: [f32; VALUES],
    /// Weights of the squared errors, largest 1, all positive.
    pub w: [f32; VALUES],
    exponent: i32,
}

impl SuperBlock {
    /// Prepares finite `values`; `importance` (finite, not negative) weighs their squared errors. Without it all errors
    /// count alike, which minimises the plain squared error.
    pub fn new(values: &[f32; VALUES], importance: Option<&[f32; VALUES]>) -> Self {
        let amax = values.iter().fold(0f32, |m, v| m.max(v.abs()));
        let exponent = if amax > 0.0 { floor_log2(amax).max(-126) } else { 0 };
        let factor = exp2i(-exponent);
        let heaviest = importance.map_or(0.0, |w| w.iter().copied().fold(0.0, f32::max));
        let w = match importance {
            Some(w) if heaviest > 0.0 => w.map(|w| (w / heaviest).max(WEIGHT_FLOOR)),
            _ => [1.0; VALUES],
        };
        SuperBlock { x: values.map(|v| v * factor), w, exponent }
    }

    /// Whether every value is zero.
    pub fn is_zero(&self) -> bool {
        self.x.iter().all(|v| *v == 0.0)
    }

    /// The F16 that stores the normalised factor `d`, and the normalised factor which that stands for.
    pub fn store(&self, d: f32) -> Result<(f16, f32), TooLarge> {
        let product = d * exp2i(self.exponent);
        let underflows = product == 0.0 && d != 0.0;
        let stored = factor_to_f16(if underflows { f32::from_bits(1).copysign(d) } else { product });
        if stored.is_finite() { Ok((stored, stored.to_f32() * exp2i(-self.exponent))) } else { Err(TooLarge) }
    }
}

/// Nearest F16, but away from zero among the subnormals: there a step is so wide that rounding down would clip the
/// largest values of the block.
pub fn factor_to_f16(v: f32) -> f16 {
    let near = f16::from_f32(v);
    if near.to_f32().abs() < v.abs() && v.abs() < f16::MIN_POSITIVE.to_f32() {
        f16::from_bits(near.to_bits() + 1)
    } else {
        near
    }
}

/// `v` limited to `low..=high`, written so that it compiles to one minimum and one maximum.
#[inline(always)]
pub fn limit(v: f32, low: f32, high: f32) -> f32 {
    let v = if v < low { low } else { v };
    if v > high { high } else { v }
}

/// Independent partial sums of a reduction over one sub-block, added up in a fixed order.
pub const LANES: usize = 8;

/// Sum of the lanes, in a fixed tree.
#[inline(always)]
pub fn fold(lanes: [f32; LANES]) -> f32 {
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}
