//! The closing report: one run's counters as lines on stderr.
//! Only words numbers of `RunStats`. Surprising fact: the first line is read by scripts and keeps its wording for ever.

use crate::cli::{output, token_time};
use crate::engine::lookahead::{LookaheadStats, Recall};
use crate::engine::stats::{GpuStats, RunStats};
use crate::models::SweepCounts;
use crate::units::Bytes;

/// Lines of the report.
pub fn lines(stats: &RunStats) -> Vec<String> {
    let mut lines = vec![format!("prefill: {:.2} t/s, generation: {:.2} t/s", stats.prefill_tps, stats.decode_tps)];
    if stats.reused_tokens > 0 {
        let (reused, all) = (stats.reused_tokens, stats.prompt_tokens);
        lines.push(format!("prompt: {reused} of {all} tokens were in the state already"));
    }
    if stats.sweeps.sweeps > 0 {
        let SweepCounts { sweeps, rows, layer_rows, layer_rows_skipped } = stats.sweeps;
        lines.push(format!(
            "prompt: {rows} rows in {sweeps} sweeps of at most {}, {} computed together, {:.1} % of their work left out because nothing can see it",
            stats.sweep_rows,
            stats.prefill_chunk,
            100.0 * layer_rows_skipped as f64 / layer_rows.max(1) as f64
        ));
    }
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
    if let Some(gpu) = &stats.gpu {
        let tokens = stats.generated_tokens + stats.prompt_tokens;
        lines.extend(graphics(gpu, tokens, if stats.is_streaming { stats.expert_misses } else { 0 }));
        lines.extend(in_place(gpu));
        lines.extend(stats.token_time.iter().flat_map(|time| token_time::lines(time, gpu)));
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

/// What a GPU did for `tokens` tokens of prompts and answers, of whose experts `drive` were read from the drive.
fn graphics(gpu: &GpuStats, tokens: u64, drive: u64) -> Vec<String> {
    let uses = gpu.expert_hits + gpu.expert_misses;
    let percent = |part: u64| 100.0 * part as f64 / uses.max(1) as f64;
    let a_position = |count: u64| count as f64 / tokens.max(1) as f64;
    let done = format!(
        "{}: {} expert slots ({}), {} hits, {} misses, {} evictions, {} uploaded (experts at {:.1} GB/s), {:.1} launches, {:.1} graphs and {:.1} waits a position, \
         {} tokens chosen by it, {} that found their experts without the host, {} of {} attentions on tensor cores (sums: {})",
        gpu.name,
        gpu.cache_slots,
        Bytes(gpu.cache_bytes),
        gpu.expert_hits,
        gpu.expert_misses,
        gpu.evictions,
        Bytes(gpu.upload_bytes),
        gpu.upload_gb_per_s,
        a_position(gpu.launches),
        a_position(gpu.graphs),
        a_position(gpu.waits),
        gpu.chosen_tokens,
        gpu.found_rows,
        gpu.tensor_attentions,
        gpu.attentions,
        gpu.sums
    );
    let tiers = format!(
        "tiers: {:.1} % of {uses} experts in GPU memory, {:.1} % in host memory, {:.1} % read from the drive",
        percent(gpu.expert_hits),
        percent(gpu.expert_misses.saturating_sub(drive)),
        percent(drive.min(gpu.expert_misses))
    );
    let mut lines = vec![done, tiers];
    if gpu.guessed_uploads > 0 {
        lines.push(format!(
            "uploads ahead of the router: {} experts ({}), {} of them chosen and {} not",
            gpu.guessed_uploads,
            Bytes(gpu.guessed_bytes),
            gpu.guessed_used,
            gpu.guessed_wasted
        ));
    }
    lines
}

/// How experts reached a GPU whose kernels can read the host's memory.
fn in_place(gpu: &GpuStats) -> Option<String> {
    let (host, own) = (gpu.host_read_gb_per_s?, gpu.own_read_gb_per_s?);
    let way = match gpu.in_place_bytes {
        0 => "experts were copied".to_owned(),
        bytes => format!("{} of experts were read where they landed", Bytes(bytes)),
    };
    Some(format!("kernels read {host:.1} GB/s of host memory and {own:.1} GB/s of the GPU's own: {way}"))
}

fn streaming(stats: &RunStats) -> Vec<String> {
    let decode = &stats.cache.decode;
    let tokens = (stats.generated_tokens + stats.prompt_tokens).max(1);
    let best = stats
        .best_hit_rate
        .map_or(String::new(), |best| format!(" (best possible {:.1} % from an empty cache)", 100.0 * best));
    let mut lines = vec![
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
    ];
    if stats.preloaded_experts > 0 {
        lines.push(format!(
            "preload: {} experts ({}), {} of them were used before they left ({} hits): as many misses saved",
            stats.preloaded_experts,
            Bytes(stats.preload_bytes),
            stats.preload_used,
            stats.preload_hits
        ));
    }
    lines.extend(stats.lookahead.as_ref().map(lookahead));
    if let Some(text) = stats.advice.as_ref().and_then(|advice| advice.text.as_ref()) {
        lines.push(format!("advice: {text}"));
    }
    lines
}

fn lookahead(stats: &LookaheadStats) -> String {
    let percent = |recall: &Recall| 100.0 * recall.named as f64 / recall.uses.max(1) as f64;
    let named = match stats.mode {
        "memory" => format!("named {:.0} % of the experts used", percent(&stats.memory)),
        "router" => format!("named {:.0} % of the experts used", percent(&stats.router)),
        _ => format!(
            "memory named {:.0} %, router {:.0} % of the experts used",
            percent(&stats.memory),
            percent(&stats.router)
        ),
    };
    let total = stats.total;
    format!(
        "lookahead ({}): {named}; {} experts read ahead: {} useful, {} late, {} wasted",
        stats.mode, total.issued, total.useful, total.late, total.wasted
    )
}

/// Prints the report.
pub fn print(stats: &RunStats) {
    lines(stats).iter().for_each(|line| output::note(line));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tiers_add_up() {
        let gpu = GpuStats {
            name: "card".into(),
            device: 0,
            kernels: "compiled",
            cache_slots: 7,
            cache_bytes: 7 << 20,
            expert_hits: 60,
            expert_misses: 40,
            evictions: 33,
            found_rows: 9,
            guessed_uploads: 8,
            guessed_bytes: 2 << 20,
            guessed_used: 5,
            guessed_wasted: 3,
            sums: "fast",
            attentions: 40,
            tensor_attentions: 30,
            launches: 1000,
            graphs: 70,
            waits: 50,
            chosen_tokens: 8,
            wait_ms: 7.5,
            registered_bytes: 0,
            in_place_bytes: 0,
            host_read_gb_per_s: None,
            own_read_gb_per_s: None,
            upload_bytes: 3 << 30,
            download_bytes: 0,
            upload_gb_per_s: 48.5,
            bus_gb_per_s: 52.0,
        };
        let lines = graphics(&gpu, 10, 15);
        let [done, tiers, ahead] = &lines[..] else { panic!("{lines:?}") };
        assert_eq!(ahead, "uploads ahead of the router: 8 experts (2.00 MiB), 5 of them chosen and 3 not");
        assert!(
            done.starts_with("card: 7 expert slots (7.00 MiB), 60 hits, 40 misses, 33 evictions, 3.00 GiB"),
            "{done}"
        );
        let end = "100.0 launches, 7.0 graphs and 5.0 waits a position, 8 tokens chosen by it, 9 that found their experts without the host, \
                   30 of 40 attentions on tensor cores (sums: fast)";
        assert!(done.ends_with(end), "{done}");
        assert_eq!(
            tiers,
            "tiers: 60.0 % of 100 experts in GPU memory, 25.0 % in host memory, 15.0 % read from the drive"
        );
        assert_eq!(in_place(&gpu), None);
        let read = |in_place_bytes| GpuStats {
            in_place_bytes,
            host_read_gb_per_s: Some(200.0),
            own_read_gb_per_s: Some(250.0),
            ..gpu.clone()
        };
        let rates = "kernels read 200.0 GB/s of host memory and 250.0 GB/s of the GPU's own: ";
        assert_eq!(in_place(&read(0)).unwrap(), format!("{rates}experts were copied"));
        assert_eq!(
            in_place(&read(3 << 20)).unwrap(),
            format!("{rates}3.00 MiB of experts were read where they landed")
        );
        // Nothing was asked: no division by zero.
        let idle = GpuStats { expert_hits: 0, expert_misses: 0, guessed_uploads: 0, ..gpu };
        assert_eq!(graphics(&idle, 0, 0).len(), 2);
        assert!(graphics(&idle, 0, 0)[1].starts_with("tiers: 0.0 % of 0 experts"));
    }
}
