//! Golden arrays and their comparison.
//! Never hides where the worst element is. Surprising fact: ids are stored as 16-bit integers, -1 meaning none.

use std::collections::HashMap;
use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensors};

/// One array.
#[derive(Clone)]
pub struct Array {
    pub shape: Vec<usize>,
    pub f32s: Vec<f32>,
    pub ints: Vec<i32>,
}

/// All arrays of a golden file.
pub struct Golden(HashMap<String, Array>);

impl Golden {
    pub fn open(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let arrays = file.tensors().into_iter().map(|(name, tensor)| {
            let (data, shape) = (tensor.data(), tensor.shape().to_vec());
            let (mut f32s, mut ints) = (Vec::new(), Vec::new());
            match tensor.dtype() {
                Dtype::F32 => f32s = data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
                Dtype::I32 => ints = data.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect(),
                Dtype::I16 => {
                    let short = |b: &[u8]| i32::from(i16::from_le_bytes(b.try_into().unwrap()));
                    ints = data.chunks_exact(2).map(short).collect();
                }
                other => panic!("{name}: {other:?}"),
            }
            (name, Array { shape, f32s, ints })
        });
        Self(arrays.collect())
    }

    pub fn get(&self, name: &str) -> &Array {
        self.find(name).unwrap_or_else(|| panic!("no array {name}"))
    }

    pub fn find(&self, name: &str) -> Option<&Array> {
        self.0.get(name)
    }

    /// The prompt.
    pub fn tokens(&self) -> Vec<u32> {
        self.get("input_ids").ints.iter().map(|t| *t as u32).collect()
    }
}

/// Largest difference, checked against `limit`; returns it.
pub fn check_close(what: &str, got: &[f32], want: &[f32], limit: f32) -> f32 {
    assert_eq!(got.len(), want.len(), "{what}: length");
    let mut worst = (0.0f32, 0);
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let difference = if g.is_nan() { f32::INFINITY } else { (g - w).abs() };
        if difference > worst.0 {
            worst = (difference, i);
        }
    }
    let (difference, at) = worst;
    assert!(difference <= limit, "{what}: {difference} at {at} (got {}, want {}), limit {limit}", got[at], want[at]);
    difference
}

/// Index of the largest value, the lowest of equals.
pub fn argmax(row: &[f32]) -> usize {
    let mut best = 0;
    for (i, v) in row.iter().enumerate() {
        if *v > row[best] {
            best = i;
        }
    }
    best
}
