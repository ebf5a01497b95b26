//! One bit mixer for all hashes of this crate. Never seeded: equal inputs must hash alike in every run.
//! Surprising fact: it is a bijection, so hashing a 64-bit number loses nothing.

/// Finaliser of MurmurHash3 (Appleby, public domain constants).
pub(crate) fn mix(mut x: u64) -> u64 {
    x = (x ^ x >> 33).wrapping_mul(0xFF51_AFD7_ED55_8CCD);
    x = (x ^ x >> 33).wrapping_mul(0xC4CE_B9FE_1A85_EC53);
    x ^ x >> 33
}
