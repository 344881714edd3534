//! A configuration as YAML, in the order of its fields. What is printed reads back as an equal
//! value, so text that would be taken for something else is quoted.

use std::fmt::Write;

use serde::Serialize;
use serde_json::{Map, Value};

use super::scalar::typed;
use super::tree::Scalar;

/// Fails only for what JSON has no form for either, such as maps whose keys are structs.
pub fn to_yaml(value: &impl Serialize) -> Result<String, serde_json::Error> {
    let value = serde_json::to_value(value)?;
    let mut out = String::new();
    match &value {
        Value::Object(map) if !map.is_empty() => push_map(&mut out, map, 0),
        Value::Array(items) if !items.is_empty() => push_list(&mut out, items, 0),
        scalar => {
            push_scalar(&mut out, scalar);
            out.push('\n');
        }
    }
    Ok(out)
}

/// The writer stands where the first key belongs; further ones are indented.
fn push_map(out: &mut String, map: &Map<String, Value>, indent: usize) {
    for (index, (key, value)) in map.iter().enumerate() {
        if index > 0 {
            push_indent(out, indent);
        }
        push_text(out, key);
        out.push(':');
        match value {
            Value::Object(map) if !map.is_empty() => {
                out.push('\n');
                push_indent(out, indent + 2);
                push_map(out, map, indent + 2);
            }
            Value::Array(items) if !items.is_empty() => {
                out.push('\n');
                push_indent(out, indent + 2);
                push_list(out, items, indent + 2);
            }
            scalar => {
                out.push(' ');
                push_scalar(out, scalar);
                out.push('\n');
            }
        }
    }
}

fn push_list(out: &mut String, items: &[Value], indent: usize) {
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            push_indent(out, indent);
        }
        out.push_str("- ");
        match item {
            Value::Object(map) if !map.is_empty() => push_map(out, map, indent + 2),
            Value::Array(items) if !items.is_empty() => push_list(out, items, indent + 2),
            scalar => {
                push_scalar(out, scalar);
                out.push('\n');
            }
        }
    }
}

fn push_indent(out: &mut String, indent: usize) {
    out.extend(std::iter::repeat_n(' ', indent));
}

fn push_scalar(out: &mut String, value: &Value) {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
        Value::Number(number) => out.push_str(&number.to_string()),
        // Reading substitutes in values, though not in keys.
        Value::String(text) => push_text(out, &text.replace('$', "$$")),
        Value::Array(_) => out.push_str("[]"),
        Value::Object(_) => out.push_str("{}"),
    }
}

fn push_text(out: &mut String, text: &str) {
    if reads_back_plain(text) {
        out.push_str(text);
        return;
    }
    out.push('"');
    for letter in text.chars() {
        match letter {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            letter if is_unprintable(letter) => {
                // Writing to a String cannot fail.
                let _ = write!(out, "\\U{:08X}", u32::from(letter));
            }
            letter => out.push(letter),
        }
    }
    out.push('"');
}

/// Narrower than YAML's rule for plain text, which has many corners.
fn reads_back_plain(text: &str) -> bool {
    let starts_well =
        text.starts_with(|first: char| first.is_ascii_alphabetic() || "/_".contains(first));
    let inside = |letter: char| letter.is_ascii_alphanumeric() || "-_./+@:".contains(letter);
    let is_string = matches!(typed(text), Ok(Scalar::Text(_)));
    starts_well && is_string && text.chars().all(inside) && !text.ends_with(':')
}

/// Characters that YAML wants escaped, and line breaks that only some readers take for one.
fn is_unprintable(letter: char) -> bool {
    letter.is_control()
        || matches!(
            letter,
            '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}'
        )
}
