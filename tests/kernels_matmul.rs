//! Products of every weight type: against exact arithmetic, and bit for bit across levels, threads and batch sizes.
//! Never compares a kernel with itself: the reference is decoded weights summed in F64.
//! Surprising fact: weights are arbitrary bytes, since every bit pattern with a finite scale is a valid block.

mod kernels_common;

use ds4::backend::cpu::matmul::{
    Activations, Arithmetic, Kernels, MatView, matmul, matmul_grouped, matmul_pair, matmul_prepared,
};
use ds4::backend::cpu::pool::Pool;
use ds4::backend::cpu::simd::SimdLevel;
use ds4::quant::{QuantType, dequantize_row};
use kernels_common::{Rng, WEIGHT_TYPES, weights};

const MODES: [Arithmetic; 2] = [Arithmetic::Quality, Arithmetic::Fast];

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Column counts that leave every kind of remainder the type allows.
fn widths(ty: QuantType) -> &'static [usize] {
    match ty.block_values() {
        1 => &[1, 5, 16, 31, 33, 100, 512],
        32 => &[32, 64, 96, 480, 512, 544, 1504],
        _ => &[256, 512, 768, 2304],
    }
}

fn run(level: SimdLevel, mode: Arithmetic, w: MatView, x: &[f32], rows: usize) -> Vec<f32> {
    let pool = Pool::new(1).unwrap();
    let mut out = vec![f32::NAN; rows * w.rows];
    matmul(&pool, &Kernels::new(level), mode, w, x, rows, &mut out);
    out
}

#[test]
fn every_level_gives_the_bits_of_the_scalar_twin() {
    let mut rng = Rng(7);
    for ty in WEIGHT_TYPES {
        for &cols in widths(ty) {
            for (w_rows, rows) in [(1, 1), (5, 2), (3, 3), (7, 4), (2, 9), (150, 6), (16, 16), (33, 21), (70, 40)] {
                let bytes = weights(&mut rng, ty, w_rows, cols);
                // Any address: one byte of skew.
                let skewed = [&[0u8][..], &bytes].concat();
                let w = MatView { ty, rows: w_rows, cols, bytes: &skewed[1..] };
                let x = rng.normals(rows * cols);
                for mode in MODES {
                    let expected = bits(&run(SimdLevel::Scalar, mode, w, &x, rows));
                    for level in SimdLevel::ALL {
                        let got = bits(&run(level, mode, w, &x, rows));
                        assert_eq!(got, expected, "{ty} {level:?} {mode:?} {w_rows} x {cols}, {rows} rows");
                    }
                }
            }
        }
    }
}

#[test]
fn extreme_codes_and_scales_give_the_same_bits() {
    let mut rng = Rng(11);
    for ty in WEIGHT_TYPES.into_iter().filter(|ty| ty.block_values() > 1) {
        let cols = 1536;
        for fill in [0x00u8, 0xff, 0x80, 0x7f, 0x55] {
            let mut bytes = weights(&mut rng, ty, 4, cols);
            kernels_common::fill_codes(ty, &mut bytes, fill);
            if ty == QuantType::MXFP4 {
                // The two exponents of subnormal factors, and the one that E8M0 calls NaN.
                for (block, exponent) in bytes.chunks_exact_mut(17).zip([0, 1, 2, 127, 254, 255].into_iter().cycle()) {
                    block[0] = exponent;
                }
            }
            let w = MatView { ty, rows: 4, cols, bytes: &bytes };
            for sign in [1.0f32, -1.0, 1.0e-30, 3.0e30] {
                let x: Vec<f32> = (0..cols).map(|i| if i % 3 == 0 { sign } else { sign * 0.999 }).collect();
                let expected = bits(&run(SimdLevel::Scalar, Arithmetic::Fast, w, &x, 1));
                for level in SimdLevel::ALL {
                    let got = bits(&run(level, Arithmetic::Fast, w, &x, 1));
                    assert_eq!(got, expected, "{ty} {level:?} codes {fill:#x} activations {sign}");
                    let many = bits(&run(level, Arithmetic::Fast, w, &x.repeat(25), 25));
                    assert_eq!(many, expected.repeat(25), "{ty} {level:?} codes {fill:#x} activations {sign}, 25 rows");
                }
            }
        }
    }
}

