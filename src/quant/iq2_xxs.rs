//! IQ2_XXS: 8 sub-blocks of 32 values; each group of 8 is one of 256 magnitude vectors with signs.
//! Never stores the eighth sign of a group: the number of negative values is even, so it follows from the other seven.
//! Surprising fact: the smallest magnitude is 8, not 0, so no value decodes to zero unless the whole block does.

pub use super::iq2_grid::GRID;
use super::iq2_search;
use super::superblock::{SuperBlock, TooLarge};
use half::f16;

/// Values of a block.
pub const VALUES: usize = 256;
/// Bytes of a block: F16 d, then for each sub-block 4 grid indices and a 32-bit word.
pub const BYTES: usize = 66;
/// Sub-blocks with a scale of their own.
pub const SUBS: usize = 8;

/// The eight sign bits (1 = negative, bit `i` for value `i`) of a 7-bit sign code: the eighth makes their number even.
pub const fn sign_bits(code: u8) -> u8 {
    (code & 127) | ((code.count_ones() as u8 & 1) << 7)
}

/// [`sign_bits`] of every code.
pub static SIGNS: [u8; 128] = {
    let mut table = [0; 128];
    let mut code = 0;
    while code < 128 {
        table[code] = sign_bits(code as u8);
        code += 1;
    }
    table
};

/// Factor of the magnitudes for block factor `d` and a 4-bit scale.
#[inline(always)]
pub fn scale(d: f32, code: u32) -> f32 {
    d * (0.5 + code as f32) * 0.25
}

/// Decodes one block.
pub fn decode(block: &[u8; BYTES], out: &mut [f32; VALUES]) {
    let d = f16::from_le_bytes([block[0], block[1]]).to_f32();
    for (sub, values) in block[2..].chunks_exact(8).zip(out.chunks_exact_mut(32)) {
        // Bits 0..28: four sign codes; bits 28..32: the scale.
        let word = u32::from_le_bytes([sub[4], sub[5], sub[6], sub[7]]);
        let factor = scale(d, word >> 28);
        for (group, y) in values.chunks_exact_mut(8).enumerate() {
            let magnitudes = GRID[usize::from(sub[group])].to_le_bytes();
            let signs = SIGNS[(word >> (7 * group)) as usize & 127];
            for i in 0..8 {
                let magnitude = factor * f32::from(magnitudes[i]);
                y[i] = if signs >> i & 1 != 0 { -magnitude } else { magnitude };
            }
        }
    }
}

/// Encodes one block of finite values; `importance` weighs their squared errors.
pub(super) fn encode(
    values: &[f32; VALUES],
    importance: Option<&[f32; VALUES]>,
    out: &mut [u8; BYTES],
) -> Result<(), TooLarge> {
    let fitted = iq2_search::fit(&SuperBlock::new(values, importance))?;
    out[..2].copy_from_slice(&fitted.d.to_le_bytes());
    for (sub, bytes) in out[2..].chunks_exact_mut(8).enumerate() {
        bytes[..4].copy_from_slice(&fitted.entries[4 * sub..][..4]);
        let mut word = u32::from(fitted.scales[sub]) << 28;
        for (group, signs) in fitted.signs[4 * sub..][..4].iter().enumerate() {
            word |= u32::from(signs & 127) << (7 * group);
        }
        bytes[4..].copy_from_slice(&word.to_le_bytes());
    }
    Ok(())
}
