//! Chat templates that come with a model file, in the dialect of Hugging Face (Jinja with a few Python habits).
//! Owns rendering and its limits; never trusts a message: what a user wrote stays plain text in the segments, see [`Guard`].
//! Surprising fact: templates compare and cut message text, so it is passed as it is, save for one character of each special token
//! that it spells; that character is exchanged before rendering and put back after the special tokens were found.

use std::collections::{BTreeSet, HashMap};
use std::time::SystemTime;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{AutoEscape, Environment, ErrorKind, Value as JinjaValue};
use serde_json::{Map, Value};
use thiserror::Error;

use super::chat::{Message, ToolDefinition};
use super::tokenizer::Tokenizer;
use super::{Segment, clock, json_style};

/// Longest template that is believed, in bytes. The longest in use has 25 thousand.
const SOURCE_BYTES_MAX: usize = 1 << 20;
/// Steps after which a template is stopped. A thousand turns of the longest templates take about two million.
const FUEL: u64 = 50_000_000;
/// Depth of macro calls and includes.
const RECURSION_MAX: usize = 100;
/// Longest rendered prompt, in bytes.
const PROMPT_BYTES_MAX: usize = 256 << 20;

/// Why a template gave no prompt.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum TemplateError {
    #[error(
        "the chat template of the file is {bytes} bytes long, at most {max} are read; use the built-in prompt format"
    )]
    TooLong { bytes: usize, max: usize },
    #[error("the chat template of the file does not parse, line {line}: {detail}; use the built-in prompt format")]
    Syntax { line: usize, detail: String },
    #[error("the chat template refuses this conversation: {reason}")]
    Raised { reason: String },
    #[error("the chat template ran for {steps} steps without an end; use the built-in prompt format")]
    Endless { steps: u64 },
    #[error("the chat template failed in line {line}: {detail}; use the built-in prompt format")]
    Failed { line: usize, detail: String },
    #[error("the rendered prompt has more than {max} bytes; shorten the conversation")]
    PromptTooLong { max: usize },
    #[error("the messages use every private character of Unicode plane 16; remove some")]
    NoPrivateCharacter,
}

/// What a template is rendered with.
#[derive(Clone, Copy, Debug)]
pub struct TemplateInput<'a> {
    pub messages: &'a [Message],
    pub tools: &'a [ToolDefinition],
    /// End with the tokens that begin an answer.
    pub add_generation_prompt: bool,
    /// Further variables, such as `enable_thinking`.
    pub extra: &'a Map<String, Value>,
    pub bos_token: &'a str,
    pub eos_token: &'a str,
    /// What `strftime_now` shows.
    pub now: SystemTime,
}

/// A parsed chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
}

