//! Runs of whole engines for tests: a prompt, greedy choices after it, all logits as bits.
//! Owns no judgement; never prints. Surprising fact: tokens of the prompt are drawn from a sequence of its own, because the golden ones are
//! few and every fixture has another vocabulary.
#![allow(dead_code)] // Each test binary uses its own part of this.

#[path = "../made_models/mod.rs"]
pub mod made_models;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use ds4::engine::Engine;
use ds4::engine::options::EngineOptions;
use ds4::models::Want;
use ds4::session::timeline::{SessionError, Timeline, Watcher};
use ds4::storage::reader::Reader;
use ds4::storage::reader::fake::{FakeOptions, FakeReader};
use ds4::units::TokenId;

/// Opens without a word.
pub fn open(options: &EngineOptions) -> Engine {
    Engine::open(options, &mut |_| {}, &|_, _, _| ControlFlow::Continue(())).unwrap_or_else(|e| panic!("{e}"))
}

/// Options for `model` with a context of 512.
pub fn options(model: &Path) -> EngineOptions {
    EngineOptions { ctx: Some(512), threads: Some(1), ..EngineOptions::new(model) }
}

/// A fake drive that holds `model`.
pub fn fake(model: &Path, options: FakeOptions) -> Arc<FakeReader> {
    FakeReader::new(std::fs::read(model).unwrap(), options)
}

/// `options` over a fake drive.
pub fn over(options: EngineOptions, reader: &Arc<FakeReader>) -> EngineOptions {
    EngineOptions { reader: Some(Arc::clone(reader) as Arc<dyn Reader>), ..options }
}

/// `count` token ids of a vocabulary of `vocab`.
pub fn prompt(count: usize, vocab: usize) -> Vec<TokenId> {
    let mut state = 0x5EEDu64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        3 + (state >> 33) as u32 % (vocab as u32 - 3)
    };
    (0..count).map(|_| next()).collect()
}

/// Logits of every position, as bits, and the tokens chosen.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Trail {
    /// `[positions, vocabulary]`.
    pub bits: Vec<u32>,
    pub chosen: Vec<TokenId>,
}

impl Watcher for Trail {
    fn logits(&mut self, _position: usize, logits: &[f32]) {
        self.bits.extend(logits.iter().map(|v| v.to_bits()));
    }
}

/// Where two trails part, for a message.
pub fn difference(a: &Trail, b: &Trail, vocab: usize) -> String {
    let first = a.bits.iter().zip(&b.bits).position(|(x, y)| x != y);
    format!(
        "lengths {} and {}, first different logit {:?}, tokens {:?} and {:?}",
        a.bits.len(),
        b.bits.len(),
        first.map(|at| (at / vocab, at % vocab)),
        a.chosen,
        b.chosen
    )
}

/// The most likely token; the lower id of equals.
pub fn best(logits: &[f32]) -> TokenId {
    let mut best = 0;
    for (id, value) in logits.iter().enumerate() {
        if *value > logits[best] {
            best = id;
        }
    }
    best as TokenId
}

/// The prompt, then `count` greedy tokens.
pub fn trail(timeline: &mut Timeline, prompt: &[TokenId], count: usize) -> Result<Trail, SessionError> {
    let mut trail = Trail::default();
    timeline.sync(prompt, Want::All, &mut trail)?;
    for _ in 0..count {
        let token = best(timeline.last_logits());
        trail.chosen.push(token);
        timeline.announce(token)?;
        timeline.append(&[token], Want::All, &mut trail)?;
    }
    Ok(trail)
}

/// A trail on a fresh sequence of `engine`, with prompts cut into chunks of `chunk`.
pub fn fresh_trail(engine: &mut Engine, chunk: usize, prompt: &[TokenId], count: usize) -> Trail {
    engine.prepared.runner.chunk = chunk;
    let mut timeline = Timeline::new(engine.runner().unwrap());
    trail(&mut timeline, prompt, count).unwrap_or_else(|e| panic!("{e}"))
}
