//! Methods of Python's texts, lists, mappings and numbers that the template engine lacks, or has otherwise. Pure.

use minijinja::formatting::{self, FormatStyle};
use minijinja::value::{Tuple, ValueKind};
use minijinja::{Environment, Error, State, Value};
use minijinja_contrib::pycompat;

use super::arguments::{Arguments, invalid};
use super::texts::{self, MAX_WIDTH, Side};
use super::{number, python_text};

pub(super) fn install(environment: &mut Environment<'_>) {
    environment.set_unknown_method_callback(method);
}

fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let found = match value.kind() {
        ValueKind::String => of_text(value.as_str().unwrap_or_default(), name, args)?,
        ValueKind::Seq => of_list(value, name, args)?,
        ValueKind::Map if name == "copy" && args.is_empty() => Some(value.clone()),
        ValueKind::Number if name == "is_integer" && args.is_empty() => {
            let float = f64::try_from(value.clone())?;
            Some(Value::from(float.fract() == 0.0))
        }
        _ => None,
    };
    match found {
        Some(found) => Ok(found),
        None => pycompat::unknown_method_callback(state, value, name, args),
    }
}

fn of_list(list: &Value, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    match (name, args) {
        ("copy", []) => Ok(Some(list.clone())),
        ("index", [wanted]) => {
            let at = list.try_iter()?.position(|item| item == *wanted);
            let at = at.ok_or_else(|| invalid("no such item in the list"))?;
            Ok(Some(Value::from(at)))
        }
        _ => Ok(None),
    }
}

/// An argument that is a text, or none or left out.
fn maybe_text(given: &Arguments<'_>, name: &str) -> Result<Option<String>, Error> {
    let text = |value: Value| match value.as_str() {
        Some(text) => Ok(text.to_owned()),
        None => Err(invalid("a method of a text needs a text")),
    };
    given.some(name)?.map(text).transpose()
}

fn text_of(given: &Arguments<'_>, name: &str) -> Result<String, Error> {
    maybe_text(given, name)?.ok_or_else(|| invalid("a method of a text needs a text"))
}

