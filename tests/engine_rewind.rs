//! Going back in a timeline: what is appended after a rewind gives the same bits as if the dropped tokens had never been.
//! Never tolerates a difference. Surprising fact: most rewinds compute nothing, since rings are longer than the window by one chunk; the
//! test counts the passes to see which ones do.

mod engine_rig;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ds4::models::Want;
use ds4::models::probe::{Point, Probe};
use ds4::session::perplexity;
use ds4::session::timeline::{Flow, NoWatcher, SessionError, StopAsked, Timeline, Watcher};
use ds4::units::TokenId;
use engine_rig::made_models::b;
use engine_rig::{open, options, prompt};

/// Looks on: is asked before each chunk of a recomputation.
#[derive(Default)]
struct Passes(usize);

impl Watcher for Passes {
    fn prefill(&mut self, _done: usize, _total: usize) -> Flow {
        self.0 += 1;
        Flow::Continue
    }
}

fn bits(timeline: &Timeline) -> Vec<u32> {
    timeline.last_logits().iter().map(|v| v.to_bits()).collect()
}

/// Logits after `tokens`, computed at once by a fresh timeline.
fn fresh(engine: &ds4::engine::Engine, tokens: &[TokenId]) -> Vec<u32> {
    let mut timeline = Timeline::new(engine.runner().unwrap());
    timeline.sync(tokens, Want::Last, &mut NoWatcher).unwrap();
    bits(&timeline)
}

#[test]
fn a_rewound_timeline_goes_on_as_if_nothing_had_been() {
    const CHUNK: usize = 24;
    let mut options = options(b());
    options.chunk = Some(CHUNK);
    let engine = open(&options);
    let vocab = engine.tokenizer().tokens_total();
    let text = prompt(120, vocab);
    let other: Vec<TokenId> = text.iter().rev().copied().collect();
    for (frontier, dropped, is_free) in [
        (60, 1, true),
        (60, CHUNK, true),
        (60, CHUNK + 1, true),
        (60, CHUNK + 2, false),
        (61, 3, true),
        (61, 9, false),
        (48, 70, false),
        (2, 9, true),
        (60, 0, true),
    ] {
        let what = format!("back to {frontier} over {dropped}");
        let mut timeline = Timeline::new(engine.runner().unwrap());
        timeline.sync(&text[..frontier], Want::Last, &mut NoWatcher).unwrap();
        for (i, token) in other[..dropped].iter().enumerate() {
            // A width of one and wider ones.
            if i < 5 {
                timeline.append(&[*token], Want::Last, &mut NoWatcher).unwrap();
            }
        }
        let left = &other[dropped.min(5)..dropped];
        if !left.is_empty() {
            timeline.append(left, Want::Last, &mut NoWatcher).unwrap();
        }
        let mut passes = Passes::default();
        timeline.rewind(frontier, &mut passes).unwrap();
        assert_eq!(timeline.tokens(), &text[..frontier], "{what}");
        assert_eq!(passes.0 == 0, is_free, "{what}: {} passes", passes.0);
        for next in [frontier + 1, frontier + 6, frontier + 30] {
            timeline.sync(&text[..next], Want::Last, &mut NoWatcher).unwrap();
            assert!(bits(&timeline) == fresh(&engine, &text[..next]), "{what}, then up to {next}");
        }
    }
}

#[test]
fn repeated_rewinds_keep_the_window() {
    const CHUNK: usize = 16;
    let mut options = options(b());
    options.chunk = Some(CHUNK);
    let engine = open(&options);
    let vocab = engine.tokenizer().tokens_total();
    let text = prompt(64, vocab);
    let mut timeline = Timeline::new(engine.runner().unwrap());
    timeline.sync(&text[..40], Want::Last, &mut NoWatcher).unwrap();
    timeline.append(&text[..CHUNK], Want::Last, &mut NoWatcher).unwrap();
    timeline.rewind(40, &mut NoWatcher).unwrap();
    // What the dropped chunk wrote still fills the rings, so a second chunk less far back must not be mistaken for the first.
    timeline.append(&text[3..7], Want::Last, &mut NoWatcher).unwrap();
    timeline.rewind(40, &mut NoWatcher).unwrap();
    timeline.sync(&text[..50], Want::Last, &mut NoWatcher).unwrap();
    assert!(bits(&timeline) == fresh(&engine, &text[..50]));
    // Further back than the rings reach: computed anew.
    let mut passes = Passes::default();
    timeline.rewind(10, &mut passes).unwrap();
    assert!(passes.0 > 0);
    timeline.sync(&text[..50], Want::Last, &mut NoWatcher).unwrap();
    assert!(bits(&timeline) == fresh(&engine, &text[..50]));
}

/// Stops the first pass at the question of this number; has a probe if asked to.
struct StopsAt {
    asked: Arc<AtomicUsize>,
    at: usize,
    probe: Option<Deaf>,
}

/// A probe that wants to see nothing.
struct Deaf;

impl Probe for Deaf {
    fn wants(&self, _point: Point) -> bool {
        false
    }
}

impl StopsAt {
    fn new(at: usize, has_probe: bool) -> Self {
        Self { asked: Arc::default(), at, probe: has_probe.then_some(Deaf) }
    }
}

impl Watcher for StopsAt {
    fn stop_asked(&self) -> Option<StopAsked> {
        let (asked, at) = (Arc::clone(&self.asked), self.at);
        Some(Arc::new(move || asked.fetch_add(1, Ordering::Relaxed) + 1 >= at))
    }
    fn has_probe(&self) -> bool {
        self.probe.is_some()
    }
    fn probe(&mut self) -> Option<&mut dyn Probe> {
        self.probe.as_mut().map(|probe| probe as &mut dyn Probe)
    }
}

#[test]
fn a_pass_that_lends_its_watcher_away_can_be_stopped() {
    const CHUNK: usize = 16;
    let mut options = options(b());
    options.chunk = Some(CHUNK);
    let engine = open(&options);
    let text = prompt(64, engine.tokenizer().tokens_total());
    let is_interrupted = |result: Result<_, SessionError>| matches!(result, Err(SessionError::Interrupted));
    for (want, has_probe) in [(Want::All, false), (Want::All, true), (Want::Last, true)] {
        // Early in a pass, and far on.
        for at in [3, 25] {
            let what = format!("{want:?}, probe {has_probe}, question {at}");
            let mut timeline = Timeline::new(engine.runner().unwrap());
            let mut watcher = StopsAt::new(at, has_probe);
            assert!(is_interrupted(timeline.sync(&text, want, &mut watcher).map(|_| ())), "{what}");
            assert_eq!(watcher.asked.load(Ordering::Relaxed), at, "{what}: asked again after it said stop");
            let held = timeline.tokens().len();
            assert!(held < text.len() && held.is_multiple_of(CHUNK) && timeline.tokens() == &text[..held], "{what}");
            timeline.sync(&text, Want::Last, &mut NoWatcher).unwrap();
            assert!(bits(&timeline) == fresh(&engine, &text), "{what}");
        }
    }
    // One window is one question in between; all the others are asked within it.
    let mut timeline = Timeline::new(engine.runner().unwrap());
    let measured = perplexity::measure(&mut timeline, &text, None, text.len(), &mut StopsAt::new(5, false));
    assert!(is_interrupted(measured.map(|_| ())));
}
