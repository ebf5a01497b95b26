//! Checksums of what is streamed: made by `ds4-gguf checksum`, compared by `ds4 --verify-reads`.
//! Never believes a sidecar. Surprising fact: a wrong bit that is gone in a second read costs nothing but a counter.

mod cli_rig;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use cli_rig::made_models::{a, b, folder, wide_q2};
use cli_rig::{ds4_b, json, scratch};
use ds4::engine::Engine;
use ds4::engine::options::{EngineOptions, Preload};
use ds4::models::Want;
use ds4::session::timeline::{NoWatcher, SessionError, Timeline};
use ds4::storage::checksum::Checksums;
use ds4::storage::gguf::GgufFile;
use ds4::storage::layout::{Extent, Layout};
use ds4::storage::reader::Alignment;
use ds4::storage::reader::Reader;
use ds4::storage::reader::fake::{FakeFlip, FakeOptions, FakeReader};
use ds4::units::{Budget, ExpertIdx, TokenId};

/// Makes the sidecar of `model` and returns its path.
fn sums(model: &Path, name: &str) -> PathBuf {
    let path = folder().join(name);
    let out = Command::new(env!("CARGO_BIN_EXE_ds4-gguf"))
        .arg("checksum")
        .arg(model)
        .args(["--force", "-o"])
        .arg(&path)
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert!(String::from_utf8_lossy(&out.stderr).contains("experts"));
    path
}

fn layout() -> Layout {
    Layout::from_gguf(&GgufFile::open(b()).unwrap()).unwrap()
}

struct Rig {
    engine: Engine,
    reader: Arc<FakeReader>,
    prompt: Vec<TokenId>,
    want: Vec<u32>,
}

/// Model b on a fake drive behind a verifying reader; with what an undisturbed run answers.
fn rig(name: &str, alignment: Alignment) -> Rig {
    let reader = FakeReader::new(std::fs::read(b()).unwrap(), FakeOptions { alignment, ..FakeOptions::default() });
    let options = EngineOptions {
        ctx: Some(512),
        threads: Some(1),
        is_streaming: true,
        budget: Some(Budget::Slots(10)),
        preload: Preload::Cold,
        chunk: Some(16),
        verify: Some(sums(b(), name)),
        reader: Some(Arc::clone(&reader) as Arc<dyn Reader>),
        ..EngineOptions::new(b())
    };
    let open = |o: &EngineOptions| {
        Engine::open(o, &mut |_| {}, &|_, _, _| std::ops::ControlFlow::Continue(())).unwrap_or_else(|e| panic!("{e}"))
    };
    let engine = open(&options);
    let vocab = engine.tokenizer().tokens_total() as u32;
    let prompt: Vec<TokenId> = (0..40).map(|i| 3 + i * 7919 % (vocab - 3)).collect();
    let plain = open(&EngineOptions { verify: None, reader: None, ..options });
    let want = logits(&mut Timeline::new(plain.runner().unwrap()), &prompt).unwrap();
    Rig { engine, reader, prompt, want }
}

fn logits(timeline: &mut Timeline, prompt: &[TokenId]) -> Result<Vec<u32>, SessionError> {
    timeline.sync(prompt, Want::Last, &mut NoWatcher)?;
    Ok(timeline.last_logits().iter().map(|v| v.to_bits()).collect())
}

const ALIGNMENTS: [Alignment; 3] =
    [Alignment::NONE, Alignment { offset: 512, memory: 512 }, Alignment { offset: 4096, memory: 512 }];

