//! From misses to tokens a second: the bound of a streamed decode step. Owns the formula, not the numbers that go in.
//! Never guesses a rate. Surprising fact: a drive twice as fast and half the misses are worth exactly the same.

/// How fast a machine is at the two things that a decode step does.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Speed {
    /// Seconds of a step whose experts are all cached: computing, or reading the weights of a token from memory.
    pub step_s: f64,
    /// Bytes a second of expert-sized reads from the drive.
    pub drive_bytes_per_s: f64,
}

impl Speed {
    /// Seconds of a step that reads `memory_bytes` of weights at `bytes_per_s` and is bound by nothing else.
    pub fn step_from_memory(memory_bytes: f64, bytes_per_s: f64) -> f64 {
        memory_bytes / bytes_per_s
    }

    /// Tokens a second when every missing byte is waited for.
    pub fn tokens_per_s(&self, missed_bytes_per_token: f64) -> f64 {
        1.0 / (self.step_s + missed_bytes_per_token / self.drive_bytes_per_s)
    }

    /// Tokens a second when all reads happen beside the computation: the bound of perfect lookahead.
    pub fn tokens_per_s_overlapped(&self, missed_bytes_per_token: f64) -> f64 {
        1.0 / self.step_s.max(missed_bytes_per_token / self.drive_bytes_per_s)
    }

    /// Misses, bytes a token, at which `tokens_per_s` gives `target`; `None` when not even an all-hit step is that fast.
    pub fn missed_bytes_for(&self, target: f64) -> Option<f64> {
        let left = 1.0 / target - self.step_s;
        (left >= 0.0).then_some(left * self.drive_bytes_per_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Design section 6: V4.1 Flash Q2, 8.74 GB dense and 2.39 GB of experts a token, a drive of 11 GB/s, 95 % hits.
    #[test]
    fn the_bounds_of_the_design() {
        let at =
            |memory: f64| Speed { step_s: Speed::step_from_memory(8.74e9 + 2.39e9, memory), drive_bytes_per_s: 11e9 };
        let missed = 0.05 * 2.39e9;
        assert!((at(249e9).tokens_per_s(missed) - 18.0).abs() < 0.1);
        assert!((at(3.84e12).tokens_per_s(missed) - 72.0).abs() < 1.0);
        assert!((at(3.84e12).tokens_per_s_overlapped(missed) - 11e9 / missed).abs() < 1e-6);
        assert!((at(249e9).tokens_per_s_overlapped(missed) - 249.0 / 11.13).abs() < 1e-6);
    }

    #[test]
    fn a_target_is_turned_round() {
        let speed = Speed { step_s: 0.01, drive_bytes_per_s: 2e9 };
        let missed = speed.missed_bytes_for(20.0).expect("slower than the step");
        assert!((speed.tokens_per_s(missed) - 20.0).abs() < 1e-9);
        assert_eq!(speed.missed_bytes_for(101.0), None);
    }
}
