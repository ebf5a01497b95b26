//! One row of a benchmark: every column, in the order of the file. Owns names and order; never measures.
//! Surprising fact: the first nine columns are those of the known tool, so its scripts read these files; everything a row needs to be
//! compared (model, build, machine, settings) stands in the row itself, so files may be cut and joined.

use serde::{Deserialize, Serialize};

/// What kind of row it is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// The tokens from one context length to the next, then generation.
    #[default]
    Sweep,
    /// A few tokens appended at a context length, without generation.
    Append,
}

impl Mode {
    /// As it is written in rows.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sweep => "sweep",
            Self::Append => "append",
        }
    }
}

/// One measurement. Field names are column names; a column that a file lacks reads as nothing.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Row {
    /// Tokens in the state after the prefill (or append) of this row.
    pub ctx_tokens: u64,
    /// Tokens that were computed for it.
    pub prefill_tokens: u64,
    pub prefill_tps: f64,
    /// Tokens generated (`tokens` says how they were chosen).
    pub gen_tokens: u64,
    pub gen_tps: f64,
    /// Time of the first of them.
    pub gen_first_ms: f64,
    /// Tokens after the first, and their rate.
    pub gen_steady_tokens: u64,
    pub gen_steady_tps: f64,
    /// State of a sequence of `ctx_tokens` tokens.
    pub kvcache_bytes: u64,
    /// Memory of the expert cache; from here to `row_wait_ms_per_token` everything is about the generation.
    pub cache_budget_bytes: u64,
    pub cache_slots: u64,
    pub cache_hits: u64,
    pub cache_misses: u64,
    /// Empty where nothing was asked for.
    pub cache_hit_rate: Option<f64>,
    /// Share of layer requests without a miss.
    pub all_hit_layer_rate: Option<f64>,
    pub evictions: u64,
    /// Bytes of experts.
    pub read_bytes: u64,
    pub read_bytes_per_token: Option<f64>,
    /// Of the reads of this generation, n-gram rows included.
    pub read_ms_p50: Option<f64>,
    pub read_ms_p99: Option<f64>,
    pub expert_wait_ms_per_token: Option<f64>,
    pub row_wait_ms_per_token: Option<f64>,
    /// Resident memory of the process at the end of the row.
    pub rss_bytes: u64,
    pub mode: Mode,
    /// State of the expert cache before the pass.
    pub regime: String,
    /// Repetition within the regime, from 1.
    pub rep: u64,
    /// Token of the file at which the pass began.
    pub text_offset: u64,
    pub prefill_ms: f64,
    pub prefill_hits: u64,
    pub prefill_misses: u64,
    /// Bytes of experts.
    pub prefill_read_bytes: u64,
    /// Time with at least one read under way.
    pub prefill_drive_ms: f64,
    pub prefill_wait_ms: f64,
    /// As above, of the generation.
    pub gen_drive_ms: f64,
    /// Load average of the last minute at the end of the row.
    pub load1: Option<f64>,
    /// Context length that memory was allocated for.
    pub ctx_alloc: u64,
    /// Name of the model file.
    pub model: String,
    /// Hash over size, head and samples of the file.
    pub model_id: String,
    /// Version, profile and hash of the program.
    pub build: String,
    pub machine: String,
    pub backend: String,
    pub threads: u64,
    pub arithmetic: String,
    pub prefill_chunk: u64,
    /// Most rows that go through one layer before the next one begins.
    pub prefill_sweep: u64,
    /// Empty when everything is resident.
    pub cache_policy: String,
    /// Guess by which experts are read ahead; empty when everything is resident.
    pub lookahead: String,
    pub io: String,
    /// What the probe found the drive to give; empty where it was not measured.
    pub drive_gb_per_s: Option<f64>,
    /// What was read and generated: `text` and the model's choice, or `random` ids of a seed.
    pub tokens: String,
}

impl Row {
    /// Rate of the prefill if nothing but its reads took time, at the rate that the probe found.
    pub fn drive_bound_tps(&self) -> Option<f64> {
        share(self.prefill_tokens as f64, self.drive_bound_s()?)
    }

    /// Rate of the prefill if it had never waited for experts.
    pub fn compute_bound_tps(&self) -> Option<f64> {
        share(self.prefill_tokens as f64, self.compute_bound_s())
    }

    /// The prefill's rate over the lower of its bounds.
    pub fn bound_ratio(&self) -> Option<f64> {
        let least_s = self.drive_bound_s().map_or(self.compute_bound_s(), |drive| drive.max(self.compute_bound_s()));
        share(self.prefill_tps * least_s, self.prefill_tokens as f64)
    }

