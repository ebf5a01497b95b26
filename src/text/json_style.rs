//! JSON text as Python's `json.dumps(value, ensure_ascii=False)` writes it, which is what models saw in training.
//! Owns the spacing and the spelling of numbers; never parses. Surprising fact: floats differ from other writers (`1e-05`,
//! `1e+16`, `100000.0`), and a prompt that spells them otherwise has other tokens.

use serde_json::{Number, Value};

/// `value` in one line, with ", " and ": " between its parts.
pub fn to_line(value: &Value) -> String {
    let mut out = String::new();
    write(value, None, 0, &mut out);
    out
}

/// `value` over several lines, `indent` spaces a level.
pub fn to_lines(value: &Value, indent: usize) -> String {
    let mut out = String::new();
    write(value, Some(indent), 0, &mut out);
    out
}

fn write(value: &Value, indent: Option<usize>, depth: usize, out: &mut String) {
    match value {
        Value::Number(number) => out.push_str(&number_text(number)),
        Value::Array(items) => {
            write_list(items.iter(), ('[', ']'), indent, depth, out, |item, out| write(item, indent, depth + 1, out));
        }
        Value::Object(entries) => {
            write_list(entries.iter(), ('{', '}'), indent, depth, out, |(key, item), out| {
                out.push_str(&quoted(key));
                out.push_str(": ");
                write(item, indent, depth + 1, out);
            });
        }
        Value::String(text) => out.push_str(&quoted(text)),
        Value::Bool(true) => out.push_str("true"),
        Value::Bool(false) => out.push_str("false"),
        Value::Null => out.push_str("null"),
    }
}

fn write_list<T>(
    items: impl ExactSizeIterator<Item = T>,
    (open, close): (char, char),
    indent: Option<usize>,
    depth: usize,
    out: &mut String,
    mut write_item: impl FnMut(T, &mut String),
) {
    let is_empty = items.len() == 0;
    let new_line = |depth: usize, out: &mut String| {
        if let Some(indent) = indent.filter(|_| !is_empty) {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    };
    out.push(open);
    for (place, item) in items.enumerate() {
        if place > 0 {
            out.push_str(if indent.is_some() { "," } else { ", " });
        }
        new_line(depth + 1, out);
        write_item(item, out);
    }
    new_line(depth, out);
    out.push(close);
}

fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

fn number_text(number: &Number) -> String {
    match number.as_f64().filter(|_| number.is_f64()) {
        Some(float) => float_text(float),
        None => number.to_string(),
    }
}

/// Python's `repr`: the shortest digits that read back, positional from 1e-4 to below 1e16.
fn float_text(float: f64) -> String {
    let scientific = format!("{float:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else {
        return scientific;
    };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    match exponent {
        -4..16 => {
            let text = float.to_string();
            if text.contains('.') { text } else { text + ".0" }
        }
        _ => format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(json: &str, expected: &str) {
        assert_eq!(to_line(&serde_json::from_str(json).unwrap()), expected);
    }

    #[test]
    fn numbers_are_spelled_as_in_python() {
        check(
            "[1e16, 123456789012345680000.0, 1e15, 0.0001, 0.00001, -0.0, 1.5e300, 5e-324, 12345678901234567890, -5, 1.50]",
            "[1e+16, 1.2345678901234568e+20, 1000000000000000.0, 0.0001, 1e-05, -0.0, 1.5e+300, 5e-324, 12345678901234567890, -5, 1.5]",
        );
    }

    #[test]
    fn text_is_escaped_no_more_than_needed() {
        check(
            r#"{"\u00e9\"":"a\/\u2028\u007f\u0001\n","b":[],"c":{}}"#,
            "{\"\u{e9}\\\"\": \"a/\u{2028}\u{7f}\\u0001\\n\", \"b\": [], \"c\": {}}",
        );
    }

    #[test]
    fn indented() {
        let value = serde_json::json!({"a": [1, {"b": null}], "c": []});
        assert_eq!(to_lines(&value, 2), "{\n  \"a\": [\n    1,\n    {\n      \"b\": null\n    }\n  ],\n  \"c\": []\n}");
    }
}