impl ChatTemplate {
    /// Parses the text of `tokenizer.chat_template`.
    ///
    /// # Errors
    /// [`TemplateError::TooLong`] or [`TemplateError::Syntax`].
    pub fn new(source: &str) -> Result<ChatTemplate, TemplateError> {
        if source.len() > SOURCE_BYTES_MAX {
            return Err(TemplateError::TooLong { bytes: source.len(), max: SOURCE_BYTES_MAX });
        }
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(RECURSION_MAX);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_unknown_method_callback(|state, value, method, arguments| match method {
            "format" => Err(ErrorKind::UnknownMethod.into()),
            _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments),
        });
        environment.set_formatter(|out, state, value| match python_scalar(value) {
            Some(text) => out.write_str(&text).map_err(minijinja::Error::from),
            None => minijinja::escape_formatter(out, state, value),
        });
        // Both take a width from the template and would reserve it.
        environment.remove_filter("format");
        environment.remove_filter("indent");
        // As in Jinja: templates ask `tools is iterable and tools | length > 0` of a none.
        environment.add_test("iterable", |value: JinjaValue| !value.is_none() && value.try_iter().is_ok());
        environment.add_filter("tojson", to_json);
        environment.add_filter("from_json", from_json);
        environment
            .add_filter("string", |value: JinjaValue| python_scalar(&value).unwrap_or_else(|| value.to_string()));
        environment.add_function("raise_exception", |reason: String| -> Result<JinjaValue, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, "raised").with_source(Raised(reason)))
        });
        environment
            .add_template_owned("chat", source.to_owned())
            .map_err(|error| TemplateError::Syntax { line: error.line().unwrap_or(0), detail: describe(&error) })?;
        Ok(ChatTemplate { environment })
    }

    /// The prompt as text. Special tokens in it may be the template's or a user's; [`ChatTemplate::render_segments`] tells them apart.
    ///
    /// # Errors
    /// [`TemplateError`].
    pub fn render(&self, input: &TemplateInput<'_>) -> Result<String, TemplateError> {
        self.render_values(input, messages_json(input.messages), tools_json(input.tools))
    }

    /// The prompt as segments: special tokens are those that the template wrote, never those in a message or a tool.
    ///
    /// # Errors
    /// [`TemplateError`].
    pub fn render_segments(
        &self,
        input: &TemplateInput<'_>,
        tokenizer: &Tokenizer,
    ) -> Result<Vec<Segment>, TemplateError> {
        let (mut messages, mut tools) = (messages_json(input.messages), tools_json(input.tools));
        let mut guard = Guard::new(tokenizer, &[&messages, &tools]);
        guard.cover(&mut messages)?;
        guard.cover(&mut tools)?;
        let text = self.render_values(input, messages, tools)?;
        let mut segments = tokenizer.parse_specials(&text);
        for segment in &mut segments {
            if let Segment::Plain(text) = segment {
                guard.uncover(text);
            }
        }
        Ok(segments)
    }

    fn render_values(&self, input: &TemplateInput<'_>, messages: Value, tools: Value) -> Result<String, TemplateError> {
        let now = input.now;
        let strftime_now = move |pattern: String| {
            clock::format(&pattern, now).ok_or_else(|| {
                let detail = format!("strftime_now does not know the pattern '{pattern}'");
                minijinja::Error::new(ErrorKind::InvalidOperation, detail)
            })
        };
        let mut context: HashMap<&str, JinjaValue> = HashMap::new();
        for (name, value) in input.extra {
            context.insert(name, JinjaValue::from_serialize(value));
        }
        context.insert("strftime_now", JinjaValue::from_function(strftime_now));
        context.insert("messages", JinjaValue::from_serialize(messages));
        context.insert("tools", JinjaValue::from_serialize(tools));
        context.insert("add_generation_prompt", input.add_generation_prompt.into());
        context.insert("bos_token", input.bos_token.into());
        context.insert("eos_token", input.eos_token.into());

        let template = self.environment.get_template("chat").map_err(|error| failure(&error))?;
        let mut prompt = BoundedText::default();
        let rendered = template.render_captured_to(JinjaValue::from_iter(context), &mut prompt).map(|_| ());
        if prompt.is_full {
            return Err(TemplateError::PromptTooLong { max: PROMPT_BYTES_MAX });
        }
        rendered.map_err(|error| failure(&error))?;
        Ok(String::from_utf8_lossy(&prompt.bytes).into_owned())
    }
}

/// Rendered bytes, refused beyond [`PROMPT_BYTES_MAX`].
#[derive(Default)]
struct BoundedText {
    bytes: Vec<u8>,
    is_full: bool,
}

impl std::io::Write for BoundedText {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.bytes.len() + bytes.len() > PROMPT_BYTES_MAX {
            self.is_full = true;
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Marks an error as the template's own refusal.
#[derive(Debug, Error)]
#[error("{0}")]
struct Raised(String);

fn failure(error: &minijinja::Error) -> TemplateError {
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        if let Some(Raised(reason)) = inner.downcast_ref() {
            return TemplateError::Raised { reason: reason.clone() };
        }
        cause = inner.source();
    }
    match error.kind() {
        ErrorKind::OutOfFuel => TemplateError::Endless { steps: FUEL },
        _ => TemplateError::Failed { line: error.line().unwrap_or(0), detail: describe(error) },
    }
}

fn describe(error: &minijinja::Error) -> String {
    match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    }
}