/// Quality: rounding of `cols` F32 additions. Fast: half a step of the activation code on each value.
#[test]
fn results_are_close_to_exact_sums_of_decoded_weights() {
    let mut rng = Rng(3);
    let (w_rows, cols, rows) = (9, 1536, 3);
    for ty in WEIGHT_TYPES {
        let bytes = weights(&mut rng, ty, w_rows, cols);
        let w = MatView { ty, rows: w_rows, cols, bytes: &bytes };
        let x = rng.normals(rows * cols);
        let mut decoded = vec![0.0; w_rows * cols];
        dequantize_row(ty, &bytes, &mut decoded).unwrap();
        let plain = ty.block_values() == 1;
        for (level, mode) in SimdLevel::ALL.into_iter().flat_map(|l| MODES.map(|m| (l, m))) {
            let out = run(level, mode, w, &x, rows);
            for (r, x) in x.chunks_exact(cols).enumerate() {
                let amax = x.iter().fold(0.0f32, |a, v| a.max(v.abs()));
                for (o, weights) in decoded.chunks_exact(cols).enumerate() {
                    let exact: f64 = weights.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                    let magnitude: f64 = weights.iter().zip(x).map(|(w, x)| f64::from((w * x).abs())).sum();
                    let weight_sum: f64 = weights.iter().map(|w| f64::from(w.abs())).sum();
                    let step = if mode == Arithmetic::Fast && !plain { f64::from(amax / 127.0) } else { 0.0 };
                    let bound = magnitude * 1.0e-5 + weight_sum * step * 0.5;
                    let error = (f64::from(out[r * w_rows + o]) - exact).abs();
                    assert!(error <= bound, "{ty} {level:?} {mode:?} row {o}: error {error:e}, bound {bound:e}");
                }
            }
        }
    }
}

#[test]
fn rows_in_a_batch_and_threads_change_no_bit() {
    let mut rng = Rng(5);
    let (w_rows, cols, rows) = (321, 2304, 9);
    for ty in WEIGHT_TYPES {
        let bytes = weights(&mut rng, ty, w_rows, cols);
        let w = MatView { ty, rows: w_rows, cols, bytes: &bytes };
        let x = rng.normals(rows * cols);
        let kernels = Kernels::new(SimdLevel::detect());
        for mode in MODES {
            let expected: Vec<f32> = x.chunks_exact(cols).flat_map(|x| run(kernels.level(), mode, w, x, 1)).collect();
            for threads in [1, 2, 5] {
                let pool = Pool::new(threads).unwrap();
                let mut out = vec![f32::NAN; rows * w_rows];
                matmul(&pool, &kernels, mode, w, &x, rows, &mut out);
                assert_eq!(bits(&out), bits(&expected), "{ty} {mode:?} {threads} threads");

                let mut acts = Activations::default();
                kernels.prepare_on(&pool, mode, ty, &x, rows, cols, &mut acts);
                out.fill(f32::NAN);
                matmul_prepared(&pool, &kernels, w, &acts, &mut out);
                assert_eq!(bits(&out), bits(&expected), "{ty} {mode:?} {threads} threads, prepared");
            }
        }
    }
}

/// More rows than are prepared together on any level, and weight rows that leave a remainder.
#[test]
fn hundreds_of_rows_have_the_bits_of_single_ones() {
    let mut rng = Rng(19);
    let (w_rows, cols, rows) = (37, 768, 150);
    for ty in WEIGHT_TYPES {
        let bytes = weights(&mut rng, ty, w_rows, cols);
        let w = MatView { ty, rows: w_rows, cols, bytes: &bytes };
        let x = rng.normals(rows * cols);
        for level in SimdLevel::ALL {
            let expected: Vec<f32> = x.chunks_exact(cols).flat_map(|x| run(level, MODES[1], w, x, 1)).collect();
            assert_eq!(bits(&run(level, MODES[1], w, &x, rows)), bits(&expected), "{ty} {level:?}");
        }
    }
}

