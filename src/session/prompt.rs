//! From a conversation to prompt tokens: the file's own chat template where it has one, else the architecture's rules.
//! Never lets text of a message become a special token. Surprising fact: a template that knows no reasoning switch renders the same
//! with and without it, and that is how it is found out.

use std::time::SystemTime;

use serde_json::{Map, Value};

use crate::models::blocks::dsml;
use crate::models::{deepseek4, deepseek41};
use crate::text::Segment;
use crate::text::chat::Message;
use crate::text::template::{ChatTemplate, TemplateError, TemplateInput};
use crate::text::tokenizer::{Tokenizer, TokenizerError};
use crate::units::TokenId;

/// Why a conversation has no prompt.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    #[error(transparent)]
    Template(#[from] TemplateError),
    #[error(transparent)]
    Rules(#[from] dsml::PromptError),
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    #[error(
        "the chat template of this model file has no reasoning switch; leave --think, --think-max and --think-level out"
    )]
    NoThinking,
    #[error("the file has no chat template and architecture {arch} no built-in prompt format; use --tokens-file")]
    NoFormat { arch: String },
    #[error(
        "the prompt has {bytes} bytes, at least {at_least} tokens and likely several times as many, but the context holds {ctx}; use a \
         shorter prompt, or a longer context (--ctx; /ctx in a conversation)"
    )]
    TooLong { bytes: usize, at_least: usize, ctx: usize },
}

/// How conversations of one model are written.
pub enum PromptFormat {
    /// The template that the file carries.
    Template(Box<ChatTemplate>),
    /// Rules of DeepSeek V4.1 (spec deepseek-v41 6.4).
    DeepSeek41,
    /// Rules of DeepSeek V4 (spec deepseek-v4 7.2).
    DeepSeek4,
}

impl PromptFormat {
    /// The format of a model file.
    ///
    /// # Errors
    /// A template that does not parse; no template and no rules.
    pub fn of(tokenizer: &Tokenizer, arch: &str) -> Result<Self, PromptError> {
        match tokenizer.chat_template() {
            Some(source) => Ok(Self::Template(Box::new(ChatTemplate::new(source)?))),
            None if arch == deepseek41::ARCH => Ok(Self::DeepSeek41),
            None if arch == deepseek4::ARCH => Ok(Self::DeepSeek4),
            None => Err(PromptError::NoFormat { arch: arch.to_owned() }),
        }
    }

    /// The prompt that asks for the next answer. `level` is the reasoning level asked for (0: none); `None` leaves the choice to
    /// the format. `ctx` tokens have room: what must have more is refused before memory and time go into it. The result may still be
    /// longer, and says then by how much.
    ///
    /// # Errors
    /// What the template or the rules refuse; a level that the template cannot express; text that is too long by its bytes.
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        level: Option<u8>,
        ctx: usize,
    ) -> Result<Vec<TokenId>, PromptError> {
        let check = |bytes: usize| match tokenizer.tokens_at_least(bytes) {
            at_least if at_least > ctx => Err(PromptError::TooLong { bytes, at_least, ctx }),
            _ => Ok(()),
        };
        // Formats may strip white space around a message; anything else of the newest one is in the prompt.
        check(messages.last().map_or(0, |newest| newest.content.trim().len()))?;
        let segments = match self {
            Self::Template(template) => render_template(template, tokenizer, messages, level)?,
            Self::DeepSeek41 => {
                use deepseek41::chat::{PromptOptions, Thinking, render};
                let thinking = level.map_or(Ok(Thinking::DEFAULT), |l| Thinking::level(u32::from(l)))?;
                render(messages, &PromptOptions { thinking, ..PromptOptions::default() })?
            }
            Self::DeepSeek4 => {
                use deepseek4::chat::{PromptOptions, Thinking, render};
                let thinking = level.map_or(Ok(Thinking::DEFAULT), |l| Thinking::level(u32::from(l)))?;
                render(messages, &PromptOptions { thinking, ..PromptOptions::default() })?
            }
        };
        let plain = segments.iter().map(|segment| match segment {
            Segment::Plain(text) => text.len(),
            Segment::Special(_) => 0,
        });
        check(plain.sum())?;
        Ok(tokenizer.encode_segments(&segments)?)
    }
}

fn render_template(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    messages: &[Message],
    level: Option<u8>,
) -> Result<Vec<Segment>, PromptError> {
    let text = |id: Option<TokenId>| -> Result<String, TokenizerError> {
        id.map_or(Ok(String::new()), |id| tokenizer.decode(&[id]))
    };
    let (bos_token, eos_token) = (text(tokenizer.bos())?, text(tokenizer.eos())?);
    let render = |level: Option<u8>| {
        let extra = level.map_or_else(Map::new, switches);
        let input = TemplateInput {
            messages,
            tools: &[],
            add_generation_prompt: true,
            extra: &extra,
            bos_token: &bos_token,
            eos_token: &eos_token,
            now: SystemTime::now(),
        };
        template.render_segments(&input, tokenizer)
    };
    let segments = render(level)?;
    if level.is_some_and(|l| l > 0) && segments == render(Some(0))? {
        return Err(PromptError::NoThinking);
    }
    Ok(segments)
}

/// The variables under which published templates look for a reasoning switch.
fn switches(level: u8) -> Map<String, Value> {
    let effort = match level {
        0 => "none",
        1..=50 => "low",
        51..=99 => "high",
        _ => "max",
    };
    let is_on = Value::Bool(level > 0);
    [
        ("thinking", is_on.clone()),
        ("enable_thinking", is_on),
        ("reasoning_effort", Value::from(effort)),
        ("thinking_level", Value::from(level)),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), value))
    .collect()
}