#[test]
fn a_sound_file_gives_the_same_answer_and_every_read_is_counted() {
    let (sidecar, folder) = (sums(b(), "sound.ds4sum"), scratch("sound"));
    let stats = folder.join("stats.json");
    let args = ["-p", "hello", "-n", "12", "--ssd-streaming", "--ssd-streaming-cache-experts", "10"];
    let plain = ds4_b(&args).ok();
    let mut more: Vec<&str> = args.to_vec();
    more.extend(["--verify-reads", "--checksums", sidecar.to_str().unwrap(), "--stats-json", stats.to_str().unwrap()]);
    let checked = ds4_b(&more).ok();
    assert_eq!(plain.stdout, checked.stdout);
    assert!(checked.stderr.contains("0 mismatches"), "{}", checked.stderr);
    let stats = json(&stats);
    let number = |key: &str| stats["verify"][key].as_u64().unwrap();
    let expert_reads = 3 * (stats["expert_misses"].as_u64().unwrap() + stats["preloaded_experts"].as_u64().unwrap());
    assert_eq!(number("reads"), expert_reads + stats["row_reads"].as_u64().unwrap());
    assert!(number("bytes") > 0 && number("mismatches") == 0 && number("unchecked") == 0, "{stats}");
}

#[test]
fn a_wrong_bit_that_goes_away_is_repaired_in_silence() {
    for (i, alignment) in ALIGNMENTS.into_iter().enumerate() {
        let rig = rig(&format!("repaired-{i}.ds4sum"), alignment);
        for extent in spots() {
            rig.reader.add_flip(FakeFlip { offset: extent.offset + extent.len / 2, times: 1 });
        }
        let found = logits(&mut Timeline::new(rig.engine.runner().unwrap()), &rig.prompt).unwrap();
        assert!(found == rig.want, "{alignment:?}");
        let counters = rig.engine.verify().unwrap().snapshot();
        assert!(counters.mismatches > 0 && counters.repaired > 0 && counters.failed == 0, "{counters:?}");
    }
}

/// Every part of every expert of layer 2.
fn spots() -> Vec<Extent> {
    let layer = layout().experts[2];
    (0..layer.experts).flat_map(|e| layer.extents(ExpertIdx(e))).collect()
}

#[test]
fn a_wrong_bit_that_stays_fails_one_request_by_name() {
    for (i, alignment) in ALIGNMENTS.into_iter().enumerate() {
        let rig = rig(&format!("failed-{i}.ds4sum"), alignment);
        let mut timeline = Timeline::new(rig.engine.runner().unwrap());
        for extent in spots() {
            rig.reader.add_flip(FakeFlip { offset: extent.offset + 1, times: u32::MAX });
        }
        let error = logits(&mut timeline, &rig.prompt).unwrap_err().to_string();
        for part in ["layer 2 ", "expert ", "offset ", "fake.gguf", "its checksum is", "in two reads"] {
            assert!(error.contains(part), "{part:?} is missing in {error:?}");
        }
        // Whichever part lands first.
        assert!(["(gate)", "(up)", "(down)"].iter().any(|part| error.contains(part)), "{error:?}");
        rig.reader.clear_faults();
        timeline.clear();
        assert!(logits(&mut timeline, &rig.prompt).unwrap() == rig.want, "{alignment:?}: the next request works");
        let counters = rig.engine.verify().unwrap().snapshot();
        assert!(counters.failed > 0 && counters.mismatches >= 2 * counters.failed, "{counters:?}");
    }
}

#[test]
fn rows_are_checked_in_whole_blocks() {
    for (i, alignment) in ALIGNMENTS.into_iter().enumerate() {
        let rig = rig(&format!("rows-{i}.ds4sum"), alignment);
        let mut timeline = Timeline::new(rig.engine.runner().unwrap());
        // One wrong byte a block of the first table: at places that no row asked for needs to cover.
        let table = layout().tables[0];
        let end = table.offset + table.rows * u64::from(table.row_bytes);
        for offset in (table.offset..end).step_by(4096) {
            rig.reader.add_flip(FakeFlip { offset, times: u32::MAX });
        }
        let error = logits(&mut timeline, &rig.prompt).unwrap_err().to_string();
        let layer = format!("of the table of layer {}", table.layer.0);
        for part in ["row ", &layer, "its checksum is"] {
            assert!(error.contains(part), "{part:?} is missing in {error:?}");
        }
        rig.reader.clear_faults();
        timeline.clear();
        assert!(logits(&mut timeline, &rig.prompt).unwrap() == rig.want, "{alignment:?}: the next request works");
    }
}

