//! Identifiers and sizes shared by every layer above. Never holds behaviour beyond naming and printing.
//! Surprising fact: `ExpertKey` orders by layer first, which is also file order.

use core::fmt;

/// Index of a transformer layer, 0-based.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LayerIdx(pub u16);

/// Index of a routed expert within its layer, 0-based.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ExpertIdx(pub u16);

/// One routed expert of one layer: the unit that the cache stores and evicts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ExpertKey {
    /// Layer that owns the expert.
    pub layer: LayerIdx,
    /// Index inside that layer.
    pub expert: ExpertIdx,
}

impl ExpertKey {
    /// Key of expert `expert` of layer `layer`.
    pub const fn new(layer: u16, expert: u16) -> Self {
        Self { layer: LayerIdx(layer), expert: ExpertIdx(expert) }
    }
}

impl fmt::Display for ExpertKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layer {} expert {}", self.layer.0, self.expert.0)
    }
}

/// A number of bytes. Prints in binary units (GiB = 2^30), with the exact count below 1 KiB.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Bytes(pub u64);

impl Bytes {
    /// `n` GiB.
    pub const fn gib(n: u64) -> Self {
        Self(n << 30)
    }
    /// `n` MiB.
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
        for (name, unit) in UNITS {
            if self.0 >= unit {
                // The cast loses bits only above 2^53 bytes, far beyond two decimals of any unit.
                return write!(f, "{:.2} {name}", self.0 as f64 / unit as f64);
            }
        }
        write!(f, "{} B", self.0)
    }
}

/// Whether a request serves one token or a batch of rows; caches and counters treat them apart.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Phase {
    /// Many rows of a prompt at once.
    Prefill,
    /// One new token.
    Decode,
}
