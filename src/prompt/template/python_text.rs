//! Python's `str` and `repr` of values. Pure.

use std::borrow::Cow;
use std::fmt::Write;

use minijinja::Value;
use minijinja::value::ValueKind;

use super::number;

/// `str`: what printing shows.
pub(super) fn write_str(out: &mut String, value: &Value) {
    match value.as_str() {
        Some(text) => out.push_str(text),
        // An undefined value is nothing by itself, and has a name within others.
        None if value.is_undefined() => {}
        None => write_repr(out, value),
    }
}

pub(super) fn str_of(value: &Value) -> Cow<'_, str> {
    match value.as_str() {
        Some(text) => Cow::Borrowed(text),
        None => {
            let mut text = String::new();
            write_str(&mut text, value);
            Cow::Owned(text)
        }
    }
}

pub(super) fn repr_of(value: &Value) -> String {
    let mut text = String::new();
    write_repr(&mut text, value);
    text
}

/// `repr`: also what is within lists and mappings.
fn write_repr(out: &mut String, value: &Value) {
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::String => write_text(out, value.as_str().unwrap_or_default()),
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(float) => out.push_str(&number::float_text(float)),
            Err(_) => write_own(out, value),
        },
        ValueKind::Seq => {
            let (open, close) = if value.is_tuple() {
                ('(', ')')
            } else {
                ('[', ']')
            };
            out.push(open);
            let mut count = 0;
            for item in value.try_iter().into_iter().flatten() {
                if count > 0 {
                    out.push_str(", ");
                }
                count += 1;
                write_repr(out, &item);
            }
            if value.is_tuple() && count == 1 {
                out.push(',');
            }
            out.push(close);
        }
        ValueKind::Map => {
            out.push('{');
            for (number, key) in value.try_iter().into_iter().flatten().enumerate() {
                if number > 0 {
                    out.push_str(", ");
                }
                write_repr(out, &key);
                out.push_str(": ");
                write_repr(out, &value.get_item(&key).unwrap_or_default());
            }
            out.push('}');
        }
        _ => write_own(out, value),
    }
}

/// Writes a value as the template engine does.
fn write_own(out: &mut String, value: &Value) {
    // Writing to a String cannot fail.
    let _ = write!(out, "{value}");
}

/// In single quotes, unless only those are in it.
fn write_text(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.push(quote);
    for char in text.chars() {
        match char {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            char if char == quote => {
                out.push('\\');
                out.push(char);
            }
            char if is_printable(char) => out.push(char),
            char => {
                let code = u32::from(char);
                let _ = match code {
                    0..=0xff => write!(out, "\\x{code:02x}"),
                    0x100..=0xffff => write!(out, "\\u{code:04x}"),
                    _ => write!(out, "\\U{code:08x}"),
                };
            }
        }
    }
    out.push(quote);
}

/// Neither a control or a format character, nor a space other than the plain one, nor one for private use. Codes that
/// stand for nothing count as printable: which do depends on the Unicode version of the engine's Python.
fn is_printable(char: char) -> bool {
    if matches!(char, ' '..='~') {
        return true;
    }
    let is_other_space = char.is_whitespace();
    let is_format = matches!(
        u32::from(char),
        0xad | 0x600..=0x605
            | 0x61c
            | 0x6dd
            | 0x70f
            | 0x890..=0x891
            | 0x8e2
            | 0x180e
            | 0x200b..=0x200f
            | 0x202a..=0x202e
            | 0x2060..=0x206f
            | 0xfeff
            | 0xfff9..=0xfffb
            | 0x110bd
            | 0x110cd
            | 0x13430..=0x1343f
            | 0x1bca0..=0x1bca3
            | 0x1d173..=0x1d17a
            | 0xe0001..=0xe007f
    );
    let is_private = matches!(u32::from(char), 0xe000..=0xf8ff | 0xf0000..=0x10_ffff);
    !(char.is_control() || is_other_space || is_format || is_private)
}
