//! Answers whose tokens the runner chooses: the same as from logits, and whoever goes on afterwards finds logits.
//! Never needs a device: the runner here chooses from the logits of an ordinary one and keeps them to itself. Surprising fact: logits that
//! nothing can be chosen from must still be told in the sampler's words, so they are fetched then.

mod engine_rig;

use ds4::models::draw::Drawer;
use ds4::models::probe::Probe;
use ds4::models::state::{StateError, StatePart, StateSink, StateSource};
use ds4::models::{LogitSink, ModelError, ModelRunner, Progress, RunnerBytes, Want};
use ds4::session::generate::{Answer, GenerateError, GenerateOptions, generate};
use ds4::session::sampler::{Sampler, SamplerParams, greedy};
use ds4::session::stop::StopRules;
use ds4::session::timeline::{Flow, NoWatcher, Timeline};
use ds4::units::TokenId;
use engine_rig::made_models::b;
use engine_rig::{open, options, prompt};

/// `inner`, as a device would do it.
struct Choosing {
    inner: Box<dyn ModelRunner>,
    left: Vec<f32>,
    chosen: Option<TokenId>,
    /// From this length on logits are broken.
    broken_at: usize,
    fetches: usize,
}

impl ModelRunner for Choosing {
    fn arch(&self) -> &'static str {
        self.inner.arch()
    }
    fn vocab(&self) -> usize {
        self.inner.vocab()
    }
    fn ctx(&self) -> usize {
        self.inner.ctx()
    }
    fn chunk(&self) -> usize {
        self.inner.chunk()
    }
    fn sweep(&self) -> usize {
        self.inner.sweep()
    }
    fn len(&self) -> usize {
        self.inner.len()
    }
    fn bytes(&self) -> RunnerBytes {
        self.inner.bytes()
    }
    fn reset(&mut self) {
        self.inner.reset();
    }
    fn reach(&self, len: usize) -> usize {
        self.inner.reach(len)
    }
    fn rewind(&mut self, kept: &[TokenId]) -> usize {
        self.inner.rewind(kept)
    }
    fn save_state(&mut self, part: StatePart, sink: &mut dyn StateSink) -> Result<(), StateError> {
        self.inner.save_state(part, sink)
    }
    fn load_state(
        &mut self,
        part: StatePart,
        kept: &[TokenId],
        source: &mut dyn StateSource,
    ) -> Result<(), StateError> {
        self.inner.load_state(part, kept, source)
    }
    fn prefetch_rows(&mut self, tokens: &[TokenId]) -> Result<(), ModelError> {
        self.inner.prefetch_rows(tokens)
    }
    fn chooses(&self) -> bool {
        true
    }
    fn chosen(&self) -> Option<TokenId> {
        self.chosen
    }
    fn fetch_logits(&mut self, logits: &mut [f32]) -> Result<(), ModelError> {
        self.fetches += 1;
        assert_eq!(self.fetches, 1, "an answer needs logits once, at its end");
        logits.copy_from_slice(&self.left);
        Ok(())
    }
    fn forward_watched(
        &mut self,
        tokens: &[TokenId],
        want: Want,
        sink: &mut LogitSink<'_>,
        probe: Option<&mut dyn Probe>,
        progress: &mut Progress<'_>,
    ) -> Result<(), ModelError> {
        self.chosen = None;
        let rule = match want {
            Want::Best => None,
            Want::Drawn(rule) => Some(rule),
            _ => return self.inner.forward_watched(tokens, want, sink, probe, progress),
        };
        assert_eq!(tokens.len(), 1, "of a single token");
        let left = &mut self.left;
        let mut keep = |_: usize, logits: &[f32]| *left = logits.to_vec();
        self.inner.forward_watched(tokens, Want::Last, &mut keep, probe, progress)?;
        if self.inner.len() >= self.broken_at {
            self.left[5] = f32::NAN;
        }
        let draw = |best| match rule {
            None => best,
            Some(rule) => Drawer::default().draw(&self.left, best as usize, &rule) as TokenId,
        };
        self.chosen = greedy(&self.left).ok().map(draw);
        Ok(())
    }
}

const GREEDY: SamplerParams = SamplerParams { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 };

fn answer(
    timeline: &mut Timeline,
    engine: &ds4::engine::Engine,
    sampler: &mut Sampler,
) -> Result<Answer, GenerateError> {
    let wanted = GenerateOptions { tokens_max: 12, is_scored: false, top_logprobs: 0, want: Want::Last };
    let rules = StopRules::new(Vec::new(), Vec::new()).unwrap();
    let mut on_piece = |_: &ds4::session::generate::Piece<'_>| Flow::Continue;
    generate(timeline, engine.tokenizer(), sampler, rules, &wanted, &mut NoWatcher, &mut on_piece)
}

#[test]
fn a_runner_that_chooses_gives_the_same_answer_and_the_same_logits_behind_it() {
    let engine = open(&options(b()));
    let run = |mut timeline: Timeline, params: SamplerParams| {
        let tokens = prompt(9, timeline.vocab());
        let mut sampler = Sampler::new(params).unwrap();
        timeline.sync(&tokens, Want::Last, &mut NoWatcher).unwrap();
        let answer = answer(&mut timeline, &engine, &mut sampler).unwrap();
        assert!(timeline.has_logits());
        let bits: Vec<u32> = timeline.last_logits().iter().map(|v| v.to_bits()).collect();
        // Each draw took one number, whoever made it.
        assert_eq!(sampler.position(), if params.temperature > 0.0 { 2 * answer.tokens.len() as u64 } else { 0 });
        (answer.tokens, answer.text, answer.passes, timeline.tokens().to_vec(), bits)
    };
    let choosing = |inner| Choosing { inner, left: Vec::new(), chosen: None, broken_at: usize::MAX, fetches: 0 };
    let warm = SamplerParams { seed: 5, ..SamplerParams::default() };
    let mut texts = Vec::new();
    for params in [GREEDY, warm, SamplerParams { temperature: 0.8, top_k: 50, top_p: 0.9, min_p: 0.02, ..warm }] {
        let plain = run(Timeline::new(engine.runner().unwrap()), params);
        let chosen = run(Timeline::new(Box::new(choosing(engine.runner().unwrap()))), params);
        assert_eq!(plain.0.len(), 12);
        assert_eq!(plain, chosen);
        texts.push(plain.0);
    }
    assert!(texts[0] != texts[1] && texts[1] != texts[2], "other parameters, other texts: {texts:?}");
}

#[test]
fn broken_logits_are_told_as_the_sampler_does() {
    let engine = open(&options(b()));
    for params in [GREEDY, SamplerParams::default()] {
        let inner = engine.runner().unwrap();
        let runner = Choosing { inner, left: Vec::new(), chosen: None, broken_at: 12, fetches: 0 };
        let mut timeline = Timeline::new(Box::new(runner));
        let tokens = prompt(9, timeline.vocab());
        timeline.sync(&tokens, Want::Last, &mut NoWatcher).unwrap();
        let mut sampler = Sampler::new(params).unwrap();
        let error = answer(&mut timeline, &engine, &mut sampler).unwrap_err().to_string();
        assert!(error.contains("the logit of token 5"), "{error}");
        assert_eq!(timeline.tokens().len(), 12);
        // Three tokens were drawn; what could not be drawn took no number.
        assert_eq!(sampler.position(), if params.temperature > 0.0 { 6 } else { 0 });
    }
}
