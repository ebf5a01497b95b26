//! How fast a run can be, from what the drive, the memory and a GPU's bus give. Owns the formula; measures nothing itself.
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
    /// Of the memory that weights are read from, a GPU's own where one computes; `None` where it was not measured.
    pub memory_gb_per_s: Option<f64>,
    /// Where a GPU computes.
    pub gpu: Option<GpuTier>,
}

/// What a GPU's memory holds of the experts, and how more of them get there.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct GpuTier {
    pub slots: u64,
    /// What copies from the host's slots give; `None` where it was not measured.
    pub bus_gb_per_s: Option<f64>,
}

/// Time of one token by what it needs.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct TokenBound {
    /// Weights from memory, all of them.
    pub memory_s: f64,
    /// Missed experts and rows from the drive.
    pub drive_s: f64,
    /// Experts that a GPU lacked, over its bus.
    pub bus_s: f64,
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
            gpu: None,
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

    /// With a GPU, whose kernels read `own_gb_per_s` of its own memory.
    #[must_use]
    pub fn with_gpu(self, own_gb_per_s: Option<f64>, tier: GpuTier) -> Self {
        Self { memory_gb_per_s: own_gb_per_s, gpu: Some(tier), ..self }
    }

    /// With or without lookahead.
    #[must_use]
    pub fn with_lookahead(self, reads_ahead: bool) -> Self {
        Self { reads_ahead, ..self }
    }

    /// The least time of a decode step in which `miss_rate` of the experts must be read. A layer's attention cannot begin before the layer
    /// before it is summed, so dense weights and reads follow one another unless reads run ahead; shared and present experts run while reads
    /// are under way. What is read goes on to a GPU over its bus.
    pub fn decode(&self, miss_rate: f64) -> TokenBound {
        let missed = self.expert_bytes as f64 * miss_rate;
        self.decode_of(missed, missed, self.rows_per_token as f64)
    }

    /// The least time of a decode step that reads no expert and uploads `absent` of them from host memory.
    pub fn decode_absent(&self, absent: f64) -> TokenBound {
        self.decode_of(0.0, self.expert_bytes as f64 * absent, self.rows_per_token as f64)
    }

    /// As [`Forecast::decode`], for bytes and rows that a token is known to have missed, and bytes that it had uploaded. Uploads run ahead of
    /// their layer, so the bus can work from the first layer to the last.
    pub fn decode_of(&self, missed_bytes: f64, uploaded_bytes: f64, rows: f64) -> TokenBound {
        let from_memory = |bytes: f64| self.memory_gb_per_s.map_or(0.0, |rate| bytes / (rate * 1e9));
        let missed_bytes = if self.is_streaming { missed_bytes } else { 0.0 };
        let experts_s = self.drive_gb_per_s.map_or(0.0, |rate| missed_bytes / (rate * 1e9));
        let rows_s = self.row_reads_per_s.map_or(0.0, |rate| rows / rate);
        let dense_s = from_memory(self.dense_bytes as f64);
        let beside_s = from_memory((self.shared_bytes + self.expert_bytes) as f64);
        let drive_s = experts_s + rows_s;
        let memory_s = dense_s + beside_s;
        let bus = self.gpu.and_then(|gpu| gpu.bus_gb_per_s);
        let bus_s = bus.map_or(0.0, |rate| uploaded_bytes / (rate * 1e9));
        let token_s = if self.reads_ahead { memory_s.max(drive_s) } else { dense_s + drive_s.max(beside_s) };
        TokenBound { memory_s, drive_s, bus_s, token_s: token_s.max(bus_s) }
    }

    /// Share of the experts that have no slot in a GPU's memory, where there is a GPU and a bus whose rate is known.
    fn without_gpu_slot(&self) -> Option<f64> {
        let gpu = self.gpu.filter(|gpu| gpu.bus_gb_per_s.is_some() && gpu.slots < self.experts_total)?;
        Some(1.0 - gpu.slots as f64 / self.experts_total as f64)
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
pub(super) fn short(tps: f64) -> String {
    match tps {
        t if t < 10.0 => format!("{t:.2}"),
        t if t < 100.0 => format!("{t:.1}"),
        t => format!("{t:.0}"),
    }
}

impl fmt::Display for Forecast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tps = |bound: TokenBound| bound.tps().map(short);
        let at_hand = if self.gpu.is_some() { "in GPU memory" } else { "at hand" };
        let Some(hit) = tps(self.decode(0.0)) else {
            return write!(f, "decode bound: unknown, neither drive nor memory was measured");
        };
        write!(f, "decode bound: {hit} t/s with every expert {at_hand}")?;
        if let Some((absent, bound)) =
            self.without_gpu_slot().and_then(|absent| Some((absent, tps(self.decode_absent(absent))?)))
        {
            write!(f, ", {bound} when the {:.0} % without a slot there come from host memory", 100.0 * absent)?;
        }
        if self.is_streaming && self.drive_gb_per_s.is_some() {
            let misses = [0.1, 0.5, 1.0].map(|miss_rate| tps(self.decode(miss_rate)).unwrap_or_default());
            let [tenth, half, missed] = misses;
            let of = if self.gpu.is_some() { " in host memory" } else { "" };
            write!(f, ", {tenth} at 90 % hits{of}, {half} at 50 %, {missed} at none")?;
        }
        self.sources(f)
    }
}

impl Forecast {
    /// What a token needs, and where it comes from at which rate.
    fn sources(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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
        if let Some(rate) = self.gpu.and_then(|gpu| gpu.bus_gb_per_s) {
            write!(f, "; bus {rate:.1} GB/s")?;
        }
        let memory = if self.gpu.is_some() { "GPU memory" } else { "memory" };
        match self.memory_gb_per_s {
            Some(rate) => write!(f, "; {memory} {rate:.1} GB/s)"),
            None => write!(f, "; {memory} not measured)"),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// V4.1 Flash Q2 on the machine of the design page: 11 GB/s drive, 249 GB/s memory.
    pub fn flash() -> Forecast {
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
            gpu: None,
        }
    }

    pub fn near(found: f64, want: f64) {
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
    fn a_gpu_waits_for_its_bus() {
        let tier = GpuTier { slots: 7680, bus_gb_per_s: Some(50.0) };
        let f = Forecast { memory_gb_per_s: Some(3750.0), gpu: Some(tier), ..flash() };
        near(f.decode_absent(0.0).token_s, (8.3 + 2.83) / 3750.0);
        near(f.decode_absent(0.5).token_s, 0.5 * 2.39 / 50.0);
        // What misses host memory comes over the drive, which is slower than the bus behind it.
        near(f.decode(1.0).token_s, 8.3 / 3750.0 + 2.39 / 11.0 + 48.0 / 4e5);
        let text = f.to_string();
        assert!(
            text.contains("in GPU memory, 41.8 when the 50 % without a slot there come from host memory, ")
                && text.contains("at 90 % hits in host memory")
                && text.contains("; bus 50.0 GB/s; GPU memory 3750.0 GB/s)"),
            "{text}"
        );
        // With a place for every expert, or a bus that nobody measured, there is nothing to say of it.
        for tier in [GpuTier { slots: 15_360, ..tier }, GpuTier { bus_gb_per_s: None, ..tier }] {
            assert!(!Forecast { gpu: Some(tier), ..f }.to_string().contains("without a slot"));
        }
    }
}
