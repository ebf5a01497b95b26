//! The counters of a run as one object: the closing report, `--stats-json` and later views are made from it.
//! Owns no counters; it reads those of cache, reader and rows. Surprising fact: prefill and decode are kept apart where they can
//! be, because a prompt's sweep through all experts says nothing about how well the cache serves the next token.

use std::time::Duration;

use serde::Serialize;

use crate::engine::Engine;
use crate::engine::achieved::{Achieved, DecodeSums};
use crate::engine::advice::Advice;
use crate::engine::forecast::{Forecast, GpuTier};
use crate::engine::known::KnownStats;
use crate::engine::lookahead::LookaheadStats;
use crate::engine::token_time::TokenTime;
use crate::models::SweepCounts;
use crate::obs::{ReadSnapshot, RowSnapshot, VerifyCounters, VerifySnapshot};
use crate::storage::expert_cache::CacheStats;
use crate::storage::probe::DriveRates;
use crate::sys;

/// What a front end counted itself.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Timings {
    pub prompt_tokens: u64,
    /// Prompt tokens that were in the state already.
    pub reused_tokens: u64,
    /// Prompt tokens that were computed, not found in the state.
    pub prefill_tokens: u64,
    pub prefill: Duration,
    pub generated_tokens: u64,
    /// Passes of one token, and their time.
    pub decode_passes: u64,
    pub decode: Duration,
    /// Of that, waits for rows (see `Engine::row_wait`).
    pub decode_row_wait: Duration,
}

fn rate(count: u64, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { count as f64 / time.as_secs_f64() }
}

impl Timings {
    /// Prompt tokens a second.
    pub fn prefill_tps(&self) -> f64 {
        rate(self.prefill_tokens, self.prefill)
    }

    /// Generated tokens a second.
    pub fn decode_tps(&self) -> f64 {
        rate(self.decode_passes, self.decode)
    }
}

/// What a GPU did in a run.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct GpuStats {
    pub name: String,
    /// Its number as the driver counts.
    pub device: u64,
    /// How its kernels came.
    pub kernels: &'static str,
    pub cache_slots: u64,
    pub cache_bytes: u64,
    /// Requested experts that were in GPU memory.
    pub expert_hits: u64,
    pub expert_misses: u64,
    pub evictions: u64,
    /// Tokens whose experts the GPU found by itself: the host was asked only for those that were absent.
    pub found_rows: u64,
    /// Experts uploaded before their router had chosen; those that it chose, which count as hits, and those that it did not.
    pub guessed_uploads: u64,
    pub guessed_bytes: u64,
    pub guessed_used: u64,
    pub guessed_wasted: u64,
    /// The order of sums where there is a choice: exact (the processor's) or fast.
    pub sums: &'static str,
    /// Attentions, and those on tensor cores: with exact sums, and with rows of shapes or number formats that these kernels do not take, none.
    pub attentions: u64,
    pub tensor_attentions: u64,
    /// Kernels started.
    pub launches: u64,
    /// Graphs started, of kernels that the GPU runs one after another.
    pub graphs: u64,
    /// Tokens chosen on the GPU, greedily or at a temperature: the host waited for an id where it would have waited for the logits.
    pub chosen_tokens: u64,
    /// Times that the host waited for the GPU.
    pub waits: u64,
    /// How long it waited, for the choices of routers too.
    pub wait_ms: f64,
    /// Host memory that the GPU reads directly.
    pub registered_bytes: u64,
    /// Bytes of experts that kernels read in host memory instead of a copy.
    pub in_place_bytes: u64,
    /// What kernels read of host memory, in 1e9 bytes a second; absent where the way of experts needed no measurement.
    pub host_read_gb_per_s: Option<f64>,
    /// What they read of the GPU's own; absent where there was no memory left to measure it.
    pub own_read_gb_per_s: Option<f64>,
    pub upload_bytes: u64,
    pub download_bytes: u64,
    /// Rate of the uploads of experts whose time was taken (one of 16), in 1e9 bytes a second while they were under way; 0 without any.
    pub upload_gb_per_s: f64,
    /// What the bus gave at the start, when nothing else used it, in the same unit; 0 where that was not measured.
    pub bus_gb_per_s: f64,
}

