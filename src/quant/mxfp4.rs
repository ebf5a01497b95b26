//! MXFP4: 32 E2M1 codes under one power-of-two scale. Never rounds: every product is exact in F32.
//! Surprising fact: GGUF stores value `i` in the low nibble of byte `i` and value `i + 16` in its high nibble, unlike
//! native checkpoints, which pair neighbours.

use super::minifloat::{e2m1_from_f32, exp2i, floor_log2};
use super::superblock::TooLarge;

/// Values of a block.
pub const VALUES: usize = 32;
/// Bytes of a block: E8M0 scale, 16 bytes of codes.
pub const BYTES: usize = 17;

/// Twice the value of each E2M1 code, which makes them whole numbers; [`scale`] carries the factor 1/2.
pub static CODES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Factor of the doubled codes for a stored exponent: 2^(`exponent` - 128). 0xff is a factor here too (2^127), as in
/// other readers of the format, though E8M0 calls it NaN.
pub const fn scale(exponent: u8) -> f32 {
    exp2i(exponent as i32 - 128)
}

/// Decodes one block.
pub fn decode(block: &[u8; BYTES], out: &mut [f32; VALUES]) {
    let d = scale(block[0]);
    for (i, byte) in block[1..].iter().enumerate() {
        out[i] = f32::from(CODES[usize::from(byte & 15)]) * d;
        out[i + 16] = f32::from(CODES[usize::from(byte >> 4)]) * d;
    }
}

/// Encodes one block of finite values with the power of two that gives the smallest weighted squared error.
pub(super) fn encode(
    values: &[f32; VALUES],
    importance: Option<&[f32; VALUES]>,
    out: &mut [u8; BYTES],
) -> Result<(), TooLarge> {
    let amax = values.iter().fold(0f32, |m, v| m.max(v.abs()));
    // With `base` the largest value lies in [4, 8) codes: representable values are exact there. One lower clips the
    // largest values, one higher makes room for those that round up to 8.
    let base = if amax > 0.0 { floor_log2(amax) - 2 + BIAS } else { 0 };
    let unweighted = [1.0; VALUES];
    let weights = importance.filter(|w| w.iter().any(|w| *w > 0.0)).unwrap_or(&unweighted);
    let mut best = (f64::INFINITY, 0);
    for exponent in [base, base + 1, base - 1] {
        let exponent = exponent.clamp(0, EXPONENT_MAX);
        let error = block_error(values, weights, exponent as u8);
        if error < best.0 {
            best = (error, exponent as u8);
        }
    }
    let (exponent, codes) = canonical(best.1, values.map(|v| code(v, best.1)));
    out[0] = exponent;
    for (i, byte) in out[1..].iter_mut().enumerate() {
        *byte = codes[i] | codes[i + 16] << 4;
    }
    Ok(())
}

/// Largest stored exponent under which no code leaves the range of F32; every finite `base` is within it.
const EXPONENT_MAX: i32 = 252;

/// Bias of the stored exponent for the values of the codes themselves (not doubled).
const BIAS: i32 = 127;

/// The code of `v` under a stored exponent; zero has one code only.
fn code(v: f32, exponent: u8) -> u8 {
    // Two exact steps: 2^(127 - exponent) alone may leave the range of F32.
    let shift = BIAS - i32::from(exponent);
    let code = e2m1_from_f32(v * exp2i(shift / 2) * exp2i(shift - shift / 2));
    if code == 8 { 0 } else { code }
}

fn block_error(values: &[f32; VALUES], weights: &[f32; VALUES], exponent: u8) -> f64 {
    let step = f64::from(scale(exponent));
    let errors = values.iter().zip(weights).map(|(v, w)| {
        let miss = f64::from(*v) - f64::from(CODES[usize::from(code(*v, exponent))]) * step;
        f64::from(*w) * miss * miss
    });
    errors.sum()
}

/// Rewrites codes that are all at most 3 as their doubles under half the scale, so that equal values have equal bytes.
fn canonical(mut exponent: u8, mut codes: [u8; VALUES]) -> (u8, [u8; VALUES]) {
    const DOUBLE: [u8; 6] = [0, 2, 4, 5, 6, 7];
    while exponent > 0 && codes.iter().all(|c| c & 7 <= 5) && codes.iter().any(|c| *c != 0) {
        exponent -= 1;
        codes = codes.map(|c| c & 8 | DOUBLE[usize::from(c & 7)]);
    }
    (exponent, codes)
}
