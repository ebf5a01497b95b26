//! The CPU backend: plain ops that are the oracle of every other device, and SIMD twins of the hot ones.
//! Never lets the number of threads or rows change a bit: work is split over outputs, each summed in one fixed order.

pub mod matmul;
pub mod pool;
pub mod simd;
