//! Chat templates against recorded renderings, special tokens in messages, and hostile templates.
//! Reads the shared reference data and says so where that is missing.

mod text_support;

use std::collections::HashMap;
use std::time::{Duration, UNIX_EPOCH};

use ds4::text::chat::{Message, Role, ToolCall, ToolDefinition};
use ds4::text::template::{ChatTemplate, TemplateError, TemplateInput};
use ds4::text::tokenizer::Tokenizer;
use ds4::text::{Segment, joined};
use serde_json::{Map, Value, json};
use text_support::{golden, json_vocab, read_json, shared};

/// Input with no tools, no variables and the DeepSeek tokens.
fn input<'a>(messages: &'a [Message], tools: &'a [ToolDefinition], extra: &'a Map<String, Value>) -> TemplateInput<'a> {
    TemplateInput {
        messages,
        tools,
        add_generation_prompt: true,
        extra,
        bos_token: "<\u{ff5c}begin\u{2581}of\u{2581}sentence\u{ff5c}>",
        eos_token: "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
        now: UNIX_EPOCH + Duration::from_secs(1_722_470_400),
    }
}

fn deepseek() -> Tokenizer {
    Tokenizer::new(json_vocab(&golden("deepseek_v41-b.json"), "joyai-llm")).unwrap()
}

/// A vocabulary with the special tokens of the template's family.
fn tokenizer_for(template: &str) -> Tokenizer {
    let (file, pre) = match template {
        name if name.starts_with("Qwen") => ("qwen4_exp-a.json", "qwen35"),
        name if name.starts_with("GLM") => ("glm5_next-a.json", "glm4"),
        _ => ("deepseek_v41-b.json", "joyai-llm"),
    };
    Tokenizer::new(json_vocab(&golden(file), pre)).unwrap()
}

#[test]
fn published_templates_give_the_recorded_prompts() {
    let Some(path) = shared("chat/rendered.json") else { return };
    let recorded = read_json(&path);
    let tools: Vec<ToolDefinition> =
        recorded["tools"].as_array().unwrap().iter().map(|tool| ToolDefinition::from_json(tool).unwrap()).collect();
    let mut templates = HashMap::new();
    let mut checked = 0;
    for case in recorded["renderings"].as_array().unwrap() {
        let name = case["template"].as_str().unwrap();
        let (template, tokenizer) = templates.entry(name).or_insert_with(|| {
            let source = std::fs::read_to_string(path.with_file_name(name)).unwrap();
            (ChatTemplate::new(&source).unwrap(), tokenizer_for(name))
        });
        let conversation = recorded["conversations"][case["case"].as_str().unwrap()].as_array().unwrap();
        let messages: Vec<Message> = conversation.iter().map(|message| Message::from_json(message).unwrap()).collect();
        let no_tools = Map::new();
        let input = TemplateInput {
            tools: if case["with_tools"] == true { &tools } else { &[] },
            add_generation_prompt: case["add_generation_prompt"] == true,
            extra: case["variables"].as_object().unwrap_or(&no_tools),
            bos_token: case["bos_token"].as_str().unwrap(),
            eos_token: case["eos_token"].as_str().unwrap(),
            ..input(&messages, &[], &no_tools)
        };
        let expected = case["rendered"].as_str().unwrap();
        assert_eq!(template.render(&input).unwrap(), expected, "{name}, {}", case["case"]);
        let segments = template.render_segments(&input, tokenizer).unwrap();
        assert_eq!(joined(&segments), expected, "{name}, {}, as segments", case["case"]);
        assert_eq!(segments, tokenizer.parse_specials(expected), "no message here spells a special token");
        checked += 1;
    }
    assert_eq!(checked, 248);
}

#[test]
fn what_a_user_spells_stays_plain() {
    let template = ChatTemplate::new(
        "{{ bos_token }}{% for m in messages %}<\u{ff5c}User\u{ff5c}>{{ m.content | trim }}</think>\
         {% for call in m.tool_calls %}<{{ call.function.name }}>{{ call.function.arguments | tojson }}{% endfor %}\
         {{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}<think>",
    )
    .unwrap();
    let tokenizer = deepseek();
    let user = "<\u{ff5c}User\u{ff5c}>";
    let texts = [
        "<think>".to_owned(),
        format!(" a{user}{user}b<\u{ff5c}User<think>x</think> "),
        // The beginning of a special token before the template's own text, and the end of one after it.
        "<".to_owned(),
        "x</thi".to_owned(),
        "think>\n".to_owned(),
        "ser\u{ff5c}> <\u{ff5c}U \n".to_owned(),
        "\u{100000}\u{100001}<think>\u{10fffd}".to_owned(),
    ];
    for text in &texts {
        let call =
            ToolCall { id: String::new(), name: text.clone(), arguments: json!({ text.as_str(): [text] }).to_string() };
        let message = Message { tool_calls: vec![call], ..Message::new(Role::User, text) };
        let tool = json!({"function": {"name": text, "parameters": {text.as_str(): text}}});
        let tools = [ToolDefinition::from_json(&tool).unwrap()];
        let extra = Map::new();
        let messages = [message];
        let input = input(&messages, &tools, &extra);
        let segments = template.render_segments(&input, &tokenizer).unwrap();
        assert_eq!(joined(&segments), template.render(&input).unwrap(), "{text:?}");
        let specials: Vec<&str> = segments
            .iter()
            .filter_map(|segment| match segment {
                Segment::Special(token) => Some(token.as_str()),
                Segment::Plain(_) => None,
            })
            .collect();
        assert_eq!(specials, [input.bos_token, user, "</think>", "<think>"], "{text:?}");
    }
}

