//! Workers that read by blocking calls: the plain twin of the rings. Owns threads, no memory and no queue; holds no unsafe code.
//! Surprising fact: it reads from any `PieceSource`, so the in-memory fake exercises exactly the code that serves real files.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::storage::reader::file::ModelFile;
use crate::storage::reader::pool::{Pool, WorkerGuard};
use crate::storage::reader::request::Lane;

/// Something with bytes at offsets.
pub(super) trait PieceSource: Send + Sync + 'static {
    /// Fills the start of `buffer` from `offset`; fewer bytes than asked are allowed, 0 means the end. `Err` is an errno.
    fn read_at(&self, lane: Lane, buffer: &mut [u8], offset: u64) -> Result<usize, i32>;
}

impl PieceSource for ModelFile {
    fn read_at(&self, lane: Lane, buffer: &mut [u8], offset: u64) -> Result<usize, i32> {
        rustix::io::pread(self.descriptor(lane), buffer, offset).map_err(|errno| errno.raw_os_error())
    }
}

/// Bytes of stack of a worker: it calls one read and a sink.
const STACK_BYTES: usize = 512 << 10;

/// Starts one thread for each worker that `pool` was built for.
pub(super) fn start<S: PieceSource>(
    pool: &Arc<Pool>,
    source: &Arc<S>,
    workers: usize,
) -> std::io::Result<Vec<JoinHandle<()>>> {
    let mut threads = Vec::with_capacity(workers);
    for index in 0..workers {
        let (guard, source) = (WorkerGuard(Arc::clone(pool)), Arc::clone(source));
        let builder = std::thread::Builder::new().name(format!("ds4-reader-{index}")).stack_size(STACK_BYTES);
        let spawned = builder.spawn(move || {
            serve(&guard.0, &*source);
        });
        match spawned {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                pool.close();
                threads.into_iter().for_each(|thread: JoinHandle<()>| drop(thread.join()));
                return Err(error);
            }
        }
    }
    Ok(threads)
}

fn serve(pool: &Pool, source: &impl PieceSource) {
    while let Some(mut piece) = pool.take_waiting() {
        loop {
            let lane = piece.lane();
            let (offset, buffer) = piece.target();
            let outcome = source.read_at(lane, buffer, offset);
            if outcome == Err(libc::EAGAIN) {
                // The kernel is out of some resource: asking again at once would burn the processor it needs.
                std::thread::sleep(Duration::from_micros(100));
            }
            match pool.settle(piece, outcome) {
                Some(again) => piece = again,
                None => break,
            }
        }
    }
}
