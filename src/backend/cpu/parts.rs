//! How the ops that are not matrix products are split over the compute threads.
//! Never splits a sum: a thread owns whole outputs. Surprising fact: small ops run on the calling thread, since waking
//! another costs more than a few thousand multiplications.

use super::pool::Pool;

/// Multiplications below which a piece is not worth handing over. Waking a thread takes about 10 us, in which one core
/// does some 30,000 of them.
const PIECE_COST_MIN: usize = 32_768;

fn grain(cost: usize) -> usize {
    PIECE_COST_MIN.div_ceil(cost.max(1))
}

/// Calls `f(i, part)` for each part of `width` values of `out`. `cost` is about the multiplications of one part.
pub fn parts<T: Send>(pool: &Pool, out: &mut [T], width: usize, cost: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    pool.split_mut(out, width, grain(cost), |first, run| {
        run.chunks_exact_mut(width).enumerate().for_each(|(i, part)| f(first + i, part));
    });
}

/// As `parts`, for ops with two outputs a row.
pub fn parts2<T: Send, U: Send>(
    pool: &Pool,
    (a, a_width): (&mut [T], usize),
    (b, b_width): (&mut [U], usize),
    cost: usize,
    f: impl Fn(usize, &mut [T], &mut [U]) + Sync,
) {
    let mut rows: Vec<_> = a.chunks_exact_mut(a_width).zip(b.chunks_exact_mut(b_width)).collect();
    parts(pool, &mut rows, 1, cost, |i, row| {
        let (a, b) = &mut row[0];
        f(i, a, b);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_visited_once_whatever_the_thread_count() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads).unwrap();
            let mut out = vec![0u32; 700];
            parts(&pool, &mut out, 7, 100_000, |i, part| part.iter_mut().for_each(|v| *v += i as u32));
            assert!(out.iter().enumerate().all(|(at, v)| *v == at as u32 / 7));
            let mut other = vec![0u8; 100];
            parts2(&pool, (&mut out, 7), (&mut other, 1), 100_000, |i, a, b| {
                a.fill(0);
                b[0] = i as u8;
            });
            assert!(out.iter().all(|v| *v == 0));
            assert!(other.iter().enumerate().all(|(at, v)| *v == at as u8));
        }
    }
}
