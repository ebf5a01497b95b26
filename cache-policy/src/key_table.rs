//! A table from expert keys to small values, indexed by layer and expert without hashing.
//! Never shrinks, and holds at most what the model's layers and experts span.
//! Surprising fact: keys that were never written cost nothing; reading one gives the empty value.

use alloc::vec::Vec;

use crate::ids::ExpertKey;

/// Values by layer, then expert.
#[derive(Clone, Debug)]
pub(crate) struct KeyTable<T> {
    rows: Vec<Vec<T>>,
    empty: T,
}

impl<T: Copy> KeyTable<T> {
    pub(crate) fn new(empty: T) -> Self {
        Self { rows: Vec::new(), empty }
    }

    #[inline]
    pub(crate) fn get(&self, key: ExpertKey) -> T {
        let row = self.rows.get(usize::from(key.layer.0));
        row.and_then(|r| r.get(usize::from(key.expert.0))).copied().unwrap_or(self.empty)
    }

    #[inline]
    pub(crate) fn at(&mut self, key: ExpertKey) -> &mut T {
        let (layer, expert) = (usize::from(key.layer.0), usize::from(key.expert.0));
        if self.rows.get(layer).is_none_or(|r| r.len() <= expert) {
            self.grow(layer, expert);
        }
        &mut self.rows[layer][expert]
    }

    #[cold]
    fn grow(&mut self, layer: usize, expert: usize) {
        if self.rows.len() <= layer {
            self.rows.resize(layer + 1, Vec::new());
        }
        self.rows[layer].resize(expert + 1, self.empty);
    }

    /// All values ever written, and the empty ones between them.
    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.rows.iter_mut().flatten()
    }
}
