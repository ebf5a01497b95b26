//! Byte-level BPE over the vocabulary of a model file. Owns the way from text to ids and back; never reads a file.
//! Surprising fact: special tokens are kept out of the merging vocabulary altogether, so no text can produce one by merging;
//! but a vocabulary may add ordinary text to itself ("user defined": a letter, a run of spaces), and that is cut out of any text.

use std::collections::{HashMap, HashSet};

use thiserror::Error;
use tokenizers::Model;
use tokenizers::models::bpe::{BPE, Vocab};

use super::byte_alphabet;
use super::pre_tokenizer::PreTokenizer;
use super::{Segment, push_plain};
use crate::units::TokenId;

/// Most tokens and most merges that are believed. The largest vocabulary in use has 262,144.
const ENTRIES_MAX: usize = 4 << 20;

/// `tokenizer.ggml.token_type`: an ordinary token, made by merging.
const TYPE_NORMAL: i32 = 1;
/// Added by hand. Converters give this type to `<think>` as well as to a plain letter, see [`is_markup`].
const TYPE_USER_DEFINED: i32 = 4;

/// How text gets to a token.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// By merging.
    Ordinary,
    /// By its text, wherever it occurs.
    Literal,
    /// Only by a [`Segment::Special`].
    Special,
}

/// Whether a hand-added token steers the model, so that a user must not be able to write it. Real vocabularies frame all of
/// those (`<think>`, `[gMASK]`, the bars of DSML); what they add without a frame is text that merging would miss.
fn is_markup(token: &str) -> bool {
    token.contains(['<', '>', '[', ']', '{', '}', '|', '\u{ff5c}'])
}

/// What a model file says about its tokenizer, as plain data.
#[derive(Clone, Debug, Default)]
pub struct VocabSource {
    /// `tokenizer.ggml.model`; byte-level BPE is called `gpt2`.
    pub model: String,
    /// `tokenizer.ggml.pre`: name of the splitting rule.
    pub pre: String,
    /// `tokenizer.ggml.tokens`, by id: ordinary ones in the byte-level alphabet, special ones as they read.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.token_type`, by id; may be empty where a file has none.
    pub token_types: Vec<i32>,
    /// `tokenizer.ggml.merges`: "left right", best first.
    pub merges: Vec<String>,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos: Option<TokenId>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos: Option<TokenId>,
    /// `tokenizer.ggml.padding_token_id`.
    pub pad: Option<TokenId>,
    /// `tokenizer.ggml.add_bos_token`.
    pub add_bos: bool,
    /// `tokenizer.chat_template`.
    pub chat_template: Option<String>,
}

/// Why a vocabulary cannot be used, or a text or id cannot be mapped.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum TokenizerError {
    #[error("tokenizer.ggml.model is '{model}', this engine reads byte-level BPE ('gpt2'); convert the file again")]
    UnsupportedModel { model: String },
    #[error("tokenizer.ggml.pre is '{pre}', which this engine does not know; it knows {known}")]
    UnsupportedPreTokenizer { pre: String, known: String },
    #[error("the vocabulary has {count} {what}, expected 1 to {max}; the file is damaged")]
    EntryCount { what: &'static str, count: usize, max: usize },
    #[error("tokenizer.ggml.token_type has {types} entries for {tokens} tokens; the file is damaged")]
    TypeCount { types: usize, tokens: usize },
    #[error("token {id} has type {found} in tokenizer.ggml.token_type, expected 1 to 5; the file is damaged")]
    TypeValue { id: usize, found: i32 },
    #[error("tokens {first} and {second} are both '{token}'; the file is damaged")]
    DuplicateToken { token: String, first: usize, second: usize },
    #[error("token {id} is empty; the file is damaged")]
    EmptyToken { id: usize },
    #[error("merge {index} ('{merge}') is not two tokens with a space between; the file is damaged")]
    MergeSyntax { index: usize, merge: String },
    #[error("merges name or make '{token}', which is not an ordinary token; the file is damaged")]
    MergeUnknownToken { token: String },
    #[error("no token stands for byte 0x{byte:02x}, so some text could not be encoded; the file is damaged")]
    MissingByte { byte: u8 },
    #[error("{key} is {id}, but the vocabulary has {tokens} tokens; the file is damaged")]
    SpecialIdRange { key: &'static str, id: TokenId, tokens: usize },
    #[error(
        "the prompt needs the special token '{token}', which this vocabulary lacks; use a prompt format of this model"
    )]
    MissingSpecial { token: String },
    #[error("token id {id} is outside the vocabulary of {tokens}")]
    IdRange { id: TokenId, tokens: usize },
    #[error("byte-pair merging failed: {reason}")]
    Merging { reason: String },
}

