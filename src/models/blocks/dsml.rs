//! What the prompt formats of DeepSeek V4 and V4.1 share: special tokens, user turns, answers, tool calls in DSML tags.
//! Owns wording and order; never tokenises. `tools_prompt.txt` is the wording of the publisher's renderer (deepseek_recipe 0.2.0,
//! MIT licence, Copyright DeepSeek), byte for byte, since the models were trained on it.
//! Surprising fact: a value that spells the tag that ends it has its first character escaped; that is the only escape there is.

use serde_json::Value;
use thiserror::Error;

use crate::text::chat::{Message, Role, ToolCall, ToolDefinition};
use crate::text::{Segment, json_style, push_plain};

/// Ends an assistant turn; the token to stop at.
pub const END: &str = "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>";
/// Opens the reasoning of an answer.
pub const THINK: &str = "<think>";
/// Closes the reasoning of an answer.
pub const THINK_END: &str = "</think>";
/// Begins a prompt.
pub const BEGIN: &str = "<\u{ff5c}begin\u{2581}of\u{2581}sentence\u{ff5c}>";
/// Begins a user turn.
pub const USER: &str = "<\u{ff5c}User\u{ff5c}>";
/// Begins an answer.
pub const ASSISTANT: &str = "<\u{ff5c}Assistant\u{ff5c}>";
/// Stands inside the angle brackets of tool tags, which are ordinary text.
pub const DSML: &str = "\u{ff5c}DSML\u{ff5c}";

const TOOLS_HEAD: &str = include_str!("tools_prompt.txt");
const TOOLS_TAIL: &str =
    "\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n";
const FORMAT_HEAD: &str = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n";

/// How tool tags are spelt behind the DSML token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tags {
    /// `tool_calls`, `invoke`, `parameter`.
    V4,
    /// ` calls`, ` invoke`, ` parameter`.
    V41,
}

impl Tags {
    /// Name of the tag around all calls.
    pub fn calls(self) -> &'static str {
        match self {
            Self::V4 => "tool_calls",
            Self::V41 => " calls",
        }
    }

    /// What stands between the token and the names of the other tags.
    pub fn gap(self) -> &'static str {
        match self {
            Self::V4 => "",
            Self::V41 => " ",
        }
    }
}

/// A conversation that has no prompt.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum PromptError {
    #[error("think level {level} is out of range; use 0 (off) to 100")]
    Level { level: u32 },
    #[error("reasoning effort '{name}' is unknown; use none, low, medium, high, xhigh or max")]
    Effort { name: String },
    #[error("the conversation is empty; it needs a message")]
    Empty,
    #[error("only an assistant message can be continued, the last one is of role {role:?}")]
    Continue { role: Role },
    #[error("a tool call is forced but no tools are declared; declare one")]
    ForcedCall,
}

/// A prompt in the making.
pub struct Prompt {
    pub segments: Vec<Segment>,
    tags: Tags,
}

impl Prompt {
    /// An empty prompt whose tool tags are spelt like `tags`.
    pub fn new(tags: Tags) -> Self {
        Self { segments: Vec::new(), tags }
    }

    /// A special token.
    pub fn special(&mut self, token: &str) {
        self.segments.push(Segment::Special(token.to_owned()));
    }

    /// Text in which nothing is special.
    pub fn plain(&mut self, text: &str) {
        push_plain(&mut self.segments, text);
    }

    /// Text of the format itself, in which the thinking and DSML tokens are special.
    fn wording(&mut self, text: &str) {
        let mut rest = text;
        while let Some((at, token)) =
            [THINK, THINK_END, DSML].into_iter().filter_map(|token| Some((rest.find(token)?, token))).min()
        {
            self.plain(&rest[..at]);
            self.special(token);
            rest = &rest[at + token.len()..];
        }
        self.plain(rest);
    }

    /// How tools are called, and their schemas.
    pub fn tools(&mut self, tools: &[ToolDefinition]) {
        // The file spells the tags as V4.1 does.
        let calls = format!("{DSML}{}", self.tags.calls());
        let head = TOOLS_HEAD.replace(&format!("{DSML} calls"), &calls);
        let head = head.replace(&format!("{DSML} "), &format!("{DSML}{}", self.tags.gap()));
        self.plain("\n\n");
        self.wording(if self.tags == Tags::V41 { TOOLS_HEAD } else { &head });
        self.plain("\n");
        for tool in tools {
            let schema = serde_json::json!({
                "name": tool.name, "description": tool.description, "parameters": tool.parameters,
            });
            self.plain(&json_style::to_line(&schema));
            self.plain("\n");
        }
        self.plain(TOOLS_TAIL);
    }

    /// The schema that the answer must follow.
    pub fn response_format(&mut self, schema: &Value) {
        self.plain(FORMAT_HEAD);
        self.plain(&json_style::to_line(schema));
    }

    /// A user's message or the result of a tool call; `is_open` within a user turn.
    pub fn user(&mut self, message: &Message, is_open: bool) {
        if is_open {
            self.plain("\n\n");
        } else {
            self.special(USER);
        }
        match message.role {
            Role::Tool => self.plain(&format!("<tool_result>{}</tool_result>", message.content)),
            _ => self.plain(&message.content),
        }
    }

    /// What an answer says and calls, without reasoning and end.
    pub fn answer(&mut self, message: &Message) {
        self.plain(&message.content);
        if message.tool_calls.is_empty() {
            return;
        }
        self.calls_open();
        for call in &message.tool_calls {
            self.call(call);
        }
        self.tag("</", &format!("{}>", self.tags.calls()));
    }

    /// The beginning of tool calls.
    pub fn calls_open(&mut self) {
        self.plain("\n\n");
        self.tag("<", &format!("{}>\n", self.tags.calls()));
    }

    /// A tool tag: `open`, the DSML token, and the text after it.
    fn tag(&mut self, open: &str, rest: &str) {
        self.plain(open);
        self.special(DSML);
        self.plain(rest);
    }

    fn call(&mut self, call: &ToolCall) {
        let gap = self.tags.gap();
        self.tag("<", &format!("{gap}invoke name=\"{}\">\n", call.name));
        match serde_json::from_str::<Value>(&call.arguments) {
            Ok(Value::Object(arguments)) => {
                for (name, value) in &arguments {
                    self.parameter(name, value);
                }
                if arguments.is_empty() {
                    self.plain("\n");
                }
            }
            // What is no JSON object goes in as one text, so that the model sees its own mistake.
            _ => self.parameter("arguments", &Value::String(call.arguments.clone())),
        }
        self.tag("</", &format!("{gap}invoke>\n"));
    }

    fn parameter(&mut self, name: &str, value: &Value) {
        let gap = self.tags.gap();
        let end = format!("</{DSML}{gap}parameter>");
        let (is_text, text) = match value {
            Value::String(text) => (true, text.replace(&end, &format!("&lt;{}", &end[1..]))),
            other => (false, json_style::to_line(other).replace(&end, &format!("\\u003c{}", &end[1..]))),
        };
        self.tag("<", &format!("{gap}parameter name=\"{name}\" string=\"{is_text}\">{text}"));
        self.tag("</", &format!("{gap}parameter>\n"));
    }
}