/// The spelling of true, false, none and floats in Python, which templates rely on when they print an argument.
fn python_scalar(value: &JinjaValue) -> Option<String> {
    match value.kind() {
        ValueKind::Bool if value.is_true() => Some("True".to_owned()),
        ValueKind::Bool => Some("False".to_owned()),
        ValueKind::None => Some("None".to_owned()),
        ValueKind::Number if !value.is_integer() => {
            let float = f64::try_from(value.clone()).ok().filter(|float| float.is_finite())?;
            Some(json_style::to_line(&Value::from(float)))
        }
        _ => None,
    }
}

/// `tojson(ensure_ascii=false, indent=none)`; other options are refused rather than ignored.
fn to_json(value: &JinjaValue, options: Kwargs) -> Result<String, minijinja::Error> {
    let invalid = |detail: String| minijinja::Error::new(ErrorKind::InvalidOperation, detail);
    if options.get::<Option<bool>>("ensure_ascii")? == Some(true) {
        return Err(invalid("tojson(ensure_ascii=true) is not supported".to_owned()));
    }
    let indent: Option<u8> = options.get("indent")?;
    options.assert_all_used()?;
    let json = serde_json::to_value(value).map_err(|error| invalid(format!("no JSON value: {error}")))?;
    Ok(match indent {
        Some(indent) => json_style::to_lines(&json, usize::from(indent)),
        None => json_style::to_line(&json),
    })
}

fn from_json(text: &str) -> Result<JinjaValue, minijinja::Error> {
    let json: Value = serde_json::from_str(text).map_err(|error| {
        minijinja::Error::new(ErrorKind::InvalidOperation, format!("from_json was given no JSON text: {error}"))
    })?;
    Ok(JinjaValue::from_serialize(json))
}

/// The messages as templates expect them; fields that a message lacks are left out.
fn messages_json(messages: &[Message]) -> Value {
    messages.iter().map(Message::to_json).collect()
}

fn tools_json(tools: &[ToolDefinition]) -> Value {
    if tools.is_empty() {
        return Value::Null;
    }
    tools.iter().map(|tool| serde_json::json!({"type": "function", "function": tool.function})).collect()
}

/// Keeps the special tokens that a user spells from being found in the rendered prompt.
///
/// In each text, one character is exchanged for a private one (plane 16) wherever the text holds a special token, ends with the
/// beginning of one, or begins with the end of one; so no special token can be found that a text contributed to, unless
/// the template itself writes both ends around a text. The exchange is undone in the plain segments.
struct Guard<'t> {
    tokenizer: &'t Tokenizer,
    /// Special tokens by first and by last character, for the two ends of a text.
    by_first: HashMap<char, Vec<&'t str>>,
    by_last: HashMap<char, Vec<&'t str>>,
    /// Private characters that no text uses.
    free: Box<dyn Iterator<Item = char>>,
    private_of: HashMap<char, char>,
    original_of: HashMap<char, char>,
}