#[test]
fn a_hundred_failures_leak_no_slot() {
    let rig = rig("leak.ds4sum", Alignment { offset: 512, memory: 512 });
    let mut timeline = Timeline::new(rig.engine.runner().unwrap());
    for round in 0..100 {
        for extent in spots() {
            rig.reader.add_flip(FakeFlip { offset: extent.offset + 7, times: u32::MAX });
        }
        timeline.clear();
        let failed = logits(&mut timeline, &rig.prompt[..8]).is_err();
        assert!(failed || round > 0, "nothing was read");
        rig.reader.clear_faults();
        timeline.clear();
        logits(&mut timeline, &rig.prompt[..8]).unwrap();
        let stats = rig.engine.cache().unwrap().stats();
        assert_eq!((stats.slots_held, stats.slots_filling), (0, 0), "round {round}");
    }
}

/// Runs model b with a sidecar that must be refused.
fn refused(sidecar: &Path, parts: &[&str]) {
    let args = ["-p", "x", "-n", "1", "--ssd-streaming", "--verify-reads", "--checksums", sidecar.to_str().unwrap()];
    ds4_b(&args).failed(1, parts);
}

#[test]
fn sidecars_that_do_not_fit_are_refused() {
    let folder = scratch("sidecars");
    let good = std::fs::read(sums(b(), "good.ds4sum")).unwrap();
    let put = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    refused(&folder.join("none"), &["none", "no checksums of this model", "ds4-gguf checksum"]);
    refused(&folder, &["ds4-gguf checksum"]);
    refused(&put("empty", &[]), &["too short"]);
    refused(&put("text", &[b'x'; 500]), &["not a file of checksums"]);
    refused(&sums(a(), "of-a.ds4sum"), &["another model file"]);
    refused(&sums(wide_q2(), "of-wide.ds4sum"), &["another model file"]);
    for cut in [good.len() - 1, good.len() / 2, 60] {
        refused(&put("cut", &good[..cut]), &["bytes, expected"]);
    }
    refused(&put("longer", &[&good[..], &[0]].concat()), &["bytes, expected"]);
    for at in [41, 100, good.len() / 2, good.len() - 20, good.len() - 1] {
        let mut altered = good.clone();
        altered[at] ^= 4;
        refused(&put("altered", &altered), &["make it again with ds4-gguf checksum"]);
    }
    // Without streaming nothing would be compared.
    ds4_b(&["-p", "x", "--verify-reads"]).failed(2, &["--ssd-streaming"]);
    ds4_b(&["-p", "x", "--ssd-streaming", "--checksums", "y"]).failed(2, &["--verify-reads"]);
}

#[test]
fn the_sums_do_not_depend_on_how_they_are_made() {
    let file = GgufFile::open(b()).unwrap();
    let made = Checksums::of_model(&file, &layout(), &mut |_, _| std::ops::ControlFlow::Continue(())).unwrap();
    let read = Checksums::open(&sums(b(), "twice.ds4sum"), &file, &layout()).unwrap();
    assert_eq!(made, read);
}

#[test]
fn an_existing_sidecar_is_kept() {
    let path = sums(b(), "kept.ds4sum");
    let before = std::fs::read(&path).unwrap();
    let run = |args: &[&str]| {
        let out = Command::new(env!("CARGO_BIN_EXE_ds4-gguf")).arg("checksum").args(args).output().unwrap();
        (out.status.code(), String::from_utf8(out.stderr).unwrap())
    };
    let (b, path_text) = (b().to_str().unwrap(), path.to_str().unwrap());
    let (code, stderr) = run(&[b, "-o", path_text]);
    assert!(code == Some(1) && stderr.contains("exists already; use --force"), "{stderr}");
    assert_eq!(std::fs::read(&path).unwrap(), before);
    let (code, stderr) = run(&["/no/such/file", "-o", "/tmp/never"]);
    assert!(code == Some(1) && stderr.contains("/no/such/file"), "{stderr}");
    let (code, stderr) = run(&[b, "-o", "/no/such/folder/x"]);
    assert!(code == Some(1) && stderr.contains("/no/such/folder/x"), "{stderr}");
}
