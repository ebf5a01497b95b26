//! A vocabulary that needs no training: the byte alphabet, pairs of letters with their merges, made-up words, special tokens.
//! Owns the `tokenizer.*` keys of synthetic files; never tokenises. Surprising fact: most words cannot come out of a text, since no merge
//! makes them, but a model may say them, and every id decodes to something readable.

use super::SynthError;
use crate::storage::convert::Arch;
use crate::storage::gguf::{Metadata, StringArray};
use crate::text::byte_alphabet::char_of;

const TYPE_NORMAL: i32 = 1;
const TYPE_SPECIAL: i32 = 3;

/// Special tokens with the lowest ids: begin, end, padding.
const FIRST: [&str; 3] = [
    "<\u{ff5c}begin\u{2581}of\u{2581}sentence\u{ff5c}>",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
    "<\u{ff5c}\u{2581}pad\u{2581}\u{ff5c}>",
];
/// Special tokens of the chat format, behind the bytes.
const MARKUP: [&str; 7] = [
    "<\u{ff5c}System\u{ff5c}>",
    "<\u{ff5c}User\u{ff5c}>",
    "<\u{ff5c}Assistant\u{ff5c}>",
    "<\u{ff5c}latest_reminder\u{ff5c}>",
    "<think>",
    "</think>",
    "\u{ff5c}DSML\u{ff5c}",
];
const ONSETS: &[u8; 16] = b"bcdfghjklmnprstv";
const VOWELS: &[u8; 5] = b"aeiou";
/// Syllables of made-up words: 80 to the third is more than any vocabulary here.
const SYLLABLES: usize = ONSETS.len() * VOWELS.len();

/// Adds the keys of a vocabulary of `size` tokens.
pub(super) fn add(m: &mut Metadata, arch: Arch, size: u32) -> Result<(), SynthError> {
    let needed = (FIRST.len() + 256 + MARKUP.len()) as u32;
    if size < needed {
        return Err(SynthError::Vocabulary { found: size, needed });
    }
    let special = |token: &&str| ((*token).to_owned(), TYPE_SPECIAL);
    let mut tokens: Vec<(String, i32)> = FIRST.iter().map(special).collect();
    tokens.extend((0..=255u8).map(|byte| (char_of(byte).to_string(), TYPE_NORMAL)));
    tokens.extend(MARKUP.iter().map(special));
    let mut merges = Vec::new();
    let space = char_of(b' ');
    let starts = (b'a'..=b'z').map(|c| (space, char::from(c)));
    let pairs = (b'a'..=b'z').flat_map(|a| (b'a'..=b'z').map(move |b| (char::from(a), char::from(b))));
    for (left, right) in starts.chain(pairs).take(size as usize - tokens.len()) {
        tokens.push((format!("{left}{right}"), TYPE_NORMAL));
        merges.push(format!("{left} {right}"));
    }
    let words = (0..).map(|n| (word(n, space), TYPE_NORMAL)).take(size as usize - tokens.len());
    tokens.extend(words);
    m.insert("tokenizer.ggml.model", "gpt2");
    m.insert("tokenizer.ggml.pre", arch.splitting());
    m.insert("tokenizer.ggml.tokens", tokens.iter().map(|(text, _)| text).collect::<StringArray>());
    m.insert("tokenizer.ggml.token_type", tokens.iter().map(|(_, ty)| *ty).collect::<Vec<i32>>());
    m.insert("tokenizer.ggml.merges", merges.iter().collect::<StringArray>());
    m.insert("tokenizer.ggml.bos_token_id", 0u32);
    m.insert("tokenizer.ggml.eos_token_id", 1u32);
    m.insert("tokenizer.ggml.padding_token_id", 2u32);
    m.insert("tokenizer.ggml.add_bos_token", true);
    m.insert("tokenizer.ggml.add_eos_token", false);
    Ok(())
}

/// Word number `n`: a space and three syllables or more.
fn word(mut n: usize, space: char) -> String {
    let mut text = String::from(space);
    for _ in 0..3 {
        let syllable = n % SYLLABLES;
        n /= SYLLABLES;
        text.push(char::from(ONSETS[syllable / VOWELS.len()]));
        text.push(char::from(VOWELS[syllable % VOWELS.len()]));
    }
    if n > 0 {
        text.push_str(&n.to_string());
    }
    text
}
