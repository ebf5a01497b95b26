//! MXFP4: 32 E2M1 codes under one power-of-two scale. Never rounds: every product is exact in F32.
//! Surprising fact: GGUF stores value `i` in the low nibble of byte `i` and value `i + 16` in its high nibble, unlike
//! native checkpoints, which pair neighbours.

use super::minifloat::exp2i;

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