#[test]
fn picked_rows_are_rows_of_the_whole() {
    let mut rng = Rng(17);
    let (w_rows, cols, rows) = (30, 512, 24);
    let few = vec![7u32, 0, 3, 3, 5];
    let many: Vec<u32> = (0..37).map(|i| i * 7 % 24).collect();
    for ty in WEIGHT_TYPES {
        let bytes = weights(&mut rng, ty, w_rows, cols);
        let w = MatView { ty, rows: w_rows, cols, bytes: &bytes };
        let x = rng.normals(rows * cols);
        let whole = bits(&run(SimdLevel::Scalar, Arithmetic::Fast, w, &x, rows));
        for (level, picks) in SimdLevel::ALL.into_iter().flat_map(|l| [&few, &many].map(|p| (l, p))) {
            let kernels = Kernels::new(level);
            let mut acts = Activations::default();
            kernels.prepare(Arithmetic::Fast, ty, &x, rows, cols, &mut acts);
            let mut picked = vec![f32::NAN; 25 * picks.len()];
            kernels.matmul_range_picked(w, 4..29, &acts, picks, &mut picked);
            for (o, row) in picked.chunks_exact(picks.len()).enumerate() {
                for (value, pick) in row.iter().zip(picks) {
                    assert_eq!(value.to_bits(), whole[*pick as usize * w_rows + 4 + o], "{ty} {level:?} {o} {pick}");
                }
            }
        }
    }
}

#[test]
fn a_pair_of_products_is_two_products_whatever_the_types() {
    let (mut rng, kernels, pool) = (Rng(53), Kernels::new(SimdLevel::detect()), Pool::new(2).unwrap());
    let (cols, rows) = (256, 3);
    let x = rng.normals(rows * cols);
    for (ty_a, ty_b) in WEIGHT_TYPES.into_iter().flat_map(|a| WEIGHT_TYPES.map(|b| (a, b))) {
        let (bytes_a, bytes_b) = (weights(&mut rng, ty_a, 5, cols), weights(&mut rng, ty_b, 9, cols));
        let a = MatView { ty: ty_a, rows: 5, cols, bytes: &bytes_a };
        let b = MatView { ty: ty_b, rows: 9, cols, bytes: &bytes_b };
        for mode in MODES {
            let (mut out_a, mut out_b) = (vec![f32::NAN; rows * 5], vec![f32::NAN; rows * 9]);
            matmul_pair(&pool, &kernels, mode, (a, b), (&x, rows), (&mut out_a, &mut out_b));
            let expected = [a, b].map(|w| bits(&run(SimdLevel::detect(), mode, w, &x, rows)));
            assert_eq!([bits(&out_a), bits(&out_b)], expected, "{ty_a} and {ty_b}, {mode:?}");
        }
    }
}

#[test]
fn grouped_products_are_products_of_the_groups() {
    let mut rng = Rng(23);
    let (groups, group_rows, cols) = (4, 70, 256);
    for ty in WEIGHT_TYPES {
        let bytes = weights(&mut rng, ty, groups * group_rows, cols);
        let w = MatView { ty, rows: groups * group_rows, cols, bytes: &bytes };
        let kernels = Kernels::new(SimdLevel::detect());
        for (rows, threads, mode) in
            [(1, 1, MODES[0]), (1, 2, MODES[1]), (5, 2, MODES[0]), (6, 1, MODES[1]), (27, 2, MODES[1])]
        {
            let x = rng.normals(rows * groups * cols);
            let mut out = vec![f32::NAN; rows * w.rows];
            matmul_grouped(&Pool::new(threads).unwrap(), &kernels, mode, w, &x, rows, groups, &mut out);
            for r in 0..rows {
                for g in 0..groups {
                    let x = &x[(r * groups + g) * cols..][..cols];
                    let part = run(kernels.level(), mode, w.rows_of(g * group_rows..(g + 1) * group_rows), x, 1);
                    let got = &out[r * w.rows + g * group_rows..][..group_rows];
                    assert_eq!(bits(got), bits(&part), "{ty} {mode:?} row {r} group {g}");
                }
            }
        }
    }
}

