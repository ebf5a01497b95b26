//! Flags that say how fast a machine is, for predictions. Owns their spelling and their checks.
//! Never guesses a rate: what is not given is either measured and said so, or left out.
//! Surprising fact: GB/s here are 10^9 bytes, as drives and memories are sold, while cache budgets in GB are GiB.

use cache_policy::Speed;
use clap::Args;

/// Flags for predicted tokens a second.
#[derive(Args, Debug, Clone, Copy, Default)]
pub struct SpeedArgs {
    /// Rate of the drive for expert-sized reads, 10^9 bytes a second
    #[arg(long, value_name = "GB/S", value_parser = above_zero)]
    pub drive_gbs: Option<f64>,
    /// Milliseconds of a decode step with every expert cached, measured or estimated
    #[arg(long, value_name = "MS", value_parser = above_zero)]
    pub step_ms: Option<f64>,
    /// Rate at which memory gives weights, 10^9 bytes a second: estimates the step from the bytes that it reads
    #[arg(long, value_name = "GB/S", value_parser = above_zero, conflicts_with = "step_ms")]
    pub memory_gbs: Option<f64>,
}

/// A rate or a time.
pub(super) fn above_zero(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value.is_finite() => Ok(value),
        _ => Err("must be a number above 0".into()),
    }
}

impl SpeedArgs {
    /// Seconds of a step that reads `memory_bytes` of weights, if a flag tells.
    pub fn step_s(&self, memory_bytes: Option<f64>) -> Option<f64> {
        let from_memory = || Some(Speed::step_from_memory(memory_bytes?, self.memory_gbs? * 1e9));
        self.step_ms.map(|ms| ms / 1e3).or_else(from_memory)
    }

    /// Both rates, if flags tell them.
    pub fn speed(&self, memory_bytes: Option<f64>) -> Option<Speed> {
        Some(Speed { step_s: self.step_s(memory_bytes)?, drive_bytes_per_s: self.drive_gbs? * 1e9 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_given_or_follows_from_bytes() {
        let args = SpeedArgs { drive_gbs: Some(2.0), step_ms: Some(5.0), memory_gbs: None };
        assert_eq!(args.speed(None), Some(Speed { step_s: 0.005, drive_bytes_per_s: 2e9 }));
        let args = SpeedArgs { drive_gbs: Some(2.0), step_ms: None, memory_gbs: Some(10.0) };
        assert_eq!(args.speed(Some(1e9)).map(|s| s.step_s), Some(0.1));
        assert_eq!(args.speed(None), None);
        assert!(above_zero("0").is_err() && above_zero("nan").is_err() && above_zero("1.5").is_ok());
    }
}
