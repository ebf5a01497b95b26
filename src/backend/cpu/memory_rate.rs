//! How fast all threads together read weights from memory. Owns a sum that nobody wants; never changes a byte.
//! Surprising fact: it reads the weights that were just loaded, so the rate is that of this run's own pages and needs no memory.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::backend::cpu::pool::Pool;

/// Enough to say something on a machine whose memory reads 300 GB/s, and 20 ms of one that reads 20.
const BYTES_MAX: usize = 384 << 20;
/// Below this the time is that of waking threads.
const BYTES_MIN: usize = 4 << 20;

/// Bytes read a second over one pass of `bytes`, or of the first part of it, in 1e9. `None` when there is too little to read.
pub fn read_gb_per_s(pool: &Pool, bytes: &[u8]) -> Option<f64> {
    let bytes = &bytes[..bytes.len().min(BYTES_MAX)];
    if bytes.len() < BYTES_MIN {
        return None;
    }
    let pass = || {
        let begun = Instant::now();
        black_box(read(pool, bytes));
        begun.elapsed().as_secs_f64()
    };
    // The first wakes the threads and maps the pages.
    black_box(read(pool, &bytes[..BYTES_MIN]));
    let seconds = pass();
    (seconds > 0.0).then(|| bytes.len() as f64 / seconds / 1e9)
}

/// Reads every byte of whole lines once: the exclusive or of their words.
pub fn read(pool: &Pool, bytes: &[u8]) -> u64 {
    let total = AtomicU64::new(0);
    let (lines, _) = bytes.as_chunks::<64>();
    pool.split(lines.len(), 1 << 14, |range| {
        // A line at a time: with four a step, the compiler's order of loads halves the rate.
        let mut sums = [0u64; 8];
        for line in &lines[range] {
            for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
                *sum ^= u64::from_le_bytes(*word);
            }
        }
        total.fetch_xor(sums.iter().fold(0, |a, b| a ^ b), Ordering::Relaxed);
    });
    total.into_inner()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_positive_or_absent() {
        let pool = Pool::new(2).unwrap();
        assert!(read_gb_per_s(&pool, &vec![1; BYTES_MIN]).is_some_and(|rate| rate > 0.0 && rate.is_finite()));
        assert_eq!(read_gb_per_s(&pool, &[1; 100]), None);
    }
}
