//! What a model of the V4 family wrote: reasoning, answer, tool calls in DSML tags (spec deepseek-v4, 7.3).
//! Never fails: text that is no whole call stays out of the calls, and the answer is marked as cut. Surprising fact: models leave out parts
//! of the tags now and then, so the first bar, the token, or both may be missing.

use serde_json::{Map, Value};

use super::dsml::{DSML, THINK, THINK_END};
use crate::text::chat::ToolCall;

/// A generated text, taken apart.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Answer {
    /// What was thought, without its tags; `None` where nothing was.
    pub reasoning: Option<String>,
    pub content: String,
    pub calls: Vec<ToolCall>,
    /// The text ended inside reasoning or inside a call.
    pub is_cut: bool,
}

/// Names of the tag around all calls, of V4 and V4.1.
const CALLS: [&str; 2] = ["tool_calls", "calls"];
/// What may stand behind `<` or `</` instead of the whole token.
const MARKS: [&str; 3] = [DSML, "DSML\u{ff5c}", ""];

/// Takes `text` apart. `is_thinking` when the prompt has opened the reasoning.
pub fn parse(text: &str, is_thinking: bool) -> Answer {
    let mut answer = Answer::default();
    let opened = text.strip_prefix(THINK);
    let rest = match (opened, is_thinking) {
        (None, false) => text,
        (opened, _) => {
            let thought = opened.unwrap_or(text);
            let Some((reasoning, rest)) = thought.split_once(THINK_END) else {
                // A call inside open reasoning is a thought about a call.
                answer.reasoning = Some(thought.to_owned());
                answer.is_cut = true;
                return answer;
            };
            answer.reasoning = Some(reasoning.to_owned());
            rest
        }
    };
    let Some(block) = find_calls(rest) else {
        answer.content = rest.to_owned();
        return answer;
    };
    answer.content = rest[..block.at].trim_end().to_owned();
    answer.is_cut = !read_calls(&rest[block.end..], block.mark, &mut answer.calls);
    answer
}

/// An opening tag.
struct Tag<'t> {
    at: usize,
    end: usize,
    mark: &'static str,
    attributes: &'t str,
}

/// The first tag that opens calls.
fn find_calls(text: &str) -> Option<Tag<'_>> {
    text.match_indices('<').find_map(|(at, _)| {
        CALLS.into_iter().find_map(|name| {
            // Without any mark only the full name counts: "<calls>" may be anything.
            let marks = if name == "tool_calls" { &MARKS[..] } else { &MARKS[..2] };
            marks.iter().find_map(|mark| open_tag(text, at, mark, name))
        })
    })
}

/// The tag `name` that opens at `at`, after white space that the caller has passed.
fn open_tag<'t>(text: &'t str, at: usize, mark: &'static str, name: &str) -> Option<Tag<'t>> {
    let rest = text[at..].strip_prefix('<')?.strip_prefix(mark)?;
    let rest = if mark.is_empty() { rest } else { rest.strip_prefix(' ').unwrap_or(rest) };
    let rest = rest.strip_prefix(name)?;
    let close = rest.find('>')?;
    let attributes = &rest[..close];
    if !attributes.is_empty() && !attributes.starts_with(char::is_whitespace) {
        return None;
    }
    let end = text.len() - rest.len() + close + 1;
    Some(Tag { at, end, mark, attributes })
}

/// Where the tag that closes `name` begins and ends. Tags that opened with a mark close with one.
fn find_close(text: &str, mark: &str, name: &str) -> Option<(usize, usize)> {
    let marks = if mark.is_empty() { &MARKS[2..] } else { &MARKS[..2] };
    text.match_indices("</").find_map(|(at, open)| {
        marks.iter().find_map(|mark| {
            let rest = text[at + open.len()..].strip_prefix(mark)?;
            let rest = if mark.is_empty() { rest } else { rest.strip_prefix(' ').unwrap_or(rest) };
            let rest = rest.strip_prefix(name)?.strip_prefix('>')?;
            Some((at, text.len() - rest.len()))
        })
    })
}

