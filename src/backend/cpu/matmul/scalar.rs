//! The plain twins of all row products: the definition that SIMD versions must equal bit for bit.
//! Never fast, never clever. The order of sums in blocks: the whole numbers of a block are summed exactly, so in any order; the sum is
//! multiplied by the block's factor and added with one rounding to one of eight (blocks of 32) or four (blocks of 256) running sums, in
//! turns. Floats add in 32 lanes. Folds at the end of the row make one number of the running sums.
//! Surprising fact: no result is ever -0.0, which is what lets SIMD versions pad a row with zeros.

use super::activations::{Block256, Floats, Step32};
use crate::quant::{QuantType, iq2_xxs, mxfp4, q2_k, q3_k, q4_k, q6_k};
use half::{bf16, f16};

/// Running sums of blocks of 32; block `b` belongs to sum `b % 8`.
const OCTET: usize = 8;
/// Running sums of blocks of 256; block `b` belongs to sum `b % 4`.
const QUAD: usize = 4;
/// Lanes of the running sums of plain floats; a value belongs to lane `i % 32`.
const FLOAT_LANES: usize = 32;

/// Folds halves onto each other: 8 -> 4 -> 2 -> 1.
fn reduce8(eight: [f32; OCTET]) -> f32 {
    reduce4(std::array::from_fn(|i| eight[i] + eight[i + 4]))
}

/// Folds halves onto each other: 4 -> 2 -> 1, and -0.0 to 0.0.
fn reduce4(four: [f32; QUAD]) -> f32 {
    ((four[0] + four[2]) + (four[1] + four[3])) + 0.0
}

/// A row of F32, F16 or BF16 weights.
pub(crate) fn float_dot(ty: QuantType, row: &[u8], x: &[Floats]) -> f32 {
    let mut lanes = [0.0f32; FLOAT_LANES];
    let bytes = ty.block_bytes();
    for (i, (value, x)) in row.chunks_exact(bytes).zip(x.iter().flat_map(|x| x.0)).enumerate() {
        let value = match ty {
            QuantType::F32 => f32::from_le_bytes([value[0], value[1], value[2], value[3]]),
            QuantType::F16 => f16::from_le_bytes([value[0], value[1]]).to_f32(),
            QuantType::BF16 => bf16::from_le_bytes([value[0], value[1]]).to_f32(),
            _ => panic!("{ty} is not a type of plain floats"),
        };
        lanes[i % FLOAT_LANES] = value.mul_add(x, lanes[i % FLOAT_LANES]);
    }
    let sixteen: [f32; 16] = std::array::from_fn(|i| lanes[i] + lanes[i + 16]);
    reduce8(std::array::from_fn(|i| sixteen[i] + sixteen[i + 8]))
}

/// A row of Q8_0 or MXFP4 weights. Whole numbers stay below 32 x 127 x 128.
pub(crate) fn dot32(ty: QuantType, row: &[u8], x: &[Step32]) -> f32 {
    let mut sums = [0.0f32; OCTET];
    for (b, block) in row.chunks_exact(ty.block_bytes()).enumerate() {
        let (codes, d): ([i8; 32], f32) = match ty {
            QuantType::Q8_0 => (std::array::from_fn(|i| block[2 + i] as i8), half_at(block, 0)),
            QuantType::MXFP4 => {
                let code = |i: usize| mxfp4::CODES[usize::from(block[1 + i % 16] >> (i / 16 * 4) & 15)];
                (std::array::from_fn(code), mxfp4::scale(block[0]))
            }
            _ => panic!("{ty} does not have blocks of 32"),
        };
        let step = &x[b / 16];
        let x = &step.codes[b % 16 * 32..][..32];
        let whole: i32 = codes.iter().zip(x).map(|(w, x)| i32::from(*w) * i32::from(*x)).sum();
        let sum = &mut sums[b % OCTET];
        *sum = (whole as f32).mul_add(d * step.scales[b % 16], *sum);
    }
    reduce8(sums)
}

/// A block of 256 taken apart: value `i` is `d * scales[i / 16] * (codes[i] - offset) - dmin * mins[i / 16]`.
struct Parts {
    codes: [i32; 256],
    scales: [i32; 16],
    offset: i32,
    mins: [i32; 16],
    d: f32,
    dmin: f32,
}