impl GpuStats {
    /// What of it bounds a token.
    pub fn tier(&self) -> GpuTier {
        GpuTier { slots: self.cache_slots, bus_gb_per_s: Some(self.bus_gb_per_s).filter(|rate| *rate > 0.0) }
    }
}

/// One run in numbers. Field names are part of the `--stats-json` format.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct RunStats {
    pub model: String,
    pub arch: &'static str,
    pub backend: &'static str,
    pub ctx: u64,
    pub prompt_tokens: u64,
    /// Of those, how many were in the state already and cost nothing.
    pub reused_tokens: u64,
    pub generated_tokens: u64,
    pub prefill_tps: f64,
    pub decode_tps: f64,
    pub is_streaming: bool,
    pub io: &'static str,
    pub is_direct: bool,
    pub cache_slots: u64,
    pub cache_bytes: u64,
    /// Requested experts that were present or on their way, all phases.
    pub expert_hits: u64,
    pub expert_misses: u64,
    pub expert_hit_rate: f64,
    /// As above, for single-token steps only.
    pub decode_hit_rate: f64,
    /// The hit rate of the best possible cache of this size on the same requests, from an empty start; absent when not streaming and in
    /// very long runs.
    pub best_hit_rate: Option<f64>,
    /// Share of layer requests of single-token steps without a miss.
    pub all_hit_layer_rate: f64,
    pub evictions: u64,
    pub preloaded_experts: u64,
    pub preload_bytes: u64,
    /// Preloaded experts that were requested before they left: misses saved.
    pub preload_used: u64,
    /// Hits on preloaded experts before they left.
    pub preload_hits: u64,
    /// What reading ahead did; absent when it is off.
    pub lookahead: Option<LookaheadStats>,
    /// Experts that token ids name; absent for models without such layers and when nothing is streamed.
    pub known_experts: Option<KnownStats>,
    /// What another budget would have done; absent when not streaming and in very long runs.
    pub advice: Option<Advice>,
    /// Bytes of experts read on demand.
    pub expert_read_bytes: u64,
    /// Experts read on demand.
    pub expert_reads: u64,
    pub read_gb_per_s: f64,
    pub read_ms_p50: f64,
    pub read_ms_p99: f64,
    pub expert_wait_ms: f64,
    pub row_reads: u64,
    pub row_read_bytes: u64,
    pub row_submissions: u64,
    pub row_wait_ms: f64,
    /// Prompt rows computed together.
    pub prefill_chunk: u64,
    /// Rows of the widest sweep, and what the sweeps computed and left out.
    pub sweep_rows: u64,
    pub sweeps: SweepCounts,
    pub planned_bytes: u64,
    pub peak_rss_bytes: u64,
    /// What a token costs and what drive and memory give.
    pub forecast: Forecast,
    /// How near decoding came to its bound and what held it; absent before the first decoded token.
    pub achieved: Option<Achieved>,
    /// What the probe found of the drive; absent where it was not measured.
    pub drive: Option<DriveRates>,
    /// What the GPU did; absent on the processor.
    pub gpu: Option<GpuStats>,
    /// Where a decoded token's time went on a GPU; absent on the processor and before a token was timed, the fifth.
    pub token_time: Option<TokenTime>,
    /// Everything the cache counted; zeros when nothing is streamed.
    pub cache: CacheStats,
    /// Everything the reader counted.
    pub reads: ReadSnapshot,
    /// Everything the row tables counted.
    pub rows: RowSnapshot,
    /// What checksums found; absent when reads are not compared.
    pub verify: Option<VerifySnapshot>,
}

