//! Where the time of a decoded token goes on a GPU: the device's view and the host's, each of which adds up to the token.
//! Never slows a token down that is not timed. Surprising fact: without a drawing only one token of a few is timed, since events cost a
//! little; the first of an engine are not, because they allocate, and make the driver's forms of their graphs.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use serde::Serialize;

use crate::obs::spans;

/// Tokens of which one is timed, which costs it half a percent, or two with `--no-graph` (H200, 2026-11-30). An odd number, so that it does not
/// follow the layers that do more at every fourth position.
const TIMED_EVERY: u64 = 5;

/// What a device says of a pass that is over.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct PassTimes {
    /// It had work, in nanoseconds.
    pub busy_ns: u64,
    /// Of that, it stood still until experts were there; `None` where the host looked for them.
    pub stalled_ns: Option<u64>,
}

/// Numbers of a device that only grow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct GpuWork {
    /// The host waited for the device.
    pub wait_ns: u64,
    /// Bytes that came beside its work.
    pub aside_bytes: u64,
}

/// Whoever takes the time of a device.
pub(super) trait PassClock: Send + Sync {
    /// A pass begins whose time is wanted.
    fn begin(&self);
    /// It has ended; `None` if the device has not, or has failed.
    fn end(&self) -> Option<PassTimes>;
    fn work(&self) -> GpuWork;
}

/// Sums over timed tokens.
#[derive(Clone, Copy, Default)]
struct Sums {
    tokens: u64,
    ns: u64,
    busy_ns: u64,
    stalled_ns: u64,
    /// Tokens that looked for their experts on the device.
    found: u64,
    wait_ns: u64,
    aside_bytes: u64,
    drive_ns: u64,
}

/// A pass that is timed.
pub(super) struct Begun {
    /// Whether it is a token that counts, and what was before.
    token: Option<(Instant, GpuWork, u64)>,
}

/// Times tokens.
pub(super) struct TokenTimer {
    clock: Box<dyn PassClock>,
    /// Time that passes have waited for the drive, in nanoseconds.
    drive_ns: Box<dyn Fn() -> u64 + Send + Sync>,
    tokens: AtomicU64,
    /// One pass at a time is timed.
    is_under_way: AtomicBool,
    sums: Mutex<Sums>,
}

/// Where the time of a decoded token went on a GPU: the mean of those that were timed, in milliseconds. `kernels_ms`, `stalled_ms` and
/// `idle_ms` add up to `token_ms`, and so do `host_ms`, `gpu_wait_ms` and `drive_wait_ms`; uploads lie beside both.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct TokenTime {
    /// Tokens that were timed.
    pub tokens: u64,
    /// From the call to the chosen id or the logits.
    pub token_ms: f64,
    /// The GPU had work and was not stopped by a gate; gaps between kernels that were started one by one are in it.
    pub kernels_ms: f64,
    /// It stood at a gate until experts were there; absent where the host looks for experts (`--no-graph`): then the GPU has no work meanwhile.
    pub stalled_ms: Option<f64>,
    /// It had nothing to do.
    pub idle_ms: f64,
    /// The host's own work.
    pub host_ms: f64,
    /// The host waited for the GPU.
    pub gpu_wait_ms: f64,
    /// The host waited for the drive.
    pub drive_wait_ms: f64,
    /// Bytes of experts that were uploaded.
    pub upload_bytes: u64,
    /// How long they kept the bus busy, at the rate of those uploads whose time was taken; 0 if none was.
    pub uploads_ms: f64,
}

impl TokenTimer {
    pub(super) fn new(clock: Box<dyn PassClock>, drive_ns: Box<dyn Fn() -> u64 + Send + Sync>) -> Self {
        let (tokens, is_under_way) = (AtomicU64::new(0), AtomicBool::new(false));
        Self { clock, drive_ns, tokens, is_under_way, sums: Mutex::default() }
    }

    /// A pass over `rows` tokens begins; `None` if its time is not taken.
    pub(super) fn begin(&self, rows: usize) -> Option<Begun> {
        let is_drawn = spans::is_wanted();
        // Relaxed: the numbers order nothing.
        let number = if rows == 1 { self.tokens.fetch_add(1, Ordering::Relaxed) } else { 0 };
        let counts = number > 0 && (is_drawn || number % TIMED_EVERY == TIMED_EVERY - 1);
        if !(counts || is_drawn) || self.is_under_way.swap(true, Ordering::Acquire) {
            return None;
        }
        self.clock.begin();
        Some(Begun { token: counts.then(|| (Instant::now(), self.clock.work(), (self.drive_ns)())) })
    }

