//! Vocabularies for the text tests: from the vocabulary-only GGUF files and from the small `tokenizer.json` files beside them.
//! Test data only, so it trusts its input and panics on damage. Surprising fact: integration tests cannot share code but through a folder.
#![allow(dead_code)]

use std::collections::HashMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use ds4::text::tokenizer::VocabSource;
use serde_json::Value;

pub fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tokenizer").join(name)
}

pub fn read_json(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap()
}

/// A file of the shared reference data, or `None` with a notice where a checkout lacks it.
pub fn shared(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/golden").join(name);
    if !path.exists() {
        eprintln!("skipped: {} is not here", path.display());
        return None;
    }
    Some(path)
}

/// Metadata values that a vocabulary uses.
enum Meta {
    Text(String),
    Number(i64),
    Texts(Vec<String>),
    Numbers(Vec<i64>),
}

struct Cursor<'a> {
    bytes: &'a [u8],
}

impl Cursor<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (head, rest) = self.bytes.split_first_chunk::<N>().unwrap();
        self.bytes = rest;
        *head
    }

    fn length(&mut self) -> usize {
        u64::from_le_bytes(self.take()) as usize
    }

    fn text(&mut self) -> String {
        let length = self.length();
        let (head, rest) = self.bytes.split_at(length);
        self.bytes = rest;
        String::from_utf8(head.to_vec()).unwrap()
    }

    fn number(&mut self, kind: u32) -> i64 {
        match kind {
            0 | 1 | 7 => i64::from(self.take::<1>()[0]),
            2 | 3 => i64::from(u16::from_le_bytes(self.take())),
            4..=6 => i64::from(i32::from_le_bytes(self.take())),
            10..=12 => i64::from_le_bytes(self.take()),
            _ => panic!("metadata type {kind}"),
        }
    }

    fn value(&mut self) -> Meta {
        match u32::from_le_bytes(self.take()) {
            8 => Meta::Text(self.text()),
            9 => {
                let (kind, length) = (u32::from_le_bytes(self.take()), self.length());
                match kind {
                    8 => Meta::Texts((0..length).map(|_| self.text()).collect()),
                    _ => Meta::Numbers((0..length).map(|_| self.number(kind)).collect()),
                }
            }
            kind => Meta::Number(self.number(kind)),
        }
    }
}

/// The vocabulary of a gzipped GGUF file.
pub fn gguf_vocab(name: &str) -> VocabSource {
    let mut bytes = Vec::new();
    let file = std::fs::File::open(golden(name)).unwrap();
    flate2::read::GzDecoder::new(file).read_to_end(&mut bytes).unwrap();
    let mut cursor = Cursor { bytes: &bytes };
    assert_eq!(&cursor.take::<4>(), b"GGUF");
    let (_version, _tensors, entries) = (cursor.take::<4>(), cursor.length(), cursor.length());
    let mut meta: HashMap<String, Meta> = (0..entries).map(|_| (cursor.text(), cursor.value())).collect();
    let mut text = |key: &str| match meta.remove(key) {
        Some(Meta::Text(text)) => Some(text),
        _ => None,
    };
    let mut source = VocabSource {
        model: text("tokenizer.ggml.model").unwrap(),
        pre: text("tokenizer.ggml.pre").unwrap(),
        chat_template: text("tokenizer.chat_template"),
        ..VocabSource::default()
    };
    let mut texts = |key: &str| match meta.remove(key) {
        Some(Meta::Texts(texts)) => texts,
        _ => panic!("{key}"),
    };
    source.tokens = texts("tokenizer.ggml.tokens");
    source.merges = texts("tokenizer.ggml.merges");
    if let Some(Meta::Numbers(types)) = meta.get("tokenizer.ggml.token_type") {
        source.token_types = types.iter().map(|&kind| kind as i32).collect();
    }
    let number = |key: &str| match meta.get(key) {
        Some(Meta::Number(number)) => Some(*number as u32),
        _ => None,
    };
    source.bos = number("tokenizer.ggml.bos_token_id");
    source.eos = number("tokenizer.ggml.eos_token_id");
    source.pad = number("tokenizer.ggml.padding_token_id");
    source.add_bos = number("tokenizer.ggml.add_bos_token") == Some(1);
    source
}

/// The vocabulary of a `tokenizer.json` whose splitting rule is called `pre`.
pub fn json_vocab(path: &Path, pre: &str) -> VocabSource {
    let json = read_json(path);
    let mut by_id: Vec<(usize, String, i32)> = Vec::new();
    for (token, id) in json["model"]["vocab"].as_object().unwrap() {
        by_id.push((id.as_u64().unwrap() as usize, token.clone(), 1));
    }
    for token in json["added_tokens"].as_array().unwrap() {
        let (id, text) = (token["id"].as_u64().unwrap() as usize, token["content"].as_str().unwrap());
        by_id.retain(|(other, _, _)| *other != id);
        by_id.push((id, text.to_owned(), 3));
    }
    by_id.sort();
    assert!(by_id.iter().enumerate().all(|(place, (id, _, _))| place == *id));
    let merge = |merge: &Value| match merge {
        Value::String(merge) => merge.clone(),
        pair => format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()),
    };
    VocabSource {
        model: "gpt2".into(),
        pre: pre.into(),
        token_types: by_id.iter().map(|entry| entry.2).collect(),
        tokens: by_id.into_iter().map(|entry| entry.1).collect(),
        merges: json["model"]["merges"].as_array().unwrap().iter().map(merge).collect(),
        ..VocabSource::default()
    }
}
