//! Filters on texts that the template engine lacks, or has otherwise, and what methods of texts share with them. Pure.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, Value};

use super::arguments::invalid;
use super::python_text;

pub(super) fn install(environment: &mut Environment<'_>) {
    environment.add_filter("indent", indent);
    for name in ["escape", "e", "forceescape"] {
        environment.add_filter(name, escape);
    }
    environment.add_filter("trim", trim);
    environment.add_filter("wordcount", |text: String| words(&text).count());
    environment.add_filter("center", |text: String, width: Option<usize>| {
        padded(&text, width.unwrap_or(80), ' ', Side::Both)
    });
}

/// A template asks for no wider texts.
pub(super) const MAX_WIDTH: usize = 4_096;

fn trim(value: &Value, chars: Option<&str>) -> Value {
    let text = python_text::str_of(value);
    let trimmed = stripped(&text, chars, Side::Both);
    // Most have nothing to lose, and then share the text.
    match value.as_str() {
        Some(text) if text.len() == trimmed.len() => value.clone(),
        _ => trimmed.into(),
    }
}

/// Where a text is stripped, or gets its room.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Left,
    Right,
    Both,
}

pub(super) fn padded(text: &str, width: usize, fill: char, side: Side) -> String {
    let room = width.min(MAX_WIDTH).saturating_sub(text.chars().count());
    let left = match side {
        Side::Left => room,
        Side::Right => 0,
        // Python puts the odd space to the left where the width is odd.
        Side::Both => room / 2 + (room & width & 1),
    };
    let fill = |count| std::iter::repeat_n(fill, count);
    fill(left)
        .chain(text.chars())
        .chain(fill(room - left))
        .collect()
}

/// White space as Python's `str.strip` takes it: four separators are that in Python only.
pub(crate) fn is_space(char: char) -> bool {
    char.is_whitespace() || matches!(char, '\x1c'..='\x1f')
}

pub(super) fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(is_space).filter(|word| !word.is_empty())
}

/// Without these characters, or without white space, at its ends.
pub(super) fn stripped<'t>(text: &'t str, chars: Option<&str>, side: Side) -> &'t str {
    let is_taken = |char: char| match chars {
        Some(chars) => chars.contains(char),
        None => is_space(char),
    };
    match side {
        Side::Left => text.trim_start_matches(is_taken),
        Side::Right => text.trim_end_matches(is_taken),
        Side::Both => text.trim_matches(is_taken),
    }
}

/// All lines but the first are indented, and empty ones stay empty. A line end at the end stays, too.
fn indent(
    value: &Value,
    width: Option<Value>,
    first: Option<bool>,
    blank: Option<bool>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let width = kwargs.get::<Option<Value>>("width")?.or(width);
    let is_first = kwargs.get::<Option<bool>>("first")?.or(first) == Some(true);
    let is_blank = kwargs.get::<Option<bool>>("blank")?.or(blank) == Some(true);
    kwargs.assert_all_used()?;
    let indention = match width {
        None => " ".repeat(4),
        Some(width) => match width.as_str() {
            Some(text) => text.to_owned(),
            None => {
                let width = width.as_usize().unwrap_or(0);
                " ".repeat(width.min(MAX_WIDTH))
            }
        },
    };
    if value.kind() != ValueKind::String {
        return Err(invalid("only a text can be indented"));
    }
    let mut indented = String::new();
    for (number, line) in lines(value.as_str().unwrap_or_default()).enumerate() {
        let is_indented = match number {
            0 => is_first,
            _ => is_blank || !line.is_empty(),
        };
        if number > 0 {
            indented.push('\n');
        }
        if is_indented {
            indented.push_str(&indention);
        }
        indented.push_str(line);
    }
    Ok(indented)
}

/// The lines of a text to which a line end was added, as Python splits them.
fn lines(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let text = rest.take()?;
        let Some((line, after)) = first_line(text) else {
            return Some(text);
        };
        rest = Some(after);
        Some(without_line_end(line))
    })
}

fn is_line_end(char: char) -> bool {
    matches!(
        char,
        '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}'
    )
}

/// The first line with its end, and what follows it.
pub(super) fn first_line(text: &str) -> Option<(&str, &str)> {
    let at = text.find(is_line_end)?;
    let after = &text[at..];
    let length = if after.starts_with("\r\n") {
        2
    } else {
        after.chars().next().map_or(0, char::len_utf8)
    };
    Some(text.split_at(at + length))
}

pub(super) fn without_line_end(line: &str) -> &str {
    line.strip_suffix("\r\n")
        .unwrap_or_else(|| line.strip_suffix(is_line_end).unwrap_or(line))
}

/// With the entities that Python's library writes.
fn escape(value: &Value) -> String {
    let text = value.to_string();
    if value.is_safe() {
        return text;
    }
    let mut escaped = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '\'' => escaped.push_str("&#39;"),
            '"' => escaped.push_str("&#34;"),
            _ => escaped.push(char),
        }
    }
    escaped
}
