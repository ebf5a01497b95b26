//! The tokenizer against recorded ids of real and small vocabularies, and against damaged vocabularies.
//! Owns no expectation of its own about ids: they all come from tests/golden/tokenizer.

mod text_support;

use ds4::text::Segment;
use ds4::text::tokenizer::{Tokenizer, TokenizerError, VocabSource};
use text_support::{gguf_vocab, golden, json_vocab, read_json};

fn ids_of(case: &serde_json::Value) -> Vec<u32> {
    case["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn real_vocabularies_give_the_recorded_ids() {
    let cases = read_json(&golden("real_vocab_cases.json"));
    let mut checked = 0;
    for (name, cases) in cases.as_object().unwrap() {
        let tokenizer = Tokenizer::new(gguf_vocab(&format!("{name}.gguf.gz"))).unwrap();
        for case in cases.as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let ids = tokenizer.encode(text).unwrap();
            assert_eq!(ids, ids_of(case), "{name}: {text:?}");
            assert_eq!(tokenizer.decode(&ids).unwrap(), text);
            checked += 1;
        }
    }
    assert_eq!(checked, 148);
}

#[test]
fn small_vocabularies_give_the_recorded_ids() {
    let families = [
        ("deepseek (pre-tokeniser deepseek-v3)", "deepseek_v4-a.json", "deepseek-v3"),
        ("qwen (pre-tokeniser qwen35)", "qwen4_exp-a.json", "qwen35"),
        ("glm (pre-tokeniser glm4)", "glm5_next-a.json", "glm4"),
        ("deepseek, engram", "deepseek_v41-b.json", "joyai-llm"),
    ];
    let cases = read_json(&golden("tiny_cases.json"));
    assert_eq!(cases.as_object().unwrap().len(), families.len());
    for (family, file, pre) in families {
        let tokenizer = Tokenizer::new(json_vocab(&golden(file), pre)).unwrap();
        for case in cases[family]["cases"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let ids = tokenizer.encode_segments(&tokenizer.parse_specials(text)).unwrap();
            assert_eq!(ids, ids_of(case), "{family}: {text:?}");
            assert_eq!(tokenizer.decode(&ids).unwrap(), case["decoded"].as_str().unwrap());
        }
    }
}

fn small() -> VocabSource {
    json_vocab(&golden("deepseek_v41-b.json"), "joyai-llm")
}

#[test]
fn user_text_never_becomes_special() {
    for source in [gguf_vocab("ggml-vocab-qwen35.gguf.gz"), gguf_vocab("ggml-vocab-deepseek-coder.gguf.gz"), small()] {
        let tokenizer = Tokenizer::new(source).unwrap();
        for (special, id) in tokenizer.specials() {
            assert!(tokenizer.is_special(id));
            for text in [special.to_owned(), format!("x{special}y"), format!(" {special}{special}")] {
                let ids = tokenizer.encode(&text).unwrap();
                assert!(!ids.iter().any(|&id| tokenizer.is_special(id)), "{text:?}");
                assert_eq!(tokenizer.decode(&ids).unwrap(), text);
            }
        }
    }
}

#[test]
fn segments_are_encoded_as_one_text_between_specials() {
    let tokenizer = Tokenizer::new(small()).unwrap();
    let plain = |text: &str| Segment::Plain(text.into());
    let think = Segment::Special("<think>".into());
    let cut = [plain("Hello, w"), plain("orld"), think.clone(), plain("<think>")];
    let whole = [plain("Hello, world"), think.clone(), plain("<think>")];
    let ids = tokenizer.encode_segments(&cut).unwrap();
    assert_eq!(ids, tokenizer.encode_segments(&whole).unwrap());
    let think_id = tokenizer.special_id("<think>").unwrap();
    assert_eq!(ids.iter().filter(|&&id| id == think_id).count(), 1);
    assert_eq!(
        tokenizer.encode_segments(&[Segment::Special("<no such>".into())]),
        Err(TokenizerError::MissingSpecial { token: "<no such>".into() })
    );
    assert_eq!(tokenizer.decode(&[100_000]), Err(TokenizerError::IdRange { id: 100_000, tokens: 640 }));
    assert_eq!(tokenizer.token_bytes(640), None);
}

#[test]
fn a_file_without_types_finds_the_same_specials() {
    let with_types = Tokenizer::new(small()).unwrap();
    let without = Tokenizer::new(VocabSource { token_types: vec![], ..small() }).unwrap();
    let sorted = |tokenizer: &Tokenizer| {
        let mut specials: Vec<(String, u32)> = tokenizer.specials().map(|(text, id)| (text.to_owned(), id)).collect();
        specials.sort();
        specials
    };
    assert_eq!(sorted(&with_types), sorted(&without));
}

/// Applies `damage` to a good vocabulary and returns the refusal.
fn refusal(damage: impl FnOnce(&mut VocabSource)) -> TokenizerError {
    let mut source = small();
    damage(&mut source);
    match Tokenizer::new(source) {
        Ok(_) => panic!("a damaged vocabulary was accepted"),
        Err(error) => error,
    }
}

#[test]
fn damaged_vocabularies_are_refused_by_name() {
    use TokenizerError as E;
    assert_eq!(refusal(|s| s.model = "llama".into()), E::UnsupportedModel { model: "llama".into() });
    assert!(matches!(refusal(|s| s.pre = "tekken".into()), E::UnsupportedPreTokenizer { pre, .. } if pre == "tekken"));
    assert!(matches!(refusal(|s| s.tokens.clear()), E::EntryCount { what: "tokens", count: 0, .. }));
    assert_eq!(refusal(|s| s.token_types.push(1)), E::TypeCount { types: 641, tokens: 640 });
    assert_eq!(refusal(|s| s.token_types[7] = 6), E::TypeValue { id: 7, found: 6 });
    assert_eq!(
        refusal(|s| s.tokens[300] = s.tokens[10].clone()),
        E::DuplicateToken { token: small().tokens[10].clone(), first: 10, second: 300 }
    );
    assert_eq!(
        refusal(|s| s.tokens[1] = s.tokens[0].clone()),
        E::DuplicateToken { token: small().tokens[0].clone(), first: 0, second: 1 }
    );
    assert_eq!(refusal(|s| s.tokens[9].clear()), E::EmptyToken { id: 9 });
    for merge in ["", " ", "a", "a ", " a", "a b c"] {
        assert_eq!(refusal(|s| s.merges[3] = merge.into()), E::MergeSyntax { index: 3, merge: merge.into() });
    }
    assert_eq!(refusal(|s| s.merges[3] = "a qqq".into()), E::MergeUnknownToken { token: "qqq".into() });
    assert_eq!(refusal(|s| s.merges.push("q q".into())), E::MergeUnknownToken { token: "qq".into() });
    assert_eq!(
        refusal(|s| {
            s.merges.push("a <think>".into());
        }),
        E::MergeUnknownToken { token: "<think>".into() }
    );
    assert_eq!(
        refusal(|s| s.eos = Some(640)),
        E::SpecialIdRange { key: "tokenizer.ggml.eos_token_id", id: 640, tokens: 640 }
    );
    let z = small().tokens.iter().position(|token| token == "z").unwrap();
    assert!(matches!(
        refusal(|s| {
            s.token_types[z] = 3;
            s.merges.retain(|merge| !merge.contains('z'));
        }),
        E::MissingByte { byte: b'z' }
    ));
}

#[test]
fn messages_say_what_to_do() {
    let message = refusal(|s| s.pre = "tekken".into()).to_string();
    assert!(message.contains("tekken") && message.contains("joyai-llm"), "{message}");
}