/// A tokenizer made from a [`VocabSource`].
pub struct Tokenizer {
    bpe: BPE,
    pre_tokenizer: PreTokenizer,
    /// Bytes of all tokens, one after another; token `id` is `starts[id]..starts[id + 1]`.
    bytes: Vec<u8>,
    starts: Vec<u32>,
    /// Bytes of the longest token that a text can make.
    text_bytes_max: usize,
    literals: TextTable,
    specials: TextTable,
    bos: Option<TokenId>,
    eos: Option<TokenId>,
    pad: Option<TokenId>,
    add_bos: bool,
    chat_template: Option<String>,
}

impl Tokenizer {
    /// Checks and indexes a vocabulary.
    ///
    /// # Errors
    /// Everything in [`TokenizerError`] that speaks of the file.
    pub fn new(source: VocabSource) -> Result<Tokenizer, TokenizerError> {
        let pre_tokenizer = check_source(&source)?;
        let merges = split_merges(&source.merges)?;
        let kinds = find_kinds(&source, &merges)?;

        let mut bytes = Vec::with_capacity(source.tokens.len() * 8);
        let mut starts = Vec::with_capacity(source.tokens.len() + 1);
        let mut vocab = Vocab::with_capacity(source.tokens.len());
        let (mut literals, mut specials) = (TextTable::default(), TextTable::default());
        let mut text_bytes_max = 1;
        starts.push(0);
        for (id, token) in source.tokens.into_iter().enumerate() {
            if token.is_empty() {
                return Err(TokenizerError::EmptyToken { id });
            }
            let kind = kinds[id];
            if kind == Kind::Ordinary && byte_alphabet::read(&token, &mut bytes) {
                if let Some(first) = vocab.get(&token) {
                    return Err(TokenizerError::DuplicateToken { first: *first as usize, second: id, token });
                }
                vocab.insert(token, id as TokenId);
            } else {
                bytes.extend_from_slice(token.as_bytes());
                let table = if kind == Kind::Literal { &mut literals } else { &mut specials };
                table.insert(token, id as TokenId)?;
            }
            let before = starts[id] as usize;
            if kind != Kind::Special {
                text_bytes_max = text_bytes_max.max(bytes.len() - before);
            }
            starts.push(bytes.len() as u32);
        }
        for (token, &id) in &specials.ids {
            if let Some(&other) = vocab.get(token).or(literals.ids.get(token)) {
                let (first, second) = (id.min(other) as usize, id.max(other) as usize);
                return Err(TokenizerError::DuplicateToken { first, second, token: token.clone() });
            }
        }
        check_bytes(&vocab)?;
        Ok(Tokenizer {
            bpe: build_bpe(vocab, merges)?,
            pre_tokenizer,
            bytes,
            starts,
            text_bytes_max,
            literals,
            specials,
            bos: source.bos,
            eos: source.eos,
            pad: source.pad,
            add_bos: source.add_bos,
            chat_template: source.chat_template,
        })
    }

    /// Number of ids.
    pub fn tokens_total(&self) -> usize {
        self.starts.len() - 1
    }

    /// Id that begins a text, where the file names one.
    pub fn bos(&self) -> Option<TokenId> {
        self.bos
    }

    /// Id that ends an answer, where the file names one.
    pub fn eos(&self) -> Option<TokenId> {
        self.eos
    }

    /// Id that fills unused places, where the file names one.
    pub fn pad(&self) -> Option<TokenId> {
        self.pad
    }

    /// Whether a raw text (not a rendered conversation) is to begin with [`Tokenizer::bos`].
    pub fn add_bos(&self) -> bool {
        self.add_bos
    }

    /// The chat template of the file.
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// The special tokens and their ids, in no order.
    pub fn specials(&self) -> impl Iterator<Item = (&str, TokenId)> {
        self.specials.ids.iter().map(|(text, id)| (text.as_str(), *id))
    }

    /// Id of the special token that reads `token`.
    pub fn special_id(&self, token: &str) -> Option<TokenId> {
        self.specials.ids.get(token).copied()
    }

    /// Whether `id` is a special token.
    pub fn is_special(&self, id: TokenId) -> bool {
        let text = self.token_bytes(id).and_then(|bytes| std::str::from_utf8(bytes).ok());
        text.is_some_and(|text| self.special_id(text) == Some(id))
    }

    /// Bytes that `id` writes: possibly a part of a character; for a special token its text. `None` outside the vocabulary.
    pub fn token_bytes(&self, id: TokenId) -> Option<&[u8]> {
        let id = id as usize;
        let (start, end) = (*self.starts.get(id)?, *self.starts.get(id + 1)?);
        Some(&self.bytes[start as usize..end as usize])
    }