/// What a method of a text returns, if it is one of these.
fn of_text(text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let given = |names: &'static [&'static str]| Arguments::new(args, names);
    let parts = |before: &str, separator: &str, after: &str| {
        let parts = [before, separator, after].map(Value::from);
        Value::from(Tuple::from(parts.to_vec()))
    };
    Ok(Some(match name {
        "strip" | "lstrip" | "rstrip" => {
            let chars = maybe_text(&given(&["chars"])?, "chars")?;
            let side = match name {
                "lstrip" => Side::Left,
                "rstrip" => Side::Right,
                _ => Side::Both,
            };
            texts::stripped(text, chars.as_deref(), side).into()
        }
        "split" | "rsplit" => {
            let given = given(&["sep", "maxsplit"])?;
            let separator = maybe_text(&given, "sep")?;
            if separator.as_deref() == Some("") {
                return Err(invalid("empty separator"));
            }
            let times = given.times("maxsplit")?;
            match name {
                "split" => split(text, separator.as_deref(), times),
                _ => rsplit(text, separator.as_deref(), times),
            }
        }
        "splitlines" => splitlines(text, given(&["keepends"])?.is("keepends")?),
        "replace" => {
            let given = given(&["old", "new", "count"])?;
            let (old, new) = (text_of(&given, "old")?, text_of(&given, "new")?);
            match given.times("count")? {
                Some(times) => text.replacen(&old, &new, times).into(),
                None => text.replace(&old, &new).into(),
            }
        }
        "find" | "rfind" | "index" | "rindex" | "count" => {
            let given = given(&["sub", "start", "end"])?;
            let part = text_of(&given, "sub")?;
            let Some((within, skipped)) = between(text, &given)? else {
                return Ok(Some(found(name, None)?));
            };
            match name {
                "count" if part.is_empty() => (within.chars().count() + 1).into(),
                "count" => within.matches(&*part).count().into(),
                "find" | "index" => found(name, place(within, within.find(&*part), skipped))?,
                _ => found(name, place(within, within.rfind(&*part), skipped))?,
            }
        }
        "startswith" | "endswith" => {
            let given = given(&["prefix", "start", "end"])?;
            let prefix = given.some("prefix")?.unwrap_or_default();
            let within = between(text, &given)?;
            let has = |part: &Value| -> Result<bool, Error> {
                let part = part
                    .as_str()
                    .ok_or_else(|| invalid("a method of a text needs a text"))?;
                Ok(within.is_some_and(|(within, _)| match name {
                    "startswith" => within.starts_with(part),
                    _ => within.ends_with(part),
                }))
            };
            let any = if prefix.is_tuple() {
                let mut any = false;
                for part in prefix.try_iter()? {
                    any |= has(&part)?;
                }
                any
            } else {
                has(&prefix)?
            };
            any.into()
        }
        "removeprefix" => {
            let prefix = text_of(&given(&["prefix"])?, "prefix")?;
            text.strip_prefix(&*prefix).unwrap_or(text).into()
        }
        "removesuffix" => {
            let suffix = text_of(&given(&["suffix"])?, "suffix")?;
            text.strip_suffix(&*suffix).unwrap_or(text).into()
        }
        "partition" | "rpartition" => {
            let separator = text_of(&given(&["sep"])?, "sep")?;
            let found = match name {
                "partition" => text.split_once(&*separator),
                _ => text.rsplit_once(&*separator),
            };
            match (found, name) {
                (Some((before, after)), _) => parts(before, &separator, after),
                (None, "partition") => parts(text, "", ""),
                (None, _) => parts("", "", text),
            }
        }
        "zfill" => {
            let width = given(&["width"])?.times("width")?.unwrap_or(0);
            zfill(text, width).into()
        }
        "center" | "ljust" | "rjust" => {
            let given = given(&["width", "fillchar"])?;
            let width = given.times("width")?.unwrap_or(0);
            let fill = maybe_text(&given, "fillchar")?;
            let fill = fill.as_deref().unwrap_or(" ").chars().next();
            let fill = fill.ok_or_else(|| invalid("the fill character must be one"))?;
            let side = match name {
                "center" => Side::Both,
                "ljust" => Side::Right,
                _ => Side::Left,
            };
            texts::padded(text, width, fill, side).into()
        }
        "expandtabs" => {
            let width = given(&["tabsize"])?.times("tabsize")?.unwrap_or(8);
            expandtabs(text, width).into()
        }
        "title" => title(text).into(),
        "isspace" => (!text.is_empty() && text.chars().all(texts::is_space)).into(),
        "format" => return format(text, args).map(Some),
        _ => return Ok(None),
    }))
}

/// The part of a text from `start` to `end`, and how many characters are before it; none where it starts behind the text.
fn between<'t>(text: &'t str, given: &Arguments<'_>) -> Result<Option<(&'t str, usize)>, Error> {
    let (start, end) = (given.integer("start")?, given.integer("end")?);
    if start.is_none() && end.is_none() {
        return Ok(Some((text, 0)));
    }
    let length = text.chars().count();
    let clamped = |bound: i64| {
        if bound < 0 {
            length.saturating_sub(usize::try_from(bound.unsigned_abs()).unwrap_or(length))
        } else {
            usize::try_from(bound).unwrap_or(usize::MAX)
        }
    };
    let (start, end) = (
        start.map_or(0, clamped),
        end.map_or(length, clamped).min(length),
    );
    if start > end {
        return Ok(None);
    }
    let at = |index: usize| {
        text.char_indices()
            .nth(index)
            .map_or(text.len(), |(at, _)| at)
    };
    Ok(Some((&text[at(start)..at(end)], start)))
}

/// The character at a byte.
fn place(within: &str, at: Option<usize>, skipped: usize) -> Option<usize> {
    at.map(|at| skipped + within[..at].chars().count())
}

fn found(name: &str, at: Option<usize>) -> Result<Value, Error> {
    match (at, name) {
        (Some(at), _) => Ok(Value::from(at)),
        (None, "count") => Ok(Value::from(0)),
        (None, "find" | "rfind") => Ok(Value::from(-1)),
        (None, _) => Err(invalid("substring not found")),
    }
}

