//! Rows that were read before, in a fixed amount of memory: sets of eight places, the longest unused of a set leaves.
//! Owns copies of rows; never reads. Surprising fact: nothing is allocated before the first row, so that a budget can be planned with and
//! refused without having been taken.

use super::RowError;

/// Places that a row may be kept in.
const WAYS: usize = 8;
/// Bytes of key and stamp beside each row.
const OVERHEAD: u64 = 8 + 4;

/// A bounded store of rows of several tables.
pub(super) struct RowCache {
    sets: usize,
    /// Bytes of a place: the longest row.
    row_bytes: usize,
    /// `[sets, WAYS]`; 0 is empty.
    keys: Vec<u64>,
    /// `[sets, WAYS]` when each was last used.
    stamps: Vec<u32>,
    /// `[sets, WAYS, row_bytes]`
    data: Vec<u8>,
    now: u32,
}

impl RowCache {
    /// A store that takes at most `bytes` and holds at most `rows_max` rows of `row_bytes` or fewer; `None` when that is not even
    /// one set.
    pub(super) fn new(bytes: u64, row_bytes: usize, rows_max: u64) -> Option<Self> {
        let sets = bytes / ((row_bytes as u64 + OVERHEAD) * WAYS as u64);
        // More sets than rows keep nothing longer; chance still crowds some sets, hence the double.
        let sets = sets.min((2 * rows_max).div_ceil(WAYS as u64)).min(u64::from(u32::MAX));
        let sets = usize::try_from(sets).ok().filter(|sets| *sets > 0)?;
        Some(Self { sets, row_bytes, keys: Vec::new(), stamps: Vec::new(), data: Vec::new(), now: 0 })
    }

    /// Bytes that it takes once it is in use.
    pub(super) fn bytes(&self) -> u64 {
        (self.sets * WAYS) as u64 * (self.row_bytes as u64 + OVERHEAD)
    }

    /// Takes the memory, the first time.
    pub(super) fn allocate(&mut self) -> Result<(), RowError> {
        if !self.keys.is_empty() {
            return Ok(());
        }
        let (places, bytes) = (self.sets * WAYS, self.bytes());
        let fail = |e: std::collections::TryReserveError| RowError::CacheMemory { bytes, cause: e.to_string() };
        self.data.try_reserve_exact(places * self.row_bytes).map_err(fail)?;
        self.stamps.try_reserve_exact(places).map_err(fail)?;
        self.keys.try_reserve_exact(places).map_err(fail)?;
        self.data.resize(places * self.row_bytes, 0);
        self.stamps.resize(places, 0);
        self.keys.resize(places, 0);
        Ok(())
    }

    fn key(table: usize, row: u64) -> u64 {
        debug_assert!(row < 1 << 48 && table < 1 << 15, "a table of a file is far smaller");
        ((table as u64 + 1) << 48) | row
    }

    /// First place of the set of `key`.
    fn set(&self, key: u64) -> usize {
        let spread = key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        ((spread * self.sets as u64) >> 32) as usize * WAYS
    }

    fn tick(&mut self) -> u32 {
        if self.now == u32::MAX {
            // Four thousand million uses later age starts over.
            self.stamps.fill(0);
            self.now = 0;
        }
        self.now += 1;
        self.now
    }

    /// Copies a row to `out`, if it is here.
    pub(super) fn get(&mut self, table: usize, row: u64, out: &mut [u8]) -> bool {
        let key = Self::key(table, row);
        let first = self.set(key);
        let Some(way) = self.keys[first..first + WAYS].iter().position(|k| *k == key) else { return false };
        let place = first + way;
        self.stamps[place] = self.tick();
        out.copy_from_slice(&self.data[place * self.row_bytes..][..out.len()]);
        true
    }

    /// Keeps a row.
    pub(super) fn put(&mut self, table: usize, row: u64, bytes: &[u8]) {
        let key = Self::key(table, row);
        let first = self.set(key);
        let ways = first..first + WAYS;
        let place = match self.keys[ways.clone()].iter().position(|k| *k == key || *k == 0) {
            Some(way) => first + way,
            None => ways.min_by_key(|place| self.stamps[*place]).expect("a set has places"),
        };
        self.keys[place] = key;
        self.stamps[place] = self.tick();
        self.data[place * self.row_bytes..][..bytes.len()].copy_from_slice(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(places: u64) -> RowCache {
        let mut cache = RowCache::new(places * (4 + OVERHEAD), 4, u64::MAX / 2).unwrap();
        cache.allocate().unwrap();
        cache
    }

    #[test]
    fn rows_come_back_and_tables_are_kept_apart() {
        let mut cache = cache(64);
        cache.put(0, 7, &[1; 4]);
        cache.put(1, 7, &[2; 3]);
        let mut out = [0; 4];
        assert!(cache.get(0, 7, &mut out) && out == [1; 4]);
        let mut out = [0; 3];
        assert!(cache.get(1, 7, &mut out) && out == [2; 3]);
        assert!(!cache.get(0, 8, &mut [0; 4]));
    }

    #[test]
    fn the_longest_unused_of_a_set_leaves() {
        let mut cache = cache(WAYS as u64);
        for row in 0..WAYS as u64 {
            cache.put(0, row, &[row as u8; 4]);
        }
        assert!(cache.get(0, 0, &mut [0; 4]));
        cache.put(0, 100, &[9; 4]);
        assert!(cache.get(0, 0, &mut [0; 4]), "used a moment ago");
        assert!(!cache.get(0, 1, &mut [0; 4]), "the oldest");
    }

    #[test]
    fn a_budget_is_a_limit() {
        for budget in [0, 100, 127, 128, 1000, 1 << 20] {
            match RowCache::new(budget, 4, 1000) {
                Some(cache) => assert!(cache.bytes() <= budget && budget >= 128, "{budget}"),
                None => assert!(budget < 128, "{budget}"),
            }
        }
        assert!(RowCache::new(1 << 40, 4, 1000).unwrap().bytes() < 2100 * 16, "never more than the tables need");
    }
}
