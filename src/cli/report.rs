//! The closing report: one run's counters as lines on stderr.
//! Only words numbers of `RunStats`. Surprising fact: the first line is read by scripts and keeps its wording for ever.

use crate::cli::output;
use crate::engine::stats::RunStats;
use crate::units::Bytes;

/// Lines of the report.
pub fn lines(stats: &RunStats) -> Vec<String> {
    let mut lines = vec![format!("prefill: {:.2} t/s, generation: {:.2} t/s", stats.prefill_tps, stats.decode_tps)];
    if stats.is_streaming {
        lines.extend(streaming(stats));
    }
    if stats.rows.submissions > 0 {
        lines.push(format!(
            "n-gram rows: {} asked, {} in the row cache, {} read ({}) in {} batches, {:.1} ms waited",
            stats.rows.rows_asked,
            stats.rows.rows_cached,
            stats.rows.rows_read,
            Bytes(stats.row_read_bytes),
            stats.row_submissions,
            stats.row_wait_ms
        ));
    }
    if let Some(verify) = &stats.verify {
        lines.push(format!(
            "checksums: {} reads fitted ({}), {} mismatches, {} of them gone in a second read",
            verify.reads,
            Bytes(verify.bytes),
            verify.mismatches,
            verify.repaired
        ));
    }
    lines.extend(stats.achieved.as_ref().map(ToString::to_string));
    lines.push(format!("memory: peak {}, planned {}", Bytes(stats.peak_rss_bytes), Bytes(stats.planned_bytes)));
    lines
}

fn streaming(stats: &RunStats) -> Vec<String> {
    let decode = &stats.cache.decode;
    let tokens = (stats.generated_tokens + stats.prompt_tokens).max(1);
    let best = stats
        .best_hit_rate
        .map_or(String::new(), |best| format!(" (best possible {:.1} % from an empty cache)", 100.0 * best));
    vec![
        format!(
            "expert cache: {} slots ({}), {} hits, {} misses, {:.1} % hit rate{best}, \
             {:.1} % in decode, {} evictions",
            stats.cache_slots,
            Bytes(stats.cache_bytes),
            stats.expert_hits,
            stats.expert_misses,
            100.0 * stats.expert_hit_rate,
            100.0 * stats.decode_hit_rate,
            stats.evictions
        ),
        format!(
            "expert reads: {} experts, {}, {} a token, {:.2} GB/s while reading ({}{}), {:.2} ms p50, {:.2} ms p99",
            stats.expert_reads,
            Bytes(stats.expert_read_bytes),
            Bytes(stats.expert_read_bytes / tokens),
            stats.read_gb_per_s,
            stats.io,
            if stats.is_direct { ", direct" } else { ", buffered" },
            stats.read_ms_p50,
            stats.read_ms_p99
        ),
        format!(
            "waited for the drive: {:.1} ms ({:.1} ms in decode, {:.1} % of its layers had every expert at hand)",
            stats.expert_wait_ms,
            decode.wait_ns as f64 / 1e6,
            100.0 * stats.all_hit_layer_rate
        ),
    ]
}

/// Prints the report.
pub fn print(stats: &RunStats) {
    lines(stats).iter().for_each(|line| output::note(line));
}
