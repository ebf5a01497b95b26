//! Text in and out of token ids: tokenizer, incremental UTF-8, chat messages and templates.
//! A leaf: knows neither files nor models. Surprising fact: text that a user wrote never becomes a special token, whatever it
//! spells; only a [`Segment`] that says so does.

pub mod byte_alphabet;
pub mod chat;
pub mod clock;
pub mod json_style;
pub mod pre_tokenizer;
pub mod template;
pub mod tokenizer;
pub mod utf8_stream;

/// A piece of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Segment {
    /// One special token, by its text, such as `<think>`.
    Special(String),
    /// Text in which nothing is special, even where it spells a special token.
    Plain(String),
}

/// Appends `text` to `segments` as plain text, joined to a plain piece before it: merging must see across the seam.
pub fn push_plain(segments: &mut Vec<Segment>, text: &str) {
    if text.is_empty() {
        return;
    }
    match segments.last_mut() {
        Some(Segment::Plain(last)) => last.push_str(text),
        _ => segments.push(Segment::Plain(text.to_owned())),
    }
}

/// The text of `segments` as a reader would see it.
pub fn joined(segments: &[Segment]) -> String {
    segments
        .iter()
        .map(|segment| match segment {
            Segment::Special(text) | Segment::Plain(text) => text.as_str(),
        })
        .collect()
}
