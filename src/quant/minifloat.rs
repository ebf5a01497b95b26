//! The small number formats: E4M3, E8M0, E2M1 and BF16, as decode tables and round-to-nearest-even encoders.
//! Never approximates: powers of two are built and read from the bits of a float.
//! Surprising fact: this E4M3 has no infinity, so its largest value is 448 and only codes 0x7f and 0xff are NaN.

/// Largest finite E4M3 magnitude.
pub const E4M3_MAX: f32 = 448.0;
/// Smallest positive E4M3 magnitude, 2^-9.
pub const E4M3_MIN: f32 = 0.001953125;
/// Largest E2M1 magnitude.
pub const E2M1_MAX: f32 = 6.0;

/// Value of each E4M3 code (sign, 4 exponent bits with bias 7, 3 mantissa bits).
pub static E4M3: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = e4m3_value(code as u8);
        code += 1;
    }
    table
};

/// Value of each E8M0 code: 2^(code - 127), NaN for 0xff.
pub static E8M0: [f32; 256] = {
    let mut table = [f32::NAN; 256];
    let mut code = 0;
    while code < 255 {
        table[code] = exp2i(code as i32 - 127);
        code += 1;
    }
    table
};

/// Value of each E2M1 code; the upper half are the negatives, code 8 is -0.
pub static E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

const fn e4m3_value(code: u8) -> f32 {
    let exponent = ((code >> 3) & 15) as i32;
    let mantissa = (code & 7) as i32;
    let magnitude = if code & 0x7f == 0x7f {
        f32::NAN
    } else if exponent == 0 {
        mantissa as f32 * exp2i(-9)
    } else {
        (8 + mantissa) as f32 * exp2i(exponent - 10)
    };
    if code & 0x80 != 0 { -magnitude } else { magnitude }
}

/// Exactly 2^`exponent`; 0 below the smallest subnormal (2^-149), infinity above 2^127.
pub const fn exp2i(exponent: i32) -> f32 {
    if exponent > 127 {
        f32::INFINITY
    } else if exponent >= -126 {
        f32::from_bits(((exponent + 127) as u32) << 23)
    } else if exponent >= -149 {
        f32::from_bits(1 << (exponent + 149))
    } else {
        0.0
    }
}

/// Largest `k` with 2^k <= |x|, for finite non-zero `x`, subnormal ones included. -150 for zero.
pub const fn floor_log2(x: f32) -> i32 {
    let bits = x.to_bits() & 0x7fff_ffff;
    if bits >= 1 << 23 { (bits >> 23) as i32 - 127 } else { -118 - bits.leading_zeros() as i32 }
}

/// Smallest `k` with |x| <= 2^k, for finite non-zero `x`.
pub const fn ceil_log2(x: f32) -> i32 {
    let floor = floor_log2(x);
    if x.to_bits() & 0x7fff_ffff == exp2i(floor).to_bits() { floor } else { floor + 1 }
}

/// Nearest integer, ties to even, for |x| <= 2^22. Adding and removing 1.5 * 2^23 leaves the rounding to the adder,
/// which every instruction set does in one lane-wise operation.
#[inline(always)]
pub fn round_even_small(x: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0;
    (x + SHIFT) - SHIFT
}

/// E4M3 code of `x`: nearest, ties to even, saturating at 448. NaN gives 0x7f.
pub fn e4m3_from_f32(x: f32) -> u8 {
    let sign = ((x.to_bits() >> 24) & 0x80) as u8;
    let magnitude = x.abs();
    if magnitude.is_nan() {
        return 0x7f;
    }
    let magnitude = magnitude.min(E4M3_MAX);
    let code = if magnitude < exp2i(-6) {
        // Subnormals are the multiples of 2^-9; eight of them are the code of the smallest normal value.
        round_even_small(magnitude * 512.0) as u8
    } else {
        let bits = magnitude.to_bits();
        let rounded = bits + 0x7_ffff + ((bits >> 20) & 1);
        ((rounded >> 20) - (120 << 3)) as u8
    };
    sign | code
}

/// E2M1 code of `x`: nearest with ties to the even code, saturating at 6, sign kept (also of zero).
/// NaN gives a code of magnitude 6.
pub fn e2m1_from_f32(x: f32) -> u8 {
    let m = x.abs();
    // One comparison a boundary; `>=` where the upper neighbour has the even code.
    let up = [m > 0.25, m >= 0.75, m > 1.25, m >= 1.75, m > 2.5, m >= 3.5, m > 5.0];
    let code = if m.is_nan() { 7 } else { up.into_iter().map(u8::from).sum() };
    ((x.to_bits() >> 28) & 8) as u8 | code
}