/// A row of weights in blocks of 256.
///
/// Whole numbers stay inside 32 bits: 256 activation codes of at most 127 meet code times scale of at most 3 x 15 (Q2_K), 7 x 32 (Q3_K),
/// 15 x 63 (Q4_K), 63 x 128 (Q6_K), 43 x 31 (IQ2_XXS), so the largest sum is 2^28; offset times scale (Q6_K: 32 x 128) adds half of
/// that, minima (at most 63) less.
pub(crate) fn dot256(ty: QuantType, row: &[u8], x: &[Block256]) -> f32 {
    let mut sums = [0.0f32; QUAD];
    for (b, block) in row.chunks_exact(ty.block_bytes()).enumerate() {
        let parts = take_apart(ty, block);
        let (mut whole, mut mins) = (0i32, 0i32);
        for i in 0..256 {
            whole += parts.scales[i / 16] * parts.codes[i] * i32::from(x[b].codes[i]);
        }
        for s in 0..16 {
            whole -= parts.offset * parts.scales[s] * i32::from(x[b].sums[s]);
            mins -= parts.mins[s] * i32::from(x[b].sums[s]);
        }
        let (sum, scale) = (&mut sums[b % QUAD], x[b].scales[b % QUAD]);
        *sum = (whole as f32).mul_add(parts.d * scale, *sum);
        if matches!(ty, QuantType::Q2_K | QuantType::Q4_K) {
            *sum = (mins as f32).mul_add(parts.dmin * scale, *sum);
        }
    }
    reduce4(sums)
}

fn take_apart(ty: QuantType, block: &[u8]) -> Parts {
    let mut parts = Parts { codes: [0; 256], scales: [0; 16], offset: 0, mins: [0; 16], d: 0.0, dmin: 0.0 };
    let pair = |low: u8, shift: usize| i32::from(low >> shift & 3);
    match ty {
        QuantType::Q2_K => {
            (parts.d, parts.dmin) = (half_at(block, 80), half_at(block, 82));
            parts.scales = std::array::from_fn(|s| i32::from(block[s] & 15));
            parts.mins = std::array::from_fn(|s| i32::from(block[s] >> 4));
            parts.codes = std::array::from_fn(|i| {
                let (byte, shift) = q2_k::code_position(i);
                pair(block[16 + byte], shift)
            });
        }
        QuantType::Q3_K => {
            parts.d = half_at(block, 108);
            parts.offset = 4;
            parts.scales = q3_k::unpack_scales(&twelve(block, 96)).map(i32::from);
            parts.codes = std::array::from_fn(|i| {
                let (byte, shift) = q2_k::code_position(i);
                pair(block[32 + byte], shift) | i32::from(block[i % 32] >> (i / 32) & 1) << 2
            });
        }
        QuantType::Q4_K => {
            (parts.d, parts.dmin) = (half_at(block, 0), half_at(block, 2));
            let (scales, mins) = q4_k::unpack_scales(&twelve(block, 4));
            parts.scales = std::array::from_fn(|s| i32::from(scales[s / 2]));
            parts.mins = std::array::from_fn(|s| i32::from(mins[s / 2]));
            parts.codes = std::array::from_fn(|i| i32::from(block[16 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15));
        }
        QuantType::Q6_K => {
            parts.d = half_at(block, 208);
            parts.offset = 32;
            parts.scales = std::array::from_fn(|s| i32::from(block[192 + s] as i8));
            parts.codes = std::array::from_fn(|i| {
                let ((low, low_shift), (high, high_shift)) = (q6_k::low_position(i), q6_k::high_position(i));
                i32::from(block[low] >> low_shift & 15) | pair(block[128 + high], high_shift) << 4
            });
        }
        QuantType::IQ2_XXS => {
            // The factor d * (0.5 + code) / 4 is d / 8 times the whole number 2 * code + 1.
            parts.d = half_at(block, 0) * 0.125;
            for (sub, bytes) in block[2..].chunks_exact(8).enumerate() {
                let word = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
                parts.scales[2 * sub..2 * sub + 2].fill(2 * (word >> 28) as i32 + 1);
                for i in 0..32 {
                    let magnitude = i32::from(iq2_xxs::GRID[usize::from(bytes[i / 8])].to_le_bytes()[i % 8]);
                    let signs = iq2_xxs::sign_bits((word >> (i / 8 * 7) & 127) as u8);
                    parts.codes[32 * sub + i] = if signs >> (i % 8) & 1 != 0 { -magnitude } else { magnitude };
                }
            }
        }
        _ => panic!("{ty} does not have blocks of 256"),
    }
    parts
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

fn twelve(block: &[u8], at: usize) -> [u8; 12] {
    std::array::from_fn(|i| block[at + i])
}
