//! Rows of every block format against hostile input: any bytes of the right length decode, any other length is an
//! error. Never depends on what the values are.

use ds4::quant::{QuantError, QuantType, dequantize_row};
use proptest::prelude::*;

fn numeric() -> impl Strategy<Value = QuantType> {
    prop::sample::select(QuantType::ALL.into_iter().filter(|t| t.is_numeric()).collect::<Vec<_>>())
}

proptest! {
    #[test]
    fn any_bytes_decode(ty in numeric(), blocks in 0usize..5, seed in prop::collection::vec(any::<u8>(), 1..900)) {
        let bytes: Vec<u8> = seed.iter().copied().cycle().take(blocks * ty.block_bytes()).collect();
        let mut out = vec![0.0; blocks * ty.block_values()];
        prop_assert_eq!(dequantize_row(ty, &bytes, &mut out), Ok(()));
    }

    #[test]
    fn a_wrong_length_is_an_error(ty in numeric(), values in 0usize..1100, bytes in 0usize..1100) {
        prop_assume!(ty.row_bytes(values as u64) != Some(bytes as u64));
        let mut out = vec![7.0; values];
        let found = dequantize_row(ty, &vec![0; bytes], &mut out);
        prop_assert_eq!(found, Err(QuantError::Length { ty, values, bytes }));
        prop_assert!(out.iter().all(|v| *v == 7.0));
    }
}

#[test]
fn raw_bytes_are_not_numbers() {
    let found = dequantize_row(QuantType::I8, &[1, 2], &mut [0.0; 2]);
    assert_eq!(found, Err(QuantError::NotNumeric { ty: QuantType::I8 }));
}