/// Splits from the start, at most so many times.
fn split(text: &str, separator: Option<&str>, times: Option<usize>) -> Value {
    let parts = times.map_or(usize::MAX, |times| times.saturating_add(1));
    let Some(separator) = separator else {
        let mut left = text.trim_start_matches(texts::is_space);
        let mut found = Vec::new();
        while !left.is_empty() && found.len() + 1 < parts {
            let (word, after) = left.split_at(left.find(texts::is_space).unwrap_or(left.len()));
            found.push(Value::from(word));
            left = after.trim_start_matches(texts::is_space);
        }
        if !left.is_empty() {
            found.push(Value::from(left));
        }
        return found.into();
    };
    let found = text.splitn(parts, separator).map(Value::from);
    found.collect::<Vec<_>>().into()
}

/// Splits from the end, at most so many times.
fn rsplit(text: &str, separator: Option<&str>, times: Option<usize>) -> Value {
    let times = times.map_or(usize::MAX, |times| times.saturating_add(1));
    let mut parts: Vec<&str> = match separator {
        Some(separator) => text.rsplitn(times, separator).collect(),
        None => {
            let mut left = text.trim_end_matches(texts::is_space);
            let mut parts = Vec::new();
            while !left.is_empty() && parts.len() + 1 < times {
                let word = left.trim_end_matches(|char| !texts::is_space(char)).len();
                let (before, word) = left.split_at(word);
                parts.push(word);
                left = before.trim_end_matches(texts::is_space);
            }
            if !left.is_empty() {
                parts.push(left);
            }
            parts
        }
    };
    parts.reverse();
    Value::from_iter(parts.into_iter().map(Value::from))
}

fn splitlines(text: &str, keeps_ends: bool) -> Value {
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some((line, after)) = texts::first_line(rest) {
        lines.push(Value::from(if keeps_ends {
            line
        } else {
            texts::without_line_end(line)
        }));
        rest = after;
    }
    if !rest.is_empty() {
        lines.push(Value::from(rest));
    }
    lines.into()
}

fn zfill(text: &str, width: usize) -> String {
    let zeros = "0".repeat(width.min(MAX_WIDTH).saturating_sub(text.chars().count()));
    match text.strip_prefix(['-', '+']) {
        Some(digits) => format!("{}{zeros}{digits}", &text[..1]),
        None => zeros + text,
    }
}

fn expandtabs(text: &str, width: usize) -> String {
    let width = width.min(MAX_WIDTH);
    let mut expanded = String::new();
    let mut column = 0;
    for char in text.chars() {
        match char {
            '\t' => {
                let spaces = width.saturating_sub(column % width.max(1));
                expanded.extend(std::iter::repeat_n(' ', spaces));
                column += spaces;
            }
            '\n' | '\r' => {
                expanded.push(char);
                column = 0;
            }
            char => {
                expanded.push(char);
                column += 1;
            }
        }
    }
    expanded
}

/// A large letter after everything that is no letter, and small ones behind it.
fn title(text: &str) -> String {
    let is_cased = |char: char| char.is_lowercase() || char.is_uppercase();
    let mut titled = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(is_cased) {
        let (before, after) = rest.split_at(at);
        titled.push_str(before);
        let end = after.find(|char| !is_cased(char)).unwrap_or(after.len());
        let (word, after) = after.split_at(end);
        rest = after;
        let first = word.chars().next().map_or(0, char::len_utf8);
        let mut large = word[..first].chars().flat_map(char::to_uppercase);
        titled.extend(large.next());
        // What is one letter as a small one and several as a large one.
        titled.extend(large.flat_map(char::to_lowercase));
        // Of the whole word, because the last letter may depend on those before it.
        let small = word.to_lowercase();
        let start = word[..first].to_lowercase().len();
        titled.push_str(&small[start..]);
    }
    titled + rest
}

/// Floats are given to plain fields as Python writes them.
fn format(text: &str, args: &[Value]) -> Result<Value, Error> {
    let is_plain = !text.contains(':');
    let written = |value: &Value| {
        if number::is_float(value) && is_plain {
            python_text::str_of(value).into_owned().into()
        } else {
            value.clone()
        }
    };
    let args: Vec<Value> = args.iter().map(written).collect();
    formatting::format(FormatStyle::StrFormat, text, &args).map(Value::from)
}
