//! Mixes the residual streams and adds a sublayer's output (spec 3.3).
//! Never reads a stream that it has already written: a column of all streams is done at once. Surprising fact: the sum
//! runs over the first index of the combination matrix (row = source stream).

use super::{CpuBackend, parts::parts, pool::Pool};
use crate::backend::ops::HcExpand;

pub fn hc_expand(pool: &Pool, op: HcExpand<'_, CpuBackend>, streams: &mut [f32]) {
    let (n, hidden) = (op.stream_count, op.hidden);
    assert!(n <= STREAMS_MAX, "at most {STREAMS_MAX} streams");
    parts(pool, &mut streams[..op.rows * n * hidden], n * hidden, n * n * hidden, |r, streams| {
        let (y, post, comb) = (&op.y[r * hidden..], &op.post[r * n..], &op.comb[r * n * n..]);
        for at in 0..hidden {
            let mut old = [0.0f32; STREAMS_MAX];
            for (j, old) in old[..n].iter_mut().enumerate() {
                *old = streams[j * hidden + at];
            }
            for i in 0..n {
                let mut sum = post[i] * y[at];
                for (j, old) in old[..n].iter().enumerate() {
                    sum += comb[j * n + i] * old;
                }
                streams[i * hidden + at] = sum;
            }
        }
    });
}

/// Streams that fit the column held on the stack.
pub const STREAMS_MAX: usize = 8;
