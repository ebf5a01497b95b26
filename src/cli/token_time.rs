//! The lines of the closing report about a token's time on a GPU.
//! Only words numbers. Surprising fact: a token is told twice, as the GPU saw it and as the host saw it; uploads run beside both.

use crate::engine::stats::GpuStats;
use crate::engine::token_time::TokenTime;
use crate::units::Bytes;

/// Where the time of a token went, and its uploads.
pub(super) fn lines(time: &TokenTime, gpu: &GpuStats) -> Vec<String> {
    let stalled = match time.stalled_ms {
        Some(ms) => format!("{ms:.2} ms standing still for experts, "),
        None => String::new(),
    };
    let mut lines = vec![
        format!(
            "a token on the GPU: {:.2} ms: {:.2} ms kernels, {stalled}{:.2} ms without work (mean of {} timed tokens)",
            time.token_ms, time.kernels_ms, time.idle_ms, time.tokens
        ),
        format!(
            "a token on the host: {:.2} ms its own work, {:.2} ms waiting for the GPU, {:.2} ms for the drive",
            time.host_ms, time.gpu_wait_ms, time.drive_wait_ms
        ),
    ];
    if time.upload_bytes > 0 {
        let bus = match gpu.bus_gb_per_s > 0.0 {
            true => format!(" of the {:.1} GB/s that the bus gives", gpu.bus_gb_per_s),
            false => " GB/s".into(),
        };
        lines.push(format!(
            "a token's uploads, beside that: {}, {:.2} ms at {:.1}{bus}",
            Bytes(time.upload_bytes),
            time.uploads_ms,
            gpu.upload_gb_per_s
        ));
    }
    lines
}
