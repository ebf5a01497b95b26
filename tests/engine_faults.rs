//! Failing reads under a whole engine: one request fails with a name, the next gives the bits of an undisturbed run.
//! Owns no happy path. Surprising fact: a failed read is only met when the token that needs it comes, so faults cover whole tensors.

mod engine_rig;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ds4::engine::Engine;
use ds4::engine::options::{EngineOptions, Preload};
use ds4::models::Want;
use ds4::session::timeline::{NoWatcher, SessionError, Timeline};
use ds4::storage::gguf::GgufFile;
use ds4::storage::layout::Layout;
use ds4::storage::reader::ReaderChoice;
use ds4::storage::reader::fake::{FakeFault, FakeOptions, FakeReader};
use ds4::units::{Budget, ExpertIdx, TokenId};
use engine_rig::made_models::{b, folder};
use engine_rig::{Trail, difference, fake, open, options, over, prompt, trail};

const GENERATED: usize = 6;

fn layout() -> Layout {
    Layout::from_gguf(&GgufFile::open(b()).unwrap()).unwrap()
}

fn streaming(model: &Path) -> EngineOptions {
    EngineOptions {
        is_streaming: true,
        budget: Some(Budget::Slots(10)),
        preload: Preload::Cold,
        chunk: Some(16),
        ..options(model)
    }
}

struct Rig {
    engine: Engine,
    reader: Arc<FakeReader>,
    prompt: Vec<TokenId>,
    /// What an undisturbed engine answers.
    want: Trail,
    vocab: usize,
}

fn rig() -> Rig {
    let reader = fake(b(), FakeOptions::default());
    let engine = open(&over(streaming(b()), &reader));
    let vocab = engine.tokenizer().tokens_total();
    let prompt = prompt(60, vocab);
    let calm = open(&options(b()));
    let want = trail(&mut Timeline::new(calm.runner().unwrap()), &prompt, GENERATED).unwrap();
    Rig { engine, reader, prompt, want, vocab }
}

impl Rig {
    fn assert_undisturbed(&self, timeline: &mut Timeline, after: &str) {
        let found = trail(timeline, &self.prompt, GENERATED).unwrap_or_else(|e| panic!("after {after}: {e}"));
        assert!(found == self.want, "after {after}: {}", difference(&found, &self.want, self.vocab));
        let stats = self.engine.cache().unwrap().stats();
        assert_eq!((stats.slots_held, stats.slots_filling), (0, 0), "after {after}");
    }
}

/// One line that has all of `parts`.
fn assert_names(error: &SessionError, parts: &[&str]) {
    let text = error.to_string();
    assert!(!text.contains('\n') && !text.is_empty(), "{text:?}");
    for part in parts {
        assert!(text.contains(part), "{part:?} is missing in {text:?}");
    }
}

#[test]
fn a_broken_expert_fails_one_request_by_name() {
    let rig = rig();
    let mut timeline = Timeline::new(rig.engine.runner().unwrap());
    for layer in &layout().experts {
        let number = layer.layer.0;
        // Every expert of one layer, in each of its parts in turn.
        for (part, name) in [(0, "gate"), (1, "up"), (2, "down")] {
            for expert in 0..layer.experts {
                let extent = layer.extents(ExpertIdx(expert))[part];
                rig.reader.add_fault(FakeFault { offset: extent.offset + extent.len / 2, errno: libc::EIO, times: 1 });
            }
            timeline.clear();
            let error = trail(&mut timeline, &rig.prompt, GENERATED).err().unwrap();
            let what = format!("layer {number} ");
            assert_names(&error, &["fake.gguf", &what, "expert ", &format!("({name})"), "offset ", "os error 5"]);
            let offset = text_number(&error.to_string(), "offset ");
            let is_named = (0..layer.experts).any(|e| layer.extents(ExpertIdx(e))[part].offset == offset);
            assert!(is_named, "{offset} is where no expert of layer {number} begins: {error}");
            assert!(timeline.tokens().len() < rig.prompt.len(), "the failing chunk left no tokens");
            rig.reader.clear_faults();
            rig.assert_undisturbed(&mut timeline, &format!("a fault in {name} of layer {number}"));
        }
    }
}

fn text_number(text: &str, before: &str) -> u64 {
    let rest = &text[text.find(before).unwrap() + before.len()..];
    rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap()
}