#[test]
fn values_that_are_not_finite_make_their_row_nan_and_no_other() {
    let mut rng = Rng(29);
    let (w_rows, cols) = (6, 1024);
    for ty in WEIGHT_TYPES {
        let bytes = weights(&mut rng, ty, w_rows, cols);
        let w = MatView { ty, rows: w_rows, cols, bytes: &bytes };
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = rng.normals(25 * cols);
            x[cols + 777] = bad;
            for (level, mode) in SimdLevel::ALL.into_iter().flat_map(|l| MODES.map(|m| (l, m))) {
                let out = run(level, mode, w, &x, 25);
                for (r, row) in out.chunks_exact(w_rows).enumerate() {
                    let all = |f: fn(&f32) -> bool| row.iter().all(f);
                    let right = if r == 1 { all(|v| !v.is_finite() || *v == 0.0) } else { all(|v| v.is_finite()) };
                    assert!(right, "{ty} {level:?} {mode:?} {bad} row {r}: {row:?}");
                    if r == 1 && (bad.is_nan() || (mode == Arithmetic::Fast && ty.block_values() > 1)) {
                        assert!(all(|v| v.is_nan()), "{ty} {level:?} {mode:?} {bad}: {row:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn zeros_and_tiny_activations_give_plus_zero() {
    let mut rng = Rng(31);
    for ty in WEIGHT_TYPES {
        let bytes = weights(&mut rng, ty, 3, 512);
        let w = MatView { ty, rows: 3, cols: 512, bytes: &bytes };
        for level in SimdLevel::ALL {
            for mode in MODES {
                let out = run(level, mode, w, &[-0.0; 512], 1);
                assert_eq!(bits(&out), [0, 0, 0], "{ty} {level:?} {mode:?}");
            }
        }
        if ty.block_values() > 1 {
            let out = run(SimdLevel::detect(), Arithmetic::Fast, w, &[1.0e-40; 512], 1);
            assert_eq!(bits(&out), [0, 0, 0], "{ty}");
        }
    }
}

#[test]
fn activations_of_another_shape_leave_nothing_behind() {
    let mut rng = Rng(37);
    let kernels = Kernels::new(SimdLevel::detect());
    let mut acts = Activations::default();
    for (ty, cols) in [(QuantType::Q8_0, 544), (QuantType::Q8_0, 96), (QuantType::MXFP4, 96), (QuantType::F32, 33)] {
        let bytes = weights(&mut rng, ty, 5, cols);
        let w = MatView { ty, rows: 5, cols, bytes: &bytes };
        for rows in [3, 1, 4] {
            let x = rng.normals(rows * cols);
            kernels.prepare(Arithmetic::Fast, ty, &x, rows, cols, &mut acts);
            let mut out = vec![0.0; 5 * rows];
            matmul_prepared(&Pool::new(1).unwrap(), &kernels, w, &acts, &mut out);
            assert_eq!(bits(&out), bits(&run(SimdLevel::Scalar, Arithmetic::Fast, w, &x, rows)), "{ty} {cols} {rows}");
        }
    }
}

#[test]
#[should_panic(expected = "prepared for another type")]
fn activations_of_another_type_are_refused() {
    let kernels = Kernels::new(SimdLevel::Scalar);
    let mut acts = Activations::default();
    kernels.prepare(Arithmetic::Fast, QuantType::Q8_0, &[1.0; 256], 1, 256, &mut acts);
    let w = MatView { ty: QuantType::Q4_K, rows: 1, cols: 256, bytes: &[0; 144] };
    kernels.matmul_range(w, 0..1, &acts, &mut [0.0]);
}