fn skip_space(text: &str) -> usize {
    text.len() - text.trim_start().len()
}

/// Reads calls up to the end tag of all; says whether that was there.
fn read_calls(text: &str, mark: &'static str, calls: &mut Vec<ToolCall>) -> bool {
    let mut rest = text;
    loop {
        rest = &rest[skip_space(rest)..];
        if CALLS.iter().any(|name| find_close(rest, mark, name).is_some_and(|(at, _)| at == 0)) {
            return true;
        }
        let Some(tag) = any_open(rest, mark, "invoke") else { return false };
        let Some((close, end)) = find_invoke_end(&rest[tag.end..], mark) else { return false };
        let inside = &rest[tag.end..tag.end + close];
        let (Some(name), Some(arguments)) = (attribute(tag.attributes, "name"), read_parameters(inside, mark)) else {
            return false;
        };
        let id = format!("call_{}", calls.len());
        calls.push(ToolCall { id, name, arguments: Value::Object(arguments).to_string() });
        rest = &rest[tag.end + end..];
    }
}

/// A tag right here, with the mark of its block or a shorter one.
fn any_open<'t>(text: &'t str, mark: &str, name: &str) -> Option<Tag<'t>> {
    let marks = if mark.is_empty() { &MARKS[2..] } else { &MARKS[..2] };
    marks.iter().find_map(|mark| open_tag(text, 0, mark, name))
}

/// End of a call: the first closing tag that is not inside a parameter.
fn find_invoke_end(text: &str, mark: &str) -> Option<(usize, usize)> {
    let mut at = 0;
    loop {
        at += skip_space(&text[at..]);
        match any_open(&text[at..], mark, "parameter") {
            Some(tag) => at += tag.end + find_close(&text[at + tag.end..], mark, "parameter")?.1,
            None => {
                let (close, end) = find_close(&text[at..], mark, "invoke")?;
                return Some((at + close, at + end));
            }
        }
    }
}

/// All parameters of a call; `None` if something else is among them.
fn read_parameters(text: &str, mark: &str) -> Option<Map<String, Value>> {
    let mut arguments = Map::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let tag = any_open(rest, mark, "parameter")?;
        let (close, end) = find_close(&rest[tag.end..], mark, "parameter")?;
        let text = &rest[tag.end..tag.end + close];
        let is_text = attribute(tag.attributes, "string").is_none_or(|v| v != "false");
        let raw = || Value::String(unescape_end(text));
        let value = if is_text { raw() } else { serde_json::from_str(text.trim()).unwrap_or_else(|_| raw()) };
        arguments.insert(attribute(tag.attributes, "name")?, value);
        rest = rest[tag.end + end..].trim_start();
    }
    Some(arguments)
}

/// The value of an attribute, its entities decoded.
fn attribute(attributes: &str, name: &str) -> Option<String> {
    let begin = format!("{name}=\"");
    let at = attributes.find(&begin)? + begin.len();
    let value = attributes[at..].split('"').next()?;
    let mut text = value.to_owned();
    // The ampersand comes last, so that nothing is decoded twice.
    for (entity, plain) in [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&apos;", "'"), ("&amp;", "&")] {
        text = text.replace(entity, plain);
    }
    Some(text)
}

