//! YAML text -> a tree of texts with their positions. What a text means (a number, a duration) is decided
//! later, by what the setting wants: so `name: 007` stays as it was written.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::options::MergeKeyPolicy;
use serde_saphyr::{Error, Location, Spanned};

use super::problems::Position;

/// Configuration files have a few kilobytes. A megabyte is a mistake.
const MAX_TEXT_BYTES: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct Node {
    pub(super) at: Position,
    pub(super) value: Value,
}

#[derive(Debug)]
pub(super) enum Value {
    Map(Vec<Entry>),
    List(Vec<Node>),
    Scalar(Scalar),
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) key: String,
    pub(super) key_at: Position,
    pub(super) value: Node,
}

#[derive(Debug)]
pub(super) struct Scalar {
    pub(super) text: String,
    /// Quoted text, or a block of text: never a number, `true` or null.
    pub(super) is_quoted: bool,
}

/// `None` for a document that sets nothing.
pub(super) fn parse(text: &[u8]) -> Result<Option<Node>, (Position, String)> {
    if text.len() > MAX_TEXT_BYTES {
        let message = format!("file is larger than {MAX_TEXT_BYTES} bytes");
        return Err((Position::START, message));
    }
    let text = std::str::from_utf8(text).map_err(|error| {
        let valid = String::from_utf8_lossy(&text[..error.valid_up_to()]);
        let last_line = valid.rsplit('\n').next().unwrap_or_default();
        let line = 1 + valid.matches('\n').count();
        let column = 1 + last_line.chars().count();
        (Position { line, column }, "file is not UTF-8".to_owned())
    })?;
    let options = serde_saphyr::options! {
        merge_keys: MergeKeyPolicy::Error,
        reject_unsupported_tags: true,
        non_finite_float_policy: serde_saphyr::options::NonFiniteFloatPolicy::PassThrough,
        with_snippet: false,
    };
    let raw: Option<Spanned<Raw>> = serde_saphyr::from_str_with_options(text, options)
        .map_err(|error| explain(&error, text))?;
    Ok(raw.map(|raw| node(raw, text, Position::START)))
}

/// A value as the YAML library gives it.
enum Raw {
    Map(Vec<(Spanned<String>, Spanned<Raw>)>),
    List(Vec<Spanned<Raw>>),
    Text(String),
    /// Null, a number or a boolean: its text is taken from the file.
    Plain,
}

fn node(raw: Spanned<Raw>, text: &str, parent_at: Position) -> Node {
    let source = source(&raw.defined, text);
    let is_absent = matches!(raw.value, Raw::Plain) && source.is_empty();
    // The library puts a value that is not there at the next token.
    let at = if is_absent {
        parent_at
    } else {
        position(&raw.referenced)
    };
    let value = match raw.value {
        Raw::Map(entries) => Value::Map(
            entries
                .into_iter()
                .map(|(key, value)| {
                    let key_at = position(&key.referenced);
                    Entry {
                        key: key.value,
                        key_at,
                        value: node(value, text, key_at),
                    }
                })
                .collect(),
        ),
        Raw::List(items) => {
            Value::List(items.into_iter().map(|item| node(item, text, at)).collect())
        }
        Raw::Text(value) => Value::Scalar(Scalar {
            is_quoted: source.starts_with(['"', '\'', '|', '>']),
            text: value,
        }),
        Raw::Plain => Value::Scalar(Scalar {
            text: source.trim().to_owned(),
            is_quoted: false,
        }),
    };
    Node { at, value }
}

fn source<'a>(at: &Location, text: &'a str) -> &'a str {
    let span = at.span();
    let (Some(start), Some(len)) = (span.byte_offset(), span.byte_len()) else {
        return "";
    };
    text.get(start as usize..(start + len) as usize)
        .unwrap_or_default()
}

fn position(at: &Location) -> Position {
    Position {
        line: at.line().max(1) as usize,
        column: at.column().max(1) as usize,
    }
}

/// The library's message, in the words of this project where it speaks of its own options.
fn explain(error: &Error, text: &str) -> (Position, String) {
    let error = error.without_snippet();
    let at = error.location();
    let position = at.map_or(Position::START, |at| position(&at));
    let message = match error {
        Error::DuplicateMappingKey { key, .. } => match key {
            Some(key) => format!("key `{key}` is given twice"),
            None => "a key is given twice".to_owned(),
        },
        Error::MultipleDocuments { .. } => {
            "a second document starts here; there can be only one".to_owned()
        }
        error => {
            let message = error.to_string();
            let place = at.map(|at| format!(" at line {}, column {}", at.line(), at.column()));
            let end = place.unwrap_or_default();
            let message = message.strip_suffix(&end).unwrap_or(&message);
            let is_flow = message.contains("flow mapping") || message.contains("flow sequence");
            let is_variable = is_flow && text.contains("${");
            let is_tab = message.starts_with("tab");
            let hint = match (is_variable, is_tab) {
                (true, _) => " (`${...}` needs quotes between braces or brackets)".to_owned(),
                (false, true) => "; use spaces".to_owned(),
                (false, false) => likely_cause(message, position, text).unwrap_or_default(),
            };
            format!("{message}{hint}")
        }
    };
    (position, message)
}

/// What usually stands behind a message that speaks of its consequence.
fn likely_cause(message: &str, at: Position, text: &str) -> Option<String> {
    if message.contains("illegal placement of ':'") {
        let line = unclosed_bracket(text.lines().take(at.line - 1))?;
        return Some(format!("; is a bracket of line {line} not closed?"));
    }
    let line = text.lines().nth(at.line - 1)?;
    let begins_here = line.chars().take(at.column - 1).all(|letter| letter == ' ');
    let is_in_no_map = message.contains("block mapping, did not find expected key");
    let hint = "; does this line begin in the column of its neighbours?";
    (is_in_no_map && begins_here).then(|| hint.to_owned())
}

/// The line of the innermost bracket that these lines leave open. Comments do not count.
fn unclosed_bracket<'t>(lines: impl Iterator<Item = &'t str>) -> Option<usize> {
    let mut open = Vec::new();
    for (number, line) in (1..).zip(lines) {
        for letter in line.chars().take_while(|letter| *letter != '#') {
            match letter {
                '[' | '{' => open.push(number),
                ']' | '}' => {
                    open.pop();
                }
                _ => {}
            }
        }
    }
    open.pop()
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RawVisitor)
    }
}

struct RawVisitor;

impl<'de> Visitor<'de> for RawVisitor {
    type Value = Raw;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Raw, E> {
        Ok(Raw::Plain)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Raw, E> {
        Ok(Raw::Plain)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Raw, E> {
        Ok(Raw::Plain)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Raw, E> {
        Ok(Raw::Plain)
    }

    fn visit_i128<E>(self, _: i128) -> Result<Raw, E> {
        Ok(Raw::Plain)
    }

    fn visit_u128<E>(self, _: u128) -> Result<Raw, E> {
        Ok(Raw::Plain)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Raw, E> {
        Ok(Raw::Plain)
    }

    fn visit_str<E>(self, text: &str) -> Result<Raw, E> {
        Ok(Raw::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Raw, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Raw::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Raw, A::Error> {
        let mut map = Vec::new();
        while let Some(entry) = entries.next_entry()? {
            map.push(entry);
        }
        Ok(Raw::Map(map))
    }
}
