//! Going back in a timeline: what is appended after a rewind gives the same bits as if the dropped tokens had never been.
//! Never tolerates a difference. Surprising fact: most rewinds compute nothing, since rings are longer than the window by one chunk; the
//! test counts the passes to see which ones do.

mod engine_rig;

use ds4::models::Want;
use ds4::session::timeline::{Flow, NoWatcher, Timeline, Watcher};
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
