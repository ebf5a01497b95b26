//! How fast a run can be, from what the drive and the memory give, and how near a run came. Owns the formula; measures nothing itself.
//! Never promises: every number is a bound that compute and queues only lower. Surprising fact: with experts in memory it is the dense
//! weights that bound a token, so a better hit rate stops paying long before 100 %.

use std::fmt;

use serde::Serialize;

use crate::engine::prepare::Prepared;
use crate::storage::probe::DriveRates;
use crate::units::Bytes;

/// Experts below this size are not read ahead unless asked for.
const READ_AHEAD_EXPERT_BYTES_MIN: u64 = 1 << 20;

/// What a token costs, and what drive and memory give.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct Forecast {
    /// Weights that a decode step reads while no expert of the step is known yet.
    pub dense_bytes: u64,
    /// Weights of the shared experts: read while experts are on their way.
    pub shared_bytes: u64,
    /// Routed experts of one token, all layers.
    pub expert_bytes: u64,
    pub experts_per_token: u64,
    pub experts_total: u64,
    /// Bytes of all routed experts.
    pub experts_total_bytes: u64,
    /// Rows of disk-only tables that a token asks for.
    pub rows_per_token: u64,
    /// Rows of a prompt that go through one layer before the next begins.
    pub sweep: u64,
    /// Whether experts come from the drive at all.
    pub is_streaming: bool,
    /// Whether experts are read before their layer asks for them, so that reads overlap everything.
    pub reads_ahead: bool,
    /// Whether reads go through the page cache, so that the drive bounds only what is not in it.
    pub is_cached: bool,
    /// Slots of the cache.
    pub cache_slots: u64,
    /// `None` where the drive was not measured.
    pub drive_gb_per_s: Option<f64>,
    pub row_reads_per_s: Option<f64>,
    /// `None` where the memory was not measured.
    pub memory_gb_per_s: Option<f64>,
}

/// Time of one token by what it needs.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct TokenBound {
    /// Weights from memory, all of them.
    pub memory_s: f64,
    /// Missed experts and rows from the drive.
    pub drive_s: f64,
    /// The least time of the token.
    pub token_s: f64,
}

impl TokenBound {
    /// Tokens a second; `None` when nothing was known.
    pub fn tps(&self) -> Option<f64> {
        (self.token_s > 0.0).then(|| 1.0 / self.token_s)
    }
}

impl Forecast {
    /// What the file and the plan say; rates of the drive as measured, of the memory still unknown.
    pub fn of(prepared: &Prepared) -> Self {
        let (_, _, top_k) = prepared.config.expert_shape();
        let (mut dense_bytes, mut shared_bytes) = (0, 0);
        for tensor in prepared.file.tensors() {
            // Tables are read by row, the embedding by one row a token.
            let is_row_wise = !tensor.ty.is_numeric() || tensor.name.starts_with("token_embd");
            if is_row_wise || tensor.name.contains("_exps.") {
                continue;
            }
            match tensor.name.contains("_shexp.") {
                true => shared_bytes += tensor.bytes,
                false => dense_bytes += tensor.bytes,
            }
        }
        let layers = &prepared.layout.experts;
        let slices = layers.iter().map(|l| (l.experts, l.gate.slice_bytes + l.up.slice_bytes + l.down.slice_bytes));
        let (mut expert_bytes, mut experts_total_bytes) = (0u64, 0u64);
        for (experts, bytes) in slices {
            expert_bytes += bytes * top_k as u64;
            experts_total_bytes += bytes * u64::from(experts);
        }
        let plan = &prepared.plan;
        Self {
            dense_bytes,
            shared_bytes,
            expert_bytes,
            experts_per_token: plan.token_experts,
            experts_total: plan.experts_total,
            experts_total_bytes,
            rows_per_token: prepared.config.rows_per_token() as u64,
            sweep: prepared.runner.sweep.max(prepared.runner.chunk) as u64,
            is_streaming: plan.is_streaming,
            reads_ahead: false,
            is_cached: !prepared.reader.is_direct(),
            cache_slots: plan.cache_slots,
            drive_gb_per_s: None,
            row_reads_per_s: None,
            memory_gb_per_s: None,
        }
        .with_drive(prepared.drive.as_ref())
    }

    /// With the rates of a drive.
    #[must_use]
    pub fn with_drive(self, rates: Option<&DriveRates>) -> Self {
        Self {
            drive_gb_per_s: rates.map(|r| r.bulk.gb_per_s),
            row_reads_per_s: rates.map(|r| r.rows.reads_per_s),
            ..self
        }
    }

    /// With the rate at which all threads together read weights.
    #[must_use]
    pub fn with_memory(self, gb_per_s: Option<f64>) -> Self {
        Self { memory_gb_per_s: gb_per_s, ..self }
    }

    /// With or without lookahead.
    #[must_use]
    pub fn with_lookahead(self, reads_ahead: bool) -> Self {
        Self { reads_ahead, ..self }
    }

