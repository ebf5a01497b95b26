//! The copy of the IQ2_XXS table that kernels use, compared with the one that the decoder uses.
//! Never needs a GPU.

use ds4::quant::iq2_xxs::GRID;

/// # Errors
/// The first entry that differs.
pub fn check() -> Result<(), String> {
    let text = include_str!("../../kernels/iq2_grid.cuh");
    let words = text.split("0x").skip(1).map(|w| u64::from_str_radix(&w[..16], 16));
    let words: Vec<u64> = words.collect::<Result<_, _>>().map_err(|e| format!("kernels/iq2_grid.cuh: {e}"))?;
    if words.len() != GRID.len() {
        return Err(format!("kernels/iq2_grid.cuh has {} entries", words.len()));
    }
    match words.iter().zip(&GRID).position(|(a, b)| a != b) {
        Some(at) => Err(format!("kernels/iq2_grid.cuh: entry {at} differs")),
        None => Ok(()),
    }
}