#[test]
fn a_broken_row_fails_one_request_by_name() {
    let rig = rig();
    let mut timeline = Timeline::new(rig.engine.runner().unwrap());
    for table in &layout().tables {
        let end = table.offset + table.rows * u64::from(table.row_bytes);
        // All rows: which ones a prompt takes is the hash's business.
        for offset in (table.offset..end).step_by(512) {
            rig.reader.add_fault(FakeFault { offset, errno: libc::EIO, times: u32::MAX });
        }
        timeline.clear();
        let error = timeline.sync(&rig.prompt, Want::Last, &mut NoWatcher).unwrap_err();
        let layer = format!("table of layer {}", table.layer.0);
        assert_names(&error, &["fake.gguf", "row ", &layer, "offset ", "os error 5"]);
        let offset = text_number(&error.to_string(), "offset ");
        assert!((table.offset..end).contains(&offset), "{error}");
        rig.reader.clear_faults();
        rig.assert_undisturbed(&mut timeline, &layer);
    }
}

#[test]
fn a_fault_in_mid_answer_keeps_what_was_computed() {
    let rig = rig();
    let mut timeline = Timeline::new(rig.engine.runner().unwrap());
    timeline.sync(&rig.prompt, Want::Last, &mut NoWatcher).unwrap();
    let next = rig.want.chosen[0];
    // The token's rows fail when it is announced and appended.
    let table = layout().tables[0];
    let end = table.offset + table.rows * u64::from(table.row_bytes);
    for offset in (table.offset..end).step_by(512) {
        rig.reader.add_fault(FakeFault { offset, errno: libc::EIO, times: u32::MAX });
    }
    timeline.announce(next).unwrap();
    let error = timeline.append(&[next], Want::Last, &mut NoWatcher).unwrap_err();
    assert_names(&error, &["row ", "os error 5"]);
    assert_eq!(timeline.tokens(), rig.prompt, "the failed step left no trace");
    rig.reader.clear_faults();
    // Going on from here equals never having failed.
    let mut rest = Trail::default();
    for token in &rig.want.chosen {
        timeline.announce(*token).unwrap();
        timeline.append(&[*token], Want::All, &mut rest).unwrap();
    }
    let tail = &rig.want.bits[rig.prompt.len() * rig.vocab..];
    assert!(rest.bits == tail, "the answer differs after the fault");
}

#[test]
fn a_drive_that_loses_its_file_is_noticed_and_forgiven() {
    let rig = rig();
    let mut timeline = Timeline::new(rig.engine.runner().unwrap());
    timeline.sync(&rig.prompt, Want::Last, &mut NoWatcher).unwrap();
    let bytes = std::fs::metadata(b()).unwrap().len();
    rig.reader.truncate(bytes / 2);
    let error = timeline.append(&[5], Want::Last, &mut NoWatcher).unwrap_err();
    assert_names(&error, &["fake.gguf", "shortened", &bytes.to_string(), "restart"]);
    rig.reader.truncate(bytes);
    rig.reader.set_replaced(true);
    let error = timeline.append(&[5], Want::Last, &mut NoWatcher).unwrap_err();
    assert_names(&error, &["fake.gguf", "another file", "restart"]);
    rig.reader.set_replaced(false);
    rig.assert_undisturbed(&mut timeline, "the file came back");
}

/// A copy of the model that a test may spoil.
fn copy(name: &str) -> PathBuf {
    let path = folder().join(name);
    std::fs::copy(b(), &path).unwrap();
    path
}

/// Does something to the file of a running model.
type Spoil = fn(&Path);

#[test]
fn a_real_file_that_changes_fails_the_next_pass() {
    for (io, is_streaming) in [(ReaderChoice::Uring, true), (ReaderChoice::Pread, true), (ReaderChoice::Pread, false)] {
        let spoil: [(&str, &str, Spoil); 3] = [
            ("short", "it was shortened from", |path| {
                let file = std::fs::File::options().write(true).open(path).unwrap();
                file.set_len(file.metadata().unwrap().len() / 2).unwrap();
            }),
            ("replaced", "another file has taken its name", |path| {
                let other = path.with_extension("other");
                std::fs::copy(path, &other).unwrap();
                std::fs::rename(other, path).unwrap();
            }),
            ("deleted", "it was deleted", |path| std::fs::remove_file(path).unwrap()),
        ];
        for (name, why, spoil) in spoil {
            let path = copy(&format!("{name}-{io:?}-{is_streaming}.gguf"));
            let engine = open(&EngineOptions { io, is_streaming, ..streaming(&path) });
            let mut timeline = Timeline::new(engine.runner().unwrap());
            let prompt = prompt(30, timeline.vocab());
            timeline.sync(&prompt, Want::Last, &mut NoWatcher).unwrap();
            spoil(&path);
            let error = timeline.append(&[5], Want::Last, &mut NoWatcher).unwrap_err();
            assert_names(&error, &[path.to_str().unwrap(), why, "restart"]);
            assert_eq!(timeline.tokens(), prompt);
            let _ = std::fs::remove_file(path);
        }
    }
}
