//! The prompt format of DeepSeek V4: from a conversation to segments (spec deepseek-v4, 7.2 to 7.4), for files without a chat template.
//! Owns order and efforts; never tokenises. The effort texts are those of the publisher's renderer (deepseek_recipe 0.2.0, MIT licence,
//! Copyright DeepSeek), byte for byte. Surprising fact: there is no system token; what the system says stands bare behind the begin token.

use serde_json::Value;

pub use crate::models::blocks::dsml::PromptError;
use crate::models::blocks::dsml::{ASSISTANT, BEGIN, END, Prompt, THINK, THINK_END, Tags};
use crate::text::Segment;
use crate::text::chat::{Message, Role, ToolDefinition};

const REMINDER: &str = "<\u{ff5c}latest_reminder\u{ff5c}>";
const EFFORT_HIGH: &str = include_str!("effort_high.txt");
const EFFORT_MAX: &str = include_str!("effort_max.txt");

/// How hard the model is asked to think.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thinking {
    /// Answer at once.
    Off,
    /// Think, without a word about effort.
    Low,
    High,
    Max,
}

impl Thinking {
    /// The publisher's default.
    pub const DEFAULT: Thinking = Thinking::High;

    /// Effort by number: 0 is off, up to 50 low, 100 max.
    ///
    /// # Errors
    /// [`PromptError::Level`] above 100.
    pub fn level(level: u32) -> Result<Thinking, PromptError> {
        match level {
            0 => Ok(Thinking::Off),
            1..=50 => Ok(Thinking::Low),
            51..=99 => Ok(Thinking::High),
            100 => Ok(Thinking::Max),
            _ => Err(PromptError::Level { level }),
        }
    }

    /// Effort by the name that clients send.
    ///
    /// # Errors
    /// [`PromptError::Effort`].
    pub fn effort(name: &str) -> Result<Thinking, PromptError> {
        match name {
            "none" => Ok(Thinking::Off),
            "low" => Ok(Thinking::Low),
            "default" | "medium" | "high" | "xhigh" => Ok(Thinking::High),
            "max" => Ok(Thinking::Max),
            _ => Err(PromptError::Effort { name: name.to_owned() }),
        }
    }
}

/// What a prompt depends on besides the messages.
#[derive(Clone, Copy, Debug)]
pub struct PromptOptions<'a> {
    pub thinking: Thinking,
    /// Tools the model may call; none declares no tools.
    pub tools: &'a [ToolDefinition],
    /// JSON schema the answer must follow.
    pub response_schema: Option<&'a Value>,
}

impl Default for PromptOptions<'_> {
    fn default() -> Self {
        PromptOptions { thinking: Thinking::DEFAULT, tools: &[], response_schema: None }
    }
}

/// The prompt of a conversation, from the begin token to where the model goes on.
///
/// # Errors
/// [`PromptError::Empty`]; never because of what a text contains.
pub fn render(messages: &[Message], options: &PromptOptions<'_>) -> Result<Vec<Segment>, PromptError> {
    if messages.is_empty() {
        return Err(PromptError::Empty);
    }
    let mut prompt = Prompt::new(Tags::V4);
    prompt.special(BEGIN);
    match options.thinking {
        Thinking::Off | Thinking::Low => {}
        Thinking::High => prompt.plain(EFFORT_HIGH),
        Thinking::Max => prompt.plain(EFFORT_MAX),
    }
    opening(&mut prompt, messages, options);
    let mut is_open = false;
    for message in messages {
        match message.role {
            Role::System => continue,
            Role::LatestReminder => {
                prompt.special(REMINDER);
                prompt.plain(&message.content);
            }
            Role::User | Role::Tool => prompt.user(message, is_open),
            Role::Assistant => answer(&mut prompt, message, options),
        }
        is_open = matches!(message.role, Role::User | Role::Tool);
    }
    prompt.special(ASSISTANT);
    prompt.special(if options.thinking == Thinking::Off { THINK_END } else { THINK });
    Ok(prompt.segments)
}

/// All that the system says, wherever it stands, then tools and schema.
fn opening(prompt: &mut Prompt, messages: &[Message], options: &PromptOptions<'_>) {
    let system: Vec<&str> = messages.iter().filter(|m| m.role == Role::System).map(|m| m.content.as_str()).collect();
    prompt.plain(&system.join("\n\n"));
    if !options.tools.is_empty() {
        prompt.tools(options.tools);
    }
    if let Some(schema) = options.response_schema {
        prompt.response_format(schema);
    }
}

/// A complete answer. Its reasoning stays only while tools are declared.
fn answer(prompt: &mut Prompt, message: &Message, options: &PromptOptions<'_>) {
    prompt.special(ASSISTANT);
    if options.thinking != Thinking::Off && !options.tools.is_empty() {
        prompt.special(THINK);
        prompt.plain(message.reasoning.as_deref().unwrap_or_default());
    }
    prompt.special(THINK_END);
    prompt.answer(message);
    prompt.special(END);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::blocks::dsml::USER;
    use crate::text::joined;

    fn check(messages: &[(Role, &str)], thinking: Thinking, expected: &str) {
        let messages: Vec<Message> = messages.iter().map(|(role, text)| Message::new(*role, *text)).collect();
        let segments = render(&messages, &PromptOptions { thinking, ..PromptOptions::default() }).unwrap();
        let mut text = joined(&segments);
        for (token, name) in [(BEGIN, "[B]"), (END, "[E]"), (USER, "[U]"), (ASSISTANT, "[A]"), (REMINDER, "[R]")] {
            text = text.replace(token, name);
        }
        assert_eq!(text.replace(EFFORT_HIGH, "[high]").replace(EFFORT_MAX, "[max]"), expected);
    }

    #[test]
    fn turns_roles_and_efforts() {
        use Role::{Assistant, LatestReminder, System, Tool, User};
        check(&[(User, "q")], Thinking::Off, "[B][U]q[A]</think>");
        check(&[(User, "q"), (User, "p")], Thinking::Low, "[B][U]q\n\np[A]<think>");
        check(&[(System, "s"), (User, "q")], Thinking::High, "[B][high]s[U]q[A]<think>");
        check(&[(System, "s"), (User, "q"), (System, "t")], Thinking::Max, "[B][max]s\n\nt[U]q[A]<think>");
        check(
            &[(User, "q"), (Assistant, "a"), (Tool, "r"), (User, "p")],
            Thinking::Low,
            "[B][U]q[A]</think>a[E][U]<tool_result>r</tool_result>\n\np[A]<think>",
        );
        check(&[(User, "q"), (LatestReminder, "r"), (User, "p")], Thinking::Off, "[B][U]q[R]r[U]p[A]</think>");
    }

    #[test]
    fn levels_and_refusals() {
        let levels = [0, 1, 50, 51, 99, 100].map(|level| Thinking::level(level).unwrap());
        use Thinking::{High, Low, Max, Off};
        assert_eq!(levels, [Off, Low, Low, High, High, Max]);
        assert_eq!(Thinking::level(101), Err(PromptError::Level { level: 101 }));
        assert!(Thinking::effort("very").is_err());
        assert_eq!(render(&[], &PromptOptions::default()), Err(PromptError::Empty));
        // Spec 7.4.
        assert_eq!((EFFORT_HIGH.len(), EFFORT_MAX.len()), (476, 528));
    }
}