/// Undoes the only escape of texts: that of the tag that ends them.
fn unescape_end(text: &str) -> String {
    let mut text = text.to_owned();
    for tag in [format!("/{DSML}parameter>"), format!("/{DSML} parameter>")] {
        text = text.replace(&format!("&lt;{tag}"), &format!("<{tag}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::blocks::dsml::{Prompt, Tags};
    use crate::text::chat::{Message, Role};
    use crate::text::joined;

    fn call(id: usize, name: &str, arguments: &str) -> ToolCall {
        ToolCall { id: format!("call_{id}"), name: name.into(), arguments: arguments.into() }
    }

    fn check(text: &str, is_thinking: bool, reasoning: Option<&str>, content: &str, calls: &[ToolCall], is_cut: bool) {
        let text = text.replace("D|", DSML);
        let found = parse(&text, is_thinking);
        let (reasoning, content, calls) = (reasoning.map(str::to_owned), content.to_owned(), calls.to_vec());
        assert_eq!(found, Answer { reasoning, content, calls, is_cut }, "{text}");
    }

    const F: &str = "<D|invoke name=\"f\">\n<D|parameter name=\"a\" string=\"true\">x</D|parameter>\n</D|invoke>\n";

    #[test]
    fn reasoning_and_content() {
        check("hello", false, None, "hello", &[], false);
        check("why</think>so", true, Some("why"), "so", &[], false);
        check("<think>why</think>so", false, Some("why"), "so", &[], false);
        check("still thinking", true, Some("still thinking"), "", &[], true);
        let inside = format!("I could <D|tool_calls>{F}</D|tool_calls>");
        check(&inside, true, Some(&inside.replace("D|", DSML)), "", &[], true);
    }

    #[test]
    fn calls_in_every_spelling() {
        let one = [call(0, "f", r#"{"a":"x"}"#)];
        check(&format!("ok\n\n<D|tool_calls>\n{F}</D|tool_calls>"), false, None, "ok", &one, false);
        check(&format!("<D|tool_calls>{F}</D|tool_calls>"), false, None, "", &one, false);
        let spaced = F.replace("D|", "D| ");
        check(&format!("t</think>\n\n<D| calls>\n{spaced}</D| calls>"), true, Some("t"), "", &one, false);
        let short = format!("<D|tool_calls>{F}</D|tool_calls>").replace("D|", "DSML\u{ff5c}");
        check(&short, false, None, "", &one, false);
        let bare = format!("<D|tool_calls>{F}</D|tool_calls>").replace("D|", "");
        check(&bare, false, None, "", &one, false);
        check("see <calls> and <tool_calling>", false, None, "see <calls> and <tool_calling>", &[], false);
    }

    #[test]
    fn values_and_their_types() {
        let block = "<D|tool_calls><D|invoke name=\"a&amp;b\"><D|parameter name=\"n\" string=\"false\">[1, {\"k\": null}]</D|parameter>\
                     <D|parameter name=\"t\">1 < 2\n</D|parameter><D|parameter name=\"bad\" string=\"false\">{oops</D|parameter></D|invoke>\
                     <D|invoke name=\"g\">\n\n</D|invoke></D|tool_calls>";
        let calls = [call(0, "a&b", r#"{"n":[1,{"k":null}],"t":"1 < 2\n","bad":"{oops"}"#), call(1, "g", "{}")];
        check(block, false, None, "", &calls, false);
    }

    #[test]
    fn what_is_cut_keeps_its_whole_calls() {
        let one = [call(0, "f", r#"{"a":"x"}"#)];
        check(&format!("<D|tool_calls>{F}"), false, None, "", &one, true);
        check(&format!("<D|tool_calls>{F}<D|invoke name=\"g\"><D|parameter name=\"q\""), false, None, "", &one, true);
        check(&format!("<D|tool_calls>{F}what?"), false, None, "", &one, true);
        check("<D|tool_calls><D|invoke nome=\"g\"></D|invoke></D|tool_calls>", false, None, "", &[], true);
    }

    #[test]
    fn what_is_rendered_is_read_back() {
        for tags in [Tags::V4, Tags::V41] {
            let end = format!("</{DSML}{}parameter>", tags.gap());
            let arguments = serde_json::json!({"a": format!("x{end}y</think>"), "b": [end], "c": {}, "d": ""});
            let message = Message {
                tool_calls: vec![call(0, "f", &arguments.to_string()), call(1, "g", "{}")],
                ..Message::new(Role::Assistant, "text")
            };
            let mut prompt = Prompt::new(tags);
            prompt.answer(&message);
            let found = parse(&joined(&prompt.segments), false);
            assert_eq!((found.content.as_str(), found.is_cut), ("text", false));
            assert_eq!(found.calls, message.tool_calls);
        }
    }
}