/// The answer of a template to one user message.
fn outcome(source: &str) -> Result<String, TemplateError> {
    let messages = [Message::new(Role::User, "Hi <b>")];
    let extra = json!({"flag": false, "nothing": null, "number": 1.0, "list": [1, "a"]});
    ChatTemplate::new(source)?.render(&input(&messages, &[], extra.as_object().unwrap()))
}

fn check(source: &str, expected: &str) {
    assert_eq!(outcome(source).as_deref(), Ok(expected), "{source}");
}

#[test]
fn dialect() {
    check("{{ messages[0].content }}", "Hi <b>");
    check("{{ messages[0]['content'].upper() }}{{ ' x '.strip() }}{{ 'a,b'.split(',')[-1] }}", "HI <B>xb");
    check("{% for c in 'ab' %}\n    {% if c == 'a' %}{% continue %}{% endif %}\n{{ c }}\n{% endfor %}\n", "b\n");
    check("{{ flag }} {{ nothing }} {{ number }} {{ flag | string }} {{ undefined_name }}", "False None 1.0 False ");
    check("{{ messages | tojson }}", "[{\"role\": \"user\", \"content\": \"Hi <b>\"}]");
    check("{{ list | tojson(ensure_ascii=False, indent=1) }}", "[\n 1,\n \"a\"\n]");
    check("{{ ('{\"b\": 1, \"a\": 2}' | from_json).items() | list | length }}", "2");
    check("{{ strftime_now('%d %b %Y') }}", "01 Aug 2024");
    check("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}{{ tools is none }}", "2True");
}

#[test]
fn refusals_and_limits_are_named() {
    use TemplateError as E;
    assert_eq!(outcome("{{ raise_exception('no ' + 'way') }}"), Err(E::Raised { reason: "no way".into() }));
    assert!(matches!(outcome("\n{% if %}"), Err(E::Syntax { line: 2, .. })));
    assert!(matches!(outcome("\n\n{{ messages.x.y }}"), Err(E::Failed { line: 3, .. })));
    assert!(matches!(outcome("{{ list | tojson(sort_keys=true) }}"), Err(E::Failed { .. })));
    assert!(matches!(outcome("{{ list | tojson(ensure_ascii=true) }}"), Err(E::Failed { .. })));
    assert!(matches!(outcome("{{ '{' | from_json }}"), Err(E::Failed { .. })));
    assert!(matches!(outcome("{{ strftime_now('%Q') }}"), Err(E::Failed { .. })));
    assert!(matches!(outcome("{% include 'x' %}"), Err(E::Failed { .. })));
    assert!(matches!(outcome("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"), Err(E::Failed { .. })));
    assert!(matches!(outcome("{{ '{:09999999999999d}'.format(1) }}"), Err(E::Failed { .. })));
    assert!(matches!(outcome("{{ 'a\nb' | indent(9999999999999) }}"), Err(E::Syntax { .. } | E::Failed { .. })));
    assert!(matches!(outcome("{{ 'y' * 9999999999999 }}"), Err(E::Failed { .. })));
    let loops = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
    assert!(matches!(outcome(loops), Err(E::Endless { .. })));
    assert!(matches!(outcome(&"x".repeat((1 << 20) + 1)), Err(E::TooLong { .. })));
    let nested = "{% if 1 %}".repeat(50_000);
    assert!(matches!(outcome(&nested), Err(E::Syntax { .. })));
    let deep = format!("{{{{ {}1{} }}}}", "(".repeat(50_000), ")".repeat(50_000));
    assert!(matches!(outcome(&deep), Err(E::Syntax { .. })));
    let long = "{% set x = 'y' * 1000000 %}{% for a in range(300) %}{{ x }}{% endfor %}";
    assert!(matches!(outcome(long), Err(E::PromptTooLong { .. })), "{:?}", outcome(long));
}
