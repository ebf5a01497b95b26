//! Saved sessions on the level of the library: what goes on after a restore has the bits of a session that was never interrupted, and no
//! file, however damaged, does more than be refused. Surprising fact: a state saved under one chunk length is loaded under another, so that
//! nothing of the rings' own order can be in the file unnoticed.

mod engine_rig;

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use ds4::engine::Engine;
use ds4::models::Want;
use ds4::session::checkpoint::{Checkpoint, CheckpointError, ModelMark, Restored, write};
use ds4::session::sampler::{Sampler, SamplerParams};
use ds4::session::timeline::{NoWatcher, SessionError, Timeline};
use ds4::storage::convert::{ALIGNMENT, BaseRecipe, Options, Recipe, convert};
use ds4::text::chat::{Message, Role};
use ds4::units::TokenId;
use engine_rig::made_models::{a, b, b_checkpoint, folder};
use engine_rig::{open, options, prompt};
use xxhash_rust::xxh3::xxh3_128;

/// Tokens that are generated before and after a save.
const TURN: usize = 5;

/// A DeepSeek V4 file: five layers, ratios 4 and 128 among them.
fn v4(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/deepseek_v4").join(name)
}

fn engine(model: &Path, chunk: usize, ctx: usize) -> Engine {
    let mut options = options(model);
    (options.chunk, options.ctx) = (Some(chunk), Some(ctx));
    open(&options)
}

fn mark(engine: &Engine) -> ModelMark {
    ModelMark {
        identity: engine.identity().unwrap().to_string(),
        name: engine.prepared.file.path().file_name().unwrap().to_string_lossy().into_owned(),
        arch: engine.prepared.config.arch().into(),
        is_quality: false,
        is_kv_exact: false,
    }
}

fn sampler(temperature: f32) -> Sampler {
    Sampler::new(SamplerParams { temperature, seed: 11, ..SamplerParams::default() }).unwrap()
}

fn fresh(engine: &Engine) -> Timeline {
    Timeline::new(engine.runner().unwrap())
}

/// Tokens chosen from here on, and the bits of all logits on the way.
fn go_on(timeline: &mut Timeline, sampler: &mut Sampler, count: usize) -> (Vec<TokenId>, Vec<u32>) {
    let (mut chosen, mut bits) = (Vec::new(), Vec::new());
    for _ in 0..count {
        bits.extend(timeline.last_logits().iter().map(|v| v.to_bits()));
        let id = sampler.sample(timeline.last_logits()).unwrap().id;
        chosen.push(id);
        timeline.append(&[id], Want::Last, &mut NoWatcher).unwrap();
    }
    bits.extend(timeline.last_logits().iter().map(|v| v.to_bits()));
    (chosen, bits)
}

fn save(engine: &Engine, timeline: &mut Timeline, talk: Option<&[Message]>, sampler: &Sampler) -> Vec<u8> {
    let mut bytes = Vec::new();
    let count = write(&mut bytes, &mark(engine), timeline, talk.map(|talk| (talk, Some(3))), sampler).unwrap();
    assert_eq!(count, bytes.len() as u64);
    bytes
}

fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder().join(name);
    fs::write(&path, bytes).unwrap();
    path
}

fn restore(engine: &Engine, path: &Path, timeline: &mut Timeline) -> Result<Restored, CheckpointError> {
    Checkpoint::open(path)?.restore(&mark(engine), timeline)
}

#[test]
fn a_restored_session_goes_on_bit_for_bit() {
    let (v4_a, v4_c) = (v4("a/model.gguf"), v4("c/model-mixed.gguf"));
    for (name, model) in [("a", a()), ("b", b()), ("V4 a", &v4_a), ("V4 c", &v4_c)] {
        let (from, into) = (engine(model, 16, 256), engine(model, 7, 200));
        let text = prompt(160, from.tokenizer().tokens_total());
        // Around the borders of windows (32 and 48), pairs and chunks; the save comes TURN tokens later.
        for len in [1, 2, 25, 26, 27, 28, 42, 43, 44, 58, 59, 91, 150] {
            for temperature in [0.0, 1.0] {
                let what = format!("{name}, {len} tokens, temperature {temperature}");
                let mut timeline = fresh(&from);
                let mut first = sampler(temperature);
                timeline.sync(&text[..len], Want::Last, &mut NoWatcher).unwrap();
                go_on(&mut timeline, &mut first, TURN);
                let bytes = save(&from, &mut timeline, None, &first);
                let saved = timeline.tokens().to_vec();
                let want = go_on(&mut timeline, &mut first, TURN);

                let (mut timeline, mut second) = (fresh(&into), sampler(temperature));
                let restored = restore(&into, &file("same", &bytes), &mut timeline).unwrap();
                assert_eq!((timeline.tokens(), restored.talk, restored.notes.len()), (&saved[..], None, 0), "{what}");
                second.resume(restored.sampler.position);
                assert!(timeline.has_logits());
                assert!(go_on(&mut timeline, &mut second, TURN) == want, "{what}");
                // The restored state can go back to where it was saved, at once.
                let report = timeline.sync(&saved, Want::Last, &mut NoWatcher).unwrap();
                assert_eq!(report.reused, saved.len() - 1, "{what}");
                assert!(timeline.last_logits()[..] == *floats(&want.1, timeline.vocab()), "{what}");
            }
        }
    }
}

