//! A recorded run, replayed through the simulator, has the same hits, misses and evictions, and leaves the same experts in the cache.
//! Never tolerates a difference. Surprising fact: the trace is all that the replay gets; what was preloaded and which requests
//! overlapped are in it.

mod engine_rig;

use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cache_policy::{Directory, Event, Replay, TraceReader, by_name, policies, sim};
use ds4::engine::Engine;
use ds4::engine::options::{EngineOptions, Preload};
use ds4::models::Want;
use ds4::session::timeline::{NoWatcher, Timeline};
use ds4::storage::reader::ReaderChoice;
use ds4::storage::reader::fake::{FakeFault, FakeOptions};
use ds4::units::Budget;
use engine_rig::made_models::{a, b, wide_q2};
use engine_rig::{best, fake, open, options, over, prompt};

/// Bytes that the engine writes and the test reads.
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

/// Prefill of `count` tokens, then greedy tokens, one session.
fn session(engine: &mut Engine, chunk: usize, count: usize, generated: usize) {
    engine.prepared.runner.chunk = chunk;
    let vocab = engine.tokenizer().tokens_total();
    let mut timeline = Timeline::new(engine.runner().unwrap());
    timeline.sync(&prompt(count, vocab), Want::Last, &mut NoWatcher).unwrap();
    for _ in 0..generated {
        timeline.append(&[best(timeline.last_logits())], Want::Last, &mut NoWatcher).unwrap();
    }
}

/// Two sequences that take turns in one cache.
fn interleaved(engine: &mut Engine, chunk: usize) {
    engine.prepared.runner.chunk = chunk;
    let vocab = engine.tokenizer().tokens_total();
    let mut both = [0, 1].map(|_| Timeline::new(engine.runner().unwrap()));
    for (at, timeline) in both.iter_mut().enumerate() {
        timeline.sync(&prompt(20 + 10 * at, vocab), Want::Last, &mut NoWatcher).unwrap();
    }
    for turn in 0..16 {
        let timeline = &mut both[turn % 2];
        timeline.append(&[best(timeline.last_logits())], Want::Last, &mut NoWatcher).unwrap();
    }
}

struct Replayed {
    replay: Replay,
    tokens: usize,
    sessions: Vec<u32>,
}

fn replay(engine: &Engine, policy: &str, bytes: &[u8]) -> Replayed {
    let shapes = engine.class_shapes();
    let lease_max = shapes.iter().map(|s| s.slots).min().unwrap();
    let mut reader = TraceReader::new();
    let mut replay = Replay::new(Directory::new(&shapes, &by_name(policy).unwrap()), lease_max);
    let (mut tokens, mut sessions) = (0, Vec::new());
    for piece in bytes.chunks(1000) {
        reader.feed(piece);
        while let Some(event) = reader.next().unwrap() {
            replay.event(&event).unwrap();
            match event {
                Event::Token { .. } => tokens += 1,
                Event::Session(number) => sessions.push(number),
                _ => {}
            }
        }
    }
    let header = reader.header().unwrap();
    header.check_model(&engine.identity().unwrap().0).unwrap();
    reader.finish().unwrap();
    Replayed { replay, tokens, sessions }
}

fn assert_equal(engine: &Engine, replay: &Replay, what: &str) -> sim::Tally {
    let stats = engine.cache().unwrap().stats();
    assert_eq!(replay.prefill(), stats.prefill.tally(), "{what}: prefill");
    assert_eq!(replay.decode(), stats.decode.tally(), "{what}: decode");
    for key in engine.cache().unwrap().all_keys() {
        assert_eq!(engine.cache().unwrap().contains(key), replay.directory().contains(key), "{what}: {key}");
    }
    stats.total().tally()
}

/// Records two sessions and two interleaved ones, replays, compares.
fn check(options: &EngineOptions, chunk: usize, what: &str) {
    let mut engine = open(options);
    let kept = Kept::default();
    engine.begin_trace(Box::new(kept.clone())).unwrap();
    session(&mut engine, chunk, 60, 20);
    session(&mut engine, chunk, 40, 30);
    interleaved(&mut engine, chunk);
    engine.end_trace().unwrap();
    let found = replay(&engine, &options.policy, &kept.0.lock().unwrap());
    let tally = assert_equal(&engine, &found.replay, what);
    assert!(tally.hits > 0 && tally.misses > 0 && tally.evictions > 0, "{what}: the run did everything: {tally:?}");
    assert_eq!(found.tokens, 60 + 20 + 40 + 30 + 20 + 30 + 16, "{what}");
    assert_eq!(found.sessions.len(), 2 + 2 + 16, "{what}: {:?}", found.sessions);
}

