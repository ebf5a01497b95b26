//! Decoders and tables against tests/golden/quant: every value bit for bit. Never loosens to a tolerance.
//! Surprising fact: a quarter of the golden blocks are arbitrary bytes, which no encoder would write.

use ds4::quant::{QuantType, dequantize_row, iq2_xxs, minifloat, mxfp4};
use safetensors::SafeTensors;

fn golden(name: &str) -> Vec<u8> {
    let path = format!("{}/tests/golden/quant/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"))
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// Equal bits, or NaN on both sides.
#[track_caller]
fn check_bits(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!(f.to_bits() == e.to_bits() || (f.is_nan() && e.is_nan()), "{what}[{i}]: found {f:e}, expected {e:e}");
    }
}

#[test]
fn decoders_equal_golden_bits() {
    let bytes = golden("blocks.safetensors");
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let info: serde_json::Value = serde_json::from_slice(&golden("info.json")).unwrap();
    let mut checked = 0;
    for ty in QuantType::ALL {
        if ty == QuantType::F32 || !ty.is_numeric() {
            continue;
        }
        let raw = tensors.tensor(&format!("{ty}.raw")).unwrap();
        let expected = floats(tensors.tensor(&format!("{ty}.f32")).unwrap().data());
        assert_eq!(info[ty.name()]["ggml type"], ty.ggml_id(), "{ty}");
        let mut out = vec![0.0; expected.len()];
        dequantize_row(ty, raw.data(), &mut out).unwrap();
        check_bits(ty.name(), &out, &expected);
        checked += raw.shape()[0];
    }
    assert_eq!(checked, 8 * 64 + 12, "blocks of nine types");
}

#[test]
fn float_rows_decode_to_their_bits() {
    let values = [0.0, -0.0, 1.5, -3.25e-40, f32::MAX, f32::INFINITY, f32::NAN];
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let mut out = [9.0; 7];
    dequantize_row(QuantType::F32, &bytes, &mut out).unwrap();
    check_bits("F32", &out, &values);
}

#[test]
fn number_tables_equal_golden() {
    let bytes = golden("blocks.safetensors");
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let table = |name: &str| floats(tensors.tensor(name).unwrap().data());
    check_bits("e4m3", &minifloat::E4M3, &table("fp8_e4m3.table"));
    check_bits("e8m0", &minifloat::E8M0, &table("e8m0.table"));
}

#[test]
fn grid_tables_equal_golden() {
    let bytes = golden("grids.safetensors");
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let grid: Vec<u8> = iq2_xxs::GRID.iter().flat_map(|g| g.to_le_bytes()).collect();
    assert_eq!(grid, tensors.tensor("IQ2_XXS.grid").unwrap().data());
    assert_eq!(iq2_xxs::SIGNS.as_slice(), tensors.tensor("ksigns_iq2xs").unwrap().data());
    let codes: Vec<u8> = mxfp4::CODES.iter().map(|c| *c as u8).collect();
    assert_eq!(codes, tensors.tensor("mxfp4_values_doubled").unwrap().data());
}

/// Checkpoint storage: E4M3 codes in 32x32 tiles, each with an E8M0 scale.
#[test]
fn native_fp8_tiles_decode_through_the_tables() {
    let bytes = golden("blocks.safetensors");
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let codes = tensors.tensor("fp8_native32.weight").unwrap();
    let scales = tensors.tensor("fp8_native32.scale_e8m0").unwrap();
    let (cols, tile_cols) = (codes.shape()[1], scales.shape()[1]);
    let found: Vec<f32> = codes
        .data()
        .iter()
        .enumerate()
        .map(|(i, code)| {
            let (row, col) = (i / cols, i % cols);
            let scale = scales.data()[row / 32 * tile_cols + col / 32];
            minifloat::E4M3[usize::from(*code)] * minifloat::E8M0[usize::from(scale)]
        })
        .collect();
    check_bits("fp8_native32", &found, &floats(tensors.tensor("fp8_native32.f32").unwrap().data()));
}

/// Checkpoint storage: two E2M1 codes a byte, low half first, an E8M0 scale per 32 values of a row.
#[test]
fn native_fp4_rows_decode_through_the_tables() {
    let bytes = golden("blocks.safetensors");
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let packed = tensors.tensor("fp4_native.packed").unwrap();
    let scales = tensors.tensor("fp4_native.scale_e8m0").unwrap();
    let codes = packed.data().iter().flat_map(|b| [b & 15, b >> 4]);
    let found: Vec<f32> = codes
        .enumerate()
        .map(|(i, code)| minifloat::E2M1[usize::from(code)] * minifloat::E8M0[usize::from(scales.data()[i / 32])])
        .collect();
    check_bits("fp4_native", &found, &floats(tensors.tensor("fp4_native.f32").unwrap().data()));
}