/// The first row of logits.
fn floats(bits: &[u32], vocab: usize) -> Vec<f32> {
    bits[..vocab].iter().map(|bits| f32::from_bits(*bits)).collect()
}

#[test]
fn a_conversation_comes_back_with_the_state() {
    let engine = engine(b(), 16, 128);
    let mut timeline = Timeline::with_images(engine.runner().unwrap(), 2);
    timeline.sync(&prompt(20, 250), Want::Last, &mut NoWatcher).unwrap();
    // Going back leaves a state without logits, which is worth saving too.
    timeline.rewind(17, &mut NoWatcher).unwrap();
    assert!(!timeline.has_logits());
    let thought = Message { reasoning: Some("hm".into()), ..Message::new(Role::Assistant, "yes") };
    let talk = [Message::new(Role::System, "be brief"), Message::new(Role::User, "is it?"), thought];
    let path = file("talk", &save(&engine, &mut timeline, Some(&talk), &sampler(0.0)));
    let saved = Checkpoint::open(&path).unwrap();
    assert_eq!((saved.tokens(), saved.messages()), (17, Some(&talk[..])));
    let other = ModelMark { is_quality: true, ..mark(&engine) };
    let restored = saved.restore(&other, &mut timeline).unwrap();
    assert_eq!(restored.talk, Some((talk.to_vec(), Some(3))));
    assert!(restored.notes[0].contains("without --quality"), "{:?}", restored.notes);
    assert!(!timeline.has_logits() && timeline.images() == (1, 2));
    let report = timeline.sync(&prompt(18, 250), Want::Last, &mut NoWatcher).unwrap();
    assert_eq!((report.reused, report.computed), (17, 1));
    timeline.clear();
    let error = write(&mut Vec::new(), &other, &mut timeline, None, &sampler(0.0)).unwrap_err();
    assert!(matches!(error, CheckpointError::Empty));
}

/// Model b, its output head in another type.
fn with_q8_head() -> PathBuf {
    let (input, output) = (folder().join("b-q8"), folder().join("b-q8.gguf"));
    b_checkpoint().save(&input);
    let recipe = Recipe::base(BaseRecipe::Native).with(&["head=q8_0".into()]).unwrap();
    let options = Options { recipe, importance: None, output: &output, force: true, alignment: ALIGNMENT };
    convert(&input, &options, &mut |_, _| ControlFlow::Continue(())).unwrap();
    output
}

/// A small session, and an engine for it.
fn small() -> (Engine, Vec<u8>) {
    small_of(b())
}

fn small_of(model: &Path) -> (Engine, Vec<u8>) {
    let engine = engine(model, 16, 64);
    let mut timeline = Timeline::with_images(engine.runner().unwrap(), 1);
    timeline.sync(&prompt(3, 250), Want::Last, &mut NoWatcher).unwrap();
    let talk = [Message::new(Role::User, "hello")];
    let bytes = save(&engine, &mut timeline, Some(&talk), &sampler(1.0));
    (engine, bytes)
}

#[test]
fn every_flipped_byte_is_noticed() {
    every_flipped_byte_of(b(), 1);
    every_flipped_byte_of(&v4("a/model.gguf"), 7);
}

fn every_flipped_byte_of(model: &Path, step: usize) {
    let (_, bytes) = small_of(model);
    let path = file("flipped", &bytes);
    let mut handle = File::options().write(true).open(&path).unwrap();
    let mut put = |at: usize, byte: u8| {
        handle.seek(SeekFrom::Start(at as u64)).unwrap();
        handle.write_all(&[byte]).unwrap();
    };
    for at in (0..bytes.len()).step_by(step) {
        put(at, bytes[at] ^ [0x01, 0x80, 0xFF][at % 3]);
        let error = Checkpoint::open(&path).err().unwrap_or_else(|| panic!("byte {at} of {}", bytes.len()));
        assert!(error.to_string().contains("flipped"), "{error}");
        put(at, bytes[at]);
    }
    assert!(Checkpoint::open(&path).is_ok());
}

