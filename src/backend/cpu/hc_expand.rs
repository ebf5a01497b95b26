//! Mixes the residual streams and adds a sublayer's output (spec 3.3).
//! Never reads a stream that it has already written: a column of all streams is done at once. Surprising fact: the sum
//! runs over the first index of the combination matrix (row = source stream).

use super::{CpuBackend, lanes, parts::parts, pool::Pool};
use crate::backend::ops::HcExpand;

pub fn hc_expand(pool: &Pool, op: HcExpand<'_, CpuBackend>, streams: &mut [f32]) {
    let (n, hidden) = (op.stream_count, op.hidden);
    assert!(n <= STREAMS_MAX, "at most {STREAMS_MAX} streams");
    parts(pool, &mut streams[..op.rows * n * hidden], n * hidden, n * n * hidden, |r, streams| {
        let (y, post, comb) = (&op.y[r * hidden..], &op.post[r * n..], &op.comb[r * n * n..]);
        for first in (0..hidden).step_by(COLUMNS) {
            let len = COLUMNS.min(hidden - first);
            let mut new = [0.0f32; COLUMNS];
            new[..len].copy_from_slice(&y[first..first + len]);
            let mut old = [[0.0f32; COLUMNS]; STREAMS_MAX];
            for (j, old) in old[..n].iter_mut().enumerate() {
                old[..len].copy_from_slice(&streams[j * hidden + first..][..len]);
            }
            for i in 0..n {
                let mut sum = new.map(|y| post[i] * y);
                for (j, old) in old[..n].iter().enumerate() {
                    lanes::add_scaled(comb[j * n + i], old, &mut sum);
                }
                streams[i * hidden + first..][..len].copy_from_slice(&sum[..len]);
            }
        }
    });
}

/// Columns that are done at once.
const COLUMNS: usize = 16;
/// Streams that fit the column held on the stack.
pub const STREAMS_MAX: usize = 8;
