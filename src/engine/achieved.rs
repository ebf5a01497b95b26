//! Where the time of decoding went, and how near it came to its bound.
//! Never explains a number away: what is faster than its bound shows that the bound was measured badly, and is said. Surprising fact: the host's
//! waits for the drive lie inside of the time in which a GPU stands still, so the bus gets what is left of that.

use std::fmt;

use serde::Serialize;

use crate::engine::forecast::{Forecast, short};

/// From here on an achieved share contradicts its bound. What rounds to 100 % is within the noise of a measurement.
const ABOVE_BOUND: f64 = 1.005;

/// Where the time of decoding went, and how near it came to the bound.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct Achieved {
    /// Tokens a second that these misses allow at most; `None` where nothing was measured.
    pub bound_tps: Option<f64>,
    /// Achieved over bound.
    pub of_bound: Option<f64>,
    /// Waits for experts and rows, share of the decode time.
    pub drive: f64,
    /// A GPU stood still for experts that were in host memory, or would be there soon; 0 without one, and where nothing was timed.
    pub bus: f64,
    /// Waits for slots that other leases held.
    pub slots: f64,
    /// The rest: products, attention, sampling.
    pub compute: f64,
}

/// What decoding did, as counted.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct DecodeSums {
    pub passes: u64,
    pub seconds: f64,
    /// Bytes of experts that were read for misses.
    pub missed_bytes: u64,
    pub expert_wait_s: f64,
    pub row_wait_s: f64,
    pub slot_wait_s: f64,
    /// Of the tokens that were timed on a GPU: bytes of experts that one had uploaded, and the share of its time in which the GPU stood still for
    /// experts, those that the drive owed among them.
    pub uploaded_bytes: f64,
    pub stalled: f64,
}

impl Achieved {
    /// Compares what was counted with the bound. `None` before the first decoded token.
    pub fn of(forecast: &Forecast, sums: &DecodeSums) -> Option<Self> {
        if sums.passes == 0 || sums.seconds <= 0.0 {
            return None;
        }
        let passes = sums.passes as f64;
        // What the page cache holds comes faster than the drive gives: only the memory is a bound then.
        let no_drive = Forecast { drive_gb_per_s: None, row_reads_per_s: None, ..*forecast };
        let forecast = if forecast.is_cached { &no_drive } else { forecast };
        let missed_bytes = sums.missed_bytes as f64 / passes;
        let bound = forecast.decode_of(missed_bytes, sums.uploaded_bytes, forecast.rows_per_token as f64);
        let share = |s: f64| (s / sums.seconds).clamp(0.0, 1.0);
        let (drive, slots) = (share(sums.expert_wait_s + sums.row_wait_s), share(sums.slot_wait_s));
        // The host waits for the drive while the GPU stands still.
        let bus = (sums.stalled - drive).clamp(0.0, 1.0 - drive);
        Some(Self {
            bound_tps: bound.tps(),
            of_bound: bound.tps().map(|bound| passes / sums.seconds / bound),
            drive,
            bus,
            slots,
            compute: (1.0 - drive - bus - slots).max(0.0),
        })
    }

    /// What took most of the time.
    pub fn held_by(&self) -> &'static str {
        let shares = [
            (self.compute, "compute"),
            (self.slots, "waits for slots"),
            (self.bus, "the bus"),
            (self.drive, "the drive"),
        ];
        shares.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).map_or("compute", |(_, what)| what)
    }
}

impl fmt::Display for Achieved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.bound_tps, self.of_bound) {
            // What is faster than its bound shows the bound to be wrong: memory or drive were busy when they were measured.
            (Some(bound), Some(of)) if of > ABOVE_BOUND => write!(
                f,
                "decode: {} t/s, more than the {} t/s that its misses should allow: drive or memory was measured at a busy moment",
                short(bound * of),
                short(bound)
            )?,
            (Some(bound), Some(of)) => {
                write!(f, "decode: {:.0} % of the {} t/s that its misses allow", 100.0 * of, short(bound))?;
            }
            _ => write!(f, "decode: no bound is known (nothing was measured)")?,
        }
        let percent = |share: f64| 100.0 * share;
        write!(
            f,
            "; held by {} ({:.0} % compute, {:.0} % drive",
            self.held_by(),
            percent(self.compute),
            percent(self.drive)
        )?;
        if self.bus >= 0.005 {
            write!(f, ", {:.0} % bus", percent(self.bus))?;
        }
        if self.slots >= 0.005 {
            write!(f, ", {:.0} % waits for slots", percent(self.slots))?;
        }
        write!(f, ")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::forecast::GpuTier;
    use crate::engine::forecast::tests::{flash, near};

    #[test]
    fn the_achieved_share_and_what_held_it() {
        let f = flash();
        let sums = DecodeSums {
            passes: 10,
            seconds: 4.0,
            missed_bytes: 23_900_000_000,
            expert_wait_s: 2.6,
            ..DecodeSums::default()
        };
        let a = Achieved::of(&f, &sums).unwrap();
        near(a.of_bound.unwrap(), 2.5 / f.decode(1.0).tps().unwrap());
        assert_eq!(a.held_by(), "the drive");
        near(a.drive + a.compute, 1.0);
        let text = a.to_string();
        assert!(text.contains("65 % drive") && text.contains("held by the drive"), "{text}");
        assert!(text.contains("% of the") && !text.contains("busy"), "{text}");
        // Half as fast as the drive was measured to allow at most is a share; twice as fast shows a measurement that was disturbed.
        let text = Achieved::of(&f, &DecodeSums { seconds: 1.0, ..sums }).unwrap().to_string();
        assert!(
            text.starts_with("decode: 10.0 t/s, more than the ")
                && text.contains("busy moment")
                && !text.contains("% of"),
            "{text}"
        );
        let idle = DecodeSums { expert_wait_s: 0.1, slot_wait_s: 3.0, ..sums };
        assert_eq!(Achieved::of(&f, &idle).unwrap().held_by(), "waits for slots");
        assert_eq!(Achieved::of(&f, &DecodeSums { expert_wait_s: 0.0, ..sums }).unwrap().held_by(), "compute");
        assert_eq!(Achieved::of(&f, &DecodeSums::default()), None);
    }

    #[test]
    fn a_gpu_that_stood_still_was_held_by_the_bus_or_the_drive() {
        let tier = GpuTier { slots: 7680, bus_gb_per_s: Some(50.0) };
        let f = Forecast { is_cached: true, memory_gb_per_s: Some(3750.0), gpu: Some(tier), ..flash() };
        let sums = DecodeSums { passes: 100, seconds: 2.5, uploaded_bytes: 1e9, stalled: 0.7, ..DecodeSums::default() };
        let a = Achieved::of(&f, &sums).unwrap();
        near(a.of_bound.unwrap(), 40.0 / 50.0);
        assert_eq!(a.held_by(), "the bus");
        near(a.bus + a.compute, 1.0);
        assert!(a.to_string().contains("held by the bus (30 % compute, 0 % drive, 70 % bus)"), "{a}");
        let a = Achieved::of(&f, &DecodeSums { expert_wait_s: 1.5, ..sums }).unwrap();
        assert_eq!(a.held_by(), "the drive");
        near(a.drive + a.bus + a.compute, 1.0);
    }
}