#[test]
fn every_shortened_file_is_refused() {
    let (_, bytes) = small();
    let path = file("short", &bytes);
    let handle = File::options().write(true).open(&path).unwrap();
    for len in (0..bytes.len()).rev().filter(|len| len % 13 == 0 || *len < 1000 || *len + 100 > bytes.len()) {
        handle.set_len(len as u64).unwrap();
        match Checkpoint::open(&path).unwrap_err() {
            CheckpointError::CutShort { .. } => assert!(len > 0),
            CheckpointError::NotASession { what, .. } => assert_eq!((len, &*what), (0, "it is empty")),
            other => panic!("{len} bytes: {other}"),
        }
    }
    // Longer than it says is no better.
    let longer = file("long", &[&bytes[..], b"x"].concat());
    assert!(matches!(Checkpoint::open(&longer), Err(CheckpointError::CutShort { .. })));
}

/// Damage under a checksum that fits, as no accident makes it: refused or taken, but never a panic, and the session goes on.
#[test]
fn forged_files_do_no_harm() {
    forged_files_of(b(), 29);
    forged_files_of(&v4("a/model.gguf"), 497);
}

fn forged_files_of(model: &Path, step: usize) {
    let (engine, bytes) = small_of(model);
    let mut timeline = Timeline::with_images(engine.runner().unwrap(), 2);
    let text = prompt(9, 250);
    let (mut taken, mut refused) = (0, 0);
    for at in (0..bytes.len() - 16).filter(|at| at % step == 0 || *at < 900) {
        for flip in [0x01, 0x80, 0xFF] {
            let mut forged = bytes.clone();
            forged[at] ^= flip;
            let end = forged.len() - 16;
            let sum = xxh3_128(&forged[..end]).to_le_bytes();
            forged[end..].copy_from_slice(&sum);
            match restore(&engine, &file("forged", &forged), &mut timeline) {
                Ok(_) => taken += 1,
                Err(_) => refused += 1,
            }
            // Whatever is there now can be computed with.
            let done = timeline.append(&text[..2], Want::Last, &mut NoWatcher);
            assert!(matches!(done, Ok(()) | Err(SessionError::Model(_))), "byte {at}: {:?}", done.err());
            // Back to the frontier that came with it, which may be forged too.
            let back = timeline.rewind(2, &mut NoWatcher);
            let is_told = matches!(back, Ok(()) | Err(SessionError::Model(_) | SessionError::State(_)));
            assert!(is_told, "byte {at}: {:?}", back.err());
        }
    }
    assert!(taken > 100 && refused > 100, "{taken} taken, {refused} refused");
    let mut honest = fresh(&engine);
    honest.sync(&text, Want::Last, &mut NoWatcher).unwrap();
    timeline.clear();
    timeline.sync(&text, Want::Last, &mut NoWatcher).unwrap();
    assert!(timeline.last_logits() == honest.last_logits());
}

#[test]
fn sessions_of_others_are_refused_and_named() {
    let (engine_b, bytes) = small();
    let path = file("of-b", &bytes);
    let requantised = with_q8_head();
    for model in [a(), &requantised] {
        let other = engine(model, 16, 64);
        let mut timeline = fresh(&other);
        timeline.sync(&prompt(5, 250), Want::Last, &mut NoWatcher).unwrap();
        let error = restore(&other, &path, &mut timeline).unwrap_err().to_string();
        let name = model.file_name().unwrap().to_str().unwrap();
        assert!(error.contains("of-b") && error.contains("b.gguf (") && error.contains(name), "{error}");
        assert_eq!(timeline.tokens().len(), 5, "the session at hand stays");
    }
    // Of one V4 file for another one of the same architecture, and for one of the other.
    let (_, of_v4) = small_of(&v4("a/model.gguf"));
    let path_v4 = file("of-v4", &of_v4);
    for model in [&v4("c/model-mixed.gguf"), b()] {
        let other = engine(model, 16, 64);
        let error = restore(&other, &path_v4, &mut fresh(&other)).unwrap_err().to_string();
        let name = model.file_name().unwrap().to_str().unwrap();
        assert!(error.contains("of-v4") && error.contains("model.gguf (") && error.contains(name), "{error}");
    }
    let mut newer = bytes.clone();
    newer[8] = 2;
    let error = Checkpoint::open(&file("newer", &newer)).unwrap_err().to_string();
    assert!(error.contains("version 2") && error.contains("reads version 1"), "{error}");
    let tiny = engine(b(), 2, 2);
    let error = restore(&tiny, &path, &mut fresh(&tiny)).unwrap_err().to_string();
    assert!(error.contains("3 tokens") && error.contains("--ctx 3"), "{error}");
    for (path, part) in [
        (folder(), "it is a folder"),
        (file("nothing", b""), "it is empty"),
        (file("text", b"It was a dark and stormy night; the rain fell in torrents."), "other bytes"),
        (PathBuf::from("/dev/zero"), "no regular file"),
        (folder().join("absent"), "cannot read"),
    ] {
        let error = Checkpoint::open(&path).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains(path.to_str().unwrap()), "{error}");
    }
    drop(engine_b);
}