impl<'t> Guard<'t> {
    fn new(tokenizer: &'t Tokenizer, values: &[&Value]) -> Guard<'t> {
        let mut used = BTreeSet::new();
        for value in values {
            visit_texts(value, &mut |text| used.extend(text.chars().filter(|c| is_private(*c))));
        }
        let (mut by_first, mut by_last) = (HashMap::<_, Vec<_>>::new(), HashMap::<_, Vec<_>>::new());
        for (special, _) in tokenizer.specials() {
            by_first.entry(special.chars().next().unwrap_or_default()).or_default().push(special);
            by_last.entry(special.chars().next_back().unwrap_or_default()).or_default().push(special);
        }
        let free = Box::new(PRIVATE.filter(move |c| !used.contains(c)));
        Guard { tokenizer, by_first, by_last, free, private_of: HashMap::new(), original_of: HashMap::new() }
    }

    /// Exchanges characters in every text of `value` but the roles, which are this program's own words.
    fn cover(&mut self, value: &mut Value) -> Result<(), TemplateError> {
        match value {
            Value::String(text) => {
                let places = self.places(text);
                if !places.is_empty() {
                    *text = self.exchanged(text, &places)?;
                }
            }
            Value::Array(items) => {
                for item in items {
                    self.cover(item)?;
                }
            }
            Value::Object(entries) => {
                for (mut name, mut item) in std::mem::take(entries) {
                    let places = self.places(&name);
                    if !places.is_empty() {
                        name = self.exchanged(&name, &places)?;
                    }
                    if name != "role" {
                        self.cover(&mut item)?;
                    }
                    entries.insert(name, item);
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
        Ok(())
    }

    /// Puts the exchanged characters back.
    fn uncover(&self, text: &mut String) {
        if text.contains(is_private) {
            *text = text.chars().map(|c| self.original_of.get(&c).copied().unwrap_or(c)).collect();
        }
    }

    fn exchanged(&mut self, text: &str, places: &BTreeSet<usize>) -> Result<String, TemplateError> {
        let mut out = String::with_capacity(text.len() + 4 * places.len());
        for (at, c) in text.char_indices() {
            let private = if places.contains(&at) { self.private(c)? } else { c };
            out.push(private);
        }
        Ok(out)
    }

    fn private(&mut self, original: char) -> Result<char, TemplateError> {
        if let Some(private) = self.private_of.get(&original) {
            return Ok(*private);
        }
        let private = self.free.next().ok_or(TemplateError::NoPrivateCharacter)?;
        self.private_of.insert(original, private);
        self.original_of.insert(private, original);
        Ok(private)
    }

    /// Byte offsets of the characters to exchange.
    fn places(&self, text: &str) -> BTreeSet<usize> {
        let mut places = BTreeSet::new();
        let mut start = 0;
        while let Some((at, special)) = self.tokenizer.next_special(text, start) {
            places.insert(at + exchangeable(special));
            start = at + special.chars().next().map_or(1, char::len_utf8);
        }
        // Templates trim texts, which moves their ends.
        for (text, shift) in [(text, 0), (text.trim(), text.len() - text.trim_start().len())] {
            places.extend(self.beginning_at_end(text).map(|at| at + shift));
            places.extend(self.end_at_beginning(text).map(|at| at + shift));
        }
        places
    }

    /// Where `text` ends with the beginning of a special token.
    fn beginning_at_end<'s>(&'s self, text: &'s str) -> impl Iterator<Item = usize> + 's {
        let longest = self.by_first.values().flatten().map(|special| special.len()).max().unwrap_or(0);
        let tail = text.char_indices().rev().take_while(move |(at, _)| text.len() - at < longest);
        tail.filter_map(move |(at, first)| {
            let rest = &text[at..];
            let special = self.by_first.get(&first)?.iter().find(|special| special.starts_with(rest))?;
            Some(at + exchangeable(&special[..rest.len()]))
        })
    }

    /// Where `text` begins with the end of a special token.
    fn end_at_beginning<'s>(&'s self, text: &'s str) -> impl Iterator<Item = usize> + 's {
        let longest = self.by_last.values().flatten().map(|special| special.len()).max().unwrap_or(0);
        let head = text.char_indices().take_while(move |(at, _)| *at < longest);
        head.filter_map(move |(at, last)| {
            let rest = &text[..at + last.len_utf8()];
            self.by_last.get(&last)?.iter().find(|special| special.ends_with(rest))?;
            Some(exchangeable(rest))
        })
    }
}

const PRIVATE: std::ops::RangeInclusive<char> = '\u{100000}'..='\u{10fffd}';

fn is_private(c: char) -> bool {
    PRIVATE.contains(&c)
}

/// Offset of the first character that neither trimming nor JSON quoting would touch, else 0.
fn exchangeable(part: &str) -> usize {
    let is_safe = |c: char| !c.is_whitespace() && !c.is_control() && !matches!(c, '"' | '\\');
    part.find(is_safe).unwrap_or(0)
}

fn visit_texts(value: &Value, visit: &mut dyn FnMut(&str)) {
    match value {
        Value::String(text) => visit(text),
        Value::Array(items) => items.iter().for_each(|item| visit_texts(item, visit)),
        Value::Object(entries) => {
            for (name, item) in entries {
                visit(name);
                visit_texts(item, visit);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}