/// BF16 bits of `x`: nearest, ties to even. NaN stays NaN (made quiet), large finite values may become infinite.
#[inline(always)]
pub fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// Value of BF16 bits.
#[inline(always)]
pub fn bf16_value(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// `x` rounded to the nearest BF16 value, ties to even.
#[inline(always)]
pub fn bf16_round(x: f32) -> f32 {
    bf16_value(bf16_bits(x))
}

/// Value of an E4M3 code times an E8M0 scale, rounded to BF16: how n-gram rows are kept.
#[inline(always)]
pub fn scaled_e4m3(code: u8, scale: u8) -> f32 {
    bf16_round(E4M3[usize::from(code)] * E8M0[usize::from(scale)])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nearest table entry by brute force, ties to the even code: the twin of the bit tricks.
    fn nearest(table: &[f32], x: f32) -> u8 {
        let mut best = 0;
        for code in 1..table.len() {
            let (d, b) = ((table[code] - x).abs(), (table[best] - x).abs());
            if d < b || (d == b && code % 2 == 0) {
                best = code;
            }
        }
        best as u8
    }

    #[test]
    fn encoders_equal_brute_force() {
        for step in 0..40_000 {
            let x = step as f32 * (1.0 / 64.0) * if step < 20_000 { 1.0 } else { 1.0 / 2048.0 };
            assert_eq!(e4m3_from_f32(x), nearest(&E4M3[..0x7f], x), "e4m3 {x}");
            assert_eq!(e4m3_from_f32(-x), 0x80 | nearest(&E4M3[..0x7f], x), "e4m3 -{x}");
            assert_eq!(e2m1_from_f32(x), nearest(&E2M1[..8], x), "e2m1 {x}");
            assert_eq!(e2m1_from_f32(-x), 8 | nearest(&E2M1[..8], x), "e2m1 -{x}");
        }
    }

    #[test]
    fn every_code_survives_a_round_trip() {
        for code in 0..=255u8 {
            let value = E4M3[usize::from(code)];
            if !value.is_nan() {
                assert_eq!(e4m3_from_f32(value), code);
            }
            assert_eq!(value.is_nan(), code & 0x7f == 0x7f);
        }
        for code in 0..16u8 {
            assert_eq!(e2m1_from_f32(E2M1[usize::from(code)]), code);
        }
        for bits in 0..=u16::MAX {
            let value = bf16_value(bits);
            assert!(bf16_bits(value) == bits || value.is_nan());
            assert_eq!(bf16_round(value).is_nan(), value.is_nan());
        }
    }

    #[test]
    fn bf16_ties_to_even() {
        assert_eq!(bf16_round(1.0 + 1.0 / 256.0), 1.0);
        assert_eq!(bf16_round(1.0 + 3.0 / 256.0), 1.0 + 4.0 / 256.0);
        assert_eq!(bf16_round(f32::from_bits(0x3f80_8001)), 1.0 + 1.0 / 128.0);
        assert_eq!(bf16_round(f32::MAX), f32::INFINITY);
    }

    #[test]
    fn exponents_are_exact() {
        for k in -149..=127 {
            let p = exp2i(k);
            assert_eq!(p, 2f64.powi(k) as f32);
            assert_eq!((floor_log2(p), ceil_log2(p)), (k, k));
            if k > -149 {
                let below = f32::from_bits(p.to_bits() - 1);
                assert_eq!((floor_log2(below), ceil_log2(below)), (k - 1, if k == -148 { -149 } else { k }));
            }
        }
        assert_eq!((exp2i(128), exp2i(-150)), (f32::INFINITY, 0.0));
    }

    #[test]
    fn extremes_saturate() {
        assert_eq!(e4m3_from_f32(f32::INFINITY), 0x7e);
        assert_eq!(e4m3_from_f32(-1e9), 0xfe);
        assert_eq!(e4m3_from_f32(f32::NAN), 0x7f);
        assert_eq!(e2m1_from_f32(f32::NEG_INFINITY), 15);
        assert_eq!(e4m3_from_f32(-0.0), 0x80);
    }
}