    /// The least time of a decode step in which `miss_rate` of the experts must be read. A layer's attention cannot begin before the layer
    /// before it is summed, so dense weights and reads follow one another unless reads run ahead; shared and present experts run while reads
    /// are under way.
    pub fn decode(&self, miss_rate: f64) -> TokenBound {
        self.decode_of(self.expert_bytes as f64 * miss_rate, self.rows_per_token as f64)
    }

    /// As [`Forecast::decode`], for bytes and rows that a token is known to have missed.
    pub fn decode_of(&self, missed_bytes: f64, rows: f64) -> TokenBound {
        let from_memory = |bytes: f64| self.memory_gb_per_s.map_or(0.0, |rate| bytes / (rate * 1e9));
        let missed_bytes = if self.is_streaming { missed_bytes } else { 0.0 };
        let experts_s = self.drive_gb_per_s.map_or(0.0, |rate| missed_bytes / (rate * 1e9));
        let rows_s = self.row_reads_per_s.map_or(0.0, |rate| rows / rate);
        let dense_s = from_memory(self.dense_bytes as f64);
        let beside_s = from_memory((self.shared_bytes + self.expert_bytes) as f64);
        let drive_s = experts_s + rows_s;
        let memory_s = dense_s + beside_s;
        let token_s = if self.reads_ahead { memory_s.max(drive_s) } else { dense_s + drive_s.max(beside_s) };
        TokenBound { memory_s, drive_s, token_s }
    }

    /// Whether guessed experts should be read ahead: the drive is what reads wait for, a token that hits half of its experts waits for it
    /// at least a quarter of the time that its weights take from memory, and an expert is large enough that its bytes cost more than the
    /// system calls of a read.
    pub fn is_read_ahead_worth_it(&self) -> bool {
        let is_short = self.is_streaming && !self.is_cached && self.cache_slots < self.experts_total;
        let is_large = self.expert_bytes >= self.experts_per_token * READ_AHEAD_EXPERT_BYTES_MIN;
        let half = self.decode(0.5);
        is_short && is_large && self.drive_gb_per_s.is_some() && half.drive_s >= half.memory_s / 4.0
    }

    /// The least time of a prompt of `tokens`, from an empty cache: what its sweeps must read of the experts and of the tables. Experts that stay
    /// in the cache between sweeps are read once. `None` where the drive was not measured or nothing is read.
    pub fn prefill_tps(&self, tokens: u64) -> Option<f64> {
        let rate = self.drive_gb_per_s.filter(|_| self.is_streaming && self.experts_total > 0)? * 1e9;
        let sweep = self.sweep.clamp(1, tokens.max(1));
        let sweeps = tokens.max(1).div_ceil(sweep);
        // With many rows a sweep asks for nearly all experts; what the cache cannot hold is read again for each sweep.
        let uses = (sweep * self.experts_per_token) as f64;
        let total = self.experts_total as f64;
        let asked = total * (1.0 - (-uses / total).exp());
        let again = (asked - self.cache_slots as f64).max(0.0);
        let expert = self.experts_total_bytes as f64 / total;
        let read = (asked + again * (sweeps - 1) as f64) * expert;
        let rows_s = self.row_reads_per_s.map_or(0.0, |per_s| (tokens * self.rows_per_token) as f64 / per_s);
        Some(tokens.max(1) as f64 / (read / rate + rows_s))
    }
}

/// Digits that a forecast deserves.
fn short(tps: f64) -> String {
    match tps {
        t if t < 10.0 => format!("{t:.2}"),
        t if t < 100.0 => format!("{t:.1}"),
        t => format!("{t:.0}"),
    }
}

