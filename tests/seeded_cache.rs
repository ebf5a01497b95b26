//! What a prompt leaves in the cache is worth more than what a plain cache would keep of it: the same recorded run, replayed with and
//! without the experts that the prompt named.
//! Never times anything. Surprising fact: the trace of the live run decides; leaving its `Favour` events out is the twin without seeding.

mod engine_rig;

use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex};

use cache_policy::{Directory, Event, Phase, Replay, TraceReader, by_name};
use ds4::engine::options::{EngineOptions, Preload};
use ds4::models::Want;
use ds4::session::timeline::{NoWatcher, Timeline};
use ds4::units::Budget;
use engine_rig::{best, open, options};

#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<u8>>>);

impl Write for Kept {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Decode after a short prompt, then four times a longer prompt and a few tokens right behind it: hits and uses of those tokens.
struct Found {
    live: (u64, u64),
    seeded: (u64, u64),
    plain: (u64, u64),
    /// Experts that the first decode had in the cache, and how many of them the first longer prompt left there.
    hot: usize,
    hot_left: usize,
}

fn run(policy: &str, slots: u64) -> Found {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let model = root.join("models/ds41-mini.gguf");
    let options = EngineOptions {
        ctx: Some(2048),
        is_streaming: true,
        budget: Some(Budget::Slots(slots)),
        policy: policy.into(),
        preload: Preload::Cold,
        ..options(&model)
    };
    let engine = open(&options);
    let kept = Kept::default();
    engine.begin_trace(Box::new(kept.clone())).unwrap();
    let text = std::fs::read_to_string(root.join("benches/text/paradise_lost.txt")).unwrap();
    let tokens = engine.tokenizer().encode(&text[..6000]).unwrap();
    let mut timeline = Timeline::new(engine.runner().unwrap());
    let decode = |timeline: &mut Timeline, count: usize| {
        for _ in 0..count {
            timeline.append(&[best(timeline.last_logits())], Want::Last, &mut NoWatcher).unwrap();
        }
    };
    timeline.sync(&tokens[..100], Want::Last, &mut NoWatcher).unwrap();
    decode(&mut timeline, 40);
    let cache = engine.cache().unwrap();
    let before: Vec<_> = cache.all_keys().into_iter().filter(|key| cache.contains(*key)).collect();
    let mark = cache.stats().decode.tally();
    let mut hot_left = 0;
    for round in 0..4 {
        let first = 100 + 200 * round;
        timeline.append(&tokens[first..first + 200], Want::Last, &mut NoWatcher).unwrap();
        if round == 0 {
            let cache = engine.cache().unwrap();
            hot_left = before.iter().filter(|key| cache.contains(**key)).count();
        }
        decode(&mut timeline, 4);
    }
    let now = engine.cache().unwrap().stats().decode.tally();
    drop(timeline);
    engine.end_trace().unwrap();
    let bytes = kept.0.lock().unwrap().clone();
    let replayed = |with_favours: bool| {
        let shapes = engine.class_shapes();
        let lease_max = shapes.iter().map(|s| s.slots).min().unwrap();
        let mut replay = Replay::new(Directory::new(&shapes, &by_name(policy).unwrap()), lease_max);
        let mut reader = TraceReader::new();
        reader.feed(&bytes);
        let mut marks = Vec::new();
        while let Some(event) = reader.next().unwrap() {
            if matches!(event, Event::Phase(Phase::Prefill)) {
                marks.push(replay.decode());
            }
            if with_favours || !matches!(event, Event::Favour { .. }) {
                replay.event(&event).unwrap();
            }
        }
        // Prefill begins a second time with the first of the longer prompts.
        let (last, mark) = (replay.decode(), marks[1]);
        (last.hits - mark.hits, last.hits + last.misses - mark.hits - mark.misses)
    };
    Found {
        live: (now.hits - mark.hits, now.hits + now.misses - mark.hits - mark.misses),
        seeded: replayed(true),
        plain: replayed(false),
        hot: before.len(),
        hot_left,
    }
}

#[test]
fn decode_after_a_long_prompt_hits_more_often_with_seeding() {
    let mut gains = Vec::new();
    for policy in ["auto", "lru"] {
        for slots in [72, 120] {
            let found = run(policy, slots);
            let share = |(hits, uses): (u64, u64)| 100.0 * hits as f64 / uses as f64;
            let what = format!(
                "{policy}, {slots} slots: {:.1} % hits, {:.1} % without; {} of {} experts of decode left",
                share(found.seeded),
                share(found.plain),
                found.hot_left,
                found.hot
            );
            println!("{what}");
            assert_eq!(found.live, found.seeded, "{what}: the replay is the live run");
            assert!(found.hot_left * 4 >= found.hot, "{what}");
            gains.push(share(found.seeded) - share(found.plain));
        }
    }
    assert!(gains.iter().all(|gain| *gain >= 0.0) && gains.iter().sum::<f64>() > 0.0, "{gains:?}");
}
