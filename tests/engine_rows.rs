//! Row tables under a whole engine: one submission a decode step, and a slow drive that costs one read's time and not one per row.
//! Never judges values. Surprising fact: the fastest step of many is what is compared, since a busy machine only ever adds time.

mod engine_rig;

use std::sync::Arc;
use std::time::{Duration, Instant};

use ds4::engine::Engine;
use ds4::models::Want;
use ds4::session::timeline::{NoWatcher, Timeline};
use ds4::storage::reader::fake::{FakeOptions, FakeReader};
use engine_rig::made_models::b;
use engine_rig::{best, fake, open, options, over, prompt};

const DELAY: Duration = Duration::from_millis(2);
/// Fixture b: 2 tables x 3 orders x 4 heads.
const ROWS_PER_TOKEN: u64 = 24;
const STEPS: usize = 40;

fn engine(delay: Duration) -> (Engine, Arc<FakeReader>) {
    let reader = fake(b(), FakeOptions { delay, ..FakeOptions::default() });
    (open(&over(options(b()), &reader)), reader)
}

/// One decode step as `generate` does it.
fn step(timeline: &mut Timeline) {
    let token = best(timeline.last_logits());
    timeline.announce(token).unwrap();
    timeline.append(&[token], Want::Last, &mut NoWatcher).unwrap();
}

#[test]
fn a_step_submits_its_rows_once() {
    let (engine, _) = engine(Duration::ZERO);
    let mut timeline = Timeline::new(engine.runner().unwrap());
    let prompt = prompt(20, engine.tokenizer().tokens_total());
    let rows = engine.rows().unwrap();
    timeline.sync(&prompt, Want::Last, &mut NoWatcher).unwrap();
    let after_prompt = rows.counters().snapshot();
    assert_eq!((after_prompt.submissions, after_prompt.rows_asked), (1, 20 * ROWS_PER_TOKEN), "one chunk, one batch");
    for done in 1..=STEPS as u64 {
        let reads = engine.reader().counters().snapshot().submissions;
        step(&mut timeline);
        let now = rows.counters().snapshot();
        assert_eq!(now.submissions, after_prompt.submissions + done);
        assert_eq!(now.rows_asked, after_prompt.rows_asked + done * ROWS_PER_TOKEN);
        assert_eq!(engine.reader().counters().snapshot().submissions, reads + 1, "all tables in one submission");
    }
    assert_eq!(rows.counters().snapshot().failed, 0);
}

#[test]
fn chunks_submit_their_rows_once_each() {
    let (mut engine, _) = engine(Duration::ZERO);
    (engine.prepared.runner.chunk, engine.prepared.runner.sweep) = (8, 8);
    let mut timeline = Timeline::new(engine.runner().unwrap());
    let prompt = prompt(50, engine.tokenizer().tokens_total());
    timeline.sync(&prompt, Want::Last, &mut NoWatcher).unwrap();
    let rows = engine.rows().unwrap().counters().snapshot();
    assert_eq!((rows.submissions, rows.rows_asked), (7, 50 * ROWS_PER_TOKEN));
}

fn fastest_step(delay: Duration) -> Duration {
    let (engine, reader) = engine(delay);
    let mut timeline = Timeline::new(engine.runner().unwrap());
    let prompt = prompt(20, engine.tokenizer().tokens_total());
    timeline.sync(&prompt, Want::Last, &mut NoWatcher).unwrap();
    let begun = reader.reads_begun();
    let mut steps: Vec<Duration> = Vec::with_capacity(STEPS);
    for _ in 0..STEPS {
        let started = Instant::now();
        step(&mut timeline);
        steps.push(started.elapsed());
    }
    // Rows that lie together share a read, so a step may take a little less than one a row.
    let reads = (reader.reads_begun() - begun) / STEPS as u64;
    assert!((ROWS_PER_TOKEN / 2..=ROWS_PER_TOKEN).contains(&reads), "{reads} reads a step");
    steps.into_iter().min().unwrap()
}

#[test]
fn a_slow_drive_costs_a_tenth_of_serial_reads_at_most() {
    let (quick, slow) = (fastest_step(Duration::ZERO), fastest_step(DELAY));
    let serial = DELAY * ROWS_PER_TOKEN as u32;
    let added = slow.saturating_sub(quick);
    println!(
        "a step takes {quick:?}, with {DELAY:?} a read {slow:?}: {added:?} more; serial reads would add {serial:?}"
    );
    assert!(slow >= DELAY, "the delay is real: {slow:?}");
    assert!(added < serial / 10, "{added:?} of {serial:?}");
}
