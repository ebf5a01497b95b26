//! Random bytes made into valid blocks of each format, with a chosen spread of the decoded values.
//! Owns the scale of every format; never computes a value to encode it. Surprising fact: nearly every bit pattern is a valid block,
//! so only the factors of a block, and the one code that stands for "not a number", are set after the dice.

use std::sync::Arc;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use xxhash_rust::xxh3::xxh3_64;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::geometry::Tensor;
use super::routing::score;
use crate::quant::QuantType;
use crate::quant::iq2_xxs::GRID;

/// A source of bytes that depends on seed, tensor and position only.
pub(super) struct Stream(ChaCha8Rng);

impl Stream {
    pub(super) fn new(seed: u64, tensor: &str, group: u64) -> Self {
        let mut key = *b"________________ds4 synthetic 01";
        key[..8].copy_from_slice(&seed.to_le_bytes());
        key[8..16].copy_from_slice(&xxh3_64(tensor.as_bytes()).to_le_bytes());
        let mut rng = ChaCha8Rng::from_seed(key);
        rng.set_stream(group);
        Self(rng)
    }
}

/// What the values of a tensor are to be.
#[derive(Clone, Debug)]
pub(super) enum Fill {
    /// Even noise around a centre, F32 tensors only.
    Around { centre: f32, spread: f32 },
    /// Mean zero and this standard deviation.
    Noise { std: f32 },
    /// Router biases by rank, in the order that the layer's dice give them.
    Biases(Ranks),
    /// Rows of so many experts, as a router with these biases would choose them.
    Experts { ranks: Ranks, used: usize },
    /// N-gram rows: e4m3 codes, then a scale a group of 32.
    Rows,
}

/// Router biases by rank, and what decides which expert has which rank.
#[derive(Clone, Debug)]
pub(super) struct Ranks {
    ranked: Arc<[f32]>,
    layer: String,
    seed: u64,
}

impl Ranks {
    /// Of the layer of `tensor`: all its tensors favour the same experts.
    fn new(tensor: &Tensor, ranked: &Arc<[f32]>, seed: u64) -> Self {
        let layer = tensor.name.strip_suffix(tensor.stem).unwrap_or_default().to_owned();
        Self { ranked: Arc::clone(ranked), layer, seed }
    }

    /// The biases by expert.
    fn by_expert(&self) -> Vec<f32> {
        shuffled(&self.ranked, &mut Stream::new(self.seed, &self.layer, 0))
    }
}

impl Fill {
    /// What suits a tensor, so that every product of normalised inputs has outputs near one.
    pub(super) fn of(tensor: &Tensor, biases: &Arc<[f32]>, seed: u64) -> Self {
        let stem = tensor.stem;
        match stem {
            "token_embd.weight" => Self::Noise { std: 1.0 },
            "engram_embd.weight" => Self::Rows,
            "attn_sinks.weight" => Self::Around { centre: 0.0, spread: 1.0 },
            "hc_attn_base.weight" | "hc_ffn_base.weight" | "output_hc_base.weight" => {
                Self::Around { centre: 0.0, spread: 0.5 }
            }
            "hc_attn_scale.weight" | "hc_ffn_scale.weight" | "output_hc_scale.weight" => {
                Self::Around { centre: 0.5, spread: 0.1 }
            }
            "attn_compressor_ape.weight" | "indexer_compressor_ape.weight" => Self::Around { centre: 0.0, spread: 0.7 },
            "exp_probs_b.bias" | "exp_probs_b_vl.bias" => Self::Biases(Ranks::new(tensor, biases, seed)),
            "ffn_gate_tid2eid.weight" => {
                Self::Experts { ranks: Ranks::new(tensor, biases, seed), used: tensor.dims[0] as usize }
            }
            _ if stem.contains("norm.") => Self::Around { centre: 1.0, spread: 0.1 },
            _ => Self::Noise { std: (tensor.dims[0] as f32).sqrt().recip() },
        }
    }

