//! To be filled.

pub mod slabs;