impl fmt::Display for Forecast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tps = |miss_rate| self.decode(miss_rate).tps().map(short);
        match (tps(0.0), tps(0.1), tps(0.5), tps(1.0)) {
            (Some(hit), Some(tenth), Some(half), Some(missed))
                if self.is_streaming && self.drive_gb_per_s.is_some() =>
            {
                write!(
                    f,
                    "decode bound: {hit} t/s when every expert is at hand, {tenth} at 90 % hits, {half} at 50 %, {missed} at none"
                )?
            }
            (Some(hit), ..) => write!(f, "decode bound: {hit} t/s with every expert at hand")?,
            _ => return write!(f, "decode bound: unknown, neither drive nor memory was measured"),
        }
        let dense = Bytes(self.dense_bytes + self.shared_bytes);
        write!(f, " (a token needs {dense} of weights and {} of experts", Bytes(self.expert_bytes))?;
        match self.drive_gb_per_s {
            Some(rate) if self.is_streaming && self.is_cached => {
                write!(f, "; drive {rate:.2} GB/s, for what is not in the page cache")?;
            }
            Some(rate) if self.is_streaming => write!(f, "; drive {rate:.2} GB/s")?,
            None if self.is_streaming => write!(f, "; drive not measured")?,
            _ => {}
        }
        match self.memory_gb_per_s {
            Some(rate) => write!(f, "; memory {rate:.1} GB/s)"),
            None => write!(f, "; memory not measured)"),
        }
    }
}

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
        let bound_tps = forecast.decode_of(sums.missed_bytes as f64 / passes, forecast.rows_per_token as f64).tps();
        let share = |s: f64| (s / sums.seconds).clamp(0.0, 1.0);
        let (drive, slots) = (share(sums.expert_wait_s + sums.row_wait_s), share(sums.slot_wait_s));
        Some(Self {
            bound_tps,
            of_bound: bound_tps.map(|bound| passes / sums.seconds / bound),
            drive,
            slots,
            compute: (1.0 - drive - slots).max(0.0),
        })
    }

    /// What took most of the time.
    pub fn held_by(&self) -> &'static str {
        match self {
            Self { drive, slots, compute, .. } if drive >= slots && drive >= compute => "the drive",
            Self { slots, compute, .. } if slots >= compute => "waits for slots",
            _ => "compute",
        }
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
        if self.slots >= 0.005 {
            write!(f, ", {:.0} % waits for slots", percent(self.slots))?;
        }
        write!(f, ")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// V4.1 Flash Q2 on the machine of the design page: 11 GB/s drive, 249 GB/s memory.
    fn flash() -> Forecast {
        Forecast {
            dense_bytes: 8_300_000_000,
            shared_bytes: 440_000_000,
            expert_bytes: 2_390_000_000,
            experts_per_token: 240,
            experts_total: 15_360,
            experts_total_bytes: 152_900_000_000,
            rows_per_token: 48,
            sweep: 2048,
            is_streaming: true,
            reads_ahead: false,
            is_cached: false,
            cache_slots: 5000,
            drive_gb_per_s: Some(11.0),
            row_reads_per_s: Some(400_000.0),
            memory_gb_per_s: Some(249.0),
        }
    }

    fn near(found: f64, want: f64) {
        assert!((found / want - 1.0).abs() < 1e-6, "{found} is not {want}");
    }

    #[test]
    fn reading_ahead_pays_where_the_drive_is_waited_for() {
        let f = flash();
        assert!(f.is_read_ahead_worth_it());
        // A token at half hits waits 11 ms of 45 at 98 GB/s, less than a quarter at 200.
        assert!(Forecast { drive_gb_per_s: Some(98.0), ..f }.is_read_ahead_worth_it());
        for not_worth in [
            Forecast { drive_gb_per_s: Some(200.0), ..f },
            Forecast { drive_gb_per_s: None, ..f },
            Forecast { is_streaming: false, ..f },
            Forecast { is_cached: true, ..f },
            Forecast { cache_slots: 15_360, ..f },
            Forecast { expert_bytes: 240 * 54_000, ..f },
        ] {
            assert!(!not_worth.is_read_ahead_worth_it(), "{not_worth:?}");
        }
    }

    #[test]
    fn reads_add_to_dense_weights_and_hide_experts() {
        let f = flash();
        near(f.decode(0.0).token_s, (8.3 + 0.44 + 2.39) / 249.0);
        // 217 ms of reads hide 11 ms of experts.
        near(f.decode(1.0).token_s, 8.3 / 249.0 + 2.39 / 11.0 + 48.0 / 4e5);
        near(f.with_lookahead(true).decode(1.0).token_s, 2.39 / 11.0 + 48.0 / 4e5);
        near(f.with_lookahead(true).decode(0.0).token_s, f.decode(0.0).token_s);
        assert!(f.decode(0.05).token_s < f.decode(0.1).token_s);
        near(f.decode(0.5).tps().unwrap(), 1.0 / (8.3 / 249.0 + 0.5 * 2.39 / 11.0 + 48.0 / 4e5));
    }

    #[test]
    fn what_was_not_measured_is_left_out() {
        let f = Forecast { drive_gb_per_s: None, row_reads_per_s: None, ..flash() };
        assert_eq!(f.decode(1.0), f.decode(0.0));
        assert!(f.to_string().contains("drive not measured") && !f.to_string().contains("at none"));
        assert_eq!(f.prefill_tps(1000), None);
        let f = f.with_memory(None);
        assert_eq!(f.decode(1.0).tps(), None);
        assert!(f.to_string().contains("unknown"));
        let resident = Forecast { is_streaming: false, ..flash() };
        near(resident.decode(1.0).token_s, resident.decode(0.0).token_s);
    }

    #[test]
    fn a_cold_prompt_reads_nearly_every_expert_once_a_sweep() {
        let f = flash();
        let one = f.prefill_tps(2048).unwrap();
        assert!((100.0..150.0).contains(&one), "2,048 rows over 14 s of reads: {one}");
        let all_cached = Forecast { cache_slots: 15_360, ..f };
        assert!(all_cached.prefill_tps(8192).unwrap() > 3.0 * f.prefill_tps(8192).unwrap() / 2.0);
        assert!(f.prefill_tps(1).unwrap() < one && f.prefill_tps(0).is_some());
    }

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
}
