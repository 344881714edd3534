//! Methods of Python's texts and filters on texts that the template engine lacks, or has otherwise. Pure.

use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

pub(super) fn install(environment: &mut Environment<'_>) {
    environment.set_unknown_method_callback(method);
    environment.add_filter("indent", indent);
    environment.add_filter("first", |value: &Value| end(value, true));
    environment.add_filter("last", |value: &Value| end(value, false));
    environment.add_filter("escape", escape);
    environment.add_filter("e", escape);
    environment.add_filter("wordcount", |text: String| text.split_whitespace().count());
    environment.add_filter("center", |text: String, width: Option<usize>| {
        center(&text, width.unwrap_or(80))
    });
}

/// The values that a method returns, if it is one of these.
fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        return pycompat::unknown_method_callback(state, value, name, args);
    };
    let parts = |before: &str, separator: &str, after: &str| {
        Value::from_iter([before, separator, after].map(Value::from))
    };
    Ok(match name {
        "rsplit" => {
            let (separator, limit): (Option<&str>, Option<i64>) = from_args(args)?;
            rsplit(text, separator, limit)
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            text.strip_prefix(prefix).unwrap_or(text).into()
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            text.strip_suffix(suffix).unwrap_or(text).into()
        }
        "partition" => {
            let (separator,): (&str,) = from_args(args)?;
            match text.split_once(separator) {
                Some((before, after)) => parts(before, separator, after),
                None => parts(text, "", ""),
            }
        }
        "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            match text.rsplit_once(separator) {
                Some((before, after)) => parts(before, separator, after),
                None => parts("", "", text),
            }
        }
        "index" => {
            let (part,): (&str,) = from_args(args)?;
            let at = text
                .find(part)
                .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "substring not found"))?;
            text[..at].chars().count().into()
        }
        "zfill" => {
            let (width,): (usize,) = from_args(args)?;
            zfill(text, width).into()
        }
        _ => return pycompat::unknown_method_callback(state, value, name, args),
    })
}

/// Splits from the end, at most `limit` times.
fn rsplit(text: &str, separator: Option<&str>, limit: Option<i64>) -> Value {
    let times = limit.and_then(|limit| usize::try_from(limit).ok());
    let times = times.map_or(usize::MAX, |times| times.saturating_add(1));
    let mut parts: Vec<&str> = match separator {
        Some(separator) => text.rsplitn(times, separator).collect(),
        None => {
            let mut left = text.trim_end();
            let mut parts = Vec::new();
            while !left.is_empty() && parts.len() + 1 < times {
                let Some(at) = left.rfind(char::is_whitespace) else {
                    break;
                };
                let (before, after) = left.split_at(at);
                parts.push(after.trim_start());
                left = before.trim_end();
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

fn zfill(text: &str, width: usize) -> String {
    let zeros = "0".repeat(width.min(MAX_WIDTH).saturating_sub(text.chars().count()));
    match text.strip_prefix(['-', '+']) {
        Some(digits) => format!("{}{zeros}{digits}", &text[..1]),
        None => zeros + text,
    }
}

/// A template asks for no wider texts.
const MAX_WIDTH: usize = 4_096;

fn center(text: &str, width: usize) -> String {
    let room = width.min(MAX_WIDTH).saturating_sub(text.chars().count());
    // Python puts the odd space to the left where the width is odd.
    let left = room / 2 + (room & width & 1);
    " ".repeat(left) + text + &" ".repeat(room - left)
}

/// The first or the last item; of nothing it is undefined.
fn end(value: &Value, is_first: bool) -> Result<Value, Error> {
    if value.is_undefined() {
        return Ok(Value::UNDEFINED);
    }
    match is_first {
        true => minijinja::filters::first(value),
        false => minijinja::filters::last(value.clone()),
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
        let why = "only a text can be indented";
        return Err(Error::new(ErrorKind::InvalidOperation, why));
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
        let is_end = |char: char| {
            matches!(
                char,
                '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'
                    ..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}'
            )
        };
        let Some(at) = text.find(is_end) else {
            return Some(text);
        };
        let (line, after) = text.split_at(at);
        let length = match after.starts_with("\r\n") {
            true => 2,
            false => after.chars().next().map_or(0, char::len_utf8),
        };
        rest = Some(&after[length..]);
        Some(line)
    })
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
