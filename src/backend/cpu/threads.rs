//! Worker threads of the ops that are not matrix products, and how rows are split over them.
//! Never splits a sum: a thread owns whole outputs. Surprising fact: small ops run on the calling thread, since waking
//! a worker costs more than a few thousand multiplications.

use crate::backend::BackendError;

/// Multiplications below which an op stays on the calling thread. Waking two workers takes about 10 us, in which one
/// core does some 30,000 of them.
const INLINE_COST_MAX: usize = 32_768;

/// A fixed number of threads.
pub struct Threads {
    pool: Option<rayon::ThreadPool>,
}

impl Threads {
    /// `threads` workers; with one, all work runs on the caller.
    pub fn new(threads: usize) -> Result<Self, BackendError> {
        if threads <= 1 {
            return Ok(Self { pool: None });
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("ds4-op-{i}"))
            .build()
            .map_err(|e| BackendError::Threads { backend: "cpu", threads, reason: e.to_string() })?;
        Ok(Self { pool: Some(pool) })
    }

    /// Calls `f(i, part)` for each part of `width` values of `out`. `cost` is about the multiplications of one part.
    pub fn parts<T: Send>(&self, out: &mut [T], width: usize, cost: usize, f: impl Fn(usize, &mut [T]) + Sync) {
        let count = out.len() / width;
        match &self.pool {
            Some(pool) if count > 1 && count.saturating_mul(cost) > INLINE_COST_MAX => pool.install(|| {
                use rayon::prelude::*;
                out.par_chunks_exact_mut(width).enumerate().for_each(|(i, part)| f(i, part));
            }),
            _ => out.chunks_exact_mut(width).enumerate().for_each(|(i, part)| f(i, part)),
        }
    }

    /// As `parts`, for ops with two outputs a row.
    pub fn parts2<T: Send, U: Send>(
        &self,
        (a, a_width): (&mut [T], usize),
        (b, b_width): (&mut [U], usize),
        cost: usize,
        f: impl Fn(usize, &mut [T], &mut [U]) + Sync,
    ) {
        let count = a.len() / a_width;
        match &self.pool {
            Some(pool) if count > 1 && count.saturating_mul(cost) > INLINE_COST_MAX => pool.install(|| {
                use rayon::prelude::*;
                let pairs = a.par_chunks_exact_mut(a_width).zip(b.par_chunks_exact_mut(b_width));
                pairs.enumerate().for_each(|(i, (a, b))| f(i, a, b));
            }),
            _ => {
                let pairs = a.chunks_exact_mut(a_width).zip(b.chunks_exact_mut(b_width));
                pairs.enumerate().for_each(|(i, (a, b))| f(i, a, b));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_visited_once_whatever_the_thread_count() {
        for threads in [1, 2, 5] {
            let threads = Threads::new(threads).unwrap();
            let mut out = vec![0u32; 700];
            threads.parts(&mut out, 7, 100_000, |i, part| part.iter_mut().for_each(|v| *v += i as u32));
            assert!(out.iter().enumerate().all(|(at, v)| *v == at as u32 / 7));
            let mut other = vec![0u8; 100];
            threads.parts2((&mut out, 7), (&mut other, 1), 100_000, |i, a, b| {
                a.fill(0);
                b[0] = i as u8;
            });
            assert!(out.iter().all(|v| *v == 0));
            assert!(other.iter().enumerate().all(|(at, v)| *v == at as u8));
        }
    }
}