impl RunStats {
    /// Reads all counters of `engine` now. `ctx` is that of the sequence, which may differ from the plan's.
    pub fn collect(engine: &Engine, ctx: usize, timings: &Timings) -> Self {
        let cache = engine.cache().map(|c| c.stats()).unwrap_or_default();
        let both = cache.prefill.plus(&cache.decode);
        let reads = engine.reader().counters().snapshot();
        let rows = engine.rows().map(|r| r.counters().snapshot()).unwrap_or_default();
        let plan = engine.plan();
        let (preloaded_experts, preload_bytes) = engine.preloaded();
        let gpu = engine.gpu_stats();
        let token_time = gpu.as_ref().and_then(|gpu| engine.token_time(gpu.upload_gb_per_s));
        let sums = DecodeSums {
            passes: timings.decode_passes,
            seconds: timings.decode.as_secs_f64(),
            missed_bytes: cache.decode.read_bytes,
            expert_wait_s: cache.decode.wait_ns as f64 / 1e9,
            row_wait_s: timings.decode_row_wait.as_secs_f64(),
            slot_wait_s: cache.decode.room_wait_ns as f64 / 1e9,
            uploaded_bytes: token_time.map_or(0.0, |time| time.upload_bytes as f64),
            stalled: token_time
                .map_or(0.0, |time| time.stalled_ms.unwrap_or(0.0) / time.token_ms.max(f64::MIN_POSITIVE)),
        };
        let all_hit = cache.decode.all_hit as f64 / cache.decode.requests.max(1) as f64;
        Self {
            model: engine.prepared.file.path().display().to_string(),
            arch: engine.prepared.config.arch(),
            backend: engine.backend_name(),
            ctx: ctx as u64,
            prompt_tokens: timings.prompt_tokens,
            reused_tokens: timings.reused_tokens,
            generated_tokens: timings.generated_tokens,
            prefill_tps: timings.prefill_tps(),
            decode_tps: timings.decode_tps(),
            is_streaming: plan.is_streaming,
            io: match engine.reader().kind() {
                crate::storage::reader::ReaderKind::Uring => "uring",
                crate::storage::reader::ReaderKind::Pread => "pread",
                crate::storage::reader::ReaderKind::Fake => "fake",
            },
            is_direct: engine.reader().is_direct(),
            cache_slots: if plan.is_streaming { plan.cache_slots } else { 0 },
            cache_bytes: if plan.is_streaming { plan.cache.0 } else { 0 },
            expert_hits: both.hits,
            expert_misses: both.misses,
            expert_hit_rate: both.hit_rate().unwrap_or(0.0),
            decode_hit_rate: cache.decode.hit_rate().unwrap_or(0.0),
            best_hit_rate: engine.best_hit_rate(),
            all_hit_layer_rate: all_hit,
            evictions: both.evictions,
            preloaded_experts,
            preload_bytes: preload_bytes.0,
            preload_used: cache.preload_used,
            preload_hits: cache.preload_hits,
            lookahead: engine.lookahead(),
            known_experts: engine.known(),
            advice: engine.advice(),
            expert_read_bytes: both.read_bytes,
            expert_reads: both.misses,
            read_gb_per_s: reads.gb_per_s,
            read_ms_p50: reads.latency.ms_p50,
            read_ms_p99: reads.latency.ms_p99,
            expert_wait_ms: both.wait_ns as f64 / 1e6,
            row_reads: rows.row_reads,
            row_read_bytes: rows.row_bytes,
            row_submissions: rows.submissions,
            row_wait_ms: rows.wait_ms,
            prefill_chunk: engine.prepared.runner.chunk as u64,
            sweep_rows: plan.sweep,
            sweeps: engine.sweep_counts(),
            planned_bytes: plan.total().0,
            peak_rss_bytes: sys::process_memory().map_or(0, |m| m.peak.0),
            forecast: *engine.forecast(),
            achieved: Achieved::of(engine.forecast(), &sums),
            drive: engine.prepared.drive.clone(),
            gpu,
            token_time,
            cache,
            reads,
            rows,
            verify: engine.verify().map(VerifyCounters::snapshot),
        }
    }
}
