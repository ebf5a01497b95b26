//! V4 and V4.1 prompts against the publisher's own encoder, text and special ranges alike.
//! Reads the shared reference data and says so where that is missing; never writes an expectation of its own.

mod text_support;

use ds4::models::{deepseek4, deepseek41};
use ds4::text::chat::{Message, ToolDefinition};
use ds4::text::{Segment, joined};
use serde_json::Value;
use text_support::{read_json, shared};

fn list<'v, T>(value: &'v Value, read: impl Fn(&'v Value) -> T) -> Vec<T> {
    value.as_array().map(|items| items.iter().map(read).collect()).unwrap_or_default()
}

/// Character ranges of the special segments.
fn special_ranges(segments: &[Segment]) -> Vec<[u64; 2]> {
    let mut ranges = Vec::new();
    let mut at = 0;
    for segment in segments {
        match segment {
            Segment::Plain(text) => at += text.chars().count() as u64,
            Segment::Special(text) => {
                let end = at + text.chars().count() as u64;
                ranges.push([at, end]);
                at = end;
            }
        }
    }
    ranges
}

/// A request of the reference, and how hard the model is asked to think.
struct Request {
    messages: Vec<Message>,
    tools: Vec<ToolDefinition>,
    is_thinking: bool,
    effort: Option<String>,
}

/// Compares every prompt of `model` with what `render` makes of its request.
fn check(model: &str, render: impl Fn(&Request) -> Vec<Segment>) {
    let Some(path) = shared("chat/deepseek_encoder.json") else { return };
    let golden = read_json(&path);
    let mut checked = 0;
    for prompt in golden["prompts"].as_array().unwrap().iter().filter(|prompt| prompt["model"] == model) {
        let request = &golden["requests"][prompt["case"].as_str().unwrap()];
        let request = Request {
            messages: list(&request["messages"], |message| Message::from_json(message).unwrap()),
            tools: list(&request["tools"], |tool| ToolDefinition::from_json(tool).unwrap()),
            is_thinking: prompt["thinking"].as_bool().unwrap(),
            effort: prompt["reasoning_effort"].as_str().map(str::to_owned),
        };
        let segments = render(&request);
        let case = format!("{} {} {:?}", prompt["case"], request.is_thinking, request.effort);
        assert_eq!(joined(&segments), prompt["prompt"].as_str().unwrap(), "{case}");
        let expected =
            list(&prompt["special_ranges"], |range| [range[0].as_u64().unwrap(), range[1].as_u64().unwrap()]);
        assert_eq!(special_ranges(&segments), expected, "{case}");
        checked += 1;
    }
    assert_eq!(checked, 48);
}

#[test]
fn v41_prompts_equal_the_publishers() {
    use deepseek41::chat::{PromptOptions, Thinking, render};
    check("DeepSeek-V4.1-Flash", |request| {
        let thinking = match (request.is_thinking, &request.effort) {
            (false, _) => Thinking::Off,
            (true, None) => Thinking::DEFAULT,
            (true, Some(effort)) => Thinking::effort(effort).unwrap(),
        };
        let options = PromptOptions { thinking, tools: &request.tools, ..PromptOptions::default() };
        render(&request.messages, &options).unwrap()
    });
}

#[test]
fn v4_prompts_equal_the_publishers() {
    use deepseek4::chat::{PromptOptions, Thinking, render};
    check("DeepSeek-V4-Pro", |request| {
        let thinking = match (request.is_thinking, &request.effort) {
            (false, _) => Thinking::Off,
            (true, None) => Thinking::DEFAULT,
            (true, Some(effort)) => Thinking::effort(effort).unwrap(),
        };
        let options = PromptOptions { thinking, tools: &request.tools, ..PromptOptions::default() };
        render(&request.messages, &options).unwrap()
    });
}
