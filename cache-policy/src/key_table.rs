//! A table from expert keys to small values, indexed by layer and expert without hashing.
//! Never shrinks, and holds at most twice what the model's layers and experts span.
//! Surprising fact: keys that were never written cost nothing; reading one gives the empty value.

use alloc::vec::Vec;

use crate::ids::ExpertKey;

/// Values by layer, then expert.
#[derive(Clone, Debug)]
pub(crate) struct KeyTable<T> {
    /// Layers one after another, `stride` values each.
    values: Vec<T>,
    /// A power of two, or zero before the first write.
    stride: usize,
    empty: T,
}

impl<T: Copy> KeyTable<T> {
    pub(crate) fn new(empty: T) -> Self {
        Self { values: Vec::new(), stride: 0, empty }
    }

    #[inline]
    fn index(&self, key: ExpertKey) -> Option<usize> {
        let expert = usize::from(key.expert.0);
        (expert < self.stride).then(|| usize::from(key.layer.0) * self.stride + expert)
    }

    #[inline]
    pub(crate) fn get(&self, key: ExpertKey) -> T {
        self.index(key).and_then(|i| self.values.get(i)).copied().unwrap_or(self.empty)
    }

    #[inline]
    pub(crate) fn at(&mut self, key: ExpertKey) -> &mut T {
        let index = match self.index(key) {
            Some(index) if index < self.values.len() => index,
            _ => self.grow(key),
        };
        &mut self.values[index]
    }

    /// Makes room for `key`; its index.
    #[cold]
    fn grow(&mut self, key: ExpertKey) -> usize {
        let (layer, expert) = (usize::from(key.layer.0), usize::from(key.expert.0));
        if expert >= self.stride {
            let stride = (expert + 1).next_power_of_two();
            let mut values = Vec::with_capacity(self.values.len() / self.stride.max(1) * stride);
            for row in self.values.chunks(self.stride.max(1)) {
                values.extend_from_slice(row);
                values.resize(values.len() + stride - row.len(), self.empty);
            }
            (self.values, self.stride) = (values, stride);
        }
        if self.values.len() < (layer + 1) * self.stride {
            self.values.resize((layer + 1) * self.stride, self.empty);
        }
        layer * self.stride + expert
    }

    /// All values ever written, and the empty ones between them.
    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.values.iter_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeMap;

    #[test]
    fn values_stay_where_they_were_written_while_the_table_grows() {
        let (mut table, mut twin) = (KeyTable::new(0u32), BTreeMap::new());
        let keys = [(3, 0), (0, 0), (0, 5), (7, 1), (2, 4), (1, 300), (7, 299), (300, 2), (3, 0), (0, 1023)];
        for (value, (layer, expert)) in (1u32..).zip(keys) {
            let key = ExpertKey::new(layer, expert);
            assert_eq!(table.get(key), twin.get(&key).copied().unwrap_or(0));
            *table.at(key) = value;
            twin.insert(key, value);
            assert!(twin.iter().all(|(&k, &v)| table.get(k) == v), "after {key}");
        }
        assert_eq!(table.values_mut().filter(|v| **v > 0).count(), twin.len());
        assert_eq!(table.get(ExpertKey::new(u16::MAX, u16::MAX)), 0);
    }
}