#[test]
fn kept_frontiers_are_saved_too() {
    kept_frontiers_of(b());
    kept_frontiers_of(&v4("a/model.gguf"));
}

fn kept_frontiers_of(model: &Path) {
    let engine = engine(model, 16, 400);
    let text = prompt(300, 250);
    let mut timeline = Timeline::with_images(engine.runner().unwrap(), 3);
    for len in [60, 100] {
        timeline.sync(&text[..len], Want::Last, &mut NoWatcher).unwrap();
    }
    go_on(&mut timeline, &mut sampler(1.0), 60);
    let path = file("frontiers", &save(&engine, &mut timeline, None, &sampler(0.0)));
    // As when an answer's reasoning is left out of the next prompt: what is shared ends just before the end of the last one.
    for (images, shared, reused) in [(3, 98, 98), (3, 58, 58), (1, 98, 98), (1, 58, 0), (0, 98, 0)] {
        let mut timeline = Timeline::with_images(engine.runner().unwrap(), images);
        restore(&engine, &path, &mut timeline).unwrap();
        assert_eq!(timeline.images().0, images.min(2));
        let next: Vec<TokenId> = text[..shared].iter().chain(text.iter().rev()).copied().take(150).collect();
        let report = timeline.sync(&next, Want::Last, &mut NoWatcher).unwrap();
        assert_eq!(report.reused, reused, "{images} images");
        let mut plain = fresh(&engine);
        plain.sync(&next, Want::Last, &mut NoWatcher).unwrap();
        assert!(timeline.last_logits() == plain.last_logits());
    }
}

#[test]
fn shared_beginnings_are_not_computed_again() {
    shared_beginnings_of(b());
    shared_beginnings_of(&v4("a/model.gguf"));
}

fn shared_beginnings_of(model: &Path) {
    let engine = engine(model, 16, 400);
    let text = prompt(300, 250);
    let fork = |shared: usize, len: usize| -> Vec<TokenId> {
        text[..shared].iter().chain(text.iter().rev()).copied().take(len).collect()
    };
    let mut timeline = Timeline::with_images(engine.runner().unwrap(), 2);
    let mut plain = fresh(&engine);
    let mut check = |prompt: &[TokenId], reused: usize| {
        let report = timeline.sync(prompt, Want::Last, &mut NoWatcher).unwrap();
        assert_eq!((report.reused, report.computed), (reused, prompt.len() - reused));
        plain.clear();
        plain.sync(prompt, Want::Last, &mut NoWatcher).unwrap();
        assert!(timeline.last_logits() == plain.last_logits(), "{} tokens, {reused} reused", prompt.len());
        assert!(timeline.images().0 <= 2);
    };
    check(&text[..100], 0);
    // What is there already costs nothing at all.
    check(&text[..100], 100);
    check(&text[..200], 100);
    // An image of the first 100, and a few rows before it, as where a prompt ends in an opening tag that is not part of the history.
    check(&fork(97, 190), 97);
    check(&text[..260], 97);
    // Nothing that was kept is within the first 60.
    check(&fork(60, 80), 0);
    check(&fork(60, 90), 80);
    // A prompt known in full needs its last token for the logits.
    check(&fork(60, 85), 84);
    check(&fork(60, 300), 85);

    // Without images only the rings can go back.
    let mut bare = fresh(&engine);
    bare.sync(&text[..100], Want::Last, &mut NoWatcher).unwrap();
    bare.sync(&text[..200], Want::Last, &mut NoWatcher).unwrap();
    assert_eq!(bare.sync(&fork(195, 220), Want::Last, &mut NoWatcher).unwrap().reused, 195);
    assert_eq!(bare.sync(&fork(97, 150), Want::Last, &mut NoWatcher).unwrap().reused, 0);
}
