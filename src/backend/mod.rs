//! What a device must be able to compute: the `Backend` trait and one argument struct an op.
//! Never learns what a file, a cache or a model is. Surprising fact: every op takes rows (tokens) as its outermost
//! dimension, so decode is the same call with one row, and results of a row never depend on its neighbours.

pub mod cpu;

use crate::quant::QuantType;

/// Why a device could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// Memory of the device ran out.
    #[error("{backend}: cannot allocate {bytes} bytes for {what}; lower --ctx or the cache budget")]
    OutOfMemory { backend: &'static str, what: &'static str, bytes: u64 },
    /// A matrix was offered in a type that the op has no kernel for.
    #[error("{backend}: no {op} kernel for {ty} weights; convert the tensor with ds4-gguf quantize")]
    UnsupportedType { backend: &'static str, op: &'static str, ty: QuantType },
}