    /// It is over.
    pub(super) fn end(&self, begun: Option<Begun>, is_ok: bool) {
        let Some(Begun { token }) = begun else { return };
        let token = token.map(|(at, before, drive)| (at.elapsed(), before, drive));
        let times = self.clock.end();
        self.is_under_way.store(false, Ordering::Release);
        if let (Some((took, before, drive_ns)), Some(times), true) = (token, times, is_ok) {
            let now = self.clock.work();
            let mut sums = self.sums.lock();
            sums.tokens += 1;
            sums.ns += took.as_nanos() as u64;
            sums.busy_ns += times.busy_ns;
            sums.stalled_ns += times.stalled_ns.unwrap_or(0);
            sums.found += u64::from(times.stalled_ns.is_some());
            sums.wait_ns += now.wait_ns - before.wait_ns;
            sums.aside_bytes += now.aside_bytes - before.aside_bytes;
            sums.drive_ns += (self.drive_ns)() - drive_ns;
        }
    }

    /// The mean token, if uploads went at `gb_per_s`; `None` before one was timed.
    pub(super) fn mean(&self, gb_per_s: f64) -> Option<TokenTime> {
        self.sums.lock().mean(gb_per_s)
    }
}

impl Sums {
    fn mean(&self, gb_per_s: f64) -> Option<TokenTime> {
        let upload_bytes = self.aside_bytes.checked_div(self.tokens)?;
        let each = |ns: u64| ns as f64 / 1e6 / self.tokens as f64;
        Some(TokenTime {
            tokens: self.tokens,
            token_ms: each(self.ns),
            kernels_ms: each(self.busy_ns.saturating_sub(self.stalled_ns)),
            stalled_ms: (self.found > 0).then(|| each(self.stalled_ns)),
            idle_ms: each(self.ns.saturating_sub(self.busy_ns)),
            host_ms: each(self.ns.saturating_sub(self.wait_ns + self.drive_ns)),
            gpu_wait_ms: each(self.wait_ns),
            drive_wait_ms: each(self.drive_ns),
            upload_bytes,
            uploads_ms: if gb_per_s > 0.0 { upload_bytes as f64 / gb_per_s / 1e6 } else { 0.0 },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device that says the same of each pass, and counts.
    #[derive(Default)]
    struct Fake(AtomicU64);

    impl PassClock for Fake {
        fn begin(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }

        fn end(&self) -> Option<PassTimes> {
            Some(PassTimes { busy_ns: 3_000_000, stalled_ns: Some(1_000_000) })
        }

        fn work(&self) -> GpuWork {
            let passes = self.0.load(Ordering::Relaxed);
            GpuWork { wait_ns: 100 * passes, aside_bytes: 5000 * passes }
        }
    }

    #[test]
    fn one_token_of_five_is_timed_and_neither_prompts_nor_the_first_nor_what_fails() {
        let timer = TokenTimer::new(Box::new(Fake::default()), Box::new(|| 0));
        assert!(timer.begin(7).is_none(), "a prompt that nobody draws");
        let timed: Vec<u64> = (0..15)
            .filter(|_| {
                let begun = timer.begin(1);
                let is_timed = begun.is_some();
                timer.end(begun, true);
                is_timed
            })
            .collect();
        assert_eq!(timed, [4, 9, 14]);
        (0..4).for_each(|_| timer.end(timer.begin(1), true));
        let failed = timer.begin(1);
        timer.end(failed, false);
        assert_eq!(timer.mean(0.0).unwrap().tokens, 3);
    }

    #[test]
    fn a_pass_within_another_is_not_timed() {
        let timer = TokenTimer::new(Box::new(Fake::default()), Box::new(|| 0));
        (0..4).for_each(|_| timer.end(timer.begin(1), true));
        let outer = timer.begin(1);
        (0..6).for_each(|_| assert!(timer.begin(1).is_none()));
        timer.end(outer, true);
        assert!((0..5).any(|_| timer.begin(1).is_some()));
    }

    #[test]
    fn both_views_add_up() {
        let sums = Sums {
            tokens: 2,
            ns: 20_000_000,
            busy_ns: 15_000_000,
            stalled_ns: 3_000_000,
            found: 2,
            wait_ns: 8_000_000,
            aside_bytes: 100_000_000,
            drive_ns: 2_000_000,
        };
        let t = sums.mean(50.0).unwrap();
        assert_eq!((t.token_ms, t.kernels_ms, t.stalled_ms, t.idle_ms), (10.0, 6.0, Some(1.5), 2.5));
        assert_eq!((t.host_ms, t.gpu_wait_ms, t.drive_wait_ms), (5.0, 4.0, 1.0));
        assert_eq!((t.upload_bytes, t.uploads_ms), (50_000_000, 1.0));
        let routed = Sums { found: 0, stalled_ns: 0, ..sums }.mean(0.0).unwrap();
        assert_eq!((routed.stalled_ms, routed.kernels_ms, routed.uploads_ms), (None, 7.5, 0.0));
        assert_eq!(Sums::default().mean(50.0), None);
    }
}