    /// Fills whole rows, the first of which is `first_row` of the tensor.
    pub(super) fn write(&self, ty: QuantType, first_row: u64, row_bytes: usize, stream: &mut Stream, out: &mut [u8]) {
        match self {
            Self::Biases(ranks) => {
                let values = ranks.by_expert();
                let at = first_row as usize * row_bytes / 4;
                for (bytes, value) in out.chunks_exact_mut(4).zip(&values[at..]) {
                    bytes.copy_from_slice(&value.to_le_bytes());
                }
                return;
            }
            Self::Experts { ranks, used } => return experts(&ranks.by_expert(), *used, stream, out),
            _ => stream.0.fill_bytes(out),
        }
        match *self {
            Self::Biases(_) | Self::Experts { .. } => unreachable!("written above"),
            Self::Rows => out.chunks_exact_mut(row_bytes).for_each(table_row),
            Self::Noise { std } => noise(ty, std, out),
            Self::Around { centre, spread } => {
                for bytes in out.chunks_exact_mut(4) {
                    let dice = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                    bytes.copy_from_slice(&(centre + spread * even(dice >> 16)).to_le_bytes());
                }
            }
        }
    }
}

/// A permutation of `values`.
fn shuffled(values: &[f32], stream: &mut Stream) -> Vec<f32> {
    let mut out = values.to_vec();
    for last in (1..out.len()).rev() {
        out.swap(last, (stream.0.next_u64() % (last as u64 + 1)) as usize);
    }
    out
}

