//! The compute threads: splits work over disjoint outputs. Owns the rayon pool; never decides in which order numbers
//! are added. Surprising fact: which thread computes what may change from call to call, so nothing summed across
//! pieces may pass through here.

use std::ops::Range;

use parking_lot::Mutex;

use super::matmul::Scratch;

/// Pieces made per thread, so that a thread which was slowed down leaves work that others can take.
const PIECES_PER_THREAD: usize = 4;

/// A fixed number of named compute threads.
pub struct Pool {
    threads: usize,
    workers: Option<rayon::ThreadPool>,
    /// Memory of the products that run here, lent to one at a time.
    pub(super) scratch: Mutex<Scratch>,
}

/// The threads could not be started.
#[derive(Debug, thiserror::Error)]
#[error("cannot start {threads} compute threads: {source}; lower --threads")]
pub struct PoolError {
    pub threads: usize,
    pub source: rayon::ThreadPoolBuildError,
}

impl Pool {
    /// A pool of `threads` (at least one); with one, everything runs on the calling thread.
    ///
    /// # Errors
    /// [`PoolError`] when the system refuses to start a thread.
    pub fn new(threads: usize) -> Result<Self, PoolError> {
        let threads = threads.max(1);
        let workers = (threads > 1)
            .then(|| {
                rayon::ThreadPoolBuilder::new()
                    .num_threads(threads)
                    .thread_name(|index| format!("ds4-compute-{index}"))
                    .build()
            })
            .transpose()
            .map_err(|source| PoolError { threads, source })?;
        Ok(Self { threads, workers, scratch: Mutex::default() })
    }

    /// Number of threads that compute.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Runs `f` on one of the pool's threads: `split` calls inside it hand work over without waking the caller's
    /// thread each time, so a whole forward pass belongs in one `run`.
    pub fn run<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        match &self.workers {
            Some(workers) => workers.install(f),
            None => f(),
        }
    }

    /// Calls `f` on ranges that together cover `0..tasks`, each of at least `grain` tasks (the last may be shorter).
    pub fn split(&self, tasks: usize, grain: usize, f: impl Fn(Range<usize>) + Sync) {
        let piece = self.piece(tasks, grain);
        if tasks == 0 {
        } else if piece >= tasks {
            f(0..tasks);
        } else {
            self.run(|| halve(0..tasks, piece, &f));
        }
    }

    /// Cuts `out` into runs of whole units of `unit` elements and calls `f(first unit, run)` on each; a run has at
    /// least `grain` units (the last may be shorter). `out` must be whole units.
    pub fn split_mut<T: Send>(&self, out: &mut [T], unit: usize, grain: usize, f: impl Fn(usize, &mut [T]) + Sync) {
        if out.is_empty() {
            return;
        }
        assert!(unit > 0 && out.len().is_multiple_of(unit), "{} elements are not whole units of {unit}", out.len());
        let units = out.len() / unit;
        let piece = self.piece(units, grain);
        if piece >= units {
            f(0, out);
        } else {
            self.run(|| halve_mut(0, out, unit, piece, &f));
        }
    }

    fn piece(&self, tasks: usize, grain: usize) -> usize {
        if self.threads == 1 { tasks } else { tasks.div_ceil(self.threads * PIECES_PER_THREAD).max(grain).max(1) }
    }
}

fn halve(range: Range<usize>, piece: usize, f: &(impl Fn(Range<usize>) + Sync)) {
    if range.len() <= piece {
        return f(range);
    }
    let middle = range.start + middle(range.len(), piece);
    let (left, right) = (range.start..middle, middle..range.end);
    rayon::join(|| halve(left, piece, f), || halve(right, piece, f));
}

fn halve_mut<T: Send>(first: usize, out: &mut [T], unit: usize, piece: usize, f: &(impl Fn(usize, &mut [T]) + Sync)) {
    let units = out.len() / unit;
    if units <= piece {
        return f(first, out);
    }
    let middle = middle(units, piece);
    let (left, right) = out.split_at_mut(middle * unit);
    rayon::join(|| halve_mut(first, left, unit, piece, f), || halve_mut(first + middle, right, unit, piece, f));
}

/// About half of `len`, in whole pieces.
fn middle(len: usize, piece: usize) -> usize {
    (len.div_ceil(piece) / 2) * piece
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 3] {
            let pool = Pool::new(threads).unwrap();
            for tasks in [0, 1, 2, 7, 64, 1000] {
                for grain in [0, 1, 5, 2000] {
                    let seen: Vec<_> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                    pool.split(tasks, grain, |range| {
                        range.for_each(|i| {
                            seen[i].fetch_add(1, Ordering::Relaxed);
                        });
                    });
                    assert!(seen.iter().all(|n| n.load(Ordering::Relaxed) == 1), "{threads} {tasks} {grain}");
                }
            }
        }
    }

    #[test]
    fn runs_are_whole_units_in_place() {
        for threads in [1, 2, 4] {
            let pool = Pool::new(threads).unwrap();
            for (units, unit) in [(0, 3), (1, 1), (5, 3), (97, 2)] {
                let mut out = vec![0usize; units * unit];
                pool.split_mut(&mut out, unit, 1, |first, run| {
                    for (i, cell) in run.iter_mut().enumerate() {
                        *cell += first * unit + i + 1;
                    }
                });
                assert!(out.iter().enumerate().all(|(i, &cell)| cell == i + 1), "{threads} {units} {unit}");
            }
        }
    }
}
