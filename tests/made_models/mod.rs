//! Model files for tests, converted from the golden checkpoints once per test program.
//! Owns the files; never runs a model. Surprising fact: they lie under the build folder and not in /tmp, which may be a file system
//! without direct reads.
#![allow(dead_code)] // Each test binary uses its own part of this.

#[path = "../checkpoint/mod.rs"]
pub mod checkpoint;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use checkpoint::{Checkpoint, fixture, wide};
use ds4::storage::convert::{ALIGNMENT, BaseRecipe, Options, Recipe, convert};
use serde_json::{Value, json};

/// A chat format without a reasoning switch, for vocabularies that lack the special tokens of the built-in one.
pub const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}\
    {% if m['role'] == 'system' %}{{ m['content'] }}\
    {% elif m['role'] == 'user' %}<\u{ff5c}User\u{ff5c}>{{ m['content'] }}\
    {% else %}<\u{ff5c}Assistant\u{ff5c}>{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}\
    {% if add_generation_prompt %}<\u{ff5c}Assistant\u{ff5c}>{% endif %}";

/// A folder of this test program's own, under the build folder.
pub fn folder() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(env!("CARGO_CRATE_NAME"));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// Converts `checkpoint` to `name`.gguf.
pub fn make(name: &str, checkpoint: &Checkpoint, base: BaseRecipe) -> PathBuf {
    let (input, output) = (folder().join(name), folder().join(format!("{name}.gguf")));
    checkpoint.save(&input);
    let options =
        Options { recipe: Recipe::base(base), importance: None, output: &output, force: true, alignment: ALIGNMENT };
    convert(&input, &options, &mut |_, _| ControlFlow::Continue(())).unwrap();
    output
}

/// Fixture `b` (five layers, eight experts, two row tables) with a chat template.
pub fn b_checkpoint() -> Checkpoint {
    let mut b = Checkpoint::load(&fixture("b"));
    let mut settings: Value = serde_json::from_slice(&b.files["tokenizer_config.json"]).unwrap();
    settings["chat_template"] = json!(TEMPLATE);
    b.files.insert("tokenizer_config.json".into(), settings.to_string().into_bytes());
    b
}

/// The file of [`b_checkpoint`], lossless.
pub fn b() -> &'static Path {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    FILE.get_or_init(|| make("b", &b_checkpoint(), BaseRecipe::Native))
}

/// Fixture `b` without a chat template, its vocabulary completed for the built-in prompt rules.
pub fn b_rules() -> &'static Path {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    FILE.get_or_init(|| {
        let mut b = Checkpoint::load(&fixture("b"));
        let mut tokenizer: Value = serde_json::from_slice(&b.files["tokenizer.json"]).unwrap();
        let last = tokenizer["added_tokens"].as_array_mut().unwrap().last_mut().unwrap();
        last["content"] = json!("<\u{ff5c}System\u{ff5c}>");
        b.files.insert("tokenizer.json".into(), tokenizer.to_string().into_bytes());
        make("b-rules", &b, BaseRecipe::Native)
    })
}

/// The first `size` words of fixture `b`'s vocabulary, without merges: enough to open a model that is fed token ids.
fn small_vocabulary(size: u64) -> Vec<u8> {
    let mut json: Value = serde_json::from_slice(&std::fs::read(fixture("b").join("tokenizer.json")).unwrap()).unwrap();
    json["model"]["vocab"].as_object_mut().unwrap().retain(|_, id| id.as_u64().unwrap() < size);
    json["model"]["merges"] = json!([]);
    json["added_tokens"].as_array_mut().unwrap().retain(|t| t["id"].as_u64().unwrap() < size);
    json.to_string().into_bytes()
}

/// Fixture `a` (six layers, eight experts, three a token, no tables), lossless.
pub fn a() -> &'static Path {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    FILE.get_or_init(|| {
        let mut a = Checkpoint::load(&fixture("a"));
        a.files.insert("tokenizer.json".into(), small_vocabulary(512));
        make("a", &a, BaseRecipe::Native)
    })
}

/// Two layers of 16 experts in 2-bit formats, with a table.
pub fn wide_q2() -> &'static Path {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    FILE.get_or_init(|| {
        // Every byte needs a token, so the vocabulary grows five times; other signs keep the copies of a row apart.
        const VOCAB: usize = 320;
        let mut wide = wide(16);
        for name in ["embed.weight", "head.weight"] {
            let stored = wide.tensors.get_mut(name).unwrap();
            let copy = |times: usize| {
                let flip =
                    move |(at, byte): (usize, &u8)| byte ^ if at % 2 == 1 && at / 2 % 5 < times { 0x80 } else { 0 };
                stored.bytes.iter().enumerate().map(flip).collect::<Vec<u8>>()
            };
            stored.bytes = (0..VOCAB / stored.shape[0]).flat_map(copy).collect();
            stored.shape[0] = VOCAB;
        }
        wide.set("vocab_size", json!(VOCAB));
        wide.set("engram_compressed_vocab_size", json!(VOCAB));
        let mut engram: Value = serde_json::from_slice(&wide.files["engram.json"]).unwrap();
        engram["token_map"] = json!((0..VOCAB).collect::<Vec<_>>());
        wide.files.insert("engram.json".into(), engram.to_string().into_bytes());
        wide.files.insert("tokenizer.json".into(), small_vocabulary(VOCAB as u64));
        make("wide", &wide, BaseRecipe::Q2)
    })
}