    /// Text of a token sequence, special tokens included; bytes that are no UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`TokenizerError::IdRange`].
    pub fn decode(&self, ids: &[TokenId]) -> Result<String, TokenizerError> {
        let mut bytes = Vec::new();
        for &id in ids {
            let token = self.token_bytes(id);
            bytes.extend_from_slice(token.ok_or(TokenizerError::IdRange { id, tokens: self.tokens_total() })?);
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Ids of a text in which nothing is special. Adds no begin or end token.
    ///
    /// # Errors
    /// [`TokenizerError::Merging`].
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, TokenizerError> {
        let mut ids = Vec::with_capacity(text.len() / 3 + 1);
        self.encode_into(text, &mut ids)?;
        Ok(ids)
    }

    /// Tokens that a text of `bytes` bytes makes at least: what is known of its length before the work of encoding it.
    pub fn tokens_at_least(&self, bytes: usize) -> usize {
        bytes.div_ceil(self.text_bytes_max)
    }

    /// Ids of a prompt. Neighbouring plain pieces are encoded as one text.
    ///
    /// # Errors
    /// [`TokenizerError::MissingSpecial`] or [`TokenizerError::Merging`].
    pub fn encode_segments(&self, segments: &[Segment]) -> Result<Vec<TokenId>, TokenizerError> {
        let mut ids = Vec::new();
        let mut plain = String::new();
        for segment in segments {
            match segment {
                Segment::Plain(text) => plain.push_str(text),
                Segment::Special(token) => {
                    self.encode_into(&plain, &mut ids)?;
                    plain.clear();
                    let id = self.special_id(token);
                    ids.push(id.ok_or_else(|| TokenizerError::MissingSpecial { token: token.clone() })?);
                }
            }
        }
        self.encode_into(&plain, &mut ids)?;
        Ok(ids)
    }

    /// The first special token that `text` spells at or after byte `start`: its place and the longest one there.
    pub fn next_special<'t>(&self, text: &'t str, start: usize) -> Option<(usize, &'t str)> {
        self.specials.next_in(text, start)
    }

    /// Cuts a text written by a template (never one written by a user) at the special tokens that it spells: the longest one
    /// at each place, from left to right.
    pub fn parse_specials(&self, text: &str) -> Vec<Segment> {
        let mut segments = Vec::new();
        let mut start = 0;
        while let Some((at, token)) = self.next_special(text, start) {
            push_plain(&mut segments, &text[start..at]);
            segments.push(Segment::Special(token.to_owned()));
            start = at + token.len();
        }
        push_plain(&mut segments, &text[start..]);
        segments
    }

    fn encode_into(&self, text: &str, ids: &mut Vec<TokenId>) -> Result<(), TokenizerError> {
        let mut start = 0;
        while let Some((at, literal)) = self.literals.next_in(text, start) {
            self.merge_into(&text[start..at], ids)?;
            ids.push(self.literals.ids[literal]);
            start = at + literal.len();
        }
        self.merge_into(&text[start..], ids)
    }

    fn merge_into(&self, text: &str, ids: &mut Vec<TokenId>) -> Result<(), TokenizerError> {
        let mut written = String::new();
        let mut failed = None;
        self.pre_tokenizer.split(text, |word| {
            byte_alphabet::write(word.as_bytes(), &mut written);
            match self.bpe.tokenize(&written) {
                Ok(tokens) => ids.extend(tokens.iter().map(|token| token.id)),
                Err(error) => failed = Some(TokenizerError::Merging { reason: error.to_string() }),
            }
        });
        failed.map_or(Ok(()), Err)
    }
}

/// Tokens that are found by their text.
struct TextTable {
    ids: HashMap<String, TokenId>,
    /// By first byte: the lengths of the tokens that begin with it, longest first.
    lengths: [Vec<usize>; 256],
}

impl Default for TextTable {
    fn default() -> Self {
        TextTable { ids: HashMap::new(), lengths: std::array::from_fn(|_| Vec::new()) }
    }
}

impl TextTable {
    fn insert(&mut self, token: String, id: TokenId) -> Result<(), TokenizerError> {
        if let Some(first) = self.ids.get(&token) {
            return Err(TokenizerError::DuplicateToken { first: *first as usize, second: id as usize, token });
        }
        let lengths = &mut self.lengths[usize::from(token.as_bytes()[0])];
        if let Err(place) = lengths.binary_search_by(|length| token.len().cmp(length)) {
            lengths.insert(place, token.len());
        }
        self.ids.insert(token, id);
        Ok(())
    }

    /// The first place at or after `start` where one of the tokens occurs, and the longest one there.
    fn next_in<'t>(&self, text: &'t str, start: usize) -> Option<(usize, &'t str)> {
        if self.ids.is_empty() {
            return None;
        }
        (start..text.len()).find_map(|at| {
            let lengths = &self.lengths[usize::from(text.as_bytes()[at])];
            let mut candidates = lengths.iter().filter_map(|length| text.get(at..at + length));
            Some((at, candidates.find(|candidate| self.ids.contains_key(*candidate))?))
        })
    }
}

