//! Writes a trace of any length with skewed, drifting routes: for measuring what tools do with very long traces.
//! Owns nothing but its generator; never holds more than a block. Surprising fact: the same numbers give the same bytes.
//!
//! `cargo run --release -p cache-policy --example make_trace -- OUT.routes MILLION_USES [LAYERS EXPERTS TOP_K EXPERT_BYTES]`

use std::error::Error;
use std::fs::File;
use std::io::{BufWriter, Write};

use cache_policy::{Bytes, ExpertIdx, LayerIdx, Phase, TraceHeader, TraceLayer, TraceWriter};

/// Tokens of a session, and of its prompt.
const SESSION: u64 = 2048;
const PROMPT: u64 = 256;
/// Tokens after which another set of experts is favoured.
const DRIFT: u64 = 512;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [output, millions, shape @ ..] = args.as_slice() else {
        return Err("usage: make_trace OUT.routes MILLION_USES [LAYERS EXPERTS TOP_K EXPERT_BYTES]".into());
    };
    let number = |at: usize, default: u64| shape.get(at).map_or(Ok(default), |text| text.parse::<u64>());
    let (layers, experts) = (u16::try_from(number(0, 40)?)?, u16::try_from(number(1, 384)?)?);
    let (top_k, expert_bytes) = (u16::try_from(number(2, 6)?)?, Bytes(number(3, 9_953_280)?));
    let layer = |l| TraceLayer { layer: LayerIdx(l), experts, top_k, expert_bytes };
    // No model file: an identity of zeros says so.
    let header = TraceHeader { model: [0; 32], layers: (0..layers).map(layer).collect() };
    let mut writer = TraceWriter::new(&header)?;
    let mut out = BufWriter::new(File::create(output)?);
    let mut outcome = Ok(());
    let mut sink = |bytes: &[u8]| {
        if outcome.is_ok() {
            outcome = out.write_all(bytes);
        }
    };
    let tokens = (millions.parse::<f64>()? * 1e6) as u64 / u64::from(layers) / u64::from(top_k);
    let mut random = Random(1);
    let mut ids = Vec::new();
    for token in 0..tokens {
        let (session, position) = (token / SESSION, token % SESSION);
        if position == 0 {
            writer.session(session as u32);
            writer.phase(Phase::Prefill);
        }
        if position == PROMPT {
            writer.phase(Phase::Decode);
        }
        writer.token(position as u32, (random.next() * 50_000.0) as u32);
        for layer in 0..layers {
            random.route(experts, usize::from(top_k), token / DRIFT, &mut ids);
            writer.route(LayerIdx(layer), &ids)?;
        }
        writer.drain(&mut sink);
    }
    writer.finish(&mut sink);
    outcome?;
    out.flush()?;
    println!("{output}: {tokens} tokens, {} uses", tokens * u64::from(layers) * u64::from(top_k));
    Ok(())
}

/// A linear congruential generator: quality does not matter here, repeatability does.
struct Random(u64);

impl Random {
    /// At least 0, below 1.
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as f64 / (1u64 << 31) as f64
    }

    /// Different experts, low ranks favoured; which expert has which rank changes with `epoch`.
    fn route(&mut self, experts: u16, top_k: usize, epoch: u64, ids: &mut Vec<ExpertIdx>) {
        ids.clear();
        while ids.len() < top_k {
            let rank = (self.next() * self.next() * f64::from(experts)) as u64;
            let id = ExpertIdx(((rank + 97 * epoch) % u64::from(experts)) as u16);
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
    }
}