/// Fills rows of `used` ids each: the experts of the best scores, where each has a logit from the dice and its bias, as in a router of
/// random weights.
fn experts(biases: &[f32], used: usize, stream: &mut Stream, out: &mut [u8]) {
    let mut scores: Vec<(f64, u32)> = Vec::with_capacity(biases.len() + 1);
    for row in out.chunks_exact_mut(4 * used) {
        scores.clear();
        for (pair, first) in biases.chunks(2).zip((0..).step_by(2)) {
            let logits = two_normals(stream);
            scores
                .extend(pair.iter().zip(logits).zip(first..).map(|((bias, z), id)| (score(z) + f64::from(*bias), id)));
        }
        // The better first; equal scores by id, so that the bytes depend on nothing else.
        scores.select_nth_unstable_by(used - 1, |a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let chosen = &mut scores[..used];
        chosen.sort_unstable_by_key(|(_, id)| *id);
        for (bytes, (_, id)) in row.chunks_exact_mut(4).zip(chosen) {
            bytes.copy_from_slice(&(*id as i32).to_le_bytes());
        }
    }
}

/// Two draws of a standard normal variable (Box and Muller).
fn two_normals(stream: &mut Stream) -> [f64; 2] {
    let dice = stream.0.next_u64();
    // In 0 .. 1, never 0.
    let even = |bits: u64| (bits as f64 + 0.5) / 4_294_967_296.0;
    let radius = (-2.0 * even(dice >> 32).ln()).sqrt();
    let (sin, cos) = (std::f64::consts::TAU * even(dice & 0xffff_ffff)).sin_cos();
    [radius * sin, radius * cos]
}

/// Sixteen bits as a value in -1 .. 1.
fn even(dice: u32) -> f32 {
    (dice as f32 + 0.5) / 32_768.0 - 1.0
}

/// Root mean square of whole numbers `0..=max`, all alike.
fn root_mean_square(max: u32) -> f32 {
    let squares: f32 = (0..=max).map(|v| (v * v) as f32).sum();
    (squares / (max + 1) as f32).sqrt()
}

/// Sets the factors of random blocks of `ty` so that their values have the standard deviation `std`.
fn noise(ty: QuantType, std: f32, out: &mut [u8]) {
    // An even distribution reaches the square root of three times its deviation.
    let reach = std * 3f32.sqrt();
    let halves = |out: &[u8]| -> Vec<f32> {
        out.chunks_exact(2).map(|b| reach * even(u32::from(u16::from_le_bytes([b[0], b[1]])))).collect()
    };
    match ty {
        QuantType::F32 => {
            for bytes in out.chunks_exact_mut(4) {
                let dice = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                bytes.copy_from_slice(&(reach * even(dice >> 16)).to_le_bytes());
            }
        }
        QuantType::F16 => {
            let values = halves(out);
            let mut stored = vec![f16::ZERO; values.len()];
            stored.convert_from_f32_slice(&values);
            out.chunks_exact_mut(2).zip(stored).for_each(|(b, v)| b.copy_from_slice(&v.to_le_bytes()));
        }
        QuantType::BF16 => {
            let values = halves(out);
            let mut stored = vec![bf16::ZERO; values.len()];
            stored.convert_from_f32_slice(&values);
            out.chunks_exact_mut(2).zip(stored).for_each(|(b, v)| b.copy_from_slice(&v.to_le_bytes()));
        }
        QuantType::Q8_0 => {
            let d = f16::from_f32(reach / 127.0).to_le_bytes();
            for block in out.chunks_exact_mut(34) {
                block[..2].copy_from_slice(&d);
                // The code -128 is not used by encoders.
                block[2..].iter_mut().for_each(|code| *code = if *code == 0x80 { 0x81 } else { *code });
            }
        }
        QuantType::IQ2_XXS => {
            let d = f16::from_f32(std / iq2_spread()).to_le_bytes();
            out.chunks_exact_mut(66).for_each(|block| block[..2].copy_from_slice(&d));
        }
        QuantType::Q2_K => {
            // Scale and minimum of a sub-block are equal, and dmin = 1.5 d: codes 0 to 3 stand for -1.5 .. 1.5 scales.
            let d = std / (root_mean_square(15) * 1.25f32.sqrt());
            let [d, dmin] = [d, 1.5 * d].map(|v| f16::from_f32(v).to_le_bytes());
            for block in out.chunks_exact_mut(84) {
                block[..16].iter_mut().for_each(|b| *b = (*b & 15) * 17);
                block[80..82].copy_from_slice(&d);
                block[82..].copy_from_slice(&dmin);
            }
        }
        QuantType::Q4_K => {
            // As above with codes 0 to 15: -7.5 .. 7.5 scales, whose mean square is 21.25.
            let d = std / (root_mean_square(63) * 21.25f32.sqrt());
            let [d, dmin] = [d, 7.5 * d].map(|v| f16::from_f32(v).to_le_bytes());
            for block in out.chunks_exact_mut(144) {
                block[..2].copy_from_slice(&d);
                block[2..4].copy_from_slice(&dmin);
                block.copy_within(4..8, 8);
                block[12..16].iter_mut().for_each(|b| *b = (*b & 15) * 17);
            }
        }
        QuantType::Q3_K => {
            // 32 bytes of high bits, 64 of low bits, 12 of scales (6 bits, minus 32), d: codes -4 .. 3.
            let scale = ((0..64).map(|s| (s - 32) * (s - 32)).sum::<i32>() as f32 / 64.0).sqrt();
            let d = f16::from_f32(std / (scale * 5.5f32.sqrt())).to_le_bytes();
            out.chunks_exact_mut(110).for_each(|block| block[108..].copy_from_slice(&d));
        }
        QuantType::Q6_K => {
            // 192 bytes of codes -32 .. 31, 16 signed scales, d.
            let scale = ((-128..128).map(|s: i32| s * s).sum::<i32>() as f32 / 256.0).sqrt();
            let code = ((-32..32).map(|c: i32| c * c).sum::<i32>() as f32 / 64.0).sqrt();
            let d = f16::from_f32(std / (scale * code)).to_le_bytes();
            out.chunks_exact_mut(210).for_each(|block| block[208..].copy_from_slice(&d));
        }
        QuantType::MXFP4 => {
            // Doubled codes have a mean square of 34.25 and the factor 2^(exponent - 128).
            let exponent = (std / 34.25f32.sqrt()).log2().round() as i32 + 128;
            out.chunks_exact_mut(17).for_each(|block| block[0] = exponent.clamp(1, 252) as u8);
        }
        QuantType::I8 | QuantType::I32 => unreachable!("rows have a fill of their own"),
    }
}

/// Spread of IQ2_XXS values of random blocks with a factor of one.
fn iq2_spread() -> f32 {
    let squares: f64 = GRID.iter().flat_map(|g| g.to_le_bytes()).map(|m| f64::from(m) * f64::from(m)).sum();
    let magnitude = squares / (8 * GRID.len()) as f64;
    let scale: f64 = (0..16).map(|c| (0.5 + f64::from(c)) * (0.5 + f64::from(c))).sum::<f64>() / 16.0;
    (magnitude * scale).sqrt() as f32 * 0.25
}

/// One row of an n-gram table: no code is "not a number", and scales bring the values near one.
fn table_row(row: &mut [u8]) {
    let width = row.len() / 33 * 32;
    let (codes, scales) = row.split_at_mut(width);
    codes.iter_mut().for_each(|code| *code -= u8::from(*code & 0x7f == 0x7f));
    scales.iter_mut().for_each(|scale| *scale = ROW_SCALE);
}

/// Exponent (bias 127) that divides the spread of random e4m3 codes, 122, by 128.
const ROW_SCALE: u8 = 120;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::dequantize_row;
    use crate::quant::minifloat::E4M3;

    fn spread(values: &[f32]) -> (f64, f64) {
        let n = values.len() as f64;
        let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
        let square = values.iter().map(|v| f64::from(*v) * f64::from(*v)).sum::<f64>() / n;
        (mean, square.sqrt())
    }

    #[test]
    fn every_format_has_the_wanted_spread() {
        const STD: f32 = 0.02;
        for ty in QuantType::ALL.into_iter().filter(|t| t.is_numeric()) {
            let columns = 64 * 1024;
            let mut bytes = vec![0; ty.row_bytes(columns).unwrap() as usize];
            let row_bytes = bytes.len();
            Fill::Noise { std: STD }.write(ty, 0, row_bytes, &mut Stream::new(7, "x", 0), &mut bytes);
            let mut values = vec![0.0; columns as usize];
            dequantize_row(ty, &bytes, &mut values).unwrap();
            let (mean, found) = spread(&values);
            // A power of two is the only factor of MXFP4.
            let tolerance = if ty == QuantType::MXFP4 { 0.42 } else { 0.05 };
            assert!((found / f64::from(STD) - 1.0).abs() < tolerance, "{ty}: {found}");
            assert!(mean.abs() < 0.05 * f64::from(STD), "{ty}: mean {mean}");
        }
    }

    #[test]
    fn table_rows_hold_numbers_near_one() {
        let mut rows = vec![0; 264 * 100];
        Fill::Rows.write(QuantType::I8, 0, 264, &mut Stream::new(7, "x", 0), &mut rows);
        let values: Vec<f32> =
            rows.chunks_exact(264).flat_map(|row| row[..256].iter().map(|c| E4M3[usize::from(*c)] / 128.0)).collect();
        assert!(values.iter().all(|v| v.is_finite()));
        let (_, found) = spread(&values);
        assert!((0.8..1.2).contains(&found), "{found}");
        assert!(rows.chunks_exact(264).all(|row| row[256..].iter().all(|s| *s == ROW_SCALE)));
    }

    #[test]
    fn tables_of_experts_name_each_expert_once_a_row() {
        let tensor = Tensor {
            name: "blk.1.ffn_gate_tid2eid.weight".into(),
            stem: "ffn_gate_tid2eid.weight",
            class: crate::storage::convert::TensorClass::Ids,
            dims: vec![3, 4000],
        };
        // Expert of rank 0 nearly always, of rank 6 never.
        let biases: Arc<[f32]> = [9.0, 0.0, 0.0, 0.0, 0.0, 0.0, -9.0].into();
        let fill = Fill::of(&tensor, &biases, 3);
        let mut bytes = vec![0; 4000 * 12];
        fill.write(QuantType::I32, 0, 12, &mut Stream::new(7, "x", 0), &mut bytes);
        let ids: Vec<i32> = bytes.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect();
        assert!(ids.chunks_exact(3).all(|row| row.windows(2).all(|w| w[0] < w[1])));
        let count = |id| ids.iter().filter(|i| **i == id).count();
        let mut counts: Vec<usize> = (0..7).map(count).collect();
        counts.sort_unstable();
        assert_eq!((counts[0], counts[6]), (0, 4000));
        // The others alike: two of five, 1600 rows each.
        assert!(counts[1..6].iter().all(|n| (1450..1750).contains(n)), "{counts:?}");
    }

    #[test]
    fn streams_differ_by_seed_tensor_and_group() {
        let first = |seed, name, group| Stream::new(seed, name, group).0.next_u64();
        let base = first(1, "a", 0);
        assert_eq!(base, first(1, "a", 0));
        assert!([first(2, "a", 0), first(1, "b", 0), first(1, "a", 1)].iter().all(|other| *other != base));
    }
}