/// Checks names and counts, and finds the splitting rule.
fn check_source(source: &VocabSource) -> Result<PreTokenizer, TokenizerError> {
    if source.model != "gpt2" {
        return Err(TokenizerError::UnsupportedModel { model: source.model.clone() });
    }
    let Some(pre_tokenizer) = PreTokenizer::by_name(&source.pre) else {
        let known = PreTokenizer::names().collect::<Vec<_>>().join(", ");
        return Err(TokenizerError::UnsupportedPreTokenizer { pre: source.pre.clone(), known });
    };
    let tokens = source.tokens.len();
    for (what, count, min) in [("tokens", tokens, 1), ("merges", source.merges.len(), 0)] {
        if !(min..=ENTRIES_MAX).contains(&count) {
            return Err(TokenizerError::EntryCount { what, count, max: ENTRIES_MAX });
        }
    }
    // Token starts are kept in 32 bits.
    let bytes = source.tokens.iter().map(String::len).sum::<usize>();
    if bytes > u32::MAX as usize {
        return Err(TokenizerError::EntryCount { what: "bytes of tokens", count: bytes, max: u32::MAX as usize });
    }
    let named = [
        ("tokenizer.ggml.bos_token_id", source.bos),
        ("tokenizer.ggml.eos_token_id", source.eos),
        ("tokenizer.ggml.padding_token_id", source.pad),
    ];
    for (key, id) in named {
        if let Some(id) = id.filter(|&id| id as usize >= tokens) {
            return Err(TokenizerError::SpecialIdRange { key, id, tokens });
        }
    }
    Ok(pre_tokenizer)
}

fn split_merges(merges: &[String]) -> Result<Vec<(String, String)>, TokenizerError> {
    let split = |(index, merge): (usize, &String)| match merge.split_once(' ') {
        Some((left, right)) if !left.is_empty() && !right.is_empty() && !right.contains(' ') => {
            Ok((left.to_owned(), right.to_owned()))
        }
        _ => Err(TokenizerError::MergeSyntax { index, merge: merge.clone() }),
    };
    merges.iter().enumerate().map(split).collect()
}

/// The kind of each token, by id. A file without types tells none; there a token is special when it is named as one or when
/// merging can never make it.
fn find_kinds(source: &VocabSource, merges: &[(String, String)]) -> Result<Vec<Kind>, TokenizerError> {
    let types = &source.token_types;
    if types.len() == source.tokens.len() {
        let kind = |((id, &found), token): ((usize, &i32), &String)| match found {
            TYPE_NORMAL => Ok(Kind::Ordinary),
            TYPE_USER_DEFINED if !is_markup(token) => Ok(Kind::Literal),
            2..=5 => Ok(Kind::Special),
            _ => Err(TokenizerError::TypeValue { id, found }),
        };
        return types.iter().enumerate().zip(&source.tokens).map(kind).collect();
    }
    if !types.is_empty() {
        return Err(TokenizerError::TypeCount { types: types.len(), tokens: source.tokens.len() });
    }
    let made: HashSet<String> = merges.iter().map(|(left, right)| format!("{left}{right}")).collect();
    let named = [source.bos, source.eos, source.pad];
    let kind = |(id, token): (usize, &String)| {
        let is_made = token.chars().nth(1).is_none() || made.contains(token);
        if is_made && !named.contains(&Some(id as TokenId)) { Kind::Ordinary } else { Kind::Special }
    };
    Ok(source.tokens.iter().enumerate().map(kind).collect())
}

/// Every byte that UTF-8 text can hold must have a token: merging drops characters it does not know without a word.
fn check_bytes(vocab: &Vocab) -> Result<(), TokenizerError> {
    let in_utf8 = |byte: &u8| !matches!(byte, 0xc0 | 0xc1 | 0xf5..=0xff);
    for byte in (0..=255u8).filter(in_utf8) {
        if !vocab.contains_key(byte_alphabet::char_of(byte).encode_utf8(&mut [0; 4]) as &str) {
            return Err(TokenizerError::MissingByte { byte });
        }
    }
    Ok(())
}

fn build_bpe(vocab: Vocab, merges: Vec<(String, String)>) -> Result<BPE, TokenizerError> {
    use tokenizers::models::bpe::Error as BpeError;
    BPE::builder().vocab_and_merges(vocab, merges).build().map_err(|error| match error.downcast::<BpeError>() {
        Ok(known) => match *known {
            BpeError::MergeTokenOutOfVocabulary(token) => TokenizerError::MergeUnknownToken { token },
            other => TokenizerError::Merging { reason: other.to_string() },
        },
        Err(other) => TokenizerError::Merging { reason: other.to_string() },
    })
}