    fn drive_bound_s(&self) -> Option<f64> {
        let bytes_per_s = self.drive_gb_per_s.filter(|_| self.prefill_read_bytes > 0)? * 1e9;
        Some(self.prefill_read_bytes as f64 / bytes_per_s)
    }

    fn compute_bound_s(&self) -> f64 {
        (self.prefill_ms - self.prefill_wait_ms) / 1e3
    }

    /// Share of the prefill's time with at least one read under way.
    pub fn drive_busy(&self) -> Option<f64> {
        share(self.prefill_drive_ms, self.prefill_ms)
    }
}

/// Columns that the known tool writes, in its order.
pub const KNOWN_COLUMNS: [&str; 9] = [
    "ctx_tokens",
    "prefill_tokens",
    "prefill_tps",
    "gen_tokens",
    "gen_tps",
    "gen_first_ms",
    "gen_steady_tokens",
    "gen_steady_tps",
    "kvcache_bytes",
];

/// Events per unit of time or of count; 0 where the unit is 0.
pub fn per(amount: f64, unit: f64) -> f64 {
    if unit > 0.0 { round(amount / unit) } else { 0.0 }
}

/// `per`, or nothing where the unit is 0.
pub fn share(amount: f64, unit: f64) -> Option<f64> {
    (unit > 0.0).then(|| round(amount / unit))
}

/// Six significant digits: more than any clock gives.
pub fn round(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return 0.0;
    }
    format!("{value:.5e}").parse().expect("a float that was just written")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Vec<String> {
        let mut writer = csv::Writer::from_writer(Vec::new());
        writer.serialize(Row::default()).unwrap();
        let text = String::from_utf8(writer.into_inner().unwrap()).unwrap();
        text.lines().next().unwrap().split(',').map(str::to_owned).collect()
    }

    #[test]
    fn known_columns_come_first_then_those_of_streaming() {
        let header = header();
        assert_eq!(header[..9], KNOWN_COLUMNS);
        let streaming = "cache_budget_bytes,cache_slots,cache_hits,cache_misses,cache_hit_rate,all_hit_layer_rate,evictions,read_bytes,\
            read_bytes_per_token,read_ms_p50,read_ms_p99,expert_wait_ms_per_token,row_wait_ms_per_token,rss_bytes";
        assert_eq!(header[9..23].join(","), streaming);
    }

    #[test]
    fn rows_survive_the_file_and_missing_columns() {
        let row = Row {
            ctx_tokens: 5,
            cache_hit_rate: Some(0.25),
            regime: "new-text".into(),
            mode: Mode::Append,
            ..Row::default()
        };
        let mut writer = csv::Writer::from_writer(Vec::new());
        writer.serialize(&row).unwrap();
        let bytes = writer.into_inner().unwrap();
        let back: Row = csv::Reader::from_reader(&bytes[..]).deserialize().next().unwrap().unwrap();
        assert_eq!(back, row);
        let known = "ctx_tokens,gen_tps\n7,1.5\n";
        let back: Row = csv::Reader::from_reader(known.as_bytes()).deserialize().next().unwrap().unwrap();
        assert_eq!(back, Row { ctx_tokens: 7, gen_tps: 1.5, ..Row::default() });
    }

    #[test]
    fn bounds_of_a_prefill() {
        // 100 tokens in 2 s, 0.5 s of them waiting, for 3 GB from a drive of 2 GB/s.
        let row = Row {
            prefill_tokens: 100,
            prefill_tps: 50.0,
            prefill_ms: 2000.0,
            prefill_wait_ms: 500.0,
            prefill_drive_ms: 1600.0,
            prefill_read_bytes: 3_000_000_000,
            drive_gb_per_s: Some(2.0),
            ..Row::default()
        };
        assert_eq!((row.drive_bound_tps(), row.compute_bound_tps()), (Some(66.6667), Some(66.6667)));
        assert_eq!((row.bound_ratio(), row.drive_busy()), (Some(0.75), Some(0.8)));
        let slow = Row { drive_gb_per_s: Some(1.6), ..row.clone() };
        assert_eq!((slow.drive_bound_tps(), slow.bound_ratio()), (Some(53.3333), Some(0.9375)));
        let unknown = Row { drive_gb_per_s: None, ..row.clone() };
        assert_eq!((unknown.drive_bound_tps(), unknown.bound_ratio()), (None, Some(0.75)));
        assert_eq!((Row::default().bound_ratio(), Row::default().drive_busy()), (None, None));
    }

    #[test]
    fn digits() {
        assert_eq!([round(123.456_789), round(0.001_234_567_8), round(0.0)], [123.457, 0.001_234_57, 0.0]);
        assert_eq!((per(1.0, 0.0), share(1.0, 0.0), share(1.0, 4.0)), (0.0, None, Some(0.25)));
    }
}
