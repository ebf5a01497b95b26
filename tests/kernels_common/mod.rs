//! Random weights for kernel tests and benches. Owns the generator; never makes a block whose scale is not finite.
//! Surprising fact: the bytes of a block other than its scales may be anything at all.
#![allow(dead_code)]

use ds4::quant::QuantType;
use half::{bf16, f16};

/// Every type that a product takes.
pub const WEIGHT_TYPES: [QuantType; 10] = [
    QuantType::F32,
    QuantType::F16,
    QuantType::BF16,
    QuantType::Q8_0,
    QuantType::Q4_K,
    QuantType::Q2_K,
    QuantType::Q3_K,
    QuantType::Q6_K,
    QuantType::IQ2_XXS,
    QuantType::MXFP4,
];

/// Splitmix64.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In -1..1.
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }

    /// About normal, with now and then a large one.
    pub fn normals(&mut self, count: usize) -> Vec<f32> {
        (0..count)
            .map(|_| {
                let sum: f32 = (0..4).map(|_| self.unit()).sum();
                if self.next().is_multiple_of(61) { sum * 9.0 } else { sum }
            })
            .collect()
    }
}

/// Byte offsets of the F16 factors in a block.
fn factors(ty: QuantType) -> &'static [usize] {
    match ty {
        QuantType::Q8_0 | QuantType::IQ2_XXS => &[0],
        QuantType::Q4_K => &[0, 2],
        QuantType::Q2_K => &[80, 82],
        QuantType::Q3_K => &[108],
        QuantType::Q6_K => &[208],
        _ => &[],
    }
}

/// `rows * cols` weights: arbitrary codes, finite factors.
pub fn weights(rng: &mut Rng, ty: QuantType, rows: usize, cols: usize) -> Vec<u8> {
    let count = rows * cols;
    match ty {
        QuantType::F32 => (0..count).flat_map(|_| rng.unit().to_le_bytes()).collect(),
        QuantType::F16 => (0..count).flat_map(|_| f16::from_f32(rng.unit()).to_le_bytes()).collect(),
        QuantType::BF16 => (0..count).flat_map(|_| bf16::from_f32(rng.unit()).to_le_bytes()).collect(),
        _ => {
            let mut bytes: Vec<u8> = Vec::with_capacity(ty.row_bytes(count as u64).unwrap() as usize + 8);
            let len = ty.row_bytes(count as u64).unwrap() as usize;
            while bytes.len() < len {
                bytes.extend(rng.next().to_le_bytes());
            }
            bytes.truncate(len);
            for block in bytes.chunks_exact_mut(ty.block_bytes()) {
                for &at in factors(ty) {
                    let factor = f16::from_f32(rng.unit() * 0.02);
                    block[at..at + 2].copy_from_slice(&factor.to_le_bytes());
                }
                if ty == QuantType::MXFP4 {
                    block[0] = 110 + block[0] % 24;
                }
            }
            bytes
        }
    }
}

/// Sets every byte that is not part of a factor.
pub fn fill_codes(ty: QuantType, bytes: &mut [u8], value: u8) {
    let exponent = usize::from(ty == QuantType::MXFP4);
    for block in bytes.chunks_exact_mut(ty.block_bytes()) {
        for (at, byte) in block.iter_mut().enumerate().skip(exponent) {
            if !factors(ty).iter().any(|&factor| at == factor || at == factor + 1) {
                *byte = value;
            }
        }
    }
}