fn streamed(model: &Path, slots: u64, policy: &str, preload: Preload) -> EngineOptions {
    EngineOptions {
        is_streaming: true,
        budget: Some(Budget::Slots(slots)),
        policy: policy.into(),
        preload,
        ..options(model)
    }
}

#[test]
fn every_policy_at_every_budget() {
    for (policy, _) in policies::KNOWN {
        for (model, slots) in [(a(), 18), (a(), 33), (b(), 10), (b(), 27), (wide_q2(), 5)] {
            for (preload, chunk) in [(Preload::Cold, 64), (Preload::Auto, 7)] {
                let what = format!("{policy}, {}, {slots} slots, {preload:?}", model.display());
                check(&streamed(model, slots, policy, preload), chunk, &what);
            }
        }
    }
}

#[test]
fn every_reader_and_a_drive_that_reorders() {
    for io in [ReaderChoice::Uring, ReaderChoice::Pread] {
        for threads in [1, 2] {
            let options = EngineOptions { io, threads: Some(threads), ..streamed(b(), 13, "auto", Preload::Auto) };
            check(&options, 64, &format!("{io:?}, {threads} threads"));
        }
    }
    for seed in 0..3 {
        let drive =
            FakeOptions { jitter: Duration::from_micros(200), short_of_256: 64, seed, ..FakeOptions::default() };
        let reader = fake(b(), drive);
        for policy in ["lru", "auto"] {
            check(&over(streamed(b(), 11, policy, Preload::Cold), &reader), 64, &format!("{policy}, seed {seed}"));
        }
    }
}

#[test]
fn waves_of_a_small_cache_are_told_from_single_requests() {
    // One token routes 10 experts of the 16 of a layer in the chunk: the cache of 5 needs waves.
    let mut engine = open(&streamed(wide_q2(), 5, "lru", Preload::Cold));
    let kept = Kept::default();
    engine.begin_trace(Box::new(kept.clone())).unwrap();
    session(&mut engine, 64, 60, 2);
    engine.end_trace().unwrap();
    let mut reader = TraceReader::new();
    reader.feed(&kept.0.lock().unwrap());
    let mut overlaps = 0;
    while let Some(event) = reader.next().unwrap() {
        overlaps += usize::from(matches!(event, Event::Overlap(1)));
    }
    assert!(overlaps > 0, "waves overlap");
}

#[test]
fn a_failed_pass_leaves_no_record_and_the_trace_stays_whole() {
    let drive = fake(b(), FakeOptions::default());
    let mut engine = open(&over(streamed(b(), 10, "lru", Preload::Cold), &drive));
    let kept = Kept::default();
    engine.begin_trace(Box::new(kept.clone())).unwrap();
    let layer = engine.prepared.layout.experts[3];
    let vocab = engine.tokenizer().tokens_total();
    let mut timeline = Timeline::new(engine.runner().unwrap());
    for expert in (0..layer.experts).map(cache_policy::ExpertIdx) {
        let offset = layer.extents(expert)[0].offset + 10;
        drive.add_fault(FakeFault { offset, errno: libc::EIO, times: u32::MAX });
    }
    assert!(timeline.sync(&prompt(30, vocab), Want::Last, &mut NoWatcher).is_err());
    drive.clear_faults();
    session(&mut engine, 64, 20, 5);
    engine.end_trace().unwrap();
    let found = replay(&engine, "lru", &kept.0.lock().unwrap());
    assert_eq!((found.tokens, found.sessions), (25, vec![1]));
}

#[test]
fn recording_begins_before_the_first_request() {
    let mut engine = open(&streamed(b(), 10, "lru", Preload::Cold));
    session(&mut engine, 64, 5, 1);
    let error = engine.begin_trace(Box::new(Kept::default())).unwrap_err().to_string();
    assert!(error.contains("before the first pass"), "{error}");
}
